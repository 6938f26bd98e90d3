// Values of the elements and scales that checkpoints and planes hold, all exact in float64.
#pragma once

#include <cstdint>

#include "format/tsym4.h"

namespace hotplane {

// Of the 16 nibbles; -0.0 for 8.
constexpr double E2m1Value(unsigned nibble) {
  return (nibble >= 8 ? -0.5 : 0.5) * kE2m1MagnitudeTimes2[nibble % 8];
}

// NaN for 0x7f and 0xff; there is no infinity.
double E4m3Value(uint8_t byte);

double F16Value(uint16_t bits);

}  // namespace hotplane
