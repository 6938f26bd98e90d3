// Products of a chunk of weights with a slice's staged activations.
#pragma once

#include "moe/cuda/decode_stream.h"
#include "moe/cuda/staging.h"

namespace hotplane::moe_cuda {

// Sums of a lane: [strip][row g or g+8][token]. Of the base tier a lane has one token, of FP4 two:
// those of TokenOf, of the blocks that stand in its columns.
struct Sums {
  float of[2][2][2];
};

__device__ __forceinline__ uint32_t TokenOf(uint32_t tier, uint32_t columns, uint32_t t,
                                            uint32_t which) {
  return tier == kTierBase ? t % (columns / 2) : 2 * t % columns + which;
}

// What a lane takes along from chunk to chunk.
struct Lane {
  uint32_t lane;
  uint32_t flags[4];  // by block side by side: 1 where it stands in this lane's column
};

// `block` is the chunk's first.
template <uint32_t kColumns>
__device__ __forceinline__ void AddBaseChunk(const uint8_t* stage, const Staged& staged,
                                             uint32_t block, const Lane& of, Sums* sums) {
  using C = Chunk<kTierBase>;
  constexpr uint32_t kSide = 8 / kColumns;  // blocks side by side
  const uint32_t t = of.lane % 4;
  const uint8_t* const scales = stage + C::kScales + of.lane / 4;
  const uint8_t* const activations = staged.values + block * kColumns * 32 + of.lane * 8;
  const float* const steps = staged.scales + block * (kColumns / 2) + t;
  int32_t acc[2][4];
  uint2 own = {};
#pragma unroll
  for (uint32_t tile = 0; tile < C::kTiles; ++tile) {
    CodeSelectors selectors[2][2];
#pragma unroll
    for (uint32_t strip = 0; strip < 2; ++strip) {
      const uint2 codes = *reinterpret_cast<const uint2*>(stage + strip * C::kStrip +
                                                          tile * kTileCodeBytes + of.lane * 8);
      selectors[strip][0] = SelectorsOf(codes.x);
      selectors[strip][1] = SelectorsOf(codes.y);
    }
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t at = 2 * tile + half;  // of the chunk's blocks
      const uint32_t place = at % kSide;
      if (place == 0) own = *reinterpret_cast<const uint2*>(activations + at * kColumns * 32);
      uint2 b = own;
      if (kSide > 1) b = {own.x * of.flags[place], own.y * of.flags[place]};
      const float step = place + 1 == kSide ? steps[(at + 1 - kSide) * (kColumns / 2)] : 0.0f;
#pragma unroll
      for (uint32_t strip = 0; strip < 2; ++strip) {
        const CodeSelectors(&from)[2] = selectors[strip];
        const CodeBytes bytes =
            half == 0 ? CodeBytesOf<0>(from[0], from[1]) : CodeBytesOf<1>(from[0], from[1]);
        if (place == 0) {
#pragma unroll
          for (int32_t& value : acc[strip]) value = 0;
        }
        ptx::MultiplyBytes(acc[strip], bytes.a, b.x, b.y);
        if (place + 1 != kSide) continue;
        const uint32_t of_lane = at + 1 - kSide + (kSide == 1 ? 0 : 2 * t / kColumns);
        const uint8_t* const scale = scales + (strip * C::kTiles * 2 + of_lane) * kStripRows;
#pragma unroll
        for (uint32_t row = 0; row < 2; ++row) {
          const int32_t sum = acc[strip][2 * row] * 256 + acc[strip][2 * row + 1];
          float& to = sums->of[strip][row][0];
          to = fmaf(static_cast<float>(sum) * step, ScaleOf(scale[row * 8]), to);
        }
      }
    }
  }
}

// The nibbles of one tile of a strip in a stage, by block: of row g and of row g+8.
template <uint32_t kTier>
struct TileNibbles;
template <>
struct TileNibbles<kTierNibbles> {
  uint4 nibbles;
  __device__ TileNibbles(const uint8_t* strip, uint32_t tile, uint32_t lane)
      : nibbles(*reinterpret_cast<const uint4*>(strip + tile * kTileNibbleBytes + lane * 16)) {}
  template <int kBlock>
  __device__ uint2 Block() const {
    return kBlock == 0 ? uint2{nibbles.x, nibbles.z} : uint2{nibbles.y, nibbles.w};
  }
};
template <>
struct TileNibbles<kTierQuintals> {
  uint2 codes, words;
  uint32_t last;
  __device__ TileNibbles(const uint8_t* strip, uint32_t tile, uint32_t lane) {
    codes = *reinterpret_cast<const uint2*>(strip + tile * kTileCodeBytes + lane * 8);
    const uint8_t* const fine = strip + Chunk<kTierQuintals>::kFine + tile * kTileQuintalBytes;
    words = *reinterpret_cast<const uint2*>(fine + lane * 8);
    last = *reinterpret_cast<const uint16_t*>(fine + 256 + lane * 2);
  }
  // The 80 bits hold 20 for each (row, block): row g block 0, 1, row g+8 block 0, 1.
  template <int kBlock>
  __device__ uint2 Block() const {
    const uint32_t upper = kBlock == 0 ? words.x : __funnelshift_r(words.x, words.y, 20);
    const uint32_t lower = kBlock == 0 ? words.y >> 8 : __funnelshift_r(words.y, last, 28);
    return {NibblesOfQuintals(upper, codes.x >> (16 * kBlock)),
            NibblesOfQuintals(lower, codes.y >> (16 * kBlock))};
  }
};

template <uint32_t kTier, uint32_t kColumns>
__device__ __forceinline__ void AddFp4Chunk(const uint8_t* stage, const Staged& staged,
                                            uint32_t block, const Lane& of, Sums* sums) {
  using C = Chunk<kTier>;
  constexpr uint32_t kSide = 8 / kColumns;
  const uint32_t t = of.lane % 4;
  const uint8_t* const scales = stage + C::kScales + of.lane / 4;
  const uint8_t* const activations = staged.values + block * kColumns * 64 + of.lane * 16;
  float acc[2][4];
  uint4 own = {};
#pragma unroll
  for (uint32_t tile = 0; tile < C::kTiles; ++tile) {
    const TileNibbles<kTier> tiles[2] = {{stage, tile, of.lane},
                                         {stage + C::kStrip, tile, of.lane}};
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t at = 2 * tile + half;
      const uint32_t place = at % kSide;
      if (place == 0) own = *reinterpret_cast<const uint4*>(activations + at * kColumns * 64);
      const uint32_t flag = of.flags[place];
      const uint4 b = {own.x * flag, own.y * flag, own.z * flag, own.w * flag};
#pragma unroll
      for (uint32_t strip = 0; strip < 2; ++strip) {
        const uint2 nibbles =
            half == 0 ? tiles[strip].template Block<0>() : tiles[strip].template Block<1>();
        const WeightFragments weights = NibbleFragments(nibbles.x, nibbles.y);
        if (place == 0) {
#pragma unroll
          for (float& value : acc[strip]) value = 0;
        }
        ptx::MultiplyBf16(acc[strip], weights.a[0], b.x, b.y);
        ptx::MultiplyBf16(acc[strip], weights.a[1], b.z, b.w);
        if (place + 1 != kSide) continue;
        const uint32_t of_lane = at + 1 - kSide + 2 * t / kColumns;
        const uint8_t* const scale = scales + (strip * C::kTiles * 2 + of_lane) * kStripRows;
#pragma unroll
        for (uint32_t row = 0; row < 2; ++row) {
          const float by = ScaleOf(scale[row * 8]);
          float(&to)[2] = sums->of[strip][row];
          to[0] = fmaf(acc[strip][2 * row], by, to[0]);
          to[1] = fmaf(acc[strip][2 * row + 1], by, to[1]);
        }
      }
    }
  }
}

template <uint32_t kTier>
__device__ __forceinline__ void AddFp4ChunkOf(uint32_t columns, const uint8_t* stage,
                                              const Staged& staged, uint32_t chunk, const Lane& of,
                                              Sums* sums) {
  const uint32_t block = chunk * 2 * Chunk<kTier>::kTiles;
  if (columns == 2)
    AddFp4Chunk<kTier, 2>(stage, staged, block, of, sums);
  else
    AddFp4Chunk<kTier, 4>(stage, staged, block, of, sums);
}

__device__ __forceinline__ void AddChunk(uint32_t tier, uint32_t columns, const uint8_t* stage,
                                         const Staged& staged, uint32_t chunk, const Lane& of,
                                         Sums* sums) {
  if (tier == kTierNibbles)
    return AddFp4ChunkOf<kTierNibbles>(columns, stage, staged, chunk, of, sums);
  if (tier == kTierQuintals)
    return AddFp4ChunkOf<kTierQuintals>(columns, stage, staged, chunk, of, sums);
  const uint32_t block = chunk * 2 * Chunk<kTierBase>::kTiles;
  if (columns == 2)
    AddBaseChunk<2>(stage, staged, block, of, sums);
  else if (columns == 4)
    AddBaseChunk<4>(stage, staged, block, of, sums);
  else
    AddBaseChunk<8>(stage, staged, block, of, sums);
}

}  // namespace hotplane::moe_cuda
