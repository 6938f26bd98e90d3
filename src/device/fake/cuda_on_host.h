// Enough of CUDA C++ to compile kernels as functions of the host, for the fake driver: blocks run
// one after another, the threads of one are fibers of the calling thread. Of a block's warps one
// goes on alone until it waits for the others, in an order that is different every time, so that a
// barrier that is missing is seen. What waits for ever on a GPU ends the program.
//
// Included before the kernels and nothing else that includes CUDA's headers. A folder with kernels
// brings its own ptx.h, of functions instead of instructions.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>

#undef __global__
#undef __device__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
// All fibers are one thread; threads of the host do not share.
#define __shared__ thread_local
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

namespace hotplane::on_host {

// Runs `kernel` as so many blocks of so many threads, a multiple of 32.
void Launch(uint32_t blocks, uint32_t threads, const std::function<void()>& kernel);

// Waits until all threads of the block that are still there have come here.
void WaitForBlock();
// What the 32 lanes of a warp do together: each brings its operands, one does all the work.
using WarpWork = void (*)(void* const (&lanes)[32]);
void Together(void* operands, WarpWork work);

// "block 7: `why`", and the end of the program.
[[noreturn]] void Die(const char* why);

}  // namespace hotplane::on_host

// Those of the thread that runs.
struct IndexOnHost {
  uint32_t x = 0, y = 0, z = 0;
};
extern thread_local IndexOnHost threadIdx, blockIdx, blockDim, gridDim;

using std::max;
using std::min;

inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (by % 32));
}
template <typename T>
T __ldcg(const T* at) {
  return *at;
}
template <typename T>
void __stcs(T* at, T value) {
  *at = value;
}
inline uint32_t atomicCAS(uint32_t* at, uint32_t expected, uint32_t desired) {
  const uint32_t before = *at;
  if (before == expected) *at = desired;
  return before;
}

inline void __syncthreads() { hotplane::on_host::WaitForBlock(); }
inline void __syncwarp() {
  hotplane::on_host::Together(nullptr, [](void* const(&)[32]) {});
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t value) {
  hotplane::on_host::Together(&value, [](void* const(&lanes)[32]) {
    uint32_t sum = 0;
    for (void* const lane : lanes) sum += *static_cast<uint32_t*>(lane);
    for (void* const lane : lanes) *static_cast<uint32_t*>(lane) = sum;
  });
  return value;
}
inline uint32_t __ballot_sync(uint32_t, bool predicate) {
  uint32_t value = predicate ? 1 : 0;
  hotplane::on_host::Together(&value, [](void* const(&lanes)[32]) {
    uint32_t votes = 0;
    for (uint32_t i = 0; i < 32; ++i) votes |= *static_cast<uint32_t*>(lanes[i]) << i;
    for (void* const lane : lanes) *static_cast<uint32_t*>(lane) = votes;
  });
  return value;
}
inline bool __any_sync(uint32_t mask, bool predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
inline uint32_t __shfl_up_sync(uint32_t, uint32_t value, uint32_t by) {
  struct Operands {
    uint32_t value, by;
  } operands = {value, by};
  hotplane::on_host::Together(&operands, [](void* const(&lanes)[32]) {
    for (uint32_t i = 32; i-- > 0;) {
      auto* const own = static_cast<Operands*>(lanes[i]);
      if (i >= own->by) own->value = static_cast<Operands*>(lanes[i - own->by])->value;
    }
  });
  return operands.value;
}
