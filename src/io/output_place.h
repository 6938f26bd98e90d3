// Places that will be written to, looked at before the work whose result goes there.
#pragma once

#include <string>

#include "base/status.h"
#include "io/env.h"

namespace hotplane {

// `status` says that something could not be written at `path`, a file or a folder: under that name,
// whatever temporary or parent failed, and, by the system's reason, with what would have been right
// and what to do. What a status says already stays, but for PermissionAdvice, which knows less.
Status CannotWrite(Status status, Env& env, const std::string& path);

// What to do where the system does not permit what was asked for, EACCES, EPERM or EROFS; of any
// other error empty.
std::string PermissionAdvice(int error);

// That a file can be made, or replaced, at `path`: kUsage when a folder or a special file is there;
// kSystem or kCapacity as CannotWrite when a file cannot be made beside it, which is tried.
Result<void> CheckOutputFile(Env& env, const std::string& path);

}  // namespace hotplane
