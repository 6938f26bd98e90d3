// From stored planes to operands of the tensor cores, in registers.
//
// A warp holds a tile of 16 rows and 64 columns as the planes do (format/tsym4.h): lane g*4+t has
// rows g and g+8, and of each half block of 16 columns the four from 4t on. The order of k inside a
// block of 32 is free as long as both operands have it, so a product takes
//   multiply m (0, 1), register pair p (0: logical k 2t, 2t+1; 1: logical k 2t+8, 2t+9):
//     column 4t + 2m + p of the first half, column 4t + 2m + p of the second half.
#pragma once

#include <cstdint>

#include "moe/cuda/ptx.h"

namespace hotplane::moe_cuda {

// Of one block of 32 columns: a[m] is the left operand of multiply m.
struct WeightFragments {
  uint32_t a[2][4];
};

// The codes of a row, one per nibble.
struct CodeSelectors {
  uint32_t even, odd;  // of both blocks of a tile
};
__device__ __forceinline__ CodeSelectors SelectorsOf(uint32_t codes) {
  return {codes & 0x33333333u, (codes >> 2) & 0x33333333u};
}

// The base tier in bfloat16, scales included. +-2^e and +-4*2^e have zero mantissas and exponents
// that differ by 2, so all four have the same low byte; their high bytes are looked up. `scale` is
// the block's byte, at most kLevelScaleMax; with 0 +-2^-127 are zeros.
struct ScaledLevels {
  uint32_t high;  // bytes, by code
  uint32_t low;
  __device__ __forceinline__ explicit ScaledLevels(uint32_t scale)
      : high((scale >> 1) * 0x01010101u + 0x01008081u), low((scale & 1) << 7) {}
};
inline constexpr uint32_t kLevelScaleMax = 252;

// Of one row: the register pairs [multiply][pair] of a block, from the selectors of its 8 codes.
__device__ __forceinline__ void ScaledPairs(uint32_t even, uint32_t odd, const ScaledLevels& levels,
                                            uint32_t (&pairs)[2][2]) {
  const uint32_t of_even = ptx::Permute(levels.high, 0, even);
  const uint32_t of_odd = ptx::Permute(levels.high, 0, odd);
  // Bytes of {low, high}: low, high of the first half's column, low, high of the second's.
  constexpr uint32_t kFirst = 0x2404, kSecond = 0x3414;
  pairs[0][0] = ptx::Permute(of_even, levels.low, kFirst);
  pairs[0][1] = ptx::Permute(of_odd, levels.low, kFirst);
  pairs[1][0] = ptx::Permute(of_even, levels.low, kSecond);
  pairs[1][1] = ptx::Permute(of_odd, levels.low, kSecond);
}

// FP4. The three low bits of a nibble, put at the lowest exponent bits and the highest mantissa bit
// of a bfloat16, are its magnitude times 2^-126, zero and 0.5 (a subnormal) too: exact.
inline constexpr float kNibbleUnit = 0x1p-126f;

template <int kColumn>
__device__ __forceinline__ uint32_t NibblePair(uint32_t nibbles) {
  const uint32_t signs = nibbles << (12 - 4 * kColumn);
  const uint32_t magnitudes = kColumn == 0   ? nibbles << 6
                              : kColumn == 1 ? nibbles << 2
                              : kColumn == 2 ? nibbles >> 2
                                             : nibbles >> 6;
  return ptx::Merge<0x80008000u, 0x01C001C0u>(signs, magnitudes);
}

// `upper`, `lower`: 8 nibbles of row g and row g+8: columns 4t.. of the first half, of the second.
__device__ __forceinline__ WeightFragments NibbleFragments(uint32_t upper, uint32_t lower) {
  return {
      {{NibblePair<0>(upper), NibblePair<0>(lower), NibblePair<1>(upper), NibblePair<1>(lower)},
       {NibblePair<2>(upper), NibblePair<2>(lower), NibblePair<3>(upper), NibblePair<3>(lower)}}};
}

// A pair of nibbles in units of kNibbleUnit becomes one times 2^(scale - 127) by the product with
// FactorOf, exactly, and beyond kNibbleScaleMax, where that is no bfloat16, also with
// FurtherFactorOf.
inline constexpr uint32_t kNibbleScaleMax = 128;
inline constexpr uint32_t kBothExponents = 0x00800080u;
__device__ __forceinline__ uint32_t FactorOf(uint32_t scale) {
  return (min(scale, kNibbleScaleMax) + 126) * kBothExponents;
}
__device__ __forceinline__ uint32_t FurtherFactorOf(uint32_t scale) {
  return (max(scale, kNibbleScaleMax) - 1) * kBothExponents;
}

// Four digits in base 5 of a 10-bit word, one per nibble.
__device__ __forceinline__ uint32_t DigitsOfWord(uint32_t word) {
  // w = d0 + 5 d1 + 25 d2 + 125 d3; the quotients are exact up to 624, all that a word is.
  const uint32_t by5 = word * 820u >> 12;
  const uint32_t by25 = word * 656u >> 14;
  const uint32_t by125 = word * 525u >> 16;
  // d0 + 16 d1 + 256 d2 + 4096 d3 with d0 = w - 5 by5 and so on.
  return word + 11u * by5 + 176u * by25 + 2816u * by125;
}

// The 8 nibbles of two words of quintals and their 8 codes (16 bits): merge of format/tsym4.h.
__device__ __forceinline__ uint32_t NibblesOfQuintals(uint32_t words, uint32_t codes) {
  const uint32_t digits = DigitsOfWord(words & 1023u) | DigitsOfWord(words >> 10 & 1023u) << 16;
  uint32_t spread = codes & 0xFFFFu;
  spread = (spread | spread << 8) & 0x00FF00FFu;
  spread = (spread | spread << 4) & 0x0F0F0F0Fu;
  spread = (spread | spread << 2) & 0x33333333u;
  const uint32_t large = ~(spread ^ spread >> 1) & 0x11111111u;
  const uint32_t negative = ~spread << 2 & 0x88888888u;
  return (digits + 5u * large) | negative;
}

// 2^(byte - 127), exactly, also of 0.
__device__ __forceinline__ float ScaleOf(uint32_t byte) {
  return __uint_as_float(ptx::Max(byte << 23, 0x00400000u));
}

}  // namespace hotplane::moe_cuda
