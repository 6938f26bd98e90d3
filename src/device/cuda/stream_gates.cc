#include "device/cuda/stream_gates.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <vector>

#include "base/format_text.h"
#include "base/log.h"
#include "device/cuda/pinned_memory.h"

namespace hotplane {
namespace {

constexpr uint32_t kOpen = 1;
// CUDA gives a process 8 queues to a device (CUDA_DEVICE_MAX_CONNECTIONS); streams share them, and
// one that waits holds up those behind it. On an H200 a boot came through beside 5 waiting streams,
// and not beside 7.
constexpr size_t kWaitingStreamsMax = 4;

class CudaStreamGates;

// Those of all engines of this process: they share its queues.
struct Registry {
  std::mutex mutex;
  std::set<CudaStreamGates*> gates;
};
Registry& AllGates() {
  static Registry* const registry = new Registry;  // outlives engines that are never closed
  return *registry;
}

class CudaStreamGates final : public StreamGates {
 public:
  CudaStreamGates(const CudaDriver& driver, CUcontext context, size_t count)
      : driver_(driver), context_(context), count_(count) {
    const std::lock_guard lock(AllGates().mutex);
    AllGates().gates.insert(this);
  }
  ~CudaStreamGates() override {
    {
      const std::lock_guard lock(AllGates().mutex);
      AllGates().gates.erase(this);
    }
    for (size_t gate = 0; gate < count_ && words_.data() != nullptr; ++gate) Open(gate);
    const CurrentContext current(driver_, context_);
    // Nobody else looks at them now.
    for (const Waiter& waiter : waiters_) {
      (void)driver_.cuEventSynchronize(waiter.passed);
      (void)driver_.cuEventDestroy(waiter.passed);
    }
    if (!untold_.empty()) (void)driver_.cuCtxSynchronize();
    for (const Waiter& waiter : untold_) (void)driver_.cuEventDestroy(waiter.passed);
    // Of a device that was lost no event tells that they have returned.
    std::unique_lock lock(open_mutex_);
    opened_.wait(lock, [this] { return host_functions_ == 0; });
  }

  Result<void> Allocate() {
    const CurrentContext current(driver_, context_);
    return words_.Allocate(driver_, context_, count_);
  }

  Result<void> Enqueue(size_t gate, void* stream) override;

  void Open(size_t gate) override {
    std::atomic_ref(words_.data()[gate]).store(kOpen, std::memory_order_release);
    { const std::lock_guard lock(open_mutex_); }
    opened_.notify_all();
  }

 private:
  // What a host function needs, while its stream may still call it.
  struct HostWait {
    CudaStreamGates* gates;
    size_t gate;
  };
  struct Waiter {
    CUstream stream;
    CUevent passed;
    std::unique_ptr<HostWait> host_wait;  // null: the device waits by itself
  };

  bool IsOpen(size_t gate) const {
    return std::atomic_ref(words_.data()[gate]).load(std::memory_order_acquire) == kOpen;
  }
  static void CUDA_CB WaitOnHost(void* data) {
    const HostWait wait = *static_cast<const HostWait*>(data);
    CudaStreamGates& gates = *wait.gates;
    std::unique_lock lock(gates.open_mutex_);
    ++gates.host_functions_;
    gates.opened_.wait(lock, [&] { return gates.IsOpen(wait.gate); });
    --gates.host_functions_;
    gates.opened_.notify_all();
  }
  // These with the registry's mutex, and the context current.
  void ForgetPassed();
  Result<void> RefuseCapture(CUstream stream) const;
  Result<void> RefuseTooMany(CUstream stream) const;
  Result<void> Wait(size_t gate, CUstream stream, Waiter* waiter);

  const CudaDriver& driver_;
  const CUcontext context_;
  const size_t count_;
  SharedArray<uint32_t> words_;
  std::mutex open_mutex_;  // of host functions; never held during a call of the driver
  std::condition_variable opened_;
  size_t host_functions_ = 0;  // that run; guarded by open_mutex_
  // Guarded by the registry's mutex.
  std::vector<Waiter> waiters_;
  std::vector<Waiter> untold_;  // whose events could not be recorded
  bool refused_ = false;        // the device does not wait for memory
};

void CudaStreamGates::ForgetPassed() {
  const auto passed = [this](const Waiter& waiter) {
    if (driver_.cuEventQuery(waiter.passed) != CUDA_SUCCESS) return false;
    (void)driver_.cuEventDestroy(waiter.passed);
    return true;
  };
  waiters_.erase(std::remove_if(waiters_.begin(), waiters_.end(), passed), waiters_.end());
}

// A graph could be launched when the words are not there any more.
Result<void> CudaStreamGates::RefuseCapture(CUstream stream) const {
  if (driver_.cuStreamIsCapturing == nullptr) return {};
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  HP_CUDA_TRY(driver_, "cannot ask whether a CUDA stream is captured",
              driver_.cuStreamIsCapturing(stream, &status));
  if (status == CU_STREAM_CAPTURE_STATUS_NONE) return {};
  return Fail(Status::Usage("a stream that is captured cannot wait for a layer")
                  .Advice("let it wait before the capture, or before the graph is launched"));
}

Result<void> CudaStreamGates::RefuseTooMany(CUstream stream) const {
  std::set<CUstream> waiting;
  for (CudaStreamGates* gates : AllGates().gates) {
    if (gates->context_ != context_) continue;
    gates->ForgetPassed();
    for (const Waiter& waiter : gates->waiters_) waiting.insert(waiter.stream);
  }
  if (waiting.count(stream) != 0 || waiting.size() < kWaitingStreamsMax) return {};
  return Fail(Status::Usage("too many streams of this process wait for layers at once")
                  .Expected(Text("at most {} of one GPU", kWaitingStreamsMax))
                  .Found("one more")
                  .Advice("wait for the layer on the host, or let streams wait for an event of one "
                          "that waits"));
}

Result<void> CudaStreamGates::Wait(size_t gate, CUstream stream, Waiter* waiter) {
  if (driver_.cuStreamWaitValue32 != nullptr && !refused_) {
    const CUresult enqueued =
        driver_.cuStreamWaitValue32(stream, reinterpret_cast<CUdeviceptr>(words_.data() + gate),
                                    kOpen, CU_STREAM_WAIT_VALUE_GEQ);
    if (enqueued != CUDA_ERROR_NOT_SUPPORTED) {
      HP_CUDA_TRY(driver_, "cannot make a CUDA stream wait", enqueued);
      return {};
    }
  }
  if (driver_.cuLaunchHostFunc == nullptr)
    return Fail(Status::System("this CUDA driver cannot make a stream wait for memory"));
  if (!refused_) Log(LogLevel::kInfo, "streams wait for layers by host functions");
  refused_ = true;
  waiter->host_wait = std::make_unique<HostWait>(HostWait{this, gate});
  HP_CUDA_TRY(driver_, "cannot make a CUDA stream wait",
              driver_.cuLaunchHostFunc(stream, &WaitOnHost, waiter->host_wait.get()));
  return {};
}

Result<void> CudaStreamGates::Enqueue(size_t gate, void* stream_pointer) {
  if (IsOpen(gate)) return {};
  const auto stream = static_cast<CUstream>(stream_pointer);
  const CurrentContext current(driver_, context_);
  const std::lock_guard lock(AllGates().mutex);
  HP_TRY(RefuseCapture(stream));
  HP_TRY(RefuseTooMany(stream));
  Waiter waiter = {};
  waiter.stream = stream;
  HP_CUDA_TRY(
      driver_, "cannot create a CUDA event",
      driver_.cuEventCreate(&waiter.passed, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC));
  if (Result<void> waits = Wait(gate, stream, &waiter); !waits) {
    (void)driver_.cuEventDestroy(waiter.passed);
    return waits;
  }
  const CUresult recorded = driver_.cuEventRecord(waiter.passed, stream);
  (recorded == CUDA_SUCCESS ? waiters_ : untold_).push_back(std::move(waiter));
  HP_CUDA_TRY(driver_, "cannot record a CUDA event", recorded);
  return {};
}

}  // namespace

Result<std::unique_ptr<StreamGates>> NewCudaStreamGates(const CudaDriver& driver, CUcontext context,
                                                        size_t count) {
  auto gates = std::make_unique<CudaStreamGates>(driver, context, count);
  HP_TRY(gates->Allocate());
  return std::unique_ptr<StreamGates>(std::move(gates));
}

}  // namespace hotplane
