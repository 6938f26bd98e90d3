// Locks of a store, waited for in a way that can be cancelled and is told to the log.
#pragma once

#include <memory>
#include <string>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "io/env.h"

namespace hotplane {

// True for the errors of a file system that has no locks, or lets nobody create the lock file.
bool LockingRefused(const Status& status);

// What ends the wait for a lock that another process holds.
struct LockWaiting {
  const CancelToken* cancel = nullptr;
  double stall_seconds = 0;      // then it fails; 0: waits for ever
  Progress* progress = nullptr;  // `waiting` is up meanwhile
};

// Takes the lock, polling; logs once, after the first refusal, that it waits for `what`. kSystem as
// LockStalled when nobody lets go of it.
Result<std::unique_ptr<FileLock>> WaitForLock(Env& env, const std::string& path, LockKind kind,
                                              const std::string& what, const LockWaiting& waiting);

// kSystem naming the lock file: its holder did not let go of it in so many seconds.
Status LockStalled(const std::string& path, const std::string& what, double seconds);

}  // namespace hotplane
