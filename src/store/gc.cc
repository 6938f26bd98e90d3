#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/format_text.h"
#include "base/log.h"
#include "io/path_kind.h"
#include "store/locks.h"
#include "store/paths.h"
#include "store/store.h"

namespace hotplane {
namespace {

class Collector {
 public:
  Collector(Env& env, std::string directory, bool dry_run)
      : env_(env), directory_(std::move(directory)), dry_run_(dry_run) {}

  // `doomed` is the name of the generation to remove whole, "" for none.
  Result<GcReport> Collect(const std::vector<std::string>& generations, std::string_view doomed) {
    for (const std::string& name : generations) {
      const std::string path = JoinPath(directory_, name);
      HP_ASSIGN(const FileStat manifest, env_.Stat(JoinPath(path, kManifestName)));
      bool whole = name == doomed;
      if (!whole && manifest.type == FileType::kInvalid) {
        HP_ASSIGN(const bool lost, HasLostItsManifest(path));
        if (lost) report_.kept_without_manifest.push_back(path);
        whole = !lost;
      }
      HP_TRY(whole ? RemoveGeneration(path) : RemoveTemporaries(path));
    }
    return std::move(report_);
  }

 private:
  // Nobody holds the lock, and nobody can take it while `lock` lives.
  struct Attempt {
    bool free = false;
    std::unique_ptr<FileLock> lock;
  };

  Result<Attempt> TryLock(const std::string& path) {
    if (dry_run_) {  // locking would create the file; where there is none, nobody holds it
      HP_ASSIGN(const FileStat stat, env_.Stat(path));
      if (stat.type == FileType::kInvalid) return Attempt{.free = true, .lock = nullptr};
    } else {
      HP_TRY(CreateDirectories(env_, ParentPath(path)));
    }
    Result<std::unique_ptr<FileLock>> lock = env_.Lock(path, LockKind::kExclusive, LockWait::kTry);
    if (lock) return Attempt{.free = *lock != nullptr, .lock = std::move(*lock)};
    if (!LockingRefused(lock.error())) return Fail(std::move(lock.error()));
    Log(LogLevel::kWarning, "cannot lock {} ({}): what it guards is kept", path,
        lock.error().found());
    return Attempt{};
  }

  Result<void> RemoveFile(const std::string& path) {
    HP_ASSIGN(const FileStat stat, env_.Stat(path));
    if (!dry_run_) HP_TRY(env_.Remove(path));
    report_.bytes_freed += stat.bytes;
    return {};
  }

  Result<void> RemoveTemporaries(const std::string& generation) {
    HP_ASSIGN(const std::vector<std::string> names, env_.List(generation));
    const std::string locks = JoinPath(generation, kLocksName);
    for (const std::string& name : names) {
      const std::optional<std::string> lock = LockOfTemporary(name);
      if (!lock && !IsGenerationTemporary(name) && name != kDoomedManifestName) continue;
      const std::string path = JoinPath(generation, name);
      HP_ASSIGN(const Attempt attempt,
                TryLock(JoinPath(locks, lock.value_or(kGenerationLockName))));
      if (!attempt.free) {
        report_.kept_in_use.push_back(path);
        continue;
      }
      // Its builder may have published it, or removed it, since the directory was listed.
      HP_ASSIGN(const FileStat stat, env_.Stat(path));
      if (stat.type == FileType::kInvalid) continue;
      if (stat.type != FileType::kRegular) {
        Log(LogLevel::kWarning, "{} is no file of a store and is kept", path);
        continue;
      }
      HP_TRY(RemoveFile(path));
      report_.removed.push_back(path);
    }
    return {};
  }

  // Users first: every builder is one. Then the layers, for builders that hold nothing else.
  Result<bool> LockWhole(const std::string& generation, std::vector<Attempt>& held) {
    const std::string locks = JoinPath(generation, kLocksName);
    HP_ASSIGN(Attempt users, TryLock(JoinPath(locks, kUsersLockName)));
    if (!users.free) return false;
    held.push_back(std::move(users));
    HP_ASSIGN(const FileStat stat, env_.Stat(locks));
    if (stat.type == FileType::kInvalid) return true;
    HP_ASSIGN(const std::vector<std::string> names, env_.List(locks));
    for (const std::string& name : names) {
      if (name == kUsersLockName) continue;
      HP_ASSIGN(Attempt layer, TryLock(JoinPath(locks, name)));
      if (!layer.free) return false;
      held.push_back(std::move(layer));
    }
    return true;
  }

  // Layer files without a manifest that gc did not take away: an accident, which a build heals.
  Result<bool> HasLostItsManifest(const std::string& generation) {
    HP_ASSIGN(const FileStat doomed, env_.Stat(JoinPath(generation, kDoomedManifestName)));
    if (doomed.type != FileType::kInvalid) return false;
    HP_ASSIGN(const std::vector<std::string> names, env_.List(generation));
    return std::any_of(names.begin(), names.end(),
                       [](const std::string& name) { return ParseLayerName(name).has_value(); });
  }

  // The manifest is renamed first and removed last, so that a crash on the way leaves a directory
  // that nobody opens and the next gc removes. Files that are not ours are left, and the directory
  // with them.
  Result<void> RemoveGeneration(const std::string& generation) {
    // What a link leads to is not this generation's.
    HP_ASSIGN(const FileStat locks, env_.StatLink(JoinPath(generation, kLocksName)));
    if (locks.type == FileType::kOther) {
      Log(LogLevel::kWarning, "{} is no folder: the generation is kept",
          JoinPath(generation, kLocksName));
      report_.kept_in_use.push_back(generation);
      return {};
    }
    std::vector<Attempt> held;
    HP_ASSIGN(const bool free, LockWhole(generation, held));
    if (!free) {
      report_.kept_in_use.push_back(generation);
      return {};
    }
    HP_TRY(DoomManifest(generation));
    HP_ASSIGN(std::vector<std::string> names, env_.List(generation));
    std::stable_partition(names.begin(), names.end(),
                          [](const std::string& name) { return name != kDoomedManifestName; });
    HP_ASSIGN(const bool foreign_locks, HasForeignLocks(generation));
    bool foreign = foreign_locks;
    for (const std::string& name : names) {
      if (name == kLocksName) continue;
      const bool named_ours = name == kManifestName || name == kDoomedManifestName ||
                              name == kSourceStampName || ParseLayerName(name).has_value() ||
                              LockOfTemporary(name).has_value() || IsGenerationTemporary(name);
      HP_ASSIGN(const FileStat stat, env_.Stat(JoinPath(generation, name)));
      if (!named_ours || stat.type != FileType::kRegular) {
        Log(LogLevel::kWarning, "{} is no file of a store and is kept", JoinPath(generation, name));
        foreign = true;
        continue;
      }
      // The mark goes when all that it stands for is gone for good.
      if (name == kDoomedManifestName && !dry_run_) HP_TRY(env_.SyncDirectory(generation));
      HP_TRY(RemoveFile(JoinPath(generation, name)));
    }
    if (dry_run_) {
      if (!foreign) report_.removed.push_back(generation);
      return {};
    }
    return RemoveDirectories(generation, foreign, foreign_locks);
  }

  Result<void> DoomManifest(const std::string& generation) {
    if (dry_run_) return {};
    const std::string manifest = JoinPath(generation, kManifestName);
    HP_ASSIGN(const FileStat stat, env_.Stat(manifest));
    if (stat.type != FileType::kRegular) return {};
    HP_TRY(env_.Rename(manifest, JoinPath(generation, kDoomedManifestName)));
    return env_.SyncDirectory(generation);
  }

  // Whether the folder of locks holds what is no lock file; each is told.
  Result<bool> HasForeignLocks(const std::string& generation) {
    const std::string locks = JoinPath(generation, kLocksName);
    HP_ASSIGN(const FileStat folder, env_.Stat(locks));
    if (folder.type != FileType::kDirectory) return false;
    HP_ASSIGN(const std::vector<std::string> names, env_.List(locks));
    bool foreign = false;
    for (const std::string& name : names) {
      HP_ASSIGN(const FileStat stat, env_.Stat(JoinPath(locks, name)));
      if (stat.type == FileType::kRegular) continue;
      Log(LogLevel::kWarning, "{} is no file of a store and is kept", JoinPath(locks, name));
      foreign = true;
    }
    return foreign;
  }

  Result<void> RemoveDirectories(const std::string& generation, bool foreign, bool foreign_locks) {
    const std::string locks = JoinPath(generation, kLocksName);
    HP_ASSIGN(const std::vector<std::string> names, env_.List(locks));
    for (const std::string& name : names) {
      HP_ASSIGN(const FileStat stat, env_.Stat(JoinPath(locks, name)));
      if (stat.type == FileType::kRegular) HP_TRY(RemoveFile(JoinPath(locks, name)));
    }
    if (foreign_locks) return env_.SyncDirectory(locks);
    Result<void> removed = env_.RemoveDirectory(locks);
    if (removed && !foreign) removed = env_.RemoveDirectory(generation);
    if (removed) {
      if (!foreign) report_.removed.push_back(generation);
      return env_.SyncDirectory(directory_);
    }
    // A new user came between: it locks a new file, finds no manifest, and writes one or gives up.
    const int error = removed.error().error_number();
    if (error != ENOTEMPTY && error != EEXIST) return removed;
    report_.kept_in_use.push_back(generation);
    return {};
  }

  Env& env_;
  const std::string directory_;
  const bool dry_run_;
  GcReport report_;
};

Status IsALink(const std::string& path) {
  return Status::Usage("gc removes nothing through a link")
      .File(path)
      .Expected("a folder of this store")
      .Found("a link to one that may be another store's")
      .Advice("remove the link itself, or run gc on the store that the folder is in");
}

}  // namespace

Result<GcReport> Store::CollectGarbage(Env& env, const std::string& directory,
                                       std::string_view generation_prefix, bool dry_run) {
  HP_ASSIGN(const FileStat stat, env.Stat(directory));
  if (stat.type != FileType::kDirectory) {
    return Fail(Status::Usage("there is no store here")
                    .File(directory)
                    .Expected("a directory")
                    .Found(DescribePath(env, directory)));
  }
  HP_TRY(CheckPlace(env, directory));
  HP_TRY(RefuseOtherKinds(env, directory));
  HP_ASSIGN(const std::vector<std::string> names, env.List(directory));
  std::vector<std::string> generations;
  std::vector<std::string> matches;
  for (const std::string& name : names) {
    if (!ParseGenerationName(name)) continue;
    const std::string path = JoinPath(directory, name);
    HP_ASSIGN(const FileStat entry, env.Stat(path));
    if (entry.type != FileType::kDirectory) continue;
    const bool chosen = !generation_prefix.empty() && name.starts_with(generation_prefix);
    HP_ASSIGN(const FileStat link, env.StatLink(path));
    if (link.type != FileType::kDirectory) {
      if (chosen) return Fail(IsALink(path));
      Log(LogLevel::kWarning, "{} is a link: what it leads to is left alone", path);
      continue;
    }
    generations.push_back(name);
    if (chosen) matches.push_back(name);
  }
  if (!generation_prefix.empty() && matches.size() != 1) {
    std::string there;
    for (const std::string& name : matches.empty() ? generations : matches)
      there += (there.empty() ? "" : ", ") + name;
    return Fail(Status::Usage(matches.empty()
                                  ? Text("no generation begins with \"{}\"", generation_prefix)
                                  : Text("{} generations begin with \"{}\"", matches.size(),
                                         generation_prefix))
                    .File(directory)
                    .Expected("exactly one")
                    .Found(there.empty() ? "no generation at all" : there));
  }
  return Collector(env, directory, dry_run)
      .Collect(generations, matches.empty() ? std::string_view() : matches.front());
}

}  // namespace hotplane
