// Copies from pinned memory to the device, in order, on a stream; what was copied from comes back
// when its copy is done.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "device/cuda/driver.h"

namespace hotplane {

// Thread-safe. In every call the context is current.
class CopyLane {
 public:
  struct Slot {
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  explicit CopyLane(const CudaDriver& driver) : driver_(driver) {}
  CopyLane(const CopyLane&) = delete;
  CopyLane& operator=(const CopyLane&) = delete;

  Result<void> Open();  // once
  void Close();         // waits for all copies

  Result<void> Copy(std::byte* destination, const std::byte* slot_data, Slot slot);
  // Appends the slots whose copies have ended.
  void TakeDone(std::vector<Slot>* done);
  // `stream` goes on after all copies that were begun before.
  Result<void> Order(CUstream stream);

 private:
  struct Running {
    CUevent event;
    Slot slot;
  };
  Result<CUevent> NewEventLocked();

  const CudaDriver& driver_;
  CUstream stream_ = nullptr;
  std::mutex mutex_;  // guards what follows, and the order of calls on the stream
  CUevent tail_ = nullptr;
  std::deque<Running> running_;
  std::vector<CUevent> free_events_;
};

}  // namespace hotplane
