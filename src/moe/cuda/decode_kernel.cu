// The operator for few tokens in one launch: gate and up with the activation, then down, then the
// weighted sum of each token's slots; between them all blocks wait for each other.
#include "moe/cuda/decode_product.h"
#include "moe/cuda/finish.h"
#include "moe/cuda/grid_barrier.h"

namespace hotplane::moe_cuda {
namespace {

// Sums of a piece of an item by token and row: 16 rows of the first strip, then of the second; rows
// of tokens begin in different banks.
struct Piece {
  float of[kDecodeSliceTokensMax][40];
};
// Of a warp; 0: an item that began in an earlier warp; 1: one that ends in a later warp.
using Pieces = Piece[2];
static_assert(sizeof(Pieces) == kDecodePieceBytes);
static_assert(sizeof(RoutingScratch) <= kDecodeWarpsMin * sizeof(Pieces));

struct Shared {
  Routed* routed;
  Pieces* pieces;    // [warp]
  uint8_t* ring;     // of this warp
  uint8_t* staging;  // of activations
};
__device__ __forceinline__ Shared Divide(uint32_t warp) {
  const uint32_t warps = blockDim.x / 32;
  uint8_t* const routed = reinterpret_cast<uint8_t*>(&Tables() + 1);
  uint8_t* const pieces = routed + kDecodeRoutedBytes;
  uint8_t* const rings = pieces + warps * kDecodePieceBytes;
  return {reinterpret_cast<Routed*>(routed), reinterpret_cast<Pieces*>(pieces),
          rings + warp * kDecodeRingBytes, rings + warps * kDecodeRingBytes};
}

// Each lane has the sums of its columns' blocks; a token's stand in several lanes.
__device__ __forceinline__ void AddAcrossBlocks(uint32_t columns, Sums<2>* sums) {
  if (columns == 8) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& value = sums->of[i / 2][i % 2];
    if (columns == 2) value += __shfl_xor_sync(kAllLanes, value, 1);
    value += __shfl_xor_sync(kAllLanes, value, 2);
  }
}

__device__ __forceinline__ void FinishRow(const MoeArgs& args, const Work& work, uint32_t pair,
                                          const float* bias, uint32_t assignment, uint32_t n,
                                          float first, float second) {
  if (work.gate_up) {
    const uint32_t at = pair * kStripRows + n;
    if (bias != nullptr) {
      first += bias[at];
      second += bias[args.intermediate + at];
    }
    args.inner[uint64_t{assignment} * args.intermediate + at] = ToBf16(Act(args, first, second));
    return;
  }
  const uint32_t at = pair * 2 * kStripRows + n;
  if (bias != nullptr) {
    first += bias[at];
    second += bias[at + kStripRows];
  }
  float* const to = args.results + uint64_t{assignment} * args.hidden + at;
  to[0] = first;
  to[kStripRows] = second;
}

// What a lane has of an item's sums goes to `to(token, row, first strip's, second's)`, by one of
// the lanes that have a token's.
template <typename To>
__device__ __forceinline__ void Distribute(uint32_t columns, uint32_t lane, Sums<2>* sums,
                                           const To& to) {
  AddAcrossBlocks(columns, sums);
  const uint32_t g = lane / 4, t = lane % 4;
  if (t >= columns / 2) return;
#pragma unroll
  for (uint32_t row = 0; row < 2; ++row)
    to(TokenOf(columns, t), g + 8 * row, sums->of[0][row], sums->of[1][row]);
}

__device__ __forceinline__ void FinishMissing(const MoeArgs& args, const Work& work,
                                              const Routed& routed, uint32_t at) {
  if (work.gate_up) return;
  const Slice slice = routed.slices[at];
  for (uint32_t token = 0; token < slice.count; ++token) {
    float* const row = args.results + uint64_t{routed.order[slice.begin + token]} * args.hidden;
    for (uint32_t n = threadIdx.x; n < args.hidden; n += blockDim.x) row[n] = NotComputed();
  }
}

// The item that begins in this warp and ends in a later one; the number of items where there is
// none.
__device__ __forceinline__ uint32_t BrokenItem(const Segment& segment, uint32_t warp) {
  const uint32_t begin = segment.Before(warp), end = segment.Before(warp + 1);
  const uint32_t item = Quotient(end, segment.item_chunks);
  const uint32_t first = item * segment.item_chunks;
  return first < begin || first >= end ? segment.pair_count : item;
}

// An item of a segment from its pieces, the first of them `warp`'s. By a warp: 16 lanes to a token.
__device__ __forceinline__ void FinishItem(const MoeArgs& args, const Work& work,
                                           const Segment& segment, uint32_t item, uint32_t warp,
                                           uint32_t lane, const Shared& shared) {
  const Slice slice = shared.routed->slices[segment.slice];
  const float* const bias = work.MatrixOf(segment.slice).bias;
  const uint32_t end = (item + 1) * segment.item_chunks;
  const uint32_t n = lane % kStripRows;
  for (uint32_t token = lane / kStripRows; token < slice.count; token += 32 / kStripRows) {
    const float* rows = shared.pieces[warp][1].of[token];
    float first = rows[n], second = rows[kStripRows + n];
    for (uint32_t begin = segment.Before(warp + 1), later = warp + 1; begin < end; ++later) {
      const uint32_t next = segment.Before(later + 1);
      if (next != begin) {
        rows = shared.pieces[later][0].of[token];
        first += rows[n];
        second += rows[kStripRows + n];
      }
      begin = next;
    }
    FinishRow(args, work, segment.first_pair + item, bias,
              shared.routed->order[slice.begin + token], n, first, second);
  }
}

// What a warp takes along.
template <uint32_t kTier>
struct Warp {
  uint32_t index;  // in the block
  Lane of;
  Producer<kTier> producer;
  uint32_t stage;  // of the next chunk in the ring, in bytes
};

// This warp's chunks of a segment. Items that are not all its own are left in pieces, which are
// joined when all warps are done.
template <uint32_t kTier, uint32_t kColumns>
__device__ __forceinline__ void MultiplyChunks(const MoeArgs& args, const Work& work,
                                               const Segment& segment, const Staged& staged,
                                               const Shared& shared, Warp<kTier>* warp) {
  const Slice slice = shared.routed->slices[segment.slice];
  const Matrix& matrix = work.MatrixOf(segment.slice);
  const uint32_t lane = warp->of.lane, tier = matrix.tier;
  const uint32_t end = segment.Before(warp->index + 1);
  uint32_t at = segment.Before(warp->index);
  warp->of.SetColumns(kColumns);
  for (uint32_t item = Quotient(at, segment.item_chunks); at < end; ++item) {
    const uint32_t first = item * segment.item_chunks;
    const uint32_t last = min(end, first + segment.item_chunks);
    const bool begins = at == first;
    Sums<2> sums = {};
    for (; at < last; ++at) {
      ptx::WaitForCopies<kDecodeStages - 2>();
      __syncwarp();
      warp->producer.Issue(work);
      AddChunk<kTier, kColumns>(tier, shared.ring + warp->stage, staged, at - first, warp->of,
                                &sums);
      warp->stage += kDecodeStageBytes;
      if (warp->stage == kDecodeRingBytes) warp->stage = 0;
    }
    if (begins && last == first + segment.item_chunks) {
      Distribute(kColumns, lane, &sums,
                 [&](uint32_t token, uint32_t row, float upper, float lower) {
                   if (token < slice.count)
                     FinishRow(args, work, segment.first_pair + item, matrix.bias,
                               shared.routed->order[slice.begin + token], row, upper, lower);
                 });
      continue;
    }
    Piece* const piece = &shared.pieces[warp->index][begins ? 1 : 0];
    Distribute(kColumns, lane, &sums, [&](uint32_t token, uint32_t row, float upper, float lower) {
      piece->of[token][row] = upper;
      piece->of[token][kStripRows + row] = lower;
    });
  }
}

template <uint32_t kTier>
__device__ __forceinline__ void MultiplySegment(const MoeArgs& args, const Work& work,
                                                const Segment& segment, const Staged& staged,
                                                uint32_t columns, const Shared& shared,
                                                Warp<kTier>* warp) {
  if (columns == 2)
    MultiplyChunks<kTier, 2>(args, work, segment, staged, shared, warp);
  else if (columns == 4)
    MultiplyChunks<kTier, 4>(args, work, segment, staged, shared, warp);
  else
    MultiplyChunks<kTier, 8>(args, work, segment, staged, shared, warp);
  __syncthreads();
  const uint32_t item = BrokenItem(segment, warp->index);
  if (item != segment.pair_count)
    FinishItem(args, work, segment, item, warp->index, warp->of.lane, shared);
}

// `staged_tier`: the tier for which the activations of the first product are staged already.
template <bool kFp8, uint32_t kTier>
__device__ __forceinline__ void Multiply(const MoeArgs& args, const Work& work,
                                         uint32_t staged_tier, const Shared& shared,
                                         Warp<kTier>* warp) {
  const uint32_t k = work.tiles * static_cast<uint32_t>(kTileColumns);
  warp->stage = 0;
  bool begun = !work.gate_up;
  for (uint32_t begin = work.share->begin; begin < work.share->end;) {
    const Segment segment(work, begin);
    begin += segment.pair_count;
    const Slice slice = shared.routed->slices[segment.slice];
    const uint32_t tier = work.MatrixOf(segment.slice).tier;
    if (tier == kTierMissing) {
      // The block that has its first item says so for all of them.
      if (segment.first_pair == 0) FinishMissing(args, work, *shared.routed, segment.slice);
      continue;
    }
    const uint32_t columns = ColumnsFor(slice.count);
    const Staged staged = StagedAt(k, columns, shared.staging);
    // A token that names an expert twice has it staged twice, in place of what was there.
    if (!work.gate_up || tier != staged_tier || slice.count != 1) {
      staged_tier = kTierMissing;
      Stage<kFp8>(
          tier, k, slice.count,
          [&](uint32_t token) {
            const uint32_t assignment = shared.routed->order[slice.begin + token];
            return work.gate_up ? args.x + uint64_t{assignment / args.top_k} * k
                                : args.inner + uint64_t{assignment} * k;
          },
          staged);
    }
    if (!begun) warp->producer.Begin(work);
    begun = true;
    __syncthreads();
    MultiplySegment<kTier>(args, work, segment, staged, columns, shared, warp);
  }
}

__device__ __forceinline__ uint32_t PairsOf(const MoeArgs& args, bool gate_up) {
  constexpr uint32_t kRows = kStripRows;
  return gate_up ? args.intermediate / kRows : args.hidden / (2 * kRows);
}

__device__ __forceinline__ Work WorkOf(const MoeArgs& args, const Share& share, bool gate_up) {
  constexpr uint32_t kRows = kStripRows, kColumns = kTileColumns;
  Work work;
  work.share = &share;
  work.gate_up = gate_up;
  work.pairs = PairsOf(args, gate_up);
  work.second_strip = gate_up ? args.intermediate / kRows : 0;
  work.tiles = (gate_up ? args.hidden : args.intermediate) / kColumns;
  work.first_slice = share.first_slice;
  return work;
}

// x into the second-level cache, 32 KiB a block, before weights queue up for device memory.
__device__ __forceinline__ void FetchActivations(const MoeArgs& args) {
  constexpr uint32_t kLine = 128;
  const uint64_t bytes = uint64_t{args.tokens} * args.hidden * sizeof(uint16_t);
  const uint64_t at = (uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kLine;
  if (at < bytes) ptx::Prefetch(reinterpret_cast<const uint8_t*>(args.x) + at);
}

}  // namespace

template <bool kFp8, uint32_t kTier>
__device__ __forceinline__ void Decode(const MoeArgs& args, const DecodeArgs& decode) {
  const uint32_t index = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Shared shared = Divide(index);
  // A single token's activations are the same for all experts of one tier: they are staged while
  // the first warps route the call.
  constexpr uint32_t kRoutingThreads = 64;
  const uint32_t staged_tier = args.tokens == 1 && kTier != kTierAny ? kTier : kTierMissing;
  if (staged_tier == kTierMissing) FetchActivations(args);
  if (threadIdx.x >= kRoutingThreads) {
    if (staged_tier != kTierMissing)
      Stage<kFp8>(
          staged_tier, args.hidden, 1, [&](uint32_t) { return args.x; },
          StagedAt(args.hidden, ColumnsFor(1), shared.staging), kRoutingThreads);
    Tables().Fill((args.tiers & kFromQuintals) != 0, kRoutingThreads);
  }
  Route(args, decode.slice_tokens, PairsOf(args, true), PairsOf(args, false),
        reinterpret_cast<RoutingScratch*>(shared.pieces), shared.routed);

  Warp<kTier> warp = {index, Lane(lane),
                      Producer<kTier>(ptx::SharedAddress(shared.ring), index, lane), 0};
#pragma unroll 1
  for (uint32_t product = 0; product < 2; ++product) {
    const Work work = WorkOf(args, shared.routed->shares[product], product == 0);
    // Weights set out while the blocks still wait for each other; those of the first product after
    // the activations, which would have to wait behind them.
    if (product != 0) {
      warp.producer.Begin(work);
      WaitForAllBlocks(args.barriers, 0);
    }
    Multiply<kFp8, kTier>(args, work, staged_tier, shared, &warp);
    ptx::WaitForCopies<0>();
    ArriveForAllBlocks(args.barriers, product);
  }
  WaitForAllBlocks(args.barriers, 1);
  Combine(args);
}

extern "C" __global__ void __launch_bounds__(kDecodeWarpsMax * 32)
    hotplane_moe_decode(const __grid_constant__ MoeArgs args,
                        const __grid_constant__ DecodeArgs decode) {
  Decode<false, kTierAny>(args, decode);
}
// All experts from one tier, which the compiler knows.
extern "C" __global__ void __launch_bounds__(kDecodeWarpsMax * 32)
    hotplane_moe_decode_base(const __grid_constant__ MoeArgs args,
                             const __grid_constant__ DecodeArgs decode) {
  Decode<false, kTierBase>(args, decode);
}
extern "C" __global__ void __launch_bounds__(kDecodeWarpsMax * 32)
    hotplane_moe_decode_nibbles(const __grid_constant__ MoeArgs args,
                                const __grid_constant__ DecodeArgs decode) {
  Decode<false, kTierNibbles>(args, decode);
}
extern "C" __global__ void __launch_bounds__(kDecodeWarpsMax * 32)
    hotplane_moe_decode_quintals(const __grid_constant__ MoeArgs args,
                                 const __grid_constant__ DecodeArgs decode) {
  Decode<false, kTierQuintals>(args, decode);
}
// Activations of both products in FP8.
extern "C" __global__ void __launch_bounds__(kDecodeWarpsMax * 32)
    hotplane_moe_decode_fp8(const __grid_constant__ MoeArgs args,
                            const __grid_constant__ DecodeArgs decode) {
  Decode<true, kTierAny>(args, decode);
}

// After a prefill.
extern "C" __global__ void __launch_bounds__(kCombineThreads)
    hotplane_moe_combine(const __grid_constant__ MoeArgs args) {
  Combine(args);
}

}  // namespace hotplane::moe_cuda
