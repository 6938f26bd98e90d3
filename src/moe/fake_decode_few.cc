// The kernel of a decode of few assignments itself, for the fake CUDA driver.
#include "device/fake/cuda_on_host.h"
#include "device/fake/fake_kernel.h"

// In place of the one beside the kernels.
#include "moe/cuda/decode_few_kernel.cu"
#include "moe/on_host/moe/cuda/ptx.h"

namespace hotplane {
namespace {

using namespace moe_cuda;

// On a GPU there is a block on every multiprocessor; here each thread has a price, and all are
// there at once. Where assignments are very few they have two blocks each, if these can have as
// many groups, and there is one that has none; where there are more they have as few blocks as they
// can, of as few warps.
std::function<void()> FewWork(const FakeLaunch& launch) {
  const auto args = *static_cast<const MoeArgs*>(launch.arguments[0]);
  auto few = *static_cast<const FewArgs*>(launch.arguments[1]);
  uint32_t warps = launch.threads / 32;
  const uint32_t groups = args.intermediate / 32;
  const uint32_t assignments = args.tokens * args.top_k;
  if (launch.blocks > kFewBlocksMax || assignments * few.parts > launch.blocks ||
      few.parts * few.groups < groups || (few.parts - 1) * few.groups >= groups ||
      few.groups > FewGroupsMax(warps) ||
      launch.shared_bytes != FewSharedBytes(warps, args.hidden, few.groups))
    on_host::Die("a launch of decode that cannot be");
  constexpr uint32_t kVeryFew = 6;
  if (assignments > kVeryFew && groups <= FewGroupsMax(kDecodeWarpsMin)) {
    warps = kDecodeWarpsMin;
    few.groups = groups;
  }
  const uint32_t half = (groups + 1) / 2;
  if (assignments <= kVeryFew && half <= FewGroupsMax(warps)) few.groups = half;
  few.parts = (groups + few.groups - 1) / few.groups;
  const uint32_t blocks = std::min(assignments * few.parts + 1, launch.blocks);
  return [=] {
    // The memory of the thread that does the work, which need not be the one that launches.
    on_host::Launch({blocks, 32 * warps, memory, FewSharedBytes(warps, args.hidden, few.groups)},
                    [&] { hotplane_moe_decode_few(args, few); });
  };
}

constexpr FakeKernel kKernel = {"hotplane_moe_decode_few", FewWork};
const FakeKernelAdded kAdded(kKernel);

}  // namespace
}  // namespace hotplane
