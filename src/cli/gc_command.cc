#include <nlohmann/json.hpp>

#include "base/format_text.h"
#include "base/json_text.h"
#include "base/units.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "store/store.h"

namespace hotplane::cli {

Result<void> RunGc(const Context& context) {
  const Options& options = context.options;
  HP_ASSIGN(const GcReport report,
            Store::CollectGarbage(PosixEnv(), options.path, options.generation, options.dry_run));
  if (options.common.json) {
    nlohmann::ordered_json json;
    json["removed"] = report.removed;
    json["kept_in_use"] = report.kept_in_use;
    json["kept_without_manifest"] = report.kept_without_manifest;
    json["bytes_freed"] = report.bytes_freed;
    json["dry_run"] = options.dry_run;
    PrintJson(JsonText(json));
    return {};
  }
  for (const std::string& path : report.removed)
    PrintLine(Text("{} {}", options.dry_run ? "would remove" : "removed", path));
  for (const std::string& path : report.kept_in_use) PrintLine("in use, kept: " + path);
  for (const std::string& path : report.kept_without_manifest)
    PrintLine(
        Text("has layer files but no manifest, kept: {}; `hotplane build` of its checkpoint "
             "makes it whole, `gc --generation` removes it",
             path));
  if (!options.common.quiet)
    PrintLine(Text("{} {}", FormatBytes(report.bytes_freed),
                   options.dry_run ? "would be freed" : "freed"));
  return {};
}

}  // namespace hotplane::cli
