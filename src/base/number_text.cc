#include "base/number_text.h"

#include <charconv>

#include "base/format_text.h"

namespace hotplane {

std::optional<uint32_t> ParseDecimal(std::string_view text) {
  uint32_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  const bool leading_zero = text.size() > 1 && text[0] == '0';
  if (error != std::errc() || stopped != end || leading_zero) return std::nullopt;
  return value;
}

std::string Counted(uint64_t count, std::string_view plural) {
  if (count == 1) plural.remove_suffix(1);
  return Text("{} {}", count, plural);
}

}  // namespace hotplane
