#include <cstdint>
#include <optional>

#include "base/format_text.h"
#include "base/number_text.h"
#include "device/device.h"

namespace hotplane {

Result<DeviceName> ParseDeviceName(std::string_view text) {
  if (text == "cpu") return DeviceName{};
  if (text == "cuda") return DeviceName{true, 0};
  constexpr std::string_view kPrefix = "cuda:";
  std::optional<uint32_t> ordinal;
  if (text.starts_with(kPrefix)) ordinal = ParseDecimal(text.substr(kPrefix.size()));
  if (!ordinal || *ordinal > INT32_MAX)
    return Fail(
        Status::Usage(Text("there is no device \"{}\"", text)).Expected("cpu, cuda, or cuda:N"));
  return DeviceName{true, static_cast<int>(*ordinal)};
}

}  // namespace hotplane
