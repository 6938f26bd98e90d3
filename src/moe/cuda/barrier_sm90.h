// Barriers in shared memory where coming and waiting are two steps (mbarrier, waits as Hopper has
// them): what a thread does between them, others need not wait for.
#pragma once

#include <cstdint>

#include "moe/cuda/ptx.h"

namespace hotplane::ptx {

// For `count` arrivals each time. By one thread; the others see it after a barrier.
__device__ __forceinline__ void InitBarrier(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(SharedAddress(barrier)), "r"(count)
               : "memory");
}
// Before its memory is something else, or initialized anew; nobody may be waiting.
__device__ __forceinline__ void EndBarrier(uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];\n" ::"r"(SharedAddress(barrier)) : "memory");
}
// What this thread did before is seen by those who wait.
__device__ __forceinline__ void ArriveAt(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];\n" ::"r"(SharedAddress(barrier)) : "memory");
}
// Until all have come; `parity` is 0 the first time, then 1, then 0, ...
__device__ __forceinline__ void WaitFor(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred all;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 all, [%0], %1;\n"
      "@!all bra again;\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

}  // namespace hotplane::ptx
