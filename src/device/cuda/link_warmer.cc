#include "device/cuda/link_warmer.h"

#include <chrono>
#include <system_error>

#include "base/log.h"
#include "base/units.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;
constexpr uint64_t kCopyBytes = 4 * kMiB;
// Between two looks whether to stop: a third of a millisecond of a PCIe 5 link.
constexpr int kCopiesAtOnce = 4;

}  // namespace

LinkWarmer::LinkWarmer(const CudaDriver& driver, CUcontext context, double seconds_max)
    : driver_(driver), context_(context), seconds_max_(seconds_max) {
  try {
    thread_ = std::thread([this] { Copy(); });
  } catch (const std::system_error&) {
    // Then the link is slow at first.
  }
}

LinkWarmer::~LinkWarmer() {
  stopped_ = true;
  if (thread_.joinable()) thread_.join();
}

void LinkWarmer::Copy() {
  const CurrentContext current(driver_, context_);
  SharedArray<uint8_t> from;
  const Result<CUstream> stream = NewCudaStream(driver_);
  Result<void> copied = stream ? Result<void>() : Result<void>(Fail(stream.error()));
  if (copied) copied = from.Allocate(driver_, context_, kCopyBytes);
  if (copied) copied = CopyUntilStopped(from, *stream);
  if (!copied) Log(LogLevel::kDebug, "the link is not warmed up: {}", copied.error().ToString());
  if (stream) (void)driver_.cuStreamDestroy(*stream);
}

Result<void> LinkWarmer::CopyUntilStopped(SharedArray<uint8_t>& from, CUstream stream) {
  CUdeviceptr to = 0;
  HP_CUDA_TRY(driver_, "cannot allocate device memory", driver_.cuMemAlloc(&to, kCopyBytes));
  const auto start = Clock::now();
  CUresult result = CUDA_SUCCESS;
  while (!stopped_ && result == CUDA_SUCCESS &&
         std::chrono::duration<double>(Clock::now() - start).count() < seconds_max_) {
    for (int i = 0; i < kCopiesAtOnce && result == CUDA_SUCCESS; ++i)
      result = driver_.cuMemcpyHtoDAsync(to, from.data(), kCopyBytes, stream);
    const CUresult waited = driver_.cuStreamSynchronize(stream);
    if (result == CUDA_SUCCESS) result = waited;
  }
  // A wait that failed does not say that nothing is on its way.
  if (result != CUDA_SUCCESS) (void)driver_.cuStreamSynchronize(stream);
  (void)driver_.cuMemFree(to);
  HP_CUDA_TRY(driver_, "cannot copy to the device", result);
  return {};
}

}  // namespace hotplane
