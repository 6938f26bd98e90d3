// Locks of a store, waited for in a way that can be cancelled and is told to the log.
#pragma once

#include <memory>
#include <string>

#include "base/cancel.h"
#include "base/status.h"
#include "io/env.h"

namespace hotplane {

// True for the errors of a file system that has no locks, or lets nobody create the lock file.
bool LockingRefused(const Status& status);

// Takes the lock, polling; logs once, after the first refusal, that it waits for `what`. `cancel`
// may be null.
Result<std::unique_ptr<FileLock>> WaitForLock(Env& env, const std::string& path, LockKind kind,
                                              const std::string& what, const CancelToken* cancel);

}  // namespace hotplane
