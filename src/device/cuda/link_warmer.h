// Keeps a device's link busy for a while: one that has slept is slow at first.
#pragma once

#include <atomic>
#include <thread>

#include "device/cuda/driver.h"
#include "device/cuda/pinned_memory.h"

namespace hotplane {

class LinkWarmer {
 public:
  // Copies the same 4 MiB to the device again and again, on a thread of its own, for so long at
  // most. Where it cannot, it does nothing. `context` outlives it.
  LinkWarmer(const CudaDriver& driver, CUcontext context, double seconds_max);
  // Ends it within a copy's time.
  ~LinkWarmer();
  LinkWarmer(const LinkWarmer&) = delete;
  LinkWarmer& operator=(const LinkWarmer&) = delete;

 private:
  void Copy();
  Result<void> CopyUntilStopped(SharedArray<uint8_t>& from, CUstream stream);

  const CudaDriver& driver_;
  const CUcontext context_;
  const double seconds_max_;
  std::atomic<bool> stopped_{false};
  std::thread thread_;
};

}  // namespace hotplane
