#include "moe/activation.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/check.h"

namespace hotplane {
namespace {

// Adding and subtracting 1.5 * 2^23 rounds a float of magnitude below 2^22 to an integer, half to
// even; its low bits are then the integer.
constexpr float kRounder = 12582912.0f;

// e^x for x clamped to [-87, 88]: 2^n * e^r with |r| <= ln(2)/2 and Taylor's polynomial of degree
// 7, whose remainder there is below r^8/8! < 2^-27.
inline float Exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  constexpr float kLog2E = 1.44269504088896341f;
  // ln(2) in two parts, the first short enough that n times it is exact.
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;
  const float shifted = x * kLog2E + kRounder;
  const float n = shifted - kRounder;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // n is in [-126, 127]: its power of two is a normal float.
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) + 127u) << 23;
  return p * std::bit_cast<float>(exponent);
}

inline float Sigmoid(float x) { return 1.0f / (1.0f + Exponential(-x)); }
inline float Clamp(float x, float limit) { return std::min(std::max(x, -limit), limit); }

}  // namespace

void Activate(const Activation& activation, const float* gate, const float* up, size_t count,
              float* out) {
  const auto limit = static_cast<float>(activation.limit);
  const auto alpha = static_cast<float>(activation.alpha);
  switch (activation.kind) {
    case ActivationKind::kSiluGated:
      for (size_t i = 0; i < count; ++i) out[i] = gate[i] * Sigmoid(gate[i]) * up[i];
      return;
    case ActivationKind::kSiluGatedClamped:
      for (size_t i = 0; i < count; ++i) {
        const float g = std::min(gate[i], limit);
        out[i] = g * Sigmoid(g) * Clamp(up[i], limit);
      }
      return;
    case ActivationKind::kSwigluOai:
      for (size_t i = 0; i < count; ++i) {
        const float g = std::min(gate[i], limit);
        out[i] = (Clamp(up[i], limit) + 1.0f) * (g * Sigmoid(alpha * g));
      }
      return;
    case ActivationKind::kInvalid: break;
  }
  HP_CHECK(activation.kind != ActivationKind::kInvalid);
}

void QuantizeActivations(const float* x, size_t count, int8_t* values, float* scales,
                         int32_t* const starts[kStripFormats]) {
  // Below this the inverse of the scale leaves the range of float32.
  constexpr float kSmallest = 0x1p-100f;
  for (size_t block = 0; block < count / kScaleBlock; ++block) {
    const float* from = x + block * kScaleBlock;
    // By bits, where NaN is above infinity: it must not vanish from a maximum.
    uint32_t largest = 0;
    for (size_t i = 0; i < kScaleBlock; ++i)
      largest = std::max(largest, std::bit_cast<uint32_t>(from[i]) & 0x7FFFFFFFu);
    const auto amax = std::bit_cast<float>(largest);
    const bool zero = amax < kSmallest;
    const float inverse = zero ? 0.0f : 127.0f / amax;
    int32_t sum = 0;
    for (size_t i = 0; i < kScaleBlock; ++i) {
      const float shifted = from[i] * inverse + kRounder;
      // Of activations that are not finite (overflow further up) any value will do: their scale is
      // infinity or NaN, and so is what it is multiplied into.
      const int32_t value = std::clamp(static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) -
                                                            std::bit_cast<uint32_t>(kRounder)),
                                       -127, 127);
      sum += value;
      values[ValuePlace(block * kScaleBlock + i)] = static_cast<int8_t>(value);
    }
    scales[block] = zero ? 0.0f : amax / 127.0f;
    for (size_t f = 0; f < kStripFormats; ++f) starts[f][block] = -kLevelForms[f].offset * sum;
  }
}

}  // namespace hotplane
