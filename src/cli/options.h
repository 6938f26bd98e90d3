// The command line, parsed: one plain struct per command.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "boot/executor.h"
#include "boot/plan.h"
#include "cli/environment.h"
#include "cli/meant.h"
#include "device/device.h"
#include "format/kinds.h"

namespace hotplane::cli {

enum class Command : uint8_t {
  kInvalid = 0,
  kBuild,
  kBoot,
  kWarm,
  kInspect,
  kVerify,
  kExport,
  kGc,
  kSynth,
  kDoctor,
  kReport,
  kFidelity,
  kImport,
};

struct CommonOptions {
  bool json = false;
  bool quiet = false;
  bool verbose = false;
  std::string isa;  // empty: the best this CPU has
};

struct Options {
  Command command = Command::kInvalid;
  CommonOptions common;
  std::vector<Setting> settings;  // which options the environment gave
  CommandLine line;               // as it was given, for advice

  std::string path;        // CHECKPOINT, DIR or FILE, the first positional argument
  std::string store;       // --store
  std::string source;      // verify --source
  bool complete = false;   // verify
  std::string generation;  // prefix
  std::string layers;
  std::vector<Encoding> encodings;  // build, synth: what --tiers and --delta come to
  std::vector<Tier> tiers;          // warm
  ZeroMode zero_mode = ZeroMode::kAuto;
  size_t workers = 0;
  uint64_t staging_limit_bytes = 0;
  bool no_lock = false;
  double stall_seconds = 120;  // 0: wait for ever
  bool map = false;
  bool verify = true;
  CacheMode cache = CacheMode::kAuto;
  bool dry_run = false;
  std::string trace;  // build, boot: file to write; report: file to read; empty: none

  std::string checkpoint;  // boot: path; empty: none at hand
  bool no_build = false;
  std::optional<ZeroMode> zero_mode_given;  // none: the default
  size_t batch = 12;
  std::vector<Encoding> delta_encodings;  // boot: in order of preference
  std::string delta_layers;
  std::string no_delta_layers;
  Residency base_residency = Residency::kAuto;
  DeviceName device;          // build, boot, doctor
  uint64_t memory_bytes = 0;  // 0: what the device has available
  uint64_t reserve_bytes = 0;
  uint64_t pin_delta_bytes = 0;
  std::optional<ExpertRange> experts;
  uint32_t tp = 1;                // build: ranks to cut the experts for
  std::optional<uint32_t> rank;   // boot, export, warm
  std::optional<uint32_t> world;  // boot

  std::optional<uint32_t> layer;  // export
  std::string part;
  std::optional<uint32_t> expert;
  std::string out;  // also of report
  bool encoded = false;
  std::string hf;         // export: folder to write; empty: one part
  std::string precision;  // export: base, fp4, or mixed:FILE

  std::string planes_cache;     // import: folder to read; export: folder to write
  std::string key;              // import: prefix
  std::string checkpoint_id;    // export
  std::string layers_geometry;  // import
  std::string mtp_layers;
  std::string config;
  bool move = false;

  std::string geometry;  // synth
  uint32_t layer_count = 1;
  uint32_t mtp_count = 0;
  std::string checkpoint_format;  // empty: a store
  uint64_t seed = 1;
  uint64_t shard_bytes = 0;  // also of export
};

// What parsing ended in: options to run with, wrong usage, or a text to print (help, version).
struct ParseOutcome {
  std::optional<Options> options;
  std::optional<Status> error;
  std::string text;
  std::vector<std::string> notes;  // which environment variable set what; for the log
  std::string warning;             // of variables that nothing reads; empty: there are none
};

// Options have environment twins HOTPLANE_<OPTION>; VLLM_MOE_W2_BUILD_WORKERS,
// VLLM_MOE_W2_BUILD_BATCH_SIZE, VLLM_MOE_W2_ZERO_MODE and VLLM_MOE_W2_CKPT_ID are honoured where
// neither the option nor its twin is given; empty variables count as not set. Unknown and repeated
// options are errors, and so are values that an option does not take, with the name of the variable
// where one gave the value.
ParseOutcome ParseCommandLine(int argc, char** argv);

}  // namespace hotplane::cli
