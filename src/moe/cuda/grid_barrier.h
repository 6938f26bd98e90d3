// All blocks of a launch wait for each other; they are all resident.
#pragma once

#include "moe/cuda/moe_args.h"
#include "moe/cuda/ptx.h"

namespace hotplane::moe_cuda {

// The round that the next barrier ends, read before any block of the launch can have ended it.
__device__ __forceinline__ uint32_t RoundOf(const GridBarrier* barrier) {
  return threadIdx.x == 0 ? ptx::LoadAcquire(&barrier->round) : 0;
}

// What blocks wrote before they arrived is seen by all that wait for them. `round` of thread 0
// counts.
__device__ __forceinline__ void ArriveForAllBlocks(GridBarrier* barrier, uint32_t round) {
  __syncthreads();
  if (threadIdx.x != 0 || ptx::AddAcquireRelease(&barrier->arrived, 1) + 1 != gridDim.x) return;
  barrier->arrived = 0;
  ptx::StoreRelease(&barrier->round, round + 1);
}
__device__ __forceinline__ void WaitForAllBlocks(const GridBarrier* barrier, uint32_t round) {
  if (threadIdx.x == 0) {
    while (ptx::LoadAcquire(&barrier->round) == round) {
    }
  }
  __syncthreads();
}

}  // namespace hotplane::moe_cuda
