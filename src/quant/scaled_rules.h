// What the weights of block-scaled formats become, as tables of the float64 rule: within one scale
// a format has few magnitudes, so each is decided once and then looked up.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "format/number_values.h"
#include "quant/exponent_rule.h"
#include "quant/quantize.h"

namespace hotplane {

// A product of an e2m1 and an e4m3 value has at most 6 significant bits, and a float32 has 24: the
// product of all three is exact in float64. A quotient by a float32 is rounded, but two such
// fractions differ by 2^-30 or are equal, so that comparing rounded ones decides as exact ones do.
inline double Nvfp4Value(double block_product, const Nvfp4Matrix& matrix) {
  return matrix.divide ? block_product / matrix.global_scale : block_product * matrix.global_scale;
}

inline constexpr size_t kE4m3Magnitudes = 127;  // patterns 0 to 0x7e

// Looked up with the magnitude index of an element, 0 to 7.
struct Nvfp4Rule {
  // Of a block's scale and its largest magnitude: the scale byte that it needs. Two source blocks
  // share one byte: the larger one, because the rule never falls as the magnitude rises.
  std::array<std::array<uint8_t, 8>, kE4m3Magnitudes> scale_byte;

  // A scale byte is at least scale_byte[scale][1] when the block has an element that is not zero.
  // 15 above that even the magnitude 6 is below the first midpoint: .5 * 2^15 * sqrt(.5) > 12 * 6 *
  // 4 * sqrt(2).
  static constexpr size_t kSteps = 16;
  struct Magnitudes {
    uint8_t index[8];
  };
  // By scale and by the block's byte less scale_byte[scale][1]: the new magnitude index, plus
  // kExactZero.
  std::array<std::array<Magnitudes, kSteps>, kE4m3Magnitudes> magnitudes;
  static constexpr uint8_t kExactZero = 0x10;
};
void FillNvfp4Rule(const Nvfp4Matrix& matrix, Nvfp4Rule& rule);

// One scale of an FP8 matrix. An entry is made when its largest magnitude is first met.
struct Fp8Rule {
  struct Entry {
    uint8_t scale_byte;  // kUnknown: not made yet
    // The largest pattern whose magnitude is not above each midpoint.
    uint8_t last_below[7];
  };
  static constexpr uint8_t kUnknown = 255;  // no block's scale byte
  double scale;
  std::array<Entry, kE4m3Magnitudes> entries;  // by the largest pattern of the block
};
void ResetFp8Rule(double scale, Fp8Rule& rule);
void FillFp8Entry(Fp8Rule& rule, uint8_t largest);

}  // namespace hotplane
