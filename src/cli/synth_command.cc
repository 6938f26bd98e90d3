#include <nlohmann/json.hpp>

#include "base/format_text.h"
#include "base/json_text.h"
#include "base/units.h"
#include "checkpoint/synth_checkpoint.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "engine/synth.h"

namespace hotplane::cli {
namespace {

Result<SynthReport> MakeCheckpoint(const Context& context, const LayerGeometry& geometry,
                                   Progress* progress) {
  const Options& options = context.options;
  SynthCheckpointOptions synth;
  synth.format = ParseSourceFormat(options.checkpoint_format).value();
  synth.geometry = geometry;
  synth.main_layers = options.layer_count;
  synth.mtp_layers = options.mtp_count;
  synth.seed = options.seed;
  synth.shard_bytes_max = options.shard_bytes;
  WorkerPool pool(options.workers);
  progress->Begin("synthesizing", 0);
  const auto start = std::chrono::steady_clock::now();
  HP_ASSIGN(const SynthCheckpointReport written,
            WriteSynthCheckpoint(PosixEnv(), options.path, synth, pool, &context.cancel,
                                 [progress](uint64_t done, uint64_t total) {
                                   progress->bytes_total = total;
                                   progress->bytes_done = done;
                                 }));
  SynthReport report;
  report.bytes_written = written.data_bytes;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

Result<SynthReport> MakeStore(const Context& context, const LayerGeometry& geometry,
                              Progress* progress) {
  SynthStoreOptions synth;
  synth.geometry = geometry;
  synth.layers = context.options.layer_count;
  synth.encodings = context.options.encodings;
  synth.seed = context.options.seed;
  synth.worker_count = context.options.workers;
  synth.cancel = &context.cancel;
  synth.stall_seconds = context.options.stall_seconds;
  synth.progress = progress;
  return SynthStore(PosixEnv(), context.options.path, synth);
}

}  // namespace

Result<void> RunSynth(const Context& context) {
  const Options& options = context.options;
  HP_ASSIGN(const LayerGeometry geometry, ParseGeometry(options.geometry));
  Progress progress;
  Result<SynthReport> made = [&] {
    const ProgressDisplay display(progress, options.common, options.stall_seconds);
    return options.checkpoint_format.empty() ? MakeStore(context, geometry, &progress)
                                             : MakeCheckpoint(context, geometry, &progress);
  }();
  HP_ASSIGN(const SynthReport report, std::move(made));
  if (options.common.json) {
    nlohmann::ordered_json json;
    if (!report.generation.empty()) json["generation"] = report.generation;
    json["bytes_written"] = report.bytes_written;
    json["seconds"] = report.seconds;
    PrintJson(JsonText(json));
  } else if (!options.common.quiet) {
    PrintLine(Text("{} of synthetic {} in {}, {}", FormatBytes(report.bytes_written),
                   options.checkpoint_format.empty() ? "store" : "checkpoint", options.path,
                   FormatRate(report.bytes_written, report.seconds)));
  }
  return {};
}

}  // namespace hotplane::cli
