#include "base/units.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>

#include "base/format_text.h"

namespace hotplane {

std::string FormatBytes(uint64_t bytes) {
  struct Unit {
    uint64_t bytes;
    const char* name;
  };
  constexpr Unit kUnits[] = {{kGiB * 1024, "TiB"}, {kGiB, "GiB"}, {kMiB, "MiB"}, {kKiB, "KiB"}};
  for (const Unit& unit : kUnits) {
    if (bytes >= unit.bytes) {
      const double value = static_cast<double>(bytes) / static_cast<double>(unit.bytes);
      return Text("{:.{}f} {}", value, value < 10 ? 2 : value < 100 ? 1 : 0, unit.name);
    }
  }
  return Text("{} B", bytes);
}

std::string FormatRate(uint64_t bytes, double seconds) {
  if (seconds <= 0) return "-";
  const double rate = static_cast<double>(bytes) / seconds;
  if (rate >= 1e9) return Text("{:.{}f} GB/s", rate / 1e9, rate < 1e10 ? 2 : 1);
  return Text("{:.1f} MB/s", rate / 1e6);
}

std::string FormatSeconds(double seconds) {
  if (seconds < 0.1) return Text("{:.4f} s", seconds);
  if (seconds < 10) return Text("{:.2f} s", seconds);
  if (seconds < 120) return Text("{:.1f} s", seconds);
  const auto whole = static_cast<uint64_t>(seconds);
  return Text("{} min {:02} s", whole / 60, whole % 60);
}

namespace {

// 1024 to the power of the suffix; none: it is no suffix.
std::optional<uint64_t> ScaleOf(std::string_view suffix) {
  std::string upper;
  for (const char letter : suffix)
    upper += static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  if (upper.empty() || upper == "B") return 1;
  const auto power = std::string_view("KMGT").find(upper[0]);
  if (power == std::string_view::npos) return std::nullopt;
  if (upper.size() > 1 && upper.substr(1) != "B" && upper.substr(1) != "IB") return std::nullopt;
  return uint64_t{1} << (10 * (power + 1));
}

}  // namespace

// No exponents: 1E9 might be 1E of something. A fraction has digits on both sides of its point.
Result<uint64_t> ParseSize(std::string_view text) {
  constexpr double kBytesEnd = 0x1p63;  // a signed file offset holds less
  const auto bad = [&] {
    return Fail(Status::Usage(Text("'{}' is not a size", text))
                    .Expected("a whole number of bytes, or a number with K, M, G or T (powers of "
                              "1024), such as 512M or 1.5G; without leading zeros"));
  };
  const size_t number_end = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string_view number = text.substr(0, number_end);
  const std::optional<uint64_t> scale = ScaleOf(text.substr(number_end));
  const bool leading_zero = number.size() > 1 && number[0] == '0' && number[1] != '.';
  if (number.empty() || number.front() == '.' || number.back() == '.' || leading_zero || !scale)
    return bad();
  const char* const end = number.data() + number.size();
  uint64_t whole = 0;
  const auto read = std::from_chars(number.data(), end, whole);
  if (read.ec != std::errc()) return bad();
  if (read.ptr == end) {
    if (static_cast<double>(whole) * static_cast<double>(*scale) >= kBytesEnd) return bad();
    return whole * *scale;
  }
  double value = 0;
  const auto fraction = std::from_chars(number.data(), end, value, std::chars_format::fixed);
  if (fraction.ec != std::errc() || fraction.ptr != end || *scale == 1) return bad();
  const double bytes = value * static_cast<double>(*scale);
  if (bytes >= kBytesEnd) return bad();
  return static_cast<uint64_t>(bytes);
}

}  // namespace hotplane
