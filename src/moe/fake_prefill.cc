// The kernels of prefill themselves, for the fake CUDA driver.
#include "device/fake/cuda_on_host.h"
#include "device/fake/fake_kernel.h"

// In place of the one beside the kernels.
#include "moe/cuda/prefill_mma_kernel.cu"
#include "moe/cuda/prefill_sort_kernel.cu"
#include "moe/on_host/fake_product.h"
#include "moe/on_host/moe/cuda/ptx.h"

namespace hotplane {
namespace moe_cuda {
alignas(16) thread_local uint8_t memory[kSharedOnHost + on_host::kGuardBytes];
static_assert(std::max(SharedBytesOf(kPrefillMmaMany), SharedBytesOf(kPrefillMmaFew)) <=
              kSharedOnHost);
}  // namespace moe_cuda

namespace {

using namespace moe_cuda;

template <void (*kKernel)(MoeArgs, PrefillArgs)>
std::function<void()> OrderWork(const FakeLaunch& launch) {
  return [args = ArgsOf(launch), prefill = PrefillOf(launch), blocks = launch.blocks,
          threads = launch.threads] {
    on_host::Launch({blocks, threads}, [&] { kKernel(args, prefill); });
  };
}
std::function<void()> RoundWork(const FakeLaunch& launch) {
  return [values = *static_cast<uint16_t* const*>(launch.arguments[0]),
          rows = *static_cast<const uint64_t*>(launch.arguments[1]),
          columns = *static_cast<const uint32_t*>(launch.arguments[2]), blocks = launch.blocks,
          threads = launch.threads] {
    on_host::Launch({blocks, threads}, [&] { hotplane_moe_round_fp8(values, rows, columns); });
  };
}

constexpr FakeKernel kKernels[] = {
    {"hotplane_moe_sort", OrderWork<hotplane_moe_sort>},
    {"hotplane_moe_arrange", OrderWork<hotplane_moe_arrange>},
    {"hotplane_moe_round_fp8", RoundWork},
    {"hotplane_moe_prefill_mma_base", ProductWork<hotplane_moe_prefill_mma_base>},
    {"hotplane_moe_prefill_mma_nibbles", ProductWork<hotplane_moe_prefill_mma_nibbles>},
    {"hotplane_moe_prefill_mma_quintals", ProductWork<hotplane_moe_prefill_mma_quintals>},
    {"hotplane_moe_prefill_mma_few_base", ProductWork<hotplane_moe_prefill_mma_few_base>},
    {"hotplane_moe_prefill_mma_few_nibbles", ProductWork<hotplane_moe_prefill_mma_few_nibbles>},
    {"hotplane_moe_prefill_mma_few_quintals", ProductWork<hotplane_moe_prefill_mma_few_quintals>},
};
const bool kAdded = [] {
  for (const FakeKernel& kernel : kKernels) FakeKernelAdded{kernel};
  return true;
}();

}  // namespace
}  // namespace hotplane
