// The variants. Each is a translation unit of its own, compiled with its own instruction set; all
// but the table stays in an anonymous namespace, so that the linker cannot take one's code for
// another's.
#pragma once

#include <cstdint>

#include "format/number_values.h"
#include "moe/kernels.h"

namespace hotplane {

extern const MoeKernels kScalarMoeKernels;
extern const MoeKernels kAvx2MoeKernels;
extern const MoeKernels kAvx512MoeKernels;

namespace {

// The value of a 2-bit code or an e2m1 nibble.
constexpr float kCodeLevels[4] = {-4, -1, 1, 4};
constexpr float kNibbleLevels[16] = {0.f,  0.5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                     -0.f, -0.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
static_assert([] {
  for (unsigned nibble = 0; nibble < 16; ++nibble)
    if (kNibbleLevels[nibble] != E2m1Value(nibble)) return false;
  return true;
}());

// A level in the unsigned form of the fast arithmetic.
constexpr uint8_t UnsignedLevel(StripFormat format, unsigned element) {
  const LevelForm form = kLevelForms[static_cast<size_t>(format)];
  const float value =
      format == StripFormat::kCodes ? kCodeLevels[element & 3] : kNibbleLevels[element & 15];
  return static_cast<uint8_t>(static_cast<int>(value * static_cast<float>(form.multiplier)) +
                              form.offset);
}

// 2^(byte-127) as float32 bits. 2^-127 is subnormal; 255 is never stored.
constexpr uint32_t kSmallestScaleBits = 0x00400000;

}  // namespace

}  // namespace hotplane
