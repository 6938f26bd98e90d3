// The kernels of decode themselves, for the fake CUDA driver.
#include "device/fake/cuda_on_host.h"
#include "device/fake/fake_kernel.h"

// In place of the one beside the kernels.
#include "moe/cuda/decode_kernel.cu"
#include "moe/on_host/moe/cuda/ptx.h"

namespace hotplane {
namespace {

using namespace moe_cuda;

// As many blocks as the slices of these assignments need, and a few. On a GPU there is one on every
// multiprocessor; here each has a price.
uint32_t BlocksFor(uint32_t assignments, uint32_t launched) {
  constexpr uint32_t kSlicesOfBlock = kDecodeOwnSlicesMax - 2;
  const uint32_t needed = assignments * kCostMax / kCostMin / kSlicesOfBlock + 1;
  return std::min(launched, std::max(3u, needed));
}

template <void (*kKernel)(MoeArgs, DecodeArgs)>
std::function<void()> DecodeWork(const FakeLaunch& launch) {
  const auto args = *static_cast<const MoeArgs*>(launch.arguments[0]);
  const auto decode = *static_cast<const DecodeArgs*>(launch.arguments[1]);
  const uint32_t assignments = args.tokens * args.top_k;
  if (launch.blocks < kDecodeBlocksMin || args.experts > kDecodeExpertsMax ||
      assignments > kDecodeAssignmentsMax || launch.threads < 32 * kDecodeWarpsMin ||
      launch.threads > 32 * kDecodeWarpsMax || launch.shared_bytes > kSharedOnHost)
    on_host::Die("a launch of decode that cannot be");
  // Many blocks are of the fewest warps.
  const uint32_t warps = assignments <= 32 ? launch.threads / 32 : kDecodeWarpsMin;
  const uint32_t shared_bytes =
      launch.shared_bytes - DecodeFixedBytes(launch.threads / 32) + DecodeFixedBytes(warps);
  return [=, blocks = BlocksFor(assignments, launch.blocks)] {
    // The memory of the thread that does the work, which need not be the one that launches.
    on_host::Launch({blocks, 32 * warps, memory, shared_bytes}, [&] { kKernel(args, decode); });
  };
}

std::function<void()> CombineWork(const FakeLaunch& launch) {
  const auto args = *static_cast<const MoeArgs*>(launch.arguments[0]);
  return [args, threads = launch.threads] {
    on_host::Launch({3, threads}, [&] { hotplane_moe_combine(args); });
  };
}

constexpr FakeKernel kKernels[] = {
    {"hotplane_moe_decode", DecodeWork<hotplane_moe_decode>},
    {"hotplane_moe_decode_base", DecodeWork<hotplane_moe_decode_base>},
    {"hotplane_moe_decode_nibbles", DecodeWork<hotplane_moe_decode_nibbles>},
    {"hotplane_moe_decode_quintals", DecodeWork<hotplane_moe_decode_quintals>},
    {"hotplane_moe_decode_fp8", DecodeWork<hotplane_moe_decode_fp8>},
    {"hotplane_moe_combine", CombineWork},
};
const FakeKernelAdded kAdded[] = {FakeKernelAdded(kKernels[0]), FakeKernelAdded(kKernels[1]),
                                  FakeKernelAdded(kKernels[2]), FakeKernelAdded(kKernels[3]),
                                  FakeKernelAdded(kKernels[4]), FakeKernelAdded(kKernels[5])};

}  // namespace
}  // namespace hotplane
