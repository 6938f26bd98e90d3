// The kernels of prefill that are Hopper's, for the fake CUDA driver.
#include "device/fake/cuda_on_host.h"
#include "device/fake/fake_kernel.h"

// In place of those beside the kernels.
#include "moe/cuda/prefill_sm90_kernel.cu"
#include "moe/on_host/fake_product.h"
#include "moe/on_host/moe/cuda/barrier_sm90.h"
#include "moe/on_host/moe/cuda/ptx.h"
#include "moe/on_host/moe/cuda/wgmma_sm90.h"

namespace hotplane {
namespace {

using namespace moe_cuda;
static_assert(kPrefillSharedBytes <= kSharedOnHost);

constexpr FakeKernel kKernels[] = {
    {"hotplane_moe_prefill_base", ProductWork<hotplane_moe_prefill_base>},
    {"hotplane_moe_prefill_nibbles", ProductWork<hotplane_moe_prefill_nibbles>},
    {"hotplane_moe_prefill_quintals", ProductWork<hotplane_moe_prefill_quintals>},
};
const FakeKernelAdded kAdded[] = {FakeKernelAdded(kKernels[0]), FakeKernelAdded(kKernels[1]),
                                  FakeKernelAdded(kKernels[2])};

}  // namespace
}  // namespace hotplane
