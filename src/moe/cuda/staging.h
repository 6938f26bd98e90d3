// The activations of a slice in shared memory, as right operands of the tensor cores.
//
// A product has eight columns. A column is one digit of one token's block of 32: activations are
// 16-bit integers with a scale for each block, q = 256 high + low, so that weights can be bytes too
// and sums are exact. At most amax/65024 of a block is lost by an activation. A slice of few tokens
// fills the columns with several blocks side by side, which accumulate apart and are scaled
// together: tokens are padded to 1, 2 or 4; `columns` digits, 8 / columns blocks side by side.
#pragma once

#include "format/tsym4.h"
#include "moe/cuda/fragments.h"
#include "moe/cuda/routed.h"
#include "moe/fp8.h"

namespace hotplane::moe_cuda {

__device__ __forceinline__ uint32_t ColumnsFor(uint32_t tokens) {
  return tokens == 1 ? 2 : tokens == 2 ? 4 : 8;
}

// Where staged activations begin and their scales: [block][token].
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

// The order of a lane's eight columns of a block in operands.
enum class Order : uint32_t {
  kEvenOdd,  // j 0, 2 of both halves, then j 1, 3, as codes are unpacked
  kInTurn,   // as nibbles are
};
__device__ __forceinline__ Order OrderOf(uint32_t tier) {
  return tier == kTierNibbles ? Order::kInTurn : Order::kEvenOdd;
}

// In which a tier's weights are bytes.
__device__ __forceinline__ float UnitOf(uint32_t tier) { return tier == kTierBase ? 1.0f : 0.5f; }

// How the activations of a block become integers.
struct Steps {
  float step, inverse;
  // Blocks of tiny values, or none, are zeros; infinity and NaN are kept by the step.
  __device__ __forceinline__ explicit Steps(float largest)
      : step(largest < 0x1p-100f ? 0.0f : largest / kSteps),
        inverse(largest < 0x1p-100f ? 0.0f : kSteps / largest) {}
  // The digits are those of an integer q: its low byte, and the high one of q + 128.
  __device__ __forceinline__ int Integer(float value) const {
    return __float2int_rn(value * inverse);
  }
};

// Digits of this lane's eight values: high digits (0) and low ones (1). The scale of the block
// comes back.
__device__ __forceinline__ float DigitsOf(const float (&values)[8], Order order,
                                          uint2 (&digits)[2]) {
  const Steps steps(LargestOfBlock(values));
  uint32_t high[8], low[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int q = steps.Integer(values[i]);
    high[i] = static_cast<uint32_t>((q + 128) >> 8);
    low[i] = static_cast<uint32_t>(q);
  }
  uint32_t words[2][2];
#pragma unroll
  for (int digit = 0; digit < 2; ++digit) {
    const uint32_t(&of)[8] = digit == 0 ? high : low;
    const uint32_t first =
        ptx::Permute(ptx::Permute(of[0], of[1], 0x40), ptx::Permute(of[2], of[3], 0x40), 0x5410);
    const uint32_t second =
        ptx::Permute(ptx::Permute(of[4], of[5], 0x40), ptx::Permute(of[6], of[7], 0x40), 0x5410);
    const bool in_turn = order == Order::kInTurn;
    words[digit][0] = ptx::Permute(first, second, in_turn ? 0x3210 : 0x6420);
    words[digit][1] = ptx::Permute(first, second, in_turn ? 0x7654 : 0x7531);
  }
  digits[0] = {words[0][0], words[0][1]};
  digits[1] = {words[1][0], words[1][1]};
  return steps.step;
}

// Where a column's digits are among the 32 of its block.
__device__ __forceinline__ uint32_t PlaceOf(Order order, uint32_t column) {
  const uint32_t half = column / 16, t = column % 16 / 4, j = column % 4;
  return t * 8 + (order == Order::kInTurn ? half * 4 + j : j % 2 * 4 + half * 2 + j / 2);
}

// The scale of the group of FP8 activations that a block of a row is in. By all lanes of a warp,
// four neighbours to a block; `row`: null where there is none.
__device__ __forceinline__ uint32_t Fp8ScaleOf(const uint16_t* row, uint32_t block, uint32_t blocks,
                                               uint32_t t) {
  constexpr uint32_t kBlocks = fp8::kGroup / kScaleBlock;
  const uint32_t first = block / kBlocks * kBlocks;
  const uint32_t end = row == nullptr ? first : min(first + kBlocks, blocks);
  uint32_t largest = 0;
  for (uint32_t at = first; at < end; ++at) {
    const uint16_t* const quarter = row + at * kScaleBlock + 4 * t;
    const uint2 halves[2] = {*reinterpret_cast<const uint2*>(quarter),
                             *reinterpret_cast<const uint2*>(quarter + 16)};
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      largest = max(largest, max(halves[i].x & 0x7FFFu, halves[i].x >> 16 & 0x7FFFu));
      largest = max(largest, max(halves[i].y & 0x7FFFu, halves[i].y >> 16 & 0x7FFFu));
    }
  }
  largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 1));
  return fp8::ScaleFor(max(largest, __shfl_xor_sync(kAllLanes, largest, 2)));
}

// Blocks are staged in whole chunks, zeros beyond the end.
inline constexpr uint32_t kChunkBlocks = 8;

__device__ __forceinline__ Staged StagedAt(uint32_t k, uint32_t columns, uint8_t* staging) {
  const uint32_t blocks = (k / 32 + kChunkBlocks - 1) / kChunkBlocks * kChunkBlocks;
  return {staging, reinterpret_cast<float*>(staging + blocks * 32 * columns)};
}

// A lane's quarter of a block of 32 activations, from its first column on.
__device__ __forceinline__ Eight EightAt(const uint16_t* quarter) {
  return {*reinterpret_cast<const uint2*>(quarter), *reinterpret_cast<const uint2*>(quarter + 16)};
}

// The digits of block and token i, by four neighbouring lanes.
__device__ __forceinline__ void StoreDigits(uint32_t tier, uint32_t i, const float (&values)[8],
                                            const Staged& to) {
  const uint32_t t = threadIdx.x % 4;
  uint2 digits[2];
  const float step = DigitsOf(values, OrderOf(tier), digits) * UnitOf(tier);
#pragma unroll
  for (uint32_t digit = 0; digit < 2; ++digit)
    *reinterpret_cast<uint2*>(to.values + (2 * i + digit) * 32 + t * 8) = digits[digit];
  if (t == 0) to.scales[i] = step;
}

// Activations for weights of `tier`. By the threads of the block from `first_thread` on, the first
// of a warp: four neighbours to a (block of 32, token). `rows` gives the row of a token's
// activations in bfloat16; kFp8: they are rounded to FP8 first.
template <bool kFp8, typename Rows>
__device__ __forceinline__ void Stage(uint32_t tier, uint32_t k, uint32_t count, const Rows& rows,
                                      const Staged& to, uint32_t first_thread = 0) {
  const uint32_t tokens = ColumnsFor(count) / 2;
  const uint32_t t = threadIdx.x % 4;
  const uint32_t blocks = k / kScaleBlock;
  const uint32_t total = (blocks + kChunkBlocks - 1) / kChunkBlocks * kChunkBlocks * tokens;
  for (uint32_t i = (threadIdx.x - first_thread) / 4; i < total;
       i += (blockDim.x - first_thread) / 4) {
    const uint32_t block = i / tokens, token = i - block * tokens;
    const bool there = token < count && block < blocks;
    Eight eight = {};
    if (there) eight = EightAt(rows(token) + block * kScaleBlock + 4 * t);
    float values[8];
    Widen(eight, values);
    if (kFp8) {
      const uint32_t scale = Fp8ScaleOf(there ? rows(token) : nullptr, block, blocks, t);
#pragma unroll
      for (float& value : values) value = fp8::Rounded(value, scale);
    }
    StoreDigits(tier, i, values, to);
  }
}
// A warp has eight such pairs at a time, all or none: chunks are eight blocks.
static_assert(kChunkBlocks % 8 == 0);

// Activations of one token on their way, before what they are staged for is known. By all threads
// of the block.
class StagedRow {
 public:
  __device__ __forceinline__ StagedRow(const uint16_t* row, uint32_t k)
      : row_(row + 4 * (threadIdx.x % 4)), blocks_(k / kScaleBlock) {
#pragma unroll
    for (uint32_t turn = 0; turn < kTurns; ++turn) early_[turn] = Load(BlockOf(turn));
  }
  __device__ __forceinline__ void Store(uint32_t tier, const Staged& to) const {
    const uint32_t total = (blocks_ + kChunkBlocks - 1) / kChunkBlocks * kChunkBlocks;
#pragma unroll
    for (uint32_t turn = 0; turn < kTurns; ++turn)
      if (BlockOf(turn) < total) Store(tier, BlockOf(turn), early_[turn], to);
    for (uint32_t block = BlockOf(kTurns); block < total; block += blockDim.x / 4)
      Store(tier, block, Load(block), to);
  }

 private:
  static constexpr uint32_t kTurns = 2;
  __device__ __forceinline__ uint32_t BlockOf(uint32_t turn) const {
    return (turn * blockDim.x + threadIdx.x) / 4;
  }
  __device__ __forceinline__ Eight Load(uint32_t block) const {
    return block < blocks_ ? EightAt(row_ + block * kScaleBlock) : Eight{};
  }
  __device__ __forceinline__ static void Store(uint32_t tier, uint32_t block, const Eight& eight,
                                               const Staged& to) {
    float values[8];
    Widen(eight, values);
    StoreDigits(tier, block, values, to);
  }

  const uint16_t* const row_;
  const uint32_t blocks_;
  Eight early_[kTurns];
};

}  // namespace hotplane::moe_cuda
