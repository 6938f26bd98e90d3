// The products of a prefill on Hopper: weights as the left operand from registers, where they are
// unpacked with their scales while the tensor cores work on those before.
//
// A block has four warpgroups and a tile of 256 weight rows by up to 112 assignments; each warp has
// a strip of 16 rows. Activations, gathered by token, and weights come through shared memory, 64 of
// k at a time; sums leave through it, so that gate meets up and rows are written whole.
#include "moe/cuda/barrier_sm90.h"
#include "moe/cuda/prefill_product.h"
#include "moe/cuda/prefill_weights.h"
#include "moe/cuda/wgmma_sm90.h"

namespace hotplane::moe_cuda {
namespace {

// A strip for each warp.
using Block = PrefillBlock<kPrefillThreads, kPrefillThreads / 32, kPrefillColumns>;
static_assert(kPrefillColumns * Block::kSumStride * sizeof(float) <= kPrefillRingBytes);

// `rows`: activations of the tile.
template <int kColumns>
__device__ __forceinline__ void MultiplyBlock(uint64_t rows, uint32_t block,
                                              const uint32_t (&a)[2][4],
                                              float (&acc)[kColumns / 2]) {
  ptx::WgmmaFence();
#pragma unroll
  for (uint32_t multiply = 0; multiply < 2; ++multiply)
    ptx::Wgmma<kColumns>::Multiply(acc, a[multiply],
                                   ptx::RowsFurther(rows, (2 * block + multiply) * 32));
  ptx::WgmmaCommit();
}

// Tiles on their way ahead of the one that is multiplied; a stage is filled anew two tiles after
// it was, when the multiplies that read it are surely done.
constexpr uint32_t kAhead = kPrefillStages - 2;

// Sums of a tile, as of Wgmma. `arrivals` takes one of each warp, and has had none.
template <int kColumns, uint32_t kTier>
__device__ __forceinline__ void MultiplyTile(Gather<Block, kColumns>* gather,
                                             Weights<kTier>* weights, uint32_t tiles, uint8_t* ring,
                                             uint64_t* arrivals, float (&acc)[kColumns / 2]) {
  const uint32_t shared = ptx::SharedAddress(ring);
  const auto issue = [&](uint32_t tile, uint32_t at) {
    if (tile < tiles) {
      gather->Issue(shared + at);
      weights->Issue(shared + at);
    }
    ptx::CommitCopies();
  };
  // What this warp copies of the next tile to multiply, and of the one after it, is there. All
  // begin with that tile when all have got here, and nobody waits for what another unpacks
  // meanwhile: a barrier behind it would leave the tensor cores without work as long as that takes.
  const auto arrive = [&] {
    ptx::WaitForCopies<kAhead - 2>();
    ptx::FenceForAsync();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::ArriveAt(arrivals);
  };
#pragma unroll 1
  for (uint32_t tile = 0; tile < kAhead; ++tile) issue(tile, tile * kPrefillStageBytes);
  RawTile<kTier> raw;
  uint32_t a[2][2][4];  // [block][multiply][register]
  arrive();
#pragma unroll
  for (float& value : acc) value = 0;
  weights->Load(ring, &raw);
  Unpack<0>(raw, a[0]);
  uint32_t stage = 0;
#pragma unroll 1
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    ptx::WaitFor(arrivals, tile % 2);
    constexpr uint32_t kRing = kPrefillRingBytes;
    constexpr uint32_t kBehind = kRing - kAhead * kPrefillStageBytes;
    issue(tile + kAhead, stage < kBehind ? stage + kRing - kBehind : stage - kBehind);
    const uint64_t rows = ptx::SwizzledRows(shared + stage);
    MultiplyBlock<kColumns>(rows, 0, a[0], acc);
    // The multiplies before those are done, and their registers free.
    ptx::WgmmaWait<1>();
    Unpack<1>(raw, a[1]);
    stage = stage + kPrefillStageBytes == kRing ? 0 : stage + kPrefillStageBytes;
    weights->Load(ring + stage, &raw);
    MultiplyBlock<kColumns>(rows, 1, a[1], acc);
    arrive();
    ptx::WgmmaWait<1>();
    Unpack<0>(raw, a[0]);
  }
  ptx::WgmmaWait<0>();
  ptx::WaitForCopies<0>();
  // Nobody fills a stage anew while others still read it.
  __syncthreads();
}

template <int kColumns>
__device__ __forceinline__ void StoreSums(const float (&acc)[kColumns / 2], float* sums) {
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float* const to = sums + 2 * t * Block::kSumStride + threadIdx.x / 32 * kStripRows + g;
#pragma unroll
  for (uint32_t i = 0; i < kColumns / 2; ++i)
    to[(i / 4 * 8 + i % 2) * Block::kSumStride + i / 2 % 2 * 8] = acc[i];
}

template <int kColumns, uint32_t kTier>
__device__ __forceinline__ void Run(const MoeArgs& args, const PrefillArgs& prefill,
                                    const Product& product, const Matrix& matrix, const Tile& tile,
                                    uint8_t* ring) {
  const uint32_t tiles = product.k / static_cast<uint32_t>(kTileColumns);
  const uint32_t warp = threadIdx.x / 32;
  BehindRing* const behind = reinterpret_cast<BehindRing*>(ring + kPrefillRingBytes);
  Weights<kTier> weights(matrix, uint64_t{StripOf<Block>(product, tile, warp)} * tiles,
                         kPrefillWeights + warp * StripBytes<kTier>::kAll, behind->constants);
  Gather<Block, kColumns> gather(args, prefill, product, tile);
  float acc[kColumns / 2];
  uint64_t* const arrivals = &behind->barrier;
  if (threadIdx.x == 0) ptx::InitBarrier(arrivals, Block::kThreads / 32);
  __syncthreads();
  MultiplyTile<kColumns, kTier>(&gather, &weights, tiles, ring, arrivals, acc);
  if (threadIdx.x == 0) ptx::EndBarrier(arrivals);
  float* const sums = reinterpret_cast<float*>(ring);
  StoreSums<kColumns>(acc, sums);
  __syncthreads();
  if (product.gate_up)
    FinishGateUp<Block>(args, product, matrix, tile, sums);
  else
    FinishDown<Block>(args, prefill, product, matrix, tile, sums);
}

struct Kernel {
  using Block = hotplane::moe_cuda::Block;
  static constexpr uint32_t kAlign = 1024, kRingBytes = kPrefillRingBytes;
  template <uint32_t kTier>
  static __device__ __forceinline__ void RunTile(const MoeArgs& args, const PrefillArgs& prefill,
                                                 const Product& product, const Matrix& matrix,
                                                 const Tile& tile, uint8_t* ring) {
    static_assert(kPrefillWeights + Block::kStrips * StripBytes<kTier>::kAll <= kPrefillStageBytes);
    if (tile.count <= 32) return Run<32, kTier>(args, prefill, product, matrix, tile, ring);
    if (tile.count <= 64) return Run<64, kTier>(args, prefill, product, matrix, tile, ring);
    if (tile.count <= 96) return Run<96, kTier>(args, prefill, product, matrix, tile, ring);
    Run<kPrefillColumns, kTier>(args, prefill, product, matrix, tile, ring);
  }
};

}  // namespace

// One kernel for each tier: together they would need more registers than there are.
extern "C" __global__ void __launch_bounds__(kPrefillThreads, 1)
    hotplane_moe_prefill_base(const __grid_constant__ MoeArgs args,
                              const __grid_constant__ PrefillArgs prefill, uint32_t gate_up) {
  RunProduct<Kernel, kTierBase>(args, prefill, gate_up != 0);
}
extern "C" __global__ void __launch_bounds__(kPrefillThreads, 1)
    hotplane_moe_prefill_nibbles(const __grid_constant__ MoeArgs args,
                                 const __grid_constant__ PrefillArgs prefill, uint32_t gate_up) {
  RunProduct<Kernel, kTierNibbles>(args, prefill, gate_up != 0);
}
extern "C" __global__ void __launch_bounds__(kPrefillThreads, 1)
    hotplane_moe_prefill_quintals(const __grid_constant__ MoeArgs args,
                                  const __grid_constant__ PrefillArgs prefill, uint32_t gate_up) {
  RunProduct<Kernel, kTierQuintals>(args, prefill, gate_up != 0);
}

}  // namespace hotplane::moe_cuda
