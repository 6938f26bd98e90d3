// The kernels of prefill that are Hopper's, for the fake CUDA driver.
#include "device/fake/cuda_on_host.h"
#include "device/fake/fake_kernel.h"

// In place of those beside the kernels.
#include "moe/cuda/prefill_sm90_kernel.cu"
#include "moe/on_host/moe/cuda/ptx.h"
#include "moe/on_host/moe/cuda/wgmma_sm90.h"

namespace hotplane {
namespace {

using namespace moe_cuda;
static_assert(kPrefillSharedBytes <= kSharedOnHost);

// Few blocks take all tiles: each has to count them first.
template <void (*kKernel)(MoeArgs, PrefillArgs, uint32_t)>
std::function<void()> ProductWork(const FakeLaunch& launch) {
  return [args = *static_cast<const MoeArgs*>(launch.arguments[0]),
          prefill = *static_cast<const PrefillArgs*>(launch.arguments[1]),
          gate_up = *static_cast<const uint32_t*>(launch.arguments[2]), threads = launch.threads,
          shared_bytes = launch.shared_bytes] {
    on_host::Launch({3, threads, memory, shared_bytes}, [&] { kKernel(args, prefill, gate_up); });
  };
}

constexpr FakeKernel kKernels[] = {
    {"hotplane_moe_prefill_base", ProductWork<hotplane_moe_prefill_base>},
    {"hotplane_moe_prefill_nibbles", ProductWork<hotplane_moe_prefill_nibbles>},
    {"hotplane_moe_prefill_quintals", ProductWork<hotplane_moe_prefill_quintals>},
};
const FakeKernelAdded kAdded[] = {FakeKernelAdded(kKernels[0]), FakeKernelAdded(kKernels[1]),
                                  FakeKernelAdded(kKernels[2])};

}  // namespace
}  // namespace hotplane
