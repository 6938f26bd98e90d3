// Log callback. The library never prints: it hands lines to the sink that the host program
// installs.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "base/format_text.h"
#include "base/status.h"

namespace hotplane {

enum class LogLevel : int { kInvalid = 0, kDebug = 1, kInfo = 2, kWarning = 3, kError = 4 };

// `line` is printable: control characters that came with a name from outside are escaped. One line,
// but for a Status, whose fields are a line each.
using LogSink = std::function<void(LogLevel, std::string_view line)>;

// Replaces the process-wide sink; an empty function drops all lines (the default).
// Thread-safe; a sink may be called from any thread, one call at a time.
void SetLogSink(LogSink sink);

void LogLine(LogLevel level, std::string_view line);

// All that it tells; `doing`, where not empty, comes before it and a colon.
void LogStatus(LogLevel level, std::string_view doing, const Status& status);

template <typename... Args>
void Log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  LogLine(level, VFormatText(format, fmt::make_format_args(args...)));
}

}  // namespace hotplane
