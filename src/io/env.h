// Env: every effect on files goes through this interface, so that faults, crashes and counts can be
// put in its place. PosixEnv is the real one; MemEnv keeps a tree in memory and knows what a power
// cut would lose; FaultEnv wraps either and injects faults.
//
// Threads: an Env and the objects it hands out may be used from several threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace hotplane {

enum class FileType : uint8_t { kInvalid = 0, kRegular, kDirectory, kOther };

struct FileStat {
  FileType type;
  uint64_t bytes;
  uint64_t device;  // device and inode identify the file, whatever its name
  uint64_t inode;
  int64_t modified_ns;  // since the epoch
};

// One attempt of a read or write. `bytes` may be less than asked for; 0 with error 0 is the end of
// the file. `error` is an errno, EINTR included; the callers loop (ReadFully, WriteFully).
struct IoCount {
  size_t bytes;
  int error;
};

enum class OpenMode : uint8_t {
  kInvalid = 0,
  kRead,        // existing file, read only
  kReadDirect,  // the same, bypassing the page cache; offsets, sizes and addresses in multiples of
                // 4 KiB
  kCreate,      // new file, read and write; fails with EEXIST when there is one
};

struct DroppedRange {
  uint64_t begin;  // in the mapping
  uint64_t end;
};

// A read-only shared mapping of a file range. Unmapped on destruction.
class Mapping {
 public:
  virtual ~Mapping() = default;
  // Reading pages that were not populated may raise SIGBUS on an I/O error.
  virtual std::span<const std::byte> bytes() const = 0;
  // Makes the pages of [offset, offset+bytes) of the mapping resident, and reports I/O errors and
  // truncation (kSystem, kData) instead of raising a signal later.
  virtual Result<void> Populate(uint64_t offset, uint64_t bytes) = 0;
  // Unmaps the pages around the range and drops them from the page cache, as far as nobody else
  // maps them: the next Populate reads them from the disk. Returns what was dropped, which is more
  // where pages are huge: what was verified of it must be verified again. Failures are ignored by
  // design.
  virtual DroppedRange Drop(uint64_t offset, uint64_t bytes) = 0;
};

class File {
 public:
  virtual ~File() = default;  // closes; errors that matter were reported by Sync

  virtual IoCount ReadSome(uint64_t offset, std::span<std::byte> destination) = 0;
  virtual IoCount WriteSome(uint64_t offset, std::span<const std::byte> source) = 0;
  // fsync. An error is final: the file's content is unknown afterwards.
  virtual Result<void> Sync() = 0;
  // Reserves space and sets the size to at least `bytes`; kCapacity when it does not fit.
  virtual Result<void> Allocate(uint64_t bytes) = 0;
  virtual Result<FileStat> Stat() = 0;
  virtual Result<std::unique_ptr<Mapping>> Map(uint64_t offset, uint64_t bytes) = 0;
  // Page-cache advice for a range (bytes 0: to the end); failures are ignored by design. WillNeed
  // does nothing where the kernel reads faster without being told.
  virtual void WillNeed(uint64_t offset, uint64_t bytes) = 0;
  virtual void DropCache(uint64_t offset, uint64_t bytes) = 0;
  // Off: from now on reads bring into the page cache what they ask for and nothing after it, page
  // by page. On (as opened): for reading much of the file.
  virtual void SetReadAhead(bool on) { (void)on; }
  // Bytes of the range that are in the page cache, without touching them (cachestat, else mincore);
  // kSystem where the system cannot tell.
  virtual Result<uint64_t> CachedBytes(uint64_t offset, uint64_t bytes) = 0;
  // For the reader of the same Env; -1 where files are no descriptors.
  virtual int descriptor() const { return -1; }

  const std::string& path() const { return path_; }

 protected:
  explicit File(std::string path) : path_(std::move(path)) {}

 private:
  std::string path_;
};

enum class LockKind : uint8_t { kInvalid = 0, kShared, kExclusive };
enum class LockWait : uint8_t { kInvalid = 0, kTry, kBlock };

// Held until destroyed.
class FileLock {
 public:
  virtual ~FileLock() = default;
};

class AsyncReader;  // io/reader.h

struct ReaderOptions {
  // Requests in flight. 32 of 1 MiB keep a local disk of 8 GB/s busy for 4 ms without an answer.
  size_t depth = 32;
};

class Env {
 public:
  virtual ~Env() = default;
  // kData for what is there and is no regular file.
  virtual Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode) = 0;
  // Follows symbolic links; a circle of them is kOther. A missing path is no error: kInvalid.
  virtual Result<FileStat> Stat(const std::string& path) = 0;
  // The same of a symbolic link itself, which is kOther, where the file system has them.
  virtual Result<FileStat> StatLink(const std::string& path) { return Stat(path); }
  // Names without "." and "..", sorted.
  virtual Result<std::vector<std::string>> List(const std::string& directory) = 0;
  // Fails with EEXIST in error_number() when it exists.
  virtual Result<void> CreateDirectory(const std::string& path) = 0;
  // Atomic; replaces an existing file.
  virtual Result<void> Rename(const std::string& from, const std::string& to) = 0;
  virtual Result<void> Remove(const std::string& path) = 0;           // a file
  virtual Result<void> RemoveDirectory(const std::string& path) = 0;  // an empty directory
  virtual Result<void> SyncDirectory(const std::string& path) = 0;
  // False where this process surely cannot create files in the directory: a read-only file system,
  // or no permission. True says little.
  virtual bool MayCreateIn(const std::string& directory) {
    (void)directory;
    return true;
  }
  // Bytes that an ordinary user can still write on the file system of `path`.
  virtual Result<uint64_t> FreeBytes(const std::string& path) = 0;
  // flock on `path`, which is created when missing and possible, else opened read-only. kTry: a
  // null pointer when another holder is in the way. kSystem with ENOLCK, EOPNOTSUPP or ENOSYS in
  // error_number() where the file system refuses locks.
  virtual Result<std::unique_ptr<FileLock>> Lock(const std::string& path, LockKind kind,
                                                 LockWait wait) = 0;
  // Reads of files of this Env, many at once. The one here uses threads and works over any Env.
  virtual Result<std::unique_ptr<AsyncReader>> NewReader(const ReaderOptions& options);
};

// The process's real file system.
Env& PosixEnv();

// Loops over short counts and EINTR. Reaching the end of the file first is kData with the offset,
// the bytes expected and found.
Result<void> ReadFully(File& file, uint64_t offset, std::span<std::byte> destination);
Result<void> WriteFully(File& file, uint64_t offset, std::span<const std::byte> source);
// Whether the range is in the page cache, but for a page or two that may have been evicted; false
// where the system cannot tell.
bool IsCached(File& file, uint64_t offset, uint64_t bytes);
// The whole of a small file; kData when it is larger than `bytes_max`.
Result<std::vector<std::byte>> ReadWholeFile(Env& env, const std::string& path, uint64_t bytes_max);
// temp in the same directory, write, fsync, rename, fsync the directory. A crash leaves the old
// content, the new, or a temporary named `.tmp-*`.
Result<void> PublishFile(Env& env, const std::string& path, std::span<const std::byte> content);
// The same for content that does not fit in memory: `produce` hands it over piece by piece.
using FileSink = std::function<Result<void>(std::span<const std::byte>)>;
Result<void> PublishFileInPieces(Env& env, const std::string& path,
                                 const std::function<Result<void>(const FileSink&)>& produce);
// Creates the directory and its missing parents, each synced into its parent.
Result<void> CreateDirectories(Env& env, const std::string& path);

// "a/b" + "c" -> "a/b/c".
std::string JoinPath(const std::string& directory, const std::string& name);
// "a/b/c" -> "a/b"; "c" -> ".".
std::string ParentPath(const std::string& path);

}  // namespace hotplane
