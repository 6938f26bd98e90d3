// What `tinylm eval --json` printed as one HTML page: loss against the share of routed weight at
// FP4.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace hotplane {

// `command` of the JSON.
inline constexpr std::string_view kEvalCommand = "tinylm eval";

// As ReportHtml: the text is not trusted. kData, naming the file, for anything that is no such
// JSON.
Result<std::string> EvalHtml(std::string_view json, std::string_view path);

}  // namespace hotplane
