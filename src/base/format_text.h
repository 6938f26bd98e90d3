// Text formatting: the one place that names the formatting library. Its implementation is compiled
// once, in format_text.cc: header-only in every file it would cost two seconds of compiling each.
#pragma once

#include <fmt/core.h>

#include <string>
#include <utility>

namespace hotplane {

// fmt::vformat.
std::string VFormatText(fmt::string_view format, fmt::format_args arguments);

// fmt::format syntax, checked at compile time.
template <typename... Args>
std::string Text(fmt::format_string<Args...> format, Args&&... args) {
  return VFormatText(format, fmt::make_format_args(args...));
}

}  // namespace hotplane
