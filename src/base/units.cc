#include "base/units.h"

#include <cctype>
#include <charconv>
#include <cmath>

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

Result<uint64_t> ParseSize(std::string_view text) {
  const auto bad = [&] {
    return Fail(
        Status::Usage(Text("'{}' is not a size", text))
            .Expected("a number without leading zeros and with an optional suffix K, M, G or T, "
                      "such as 512M or 2G"));
  };
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !(number >= 0) || !std::isfinite(number)) return bad();
  if (text.size() > 1 && text[0] == '0' && std::isdigit(static_cast<unsigned char>(text[1])))
    return bad();
  std::string suffix;
  for (const char* p = end; p != text.data() + text.size(); ++p)
    suffix += static_cast<char>(std::toupper(static_cast<unsigned char>(*p)));
  uint64_t scale = 1;
  if (!suffix.empty() && suffix != "B") {
    const auto power = std::string_view("KMGT").find(suffix[0]);
    if (power == std::string_view::npos) return bad();
    if (suffix.size() > 1 && suffix.substr(1) != "B" && suffix.substr(1) != "IB") return bad();
    scale = uint64_t{1} << (10 * (power + 1));
  }
  const double bytes = number * static_cast<double>(scale);
  if (bytes >= 9.2e18) return bad();
  return static_cast<uint64_t>(bytes);
}

}  // namespace hotplane
