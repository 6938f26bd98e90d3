// One warp makes one tile at a time, by the functions of device/quantize_tile.h.
#include "device/cuda/quantize_args.h"

namespace hotplane {
namespace {

using namespace tile;

constexpr unsigned kAllLanes = 0xFFFFFFFFu;

__device__ uint64_t FirstTile() { return blockIdx.x * kQuantizeWarps + threadIdx.x / kThreads; }
__device__ uint64_t TileStep() { return uint64_t{gridDim.x} * kQuantizeWarps; }

__device__ uint64_t SumOfWarp(uint64_t value) {
  for (unsigned by = kThreads / 2; by > 0; by /= 2) value += __shfl_xor_sync(kAllLanes, value, by);
  return value;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kQuantizeThreads)
    hotplane_count(Source source, Counts* counts) {
  __shared__ Counts of_warp[kQuantizeWarps];
  Counts own = {0, 0, 0};
  const uint64_t tiles = TileCount(source);
  for (uint64_t tile = FirstTile(); tile < tiles; tile += TileStep())
    CountBlock(source, tile, threadIdx.x % kThreads, &own);
  own = {SumOfWarp(own.positive_zeros), SumOfWarp(own.negative_zeros), SumOfWarp(own.unusable)};
  if (threadIdx.x % kThreads == 0) of_warp[threadIdx.x / kThreads] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned warp = 1; warp < kQuantizeWarps; ++warp) {
    own.positive_zeros += of_warp[warp].positive_zeros;
    own.negative_zeros += of_warp[warp].negative_zeros;
    own.unusable += of_warp[warp].unusable;
  }
  counts[blockIdx.x] = own;
}

extern "C" __global__ void __launch_bounds__(kQuantizeThreads)
    hotplane_quantize(Source source, Planes planes, const double* thresholds,
                      uint32_t alternate_zeros) {
  __shared__ Nibbles of_warp[kQuantizeWarps];
  Nibbles& nibbles = of_warp[threadIdx.x / kThreads];
  const unsigned thread = threadIdx.x % kThreads;
  const uint64_t tiles = TileCount(source);
  for (uint64_t tile = FirstTile(); tile < tiles; tile += TileStep()) {
    QuantizePart(source, planes, thresholds, alternate_zeros != 0, tile, thread, &nibbles);
    __syncwarp();
    WriteLane(planes, nibbles, tile, thread);
    __syncwarp();
  }
}

}  // namespace hotplane
