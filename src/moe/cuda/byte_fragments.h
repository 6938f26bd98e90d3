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
    return ptx::Permute(levels, 0, kBlock == 0 ? selectors : ptx::HighHalf(selectors));
  };
  return {{look_up(upper.even), look_up(lower.even), look_up(upper.odd), look_up(lower.odd)}};
}

// FP4 in bytes, in units of 0.5: the magnitudes 0, 1, 2, 3, 4, 6, 8, 12 are looked up by nibbles. A
// nibble with its sign bit asks for the sign of a magnitude, which is 0: so the lookup gives the
// weights that are positive, and without the sign bits all magnitudes. Registers as in BlockBytes,
// of the columns in the order of the nibbles. `magnitudes`: kNibbleMagnitudes.
inline constexpr uint2 kNibbleMagnitudes = {0x03020100u, 0x0C080604u};
inline constexpr uint32_t kNibbleSigns = 0x88888888u;
// The eight nibbles of a row's block: the lower halves of two words have four each.
struct Nibbles {
  uint32_t first, second;
};
__device__ __forceinline__ BlockBytes NibbleBytes(uint2 magnitudes, const Nibbles& upper,
                                                  const Nibbles& lower) {
  const auto look_up = [&](uint32_t selectors) {
    return ptx::Permute(magnitudes.x, magnitudes.y, selectors);
  };
  return {
      {look_up(upper.first), look_up(lower.first), look_up(upper.second), look_up(lower.second)}};
}
__device__ __forceinline__ Nibbles WithSigns(uint32_t nibbles) { return {nibbles, nibbles >> 16}; }
// The nibbles have no signs, so that neither half is NaN.
__device__ __forceinline__ Nibbles WithoutSigns(uint32_t nibbles) {
  return {nibbles, ptx::HighHalf(nibbles)};
}

// Quintals become nibbles of another order, in which bit 2 is that the code is +-4, or the digit 4:
// the magnitudes 0, 1, 2, 3, 6, 8, 12, 4.
inline constexpr uint2 kQuintalMagnitudes = {kNibbleMagnitudes.x, 0x040C0806u};
// The entry of a word's four digits in base 5 in a table of 1024, in such nibbles: digits 0 and 2
// in byte 0, 1 and 3 in byte 2. Words that are none have no digits.
inline constexpr uint32_t kQuintalWords = 1024;
__device__ __forceinline__ uint32_t QuintalEntry(uint32_t word) {
  if (word >= 625) return 0;
  const uint32_t digits = DigitsOfWord(word), fours = digits & 0x4444u;
  const uint32_t of = digits | fours >> 1 | fours >> 2;
  return (of & 0xFu) | (of & 0xF00u) >> 4 | (of & 0xF0u) << 12 | (of & 0xF000u) << 8;
}
// Where the entry of a word is, in bytes of shared memory: of the word that begins kFrom bits on in
// {high, low}. The table is at a multiple of its size, so that its address is merged in.
inline constexpr uint32_t kQuintalTableBytes = 4 * kQuintalWords;
template <uint32_t kFrom>
__device__ __forceinline__ uint32_t QuintalAt(uint32_t low, uint32_t high, uint32_t table) {
  const uint32_t bits = kFrom < 2 ? low << (2 - kFrom) : __funnelshift_r(low, high, kFrom - 2);
  return (bits & (kQuintalTableBytes - 4)) | table;
}
// What codes add to the nibbles of a row's 16 columns: bit 2 that it is +-4, bit 3 that it is
// negative. Even columns, odd ones; both blocks of a tile.
__device__ __forceinline__ CodeSelectors QuintalBitsOf(uint32_t codes) {
  // A code's second bit says that it is positive; -4 and 4 have two bits that are the same.
  const uint32_t bits = ptx::SameAsMasked(codes, codes >> 1, 0x55555555u);
  return {bits << 2, bits};
}
// Magnitudes and weights of a row's block; `at`: of its two words. Sums of words without common
// bits: they run beside byte permutations.
struct QuintalNibbles {
  Nibbles magnitudes, weights;
  __device__ __forceinline__ QuintalNibbles() {}
  __device__ __forceinline__ QuintalNibbles(const uint32_t (&at)[2], const CodeSelectors& bits,
                                            uint32_t block) {
    const uint32_t of_block = ptx::Permute(bits.even, bits.odd, block == 0 ? 0x5410 : 0x7632);
    const uint32_t signs = of_block & kNibbleSigns;
    magnitudes = WithoutSigns((ptx::LoadShared(at[0]) + 256u * ptx::LoadShared(at[1])) |
                              (of_block & 0x44444444u));
    weights = {magnitudes.first + signs, magnitudes.second + ptx::HighHalf(signs)};
  }
};

}  // namespace hotplane::moe_cuda
