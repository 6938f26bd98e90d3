// Numbers as people give and read them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace hotplane {

// The number that the whole of `text` is, without sign, blanks or leading zeros: nobody has to know
// whether 010 is eight.
std::optional<uint32_t> ParseDecimal(std::string_view text);

// "1 layer", "3 layers"; "findings" loses its s likewise.
std::string Counted(uint64_t count, std::string_view plural);

}  // namespace hotplane
