// What `fidelity --json` printed as one HTML page: errors by layer and tier, bias, a table by
// projection.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace hotplane {

// `command` of the JSON.
inline constexpr std::string_view kFidelityCommand = "fidelity";

// As ReportHtml: the text is not trusted. kData, naming the file, for anything that is no such
// JSON.
Result<std::string> FidelityHtml(std::string_view json, std::string_view path);

}  // namespace hotplane
