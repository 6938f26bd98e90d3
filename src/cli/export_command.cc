#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/format_text.h"
#include "base/units.h"
#include "boot/shard_choice.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "engine/export.h"

namespace hotplane::cli {

namespace {

// The output replaces what has its name: only a file outside the store may be replaced.
Result<void> CheckOutput(const std::string& out, const std::string& store) {
  HP_ASSIGN(const FileStat stat, PosixEnv().Stat(out));
  if (stat.type != FileType::kInvalid && stat.type != FileType::kRegular)
    return Fail(Status::Usage("--out names something that is not a file")
                    .File(out)
                    .Expected("a new name, or a file to replace"));
  std::error_code error;
  const auto output = std::filesystem::weakly_canonical(out, error);
  const auto folder = std::filesystem::weakly_canonical(store, error);
  const auto [end, ignored] =
      std::mismatch(folder.begin(), folder.end(), output.begin(), output.end());
  if (error || end == folder.end())
    return Fail(Status::Usage("--out lies inside the store").File(out).Advice("write elsewhere"));
  return {};
}

}  // namespace

Result<void> RunExport(const Context& context) {
  const Options& options = context.options;
  HP_TRY(CheckOutput(options.out, options.path));
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.path));
  HP_ASSIGN(const Generation generation,
            OpenShard(store, options.generation, {.cancel = &context.cancel},
                      {.rank = options.rank, .world = {}, .launched = LaunchedRanks()}));
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
    json["rank"] = generation.rank();
    json["world"] = generation.world();
    PrintLine(json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } else if (!options.common.quiet) {
    PrintLine(Text("{} of layer {}{} from {}: {} bytes in {}", options.part, options.layer,
                   generation.world() > 1
                       ? Text(", rank {} of {},", generation.rank(), generation.world())
                       : "",
                   EncodingName(report.encoding), report.bytes_written, options.out));
  }
  return {};
}

}  // namespace hotplane::cli
