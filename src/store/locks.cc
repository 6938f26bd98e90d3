#include "store/locks.h"

#include <cerrno>
#include <chrono>
#include <thread>

#include "base/format_text.h"
#include "base/log.h"

namespace hotplane {
namespace {

// Short beside the seconds that a layer takes to build, long beside the cost of one flock.
constexpr std::chrono::milliseconds kPollInterval{20};

// A gap this long between two polls is a process that was stopped, not one that waits.
constexpr std::chrono::seconds kStoppedInterval{2};

// While it lives, no progress is no stall: whoever waits counts the time.
class WaitingMark {
 public:
  explicit WaitingMark(Progress* progress) : progress_(progress) {
    if (progress_ != nullptr) ++progress_->waiting;
  }
  ~WaitingMark() {
    if (progress_ != nullptr) --progress_->waiting;
  }
  WaitingMark(const WaitingMark&) = delete;
  WaitingMark& operator=(const WaitingMark&) = delete;

 private:
  Progress* const progress_;
};

}  // namespace

bool LockingRefused(const Status& status) {
  switch (status.error_number()) {
    case ENOLCK:
    case EOPNOTSUPP:
    case ENOSYS:
    case EROFS:
    case EACCES:
    case EPERM:
    case ENOENT:
    case ELOOP:  // a link to itself, or a socket, in the lock file's place
    case ENXIO: return true;
    default: return false;
  }
}

Status LockStalled(const std::string& path, const std::string& what, double seconds) {
  return Status::System(Text("no progress for {:g} s while waiting for {}", seconds, what))
      .File(path)
      .Expected("the process that holds this lock to go on, or to end")
      .Found("it holds the lock, and nothing changes")
      .Advice(
          "`fuser -v` on this file, or `lslocks`, names the process: let it go on or end it. "
          "What was published is whole: run the command again to go on");
}

Result<std::unique_ptr<FileLock>> WaitForLock(Env& env, const std::string& path, LockKind kind,
                                              const std::string& what, const LockWaiting& waiting) {
  using Clock = std::chrono::steady_clock;
  HP_ASSIGN(std::unique_ptr<FileLock> lock, env.Lock(path, kind, LockWait::kTry));
  if (lock != nullptr) return lock;
  Log(LogLevel::kInfo, "waiting for {}: another process holds {}", what, path);
  const WaitingMark mark(waiting.progress);
  auto start = Clock::now();
  auto last_poll = start;
  while (true) {
    if (waiting.cancel != nullptr) HP_TRY(waiting.cancel->Check());
    std::this_thread::sleep_for(kPollInterval);
    HP_ASSIGN(lock, env.Lock(path, kind, LockWait::kTry));
    if (lock != nullptr) return lock;
    const auto now = Clock::now();
    if (now - last_poll > kStoppedInterval) start = now;
    last_poll = now;
    const double waited = std::chrono::duration<double>(now - start).count();
    if (waiting.stall_seconds > 0 && waited > waiting.stall_seconds)
      return Fail(LockStalled(path, what, waiting.stall_seconds));
  }
}

}  // namespace hotplane
