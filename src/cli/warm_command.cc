#include <nlohmann/json.hpp>

#include "base/format_text.h"
#include "base/json_text.h"
#include "base/log.h"
#include "base/units.h"
#include "boot/shard_choice.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "engine/warm.h"

namespace hotplane::cli {

Result<void> RunWarm(const Context& context) {
  const Options& options = context.options;
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.path));
  const Store::OpenOptions open = OpenOptionsOf(context);
  HP_ASSIGN(const MeantGeneration meant,
            options.rank ? OpenShard(store, options.generation, open, {options.rank, {}})
                         : OpenMeant(store, options.generation, open));
  const Generation& generation = meant.generation;
  WorkerPool pool(options.workers);
  Progress progress;
  Result<WarmReport> warmed = [&] {
    const ProgressDisplay display(progress, options.common, options.stall_seconds);
    return Warm(generation, options.tiers, pool, &context.cancel, &progress, options.rank);
  }();
  HP_ASSIGN(const WarmReport report, std::move(warmed));
  for (const std::string& warning : report.warnings) Log(LogLevel::kWarning, "{}", warning);
  if (options.common.json) {
    nlohmann::ordered_json json;
    json["generation"] = ToHex(generation.id());
    json["files"] = report.files;
    json["bytes"] = report.bytes;
    json["bytes_cached_before"] = report.bytes_cached_before;
    json["bytes_cached_after"] = report.bytes_cached_after;
    json["bytes_available"] = report.bytes_available;
    json["seconds"] = report.seconds;
    json["warnings"] = meant.warnings;
    for (const std::string& warning : report.warnings) json["warnings"].push_back(warning);
    PrintJson(JsonText(json));
    return {};
  }
  if (!options.common.quiet)
    PrintLine(Text("{} of {} in the page cache ({} were), {} in {}",
                   FormatBytes(report.bytes_cached_after), FormatBytes(report.bytes),
                   FormatBytes(report.bytes_cached_before),
                   FormatRate(report.bytes, report.seconds), FormatSeconds(report.seconds)));
  return {};
}

}  // namespace hotplane::cli
