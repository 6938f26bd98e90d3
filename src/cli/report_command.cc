#include <string_view>

#include "base/bytes_text.h"
#include "base/format_text.h"
#include "base/units.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "engine/report_html.h"
#include "io/env.h"

namespace hotplane::cli {
namespace {

// Run reports are a few hundred KiB for a model of hundreds of layers; a trace is bounded by what
// the recorder keeps, about 150 bytes a span.
constexpr uint64_t kRunBytesMax = 64 * kMiB;
constexpr uint64_t kTraceBytesMax = kGiB;

}  // namespace

Result<void> RunReport(const Context& context) {
  const Options& options = context.options;
  HP_TRY(CheckOutput(options.out, "<!DOCTYPE html>"));
  HP_ASSIGN(const std::vector<std::byte> run,
            ReadWholeFile(PosixEnv(), options.path, kRunBytesMax));
  std::vector<std::byte> trace;
  if (!options.trace.empty()) {
    HP_ASSIGN(trace, ReadWholeFile(PosixEnv(), options.trace, kTraceBytesMax));
  }
  HP_ASSIGN(const std::string html,
            ReportHtml({AsText(run), options.path, AsText(trace), options.trace}));
  HP_TRY(PublishFile(PosixEnv(), options.out, std::as_bytes(std::span(html))));
  if (options.common.json) {
    PrintJson(Text("{{\"bytes_written\": {}}}", html.size()));
  } else if (!options.common.quiet) {
    PrintLine(Text("wrote {}, {}", options.out, FormatBytes(html.size())));
  }
  return {};
}

}  // namespace hotplane::cli
