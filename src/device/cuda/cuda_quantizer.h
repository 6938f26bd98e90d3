// Matrices quantized on the GPU.
#pragma once

#include <memory>
#include <mutex>

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

// The context is current; it and the kernels, which are loaded, outlive the quantizer.
Result<std::unique_ptr<MatrixQuantizer>> NewCudaQuantizer(const CudaDriver& driver,
                                                          CUcontext context,
                                                          const QuantizeKernels& kernels,
                                                          const QuantizerOptions& options);

}  // namespace hotplane
