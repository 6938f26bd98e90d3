// Values of e2m1 nibbles.
#pragma once

#include "format/tsym4.h"

namespace hotplane {

// Of the 16; -0.0 for 8.
constexpr double E2m1Value(unsigned nibble) {
  return (nibble >= 8 ? -0.5 : 0.5) * kE2m1MagnitudeTimes2[nibble % 8];
}

}  // namespace hotplane
