// The exponent of a requantized block, as the formula and as a table of where it steps.
#pragma once

#include <cstdint>
#include <span>

namespace hotplane {

// round-half-even(log2(amax/6 + 1e-30)) clamped to [-127, 127], plus 127; 0 for amax 0. amax >= 0
// and finite. This float64 expression is the norm (docs/format/planes.md).
uint8_t ScaleByteOf(double amax);

// The rule as a function of amax's float32 bit pattern b: it never falls as b rises, and it takes
// at most one step within a binade (all b with the same exponent field x = b >> 23).
struct ExponentStep {
  uint32_t threshold;  // the smallest b of the binade from which the byte is `at_threshold`
  uint8_t below;
  uint8_t at_threshold;
};

struct ExponentSteps {
  ExponentStep binades[255];  // by exponent field; 255 is Inf and NaN
  // From this b on 1e-30 no longer counts and the byte is ((b + regular_carry) >> 23) - 3.
  uint32_t regular_from;
  uint32_t regular_carry;
};

// Found by binary search on ScaleByteOf at the first call. Thread-safe.
const ExponentSteps& GetExponentSteps();

// The same of any float64: [b] is the smallest amax from which the byte is at least b. amax of a
// source is a float32, a product of one and an e4m3 value, or a quotient; where log2 turns from one
// rounding to the next (some 2^-46 of the value) there is none of them.
std::span<const double, 255> ScaleThresholds();

}  // namespace hotplane
