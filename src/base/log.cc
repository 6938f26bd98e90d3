#include "base/log.h"

#include <mutex>
#include <utility>

namespace hotplane {
namespace {

struct SinkState {
  std::mutex mutex;
  LogSink sink;
};

SinkState& State() {
  static SinkState* const state = new SinkState;  // outlives static destructors that may still log
  return *state;
}

}  // namespace

void SetLogSink(LogSink sink) {
  std::lock_guard lock(State().mutex);
  State().sink = std::move(sink);
}

void LogLine(LogLevel level, std::string_view line) {
  std::lock_guard lock(State().mutex);
  if (State().sink) State().sink(level, line);
}

}  // namespace hotplane
