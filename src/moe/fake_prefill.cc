// The kernels of prefill themselves, for the fake CUDA driver: those that need no instruction of
// one generation of GPUs alone.
#include "device/fake/cuda_on_host.h"
#include "device/fake/fake_kernel.h"

// In place of the one beside the kernels.
#include "moe/cuda/prefill_mma_kernel.cu"
#include "moe/cuda/prefill_sort_kernel.cu"
#include "moe/on_host/moe/cuda/ptx.h"

namespace hotplane {
namespace moe_cuda {
alignas(16) thread_local uint8_t memory[kSharedOnHost];
static_assert(std::max(SharedBytesOf(kPrefillMmaMany), SharedBytesOf(kPrefillMmaFew)) <=
              kSharedOnHost);
}  // namespace moe_cuda

namespace {

using namespace moe_cuda;

MoeArgs ArgsOf(void** arguments) { return *static_cast<const MoeArgs*>(arguments[0]); }
PrefillArgs PrefillOf(void** arguments) { return *static_cast<const PrefillArgs*>(arguments[1]); }

// What was in shared memory before is of no use.
void Launch(unsigned blocks, uint32_t threads, const std::function<void()>& kernel) {
  std::memset(memory, 0xFF, sizeof memory);
  on_host::Launch(blocks, threads, kernel);
}

template <void (*kKernel)(MoeArgs, PrefillArgs)>
std::function<void()> OrderWork(unsigned blocks, void** arguments) {
  return [=, args = ArgsOf(arguments), prefill = PrefillOf(arguments)] {
    Launch(blocks, kPrefillSortThreads, [&] { kKernel(args, prefill); });
  };
}
// Few blocks take all tiles: each has to count them first.
template <void (*kKernel)(MoeArgs, PrefillArgs, uint32_t)>
std::function<void()> ProductWork(unsigned, void** arguments) {
  const uint32_t gate_up = *static_cast<const uint32_t*>(arguments[2]);
  return [=, args = ArgsOf(arguments), prefill = PrefillOf(arguments)] {
    Launch(3, kPrefillMmaThreads, [&] { kKernel(args, prefill, gate_up); });
  };
}

constexpr FakeKernel kKernels[] = {
    {"hotplane_moe_sort", OrderWork<hotplane_moe_sort>},
    {"hotplane_moe_arrange", OrderWork<hotplane_moe_arrange>},
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
