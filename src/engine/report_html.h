// A run as one HTML page that opens anywhere, offline: figures beside the machine's limit, the
// timeline of its layers, where the bytes came from, what was skipped and why.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace hotplane {

// What is shown of longer texts and lists; the rest is counted. A model has at most some hundreds
// of layers.
inline constexpr size_t kReportRowsMax = 2048;
inline constexpr size_t kReportTextBytesMax = 4096;

struct ReportSources {
  std::string_view run_json;    // what boot, build, fidelity or tinylm eval printed
  std::string_view run_path;    // for messages
  std::string_view trace_json;  // what the same run wrote with --trace; empty: none
  std::string_view trace_path;
};

// The page refers to nothing outside itself. The texts are not trusted: all of theirs is escaped.
// kData, naming the file and what is wrong with it, for anything that is not such JSON.
Result<std::string> ReportHtml(const ReportSources& sources);

}  // namespace hotplane
