#include "cli/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/check.h"
#include "base/format_text.h"
#include "base/number_text.h"
#include "base/units.h"
#include "cli/nearest_text.h"
#include "cli/option_values.h"
#include "format/layer_file.h"

namespace hotplane::cli {
namespace {

// Layers are cut along a dimension of at most 2^20 into multiples of 64.
constexpr uint32_t kRanksMax = 1u << 14;
static_assert(kRanksMax == kDimensionMax / kDimensionMultiple);

// Texts as they came; turned into Options after parsing, with our own messages.
struct Raw {
  std::string tiers;
  std::string delta;      // empty: quintal; of a boot either encoding that is there
  std::string zero_mode;  // empty: auto; of a boot the generation's
  std::string base = "auto";
  std::string device = "cpu";
  std::string memory = "auto";
  std::string reserve = "0";
  std::string pin_delta = "0";
  std::string experts;
  std::string staging_limit = "auto";
  std::string verify = "all";
  std::string cache = "auto";
  std::string shard_size = "4G";
  std::string hf_shard_size = "5G";
};

class Parser {
 public:
  Parser();
  ParseOutcome Parse(int argc, char** argv);

 private:
  CLI::App* AddCommand(Command command, const char* name, const char* description,
                       const char* example);
  void AddBuild();
  void AddBoot();
  void AddPlaces(CLI::App* app);
  void AddWarm();
  void AddInspect();
  void AddVerify();
  void AddExport();
  CLI::Option* AddPlanesCacheExport(CLI::App* app);
  void AddGc();
  void AddSynth();
  void AddDoctor();
  void AddReport();
  void AddFidelity();
  void AddImport();
  void AddTrace(CLI::App* app);
  void AddDevice(CLI::App* app, const char* description);
  void AddGeneration(CLI::App* app);
  void AddRank(CLI::App* app, const char* description);
  void AddWorkers(CLI::App* app);
  void AddStallTimeout(CLI::App* app);
  void AddBuilding(CLI::App* app, const char* delta_default);
  CLI::Option* Takes(CLI::Option* option, const Accepted& accepted);
  std::vector<std::string> Variables() const;
  void ReadEnvironment(int argc, char** argv, std::vector<std::string>* notes);
  const CLI::App* Given(int argc, char** argv) const;
  const Setting* SettingFor(const std::string& option) const;
  Status RefusedValue() const;
  Result<void> Finish();
  std::string FirstUnknown(const CLI::App* given, int argc, char** argv) const;
  std::string DeltaOptionsGiven() const;
  Result<void> FinishTiers();
  Result<void> FinishBoot();
  Result<void> FinishExport();
  Result<void> FinishImport();

  CLI::App app_{
      "hotplane quantizes the routed experts of a Mixture-of-Experts checkpoint once and "
      "boots them at copy speed, every byte verified."};
  std::vector<std::pair<Command, CLI::App*>> commands_;
  Options options_;
  Raw raw_;

  struct Refused {
    const CLI::Option* option;
    std::string value;
    std::string expected;
  };
  std::optional<Refused> refused_;  // the first value that its option does not take
};

CLI::Option* Parser::Takes(CLI::Option* option, const Accepted& accepted) {
  const auto check = [this, option, accepted](const std::string& value) {
    if (accepted.fits(value)) return std::string();
    if (!refused_) refused_ = Refused{option, value, accepted.expected};
    return accepted.expected;
  };
  return option->check(CLI::Validator(check, ""));
}

CLI::App* Parser::AddCommand(Command command, const char* name, const char* description,
                             const char* example) {
  CLI::App* const app = app_.add_subcommand(name, description);
  app->footer(
      Text("\nExample:\n  {}\n\nExit codes: 0 done, 1 the system failed us, 2 wrong usage, "
           "3 data is corrupt or does not match,\n  4 does not fit, 130/143 interrupted",
           example));
  app->add_flag("--json", options_.common.json, "One JSON object on stdout, logs on stderr");
  app->add_flag("-q,--quiet", options_.common.quiet, "Errors and warnings only");
  app->add_flag("-v,--verbose", options_.common.verbose, "Say more");
  Takes(app->add_option("--isa", options_.common.isa,
                        "Force an instruction set; `hotplane doctor` lists them")
            ->envname("HOTPLANE_ISA"),
        InstructionSet());
  commands_.emplace_back(command, app);
  return app;
}

void Parser::AddGeneration(CLI::App* app) {
  app->add_option("--generation", options_.generation,
                  "Prefix of the generation, where the store has several")
      ->envname("HOTPLANE_GENERATION");
}

void Parser::AddRank(CLI::App* app, const char* description) {
  Takes(app->add_option("--rank", options_.rank, description)->envname("HOTPLANE_RANK"),
        DecimalFrom(0, kRanksMax - 1));
}

void Parser::AddWorkers(CLI::App* app) {
  Takes(app->add_option("--workers", options_.workers, "Threads; 0: the CPUs this process may use")
            ->envname("HOTPLANE_WORKERS"),
        DecimalFrom(0, 1024));
}

void Parser::AddStallTimeout(CLI::App* app) {
  Takes(app->add_option("--stall-timeout", options_.stall_seconds,
                        "Seconds without progress after which it gives up; 0: never")
            ->capture_default_str()
            ->envname("HOTPLANE_STALL_TIMEOUT"),
        Seconds());
}

void Parser::AddTrace(CLI::App* app) {
  app->add_option("--trace", options_.trace,
                  "Write a timeline for chrome://tracing, Perfetto and `hotplane report`");
}

void Parser::AddDevice(CLI::App* app, const char* description) {
  Takes(app->add_option("--device", raw_.device, description)
            ->capture_default_str()
            ->envname("HOTPLANE_DEVICE"),
        Device());
}

void Parser::AddBuild() {
  CLI::App* const app =
      AddCommand(Command::kBuild, "build", "Quantize a checkpoint's experts into a store",
                 "hotplane build /models/DeepSeek-V4-Flash --store /store");
  app->add_option("CHECKPOINT", options_.path, "Folder, or one .safetensors file")->required();
  app->add_option("--store", options_.store, "Directory of the store; created when missing")
      ->required()
      ->envname("HOTPLANE_STORE");
  app->add_option("--layers", options_.layers, "A-B, a list such as 0,4-7, main, or mtp");
  Takes(app->add_option("--tiers", raw_.tiers, "Tiers to build: base, delta or base,delta")
            ->default_str("base,delta")
            ->envname("HOTPLANE_TIERS"),
        TierList());
  Takes(app->add_option("--tp", options_.tp, "Cut the experts into shards for so many ranks")
            ->capture_default_str()
            ->envname("HOTPLANE_TP"),
        DecimalFrom(1, kRanksMax));
  AddDevice(app, "Where matrices are quantized: cpu, cuda, or cuda:N");
  AddBuilding(app, "quintal");
}

// What `build` takes, and `boot` for what it may have to build.
void Parser::AddBuilding(CLI::App* app, const char* delta_default) {
  Takes(app->add_option("--delta", raw_.delta, "Encoding of the delta tier: quintal or nibble")
            ->default_str(delta_default)
            ->envname("HOTPLANE_DELTA"),
        OneOf({"quintal", "nibble"}));
  Takes(app->add_option("--zero-mode", raw_.zero_mode, "Sign of exact zeros: auto, sign or alt")
            ->default_str("auto")
            ->envname("HOTPLANE_ZERO_MODE"),
        OneOf({"auto", "sign", "alt"}));
  AddWorkers(app);
  Takes(app->add_option("--batch", options_.batch, "Layers that begin to be built together")
            ->capture_default_str()
            ->envname("HOTPLANE_BATCH"),
        DecimalFrom(1, 100000));
  Takes(app->add_option("--staging-limit", raw_.staging_limit,
                        "Memory for tensors in flight, such as 512M or 2G")
            ->capture_default_str()
            ->envname("HOTPLANE_STAGING_LIMIT"),
        OrAuto(SizeAboveZero()));
  AddStallTimeout(app);
  app->add_flag("--no-lock", options_.no_lock,
                "Build without file locks, where the file system refuses them");
  AddTrace(app);
}

void Parser::AddBoot() {
  CLI::App* const app = AddCommand(
      Command::kBoot, "boot", "Boot a store, building what is missing; report; release the memory",
      "hotplane boot /store --checkpoint /models/DeepSeek-V4-Flash");
  app->add_option("DIR", options_.path, "The store")->required();
  CLI::Option* const checkpoint =
      app->add_option("--checkpoint", options_.checkpoint,
                      "Build from it what the store lacks; not opened when nothing is");
  app->add_flag("--no-build", options_.no_build, "Refuse instead of building")
      ->excludes(checkpoint);
  AddGeneration(app);
  app->add_option("--layers", options_.layers, "A-B, a list such as 0,4-7, main, or mtp");
  AddRank(app, "Rank of a sharded store; of torchrun, MPI or Slurm where not given");
  Takes(app->add_option("--world", options_.world, "Number of ranks; of the store where not given")
            ->envname("HOTPLANE_WORLD"),
        DecimalFrom(1, kRanksMax));
  Takes(app->add_option("--experts", raw_.experts, "A-B: only these experts of each layer"),
        ExpertRangeText());
  Takes(app->add_option("--tiers", raw_.tiers, "Tiers wanted: base, delta or base,delta")
            ->default_str("base,delta with --checkpoint or an option of the delta tier, else base")
            ->envname("HOTPLANE_TIERS"),
        TierList());
  app->add_option("--delta-layers", options_.delta_layers,
                  "Layers whose delta tier is wanted; all of them otherwise");
  app->add_option("--no-delta-layers", options_.no_delta_layers,
                  "Layers whose delta tier is not wanted");
  AddPlaces(app);
  Takes(app->add_option("--verify", raw_.verify, "Which chunks to verify: all or none")
            ->capture_default_str(),
        OneOf({"all", "none"}));
  app->add_flag("--dry-run", options_.dry_run, "Print the plan; read no data, change nothing");
  AddBuilding(app, "whichever is there, else quintal");
}

// Where a boot puts what it reads.
void Parser::AddPlaces(CLI::App* app) {
  Takes(app->add_option("--pin-delta", raw_.pin_delta,
                        "Cache of delta records in host memory, filled by the boot; 0: none")
            ->capture_default_str()
            ->envname("HOTPLANE_PIN_DELTA"),
        Size());
  AddDevice(app, "Where the base lands: cpu, cuda, or cuda:N");
  Takes(app->add_option(
               "--base", raw_.base,
               "Where the base lives: device, host, or auto (the host takes what does not fit)")
            ->capture_default_str(),
        OneOf({"device", "host", "auto"}));
  Takes(app->add_option("--memory", raw_.memory, "Device memory to use")->capture_default_str(),
        OrAuto(SizeAboveZero()));
  Takes(app->add_option("--reserve", raw_.reserve, "Of it, how much stays free")
            ->capture_default_str(),
        OrAuto(Size()));
  app->add_flag("--map", options_.map, "Serve from the page cache: --base host");
  Takes(app->add_option(
               "--cache", raw_.cache,
               "Cold layers: keep them in the page cache, bypass it, or auto: keep what fits")
            ->capture_default_str()
            ->envname("HOTPLANE_CACHE"),
        OneOf({"keep", "bypass", "auto"}));
}

void Parser::AddWarm() {
  CLI::App* const app = AddCommand(Command::kWarm, "warm", "Read a store into the page cache",
                                   "hotplane warm /store --tiers base");
  app->add_option("DIR", options_.path, "The store")->required();
  AddGeneration(app);
  AddRank(app, "Of a sharded store only this rank's files; all otherwise");
  Takes(app->add_option("--tiers", raw_.tiers, "Tiers to read: base, delta or base,delta")
            ->default_str("base"),
        TierList());
  AddWorkers(app);
}

void Parser::AddInspect() {
  CLI::App* const app =
      AddCommand(Command::kInspect, "inspect",
                 "Tell what a store, a file of it or a checkpoint is; never writes",
                 "hotplane inspect /store");
  app->add_option("PATH", options_.path, "Store, any file of one, or checkpoint")->required();
  AddGeneration(app);
}

void Parser::AddVerify() {
  CLI::App* const app =
      AddCommand(Command::kVerify, "verify", "Check every byte of a store, naming every bad chunk",
                 "hotplane verify /store --source /models/DeepSeek-V4-Flash");
  app->add_option("DIR", options_.path, "The store")->required();
  app->add_option("--source", options_.source,
                  "Also prove that the store was built from this checkpoint");
  CLI::Option* const complete = app->add_flag("--complete", options_.complete,
                                              "Fail when a layer of the model lacks a file, too");
  app->add_option("--layers", options_.layers,
                  "With --complete: the layers that must be there; all of them otherwise")
      ->needs(complete);
  Takes(app->add_option("--tiers", raw_.tiers,
                        "With --complete: what they must have: base, delta or base,delta")
            ->default_str("base,delta")
            ->needs(complete),
        TierList());
  AddGeneration(app);
  AddWorkers(app);
}

void Parser::AddExport() {
  CLI::App* const app =
      AddCommand(Command::kExport, "export",
                 "Write one part of a layer as raw bytes, the model as a Hugging Face folder, or "
                 "a planes cache of vLLM-MoET",
                 "hotplane export /store --layer 3 --part planes13 --out planes13.bin\n"
                 "  hotplane export /store --planes-cache /planes --checkpoint-id my-model\n"
                 "  hotplane export /store --hf /out --checkpoint /models/DeepSeek-V4-Flash "
                 "--precision fp4");
  app->add_option("DIR", options_.path, "The store")->required();
  AddGeneration(app);
  AddRank(app, "Rank of a sharded store; of torchrun, MPI or Slurm where not given");
  CLI::Option* const layer =
      Takes(app->add_option("--layer", options_.layer, "Ordinal of the layer"),
            DecimalFrom(0, UINT32_MAX));
  CLI::Option* const part = app->add_option(
      "--part", options_.part, "planes13, sc13, planes2, sc2, bias13, bias2, fp13 or fp2");
  CLI::Option* const expert = Takes(
      app->add_option("--expert", options_.expert, "One expert; all of them in order otherwise"),
      DecimalFrom(0, UINT32_MAX));
  CLI::Option* const out = app->add_option("--out", options_.out, "File to write");
  CLI::Option* const encoded = app->add_flag("--encoded", options_.encoded,
                                             "fp parts as stored instead of as nibble planes");
  CLI::Option* const hf =
      app->add_option("--hf", options_.hf, "Folder to write the whole model to, experts as BF16");
  CLI::Option* const checkpoint = app->add_option(
      "--checkpoint", options_.checkpoint, "What the store was built from: all but the experts");
  CLI::Option* const precision =
      Takes(app->add_option("--precision", options_.precision, "base, fp4, or mixed:MAP.json"),
            Precision());
  CLI::Option* const shard_size =
      Takes(app->add_option("--shard-size", raw_.hf_shard_size, "Largest file of the folder")
                ->capture_default_str(),
            SizeAboveZero());
  AddWorkers(app);
  for (CLI::Option* option : {checkpoint, precision, shard_size}) option->needs(hf);
  hf->needs(checkpoint)->needs(precision);
  for (CLI::Option* option : {layer, part, expert, out, encoded}) hf->excludes(option);
  CLI::Option* const cache = AddPlanesCacheExport(app);
  for (CLI::Option* option : {layer, part, expert, out, encoded, hf}) cache->excludes(option);
}

CLI::Option* Parser::AddPlanesCacheExport(CLI::App* app) {
  CLI::Option* const cache = app->add_option("--planes-cache", options_.planes_cache,
                                             "Folder of a planes cache of vLLM-MoET to write to");
  app->add_option("--checkpoint-id", options_.checkpoint_id,
                  "What vLLM-MoET calls its checkpoint; as the store was imported where not given")
      ->envname("HOTPLANE_CHECKPOINT_ID");
  Takes(app->add_option("--tiers", raw_.tiers, "Of a planes cache: base,delta or base")
            ->default_str("base,delta")
            ->needs(cache),
        OneOf({"base,delta", "delta,base", "base"}));
  Takes(app->add_option("--delta", raw_.delta, "FP4 of a planes cache: quintal or nibble")
            ->default_str("as it is stored")
            ->needs(cache),
        OneOf({"quintal", "nibble"}));
  return cache;
}

void Parser::AddGc() {
  CLI::App* const app = AddCommand(Command::kGc, "gc",
                                   "Remove leftovers of interrupted builds, or a whole generation",
                                   "hotplane gc /store");
  app->add_option("DIR", options_.path, "The store")->required();
  app->add_option("--generation", options_.generation, "Remove this generation, unless in use");
  app->add_flag("--dry-run", options_.dry_run, "Only tell what would be removed");
}

void Parser::AddSynth() {
  CLI::App* const app = AddCommand(Command::kSynth, "synth",
                                   "Make a store, or a checkpoint, of seeded random experts",
                                   "hotplane synth /tmp/store --geometry ds4-flash --layers 4");
  app->add_option("DIR", options_.path, "Directory to write")->required();
  app->add_option("--geometry", options_.geometry,
                  "ds4-flash, glm-5.2, kimi-k2, gpt-oss-120b, or E,H,I")
      ->required();
  Takes(app->add_option("--layers", options_.layer_count, "Number of MoE layers")->required(),
        DecimalFrom(1, 1000));
  CLI::Option* const tiers =
      Takes(app->add_option("--tiers", raw_.tiers, "base,delta; of a store")->default_str("base"),
            TierList());
  CLI::Option* const delta =
      Takes(app->add_option("--delta", raw_.delta, "Encoding of the delta tier: quintal or nibble")
                ->default_str("quintal"),
            OneOf({"quintal", "nibble"}));
  CLI::Option* const checkpoint =
      Takes(app->add_option("--checkpoint", options_.checkpoint_format,
                            "Write a checkpoint instead of a store: mxfp4, nvfp4, fp8 or bf16"),
            OneOf({"mxfp4", "nvfp4", "fp8", "bf16"}));
  Takes(app->add_option("--mtp", options_.mtp_count, "MTP layers of a checkpoint, further ones")
            ->needs(checkpoint),
        DecimalFrom(0, 16));
  Takes(app->add_option("--shard-size", raw_.shard_size, "Largest checkpoint file")
            ->needs(checkpoint)
            ->capture_default_str(),
        Size());
  checkpoint->excludes(tiers)->excludes(delta);
  Takes(app->add_option("--seed", options_.seed, "Seed of the random bytes")->capture_default_str(),
        DecimalFrom(0, UINT64_MAX));
  AddWorkers(app);
}

void Parser::AddDoctor() {
  CLI::App* const app =
      AddCommand(Command::kDoctor, "doctor",
                 "Say what this machine, and a store on it, will do: OK, WARN and FAIL lines",
                 "hotplane doctor --store /store");
  app->add_option("--store", options_.path, "A store to look at")->envname("HOTPLANE_STORE");
  AddDevice(app, "Also measure this one: cuda, or cuda:N");
  AddGeneration(app);
  AddWorkers(app);
}

void Parser::AddReport() {
  CLI::App* const app =
      AddCommand(Command::kReport, "report",
                 "Draw what boot, build, fidelity or tinylm eval printed with --json as one page",
                 "hotplane boot /store --trace t.json --json > run.json\n"
                 "  hotplane report run.json --trace t.json -o boot.html");
  app->add_option("RUN.json", options_.path,
                  "What boot, build, fidelity or tinylm eval printed with --json")
      ->required();
  app->add_option("-o,--out", options_.out, "HTML file to write")->required();
  app->add_option("--trace", options_.trace, "What the same run wrote with --trace");
}

void Parser::AddFidelity() {
  CLI::App* const app =
      AddCommand(Command::kFidelity, "fidelity",
                 "Measure how far a store's weights are from the checkpoint's, by layer and tier",
                 "hotplane fidelity /models/DeepSeek-V4-Flash --store /store");
  app->add_option("CHECKPOINT", options_.path, "What the store was built from")->required();
  app->add_option("--store", options_.store, "The store")->required()->envname("HOTPLANE_STORE");
  AddGeneration(app);
  app->add_option("--layers", options_.layers, "A-B, a list such as 0,4-7, main, or mtp");
  AddWorkers(app);
}

void Parser::AddImport() {
  CLI::App* const app = AddCommand(
      Command::kImport, "import", "Take a planes cache of vLLM-MoET into a store",
      "hotplane import --planes-cache /planes --layers-geometry ds4-flash --mtp-layers 43 "
      "--config /models/DeepSeek-V4-Flash /store");
  app->add_option("STORE", options_.path, "Directory of the store; created when missing")
      ->required();
  app->add_option("--planes-cache", options_.planes_cache,
                  "The folder that VLLM_MOE_W2_PLANES_CACHE names")
      ->required();
  app->add_option("--layers-geometry", options_.layers_geometry,
                  "E,H,I or a name as of `synth`, of all layers; or A-B:E,H,I;C:E,H,I")
      ->required();
  app->add_option("--mtp-layers", options_.mtp_layers, "Numbers of the MTP layers: N or A-B");
  app->add_option("--config", options_.config,
                  "The model's config.json, or its folder: activation, top-k, and to compare with");
  app->add_option("--key", options_.key, "Prefix of a KEY, where the cache has several models");
  AddRank(app, "Import this rank's folder alone; all of them otherwise");
  Takes(app->add_option("--tiers", raw_.tiers,
                        "base,delta, or base: leave the FP4 files where they are")
            ->default_str("base,delta"),
        OneOf({"base,delta", "delta,base", "base"}));
  app->add_flag("--move", options_.move,
                "Remove each layer's files from the cache when its bytes in the store are proved");
  AddWorkers(app);
  AddStallTimeout(app);
  app->add_flag("--no-lock", options_.no_lock,
                "Import without file locks, where the file system refuses them");
}

Parser::Parser() {
  app_.require_subcommand(1);
  app_.set_version_flag("--version", std::string("hotplane ") + HOTPLANE_VERSION_TEXT);
  AddBuild();
  AddBoot();
  AddWarm();
  AddInspect();
  AddVerify();
  AddExport();
  AddGc();
  AddSynth();
  AddDoctor();
  AddReport();
  AddFidelity();
  AddImport();
}

// "--delta, --pin-delta"
std::string Parser::DeltaOptionsGiven() const {
  std::string text;
  for (const auto& [name, given] : {std::pair{"--delta", !raw_.delta.empty()},
                                    {"--pin-delta", options_.pin_delta_bytes > 0},
                                    {"--delta-layers", !options_.delta_layers.empty()},
                                    {"--no-delta-layers", !options_.no_delta_layers.empty()}})
    if (given) text += Text("{}{}", text.empty() ? "" : ", ", name);
  return text;
}

Result<void> Parser::FinishTiers() {
  // A boot with a checkpoint at hand completes the store as a build would.
  const bool both = options_.command == Command::kBuild || options_.command == Command::kImport ||
                    options_.command == Command::kVerify || !options_.planes_cache.empty() ||
                    (options_.command == Command::kBoot && !options_.checkpoint.empty());
  // Who says something of the delta tier wants it.
  HP_ASSIGN(options_.pin_delta_bytes, ParseSize(raw_.pin_delta));
  const std::string delta_options = DeltaOptionsGiven();
  const bool delta_named = !delta_options.empty();
  std::string_view rest = raw_.tiers;
  if (raw_.tiers.empty()) rest = both || delta_named ? "base,delta" : "base";
  options_.delta_encodings = {Encoding::kDeltaQuintal, Encoding::kDeltaNibble};
  if (raw_.delta.empty()) {
    raw_.delta = "quintal";
  } else {
    options_.delta_encodings = {raw_.delta == "nibble" ? Encoding::kDeltaNibble
                                                       : Encoding::kDeltaQuintal};
  }
  while (true) {
    const size_t comma = rest.find(',');
    const std::string_view word = rest.substr(0, comma);
    HP_CHECK(word == "base" || word == "delta");  // every --tiers has its Takes
    const Tier tier = word == "base" ? Tier::kBase : Tier::kDelta;
    options_.tiers.push_back(tier);
    options_.encodings.push_back(tier == Tier::kBase       ? Encoding::kBase
                                 : raw_.delta == "quintal" ? Encoding::kDeltaQuintal
                                                           : Encoding::kDeltaNibble);
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  const bool has_delta =
      std::find(options_.tiers.begin(), options_.tiers.end(), Tier::kDelta) != options_.tiers.end();
  if (options_.command == Command::kBoot && delta_named && !has_delta)
    return Fail(Status::Usage("options of the delta tier are given, and it is not wanted")
                    .Expected("no " + delta_options)
                    .Found(Text("--tiers {}", raw_.tiers)));
  return {};
}

Result<void> Parser::FinishBoot() {
  HP_ASSIGN(options_.device, ParseDeviceName(raw_.device));
  options_.base_residency = ParseResidency(raw_.base).value_or(Residency::kAuto);
  if (raw_.memory != "auto") {
    HP_ASSIGN(options_.memory_bytes, ParseSize(raw_.memory));
  }
  if (raw_.reserve != "auto") {
    HP_ASSIGN(options_.reserve_bytes, ParseSize(raw_.reserve));
  }
  options_.verify = raw_.verify == "all";
  options_.cache = raw_.cache == "keep"     ? CacheMode::kKeep
                   : raw_.cache == "bypass" ? CacheMode::kBypass
                                            : CacheMode::kAuto;
  if (raw_.experts.empty()) return {};
  HP_ASSIGN(options_.experts, ParseExpertRange(raw_.experts));
  return {};
}

Result<void> Parser::FinishExport() {
  const bool hf = !options_.hf.empty();
  HP_ASSIGN(options_.shard_bytes, ParseSize(hf ? raw_.hf_shard_size : raw_.shard_size));
  if (options_.command != Command::kExport) return {};
  if (!options_.planes_cache.empty()) return {};
  if (!options_.checkpoint_id.empty() && SettingFor("--checkpoint-id") == nullptr)
    return Fail(Status::Usage("--checkpoint-id requires --planes-cache"));
  if (!hf && (!options_.layer || options_.part.empty() || options_.out.empty()))
    return Fail(Status::Usage("`export` is not told what to write")
                    .Expected("--layer, --part and --out for a part, --hf with --checkpoint and "
                              "--precision for a model, or --planes-cache")
                    .Advice("`hotplane export --help` has an example of each"));
  return {};
}

Result<void> Parser::FinishImport() {
  if (options_.command != Command::kImport) return {};
  if (options_.move && options_.tiers.size() == 1)
    return Fail(Status::Usage("--move with --tiers base would lose the FP4 files")
                    .Advice("import without --move, or both tiers"));
  return {};
}

// Each value is one that its option takes.
Result<void> Parser::Finish() {
  HP_TRY(FinishTiers());
  if (!raw_.zero_mode.empty()) {
    options_.zero_mode_given = ParseZeroMode(raw_.zero_mode);
    options_.zero_mode = options_.zero_mode_given.value_or(ZeroMode::kAuto);
  }
  HP_TRY(FinishBoot());
  if (raw_.staging_limit != "auto") {
    HP_ASSIGN(options_.staging_limit_bytes, ParseSize(raw_.staging_limit));
  }
  HP_TRY(FinishExport());
  HP_TRY(FinishImport());
  if (options_.path.empty() && options_.command != Command::kDoctor)
    return Fail(Status::Usage("the path is empty"));
  return {};
}

// An unset shell variable makes an empty value, and a repeated option a choice: neither is guessed
// at.
std::optional<Status> RefuseEmptyAndRepeated(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    if (option->count() > 1)
      return Status::Usage(Text("{} is given {} times", option->get_name(), option->count()))
          .Expected("once");
    for (const std::string& value : option->results())
      if (value.empty()) return Status::Usage(Text("{} is empty", option->get_name()));
  }
  return std::nullopt;
}

// Whether the words of the command line give the option: "--workers 2" or "--workers=2".
bool Gives(int argc, char** argv, const std::string& option) {
  return std::any_of(argv + 1, argv + argc, [&](const std::string_view word) {
    return word == option || word.starts_with(option + "=");
  });
}

std::vector<std::string> Parser::Variables() const {
  std::vector<std::string> names;
  for (const auto& [command, app] : commands_)
    for (const CLI::Option* option : app->get_options())
      if (const std::string name = option->get_envname(); !name.empty()) names.push_back(name);
  return names;
}

// Commands share the variables that their options set, and the parser reads the environment for all
// commands: a variable would be taken for an option of a command that was not given, and win over
// the option that was.
void Parser::ReadEnvironment(int argc, char** argv, std::vector<std::string>* notes) {
  const CLI::App* const given = Given(argc, argv);
  for (const auto& [command, app] : commands_) {
    for (CLI::Option* option : app->get_options()) {
      if (app != given) option->envname("");
      const std::string variable = option->get_envname();
      const std::string name = option->get_name();
      if (variable.empty() || Gives(argc, argv, name)) continue;
      for (const Setting& setting : SettingOf(name, variable, notes)) {
        setenv(variable.c_str(), setting.value.c_str(), 1);
        notes->push_back(Describe(setting));
        options_.settings.push_back(setting);
      }
    }
  }
}

// The command that the first word which is no option names; null when it names none.
const CLI::App* Parser::Given(int argc, char** argv) const {
  char** const word =
      std::find_if(argv + 1, argv + argc, [](const char* each) { return each[0] != '-'; });
  if (word == argv + argc) return nullptr;
  for (const auto& [command, app] : commands_)
    if (app->get_name() == *word) return app;
  return nullptr;
}

// The words after the command's name. An option that the command does not have takes the next word
// for its value where its name is one of a path.
CommandLine LineOf(const CLI::App& app, int argc, char** argv) {
  CommandLine line{.command = app.get_name(), .words = {}};
  int i = static_cast<int>(std::find(argv, argv + argc, line.command) - argv) + 1;
  bool only_arguments = false;
  for (; i < argc; ++i) {
    std::string text = argv[i];
    if (only_arguments || text.size() < 2 || text[0] != '-') {
      line.words.push_back({.option = "", .value = text});
      continue;
    }
    if (text == "--") {
      only_arguments = true;
      continue;
    }
    const size_t equals = text.find('=');
    Word word{.option = text.substr(0, equals), .value = ""};
    const CLI::Option* const option = app.get_option_no_throw(word.option);
    word.known = option != nullptr;
    word.valued = equals != std::string::npos ||
                  (option == nullptr ? NamesAPath(word.option) : option->get_expected_max() > 0);
    if (equals != std::string::npos) {
      word.value = text.substr(equals + 1);
    } else if (word.valued && i + 1 < argc) {
      word.value = argv[++i];
    }
    line.words.push_back(std::move(word));
  }
  return line;
}

// What the environment gave for the option; null when it is not from there.
const Setting* Parser::SettingFor(const std::string& option) const {
  for (const Setting& setting : options_.settings)
    if (setting.option == option) return &setting;
  return nullptr;
}

// What was wrong with a value: of an option, or of the variable that stands for it.
Status Parser::RefusedValue() const {
  const auto& [option, value, expected] = *refused_;
  const std::string name = option->get_name();
  if (const Setting* const setting = SettingFor(name)) return RefusedSetting(*setting, expected);
  if (value.empty()) return Status::Usage(Text("{} is empty", name)).Expected(expected);
  return Status::Usage(Text("{} {}", name, value)).Expected(expected).Found(Text("\"{}\"", value));
}

// The first word that is no command or option of ours, with the nearest that is: it explains all
// that is found missing because of it. Empty: every word is known.
std::string Parser::FirstUnknown(const CLI::App* given, int argc, char** argv) const {
  std::vector<std::string> known;
  if (given == nullptr) {
    if (argc < 2 || argv[1][0] == '-') return "";
    for (const auto& [id, app] : commands_) known.push_back(app->get_name());
    return Text("there is no command {}{}", argv[1], NearestText(argv[1], known));
  }
  for (const CLI::Option* option : given->get_options())
    for (const std::string& name : option->get_lnames()) known.push_back("--" + name);
  for (int i = 2; i < argc && std::string_view(argv[i]) != "--"; ++i) {
    const std::string word = std::string(argv[i]).substr(0, std::string(argv[i]).find('='));
    if (!word.starts_with("--") || std::find(known.begin(), known.end(), word) != known.end())
      continue;
    return Text("`{}` has no option {}{}", given->get_name(), word, NearestText(word, known));
  }
  return "";
}

ParseOutcome Parser::Parse(int argc, char** argv) {
  ParseOutcome outcome;
  outcome.warning = UnknownVariables(Variables());
  ReadEnvironment(argc, argv, &outcome.notes);
  try {
    app_.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    outcome.text = app_.help();
    return outcome;
  } catch (const CLI::CallForVersion& version) {
    outcome.text = version.what();
    return outcome;
  } catch (const CLI::ParseError& error) {
    if (refused_) {
      outcome.error = RefusedValue();
      return outcome;
    }
    const CLI::App* const given = Given(argc, argv);
    if (given != nullptr) outcome.error = MisplacedPath(LineOf(*given, argc, argv));
    if (outcome.error) return outcome;
    const std::string unknown = FirstUnknown(given, argc, argv);
    outcome.error = Status::Usage(unknown.empty() ? error.what() : unknown)
                        .Advice(Text("`hotplane {}--help` lists what there is",
                                     given == nullptr ? "" : given->get_name() + " "));
    return outcome;
  }
  for (const auto& [command, app] : commands_) {
    if (!app->parsed()) continue;
    options_.command = command;
    options_.line = LineOf(*app, argc, argv);
    outcome.error = RefuseEmptyAndRepeated(*app);
    if (outcome.error) return outcome;
  }
  if (const Result<void> finished = Finish(); !finished) {
    outcome.error = WithSettings(finished.error(), options_.settings);
    return outcome;
  }
  outcome.options = options_;
  return outcome;
}

}  // namespace

ParseOutcome ParseCommandLine(int argc, char** argv) { return Parser().Parse(argc, argv); }

}  // namespace hotplane::cli
