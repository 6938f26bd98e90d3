// Activations in FP8 with scales made on the fly, powers of two (UE8M0): e4m3 numbers, one scale
// for each token and 128 consecutive columns. They are kept as bfloat16, which has every such
// product exactly. One source for kernel and host.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "device/host_device.h"
#include "moe/bfloat16.h"

namespace hotplane::fp8 {

inline constexpr uint32_t kGroup = 128;  // columns; the last group of a row may have fewer

// Scales are exponents of float32: 2^(scale - 127). With the least one all e4m3 numbers but zero
// are still normal in bfloat16.
inline constexpr uint32_t kLeastScale = 10;
// A group with infinity or NaN stays as it is, and so does one whose largest, in bits of bfloat16,
// is beyond the last that does not round to infinity.
inline constexpr uint32_t kNoScale = 255;
inline constexpr uint32_t kLargest = 0x7F77;

// The least scale whose 448-fold, the largest e4m3 number's, is at least the group's largest
// magnitude. `largest`: its bits in bfloat16.
HP_HOST_DEVICE uint32_t ScaleFor(uint32_t largest) {
  if (largest > kLargest) return kNoScale;
  const uint32_t exponent = largest >> 7;
  // 448 is (1 + 96/128) * 2^8.
  const uint32_t above = exponent + ((largest & 127) > 96 ? 1 : 0);
  return above < kLeastScale + 8 ? kLeastScale : above - 8;
}

// The e4m3 number times 2^(scale - 127) that is nearest; of two the even one. `value` is no larger
// than the one that the scale was made for.
HP_HOST_DEVICE float Rounded(float value, uint32_t scale) {
  if (scale == kNoScale) return value;
  // From 2^-6 on three bits follow the first; below, numbers are 2^-9 apart.
  const uint32_t exponent = std::bit_cast<uint32_t>(value) >> 23 & 255;
  const uint32_t step = (exponent > scale - 6 ? exponent : scale - 6) - 3;
  const auto one = std::bit_cast<float>(step << 23);
  const auto inverse = std::bit_cast<float>((254 - step) << 23);
  return rintf(value * inverse) * one;
}

// A row of activations: rounded to bfloat16, then as above, group by group.
inline void RoundRow(float* row, size_t columns) {
  for (size_t first = 0; first < columns; first += kGroup) {
    const size_t end = std::min<size_t>(columns, first + kGroup);
    uint32_t largest = 0;
    for (size_t i = first; i < end; ++i) {
      const uint16_t bits = ToBf16(row[i]);
      row[i] = FromBf16(bits);
      largest = std::max<uint32_t>(largest, bits & 0x7FFF);
    }
    const uint32_t scale = ScaleFor(largest);
    for (size_t i = first; i < end; ++i) row[i] = Rounded(row[i], scale);
  }
}

}  // namespace hotplane::fp8
