#include "quant/exponent_rule.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "base/check.h"

namespace hotplane {
namespace {

uint8_t ScaleByteOfBits(uint32_t bits) { return ScaleByteOf(std::bit_cast<float>(bits)); }

ExponentStep FindStep(uint32_t first, uint32_t last) {
  ExponentStep step;
  step.below = ScaleByteOfBits(first);
  step.at_threshold = ScaleByteOfBits(last);
  step.threshold = first;
  if (step.below == step.at_threshold) return step;
  uint32_t low = first;  // the byte is `below` here
  uint32_t high = last;  // and `at_threshold` here
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const uint8_t byte = ScaleByteOfBits(middle);
    HP_CHECK(byte == step.below || byte == step.at_threshold);
    (byte == step.below ? low : high) = middle;
  }
  step.threshold = high;
  return step;
}

bool IsRegular(const ExponentStep& step, uint32_t field, uint32_t mantissa) {
  return step.threshold == ((field << 23) | mantissa) && step.below == field - 3 &&
         step.at_threshold == field - 2;
}

ExponentSteps FindSteps() {
  ExponentSteps steps;
  for (uint32_t field = 0; field < 255; ++field) {
    steps.binades[field] = FindStep(field << 23, (field << 23) | 0x7FFFFF);
  }
  const uint32_t mantissa = steps.binades[127].threshold & 0x7FFFFF;
  uint32_t field = 255;
  while (field > 0 && IsRegular(steps.binades[field - 1], field - 1, mantissa)) --field;
  HP_CHECK(field < 127);
  steps.regular_from = field << 23;
  steps.regular_carry = 0x800000 - mantissa;
  return steps;
}

std::array<double, 255> FindThresholds() {
  std::array<double, 255> thresholds = {};
  for (unsigned byte = 1; byte < thresholds.size(); ++byte) {
    thresholds[byte] = thresholds[byte - 1];
    if (ScaleByteOf(thresholds[byte]) >= byte) continue;       // the rule leaps over some
    uint64_t low = std::bit_cast<uint64_t>(thresholds[byte]);  // below `byte`
    uint64_t high = std::bit_cast<uint64_t>(0x1p130);          // at 254
    while (high - low > 1) {
      const uint64_t middle = low + (high - low) / 2;
      (ScaleByteOf(std::bit_cast<double>(middle)) < byte ? low : high) = middle;
    }
    thresholds[byte] = std::bit_cast<double>(high);
  }
  return thresholds;
}

}  // namespace

uint8_t ScaleByteOf(double amax) {
  if (amax == 0) return 0;
  const double exponent = std::nearbyint(std::log2(amax / 6 + 1e-30));
  return static_cast<uint8_t>(std::clamp(exponent, -127.0, 127.0) + 127);
}

const ExponentSteps& GetExponentSteps() {
  static const ExponentSteps steps = FindSteps();
  return steps;
}

std::span<const double, 255> ScaleThresholds() {
  static const std::array<double, 255> thresholds = FindThresholds();
  return thresholds;
}

}  // namespace hotplane
