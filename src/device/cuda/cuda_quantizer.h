// Matrices quantized on the GPU.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device/cuda/driver.h"
#include "device/device.h"

namespace hotplane {

// The kernels of a device, loaded when the first quantizer is asked for. Thread-safe.
class QuantizeKernels {
 public:
  QuantizeKernels(const CudaDriver& driver, CUcontext context)
      : driver_(driver), context_(context) {}
  ~QuantizeKernels();
  QuantizeKernels(const QuantizeKernels&) = delete;
  QuantizeKernels& operator=(const QuantizeKernels&) = delete;

  // The context is current. False: this build has none for this GPU.
  Result<bool> Load();
  CUfunction count() const { return count_; }        // REQUIRES Load gave true
  CUfunction quantize() const { return quantize_; }  // the same

 private:
  const CudaDriver& driver_;
  const CUcontext context_;
  std::mutex mutex_;  // guards what follows while Load runs
  CUmodule module_ = nullptr;
  CUfunction count_ = nullptr;
  CUfunction quantize_ = nullptr;
};

// Quantizers that failed to open and hold memory. To give it back waits for all streams of the
// context, and those may wait for a layer that is still to be built: it stays until this is
// destroyed, when none does. Thread-safe.
class KeptQuantizers {
 public:
  void Keep(std::unique_ptr<MatrixQuantizer> quantizer) {
    const std::lock_guard lock(mutex_);
    quantizers_.push_back(std::move(quantizer));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<MatrixQuantizer>> quantizers_;
};

// The context is current; it and the kernels, which are loaded, outlive the quantizer. One that
// cannot be opened keeps nothing of the caller's memory.
Result<std::unique_ptr<MatrixQuantizer>> NewCudaQuantizer(const CudaDriver& driver,
                                                          CUcontext context,
                                                          const QuantizeKernels& kernels,
                                                          const QuantizerOptions& options,
                                                          KeptQuantizers& kept);

}  // namespace hotplane
