// The weights of a prefill: from the planes through shared memory into left operands of the tensor
// cores, their scales included, 64 of k at a time.
#pragma once

#include "format/tsym4.h"
#include "moe/cuda/expert_matrix.h"
#include "moe/cuda/fragments.h"

namespace hotplane::moe_cuda {

// Of one strip and 64 of k: what a lane has of codes, nibbles or quintals, and its scales.
template <uint32_t kTier>
struct RawTile;
template <>
struct RawTile<kTierBase> {
  uint2 codes;
  uint32_t scales[2][2];  // [row g, g+8][block]
};
template <>
struct RawTile<kTierNibbles> {
  uint4 nibbles;
  uint32_t scales[2][2];
  bool large;  // some lane's scales may be beyond kNibbleScaleMax
};
template <>
struct RawTile<kTierQuintals> {
  uint2 codes, words;
  uint32_t last;
  const QuintalConstants* constants;
  uint32_t scales[2][2];
  bool large;
};

// A strip's tile in a stage: codes, then nibbles or quintals, then scales.
template <uint32_t kTier>
struct StripBytes {
  static constexpr uint32_t kCodes = kTier == kTierNibbles ? 0 : kTileCodeBytes;
  static constexpr uint32_t kFine = kTier == kTierNibbles    ? kTileNibbleBytes
                                    : kTier == kTierQuintals ? kTileQuintalBytes
                                                             : 0;
  static constexpr uint32_t kScales = kCodes + kFine;
  static constexpr uint32_t kAll = kScales + kTileScaleBytes;
};

// Copies a strip into stages, tile by tile, in pieces of 16 bytes. A warp's: it alone reads them.
template <uint32_t kTier>
struct Weights {
  using Bytes = StripBytes<kTier>;
  static constexpr uint32_t kPieces = Bytes::kAll / 16;
  static constexpr uint32_t kTimes = (kPieces + 31) / 32;
  // Of pieces lane, lane + 32, ..., in the order in which they stand in a stage: where they are of
  // the next tile, and bytes from tile to tile.
  const uint8_t* from[kTimes];
  uint32_t step[kTimes];
  uint32_t slot;  // in a stage
  const QuintalConstants* constants;

  __device__ __forceinline__ Weights(const Matrix& matrix, uint64_t first_tile, uint32_t in_stage,
                                     const QuintalConstants& in_memory)
      : slot(in_stage), constants(&in_memory) {
#pragma unroll
    for (uint32_t i = 0; i < kTimes; ++i) {
      const int at = static_cast<int>(threadIdx.x % 32 + 32 * i) * 16;
      constexpr int kCodes = Bytes::kCodes, kScales = Bytes::kScales;
      const bool of_codes = at < kCodes, of_fine = !of_codes && at < kScales;
      const uint8_t* const plane = of_codes ? matrix.codes : of_fine ? matrix.fine : matrix.scales;
      const int begin = of_codes ? 0 : of_fine ? kCodes : kScales;
      step[i] = of_codes ? Bytes::kCodes : of_fine ? Bytes::kFine : kTileScaleBytes;
      from[i] = plane + first_tile * step[i] + (at - begin);
    }
  }
  // The next tile.
  __device__ __forceinline__ void Issue(uint32_t stage) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t i = 0; i < kTimes; ++i) {
      if (32 * (i + 1) <= kPieces || lane + 32 * i < kPieces)
        ptx::CopyAsync16(stage + slot + (lane + 32 * i) * 16, from[i]);
      from[i] += step[i];
    }
  }
  // What the lane needs of it.
  __device__ __forceinline__ void Load(const uint8_t* stage, RawTile<kTier>* raw) const {
    const uint32_t lane = threadIdx.x % 32;
    const uint8_t* const strip = stage + slot;
    if constexpr (kTier != kTierNibbles)
      raw->codes = *reinterpret_cast<const uint2*>(strip + lane * 8);
    if constexpr (kTier == kTierNibbles)
      raw->nibbles = *reinterpret_cast<const uint4*>(strip + lane * 16);
    if constexpr (kTier == kTierQuintals) {
      raw->words = *reinterpret_cast<const uint2*>(strip + Bytes::kCodes + lane * 8);
      raw->constants = constants;
      raw->last = *reinterpret_cast<const uint16_t*>(strip + Bytes::kCodes + 256 + lane * 2);
    }
#pragma unroll
    for (uint32_t row = 0; row < 2; ++row) {
#pragma unroll
      for (uint32_t block = 0; block < 2; ++block)
        raw->scales[row][block] = strip[Bytes::kScales + block * kStripRows + row * 8 + lane / 4];
    }
    if constexpr (kTier != kTierBase) {
      const uint32_t all =
          raw->scales[0][0] | raw->scales[0][1] | raw->scales[1][0] | raw->scales[1][1];
      static_assert(kNibbleScaleMax == 128);
      raw->large = __any_sync(kAllLanes, (all & kNibbleScaleMax) != 0);
    }
  }
};

// Pairs of one row by column, where the multiplies of a block have them.
__device__ __forceinline__ void Place(const uint32_t (&pairs)[4], uint32_t row,
                                      uint32_t (&a)[2][4]) {
#pragma unroll
  for (uint32_t column = 0; column < 4; ++column)
    a[column / 2][column % 2 * 2 + row] = pairs[column];
}

// The left operands of both multiplies of a block, scales included.
template <int kBlock>
__device__ __forceinline__ void Unpack(const RawTile<kTierBase>& raw, uint32_t (&a)[2][4]) {
#pragma unroll
  for (uint32_t row = 0; row < 2; ++row) {
    const CodeSelectors selectors = SelectorsOf(row == 0 ? raw.codes.x : raw.codes.y);
    ScaledLevels levels(raw.scales[row][kBlock]);
    if (raw.scales[row][kBlock] > kLevelScaleMax) {
      // Beyond float32 with the larger levels: infinite, all of them.
      levels.high = 0x7F7FFFFFu;
      levels.low = 0x80;
    }
    uint32_t pairs[2][2];
    ScaledPairs(kBlock == 0 ? selectors.even : selectors.even >> 16,
                kBlock == 0 ? selectors.odd : selectors.odd >> 16, levels, pairs);
#pragma unroll
    for (uint32_t multiply = 0; multiply < 2; ++multiply) {
      a[multiply][row] = pairs[multiply][0];
      a[multiply][2 + row] = pairs[multiply][1];
    }
  }
}

// Pairs in units of kNibbleUnit become weights.
__device__ __forceinline__ void Scale(const uint32_t (&scales)[2], bool large,
                                      uint32_t (&a)[2][4]) {
  uint32_t factors[2] = {FactorOf(scales[0]), FactorOf(scales[1])};
  if (large) {
    const uint32_t further[2] = {FurtherFactorOf(scales[0]), FurtherFactorOf(scales[1])};
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      a[i / 4][i % 4] = ptx::MultiplyPair(a[i / 4][i % 4], further[i % 2]);
    factors[0] = FactorOf(min(scales[0], kNibbleScaleMax));
    factors[1] = FactorOf(min(scales[1], kNibbleScaleMax));
  }
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i)
    a[i / 4][i % 4] = ptx::MultiplyPair(a[i / 4][i % 4], factors[i % 2]);
}
template <int kBlock>
__device__ __forceinline__ void Unpack(const RawTile<kTierNibbles>& raw, uint32_t (&a)[2][4]) {
  const uint4& n = raw.nibbles;
#pragma unroll
  for (uint32_t row = 0; row < 2; ++row) {
    uint32_t pairs[4];
    NibblePairs(kBlock == 0 ? (row == 0 ? n.x : n.z) : (row == 0 ? n.y : n.w), pairs);
    Place(pairs, row, a);
  }
  Scale({raw.scales[0][kBlock], raw.scales[1][kBlock]}, raw.large, a);
}
template <int kBlock>
__device__ __forceinline__ void Unpack(const RawTile<kTierQuintals>& raw, uint32_t (&a)[2][4]) {
  const QuintalConstants constants = *raw.constants;
#pragma unroll
  for (uint32_t row = 0; row < 2; ++row) {
    const uint32_t words =
        row == 0 ? (kBlock == 0 ? raw.words.x : __funnelshift_r(raw.words.x, raw.words.y, 20))
                 : (kBlock == 0 ? raw.words.y >> 8 : __funnelshift_r(raw.words.y, raw.last, 28));
    const CodeSelectors selectors = SelectorsOf(row == 0 ? raw.codes.x : raw.codes.y);
    uint32_t pairs[4];
    QuintalPairs(words, kBlock == 0 ? selectors.even : selectors.even >> 16,
                 kBlock == 0 ? selectors.odd : selectors.odd >> 16, constants, pairs);
    Place(pairs, row, a);
  }
  Scale({raw.scales[0][kBlock], raw.scales[1][kBlock]}, raw.large, a);
}

}  // namespace hotplane::moe_cuda
