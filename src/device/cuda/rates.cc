#include "device/cuda/rates.h"

#include <algorithm>
#include <chrono>

#include "base/units.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Ten times the L2 cache, so that verifying reads memory.
constexpr uint64_t kScratchBytes = 512 * kMiB;
// 20 ms of a PCIe 5 link.
constexpr uint64_t kCopyBytes = kGiB;
constexpr int kPassCount = 3;
constexpr uint32_t kCheckBytes = 256 * 1024;

// Plain device memory, for the time of a measurement.
class Scratch {
 public:
  Scratch(const CudaDriver& driver, uint64_t bytes) : driver_(driver) {
    if (driver_.cuMemAlloc(&data_, bytes) != CUDA_SUCCESS) data_ = 0;
  }
  ~Scratch() {
    if (data_ != 0) (void)driver_.cuMemFree(data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  CUdeviceptr data() const { return data_; }

 private:
  const CudaDriver& driver_;
  CUdeviceptr data_ = 0;
};

// Back to back on one stream.
Result<double> CopyRate(const CudaDriver& driver, const PinnedRing& ring, CudaVerifier& verifier,
                        CUdeviceptr scratch, uint64_t piece_bytes) {
  const uint64_t span = std::min(ring.bytes(), kScratchBytes) / piece_bytes * piece_bytes;
  double best = 0;
  for (int pass = 0; pass < kPassCount; ++pass) {
    const auto start = Clock::now();
    uint64_t copied = 0;
    for (; copied < kCopyBytes; copied += piece_bytes) {
      const uint64_t offset = copied % span;
      HP_CUDA_TRY(driver, "cannot copy to the device",
                  driver.cuMemcpyHtoDAsync(scratch + offset, ring.data() + offset, piece_bytes,
                                           verifier.stream()));
    }
    HP_TRY(verifier.Wait());
    best = std::max(best, static_cast<double>(copied) / SecondsSince(start));
  }
  return best;
}

Result<double> VerifyRate(CudaVerifier& verifier, CUdeviceptr scratch) {
  std::vector<LandedCheck> checks;
  for (uint64_t offset = 0; offset < kScratchBytes; offset += kCheckBytes)
    checks.push_back({offset, 0, kCheckBytes});
  double best = 0;
  for (int pass = 0; pass < kPassCount; ++pass) {
    const auto start = Clock::now();
    HP_TRY(verifier.Compare(reinterpret_cast<const std::byte*>(scratch), checks));
    best = std::max(best, static_cast<double>(kScratchBytes) / SecondsSince(start));
  }
  return best;
}

}  // namespace

Result<DeviceRates> MeasureCudaRates(const CudaDriver& driver, const PinnedRing& ring,
                                     CudaVerifier& verifier, uint64_t piece_bytes) {
  DeviceRates rates;
  const Scratch scratch(driver, kScratchBytes);
  if (scratch.data() == 0) return rates;
  HP_ASSIGN(rates.pinned_copy, CopyRate(driver, ring, verifier, scratch.data(), piece_bytes));
  HP_ASSIGN(rates.pinned_copy_4mib, CopyRate(driver, ring, verifier, scratch.data(), 4 * kMiB));
  HP_ASSIGN(rates.pinned_copy_16mib, CopyRate(driver, ring, verifier, scratch.data(), 16 * kMiB));
  if (verifier.has_kernel()) {
    HP_ASSIGN(rates.verify, VerifyRate(verifier, scratch.data()));
  }
  return rates;
}

Result<RegistrationRates> MeasureCudaRegistration(const CudaDriver& driver,
                                                  std::span<const std::byte> pages,
                                                  uint64_t window_bytes) {
  RegistrationRates rates;
  std::vector<void*> windows;
  uint64_t bytes = 0;
  const auto start = Clock::now();
  while (bytes < pages.size()) {
    const uint64_t count = std::min<uint64_t>(window_bytes, pages.size() - bytes);
    void* const window = const_cast<std::byte*>(pages.data() + bytes);
    const CUresult registered = driver.cuMemHostRegister(
        window, count, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_READ_ONLY);
    if (registered != CUDA_SUCCESS) break;
    windows.push_back(window);
    bytes += count;
  }
  const double registering = SecondsSince(start);
  const auto released = Clock::now();
  CUresult failed = CUDA_SUCCESS;
  for (void* window : windows)
    if (const CUresult result = driver.cuMemHostUnregister(window); result != CUDA_SUCCESS)
      failed = result;
  const double releasing = SecondsSince(released);
  HP_CUDA_TRY(driver, "cannot release registered pages", failed);
  // What was refused in the middle tells nothing.
  if (bytes < pages.size() || bytes == 0) return rates;
  rates.registering = static_cast<double>(bytes) / registering;
  rates.releasing = static_cast<double>(bytes) / releasing;
  return rates;
}

}  // namespace hotplane
