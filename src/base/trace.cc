#include "base/trace.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <type_traits>

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

// What one thread recorded in the trace of that number. Owned by the registry and never freed, so
// that a pointer to it outlives thread and trace; a later trace gives it to another thread. The
// mutex is contended only while a trace starts or is written.
struct ThreadSpans {
  std::mutex mutex;
  uint64_t trace = 0;
  std::vector<Span> spans;
  uint64_t dropped = 0;
  std::string thread_name;
};

struct Registry {
  std::mutex mutex;
  std::atomic<uint64_t> start_ns{0};
  std::atomic<uint64_t> trace{0};  // how many were started
  size_t used = 0;                 // of `threads`, the first so many have a thread in this trace
  std::vector<std::unique_ptr<ThreadSpans>> threads;
};

Registry& Threads() {
  static Registry* const registry = new Registry;  // outlives threads that end after main
  return *registry;
}

struct ThreadRole {
  const char* role = nullptr;
  size_t index = 0;
};

// Neither has a destructor: registering one for a thread allocates, and where memory is short the C
// library ends the process.
struct OwnedSpans {
  ThreadSpans* spans = nullptr;
  uint64_t trace = 0;
};
static_assert(std::is_trivially_destructible_v<OwnedSpans>);
static_assert(std::is_trivially_destructible_v<ThreadRole>);
constinit thread_local ThreadRole thread_role;
constinit thread_local OwnedSpans thread_spans;

uint64_t NowNs() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

std::string ThreadName(size_t number) {
  if (thread_role.role != nullptr) return Text("{} {}", thread_role.role, thread_role.index);
  return syscall(SYS_gettid) == getpid() ? "main" : Text("thread {}", number);
}

// The calling thread's spans in the present trace, taken when there are none yet.
OwnedSpans OwnSpans() {
  Registry& registry = Threads();
  if (thread_spans.spans == nullptr || thread_spans.trace != registry.trace) {
    std::lock_guard lock(registry.mutex);
    if (registry.used == registry.threads.size())
      registry.threads.push_back(std::make_unique<ThreadSpans>());
    ThreadSpans& own = *registry.threads[registry.used];
    std::lock_guard spans_lock(own.mutex);
    own.trace = registry.trace;
    own.thread_name = ThreadName(registry.used);
    ++registry.used;
    thread_spans = {&own, own.trace};
  }
  return thread_spans;
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
  Registry& registry = Threads();
  std::lock_guard lock(registry.mutex);
  for (const auto& thread : registry.threads) {
    std::lock_guard spans_lock(thread->mutex);
    thread->trace = 0;
    thread->spans.clear();
    thread->dropped = 0;
  }
  registry.used = 0;
  ++registry.trace;
  registry.start_ns = NowNs();
  TraceSpan::enabled_ = true;
}

void StopTrace() { TraceSpan::enabled_ = false; }

bool TraceEnabled() { return TraceSpan::enabled_.load(std::memory_order_relaxed); }

void NameTraceThread(const char* role, size_t index) {
  thread_role = {role, index};
  const OwnedSpans own = thread_spans;
  if (own.spans == nullptr) return;
  std::lock_guard lock(own.spans->mutex);
  if (own.spans->trace == own.trace) own.spans->thread_name = ThreadName(0);
}

void TraceSpan::Begin() { start_ns_ = NowNs(); }

void TraceSpan::End() {
  if (!TraceEnabled() || start_ns_ < Threads().start_ns) return;
  const uint64_t end_ns = NowNs();
  const auto [own, trace] = OwnSpans();
  std::lock_guard lock(own->mutex);
  // Another trace has started since it was checked above.
  if (own->trace != trace || start_ns_ < Threads().start_ns) return;
  if (own->spans.size() >= kTraceSpansPerThreadMax) {
    ++own->dropped;
    return;
  }
  own->spans.push_back({name_, source_, start_ns_, end_ns, bytes_, layer_});
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
