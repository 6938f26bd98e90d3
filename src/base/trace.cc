#include "base/trace.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>

#include "base/format_text.h"

namespace hotplane {
namespace {

struct Span {
  const char* name;
  const char* source;
  uint64_t start_ns;
  uint64_t end_ns;
  uint64_t bytes;
  uint32_t layer;
};

// What one thread recorded. Owned by the registry, so that it outlives the thread; the mutex is
// contended only while a trace is written.
struct ThreadSpans {
  std::mutex mutex;
  std::vector<Span> spans;
  uint64_t dropped = 0;
  std::string thread_name;
};

struct Registry {
  std::mutex mutex;
  std::atomic<uint64_t> start_ns{0};
  std::vector<std::shared_ptr<ThreadSpans>> threads;
};

Registry& Threads() {
  static Registry* const registry = new Registry;  // outlives threads that end after main
  return *registry;
}

struct ThreadRole {
  const char* role = nullptr;
  size_t index = 0;
};
thread_local ThreadRole thread_role;
thread_local std::shared_ptr<ThreadSpans> thread_spans;

uint64_t NowNs() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

std::string ThreadName(size_t number) {
  if (thread_role.role != nullptr) return Text("{} {}", thread_role.role, thread_role.index);
  return syscall(SYS_gettid) == getpid() ? "main" : Text("thread {}", number);
}

ThreadSpans& OwnSpans() {
  if (thread_spans == nullptr) {
    auto own = std::make_shared<ThreadSpans>();
    std::lock_guard lock(Threads().mutex);
    own->thread_name = ThreadName(Threads().threads.size());
    Threads().threads.push_back(own);
    thread_spans = std::move(own);
  }
  return *thread_spans;
}

void AppendSpan(std::string& out, const Span& span, size_t tid, uint64_t start_ns) {
  out += Text(",\n{{\"ph\":\"X\",\"pid\":1,\"tid\":{},\"name\":\"{}\",\"ts\":{:.3f},\"dur\":{:.3f}",
              tid, span.name, static_cast<double>(span.start_ns - start_ns) / 1e3,
              static_cast<double>(span.end_ns - span.start_ns) / 1e3);
  std::string args;
  if (span.layer != kNoLayer) args += Text("\"layer\":{}", span.layer);
  if (span.bytes != 0) args += Text("{}\"bytes\":{}", args.empty() ? "" : ",", span.bytes);
  if (span.source != nullptr)
    args += Text("{}\"source\":\"{}\"", args.empty() ? "" : ",", span.source);
  if (!args.empty()) out += Text(",\"args\":{{{}}}", args);
  out += "}";
}

}  // namespace

std::atomic<bool> TraceSpan::enabled_{false};

void StartTrace() {
  std::lock_guard lock(Threads().mutex);
  auto& threads = Threads().threads;
  for (const auto& thread : threads) {
    std::lock_guard spans_lock(thread->mutex);
    thread->spans.clear();
    thread->dropped = 0;
  }
  // Those that only the registry still holds belong to threads that have ended.
  std::erase_if(threads, [](const auto& thread) { return thread.use_count() == 1; });
  Threads().start_ns = NowNs();
  TraceSpan::enabled_ = true;
}

void StopTrace() { TraceSpan::enabled_ = false; }

bool TraceEnabled() { return TraceSpan::enabled_.load(std::memory_order_relaxed); }

void NameTraceThread(const char* role, size_t index) {
  thread_role = {role, index};
  if (thread_spans == nullptr) return;
  std::lock_guard lock(thread_spans->mutex);
  thread_spans->thread_name = ThreadName(0);
}

void TraceSpan::Begin() { start_ns_ = NowNs(); }

void TraceSpan::End() {
  if (!TraceEnabled() || start_ns_ < Threads().start_ns) return;
  const uint64_t end_ns = NowNs();
  ThreadSpans& own = OwnSpans();
  std::lock_guard lock(own.mutex);
  if (own.spans.size() >= kTraceSpansPerThreadMax) {
    ++own.dropped;
    return;
  }
  own.spans.push_back({name_, source_, start_ns_, end_ns, bytes_, layer_});
}

std::string TraceJson(const std::vector<std::pair<std::string, std::string>>& metadata) {
  std::string out(kTraceBegin);
  out +=
      "{\"ph\":\"M\",\"pid\":1,\"tid\":0,\"name\":\"process_name\",\"args\":{\"name\":\"hotplane\"}"
      "}";
  uint64_t dropped = 0;
  std::lock_guard lock(Threads().mutex);
  const uint64_t start_ns = Threads().start_ns;
  for (size_t t = 0; t < Threads().threads.size(); ++t) {
    ThreadSpans& thread = *Threads().threads[t];
    std::lock_guard spans_lock(thread.mutex);
    dropped += thread.dropped;
    if (thread.spans.empty()) continue;
    out += Text(
        ",\n{{\"ph\":\"M\",\"pid\":1,\"tid\":{},\"name\":\"thread_name\",\"args\":{{\"name\":\"{}\""
        "}}}}",
        t + 1, thread.thread_name);
    for (const Span& span : thread.spans) AppendSpan(out, span, t + 1, start_ns);
  }
  nlohmann::ordered_json other = nlohmann::ordered_json::object();
  for (const auto& [key, value] : metadata) other[key] = value;
  if (dropped != 0) other["spans_dropped"] = dropped;
  out += "\n],\"otherData\":";
  out += other.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  out += "}\n";
  return out;
}

}  // namespace hotplane
