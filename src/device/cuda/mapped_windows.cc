#include "device/cuda/mapped_windows.h"

#include <chrono>
#include <thread>

#include "base/log.h"
#include "base/units.h"

namespace hotplane {
namespace {

// 5 ms of a PCIe 5 link: enough that it never waits, little enough that layers land in order.
constexpr uint64_t kRunningBytesMax = 256 * kMiB;

}  // namespace

void MappedWindows::Close() {
  lane_.Close();
  for (void* window : registered_) (void)driver_.cuMemHostUnregister(window);
  registered_.clear();
}

void MappedWindows::MakeRoom(uint64_t bytes) {
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      done_.clear();
      lane_.TakeDone(&done_);
      for (const CopyLane::Slot& slot : done_) running_bytes_ -= slot.bytes;
      if (running_bytes_ == 0 || running_bytes_ + bytes <= kRunningBytesMax) {
        running_bytes_ += bytes;
        return;
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

Result<bool> MappedWindows::Land(std::span<const std::byte> source, std::byte* destination) {
  if (refused_ || reinterpret_cast<uintptr_t>(source.data()) % kPageBytes != 0 ||
      source.size() % kPageBytes != 0)
    return false;
  MakeRoom(source.size());
  void* const window = const_cast<std::byte*>(source.data());
  const CUresult registered = driver_.cuMemHostRegister(
      window, source.size(), CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_READ_ONLY);
  if (registered != CUDA_SUCCESS) {
    if (!refused_.exchange(true))
      Log(LogLevel::kInfo, "page cache is copied, not registered: {}",
          CudaStatus(driver_, registered, "").found());
    const std::lock_guard lock(mutex_);
    running_bytes_ -= source.size();
    return false;
  }
  {
    const std::lock_guard lock(mutex_);
    registered_.push_back(window);
  }
  HP_TRY(lane_.Copy(destination, source.data(), {0, source.size()}));
  return true;
}

}  // namespace hotplane
