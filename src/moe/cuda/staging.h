// The activations of a slice in shared memory, as right operands of the tensor cores.
//
// A product has eight columns. A slice of few tokens fills them with several blocks of 32 k side by
// side, which accumulate apart and are scaled together:
//   base  a column is one digit of one token's block: activations are 16-bit integers with a scale
//         for each block of 32, q = 256 high + low, so that weights can be bytes too and sums are
//         exact. At most amax/65024 of a block is lost by an activation.
//   FP4   a column is one token's block in bfloat16.
// Tokens are padded to 1, 2 or 4 (base), 2 or 4 (FP4): `columns` digits or tokens, 8 / columns
// blocks side by side.
#pragma once

#include "format/tsym4.h"
#include "moe/cuda/fragments.h"
#include "moe/cuda/routed.h"

namespace hotplane::moe_cuda {

__device__ __forceinline__ uint32_t ColumnsFor(uint32_t tier, uint32_t tokens) {
  if (tier == kTierBase) return tokens == 1 ? 2 : tokens == 2 ? 4 : 8;
  return tokens <= 2 ? 2 : 4;
}

// Where staged activations begin and their scales, which only the base tier has: [block][token].
struct Staged {
  uint8_t* values;
  float* scales;
};

// Eight activations of a lane: columns 4t.. of both halves of a block.
struct Eight {
  uint2 first, second;
};

// The largest magnitude of a block, whose quarters are held by four neighbouring lanes.
__device__ __forceinline__ float LargestOfBlock(const float (&values)[8]) {
  // As bits: they order magnitudes, and NaN stands above infinity.
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(values[i]) & 0x7FFFFFFFu);
  largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 1));
  return __uint_as_float(max(largest, __shfl_xor_sync(kAllLanes, largest, 2)));
}

__device__ __forceinline__ void Widen(const Eight& eight, float (&values)[8]) {
  const uint32_t pairs[4] = {eight.first.x, eight.first.y, eight.second.x, eight.second.y};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = __uint_as_float(pairs[i] << 16);
    values[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000u);
  }
}

inline constexpr float kSteps = 32512;  // 127 * 256

// Digits of this lane's eight values, in the order of CodeBytes: high digits (0) and low ones (1)
// of j 0, 2 of both halves, then of j 1, 3. The scale of the block comes back.
__device__ __forceinline__ float DigitsOf(const Eight& eight, uint2 (&digits)[2]) {
  float values[8];
  Widen(eight, values);
  const float largest = LargestOfBlock(values);
  // Blocks of tiny values, or none, are zeros; infinity and NaN are kept by the scale.
  const bool tiny = largest < 0x1p-100f;
  const float step = tiny ? 0.0f : largest / kSteps;
  const float inverse = tiny ? 0.0f : kSteps / largest;
  uint32_t high[8], low[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int q = __float2int_rn(values[i] * inverse);
    high[i] = static_cast<uint32_t>((q + 128) >> 8);
    low[i] = static_cast<uint32_t>(q);
  }
  constexpr int kOrder[2][4] = {{0, 2, 4, 6}, {1, 3, 5, 7}};
  uint32_t words[2][2];
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int(&at)[4] = kOrder[part];
    words[0][part] = ptx::Permute(ptx::Permute(high[at[0]], high[at[1]], 0x40),
                                  ptx::Permute(high[at[2]], high[at[3]], 0x40), 0x5410);
    words[1][part] = ptx::Permute(ptx::Permute(low[at[0]], low[at[1]], 0x40),
                                  ptx::Permute(low[at[2]], low[at[3]], 0x40), 0x5410);
  }
  digits[0] = {words[0][0], words[0][1]};
  digits[1] = {words[1][0], words[1][1]};
  return step;
}

inline constexpr uint32_t kTwoTo64 = 0x5F805F80u;  // twice in bfloat16
// The four registers of this lane's values, times 2^64: products with nibbles in units of 2^-126
// stay normal in float32.
__device__ __forceinline__ uint4 ScaledOf(const Eight& eight) {
  const ActivationFragments of = ActivationsOf(eight.first, eight.second);
  uint32_t pairs[4] = {of.b[0][0], of.b[0][1], of.b[1][0], of.b[1][1]};
#pragma unroll
  for (uint32_t& pair : pairs) pair = ptx::MultiplyPair(pair, kTwoTo64);
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}
// What takes the sums of FP4 back: 1 / (kNibbleUnit * 2^64).
inline constexpr float kFp4SumUnit = 0x1p62f;

// Blocks are staged in whole chunks, zeros beyond the end.
inline constexpr uint32_t kChunkBlocks = 8;

// Tiers that are staged alike.
__device__ __forceinline__ uint32_t FormatOf(uint32_t tier) {
  return tier == kTierQuintals ? static_cast<uint32_t>(kTierNibbles) : tier;
}

__device__ __forceinline__ Staged StagedAt(uint32_t tier, uint32_t k, uint32_t columns,
                                           uint8_t* staging) {
  const uint32_t blocks = (k / 32 + kChunkBlocks - 1) / kChunkBlocks * kChunkBlocks;
  // Digits of a token take two columns of one byte, its bfloat16 one of two.
  const uint32_t value_bytes = blocks * 32 * columns * (tier == kTierBase ? 1 : 2);
  return {staging, reinterpret_cast<float*>(staging + value_bytes)};
}

// By the threads of the block from `first_thread` on, the first of a warp: four neighbours to a
// (block of 32, token). `rows` gives the row of a token's activations in bfloat16.
template <typename Rows>
__device__ __forceinline__ void Stage(uint32_t tier, uint32_t k, uint32_t count, const Rows& rows,
                                      const Staged& to, uint32_t first_thread = 0) {
  const uint32_t columns = ColumnsFor(tier, count);
  const uint32_t tokens = tier == kTierBase ? columns / 2 : columns;
  const uint32_t t = threadIdx.x % 4;
  const uint32_t blocks = k / kScaleBlock;
  const uint32_t total = (blocks + kChunkBlocks - 1) / kChunkBlocks * kChunkBlocks * tokens;
  for (uint32_t i = (threadIdx.x - first_thread) / 4; i < total;
       i += (blockDim.x - first_thread) / 4) {
    const uint32_t block = i / tokens, token = i - block * tokens;
    Eight eight = {};
    if (token < count && block < blocks) {
      const uint16_t* const row = rows(token) + block * kScaleBlock + 4 * t;
      eight.first = *reinterpret_cast<const uint2*>(row);
      eight.second = *reinterpret_cast<const uint2*>(row + 16);
    }
    if (tier != kTierBase) {
      *reinterpret_cast<uint4*>(to.values + i * 64 + t * 16) = ScaledOf(eight);
      continue;
    }
    uint2 digits[2];
    const float step = DigitsOf(eight, digits);
#pragma unroll
    for (uint32_t digit = 0; digit < 2; ++digit)
      *reinterpret_cast<uint2*>(to.values + (2 * i + digit) * 32 + t * 8) = digits[digit];
    if (t == 0) to.scales[i] = step;
  }
}
// A warp has eight such pairs at a time, all or none: chunks are eight blocks.
static_assert(kChunkBlocks % 8 == 0);

}  // namespace hotplane::moe_cuda
