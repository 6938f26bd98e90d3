// bfloat16 as the bits that devices and checkpoints have.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace hotplane {

// Round half to even; beyond the range infinity, NaN stays one.
inline uint16_t ToBf16(float value) {
  if (std::isnan(value)) return 0x7FFF;
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline float FromBf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

}  // namespace hotplane
