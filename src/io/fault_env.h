// FaultEnv: an Env that fails on demand, and remembers what was asked of it.
//
// Every virtual call of Env, File and Mapping that can fail is one operation; operations are
// numbered from 1 in the order in which they arrive. The advice calls (WillNeed, DropCache) are
// logged but have no number, because they cannot fail.
//
// A test of crashes runs the work once to learn operation_count(), then once for every n with
// Fault{.action = FaultAction::kCrash, .first = n}, calls Restart() (and MemEnv::Crash on what is
// underneath), and looks at what is left.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/env.h"

namespace hotplane {

enum class OperationKind : uint8_t {
  kAny = 0,  // in a Fault: whatever the kind
  kOpen,
  kCreate,  // Open with kCreate
  kRead,
  kWrite,
  kSync,
  kAllocate,
  kFileStat,  // File::Stat
  kMap,
  kPopulate,
  kCachedBytes,
  kWillNeed,
  kDropCache,
  kStat,  // Env::Stat, Env::StatLink
  kList,
  kCreateDirectory,
  kRename,
  kRemove,
  kRemoveDirectory,
  kSyncDirectory,
  kFreeBytes,
  kLock,
};

// "open", "create directory".
const char* OperationName(OperationKind kind);

struct Operation {
  uint64_t number;  // 0 for advice
  OperationKind kind;
  std::string path;
  std::string to;       // kRename
  uint64_t offset;      // where the kind has a range; in the file, also for kPopulate
  uint64_t bytes;       // asked for
  uint64_t done_bytes;  // kRead, kWrite: transferred
  int error;            // errno returned, EBADMSG for a failure without one; 0: it succeeded
  bool bypassed_cache;  // kOpen, kRead: OpenMode::kReadDirect
};

enum class FaultAction : uint8_t {
  kInvalid = 0,
  kError,      // fails with Fault::error and does nothing
  kShort,      // kRead, kWrite: transfers Fault::bytes only; other kinds are not matched
  kEndOfFile,  // kRead: 0 bytes without an error, as if the file had been cut
  kCrash,      // this operation and all after it fail with EIO until Restart
};

struct Fault {
  FaultAction action = FaultAction::kInvalid;
  // Which of the operations that match `kind` and `path_contains`, counted from 1 from the moment
  // the fault was added; with kAny and an empty path in a fresh FaultEnv that is the operation's
  // number.
  uint64_t first = 1;
  uint64_t count = 1;  // how many from there on; kForever
  OperationKind kind = OperationKind::kAny;
  std::string path_contains = {};  // for a rename either path
  // kError; EINTR hits kRead and kWrite only (nothing else may return it), and callers retry it for
  // as long as it comes, so give it a count.
  int error = EIO;
  // kShort: at most so many bytes, at least 1; 0 stands for half of what was asked for. Direct
  // reads are cut at multiples of 4 KiB.
  // kCrash: if the operation is a write, its first `bytes` bytes still arrive (a torn write).
  uint64_t bytes = 0;

  static constexpr uint64_t kForever = UINT64_MAX;
};

// Bits that flip on the way from the file to the reader; the file stays as it is.
struct BitFlip {
  std::string path_contains = {};
  uint64_t offset = 0;
  std::byte flipped_bits{1};
  uint64_t count = Fault::kForever;  // reads and maps of that byte which it hits
  bool spare_direct = false;         // kReadDirect sees the true byte: a bad page in the page cache
};

class FaultEnv final : public Env {
 public:
  // `base` must outlive this and everything it hands out.
  explicit FaultEnv(Env& base);
  ~FaultEnv() override;

  // Faults are tried in the order in which they were added; the first one due acts.
  void Add(Fault fault);
  void Add(BitFlip flip);
  // Forgets faults and bit flips, not the log and not a crash.
  void ClearFaults();

  bool crashed() const;
  // The process starts again: operations work, faults are forgotten, and what was handed out before
  // stays dead (EIO). The numbering and the log go on.
  void Restart();

  uint64_t operation_count() const;
  std::vector<Operation> Log() const;
  void ClearLog();  // the numbering goes on

  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode) override;
  Result<FileStat> Stat(const std::string& path) override;
  Result<FileStat> StatLink(const std::string& path) override;
  Result<std::vector<std::string>> List(const std::string& directory) override;
  Result<void> CreateDirectory(const std::string& path) override;
  Result<void> Rename(const std::string& from, const std::string& to) override;
  Result<void> Remove(const std::string& path) override;
  Result<void> RemoveDirectory(const std::string& path) override;
  Result<void> SyncDirectory(const std::string& path) override;
  Result<uint64_t> FreeBytes(const std::string& path) override;
  bool MayCreateIn(const std::string& directory) override { return base_.MayCreateIn(directory); }
  Result<std::unique_ptr<FileLock>> Lock(const std::string& path, LockKind kind,
                                         LockWait wait) override;
  // The base's reader. A read is an operation (kRead) at its Start.
  Result<std::unique_ptr<AsyncReader>> NewReader(const ReaderOptions& options) override;

 private:
  struct State;
  class FaultFile;
  class FaultMapping;
  class FaultReader;

  Env& base_;
  const std::shared_ptr<State> state_;
};

}  // namespace hotplane
