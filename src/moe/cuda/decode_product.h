// Products of a chunk of weights with a slice's staged activations.
#pragma once

#include "moe/cuda/byte_fragments.h"
#include "moe/cuda/decode_stream.h"
#include "moe/cuda/staging.h"

namespace hotplane::moe_cuda {

// Sums of a lane: [strip][row g or g+8], of the token of TokenOf, of the blocks that stand in the
// lane's column.
template <uint32_t kStrips>
struct Sums {
  float of[kStrips][2];
};

__device__ __forceinline__ uint32_t TokenOf(uint32_t columns, uint32_t t) {
  return t % (columns / 2);
}

// Constants of the products in shared memory. Those of lanes are the same for all, but the compiler
// must not know it: it would not keep them in registers, but make a copy for each use.
struct ProductTables {
  uint32_t digits[kQuintalWords];  // QuintalEntry
  uint32_t magnitudes[3][32];      // kNibbleMagnitudes, kQuintalMagnitudes
  uint32_t levels[32];             // kCodeLevels
  uint32_t address[32];            // of `digits`, in shared memory

  // By the threads of the block from `first_thread` on.
  __device__ void Fill(bool quintals, uint32_t first_thread) {
    const uint32_t thread = threadIdx.x - first_thread;
    if (thread < 32) {
      magnitudes[0][thread] = kNibbleMagnitudes.x;
      magnitudes[1][thread] = kNibbleMagnitudes.y;
      magnitudes[2][thread] = kQuintalMagnitudes.y;
      levels[thread] = kCodeLevels;
      address[thread] = ptx::SharedAddress(digits);
    }
    if (!quintals) return;
    for (uint32_t word = thread; word < kQuintalWords; word += blockDim.x - first_thread)
      digits[word] = QuintalEntry(word);
  }
};

static_assert(sizeof(ProductTables) == kDecodeTableBytes && kDecodeTableBytes % 16 == 0);
static_assert(kQuintalTableBytes == kDecodeTableAlign);

extern __shared__ __align__(16) uint8_t memory[];
// A block's shared memory begins with them, at a multiple of kQuintalTableBytes.
__device__ __forceinline__ ProductTables& Tables() {
  const uint32_t begin = ptx::SharedAddress(memory);
  return *reinterpret_cast<ProductTables*>(memory + (0 - begin) % kQuintalTableBytes);
}

// What a lane takes along from chunk to chunk.
struct Lane {
  uint32_t lane;
  uint32_t flags[4];         // by block side by side: 1 where it stands in this lane's column
  uint32_t digits;           // where ProductTables::digits are in shared memory
  uint32_t levels;           // kCodeLevels
  uint32_t small, large[2];  // of kNibbleMagnitudes and kQuintalMagnitudes

  __device__ explicit Lane(uint32_t of)
      : lane(of),
        digits(Tables().address[of]),
        levels(Tables().levels[of]),
        small(Tables().magnitudes[0][of]),
        large{Tables().magnitudes[1][of], Tables().magnitudes[2][of]} {}

  __device__ void SetColumns(uint32_t columns) {
#pragma unroll
    for (uint32_t q = 0; q < 4; ++q) {
      flags[q] = lane / 4 / columns == q ? 1 : 0;
      // Opaque, so that a multiplication by it stays one: it runs beside the byte permutations, a
      // selection would compete with them.
      asm volatile("" : "+r"(flags[q]));
    }
  }
};

// The weights of one tile of a strip in a stage, block by block, as left operands of byte products.
// Of FP4 there are those that are positive and all magnitudes: a weight is twice the first less the
// second.
template <uint32_t kTier>
struct TileBytes;
template <>
struct TileBytes<kTierBase> {
  static constexpr bool kMagnitudes = false;
  CodeSelectors upper, lower;
  __device__ TileBytes() {}
  __device__ TileBytes(const uint8_t* strip, uint32_t tile, const Lane& of) {
    const uint2 codes =
        *reinterpret_cast<const uint2*>(strip + tile * kTileCodeBytes + of.lane * 8);
    upper = SelectorsOf(codes.x);
    lower = SelectorsOf(codes.y);
  }
  template <int kBlock>
  __device__ BlockBytes Weights(const Lane& of) const {
    return CodeBytesOf<kBlock>(of.levels, upper, lower);
  }
  template <int kBlock>
  __device__ BlockBytes Magnitudes(const Lane&) const {
    return {};
  }
};
template <int kOf>  // Lane::large
struct Fp4Bytes {
  static constexpr bool kMagnitudes = true;
  // By block, of row g and row g+8.
  Nibbles weights[2][2], magnitudes[2][2];
  template <int kBlock>
  __device__ BlockBytes Weights(const Lane& of) const {
    return NibbleBytes({of.small, of.large[kOf]}, weights[kBlock][0], weights[kBlock][1]);
  }
  template <int kBlock>
  __device__ BlockBytes Magnitudes(const Lane& of) const {
    return NibbleBytes({of.small, of.large[kOf]}, magnitudes[kBlock][0], magnitudes[kBlock][1]);
  }
};
template <>
struct TileBytes<kTierNibbles> : Fp4Bytes<0> {
  __device__ TileBytes() {}
  __device__ TileBytes(const uint8_t* strip, uint32_t tile, const Lane& of) {
    const uint4 nibbles =
        *reinterpret_cast<const uint4*>(strip + tile * kTileNibbleBytes + of.lane * 16);
    const uint32_t words[2][2] = {{nibbles.x, nibbles.z}, {nibbles.y, nibbles.w}};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      weights[i / 2][i % 2] = WithSigns(words[i / 2][i % 2]);
      magnitudes[i / 2][i % 2] = WithoutSigns(words[i / 2][i % 2] & ~kNibbleSigns);
    }
  }
};
template <>
struct TileBytes<kTierQuintals> : Fp4Bytes<1> {
  __device__ TileBytes() {}
  // The 80 bits hold two words for each (row, block): row g block 0, 1, row g+8 block 0, 1.
  __device__ TileBytes(const uint8_t* strip, uint32_t tile, const Lane& of) {
    const uint2 codes =
        *reinterpret_cast<const uint2*>(strip + tile * kTileCodeBytes + of.lane * 8);
    const uint8_t* const fine = strip + Chunk<kTierQuintals>::kFine + tile * kTileQuintalBytes;
    const uint2 words = *reinterpret_cast<const uint2*>(fine + of.lane * 8);
    const uint32_t last = *reinterpret_cast<const uint16_t*>(fine + 256 + of.lane * 2);
    const uint32_t at[2][2][2] = {
        {{QuintalAt<0>(words.x, words.y, of.digits), QuintalAt<10>(words.x, words.y, of.digits)},
         {QuintalAt<8>(words.y, last, of.digits), QuintalAt<18>(words.y, last, of.digits)}},
        {{QuintalAt<20>(words.x, words.y, of.digits), QuintalAt<30>(words.x, words.y, of.digits)},
         {QuintalAt<28>(words.y, last, of.digits), QuintalAt<6>(last, 0, of.digits)}}};
    const CodeSelectors bits[2] = {QuintalBitsOf(codes.x), QuintalBitsOf(codes.y)};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t block = i / 2, row = i % 2;
      const QuintalNibbles of_block(at[block][row], bits[row], block);
      magnitudes[block][row] = of_block.magnitudes;
      weights[block][row] = of_block.weights;
    }
  }
};

// `block` is the chunk's first.
template <typename C, uint32_t kColumns>
__device__ __forceinline__ void AddChunkOf(const uint8_t* stage, const Staged& staged,
                                           uint32_t block, const Lane& of, Sums<C::kStrips>* sums) {
  using Bytes = TileBytes<C::kTier>;
  constexpr uint32_t kSide = 8 / kColumns;  // blocks side by side
  const uint32_t t = of.lane % 4;
  const uint8_t* const scales = stage + C::kScales + of.lane / 4;
  const uint8_t* const activations = staged.values + block * kColumns * 32 + of.lane * 8;
  const float* const steps = staged.scales + block * (kColumns / 2) + t;
  int32_t acc[C::kStrips][4], all[C::kStrips][4];
  uint2 own = {};
#pragma unroll
  for (uint32_t tile = 0; tile < C::kTiles; ++tile) {
    Bytes strips[C::kStrips];
#pragma unroll
    for (uint32_t strip = 0; strip < C::kStrips; ++strip)
      strips[strip] = Bytes(stage + strip * C::kStrip, tile, of);
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t at = 2 * tile + half;  // of the chunk's blocks
      const uint32_t place = at % kSide;
      if (place == 0) own = *reinterpret_cast<const uint2*>(activations + at * kColumns * 32);
      uint2 b = own;
      if (kSide > 1) b = {own.x * of.flags[place], own.y * of.flags[place]};
      const uint32_t first = at + 1 - kSide;  // where the last of those side by side ends them
      const float step = place + 1 == kSide ? steps[first * (kColumns / 2)] : 0.0f;
#pragma unroll
      for (uint32_t strip = 0; strip < C::kStrips; ++strip) {
        if (place == 0) {
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[strip][i] = all[strip][i] = 0;
        }
        const Bytes& bytes = strips[strip];
        const BlockBytes weights =
            half == 0 ? bytes.template Weights<0>(of) : bytes.template Weights<1>(of);
        ptx::MultiplyBytes(acc[strip], weights.a, b.x, b.y);
        if (Bytes::kMagnitudes) {
          const BlockBytes magnitudes =
              half == 0 ? bytes.template Magnitudes<0>(of) : bytes.template Magnitudes<1>(of);
          ptx::MultiplyBytes(all[strip], magnitudes.a, b.x, b.y);
        }
        if (place + 1 != kSide) continue;
        const uint32_t of_lane = first + (kSide == 1 ? 0 : 2 * t / kColumns);
        const uint8_t* const scale = scales + (strip * C::kTiles * 2 + of_lane) * kStripRows;
#pragma unroll
        for (uint32_t row = 0; row < 2; ++row) {
          int32_t high = acc[strip][2 * row], low = acc[strip][2 * row + 1];
          if (Bytes::kMagnitudes) {
            high = 2 * high - all[strip][2 * row];
            low = 2 * low - all[strip][2 * row + 1];
          }
          float& to = sums->of[strip][row];
          to = fmaf(static_cast<float>(high * 256 + low) * step, ScaleOf(scale[row * 8]), to);
        }
      }
    }
  }
}

// `chunk`: of its item. kTier: or kTierAny, then `tier` says which.
template <uint32_t kTier, uint32_t kColumns>
__device__ __forceinline__ void AddChunk(uint32_t tier, const uint8_t* stage, const Staged& staged,
                                         uint32_t chunk, const Lane& of, Sums<2>* sums) {
  if constexpr (kTier != kTierAny) {
    using C = Chunk<kTier>;
    AddChunkOf<C, kColumns>(stage, staged, chunk * 2 * C::kTiles, of, sums);
  } else {
    if (tier == kTierNibbles)
      AddChunk<kTierNibbles, kColumns>(tier, stage, staged, chunk, of, sums);
    else if (tier == kTierQuintals)
      AddChunk<kTierQuintals, kColumns>(tier, stage, staged, chunk, of, sums);
    else
      AddChunk<kTierBase, kColumns>(tier, stage, staged, chunk, of, sums);
  }
}

}  // namespace hotplane::moe_cuda
