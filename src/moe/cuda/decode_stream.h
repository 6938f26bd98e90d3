// How the weights of a decode reach the multiprocessors: each warp keeps a ring of chunks on their
// way from device to shared memory, ahead of its products.
#pragma once

#include "format/tsym4.h"
#include "moe/cuda/ptx.h"
#include "moe/cuda/routed.h"

namespace hotplane::moe_cuda {

// A chunk: some strips of 16 rows (of gate and of up, or neighbours of down) by kTiles tiles, as
// they lie in a stage of a warp's ring.
template <uint32_t kTierOfChunk, uint32_t kStripsOfChunk = 2>
struct Chunk {
  static constexpr uint32_t kTier = kTierOfChunk;
  static constexpr uint32_t kStrips = kStripsOfChunk;
  static constexpr uint32_t kTiles = (kTier == kTierBase ? 8 : 4) / kStrips;
  static constexpr uint32_t kTileBytes = kTier == kTierNibbles ? kTileNibbleBytes : kTileCodeBytes;
  // Quintals come after the codes of the strip.
  static constexpr uint32_t kFine = kTiles * kTileCodeBytes;
  static constexpr uint32_t kStrip =
      kTiles * (kTileBytes + (kTier == kTierQuintals ? kTileQuintalBytes : 0));
  static constexpr uint32_t kScales = kStrips * kStrip;
  static_assert(kScales + kStrips * kTiles * kTileScaleBytes <= kDecodeStageBytes);
};

__device__ __forceinline__ uint32_t TilesOfChunk(uint32_t tier) {
  return tier == kTierBase ? Chunk<kTierBase>::kTiles : Chunk<kTierNibbles>::kTiles;
}

// One of the two products of a call. A block has consecutive items of it, so that it stages the
// activations of few slices; the chunks of an item are numbered along k.
struct Work {
  const Share* share;
  bool gate_up;
  uint32_t pairs;         // of strips, of a slice
  uint32_t second_strip;  // strips of a pair p: p and p + second_strip, or 2p and 2p + 1 where 0
  uint32_t tiles;         // of a strip
  uint32_t first_slice;   // of the block

  __device__ const Matrix& MatrixOf(uint32_t slice) const {
    return share->matrices[slice - first_slice];
  }
};

// The part of one slice that a block has: its warps share the chunks out among them, in order, so
// that an item may begin in one warp and end in another.
struct Segment {
  uint32_t slice;
  uint32_t first_pair;
  uint32_t pair_count;
  uint32_t item_chunks;

  // The segment that begins with item `begin` of the block.
  __device__ Segment(const Work& work, uint32_t begin) {
    slice = Quotient(begin, work.pairs);
    first_pair = begin - slice * work.pairs;
    pair_count = min(work.share->end - begin, work.pairs - first_pair);
    const uint32_t tier = work.MatrixOf(slice).tier;
    const uint32_t tiles = TilesOfChunk(tier);
    item_chunks = tier == kTierMissing ? 0 : (work.tiles + tiles - 1) / tiles;
  }
  // Chunks of the segment before those of `warp`.
  __device__ uint32_t Before(uint32_t warp) const {
    const uint32_t warps = blockDim.x / 32;  // a power of two
    return pair_count * item_chunks * warp >> (31 - __clz(warps));
  }
};

// Issues the copies of a warp's chunks, segment by segment. kTier: of all of them, or kTierAny.
template <uint32_t kTier>
class Producer {
 public:
  __device__ Producer(uint32_t ring, uint32_t warp, uint32_t lane)
      : ring_(ring + 16 * lane), warp_(warp), lane_(lane) {}

  // Fills all stages but one; nothing is on its way.
  __device__ void Begin(const Work& work) {
    stage_ = 0;
    chunks_ = 0;
    next_ = work.share->begin;
#pragma unroll 1
    for (unsigned i = 0; i + 1 < kDecodeStages; ++i) Issue(work);
  }

  // The next chunk on its way, or nothing after the last; a group of copies in both cases.
  __device__ void Issue(const Work& work) {
    if (chunks_ == 0) Enter(work);
    if (chunks_ != 0) {
      --chunks_;
      const uint32_t chunk_bytes = ChunkBytes();
      const bool ends_strip = left_ <= chunk_bytes;
      const uint32_t bytes = ends_strip ? left_ : chunk_bytes;
      Copy(ring_ + stage_, bytes);
      const uint32_t step = ends_strip ? bytes + to_next_ : bytes;
      coarse_ += step;
      scales_ += step >> ScaleShift();
      if (tier_.Is(kTierQuintals)) fine_ += step / 4 * 5;
      left_ = ends_strip ? strip_ : left_ - bytes;
    }
    ptx::CommitCopies();
    stage_ += kDecodeStageBytes;
    if (stage_ == kDecodeRingBytes) stage_ = 0;
  }

 private:
  // What is known of a tier when the kernel is compiled.
  struct TierOfChunk {
    uint32_t of;
    __device__ bool Is(uint32_t tier) const { return (kTier == kTierAny ? of : kTier) == tier; }
  };
  // Bytes of codes or nibbles that a strip has in a chunk.
  __device__ uint32_t ChunkBytes() const {
    return tier_.Is(kTierQuintals) ? Chunk<kTierQuintals>::kFine : Chunk<kTierBase>::kStrip;
  }
  __device__ uint32_t ScaleShift() const { return tier_.Is(kTierNibbles) ? 4 : 3; }

  // The next segment that has chunks for this warp, if there is one.
  __device__ void Enter(const Work& work) {
    while (chunks_ == 0 && next_ < work.share->end) {
      const Segment segment(work, next_);
      next_ += segment.pair_count;
      chunks_ = segment.Before(warp_ + 1) - segment.Before(warp_);
      if (chunks_ != 0) Aim(work, segment);
    }
  }

  __device__ void Aim(const Work& work, const Segment& segment) {
    const Matrix& matrix = work.MatrixOf(segment.slice);
    tier_ = {matrix.tier};
    const bool nibbles = tier_.Is(kTierNibbles);
    const uint32_t begin = segment.Before(warp_);
    const uint32_t item = Quotient(begin, segment.item_chunks);
    const uint32_t chunk_tiles =
        tier_.Is(kTierBase) ? TilesOfChunk(kTierBase) : TilesOfChunk(kTierNibbles);
    const uint32_t first = (begin - item * segment.item_chunks) * chunk_tiles;
    const bool in_turn = work.second_strip == 0;
    const uint32_t pair = segment.first_pair + item;
    const uint64_t tile = uint64_t{in_turn ? 2 * pair : pair} * work.tiles + first;
    const uint32_t tile_bytes = nibbles ? kTileNibbleBytes : kTileCodeBytes;
    strip_ = work.tiles * tile_bytes;
    left_ = strip_ - first * tile_bytes;
    to_second_ = (in_turn ? 1 : work.second_strip) * strip_;
    to_next_ = in_turn ? strip_ : 0;
    coarse_ = (nibbles ? matrix.fine : matrix.codes) + tile * tile_bytes + 16 * lane_;
    fine_ = matrix.fine + tile * kTileQuintalBytes + 16 * lane_;
    // The scales of both strips are copied by one instruction.
    const uint32_t scale_bytes = chunk_tiles * kTileScaleBytes;
    const uint32_t second = lane_ >= scale_bytes / 16 ? 1 : 0;
    scale_at_ = lane_ < 2 * scale_bytes / 16 ? 16 * lane_ - second * scale_bytes : kNoScales;
    scales_ = matrix.scales + tile * kTileScaleBytes + (second * to_second_ >> ScaleShift()) +
              (16 * lane_ - second * scale_bytes);
  }

  // `bytes` of each strip.
  __device__ void Copy(uint32_t to, uint32_t bytes) const {
    const uint8_t* const second = coarse_ + to_second_;
    const uint32_t strip =
        tier_.Is(kTierQuintals) ? Chunk<kTierQuintals>::kStrip : Chunk<kTierBase>::kStrip;
    ptx::CopyAsync16If(16 * lane_ < bytes, to, coarse_);
    ptx::CopyAsync16If(16 * lane_ < bytes, to + strip, second);
    // A strip's codes of a chunk with quintals are 512 bytes.
    if (!tier_.Is(kTierQuintals)) {
      ptx::CopyAsync16If(16 * lane_ + 512 < bytes, to + 512, coarse_ + 512);
      ptx::CopyAsync16If(16 * lane_ + 512 < bytes, to + strip + 512, second + 512);
    }
    if (tier_.Is(kTierQuintals)) CopyQuintals(to + Chunk<kTierQuintals>::kFine, bytes / 4 * 5);
    // Beyond the end zeros: a scale that is infinite would turn the zeros there into NaN.
    if (scale_at_ != kNoScales)
      ptx::CopyAsync16OrZeros(to + 2 * strip, scales_, scale_at_ < bytes >> ScaleShift());
  }

  __device__ void CopyQuintals(uint32_t to, uint32_t bytes) const {
    const uint8_t* const second = fine_ + to_second_ / 4 * 5;
    constexpr uint32_t kStrip = Chunk<kTierQuintals>::kStrip;
#pragma unroll
    for (uint32_t first = 0; first < Chunk<kTierQuintals>::kTiles * kTileQuintalBytes;
         first += 512) {
      const bool wanted = first + 16 * lane_ < bytes;
      ptx::CopyAsync16If(wanted, to + first, fine_ + first);
      ptx::CopyAsync16If(wanted, to + kStrip + first, second + first);
    }
  }

  static constexpr uint32_t kNoScales = 0xFFFFFFFFu;

  const uint32_t ring_;
  const uint32_t warp_;
  const uint32_t lane_;
  uint32_t stage_;   // in bytes
  uint32_t next_;    // item, the first of the next segment
  uint32_t chunks_;  // of the segment, still to be issued
  TierOfChunk tier_;
  // What follows counts bytes of codes or nibbles; quintals and scales go in proportion.
  uint32_t strip_;
  uint32_t left_;       // of the strip, from the next chunk on
  uint32_t to_second_;  // from the first strip of a pair to the second
  uint32_t to_next_;    // from the end of a first strip to the next first one
  uint32_t scale_at_;   // in a strip's scales of a chunk, of this lane's copy
  const uint8_t* coarse_;
  const uint8_t* fine_;
  const uint8_t* scales_;
};
static_assert(Chunk<kTierNibbles>::kTiles == Chunk<kTierQuintals>::kTiles);
static_assert(Chunk<kTierNibbles>::kStrip == Chunk<kTierBase>::kStrip &&
              Chunk<kTierQuintals>::kFine == 512);
static_assert(Chunk<kTierQuintals>::kScales == 2 * Chunk<kTierQuintals>::kStrip);

}  // namespace hotplane::moe_cuda
