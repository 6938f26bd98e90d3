#include "cli/option_values.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <utility>

#include "base/format_text.h"
#include "base/number_text.h"
#include "base/units.h"
#include "device/device.h"
#include "quant/quantize.h"

namespace hotplane::cli {
namespace {

constexpr const char* kExpertRangeText = "A-B, A not above B, without leading zeros";

// "a, b or c".
std::string Listed(const std::vector<std::string>& words) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " or " : ", ";
    text += words[i];
  }
  return text;
}

}  // namespace

Accepted DecimalFrom(uint64_t lowest, uint64_t highest) {
  const std::string range = highest == UINT64_MAX
                                ? Text("of at least {} that fits in 64 bits", lowest)
                                : Text("from {} to {}", lowest, highest);
  return {Text("a decimal number {}, without leading zeros", range),
          [lowest, highest](const std::string& text) {
            uint64_t value = 0;
            const char* const end = text.data() + text.size();
            const auto [stopped, error] = std::from_chars(text.data(), end, value);
            const bool leading_zero = text.size() > 1 && text[0] == '0';
            return error == std::errc() && stopped == end && !leading_zero && value >= lowest &&
                   value <= highest;
          }};
}

Accepted Seconds() {
  return {"a number of seconds, 0 or more, such as 120 or 0.5", [](const std::string& text) {
            double value = 0;
            const char* const end = text.data() + text.size();
            const auto [stopped, error] =
                std::from_chars(text.data(), end, value, std::chars_format::fixed);
            const bool leading_zero = text.size() > 1 && text[0] == '0' && text[1] != '.';
            return error == std::errc() && stopped == end && std::isfinite(value) && value >= 0 &&
                   !leading_zero;
          }};
}

Accepted OneOf(std::vector<std::string> words) {
  std::string expected = Listed(words);
  return {std::move(expected), [words = std::move(words)](const std::string& text) {
            return std::find(words.begin(), words.end(), text) != words.end();
          }};
}

Accepted TierList() {
  Accepted accepted = OneOf({"base", "delta", "base,delta", "delta,base"});
  accepted.expected = "base, delta, or base,delta";
  return accepted;
}

Accepted Size() {
  return {
      "a whole number of bytes, or a number with K, M, G or T (powers of 1024), such as 512M or "
      "1.5G; without leading zeros",
      [](const std::string& text) { return ParseSize(text).has_value(); }};
}

Accepted SizeAboveZero() {
  return {Size().expected + "; above 0", [](const std::string& text) {
            const Result<uint64_t> bytes = ParseSize(text);
            return bytes && *bytes > 0;
          }};
}

Accepted OrAuto(const Accepted& size) {
  return {size.expected + ", or auto",
          [fits = size.fits](const std::string& text) { return text == "auto" || fits(text); }};
}

Accepted Device() {
  return {"cpu, cuda, or cuda:N",
          [](const std::string& text) { return ParseDeviceName(text).has_value(); }};
}

Accepted ExpertRangeText() {
  return {kExpertRangeText,
          [](const std::string& text) { return ParseExpertRange(text).has_value(); }};
}

Result<ExpertRange> ParseExpertRange(std::string_view text) {
  const size_t dash = text.find('-');
  if (dash != std::string_view::npos) {
    const std::optional<uint32_t> first = ParseDecimal(text.substr(0, dash));
    const std::optional<uint32_t> last = ParseDecimal(text.substr(dash + 1));
    if (first && last && *first <= *last && *last < UINT32_MAX)
      return ExpertRange{*first, *last + 1};
  }
  return Fail(Status::Usage("this is no range of experts")
                  .Expected(kExpertRangeText)
                  .Found(Text("\"{}\"", text)));
}

Accepted Precision() {
  return {"base, fp4, or mixed:MAP.json", [](const std::string& text) {
            constexpr std::string_view kMixed = "mixed:";
            return text == "base" || text == "fp4" ||
                   (text.starts_with(kMixed) && text.size() > kMixed.size());
          }};
}

Accepted InstructionSet() {
  std::vector<std::string> names;
  for (const Kernels* kernels : AvailableKernels()) names.emplace_back(kernels->name);
  Accepted accepted = OneOf(std::move(names));
  accepted.expected += ": what this CPU can run";
  return accepted;
}

}  // namespace hotplane::cli
