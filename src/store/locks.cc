#include "store/locks.h"

#include <cerrno>
#include <chrono>
#include <thread>

#include "base/log.h"

namespace hotplane {
namespace {

// Short beside the seconds that a layer takes to build, long beside the cost of one flock.
constexpr std::chrono::milliseconds kPollInterval{20};

}  // namespace

bool LockingRefused(const Status& status) {
  switch (status.error_number()) {
    case ENOLCK:
    case EOPNOTSUPP:
    case ENOSYS:
    case EROFS:
    case EACCES:
    case EPERM:
    case ENOENT: return true;
    default: return false;
  }
}

Result<std::unique_ptr<FileLock>> WaitForLock(Env& env, const std::string& path, LockKind kind,
                                              const std::string& what, const CancelToken* cancel) {
  for (bool told = false;; told = true) {
    HP_ASSIGN(std::unique_ptr<FileLock> lock, env.Lock(path, kind, LockWait::kTry));
    if (lock != nullptr) return lock;
    if (!told) Log(LogLevel::kInfo, "waiting for {}: another process holds {}", what, path);
    if (cancel != nullptr) HP_TRY(cancel->Check());
    std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace hotplane
