#include <nlohmann/json.hpp>

#include "base/format_text.h"
#include "base/units.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "engine/export.h"

namespace hotplane::cli {

Result<void> RunExport(const Context& context) {
  const Options& options = context.options;
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.path));
  HP_ASSIGN(const Generation generation, store.OpenGeneration(options.generation));
  ExportOptions export_options;
  export_options.layer = options.layer;
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
    PrintLine(json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } else if (!options.common.quiet) {
    PrintLine(Text("{} of layer {} from {}: {} bytes in {}", options.part, options.layer,
                   EncodingName(report.encoding), report.bytes_written, options.out));
  }
  return {};
}

}  // namespace hotplane::cli
