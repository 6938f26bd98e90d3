// How the fake CUDA driver runs the kernels of prefill.
#pragma once

#include "device/fake/cuda_on_host.h"
#include "device/fake/fake_kernel.h"
#include "moe/cuda/moe_args.h"
#include "moe/on_host/moe/cuda/ptx.h"

namespace hotplane::moe_cuda {

inline MoeArgs ArgsOf(const FakeLaunch& launch) {
  return *static_cast<const MoeArgs*>(launch.arguments[0]);
}
inline PrefillArgs PrefillOf(const FakeLaunch& launch) {
  return *static_cast<const PrefillArgs*>(launch.arguments[1]);
}

// A product; few blocks take all tiles, so that each has to count them first.
template <void (*kKernel)(MoeArgs, PrefillArgs, uint32_t)>
std::function<void()> ProductWork(const FakeLaunch& launch) {
  return [args = ArgsOf(launch), prefill = PrefillOf(launch),
          gate_up = *static_cast<const uint32_t*>(launch.arguments[2]), threads = launch.threads,
          shared_bytes = launch.shared_bytes] {
    on_host::Launch({3, threads, memory, shared_bytes}, [&] { kKernel(args, prefill, gate_up); });
  };
}

}  // namespace hotplane::moe_cuda
