// Hashes landed bytes on the GPU and compares them there.
#pragma once

#include <span>
#include <vector>

#include "device/cuda/pinned_memory.h"
#include "device/cuda/verify_args.h"
#include "device/landing_device.h"

namespace hotplane {

// Used by one thread at a time. In every call the context is current.
class CudaVerifier {
 public:
  CudaVerifier(const CudaDriver& driver, CUcontext context) : driver_(driver), context_(context) {}
  ~CudaVerifier();
  CudaVerifier(const CudaVerifier&) = delete;
  CudaVerifier& operator=(const CudaVerifier&) = delete;

  // Once. Without kernels for this GPU it can still wait, but not compare.
  Result<void> Open();
  bool has_kernel() const { return kernel_ != nullptr; }
  CUstream stream() const { return stream_; }

  // Until nothing that was launched runs any more, also on a device that failed.
  void Drain() const;

  // After what `stream` has been made to wait for. Blocks, without spinning.
  Result<void> Wait();
  // REQUIRES has_kernel(), or no checks.
  Result<std::vector<LandedMismatch>> Compare(const std::byte* data,
                                              std::span<const LandedCheck> checks);

 private:
  Result<void> CompareSome(const std::byte* data, std::span<const LandedCheck> checks,
                           size_t first_index, std::vector<LandedMismatch>* mismatches);

  const CudaDriver& driver_;
  const CUcontext context_;
  CUstream stream_ = nullptr;
  CUevent done_ = nullptr;
  CUmodule module_ = nullptr;
  CUfunction kernel_ = nullptr;
  SharedArray<VerifyCheck> checks_;
  SharedArray<uint32_t> bad_;
  SharedArray<uint8_t> bad_at_;
  SharedArray<uint64_t> found_;
};

}  // namespace hotplane
