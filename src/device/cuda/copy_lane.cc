#include "device/cuda/copy_lane.h"

namespace hotplane {

Result<void> CopyLane::Open() {
  HP_ASSIGN(stream_, NewCudaStream(driver_));
  HP_CUDA_TRY(driver_, "cannot create a CUDA event",
              driver_.cuEventCreate(&tail_, CU_EVENT_DISABLE_TIMING));
  return {};
}

void CopyLane::Close() {
  const std::lock_guard lock(mutex_);
  if (stream_ != nullptr) {
    (void)driver_.cuStreamSynchronize(stream_);
    (void)driver_.cuStreamDestroy(stream_);
    stream_ = nullptr;
  }
  for (const Running& running : running_) (void)driver_.cuEventDestroy(running.event);
  for (CUevent event : free_events_) (void)driver_.cuEventDestroy(event);
  if (tail_ != nullptr) (void)driver_.cuEventDestroy(tail_);
  running_.clear();
  free_events_.clear();
  tail_ = nullptr;
}

Result<CUevent> CopyLane::NewEventLocked() {
  CUevent event = nullptr;
  if (!free_events_.empty()) {
    event = free_events_.back();
    free_events_.pop_back();
    return event;
  }
  HP_CUDA_TRY(driver_, "cannot create a CUDA event",
              driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  return event;
}

Result<void> CopyLane::Copy(std::byte* destination, const std::byte* slot_data, Slot slot) {
  const std::lock_guard lock(mutex_);
  HP_ASSIGN(const CUevent event, NewEventLocked());
  const auto to = reinterpret_cast<CUdeviceptr>(destination);
  CUresult result = driver_.cuMemcpyHtoDAsync(to, slot_data, slot.bytes, stream_);
  if (result == CUDA_SUCCESS) result = driver_.cuEventRecord(event, stream_);
  if (result != CUDA_SUCCESS) {
    free_events_.push_back(event);
    return Fail(CudaStatus(driver_, result, "cannot copy to the device"));
  }
  running_.push_back({event, slot});
  return {};
}

void CopyLane::TakeDone(std::vector<Slot>* done) {
  const std::lock_guard lock(mutex_);
  // Of a broken device every query is an error: its slots come back too, and the next copy tells.
  while (!running_.empty() &&
         driver_.cuEventQuery(running_.front().event) != CUDA_ERROR_NOT_READY) {
    done->push_back(running_.front().slot);
    free_events_.push_back(running_.front().event);
    running_.pop_front();
  }
}

Result<void> CopyLane::Order(CUstream stream) {
  const std::lock_guard lock(mutex_);
  HP_CUDA_TRY(driver_, "cannot record a CUDA event", driver_.cuEventRecord(tail_, stream_));
  HP_CUDA_TRY(driver_, "cannot wait for a CUDA event",
              driver_.cuStreamWaitEvent(stream, tail_, CU_EVENT_WAIT_DEFAULT));
  return {};
}

}  // namespace hotplane
