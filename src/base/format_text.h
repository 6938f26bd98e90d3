// Text formatting: the one place that names the formatting library.
#pragma once

#include <fmt/core.h>

#include <string>
#include <utility>

namespace hotplane {

// fmt::format syntax, checked at compile time.
template <typename... Args>
std::string Text(fmt::format_string<Args...> format, Args&&... args) {
  return fmt::vformat(format, fmt::make_format_args(args...));
}

}  // namespace hotplane
