#include "quant/scaled_rules.h"

#include <cmath>

namespace hotplane {
namespace {

constexpr double kMidpoints[7] = {.25, .75, 1.25, 1.75, 2.5, 3.5, 5};

unsigned MagnitudeIndex(double magnitude, double unit) {
  unsigned index = 0;
  for (const double midpoint : kMidpoints) index += midpoint * unit < magnitude ? 1 : 0;
  return index;
}

double UnitOf(unsigned scale_byte) {
  return std::ldexp(1.0, static_cast<int>(scale_byte) - kE8m0Bias);
}

}  // namespace

void FillNvfp4Rule(const Nvfp4Matrix& matrix, Nvfp4Rule& rule) {
  for (size_t scale = 0; scale < kE4m3Magnitudes; ++scale) {
    double values[8];
    for (size_t m = 0; m < 8; ++m) {
      const double product = E4m3Value(static_cast<uint8_t>(scale)) * kE2m1MagnitudeTimes2[m] / 2;
      values[m] = Nvfp4Value(product, matrix);
      rule.scale_byte[scale][m] = ScaleByteOf(values[m]);
    }
    bool all_zero = false;
    for (unsigned step = 0; step < Nvfp4Rule::kSteps; ++step) {
      Nvfp4Rule::Magnitudes& to = rule.magnitudes[scale][step];
      const double unit = UnitOf(rule.scale_byte[scale][1] + step);
      for (size_t m = 0; m < 8; ++m) {
        const unsigned index = all_zero ? 0 : MagnitudeIndex(values[m], unit);
        to.index[m] = static_cast<uint8_t>(index | (values[m] == 0 ? Nvfp4Rule::kExactZero : 0u));
      }
      all_zero = (to.index[7] & 7) == 0;
    }
  }
}

void ResetFp8Rule(double scale, Fp8Rule& rule) {
  rule.scale = scale;
  for (Fp8Rule::Entry& entry : rule.entries) entry.scale_byte = Fp8Rule::kUnknown;
}

void FillFp8Entry(Fp8Rule& rule, uint8_t largest) {
  Fp8Rule::Entry& entry = rule.entries[largest];
  entry.scale_byte = ScaleByteOf(E4m3Value(largest) * rule.scale);
  const double unit = UnitOf(entry.scale_byte);
  unsigned pattern = 0;
  for (size_t i = 0; i < 7; ++i) {
    // Midpoints rise, so the search goes on where it stopped.
    while (pattern < kE4m3Magnitudes &&
           !(kMidpoints[i] * unit < E4m3Value(static_cast<uint8_t>(pattern)) * rule.scale)) {
      ++pattern;
    }
    // Pattern 0 is the value 0, which is above no midpoint.
    entry.last_below[i] = static_cast<uint8_t>(pattern - 1);
  }
}

}  // namespace hotplane
