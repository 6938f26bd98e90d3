// Page cache as a source of copies: its pages are registered with the driver, a window at a time,
// and copied by the GPU without passing through the CPU's caches.
#pragma once

#include <atomic>
#include <mutex>
#include <span>
#include <vector>

#include "device/cuda/copy_lane.h"
#include "device/device.h"

namespace hotplane {

// Thread-safe. In every call the context is current.
class MappedWindows {
 public:
  MappedWindows(const CudaDriver& driver, const DeviceOptions& options)
      : driver_(driver),
        window_bytes_(options.mapped_worker_count > 0 ? options.mapped_window_bytes : 0),
        worker_count_(options.mapped_worker_count),
        lane_(driver) {}

  Result<void> Open() { return lane_.Open(); }  // once
  // Waits for the copies and releases the pages: that costs as much as a copy, so not before all
  // is landed.
  void Close();

  uint64_t window_bytes() const { return refused_ ? 0 : window_bytes_; }
  size_t worker_count() const { return worker_count_; }
  CopyLane& lane() { return lane_; }

  // False: the driver refuses to register these pages, or they do not begin and end with a page.
  Result<bool> Land(std::span<const std::byte> source, std::byte* destination);

 private:
  // Until not too much is in flight.
  void MakeRoom(uint64_t bytes);

  const CudaDriver& driver_;
  const uint64_t window_bytes_;
  const size_t worker_count_;
  CopyLane lane_;
  std::atomic<bool> refused_{false};
  std::mutex mutex_;  // guards what follows
  uint64_t running_bytes_ = 0;
  std::vector<CopyLane::Slot> done_;
  std::vector<void*> registered_;
};

}  // namespace hotplane
