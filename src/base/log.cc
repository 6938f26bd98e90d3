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

void Hand(LogLevel level, const std::string& line) {
  std::lock_guard lock(State().mutex);
  if (State().sink) State().sink(level, line);
}

}  // namespace

void SetLogSink(LogSink sink) {
  std::lock_guard lock(State().mutex);
  State().sink = std::move(sink);
}

void LogLine(LogLevel level, std::string_view line) { Hand(level, Printable(line)); }

void LogStatus(LogLevel level, std::string_view doing, const Status& status) {
  Hand(level, doing.empty() ? status.ToString() : Status(status).Because(doing).ToString());
}

}  // namespace hotplane
