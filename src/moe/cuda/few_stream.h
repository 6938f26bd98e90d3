// How the weights of a decode of few assignments reach the multiprocessors: a block's warps share
// out what it needs of one expert, first of gate and up, then of down, and keep rings of chunks on
// their way (decode_stream.h), across both products.
#pragma once

#include "moe/cuda/decode_stream.h"

namespace hotplane::moe_cuda {

// Strips that are multiplied together: as many as let a chunk be a run of four blocks of 32
// columns.
template <uint32_t kTier>
using FewChunk = Chunk<kTier, kTier == kTierBase ? 4 : 2>;

// What a block has of one of the two products: items of C::kStrips strips, the second half of them
// `second` tiles after the first, each from its first tile on.
struct FewProduct {
  Matrix matrix;
  uint32_t items;
  uint32_t first_tile;  // of the first item
  uint32_t item_step;   // tiles from one item to the next
  uint32_t second;      // tiles
  uint32_t strip;       // tiles of a strip
  uint32_t tiles;       // of a strip that are multiplied
  bool whole_items;     // no item is shared by warps

  // Chunks of an item.
  __device__ uint32_t Runs() const { return (tiles + 1) / 2; }
  // Chunks before those of `warp`.
  __device__ uint32_t Before(uint32_t warp) const {
    const uint32_t log_warps = 31 - __clz(blockDim.x / 32);  // a power of two
    return whole_items ? (items * warp >> log_warps) * Runs() : items * Runs() * warp >> log_warps;
  }
};

// Issues the copies of a warp's chunks.
template <typename C>
class FewProducer {
 public:
  static_assert(C::kTiles == 2);

  __device__ FewProducer(const FewProduct& gate_up, const FewProduct& down, uint32_t ring,
                         uint32_t warp, uint32_t lane)
      : down_(down), ring_(ring), warp_(warp), lane_(lane) {
    Enter(gate_up);
    next_ = true;
  }

  // Fills all stages but one.
  __device__ void Begin() {
#pragma unroll 1
    for (unsigned i = 0; i + 1 < kDecodeStages; ++i) Issue();
  }

  // The next chunk on its way, or nothing after the last; a group of copies in both cases.
  __device__ void Issue() {
    if (chunks_ == 0 && next_) {
      Enter(down_);
      next_ = false;
    }
    if (chunks_ != 0) {
      --chunks_;
      const uint32_t tiles = min(left_, C::kTiles);
      Copy(ring_ + stage_, tiles);
      tile_ += tiles;
      left_ -= tiles;
      if (left_ == 0) {
        tile_ += to_next_;
        left_ = tiles_;
      }
    }
    ptx::CommitCopies();
    stage_ += kDecodeStageBytes;
    if (stage_ == kDecodeRingBytes) stage_ = 0;
  }

 private:
  __device__ void Enter(const FewProduct& product) {
    const uint32_t begin = product.Before(warp_), runs = product.Runs();
    const uint32_t item = Quotient(begin, runs), done = (begin - item * runs) * C::kTiles;
    chunks_ = product.Before(warp_ + 1) - begin;
    tiles_ = product.tiles;
    left_ = tiles_ - done;
    tile_ = product.first_tile + item * product.item_step + done;
    to_next_ = product.item_step - tiles_;
    strip_ = product.strip;
    second_ = product.second;
    coarse_ = (C::kTier == kTierNibbles ? product.matrix.fine : product.matrix.codes) + 16 * lane_;
    fine_ = product.matrix.fine;
    scales_ = product.matrix.scales;
  }

  // Tiles from an item's first strip to `strip`.
  __device__ uint32_t OffsetOf(uint32_t strip) const {
    constexpr uint32_t kHalf = C::kStrips / 2;
    return (strip >= kHalf ? second_ : 0) + strip % kHalf * strip_;
  }

  // `tiles` of each strip. Beyond them no weights, but zeros for scales: one that is infinite would
  // turn the zeros that are multiplied there into NaN.
  __device__ void Copy(uint32_t to, uint32_t tiles) const {
#pragma unroll
    for (uint32_t strip = 0; strip < C::kStrips; ++strip) {
      const uint8_t* const from = coarse_ + uint64_t{tile_ + OffsetOf(strip)} * C::kTileBytes;
#pragma unroll
      for (uint32_t at = 0; at < C::kTiles * C::kTileBytes; at += 512) {
        ptx::CopyAsync16If(at + 16 * lane_ < tiles * C::kTileBytes,
                           to + strip * C::kStrip + at + 16 * lane_, from + at);
      }
    }
    if (C::kTier == kTierQuintals) CopyQuintals(to, tiles);
    constexpr uint32_t kPieces = C::kTiles * kTileScaleBytes / 16;
    const uint32_t strip = lane_ / kPieces, at = lane_ % kPieces * 16;
    if (strip < C::kStrips) {
      const uint8_t* const from =
          scales_ + uint64_t{tile_ + OffsetOf(strip)} * kTileScaleBytes + at;
      ptx::CopyAsync16OrZeros(to + C::kScales + 16 * lane_, from, at < tiles * kTileScaleBytes);
    }
  }

  __device__ void CopyQuintals(uint32_t to, uint32_t tiles) const {
    constexpr uint32_t kPieces = C::kTiles * kTileQuintalBytes / 16;
#pragma unroll
    for (uint32_t first = 0; first < C::kStrips * kPieces; first += 32) {
      const uint32_t piece = first + lane_;
      const uint32_t strip = piece / kPieces, at = piece % kPieces * 16;
      ptx::CopyAsync16If(strip < C::kStrips && at < tiles * kTileQuintalBytes,
                         to + strip * C::kStrip + C::kFine + at,
                         fine_ + uint64_t{tile_ + OffsetOf(strip)} * kTileQuintalBytes + at);
    }
  }

  const FewProduct& down_;
  const uint32_t ring_;
  const uint32_t warp_;
  const uint32_t lane_;
  bool next_;           // down is still to come
  uint32_t stage_ = 0;  // in bytes
  uint32_t chunks_;     // of the product, still to be issued
  uint32_t tile_;       // of the next chunk, in its first strip
  uint32_t left_;       // of the item, from the next chunk on
  uint32_t tiles_;
  uint32_t to_next_;  // from the end of an item to the next
  uint32_t strip_, second_;
  const uint8_t* coarse_;
  const uint8_t* fine_;
  const uint8_t* scales_;
};

}  // namespace hotplane::moe_cuda
