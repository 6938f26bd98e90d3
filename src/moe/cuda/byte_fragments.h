// Weights as bytes, left operands of the tensor cores' integer products.
#pragma once

#include "moe/cuda/fragments.h"

namespace hotplane::moe_cuda {

// Of one block of 32 columns: a[0] has row g, a[1] row g+8, a[2] and a[3] the same rows' other
// columns.
struct BlockBytes {
  uint32_t a[4];
};

// The base tier: -4, -1, 1, 4 are looked up by a byte permutation whose selectors are the codes.
// Columns 4t, 4t+2 of the first half, then of the second; then the odd columns between them.
// kBlock: 0, 1: which block of the tile. `levels`: kCodeLevels.
inline constexpr uint32_t kCodeLevels = 0x0401FFFCu;
template <int kBlock>
__device__ __forceinline__ BlockBytes CodeBytesOf(uint32_t levels, const CodeSelectors& upper,
                                                  const CodeSelectors& lower) {
  const auto look_up = [&](uint32_t selectors) {
    return ptx::Permute(levels, 0, kBlock == 0 ? selectors : selectors >> 16);
  };
  return {{look_up(upper.even), look_up(lower.even), look_up(upper.odd), look_up(lower.odd)}};
}

// FP4 in bytes, in units of 0.5: the magnitudes 0, 1, 2, 3, 4, 6, 8, 12 are looked up by nibbles. A
// nibble with its sign bit asks for the sign of a magnitude, which is 0: so the lookup gives the
// weights that are positive, and without the sign bits all magnitudes. Registers as in BlockBytes,
// of the columns in the order of the nibbles. `magnitudes`: kNibbleMagnitudes.
inline constexpr uint2 kNibbleMagnitudes = {0x03020100u, 0x0C080604u};
inline constexpr uint32_t kNibbleSigns = 0x88888888u;
__device__ __forceinline__ BlockBytes NibbleBytes(uint2 magnitudes, uint32_t upper,
                                                  uint32_t lower) {
  const auto look_up = [&](uint32_t selectors) {
    return ptx::Permute(magnitudes.x, magnitudes.y, selectors);
  };
  return {{look_up(upper), look_up(lower), look_up(upper >> 16), look_up(lower >> 16)}};
}

// The codes of one block in nibbles, in the order of BlockBytes: the even columns, the odd ones.
__device__ __forceinline__ uint32_t CodesOfBlock(const CodeSelectors& of, uint32_t block) {
  return ptx::Permute(of.even, of.odd, block == 0 ? 0x5410 : 0x7632);
}

// Quintals become nibbles of another order, in which bit 2 is that the code is +-4, or the digit 4:
// the magnitudes 0, 1, 2, 3, 6, 8, 12, 4.
inline constexpr uint2 kQuintalMagnitudes = {0x03020100u, 0x040C0806u};
// The entry of a word's four digits in base 5 in a table of 1024, in such nibbles: digits 0 and 2
// in byte 0, 1 and 3 in byte 2. Words that are none have no digits.
inline constexpr uint32_t kQuintalWords = 1024;
__device__ __forceinline__ uint32_t QuintalEntry(uint32_t word) {
  if (word >= 625) return 0;
  const uint32_t digits = DigitsOfWord(word), fours = digits & 0x4444u;
  const uint32_t of = digits | fours >> 1 | fours >> 2;
  return (of & 0xFu) | (of & 0xF00u) >> 4 | (of & 0xF0u) << 12 | (of & 0xF000u) << 8;
}
// The magnitudes of two words of quintals and the codes of their block, in the order of
// CodesOfBlock.
__device__ __forceinline__ uint32_t QuintalNibbles(uint32_t words, uint32_t codes,
                                                   const uint32_t* table) {
  const auto entry = [&](uint32_t bytes) {
    return *reinterpret_cast<const uint32_t*>(reinterpret_cast<const uint8_t*>(table) +
                                              (bytes & 4 * (kQuintalWords - 1)));
  };
  const uint32_t large = ptx::SameBits(codes << 1, codes << 2, 0x44444444u);
  return entry(words << 2) + 256u * entry(words >> 8) + large;
}
__device__ __forceinline__ uint32_t WithSigns(uint32_t nibbles, uint32_t codes) {
  return nibbles | (~codes << 2 & kNibbleSigns);
}

}  // namespace hotplane::moe_cuda
