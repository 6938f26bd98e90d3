// The operator for few tokens in one launch: gate and up with the activation, then down, then the
// weighted sum of each token's slots; between them all blocks wait for each other.
#include "moe/cuda/decode_product.h"
#include "moe/cuda/finish.h"
#include "moe/cuda/grid_barrier.h"

namespace hotplane::moe_cuda {
namespace {

struct Shared {
  uint8_t ring[kDecodeRingBytes];
  // Sums of pieces of items: [warp][0: an item that began in an earlier warp, 1: one that ends in a
  // later warp].
  float pieces[kDecodeWarps][2][8][32];
  Routed routed;
};
static_assert(sizeof(RoutingScratch) <= sizeof(Shared::pieces));
static_assert(sizeof(Shared) <= kDecodeFixedBytes);

// Each lane has the sums of its columns' blocks; a token's stand in several lanes.
__device__ __forceinline__ void AddAcrossBlocks(uint32_t columns, Sums* sums) {
  if (columns == 8) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float& value = sums->of[i / 4][i / 2 % 2][i % 2];
    if (columns == 2) value += __shfl_xor_sync(kAllLanes, value, 1);
    value += __shfl_xor_sync(kAllLanes, value, 2);
  }
}

__device__ __forceinline__ void StorePiece(float (&piece)[8][32], uint32_t lane, const Sums& sums) {
#pragma unroll
  for (int i = 0; i < 8; ++i) piece[i][lane] = sums.of[i / 4][i / 2 % 2][i % 2];
}
__device__ __forceinline__ void AddPiece(const float (&piece)[8][32], uint32_t lane, Sums* sums) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sums->of[i / 4][i / 2 % 2][i % 2] += piece[i][lane];
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

__device__ __forceinline__ void Finish(const MoeArgs& args, const Work& work, const Routed& routed,
                                       uint32_t slice_at, uint32_t pair, uint32_t columns,
                                       uint32_t lane, Sums sums) {
  AddAcrossBlocks(columns, &sums);
  const Slice slice = routed.slices[slice_at];
  const Matrix& matrix = work.MatrixOf(slice_at);
  const uint32_t g = lane / 4, t = lane % 4;
  // One of the lanes that have a token's sums.
  if (t >= columns / 2) return;
  const bool base = matrix.tier == kTierBase;
  const float unit = base ? 1.0f : kFp4SumUnit;
#pragma unroll
  for (uint32_t which = 0; which < 2; ++which) {
    if (which == 1 && base) return;
    const uint32_t token = TokenOf(matrix.tier, columns, t, which);
    if (token >= slice.count) continue;
    const uint32_t assignment = routed.order[slice.begin + token];
#pragma unroll
    for (uint32_t row = 0; row < 2; ++row)
      FinishRow(args, work, pair, matrix.bias, assignment, g + 8 * row,
                sums.of[0][row][which] * unit, sums.of[1][row][which] * unit);
  }
}

// What was refused must not look like a result.
__device__ __forceinline__ void FinishMissing(const MoeArgs& args, const Work& work,
                                              const Routed& routed, uint32_t at) {
  if (work.gate_up) return;
  const Slice slice = routed.slices[at];
  for (uint32_t token = 0; token < slice.count; ++token) {
    float* const row = args.results + uint64_t{routed.order[slice.begin + token]} * args.hidden;
    for (uint32_t n = threadIdx.x; n < args.hidden; n += blockDim.x)
      row[n] = __uint_as_float(0x7FC00000u);
  }
}

// The item that begins in this warp and ends in a later one; the number of items where there is
// none.
__device__ __forceinline__ uint32_t BrokenItem(const Segment& segment, uint32_t warp) {
  const uint32_t begin = segment.Before(warp), end = segment.Before(warp + 1);
  const uint32_t item = end / segment.item_chunks;
  const uint32_t first = item * segment.item_chunks;
  return first < begin || first >= end ? segment.pair_count : item;
}
__device__ __forceinline__ void JoinPieces(const Segment& segment, uint32_t item, uint32_t warp,
                                           uint32_t lane, const Shared& shared, Sums* sums) {
  AddPiece(shared.pieces[warp][1], lane, sums);
  const uint32_t end = (item + 1) * segment.item_chunks;
  for (uint32_t later = warp + 1; later < kDecodeWarps && segment.Before(later) < end; ++later) {
    if (segment.Before(later) != segment.Before(later + 1))
      AddPiece(shared.pieces[later][0], lane, sums);
  }
}

// This warp's chunks of a segment. Items that are not all its own are left in pieces, which are
// joined when all warps are done.
__device__ __forceinline__ void MultiplySegment(const MoeArgs& args, const Work& work,
                                                const Segment& segment, const Staged& staged,
                                                uint32_t columns, uint32_t warp, Producer* producer,
                                                uint32_t* stage, const Lane& of, Shared* shared) {
  const uint8_t* const ring = shared->ring + warp * kDecodeStages * kDecodeStageBytes;
  const uint32_t tier = work.MatrixOf(segment.slice).tier;
  const uint32_t end = segment.Before(warp + 1);
  uint32_t at = segment.Before(warp);
  uint32_t item = at / segment.item_chunks;
  bool joined = false;
  while (!joined) {
    Sums sums = {};
    if (at < end) {
      const uint32_t first = item * segment.item_chunks;
      const uint32_t last = min(end, first + segment.item_chunks);
      const bool begins = at == first;
      for (; at < last; ++at) {
        ptx::WaitForCopies<kDecodeStages - 2>();
        __syncwarp();
        producer->Issue(work);
        AddChunk(tier, columns, ring + *stage, staged, at - first, of, &sums);
        *stage += kDecodeStageBytes;
        if (*stage == kDecodeStages * kDecodeStageBytes) *stage = 0;
      }
      ++item;
      const bool ends = last == first + segment.item_chunks;
      if (!begins || !ends) {
        StorePiece(shared->pieces[warp][begins ? 1 : 0], of.lane, sums);
        continue;
      }
    } else {
      __syncthreads();
      joined = true;
      item = BrokenItem(segment, warp);
      if (item == segment.pair_count) break;
      JoinPieces(segment, item, warp, of.lane, *shared, &sums);
      ++item;
    }
    Finish(args, work, shared->routed, segment.slice, segment.first_pair + item - 1, columns,
           of.lane, sums);
  }
}

__device__ __forceinline__ void Multiply(const MoeArgs& args, const Work& work, uint32_t warp,
                                         Producer* producer, Lane* of, uint8_t* staging,
                                         Shared* shared) {
  const uint32_t k = work.tiles * static_cast<uint32_t>(kTileColumns);
  uint32_t stage = 0;
  bool begun = !work.gate_up;
  for (uint32_t begin = work.share->begin; begin < work.share->end;) {
    const Segment segment(work, begin);
    begin += segment.pair_count;
    const Slice slice = shared->routed.slices[segment.slice];
    const uint32_t tier = work.MatrixOf(segment.slice).tier;
    if (tier == kTierMissing) {
      // The block that has its first item says so for all of them.
      if (segment.first_pair == 0) FinishMissing(args, work, shared->routed, segment.slice);
      continue;
    }
    const uint32_t columns = ColumnsFor(tier, slice.count);
    const uint32_t blocks = (k / 32 + kChunkBlocks - 1) / kChunkBlocks * kChunkBlocks;
    // Digits of a token take two columns of one byte, its bfloat16 one of two.
    const uint32_t value_bytes = blocks * 32 * columns * (tier == kTierBase ? 1 : 2);
    const Staged staged = {staging, reinterpret_cast<float*>(staging + value_bytes)};
    Stage(
        tier, k, slice.count,
        [&](uint32_t token) {
          const uint32_t assignment = shared->routed.order[slice.begin + token];
          return work.gate_up ? args.x + uint64_t{assignment / args.top_k} * k
                              : args.inner + uint64_t{assignment} * k;
        },
        staged);
#pragma unroll
    for (uint32_t q = 0; q < 4; ++q) {
      of->flags[q] = of->lane / 4 / columns == q ? 1 : 0;
      // Opaque, so that a multiplication by it stays one: it runs beside the byte permutations, a
      // selection would compete with them.
      asm volatile("" : "+r"(of->flags[q]));
    }
    if (!begun) producer->Begin(work);
    begun = true;
    __syncthreads();
    MultiplySegment(args, work, segment, staged, columns, warp, producer, &stage, *of, shared);
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

extern "C" __global__ void __launch_bounds__(kDecodeThreads, kDecodeBlocksPerSm)
    hotplane_moe_decode(const __grid_constant__ MoeArgs args,
                        const __grid_constant__ DecodeArgs decode) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared* const shared = reinterpret_cast<Shared*>(memory);
  const uint32_t round = RoundOf(args.barrier);
  FetchActivations(args);
  Route(args, decode.slice_tokens, PairsOf(args, true), PairsOf(args, false),
        reinterpret_cast<RoutingScratch*>(shared->pieces), &shared->routed);

  const uint32_t warp = threadIdx.x / 32;
  Lane of;
  of.lane = threadIdx.x % 32;
  Producer producer(ptx::SharedAddress(shared->ring + warp * kDecodeStages * kDecodeStageBytes),
                    warp, of.lane);
#pragma unroll 1
  for (uint32_t product = 0; product < 2; ++product) {
    const Work work = WorkOf(args, shared->routed.shares[product], product == 0);
    // Weights set out while the blocks still wait for each other; those of the first product after
    // the activations, which would have to wait behind them.
    if (product != 0) {
      producer.Begin(work);
      WaitForAllBlocks(args.barrier, round);
    }
    Multiply(args, work, warp, &producer, &of, memory + kDecodeFixedBytes, shared);
    ptx::WaitForCopies<0>();
    ArriveForAllBlocks(args.barrier, round + product);
  }
  WaitForAllBlocks(args.barrier, round + 1);
  Combine(args);
}

// After a prefill.
extern "C" __global__ void __launch_bounds__(kDecodeThreads)
    hotplane_moe_combine(const __grid_constant__ MoeArgs args) {
  Combine(args);
}

}  // namespace hotplane::moe_cuda
