#include <charconv>

#include "base/format_text.h"
#include "device/device.h"

namespace hotplane {

Result<DeviceName> ParseDeviceName(std::string_view text) {
  if (text == "cpu") return DeviceName{};
  if (text == "cuda") return DeviceName{true, 0};
  constexpr std::string_view kPrefix = "cuda:";
  int ordinal = -1;
  if (text.substr(0, kPrefix.size()) == kPrefix) {
    const char* const end = text.data() + text.size();
    const auto parsed = std::from_chars(text.data() + kPrefix.size(), end, ordinal);
    if (parsed.ec != std::errc() || parsed.ptr != end) ordinal = -1;
  }
  if (ordinal < 0)
    return Fail(
        Status::Usage(Text("there is no device \"{}\"", text)).Expected("cpu, cuda, or cuda:N"));
  return DeviceName{true, ordinal};
}

}  // namespace hotplane
