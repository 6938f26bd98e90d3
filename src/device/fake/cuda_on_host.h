// Enough of CUDA C++ to compile kernels as functions of the host, for the fake driver. The threads
// of a block are fibers of the calling thread; blocks run one after another, and where one waits
// for others those go on meanwhile. Of a block's warps one goes on alone until it waits for the
// others, in an order that is different every time, so that a barrier that is missing is seen. What
// waits for ever on a GPU ends the program.
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
#include <memory>
#include <utility>

#undef __global__
#undef __device__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
// All fibers are one thread; threads of the host do not share. Blocks that wait for each other have
// dynamic shared memory alone.
#define __shared__ thread_local
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

namespace hotplane::on_host {

struct Grid {
  uint32_t blocks = 0;
  uint32_t threads = 0;  // of a block, a multiple of 32
  // Dynamic shared memory of whichever block runs, its bytes and kGuardBytes after them; the
  // calling thread's. What was in it before a block begins is of no use.
  uint8_t* shared = nullptr;
  uint32_t shared_bytes = 0;
};
inline constexpr uint32_t kGuardBytes = 256;

// Runs `kernel` by all threads of the grid.
void Launch(const Grid& grid, const std::function<void()>& kernel);
// Of the launch that runs.
const Grid& CurrentGrid();

// Waits until all threads of the block that are still there have come here.
void WaitForBlock();
// The same; how many of them brought true.
uint32_t CountInBlock(bool predicate);
// Returns when other warps of the block may have gone on: what is waited for must be looked at
// again.
void WaitForOtherWarps();
// Returns when other blocks may have gone on: what is waited for must be looked at again.
void WaitForOtherBlocks();
// Tells that something was changed that other blocks may wait for.
void TellOtherBlocks();
// What the 32 lanes of a warp do together: each brings its operands, one does all the work.
using WarpWork = void (*)(void* const (&lanes)[32]);
void Together(void* operands, WarpWork work);

// The running thread's own, null when it begins.
std::shared_ptr<void>& OwnOfThread();

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
inline int __clz(uint32_t bits) { return std::countl_zero(bits); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float value) { return 1.0f / value; }
// Out of range: the nearest there is; NaN: 0.
inline uint32_t __float2uint_rz(float value) {
  return value >= 0x1p32f ? UINT32_MAX : value > 0 ? static_cast<uint32_t>(value) : 0;
}
inline int32_t __float2int_rn(float value) {
  if (std::isnan(value)) return 0;
  if (value >= 0x1p31f) return INT32_MAX;
  return value < -0x1p31f ? INT32_MIN : static_cast<int32_t>(std::nearbyint(value));
}
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

inline uint32_t atomicAdd(uint32_t* at, uint32_t by) { return std::exchange(*at, *at + by); }

inline void __syncthreads() { hotplane::on_host::WaitForBlock(); }
inline int __syncthreads_count(int predicate) {
  return static_cast<int>(hotplane::on_host::CountInBlock(predicate != 0));
}
inline void __syncwarp() {
  hotplane::on_host::Together(nullptr, [](void* const(&)[32]) {});
}

namespace hotplane::on_host {
// What a lane brings, and then has.
template <typename T>
struct Brought {
  T value;
  uint32_t with;
};
// Every lane gets `of(lanes, lane)`, of what all brought.
template <typename T, typename Of>
T Exchange(T value, uint32_t with, const Of&) {
  Brought<T> own = {value, with};
  Together(&own, [](void* const(&lanes)[32]) {
    Brought<T> brought[32];
    for (uint32_t i = 0; i < 32; ++i) brought[i] = *static_cast<Brought<T>*>(lanes[i]);
    for (uint32_t i = 0; i < 32; ++i) static_cast<Brought<T>*>(lanes[i])->value = Of{}(brought, i);
  });
  return own.value;
}
}  // namespace hotplane::on_host

inline uint32_t __reduce_add_sync(uint32_t, uint32_t value) {
  return hotplane::on_host::Exchange(value, 0, [](const auto& lanes, uint32_t) {
    uint32_t sum = 0;
    for (const auto& lane : lanes) sum += lane.value;
    return sum;
  });
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  return hotplane::on_host::Exchange(value, 0, [](const auto& lanes, uint32_t) {
    uint32_t largest = 0;
    for (const auto& lane : lanes) largest = max(largest, lane.value);
    return largest;
  });
}
inline uint32_t __ballot_sync(uint32_t, bool predicate) {
  return hotplane::on_host::Exchange(predicate ? 1u : 0u, 0, [](const auto& lanes, uint32_t) {
    uint32_t votes = 0;
    for (uint32_t i = 0; i < 32; ++i) votes |= lanes[i].value << i;
    return votes;
  });
}
inline bool __any_sync(uint32_t mask, bool predicate) {
  return __ballot_sync(mask, predicate) != 0;
}
inline uint32_t __match_any_sync(uint32_t, uint32_t value) {
  return hotplane::on_host::Exchange(value, 0, [](const auto& lanes, uint32_t own) {
    uint32_t same = 0;
    for (uint32_t i = 0; i < 32; ++i) same |= (lanes[i].value == lanes[own].value ? 1u : 0u) << i;
    return same;
  });
}
template <typename T>
T __shfl_sync(uint32_t, T value, uint32_t from) {
  return hotplane::on_host::Exchange(value, from, [](const auto& lanes, uint32_t own) {
    return lanes[lanes[own].with % 32].value;
  });
}
template <typename T>
T __shfl_xor_sync(uint32_t, T value, uint32_t mask) {
  return hotplane::on_host::Exchange(value, mask, [](const auto& lanes, uint32_t own) {
    return lanes[(own ^ lanes[own].with) % 32].value;
  });
}
template <typename T>
T __shfl_up_sync(uint32_t, T value, uint32_t by) {
  return hotplane::on_host::Exchange(value, by, [](const auto& lanes, uint32_t own) {
    return lanes[own - (own >= lanes[own].with ? lanes[own].with : 0)].value;
  });
}
