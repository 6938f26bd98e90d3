// What a long operation is doing, for whoever shows it. Written by the operation, read by a display
// thread.
#pragma once

#include <atomic>
#include <cstdint>

namespace hotplane {

struct Progress {
  // A string literal: "quantizing", "publishing layer files". Never null.
  std::atomic<const char*> phase{"starting"};
  std::atomic<uint64_t> bytes_done{0};
  std::atomic<uint64_t> bytes_total{0};  // 0 while unknown

  // Above 0 while the operation waits for another process: no progress is then no stall.
  std::atomic<int> waiting{0};

  void Begin(const char* name, uint64_t total) {
    bytes_done = 0;
    bytes_total = total;
    phase = name;
  }
  void Add(uint64_t bytes) { bytes_done.fetch_add(bytes, std::memory_order_relaxed); }
};

}  // namespace hotplane
