#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/bytes_text.h"
#include "base/format_text.h"
#include "base/json_text.h"
#include "base/log.h"
#include "base/number_text.h"
#include "base/units.h"
#include "boot/paired_generation.h"
#include "boot/shard_choice.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "engine/export.h"
#include "engine/export_hf.h"
#include "engine/export_planes_cache.h"
#include "io/output_place.h"

namespace hotplane::cli {

namespace {

Result<void> CheckOutside(const char* option, const std::string& out, const std::string& store) {
  std::error_code error;
  const auto output = std::filesystem::weakly_canonical(out, error);
  const auto folder = std::filesystem::weakly_canonical(store, error);
  const auto [end, ignored] =
      std::mismatch(folder.begin(), folder.end(), output.begin(), output.end());
  if (error || end == folder.end())
    return Fail(Status::Usage(Text("{} lies inside the store", option))
                    .File(out)
                    .Expected(Text("a place outside {}", store))
                    .Advice("name another place"));
  return {};
}

// The output replaces what has its name: only a file outside the store may be replaced.
Result<void> CheckOutput(const std::string& out, const std::string& store) {
  HP_TRY(CheckOutside("--out", out, store));
  return CheckOutputFile(PosixEnv(), out);
}

Result<PrecisionMap> ReadPrecision(const std::string& text, const Manifest& manifest) {
  if (const std::optional<Precision> all = ParsePrecision(text))
    return PrecisionMap::Uniform(*all, manifest);
  const std::string file = text.substr(text.find(':') + 1);
  HP_ASSIGN(const std::vector<std::byte> bytes,
            ReadWholeFile(PosixEnv(), file, kPrecisionMapBytesMax));
  return PrecisionMap::Parse(AsText(bytes), file, manifest);
}

void PrintHf(const Context& context, const Generation& generation, const HfExportReport& report) {
  const Options& options = context.options;
  if (options.common.json) {
    const nlohmann::ordered_json json = {{"out", options.hf},
                                         {"precision", options.precision},
                                         {"generation", ToHex(generation.id())},
                                         {"bytes_written", report.bytes_written},
                                         {"tensors_written", report.tensors_written},
                                         {"tensors_copied", report.tensors_copied},
                                         {"tensors_dropped", report.tensors_dropped},
                                         {"experts_base", report.experts_base},
                                         {"experts_fp4", report.experts_fp4},
                                         {"files_copied", report.files_copied},
                                         {"warnings", report.warnings}};
    PrintJson(JsonText(json));
  } else if (!options.common.quiet) {
    PrintLine(Text("wrote {} to {}: {} at base, {} at FP4, as BF16; {} and {} as they were",
                   FormatBytes(report.bytes_written), options.hf,
                   Counted(report.experts_base, "experts"), report.experts_fp4,
                   Counted(report.tensors_copied, "other tensors"),
                   Counted(report.files_copied.size(), "files")));
  }
}

Result<void> RunExportHf(const Context& context) {
  const Options& options = context.options;
  HP_TRY(CheckOutside("--hf", options.hf, options.path));
  HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(PosixEnv(), options.checkpoint));
  HP_ASSIGN(const MoeModel model, DiscoverMoe(checkpoint));
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.path));
  HP_ASSIGN(const Generation generation, OpenPairedGeneration(store, options.generation, checkpoint,
                                                              model, OpenOptionsOf(context)));
  HP_ASSIGN(const PrecisionMap precision, ReadPrecision(options.precision, generation.manifest()));
  HP_ASSIGN(const FileStat given, PosixEnv().Stat(options.checkpoint));
  WorkerPool pool(options.workers);
  Progress progress;
  const HfExportOptions hf = {.output_directory = options.hf,
                              .shard_bytes_max = options.shard_bytes,
                              .kernels = &context.kernels,
                              .copy_other_files = given.type == FileType::kDirectory,
                              .cancel = &context.cancel,
                              .progress = &progress};
  Result<HfExportReport> exported = [&] {
    const ProgressDisplay display(progress, options.common, options.stall_seconds);
    return ExportHf(generation, checkpoint, model, precision, pool, hf);
  }();
  HP_ASSIGN(const HfExportReport report, std::move(exported));
  for (const std::string& warning : report.warnings) Log(LogLevel::kWarning, "{}", warning);
  PrintHf(context, generation, report);
  return {};
}

void PrintCache(const Context& context, const PlanesCacheExportReport& report) {
  const Options& options = context.options;
  if (options.common.json) {
    const nlohmann::ordered_json json = {
        {"out", options.planes_cache},
        {"checkpoint_id", report.checkpoint_id},
        {"fp4", report.fp4 == Encoding::kDeltaQuintal ? "quintal" : "nibble"},
        {"folders", report.folders},
        {"layers", report.layers},
        {"files_written", report.files_written},
        {"files_kept", report.files_kept},
        {"bytes_written", report.bytes_written},
        {"seconds", report.seconds},
        {"warnings", report.warnings}};
    PrintJson(JsonText(json));
  } else if (!options.common.quiet) {
    PrintLine(
        Text("wrote {} of {} to {}, {} were there; vLLM-MoET finds them where "
             "VLLM_MOE_W2_CKPT_ID is {}",
             Counted(report.files_written, "files"), Counted(report.layers, "layers"),
             options.planes_cache, report.files_kept, report.checkpoint_id));
  }
}

Result<void> RunExportPlanesCache(const Context& context) {
  const Options& options = context.options;
  HP_TRY(CheckOutside("--planes-cache", options.planes_cache, options.path));
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.path));
  HP_ASSIGN(const MeantGeneration meant,
            OpenMeant(store, options.generation, OpenOptionsOf(context)));
  const Generation& generation = meant.generation;
  WorkerPool pool(options.workers);
  Progress progress;
  PlanesCacheExportOptions cache;
  cache.output_directory = options.planes_cache;
  cache.checkpoint_id = options.checkpoint_id;
  cache.delta = options.tiers.size() == 2;
  if (options.delta_encodings.size() == 1) cache.fp4 = options.delta_encodings.front();
  cache.rank = options.rank;
  cache.kernels = &context.kernels;
  cache.cancel = &context.cancel;
  cache.progress = &progress;
  Result<PlanesCacheExportReport> exported = [&] {
    const ProgressDisplay display(progress, options.common, options.stall_seconds);
    return ExportPlanesCache(generation, pool, cache);
  }();
  if (!exported) return Fail(WithResumeAdvice(exported.error()));
  exported->warnings.insert(exported->warnings.begin(), meant.warnings.begin(),
                            meant.warnings.end());
  PrintCache(context, *exported);
  return {};
}

}  // namespace

Result<void> RunExport(const Context& context) {
  const Options& options = context.options;
  if (!options.planes_cache.empty()) return RunExportPlanesCache(context);
  if (!options.hf.empty()) return RunExportHf(context);
  HP_TRY(CheckOutput(options.out, options.path));
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.path));
  HP_ASSIGN(const MeantGeneration meant,
            OpenShard(store, options.generation, OpenOptionsOf(context),
                      {.rank = options.rank, .world = {}, .launched = LaunchedRanks()}));
  const Generation& generation = meant.generation;
  ExportOptions export_options;
  export_options.layer = *options.layer;
  export_options.part = options.part;
  export_options.expert = options.expert;
  export_options.encoded = options.encoded;
  export_options.output_path = options.out;
  export_options.kernels = &context.kernels;
  export_options.cancel = &context.cancel;
  HP_ASSIGN(const ExportReport report, ExportPart(generation, export_options));
  if (options.common.json) {
    nlohmann::ordered_json json;
    json["out"] = options.out;
    json["bytes_written"] = report.bytes_written;
    json["from"] = EncodingName(report.encoding);
    json["rank"] = generation.rank();
    json["world"] = generation.world();
    json["warnings"] = meant.warnings;
    PrintJson(JsonText(json));
  } else if (!options.common.quiet) {
    PrintLine(Text("{} of layer {}{} from {}: {} bytes in {}", options.part, *options.layer,
                   generation.world() > 1
                       ? Text(", rank {} of {},", generation.rank(), generation.world())
                       : "",
                   EncodingName(report.encoding), report.bytes_written, options.out));
  }
  return {};
}

}  // namespace hotplane::cli
