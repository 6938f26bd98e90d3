// The products of a prefill on any GPU from sm_80 on: weights as the left operand from registers.
//
// A block has four warps and a tile of 128 weight rows (64 of gate and their 64 of up, or 128 of
// down) by up to 128 assignments; a warp has two strips of 16 rows and all columns, so that every
// weight is unpacked once, and every right operand read from shared memory is multiplied four
// times. Two blocks share a multiprocessor: while one unpacks or waits, the other multiplies. Where
// experts have few assignments, four blocks with tiles of up to 32 do: there is little to multiply,
// and much to wait for.
// Activations, gathered by token, and weights come through shared memory, 64 of k at a time; sums
// leave through it.
#include "moe/cuda/prefill_product.h"
#include "moe/cuda/prefill_weights.h"

namespace hotplane::moe_cuda {
namespace {

constexpr uint32_t kStripsOfWarp = 2;
constexpr uint32_t kWarpsOfBlock = kPrefillMmaThreads / 32;
constexpr uint32_t kStripsOfBlock = kWarpsOfBlock * kStripsOfWarp;
template <PrefillMmaShape kShape>
using MmaBlock = PrefillBlock<kPrefillMmaThreads, kStripsOfBlock, kShape.columns>;

// A stage: activations of a tile of 64 of k, then the weights of the tile after it, so that they
// are unpacked while this one is multiplied.
template <PrefillMmaShape kShape, int kColumns, uint32_t kTier>
struct Ring {
  static constexpr uint32_t kWeights = kColumns * kRowBytes;
  static constexpr uint32_t kStrip = StripBytes<kTier>::kAll;
  static constexpr uint32_t kStage = kWeights + kStripsOfBlock * kStrip;
  static constexpr uint32_t kFitting = kShape.ring_bytes / kStage;
  static constexpr uint32_t kStages = kFitting < 8 ? kFitting : 8;
  static_assert(kStages >= 2 && kStage % 128 == 0);
};

// Which strip of the block: a warp has one of gate and the one of up beside it.
__device__ __forceinline__ uint32_t StripOfBlock(uint32_t strip) {
  return threadIdx.x / 32 + strip * kWarpsOfBlock;
}

// Left operands of a block of 32 of k.
using Operands = uint32_t[kStripsOfWarp][2][4];
// Sums of [strip][eight columns], as of ptx::MultiplyBf16.
template <int kColumns>
using Sums = float[kStripsOfWarp][kColumns / 8][4];

template <int kBlock, uint32_t kTier>
__device__ __forceinline__ void UnpackStrips(const RawTile<kTier> (&raw)[kStripsOfWarp],
                                             Operands& a) {
#pragma unroll
  for (uint32_t strip = 0; strip < kStripsOfWarp; ++strip) Unpack<kBlock>(raw[strip], a[strip]);
}

// `rows`: where this lane's row of the first matrices is, of the first 16 of k. `all`: unless the
// last 16 columns are not needed.
template <int kColumns>
__device__ __forceinline__ void MultiplyBlock(uint32_t rows, uint32_t block, bool all,
                                              const Operands& a, Sums<kColumns>& sums) {
#pragma unroll
  for (uint32_t multiply = 0; multiply < 2; ++multiply) {
#pragma unroll
    for (uint32_t columns = 0; columns < kColumns; columns += 16) {
      uint32_t b[4];
      // The chunks of the next 16 of k are two on, before the exchange by row.
      ptx::LoadMatrices(b, (rows + columns * kRowBytes) ^ (2 * block + multiply) * 32);
      if (kColumns > 16 && columns + 16 == kColumns && !all) break;
#pragma unroll
      for (uint32_t strip = 0; strip < kStripsOfWarp; ++strip) {
        ptx::MultiplyBf16(sums[strip][columns / 8], a[strip][multiply], b[0], b[1]);
        ptx::MultiplyBf16(sums[strip][columns / 8 + 1], a[strip][multiply], b[2], b[3]);
      }
    }
  }
}

// Matrices i of a load: columns 0-7 and 8-15 (i / 2), k 0-7 and 8-15 (i % 2).
__device__ __forceinline__ uint32_t RowOfLane() {
  const uint32_t lane = threadIdx.x % 32, row = lane % 8;
  return (lane / 16 * 8 + row) * kRowBytes + (lane / 8 % 2 ^ row) * 16;
}

template <PrefillMmaShape kShape, int kColumns, uint32_t kTier>
__device__ __forceinline__ void MultiplyTile(Gather<MmaBlock<kShape>, kColumns>* gather,
                                             Weights<kTier> (&weights)[kStripsOfWarp],
                                             uint32_t tiles, bool all, uint8_t* ring,
                                             Sums<kColumns>& sums) {
  using Of = Ring<kShape, kColumns, kTier>;
  constexpr uint32_t kAhead = Of::kStages - 1;
  const uint32_t shared = ptx::SharedAddress(ring);
  const uint32_t rows = shared + RowOfLane();
  const auto next = [](uint32_t stage) {
    return stage == kAhead * Of::kStage ? 0 : stage + Of::kStage;
  };
  const auto issue_weights = [&](uint32_t stage) {
#pragma unroll
    for (Weights<kTier>& strip : weights) strip.Issue(shared + stage);
  };
  const auto issue = [&](uint32_t tile, uint32_t stage) {
    if (tile < tiles) gather->Issue(shared + stage);
    if (tile + 1 < tiles) issue_weights(next(stage));
    ptx::CommitCopies();
  };
  RawTile<kTier> raw[kStripsOfWarp];
  const auto load = [&](uint32_t stage) {
#pragma unroll
    for (uint32_t strip = 0; strip < kStripsOfWarp; ++strip)
      weights[strip].Load(ring + stage, &raw[strip]);
  };
  issue_weights(0);
#pragma unroll 1
  for (uint32_t tile = 0; tile < kAhead; ++tile) issue(tile, tile * Of::kStage);
#pragma unroll
  for (uint32_t strip = 0; strip < kStripsOfWarp; ++strip) {
#pragma unroll
    for (uint32_t i = 0; i < kColumns / 2; ++i) sums[strip][i / 4][i % 4] = 0;
  }
  ptx::WaitForCopies<kAhead - 1>();
  __syncwarp();
  Operands a;
  load(0);
  UnpackStrips<0, kTier>(raw, a);
  uint32_t stage = 0, behind = kAhead * Of::kStage;
#pragma unroll 1
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    ptx::WaitForCopies<kAhead - 1>();
    // What all warps have read is filled anew: activations of the tile before this one, weights of
    // this one.
    __syncthreads();
    issue(tile + kAhead, behind);
    MultiplyBlock<kColumns>(rows + stage, 0, all, a, sums);
    UnpackStrips<1, kTier>(raw, a);
    behind = stage;
    stage = next(stage);
    load(stage);
    MultiplyBlock<kColumns>(rows + behind, 1, all, a, sums);
    UnpackStrips<0, kTier>(raw, a);
  }
  ptx::WaitForCopies<0>();
  // Nobody fills a stage anew while others still read it.
  __syncthreads();
}

// Columns whose sums are in shared memory at a time.
constexpr uint32_t kColumnsAtATime = 64;
template <PrefillMmaShape kShape>
constexpr bool SumsFit() {
  const uint32_t columns = kShape.columns < kColumnsAtATime ? kShape.columns : kColumnsAtATime;
  return columns * MmaBlock<kShape>::kSumStride * sizeof(float) <= kShape.ring_bytes;
}
static_assert(SumsFit<kPrefillMmaMany>() && SumsFit<kPrefillMmaFew>());

template <typename Block, int kFirst, int kColumns>
__device__ __forceinline__ void StoreSums(const Sums<kColumns>& sums, float* to) {
  constexpr int kLast = kFirst + kColumnsAtATime < kColumns ? kFirst + kColumnsAtATime : kColumns;
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (uint32_t strip = 0; strip < kStripsOfWarp; ++strip) {
    float* const of_lane = to + 2 * t * Block::kSumStride + StripOfBlock(strip) * kStripRows + g;
#pragma unroll
    for (uint32_t column = kFirst; column < kLast; column += 8) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        of_lane[(column - kFirst + i % 2) * Block::kSumStride + i / 2 * 8] =
            sums[strip][column / 8][i];
    }
  }
}

// Sums of the columns from kFirst on.
template <typename Block, int kFirst, int kColumns>
__device__ __forceinline__ void Finish(const MoeArgs& args, const PrefillArgs& prefill,
                                       const Product& product, const Matrix& matrix,
                                       const Tile& tile, const Sums<kColumns>& sums,
                                       uint8_t* ring) {
  float* const shared = reinterpret_cast<float*>(ring);
  StoreSums<Block, kFirst, kColumns>(sums, shared);
  __syncthreads();
  const Tile part = {tile.expert, tile.begin + kFirst, min(tile.count - kFirst, kColumnsAtATime),
                     tile.rows};
  if (product.gate_up)
    FinishGateUp<Block>(args, product, matrix, part, shared);
  else
    FinishDown<Block>(args, prefill, product, matrix, part, shared);
}

// A tile of up to kColumns columns.
template <PrefillMmaShape kShape, int kColumns, uint32_t kTier>
__device__ __forceinline__ void Run(const MoeArgs& args, const PrefillArgs& prefill,
                                    const Product& product, const Matrix& matrix, const Tile& tile,
                                    uint8_t* ring) {
  using Block = MmaBlock<kShape>;
  using Of = Ring<kShape, kColumns, kTier>;
  const uint32_t tiles = product.k / static_cast<uint32_t>(kTileColumns);
  const auto of_strip = [&](uint32_t strip) {
    const uint32_t of_block = StripOfBlock(strip);
    return Weights<kTier>(matrix, uint64_t{StripOf<Block>(product, tile, of_block)} * tiles,
                          Of::kWeights + of_block * Of::kStrip,
                          reinterpret_cast<const BehindRing*>(ring + kShape.ring_bytes)->constants);
  };
  Weights<kTier> weights[kStripsOfWarp] = {of_strip(0), of_strip(1)};
  Gather<Block, kColumns> gather(args, prefill, product, tile);
  Sums<kColumns> sums;
  MultiplyTile<kShape, kColumns, kTier>(&gather, weights, tiles, tile.count > kColumns - 16, ring,
                                        sums);
  Finish<Block, 0, kColumns>(args, prefill, product, matrix, tile, sums, ring);
  if constexpr (kColumns > kColumnsAtATime) {
    __syncthreads();
    Finish<Block, kColumnsAtATime, kColumns>(args, prefill, product, matrix, tile, sums, ring);
  }
}

template <PrefillMmaShape kShape>
struct Kernel {
  using Block = MmaBlock<kShape>;
  static constexpr uint32_t kAlign = 128, kRingBytes = kShape.ring_bytes;

  template <uint32_t kTier>
  static __device__ __forceinline__ void RunTile(const MoeArgs& args, const PrefillArgs& prefill,
                                                 const Product& product, const Matrix& matrix,
                                                 const Tile& tile, uint8_t* ring) {
    if (tile.count <= 16) return Run<kShape, 16, kTier>(args, prefill, product, matrix, tile, ring);
    if (kShape.columns == 32 || tile.count <= 32)
      return Run<kShape, 32, kTier>(args, prefill, product, matrix, tile, ring);
    if constexpr (kShape.columns > 32) {
      static_assert(kShape.columns == 128);
      if (tile.count <= 64)
        return Run<kShape, 64, kTier>(args, prefill, product, matrix, tile, ring);
      if (tile.count <= 96)
        return Run<kShape, 96, kTier>(args, prefill, product, matrix, tile, ring);
      Run<kShape, 128, kTier>(args, prefill, product, matrix, tile, ring);
    }
  }
};

}  // namespace

// One kernel for each tier, as on Hopper, and each shape.
#define HP_PREFILL_MMA(name, tier, shape)                                          \
  extern "C" __global__ void __launch_bounds__(kPrefillMmaThreads,                 \
                                               shape.blocks_per_multiprocessor)    \
      hotplane_moe_prefill_mma_##name(const __grid_constant__ MoeArgs args,        \
                                      const __grid_constant__ PrefillArgs prefill, \
                                      uint32_t gate_up) {                          \
    RunProduct<Kernel<shape>, tier>(args, prefill, gate_up != 0);                  \
  }
HP_PREFILL_MMA(base, kTierBase, kPrefillMmaMany)
HP_PREFILL_MMA(nibbles, kTierNibbles, kPrefillMmaMany)
HP_PREFILL_MMA(quintals, kTierQuintals, kPrefillMmaMany)
HP_PREFILL_MMA(few_base, kTierBase, kPrefillMmaFew)
HP_PREFILL_MMA(few_nibbles, kTierNibbles, kPrefillMmaFew)
HP_PREFILL_MMA(few_quintals, kTierQuintals, kPrefillMmaFew)
#undef HP_PREFILL_MMA

}  // namespace hotplane::moe_cuda
