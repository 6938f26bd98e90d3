// All blocks of a launch wait for each other; they are all resident.
#pragma once

#include "moe/cuda/moe_args.h"
#include "moe/cuda/ptx.h"

namespace hotplane::moe_cuda {

// What blocks wrote before they arrived at a barrier is seen by all that wait for it. Each launch
// has two, in order; of one that is over the count goes back to zero while nobody looks at it.
__device__ __forceinline__ void ArriveForAllBlocks(GridBarriers* barriers, uint32_t which) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (which == 0 && blockIdx.x == 0) barriers->arrived[1] = 0;
  ptx::AddRelease(&barriers->arrived[which], 1);
}
__device__ __forceinline__ void WaitForAllBlocks(GridBarriers* barriers, uint32_t which) {
  if (threadIdx.x == 0) {
    while (ptx::LoadAcquire(&barriers->arrived[which]) != gridDim.x) {
    }
    if (which == 1 && blockIdx.x == 0) barriers->arrived[0] = 0;
  }
  __syncthreads();
}

// The wait of a launch that has only the first: the last block that leaves it sets its count
// back. Those that leave are counted in the second one, which is zero since block 0 arrived.
__device__ __forceinline__ void WaitForAllBlocksOnce(GridBarriers* barriers) {
  if (threadIdx.x == 0) {
    while (ptx::LoadAcquire(&barriers->arrived[0]) != gridDim.x) {
    }
  }
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1 && atomicAdd(&barriers->arrived[1], 1) == gridDim.x - 1)
    barriers->arrived[0] = 0;
}

}  // namespace hotplane::moe_cuda
