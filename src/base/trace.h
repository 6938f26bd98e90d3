// Trace: what each thread of this process did and when, as spans, for a timeline viewer. Always
// compiled in; while it is off a span costs one relaxed atomic load.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hotplane {

inline constexpr uint32_t kNoLayer = UINT32_MAX;

// Spans that one thread keeps: 44 layers of 1.7 GiB in units of 4 MiB are 19 thousand units of two
// spans, should a single thread do them all. Further ones are counted, not kept.
inline constexpr size_t kTraceSpansPerThreadMax = 256 * 1024;

// Process-wide. StartTrace forgets what was recorded before; spans that are open when it is called,
// or when StopTrace is, are not recorded. All thread-safe.
void StartTrace();
void StopTrace();
bool TraceEnabled();

// Names the calling thread in traces: role "worker" and index 3 give "worker 3". `role` is a string
// literal. A thread without a name is "main" or "thread N".
void NameTraceThread(const char* role, size_t index);

// What every trace begins with.
inline constexpr std::string_view kTraceBegin = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";

// What was recorded, in the Trace Event Format that chrome://tracing and Perfetto read: one object
// with `traceEvents` (a complete event "X" per span, times in microseconds since StartTrace, `args`
// layer, bytes and source where they are known; a thread name "M" per thread), `displayTimeUnit`
// and `otherData` with the given texts and, when spans did not fit, `spans_dropped`.
std::string TraceJson(const std::vector<std::pair<std::string, std::string>>& metadata);

// Records the time from its construction to its destruction, on the thread that destroys it.
// `name` and `source` are string literals without quotes, backslashes or control characters.
class TraceSpan {
 public:
  explicit TraceSpan(const char* name, uint32_t layer = kNoLayer, uint64_t bytes = 0,
                     const char* source = nullptr)
      : name_(name), source_(source), bytes_(bytes), layer_(layer) {
    if (enabled_.load(std::memory_order_relaxed)) Begin();
  }
  ~TraceSpan() {
    if (start_ns_ != 0) End();
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

  // What is known only later.
  void set_bytes(uint64_t bytes) { bytes_ = bytes; }
  void set_source(const char* source) { source_ = source; }

 private:
  friend void StartTrace();
  friend void StopTrace();
  friend bool TraceEnabled();
  void Begin();
  void End();

  static std::atomic<bool> enabled_;

  const char* name_;
  const char* source_;
  uint64_t bytes_;
  uint64_t start_ns_ = 0;  // of the steady clock; 0: not recorded
  uint32_t layer_;
};

}  // namespace hotplane
