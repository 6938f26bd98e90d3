#include "device/cuda/pinned_memory.h"

#include <algorithm>

#include "base/log.h"
#include "base/units.h"

namespace hotplane {
namespace {

// One large registration can stall the GPU for seconds.
constexpr uint64_t kRegisterBytes = 256 * kMiB;

}  // namespace

PinnedRing::~PinnedRing() {
  Join();
  if (registered_.empty()) return;
  const CurrentContext current(*driver_, context_);
  for (std::byte* piece : registered_) (void)driver_->cuMemHostUnregister(piece);
}

void PinnedRing::Join() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

Result<void> PinnedRing::Begin(uint64_t bytes, size_t thread_count) {
  HP_ASSIGN(memory_, HugeBuffer::Allocate(bytes));
  const uint64_t share = RoundUp((bytes + thread_count - 1) / thread_count, 2 * kMiB);
  for (uint64_t begin = 0; begin < bytes; begin += share) {
    const std::span<std::byte> part = memory_.span().subspan(begin, std::min(share, bytes - begin));
    try {
      threads_.emplace_back([part] { TouchPages(part); });
    } catch (const std::system_error&) {
      TouchPages(part);
    }
  }
  return {};
}

Result<void> PinnedRing::Register(const CudaDriver& driver, CUcontext context) {
  Join();
  driver_ = &driver;
  context_ = context;
  for (uint64_t begin = 0; begin < memory_.size(); begin += kRegisterBytes) {
    std::byte* const piece = memory_.data() + begin;
    const uint64_t bytes = std::min<uint64_t>(kRegisterBytes, memory_.size() - begin);
    HP_CUDA_TRY(driver, Text("cannot register {} of host memory", FormatBytes(bytes)),
                driver.cuMemHostRegister(piece, bytes, CU_MEMHOSTREGISTER_PORTABLE));
    registered_.push_back(piece);
  }
  return {};
}

}  // namespace hotplane
