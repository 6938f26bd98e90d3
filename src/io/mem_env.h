// MemEnv: a file system in memory that knows what a power cut would lose.
//
// The model. The content of a file is durable as of its last Sync; the entries of a directory
// (creations, renames, removals) as of its last SyncDirectory. Everything else exists only until
// the next Crash. Real systems keep more than that; what survives here survives everywhere.
//
// Paths are split at '/', "." and ".." are resolved by name, and relative paths start at the root.
// There are no symbolic links, owners or permissions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/env.h"

namespace hotplane {

enum class CrashMode : uint8_t {
  kInvalid = 0,
  kDropUnsynced,  // back to the durable state; a file never synced is empty
  kKeepUnsynced,  // everything had reached the disk
};

class MemEnv final : public Env {
 public:
  MemEnv();
  ~MemEnv() override;

  // The power cut. What is left is durable. Every File, Mapping and FileLock handed out before is
  // dead: its operations fail with EIO, its lock is released.
  void Crash(CrashMode mode);

  // The sum of the sizes of all named files may not exceed it; more is ENOSPC. 1 PiB at
  // first.
  void set_capacity_bytes(uint64_t bytes);
  // Changes fail with EROFS.
  void set_read_only(bool read_only);
  // Opening with kReadDirect fails with EINVAL, as on tmpfs. Where it is allowed (at first), reads
  // that are not aligned to 4 KiB fail with EINVAL.
  void set_direct_refused(bool refused);

  // For tests; none of these counts as an operation of the file system. Durable at once, parents
  // included; what is open sees it.
  void SetFile(const std::string& path, std::span<const std::byte> content);
  // REQUIRES of the next two: the file exists, and `offset` or `bytes` is within it.
  void CorruptByte(const std::string& path, uint64_t offset, std::byte flipped_bits);
  void Truncate(const std::string& path, uint64_t bytes);

  // Every file's path, from the root ("/a/b"), and content.
  using Snapshot = std::map<std::string, std::vector<std::byte>>;
  Snapshot Files() const;
  // Every directory's path but the root's, sorted.
  std::vector<std::string> Directories() const;

  // Successful Opens of a path, and bytes read from it or populated in its mappings, since the
  // start or ResetCounts.
  uint64_t open_count(const std::string& path) const;
  uint64_t read_bytes(const std::string& path) const;
  void ResetCounts();

  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode) override;
  Result<FileStat> Stat(const std::string& path) override;
  Result<std::vector<std::string>> List(const std::string& directory) override;
  Result<void> CreateDirectory(const std::string& path) override;
  Result<void> Rename(const std::string& from, const std::string& to) override;
  Result<void> Remove(const std::string& path) override;
  Result<void> RemoveDirectory(const std::string& path) override;
  Result<void> SyncDirectory(const std::string& path) override;
  Result<uint64_t> FreeBytes(const std::string& path) override;
  Result<std::unique_ptr<FileLock>> Lock(const std::string& path, LockKind kind,
                                         LockWait wait) override;

 private:
  struct State;
  struct Node;
  class MemFile;
  class MemMapping;
  class MemLock;

  const std::shared_ptr<State> state_;  // shared with what was handed out, which may outlive it
};

}  // namespace hotplane
