// Cancellation: long operations poll it between units of work of a few milliseconds.
#pragma once

#include <atomic>

#include "base/status.h"

namespace hotplane {

// Safe to set from a signal handler and to read from any thread.
class CancelToken {
 public:
  // `signal` (SIGINT or SIGTERM) decides the Status. The first call wins.
  void Cancel(int signal) {
    int none = 0;
    signal_.compare_exchange_strong(none, signal);
  }
  bool cancelled() const { return signal_.load(std::memory_order_relaxed) != 0; }
  Result<void> Check() const {
    const int signal = signal_.load(std::memory_order_relaxed);
    if (signal != 0) return Fail(Status::Interrupted(signal));
    return {};
  }

 private:
  std::atomic<int> signal_{0};
  static_assert(std::atomic<int>::is_always_lock_free, "set from signal handlers");
};

}  // namespace hotplane
