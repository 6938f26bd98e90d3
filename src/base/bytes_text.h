// Bytes of a file, read as text.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace hotplane {

// Of the same memory.
inline std::string_view AsText(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace hotplane
