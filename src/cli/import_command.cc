#include "base/format_text.h"
#include "base/number_text.h"
#include "base/units.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/several_generations.h"
#include "engine/import_planes_cache.h"
#include "engine/report_json.h"

namespace hotplane::cli {
namespace {

void Print(const Context& context, const PlanesCacheImportReport& report) {
  const Options& options = context.options;
  if (options.common.json) {
    PrintJson(PlanesCacheImportJson(report));
    return;
  }
  if (options.common.quiet) return;
  if (report.moved_before) {
    PrintLine(
        Text("nothing is left to import: {} is empty, as --move leaves it, and {} has "
             "generation {} of imported planes",
             options.planes_cache, options.path, ToHex(report.generation)));
    return;
  }
  PrintLine(Text("imported {} of {} ({} were there){} into {}, generation {}",
                 report.layers_imported, Counted(report.layers_total, "layers"),
                 report.layers_attached,
                 report.shard_world > 1 ? Text(" for {} ranks", report.shard_world) : "",
                 options.path, ToHex(report.generation)));
  PrintLine(Text("read {}, wrote {}, {}", FormatBytes(report.bytes_read),
                 FormatBytes(report.bytes_built), FormatSeconds(report.seconds)));
  if (options.move)
    PrintLine(Text("compared {} of the store with the cache, then removed {} of {} from the cache",
                   FormatBytes(report.bytes_compared), FormatBytes(report.bytes_removed),
                   Counted(report.files_removed, "files")));
}

}  // namespace

Result<void> RunImport(const Context& context) {
  const Options& options = context.options;
  HP_TRY(CheckCacheApart(options.planes_cache, options.path));
  PlanesCacheImportOptions import;
  import.key_prefix = options.key;
  HP_ASSIGN(import.geometry, ParseLayersGeometry(options.layers_geometry));
  if (!options.mtp_layers.empty()) {
    HP_ASSIGN(import.mtp_layers, ParseLayerNumbers(options.mtp_layers));
  }
  if (!options.config.empty()) {
    HP_ASSIGN(import.config, ReadModelConfig(PosixEnv(), options.config));
  }
  import.rank = options.rank;
  import.delta = options.tiers.size() == 2;
  import.move = options.move;
  import.no_lock = options.no_lock;
  import.stall_seconds = options.stall_seconds;
  import.kernels = &context.kernels;
  import.cancel = &context.cancel;
  Progress progress;
  import.progress = &progress;
  WorkerPool pool(options.workers);
  Result<PlanesCacheImportReport> imported = [&] {
    const ProgressDisplay display(progress, options.common, options.stall_seconds);
    return ImportPlanesCache(PosixEnv(), options.planes_cache, options.path, pool, import);
  }();
  if (!imported) return Fail(WithResumeAdvice(imported.error()));
  WarnOfSeveralGenerations(options.path, imported->generation, &imported->warnings);
  Print(context, *imported);
  return {};
}

}  // namespace hotplane::cli
