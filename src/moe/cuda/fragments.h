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
      : high((scale >> 1) * 0x01010101u + 0x01008081u), low(scale << 7) {}
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

// Of one row: 8 nibbles, columns 4t.. of the first half, of the second; pairs by column.
__device__ __forceinline__ void NibblePairs(uint32_t nibbles, uint32_t (&pairs)[4]) {
  pairs[0] = NibblePair<0>(nibbles);
  pairs[1] = NibblePair<1>(nibbles);
  pairs[2] = NibblePair<2>(nibbles);
  pairs[3] = NibblePair<3>(nibbles);
}

// A pair of nibbles in units of kNibbleUnit becomes one times 2^(scale - 127) by the product with
// FactorOf, exactly, and beyond kNibbleScaleMax, where that is no bfloat16, also with
// FurtherFactorOf.
inline constexpr uint32_t kNibbleScaleMax = 128;
inline constexpr uint32_t kBothExponents = 0x00800080u;
__device__ __forceinline__ uint32_t FactorOf(uint32_t scale) {
  return (scale + 126) * kBothExponents;
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

// The digits of two words of quintals, of the first half's in the low 16 bits, of the second
// half's in the high ones.
//
// Up to 1023, the bits of a whole number are a float16, it times 2^-24, and what is computed with
// such is rounded to whole numbers: a float16 product divides, and both words at once.
struct DigitPairs {
  uint32_t of[4];
};
inline constexpr uint32_t kBoth = 0x00010001u;
// What a kernel reads from memory: of constants that the compiler knows it would make a copy for
// each use.
struct alignas(16) QuintalConstants {
  // 1/5 and 1/25 in float16, to 2^-11 of them.
  uint32_t fifth, twenty_fifth;
  // What a code makes of a digit, merge of format/tsym4.h, as bytes by code of a pair as NibblePair
  // gives it: 5 more when it is +-4, and the sign.
  uint32_t code_low, code_high;
};
inline constexpr QuintalConstants kQuintalConstants = {0x3266u * kBoth, 0x291Fu * kBoth,
                                                       0x40000040u, 0x01008081u};
__device__ __forceinline__ DigitPairs DigitsOfWords(uint32_t words,
                                                    const QuintalConstants& constants) {
  constexpr uint32_t kHundredTwentyFifth = 0x2019u * kBoth;  // to 2^-11 of it, too
  constexpr uint32_t kMinusFive = 0xC500u * kBoth;
  // Less 312, the word of four digits 2, digits are -2 to 2: what a division leaves is at most 62
  // of 125, less than half, so that rounding to the nearest gives the quotient. The half is missed
  // by 1/250 at least, the quotient by 2.5 * 2^-11.
  const uint32_t pair = (words & 0x3FFu) | (words << 6 & 0x03FF0000u);
  const uint32_t centred = ptx::AddHalves(pair, 0x8000u * kBoth + 312u * kBoth);
  const uint32_t by5 = ptx::MultiplyAddHalves(centred, constants.fifth, 62u * kBoth);
  const uint32_t by25 = ptx::MultiplyAddHalves(centred, constants.twenty_fifth, 12u * kBoth);
  const uint32_t by125 = ptx::MultiplyAddHalves(centred, kHundredTwentyFifth, 2u * kBoth);
  // A quotient 0 may be -0, which the sum with a positive zero is not.
  return {{ptx::MultiplyAddHalves(by5, kMinusFive, pair),
           ptx::MultiplyAddHalves(by25, kMinusFive, by5),
           ptx::MultiplyAddHalves(by125, kMinusFive, by25), ptx::AddHalves(by125, 0)}};
}

// Of one row: the pairs of a block by column, in units of kNibbleUnit, from the 20 bits of its
// words and the selectors of its codes.
__device__ __forceinline__ void QuintalPairs(uint32_t words, uint32_t even, uint32_t odd,
                                             const QuintalConstants& constants,
                                             uint32_t (&pairs)[4]) {
  const DigitPairs digits = DigitsOfWords(words, constants);
#pragma unroll
  for (uint32_t column = 0; column < 4; ++column) {
    const uint32_t selectors = column % 2 == 0 ? even : odd;
    const uint32_t low = ptx::Permute(constants.code_low, 0, selectors);
    const uint32_t high = ptx::Permute(constants.code_high, 0, selectors);
    const uint32_t of_code = ptx::Permute(low, high, column < 2 ? 0x6240 : 0x7351);
    pairs[column] = digits.of[column] * 64u + of_code;
  }
}

// 2^(byte - 127), exactly, also of 0.
__device__ __forceinline__ float ScaleOf(uint32_t byte) {
  return __uint_as_float(ptx::Max(byte << 23, 0x00400000u));
}

}  // namespace hotplane::moe_cuda
