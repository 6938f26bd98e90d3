// The operator for so few assignments that each has blocks of its own, in one launch. A block
// computes some groups of 32 intermediate rows of one assignment, and of down their columns, so
// that nothing of both products waits for another block; what the blocks add to a row of y is
// summed once all have come that far.
#include "moe/cuda/decode_product.h"
#include "moe/cuda/few_stream.h"
#include "moe/cuda/finish.h"
#include "moe/cuda/grid_barrier.h"

namespace hotplane::moe_cuda {
namespace {

static_assert(kFewRun == 2 * FewChunk<kTierBase>::kTiles);

// Sums of a warp's items, by row: of the item that its chunks begin with, of the one after.
using FewPieces = float[2][kFewPieceRows];
static_assert(sizeof(FewPieces) == kFewPieceBytes);

struct Shared {
  FewPieces* pieces;  // [warp]
  uint8_t* rings;
  Staged x;      // the token's
  Staged inner;  // of the block's groups, from the beginning of a tile on
  uint32_t inner_words;
};
__device__ __forceinline__ Shared Divide(uint32_t hidden, uint32_t groups) {
  const uint32_t warps = blockDim.x / 32;
  uint8_t* const pieces = reinterpret_cast<uint8_t*>(&Tables() + 1);
  uint8_t* const rings = pieces + warps * kFewPieceBytes;
  uint8_t* const x = rings + warps * kDecodeRingBytes;
  uint8_t* const inner = x + StagedBytes(hidden, 1);
  const uint32_t columns = FewRuns(groups) * kFewRun * static_cast<uint32_t>(kScaleBlock);
  return {reinterpret_cast<FewPieces*>(pieces), rings, StagedAt(hidden, 2, x),
          StagedAt(columns, 2, inner), StagedBytes(columns, 1) / 4};
}

// What a block has of the call.
struct Part {
  uint32_t assignment;
  uint32_t first, count;  // groups
};
__device__ __forceinline__ Part PartOf(const MoeArgs& args, const FewArgs& few) {
  const uint32_t assignment = blockIdx.x / few.parts;
  if (assignment >= args.tokens * args.top_k) return {assignment, 0, 0};
  const uint32_t first = (blockIdx.x - assignment * few.parts) * few.groups;
  const uint32_t groups = args.intermediate / static_cast<uint32_t>(kScaleBlock);
  return {assignment, first, min(few.groups, groups - first)};
}

template <typename C>
__device__ __forceinline__ FewProduct GateUpOf(const MoeArgs& args, const Part& part,
                                               const Matrix& matrix) {
  constexpr uint32_t kHalf = C::kStrips / 2, kRows = kStripRows, kColumns = kTileColumns;
  const uint32_t strip = args.hidden / kColumns;
  return {matrix,
          part.count * 2 / kHalf,
          2 * part.first * strip,
          kHalf * strip,
          args.intermediate / kRows * strip,
          strip,
          strip,
          false};
}
template <typename C>
__device__ __forceinline__ FewProduct DownOf(const MoeArgs& args, const Part& part,
                                             const Matrix& matrix) {
  constexpr uint32_t kRows = kStripRows, kColumns = kTileColumns;
  const uint32_t strip = args.intermediate / kColumns;
  return {matrix,
          args.hidden / kRows / C::kStrips,
          part.first / 2,
          C::kStrips * strip,
          C::kStrips / 2 * strip,
          strip,
          (part.first % 2 + part.count + 1) / 2,
          true};
}

// The sums of an item are in four lanes each, of other columns. Each of these lanes gets those of
// C::kStrips / 2 rows, from row t * C::kStrips / 2 of {strip, g or g + 8} on.
template <uint32_t kStrips>
__device__ __forceinline__ void AddAcrossColumns(uint32_t t, const Sums<kStrips>& sums,
                                                 float (&rows)[kStrips / 2]) {
  float upper[kStrips];
#pragma unroll
  for (uint32_t i = 0; i < kStrips; ++i) {
    const float low = sums.of[i / 2][i % 2], high = sums.of[(i + kStrips) / 2][i % 2];
    upper[i] = (t >= 2 ? high : low) + __shfl_xor_sync(kAllLanes, t >= 2 ? low : high, 2);
  }
#pragma unroll
  for (uint32_t i = 0; i < kStrips / 2; ++i) {
    const float low = upper[i], high = upper[i + kStrips / 2];
    rows[i] = (t % 2 != 0 ? high : low) + __shfl_xor_sync(kAllLanes, t % 2 != 0 ? low : high, 1);
  }
}
// Which row of an item the first of those is, the others 8 apart.
template <uint32_t kStrips>
__device__ __forceinline__ uint32_t RowOfLane(const Lane& of) {
  return of.lane % 4 * (kStrips / 2) * 8 + of.lane / 4;
}

// A warp of a block, and where it is in its ring.
template <typename C>
struct Warp {
  uint32_t index;
  Lane of;
  FewProducer<C> producer;
  const uint8_t* ring;
  uint32_t stage = 0;  // in bytes

  // Adds the next chunk, of four blocks from `block` on.
  __device__ __forceinline__ void Add(const Staged& staged, uint32_t block,
                                      Sums<C::kStrips>* sums) {
    ptx::WaitForCopies<kDecodeStages - 2>();
    __syncwarp();
    producer.Issue();
    AddChunkOf<C, 2>(ring + stage, staged, block, of, sums);
    stage += kDecodeStageBytes;
    if (stage == kDecodeRingBytes) stage = 0;
  }
};

template <typename C>
__device__ __forceinline__ void MultiplyGateUp(const FewProduct& product, const Shared& shared,
                                               Warp<C>* warp) {
  const uint32_t runs = product.Runs(), end = product.Before(warp->index + 1);
  uint32_t at = product.Before(warp->index);
  float* piece = shared.pieces[warp->index][0];
  for (uint32_t item = at / runs; at < end; ++item, piece += kFewPieceRows) {
    Sums<C::kStrips> sums = {};
    const uint32_t last = min(end, (item + 1) * runs);
    for (; at < last; ++at) warp->Add(shared.x, (at - item * runs) * kFewRun, &sums);
    float rows[C::kStrips / 2];
    AddAcrossColumns(warp->of.lane % 4, sums, rows);
#pragma unroll
    for (uint32_t i = 0; i < C::kStrips / 2; ++i)
      piece[RowOfLane<C::kStrips>(warp->of) + 8 * i] = rows[i];
  }
}

// The activation of a group's rows, from the pieces, and their digits. By a warp, a lane to a row.
template <typename C>
__device__ __forceinline__ void FinishGroup(const MoeArgs& args, const Part& part,
                                            const FewProduct& product, uint32_t group,
                                            uint32_t lane, const Shared& shared) {
  constexpr uint32_t kHalfRows = C::kStrips / 2 * static_cast<uint32_t>(kStripRows);
  const uint32_t row = group * 32 + lane;
  const uint32_t item = row / kHalfRows;
  const uint32_t begin = item * product.Runs(), end = begin + product.Runs();
  float gate = 0, up = 0;
#pragma unroll
  for (uint32_t warp = 0; warp < kDecodeWarpsMax; ++warp) {
    if (warp >= blockDim.x / 32) break;
    const uint32_t from = product.Before(warp), to = product.Before(warp + 1);
    if (from >= end || to <= begin || from == to) continue;
    const float* const piece = shared.pieces[warp][from < begin ? 1 : 0] + row % kHalfRows;
    gate += piece[0];
    up += piece[kHalfRows];
  }
  if (product.matrix.bias != nullptr) {
    const uint32_t n = part.first * 32 + row;
    gate += product.matrix.bias[n];
    up += product.matrix.bias[args.intermediate + n];
  }
  const float act = __uint_as_float(uint32_t{ToBf16(Act(args, gate, up))} << 16);
  const uint32_t magnitude = __float_as_uint(act) & 0x7FFFFFFFu;
  const Steps steps(__uint_as_float(__reduce_max_sync(kAllLanes, magnitude)));
  const int q = steps.Integer(act);
  const uint32_t block = part.first % 2 + group;
  uint8_t* const digits = shared.inner.values + 64 * block + PlaceOf(OrderOf(C::kTier), lane);
  digits[0] = static_cast<uint8_t>((q + 128) >> 8);
  digits[32] = static_cast<uint8_t>(q);
  if (lane == 0) shared.inner.scales[block] = steps.step * UnitOf(C::kTier);
}

// What the block adds to the rows of y, times the assignment's weight.
template <typename C>
__device__ __forceinline__ void MultiplyDown(const MoeArgs& args, const Part& part,
                                             const FewProduct& product, const Shared& shared,
                                             Warp<C>* warp) {
  const uint32_t runs = product.Runs(), end = product.Before(warp->index + 1);
  const float weight = args.weights[part.assignment];
  float* const results = args.results + uint64_t{blockIdx.x} * args.hidden;
  for (uint32_t at = product.Before(warp->index); at < end;) {
    const uint32_t item = at / runs;
    Sums<C::kStrips> sums = {};
    for (const uint32_t begin = at; at < begin + runs; ++at)
      warp->Add(shared.inner, (at - begin) * kFewRun, &sums);
    float rows[C::kStrips / 2];
    AddAcrossColumns(warp->of.lane % 4, sums, rows);
    const uint32_t row =
        item * C::kStrips * static_cast<uint32_t>(kStripRows) + RowOfLane<C::kStrips>(warp->of);
#pragma unroll
    for (uint32_t i = 0; i < C::kStrips / 2; ++i) {
      if (product.matrix.bias != nullptr && part.first == 0)
        rows[i] += product.matrix.bias[row + 8 * i];
      results[row + 8 * i] = weight * rows[i];
    }
  }
}

template <uint32_t kTier>
__device__ __forceinline__ void Run(const MoeArgs& args, const Part& part, const Matrices& of,
                                    const StagedRow& x, const Shared& shared) {
  using C = FewChunk<kTier>;
  const uint32_t index = threadIdx.x / 32, lane = threadIdx.x % 32;
  const FewProduct products[2] = {GateUpOf<C>(args, part, of.gate_up),
                                  DownOf<C>(args, part, of.down)};
  uint8_t* const ring = shared.rings + index * kDecodeRingBytes;
  FewProducer<C> producer(products[0], products[1], ptx::SharedAddress(ring), index, lane);
  producer.Begin();
  Tables().Fill(kTier == kTierQuintals, 0);
  for (uint32_t i = threadIdx.x; i < shared.inner_words; i += blockDim.x)
    reinterpret_cast<uint32_t*>(shared.inner.values)[i] = 0;
  x.Store(kTier, shared.x);
  __syncthreads();
  Warp<C> warp = {index, Lane(lane), producer, ring};
  warp.of.SetColumns(2);
  MultiplyGateUp<C>(products[0], shared, &warp);
  __syncthreads();
  for (uint32_t group = index; group < part.count; group += blockDim.x / 32)
    FinishGroup<C>(args, part, products[0], group, lane, shared);
  __syncthreads();
  MultiplyDown<C>(args, part, products[1], shared, &warp);
  ptx::WaitForCopies<0>();
}

__device__ __forceinline__ void StoreMissing(const MoeArgs& args) {
  float* const results = args.results + uint64_t{blockIdx.x} * args.hidden;
  for (uint32_t row = threadIdx.x; row < args.hidden; row += blockDim.x)
    results[row] = NotComputed();
}

__device__ __forceinline__ void RunPart(const MoeArgs& args, const Part& part,
                                        const Shared& shared) {
  const uint32_t expert = static_cast<uint32_t>(args.ids[part.assignment]);
  // Before weights queue up for device memory.
  const StagedRow x(args.x + uint64_t{part.assignment / args.top_k} * args.hidden, args.hidden);
  if (expert >= args.experts) {
    if (threadIdx.x == 0) Refuse(args.refusal, kRefusedId, part.assignment);
    return StoreMissing(args);
  }
  const Matrices matrices = MatricesOf(args, expert);
  if (matrices.gate_up.tier == kTierBase)
    Run<kTierBase>(args, part, matrices, x, shared);
  else if (matrices.gate_up.tier == kTierNibbles)
    Run<kTierNibbles>(args, part, matrices, x, shared);
  else if (matrices.gate_up.tier == kTierQuintals)
    Run<kTierQuintals>(args, part, matrices, x, shared);
  else
    StoreMissing(args);
}

// Rows of y, four at a time; what the blocks of a token add is summed in their order, by several
// threads in turns.
__device__ __forceinline__ void CombineParts(const MoeArgs& args, const FewArgs& few,
                                             float4* scratch) {
  constexpr uint32_t kAtOnce = 4;
  const uint32_t quads = args.hidden / 4, all = quads * args.tokens;
  // At most a quarter of the threads have others, so that strides are a multiple of four.
  const uint32_t own = min((all + gridDim.x - 1) / gridDim.x, blockDim.x / 4);  // of a block
  const uint32_t width = own == 1 ? 1 : 1u << (32 - __clz(own - 1));            // as a power of two
  const uint32_t strides = blockDim.x / width;
  const uint32_t quad = threadIdx.x % width, stride = threadIdx.x / width;
  const uint32_t column = threadIdx.x;
  const uint32_t blocks = args.top_k * few.parts;  // of a token
  for (uint32_t first = blockIdx.x * own; first < all; first += gridDim.x * own) {
    const uint32_t i = first + quad, token = i / quads;
    float4 sum = {0, 0, 0, 0};
    if (quad < own && i < all) {
      const float* const results =
          args.results + uint64_t{token} * blocks * args.hidden + (i - token * quads) * 4;
      for (uint32_t block = stride; block < blocks; block += kAtOnce * strides) {
        float4 of[kAtOnce];
#pragma unroll
        for (uint32_t j = 0; j < kAtOnce; ++j) {
          const uint32_t at = block + j * strides;
          of[j] = {0, 0, 0, 0};
          if (at < blocks)
            of[j] = __ldcg(reinterpret_cast<const float4*>(results + uint64_t{at} * args.hidden));
        }
#pragma unroll
        for (const float4& one : of)
          sum = {sum.x + one.x, sum.y + one.y, sum.z + one.z, sum.w + one.w};
      }
    }
    scratch[threadIdx.x] = sum;
    __syncthreads();
    if (column < 4 * own && first + column / 4 < all) {
      float y[4] = {};
#pragma unroll 4
      for (uint32_t at = 0; at < strides; at += 4) {
#pragma unroll
        for (uint32_t turn = 0; turn < 4; ++turn)
          y[turn] += reinterpret_cast<const float*>(scratch)[(at + turn) * width * 4 + column];
      }
      args.y[uint64_t{first} * 4 + column] = ToBf16((y[0] + y[1]) + (y[2] + y[3]));
    }
    __syncthreads();
  }
}

// An array into the second-level cache, a line for each thread of the grid.
__device__ __forceinline__ void Fetch(const void* array, uint64_t bytes) {
  constexpr uint32_t kLine = 128;
  const uint64_t at = (uint64_t{threadIdx.x} * gridDim.x + blockIdx.x) * kLine;
  if (at < bytes) ptx::Prefetch(static_cast<const uint8_t*>(array) + at);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kDecodeWarpsMax * 32)
    hotplane_moe_decode_few(const __grid_constant__ MoeArgs args,
                            const __grid_constant__ FewArgs few) {
  const Shared shared = Divide(args.hidden, few.groups);
  Fetch(args.x, uint64_t{args.tokens} * args.hidden * sizeof(uint16_t));
  Fetch(args.slots, uint64_t{args.experts} * sizeof(ExpertSlot));
  const Part part = PartOf(args, few);
  if (part.count != 0) RunPart(args, part, shared);
  ArriveForAllBlocks(args.barriers, 0);
  WaitForAllBlocksOnce(args.barriers);
  CombineParts(args, few, reinterpret_cast<float4*>(shared.rings));
}

}  // namespace hotplane::moe_cuda
