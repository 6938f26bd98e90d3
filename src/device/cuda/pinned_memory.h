// Host memory that the GPU reads and writes directly.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "base/memory.h"
#include "device/cuda/driver.h"

namespace hotplane {

// Huge pages, given memory by several threads, then registered with the driver. Move-only.
class PinnedRing {
 public:
  PinnedRing() = default;
  ~PinnedRing();
  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;

  // Begins to touch `bytes` of memory with `thread_count` threads; needs no context. Once.
  Result<void> Begin(uint64_t bytes, size_t thread_count);
  // Waits for that and registers it. The context is current here and outlives this.
  Result<void> Register(const CudaDriver& driver, CUcontext context);

  std::byte* data() const { return memory_.data(); }
  uint64_t bytes() const { return memory_.size(); }

 private:
  void Join();

  HugeBuffer memory_;
  std::vector<std::thread> threads_;
  const CudaDriver* driver_ = nullptr;
  CUcontext context_ = nullptr;
  std::vector<std::byte*> registered_;  // pieces, by address
};

// A small array that host and device both write. Move-only.
template <typename T>
class SharedArray {
 public:
  SharedArray() = default;
  ~SharedArray() {
    if (data_ == nullptr) return;
    const CurrentContext current(*driver_, context_);
    (void)driver_->cuMemFreeHost(data_);
  }
  SharedArray(const SharedArray&) = delete;
  SharedArray& operator=(const SharedArray&) = delete;

  // Zeroed. The context is current and outlives this. Once.
  Result<void> Allocate(const CudaDriver& driver, CUcontext context, size_t count) {
    void* data = nullptr;
    HP_CUDA_TRY(driver, "cannot allocate pinned memory",
                driver.cuMemHostAlloc(&data, count * sizeof(T),
                                      CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    driver_ = &driver;
    context_ = context;
    data_ = static_cast<T*>(data);
    for (size_t i = 0; i < count; ++i) data_[i] = T();
    return {};
  }
  // The same address on host and device (unified addressing, on every 64-bit system).
  T* data() const { return data_; }

 private:
  const CudaDriver* driver_ = nullptr;
  CUcontext context_ = nullptr;
  T* data_ = nullptr;
};

}  // namespace hotplane
