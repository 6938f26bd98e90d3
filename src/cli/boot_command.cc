#include "base/format_text.h"
#include "base/log.h"
#include "base/units.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "engine/engine.h"

namespace hotplane::cli {

Result<void> RunBoot(const Context& context) {
  const Options& options = context.options;
  Progress progress;
  EngineOptions engine_options;
  engine_options.store_directory = options.path;
  engine_options.generation_prefix = options.generation;
  engine_options.worker_count = options.workers;
  engine_options.boot.layers = options.layers;
  engine_options.boot.map = options.map;
  engine_options.boot.verify = options.verify;
  engine_options.boot.cache = options.cache;
  engine_options.boot.cancel = &context.cancel;
  engine_options.boot.progress = &progress;
  engine_options.measure_limit = true;
  HP_ASSIGN(const std::unique_ptr<Engine> engine, Engine::Open(PosixEnv(), engine_options));
  if (!options.verify) Log(LogLevel::kWarning, "--verify none: no byte is checked");
  {
    const ProgressDisplay display(progress, options.common, options.stall_seconds);
    HP_TRY(engine->Boot([](const BootedLayer& layer) {
      Log(LogLevel::kDebug, "layer {} (model's {}) ready", layer.ordinal, layer.model_index);
    }));
  }
  const BootReport& report = engine->report();
  if (options.common.json) {
    PrintLine(engine->ReportJson());
    return {};
  }
  if (options.common.quiet) return {};
  const double limit = engine->limit_bytes_per_second();
  const double rate =
      report.seconds_land > 0 ? static_cast<double>(report.bytes_read) / report.seconds_land : 0;
  PrintLine(Text("booted {} layers, {}{}, in {}: plan {}, allocate {}, land {}",
                 report.layers_total, FormatBytes(report.bytes_read),
                 report.bytes_verified == report.bytes_read ? ", every byte verified" : "",
                 FormatSeconds(report.seconds), FormatSeconds(report.seconds_plan),
                 FormatSeconds(report.seconds_allocate), FormatSeconds(report.seconds_land)));
  PrintLine(Text("{} landing, {:.0f}% of the {} that this memory gives; first layer after {}",
                 FormatRate(report.bytes_read, report.seconds_land),
                 limit > 0 ? 100 * rate / limit : 0, FormatRate(static_cast<uint64_t>(limit), 1),
                 FormatSeconds(report.sources.front().seconds_ready)));
  if (report.bytes_skipped > 0)
    PrintLine(Text("skipped {}: the delta tier is present and not read",
                   FormatBytes(report.bytes_skipped)));
  for (const std::string& warning : report.warnings) PrintLine("warning: " + warning);
  return {};
}

}  // namespace hotplane::cli
