// The boot plan: what each layer and tier of a generation needs, from which source, and why.
// Decided before any bulk read by a pure function of what the probes found, what is wanted, and
// what is known of the checkpoint.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "boot/layer_selection.h"
#include "format/manifest.h"
#include "store/store.h"

namespace hotplane {

// Where the base of a layer lives after the boot. On the CPU device `kDevice` is memory of our own
// and `kHost` the page cache.
enum class Residency : uint8_t { kInvalid = 0, kDevice, kHost, kAuto };
std::string_view ResidencyName(Residency residency);  // "device", "host", "auto"
std::optional<Residency> ParseResidency(std::string_view name);

enum class PlanAction : uint8_t {
  kInvalid = 0,
  kAttach,  // present, and stays where it is: only its header was read
  kRead,    // read from the store onto the device
  kMap,     // read from the store into the page cache and served from there
  kBuild,   // built from the checkpoint and published; a base is then used like kRead or kMap
  kSkip,    // not wanted: not opened
};
std::string_view PlanActionName(PlanAction action);  // "attach", "read", ...

// What is known of one layer file.
struct FileFacts {
  // kInvalid: not probed, because this boot does not want it; only its name was looked up.
  Presence presence = Presence::kInvalid;
  uint64_t file_bytes = 0;                   // 0 when there is none
  uint64_t data_bytes = 0;                   // of kPresent
  std::string reason;                        // of kDamaged and kUnreadable
  std::optional<Status> damage = {};         // the same in full, where it is known
  std::optional<Status> irreplaceable = {};  // of kDamaged: why nothing may be built in its place
};

// One per layer of the model, by ordinal; each file's facts at the place of its encoding in
// kEncodings.
using LayerFacts = std::array<FileFacts, kEncodings.size()>;
FileFacts& FactsOf(LayerFacts& layer, Encoding encoding);
const FileFacts& FactsOf(const LayerFacts& layer, Encoding encoding);

struct CheckpointFacts {
  std::string path;
  std::vector<uint64_t> source_bytes;  // by ordinal: what building this layer reads
};

struct PlanFacts {
  std::string directory;  // of the generation
  Manifest manifest;
  std::vector<LayerFacts> layers;
  bool store_writable = true;
  std::optional<CheckpointFacts> checkpoint;  // none: not at hand
};

// Of a device's free memory what bases may take: streams, tables, and granules that are not full
// take the rest.
uint64_t UsableDeviceBytes(uint64_t free_bytes);

struct PlanConfig {
  std::vector<uint32_t> layers;  // ordinals, ascending
  bool base = true;
  std::vector<uint32_t> delta_layers;  // ordinals whose delta tier is wanted; of `layers`
  // In order of preference: the first that is present is attached, else the first is built.
  std::vector<Encoding> delta_encodings = {Encoding::kDeltaQuintal, Encoding::kDeltaNibble};
  Residency base_residency = Residency::kAuto;
  std::map<uint32_t, Residency> base_residency_of;  // layers that differ from it
  uint64_t device_bytes = 0;                        // what the device has free
  uint64_t reserve_bytes = 0;                       // of it, kept for others
  std::optional<ExpertRange> experts;               // none: all
  // Host memory for delta records of the wanted delta layers, in layer order; 0: they stay on disk.
  uint64_t delta_pinned_bytes = 0;
  uint64_t host_bytes = UINT64_MAX;  // what the host has available, for pinned records
  bool device_is_host = true;        // the bases on the device take of the same memory
  bool keeps_built = false;  // bases that are built for the device stay there: not read back
  bool no_build = false;
  uint32_t shard_rank = 0;
  uint32_t shard_world = 1;
};

struct PlanEntry {
  uint32_t layer = 0;
  uint32_t model_index = 0;
  bool mtp = false;
  Encoding encoding = Encoding::kInvalid;  // of a delta tier nobody has: the preferred one
  PlanAction action = PlanAction::kInvalid;
  // Of a base that is used: kDevice or kHost; of a delta tier with pinned records: kHost.
  Residency residency = Residency::kInvalid;
  uint32_t pinned_experts = 0;  // of a delta tier, from the first wanted expert on
  std::string reason;
  uint64_t bytes_store = 0;       // read from the store
  uint64_t bytes_checkpoint = 0;  // read from the checkpoint; shared ones count at the base
  uint64_t bytes_built = 0;       // layer file to be written
  uint64_t bytes_kept = 0;     // of a base that is built: stays on the device instead of being read
  uint64_t bytes_skipped = 0;  // there, and not read
};

struct BootPlan {
  std::vector<PlanEntry> entries;  // base then delta of every layer of the model, by ordinal
  uint32_t layers_total = 0;       // wanted
  uint64_t bytes_store = 0;        // sums over the entries
  uint64_t bytes_checkpoint = 0;
  uint64_t bytes_built = 0;
  uint64_t bytes_kept = 0;
  uint64_t bytes_skipped = 0;
  uint64_t bytes_device = 0;  // resident after the boot
  uint64_t bytes_host = 0;
  uint64_t bytes_pinned = 0;        // of bytes_host, delta records
  uint64_t device_limit_bytes = 0;  // device memory without the reserve
  uint32_t shard_rank = 0;
  uint32_t shard_world = 1;
  std::vector<std::string> warnings;

  // REQUIRES a layer of the model. Two entries: base, then delta.
  const PlanEntry& Of(uint32_t layer, Tier tier) const;
  bool builds() const { return bytes_built > 0; }
};

// kUsage: experts, rank or world that the generation does not have, or less memory to pin delta
// records in than one takes. kData naming the layers: absent
// or damaged, and no checkpoint at hand or no_build; or naming what is in a file's place and not to
// be replaced. kSystem naming the file: a wanted one cannot
// be read, so nobody knows whether it is right; or a layer is to be built into a store that cannot
// be written. kCapacity, with the numbers: the bases that must be on the device do not fit there.
Result<BootPlan> PlanBoot(const PlanFacts& facts, const PlanConfig& config);

// The refusal to do without, or to replace, layer files that could not be looked at: `reason` of
// one of them, `what` all of them.
Status UnreadableFile(const Status& reason, std::string_view what);

// The plan as people read it: one line per run of layers that are treated alike, then the bytes by
// source.
std::string PlanTable(const BootPlan& plan);

// "0-2, 7, 43 (MTP)"
std::string LayerListText(const std::vector<uint32_t>& ordinals, const Manifest& manifest);

}  // namespace hotplane
