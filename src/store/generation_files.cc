#include "store/generation_files.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "base/log.h"
#include "store/locks.h"
#include "store/paths.h"

namespace hotplane {
namespace {

std::string LockPath(const std::string& directory) {
  return JoinPath(JoinPath(directory, kLocksName), kGenerationLockName);
}

// REQUIRES the lock: whoever holds it is the only writer, and has not begun.
Result<void> RemoveUnderLock(Env& env, const std::string& directory) {
  HP_ASSIGN(const std::vector<std::string> names, env.List(directory));
  for (const std::string& name : names) {
    if (!IsGenerationTemporary(name)) continue;
    const std::string path = JoinPath(directory, name);
    HP_ASSIGN(const FileStat stat, env.Stat(path));
    if (stat.type != FileType::kRegular) continue;  // nothing that we make
    // Where it cannot be removed (a read-only store) it does no harm.
    const Result<void> removed = env.Remove(path);
    Log(LogLevel::kInfo, "{} {}, left by a process that was cut short",
        removed ? "removed" : "cannot remove", path);
  }
  return {};
}

}  // namespace

Result<void> PublishGenerationFile(Env& env, const std::string& directory, const std::string& name,
                                   std::span<const std::byte> content, ExistingFile existing,
                                   const LockWaiting& waiting) {
  Result<std::unique_ptr<FileLock>> lock =
      WaitForLock(env, LockPath(directory), LockKind::kExclusive,
                  "another process that is writing " + name, waiting);
  if (lock) {
    HP_TRY(RemoveUnderLock(env, directory));
  } else if (!LockingRefused(lock.error())) {
    return Fail(std::move(lock).error());
  }
  const std::string path = JoinPath(directory, name);
  if (existing == ExistingFile::kKeep) {
    HP_ASSIGN(const FileStat stat, env.Stat(path));
    if (stat.type != FileType::kInvalid) return {};
  }
  return PublishFile(env, path, content);
}

Result<void> RemoveGenerationTemporaries(Env& env, const std::string& directory) {
  HP_ASSIGN(const std::vector<std::string> names, env.List(directory));
  if (std::ranges::none_of(names, &IsGenerationTemporary)) return {};
  const Result<std::unique_ptr<FileLock>> lock =
      env.Lock(LockPath(directory), LockKind::kExclusive, LockWait::kTry);
  if (!lock && !LockingRefused(lock.error())) return Fail(lock.error());
  if (!lock || *lock == nullptr) return {};
  return RemoveUnderLock(env, directory);
}

}  // namespace hotplane
