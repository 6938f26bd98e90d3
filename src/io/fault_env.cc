#include "io/fault_env.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "base/units.h"
#include "io/reader.h"

namespace hotplane {
namespace {

// What the plan has decided for one operation.
struct Verdict {
  int error = 0;
  bool end_of_file = false;
  uint64_t bytes_max = UINT64_MAX;  // of a read or write; with an error, of the torn write
  uint64_t log_index = 0;           // counting what ClearLog has dropped
};

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

bool CanMatch(const Fault& fault, const Operation& operation) {
  const bool is_read = operation.kind == OperationKind::kRead;
  const bool is_transfer = is_read || operation.kind == OperationKind::kWrite;
  if (fault.kind != OperationKind::kAny && fault.kind != operation.kind) return false;
  if (fault.action == FaultAction::kShort && !is_transfer) return false;
  if (fault.action == FaultAction::kEndOfFile && !is_read) return false;
  if (fault.action == FaultAction::kError && fault.error == EINTR && !is_transfer) return false;
  return Contains(operation.path, fault.path_contains) ||
         Contains(operation.to, fault.path_contains);
}

uint64_t ShortBytes(const Fault& fault, const Operation& operation) {
  const uint64_t wanted = fault.bytes == 0 ? operation.bytes / 2 : fault.bytes;
  const uint64_t step = operation.bypassed_cache ? kPageBytes : 1;
  return std::max(wanted / step * step, step);
}

}  // namespace

const char* OperationName(OperationKind kind) {
  switch (kind) {
    case OperationKind::kAny: return "any";
    case OperationKind::kOpen: return "open";
    case OperationKind::kCreate: return "create";
    case OperationKind::kRead: return "read";
    case OperationKind::kWrite: return "write";
    case OperationKind::kSync: return "sync";
    case OperationKind::kAllocate: return "allocate";
    case OperationKind::kFileStat: return "stat open file";
    case OperationKind::kMap: return "map";
    case OperationKind::kPopulate: return "populate";
    case OperationKind::kCachedBytes: return "count cached bytes";
    case OperationKind::kWillNeed: return "will need";
    case OperationKind::kDropCache: return "drop cache";
    case OperationKind::kStat: return "stat";
    case OperationKind::kList: return "list";
    case OperationKind::kCreateDirectory: return "create directory";
    case OperationKind::kRename: return "rename";
    case OperationKind::kRemove: return "remove";
    case OperationKind::kRemoveDirectory: return "remove directory";
    case OperationKind::kSyncDirectory: return "sync directory";
    case OperationKind::kFreeBytes: return "free bytes";
    case OperationKind::kLock: return "lock";
  }
  return "unknown";
}

struct FaultEnv::State {
  struct ArmedFault {
    Fault fault;
    uint64_t match_count = 0;
  };

  mutable std::mutex mutex;
  uint64_t operation_count = 0;
  uint64_t restart_count = 0;
  bool crashed = false;
  std::vector<ArmedFault> faults;
  std::vector<BitFlip> flips;
  std::vector<Operation> log;
  uint64_t dropped_log_count = 0;

  void LogAdvice(Operation operation) {
    const std::lock_guard lock(mutex);
    log.push_back(std::move(operation));
  }

  // Numbers and logs the operation and decides its fate. `restart_count_then` is that of the moment
  // at which the object was handed out.
  Verdict Begin(Operation operation, uint64_t restart_count_then) {
    const std::lock_guard lock(mutex);
    operation.number = ++operation_count;
    Verdict verdict;
    if (crashed || restart_count_then != restart_count) {
      verdict.error = EIO;
      verdict.bytes_max = 0;
    } else {
      ApplyFaults(operation, verdict);
    }
    operation.error = verdict.error;
    verdict.log_index = dropped_log_count + log.size();
    log.push_back(std::move(operation));
    return verdict;
  }

  void ApplyFaults(const Operation& operation, Verdict& verdict) {
    const ArmedFault* acting = nullptr;
    for (ArmedFault& armed : faults) {
      if (!CanMatch(armed.fault, operation)) continue;
      const uint64_t match = ++armed.match_count;
      const bool due = match >= armed.fault.first && match - armed.fault.first < armed.fault.count;
      if (due && acting == nullptr) acting = &armed;
    }
    if (acting == nullptr) return;
    const Fault& fault = acting->fault;
    switch (fault.action) {
      case FaultAction::kError:
        verdict.error = fault.error;
        verdict.bytes_max = 0;
        break;
      case FaultAction::kShort: verdict.bytes_max = ShortBytes(fault, operation); break;
      case FaultAction::kEndOfFile: verdict.end_of_file = true; break;
      case FaultAction::kCrash:
        crashed = true;
        verdict.error = EIO;
        verdict.bytes_max = operation.kind == OperationKind::kWrite ? fault.bytes : 0;
        break;
      case FaultAction::kInvalid: break;
    }
  }

  void End(const Verdict& verdict, int error, uint64_t done_bytes) {
    const std::lock_guard lock(mutex);
    if (verdict.log_index < dropped_log_count) return;
    Operation& operation = log[verdict.log_index - dropped_log_count];
    operation.error = error;
    operation.done_bytes = done_bytes;
  }

  template <typename T>
  Result<T> End(const Verdict& verdict, Result<T> result) {
    if (result) return result;
    const int error = result.error().error_number();
    End(verdict, error != 0 ? error : EBADMSG, 0);
    return result;
  }

  static bool Hits(const BitFlip& flip, const std::string& path, uint64_t offset, uint64_t bytes,
                   bool direct) {
    const bool within = flip.offset >= offset && flip.offset - offset < bytes;
    return within && flip.count > 0 && !(direct && flip.spare_direct) &&
           Contains(path, flip.path_contains);
  }
  bool AnyFlipHits(const std::string& path, uint64_t offset, uint64_t bytes) const {
    const std::lock_guard lock(mutex);
    return std::any_of(flips.begin(), flips.end(),
                       [&](const BitFlip& flip) { return Hits(flip, path, offset, bytes, false); });
  }
  void Flip(const std::string& path, uint64_t offset, bool direct, std::span<std::byte> data) {
    const std::lock_guard lock(mutex);
    for (BitFlip& flip : flips) {
      if (!Hits(flip, path, offset, data.size(), direct)) continue;
      data[flip.offset - offset] ^= flip.flipped_bits;
      if (flip.count != Fault::kForever) --flip.count;
    }
  }

  static Status Failed(const Verdict& verdict, const Operation& operation) {
    return Status::FromErrno(verdict.error, std::string("cannot ") + OperationName(operation.kind))
        .File(operation.path);
  }

  uint64_t CurrentRestartCount() const {
    const std::lock_guard lock(mutex);
    return restart_count;
  }
};

namespace {

Operation MakeOperation(OperationKind kind, const std::string& path, uint64_t offset = 0,
                        uint64_t bytes = 0) {
  return {0, kind, path, "", offset, bytes, 0, 0, false};
}

}  // namespace

class FaultEnv::FaultMapping final : public Mapping {
 public:
  FaultMapping(std::shared_ptr<State> state, std::unique_ptr<Mapping> base, std::string path,
               uint64_t offset, uint64_t restart_count)
      : state_(std::move(state)),
        base_(std::move(base)),
        path_(std::move(path)),
        offset_(offset),
        restart_count_(restart_count) {
    const std::span<const std::byte> true_bytes = base_->bytes();
    if (!state_->AnyFlipHits(path_, offset_, true_bytes.size())) return;
    flipped_.assign(true_bytes.begin(), true_bytes.end());
    state_->Flip(path_, offset_, false, flipped_);
  }

  std::span<const std::byte> bytes() const override {
    return flipped_.empty() ? base_->bytes() : flipped_;
  }

  Result<void> Populate(uint64_t offset, uint64_t bytes) override {
    const Operation operation =
        MakeOperation(OperationKind::kPopulate, path_, offset_ + offset, bytes);
    const Verdict verdict = state_->Begin(operation, restart_count_);
    if (verdict.error != 0) return Fail(State::Failed(verdict, operation).At(operation.offset));
    return state_->End(verdict, base_->Populate(offset, bytes));
  }

  DroppedRange Drop(uint64_t offset, uint64_t bytes) override {
    state_->LogAdvice(MakeOperation(OperationKind::kDropCache, path_, offset_ + offset, bytes));
    return base_->Drop(offset, bytes);
  }

 private:
  const std::shared_ptr<State> state_;
  const std::unique_ptr<Mapping> base_;
  const std::string path_;
  const uint64_t offset_;
  const uint64_t restart_count_;
  std::vector<std::byte> flipped_;  // a copy, where bits flip
};

class FaultEnv::FaultFile final : public File {
 public:
  FaultFile(std::shared_ptr<State> state, std::unique_ptr<File> base, OpenMode mode,
            uint64_t restart_count)
      : File(base->path()),
        state_(std::move(state)),
        base_(std::move(base)),
        direct_(mode == OpenMode::kReadDirect),
        restart_count_(restart_count) {}

  IoCount ReadSome(uint64_t offset, std::span<std::byte> destination) override {
    const Verdict verdict = Begin(OperationKind::kRead, offset, destination.size());
    if (verdict.error != 0) return {0, verdict.error};
    if (verdict.end_of_file) return {0, 0};
    const IoCount count = base_->ReadSome(
        offset, destination.first(std::min<uint64_t>(destination.size(), verdict.bytes_max)));
    state_->Flip(path(), offset, direct_, destination.first(count.bytes));
    state_->End(verdict, count.error, count.bytes);
    return count;
  }

  IoCount WriteSome(uint64_t offset, std::span<const std::byte> source) override {
    const Verdict verdict = Begin(OperationKind::kWrite, offset, source.size());
    const auto arriving = source.first(std::min<uint64_t>(source.size(), verdict.bytes_max));
    if (verdict.error != 0) {
      if (arriving.empty()) return {0, verdict.error};
      const Result<void> torn = WriteFully(*base_, offset, arriving);
      state_->End(verdict, verdict.error, torn ? arriving.size() : 0);
      return {0, verdict.error};
    }
    const IoCount count = base_->WriteSome(offset, arriving);
    state_->End(verdict, count.error, count.bytes);
    return count;
  }

  Result<void> Sync() override {
    return Run<void>(OperationKind::kSync, 0, 0, [this] { return base_->Sync(); });
  }
  Result<void> Allocate(uint64_t bytes) override {
    return Run<void>(OperationKind::kAllocate, 0, bytes, [&] { return base_->Allocate(bytes); });
  }
  Result<FileStat> Stat() override {
    return Run<FileStat>(OperationKind::kFileStat, 0, 0, [this] { return base_->Stat(); });
  }
  Result<std::unique_ptr<Mapping>> Map(uint64_t offset, uint64_t bytes) override {
    using Handle = std::unique_ptr<Mapping>;
    HP_ASSIGN(Handle mapping, Run<Handle>(OperationKind::kMap, offset, bytes,
                                          [&] { return base_->Map(offset, bytes); }));
    return std::make_unique<FaultMapping>(state_, std::move(mapping), path(), offset,
                                          restart_count_);
  }
  Result<uint64_t> CachedBytes(uint64_t offset, uint64_t bytes) override {
    return Run<uint64_t>(OperationKind::kCachedBytes, offset, bytes,
                         [&] { return base_->CachedBytes(offset, bytes); });
  }

  void WillNeed(uint64_t offset, uint64_t bytes) override {
    state_->LogAdvice(MakeOperation(OperationKind::kWillNeed, path(), offset, bytes));
    base_->WillNeed(offset, bytes);
  }
  void SetReadAhead(bool on) override { base_->SetReadAhead(on); }
  void DropCache(uint64_t offset, uint64_t bytes) override {
    state_->LogAdvice(MakeOperation(OperationKind::kDropCache, path(), offset, bytes));
    base_->DropCache(offset, bytes);
  }

 private:
  Operation Describe(OperationKind kind, uint64_t offset, uint64_t bytes) const {
    Operation operation = MakeOperation(kind, path(), offset, bytes);
    operation.bypassed_cache = direct_ && kind == OperationKind::kRead;
    return operation;
  }
  Verdict Begin(OperationKind kind, uint64_t offset, uint64_t bytes) {
    return state_->Begin(Describe(kind, offset, bytes), restart_count_);
  }
  template <typename T, typename Call>
  Result<T> Run(OperationKind kind, uint64_t offset, uint64_t bytes, Call call) {
    const Operation operation = Describe(kind, offset, bytes);
    const Verdict verdict = state_->Begin(operation, restart_count_);
    if (verdict.error != 0) return Fail(State::Failed(verdict, operation).At(offset));
    return state_->End(verdict, call());
  }

  friend class FaultReader;
  const std::shared_ptr<State> state_;
  const std::unique_ptr<File> base_;
  const bool direct_;
  const uint64_t restart_count_;
};

class FaultEnv::FaultReader final : public AsyncReader {
 public:
  explicit FaultReader(std::unique_ptr<AsyncReader> base) : base_(std::move(base)) {}

  const char* name() const override { return base_->name(); }
  std::string reason() const override { return base_->reason(); }
  size_t depth() const override { return base_->depth(); }

  void Start(const ReadRequest& request) override {
    auto& file = static_cast<FaultFile&>(*request.file);
    const Verdict verdict =
        file.Begin(OperationKind::kRead, request.offset, request.destination.size());
    if (verdict.error != 0 || verdict.end_of_file) {
      ended_.push_back({request.tag, {0, verdict.error}});
      return;
    }
    const uint64_t ticket = next_ticket_++;
    running_.emplace(ticket, Running{&file, request, verdict});
    base_->Start({file.base_.get(), request.offset,
                  request.destination.first(
                      std::min<uint64_t>(request.destination.size(), verdict.bytes_max)),
                  ticket});
  }

  Result<void> Collect(std::chrono::milliseconds wait, std::vector<ReadEnd>* ended) override {
    std::vector<ReadEnd> base_ended;
    const bool some_ended = !ended_.empty();
    HP_TRY(base_->Collect(some_ended ? std::chrono::milliseconds(0) : wait, &base_ended));
    ended->insert(ended->end(), ended_.begin(), ended_.end());
    ended_.clear();
    for (const ReadEnd& end : base_ended) {
      const auto found = running_.find(end.tag);
      HP_CHECK(found != running_.end());
      const auto& [file, request, verdict] = found->second;
      file->state_->Flip(file->path(), request.offset, file->direct_,
                         request.destination.first(end.count.bytes));
      file->state_->End(verdict, end.count.error, end.count.bytes);
      ended->push_back({request.tag, end.count});
      running_.erase(found);
    }
    return {};
  }

 private:
  struct Running {
    FaultFile* file;
    ReadRequest request;
    Verdict verdict;
  };
  std::map<uint64_t, Running> running_;  // by ticket
  uint64_t next_ticket_ = 0;
  std::vector<ReadEnd> ended_;  // those that failed at their Start
  const std::unique_ptr<AsyncReader> base_;
};

namespace {

// Env's own operations: begun at once, so they belong to the current start of the process.
template <typename T, typename State, typename Call>
Result<T> Run(State& state, const Operation& operation, Call call) {
  const Verdict verdict = state.Begin(operation, state.CurrentRestartCount());
  if (verdict.error != 0) return Fail(State::Failed(verdict, operation));
  return state.End(verdict, Result<T>(call()));
}

}  // namespace

FaultEnv::FaultEnv(Env& base) : base_(base), state_(std::make_shared<State>()) {}
FaultEnv::~FaultEnv() = default;

void FaultEnv::Add(Fault fault) {
  HP_CHECK(fault.action != FaultAction::kInvalid && fault.first > 0);
  // Retrying callers would never come back.
  HP_CHECK(fault.error != EINTR || fault.count != Fault::kForever);
  const std::lock_guard lock(state_->mutex);
  state_->faults.push_back({std::move(fault)});
}

void FaultEnv::Add(BitFlip flip) {
  const std::lock_guard lock(state_->mutex);
  state_->flips.push_back(std::move(flip));
}

void FaultEnv::ClearFaults() {
  const std::lock_guard lock(state_->mutex);
  state_->faults.clear();
  state_->flips.clear();
}

bool FaultEnv::crashed() const {
  const std::lock_guard lock(state_->mutex);
  return state_->crashed;
}

void FaultEnv::Restart() {
  const std::lock_guard lock(state_->mutex);
  state_->crashed = false;
  state_->faults.clear();
  state_->flips.clear();
  ++state_->restart_count;
}

uint64_t FaultEnv::operation_count() const {
  const std::lock_guard lock(state_->mutex);
  return state_->operation_count;
}

std::vector<Operation> FaultEnv::Log() const {
  const std::lock_guard lock(state_->mutex);
  return state_->log;
}

void FaultEnv::ClearLog() {
  const std::lock_guard lock(state_->mutex);
  state_->dropped_log_count += state_->log.size();
  state_->log.clear();
}

Result<std::unique_ptr<File>> FaultEnv::Open(const std::string& path, OpenMode mode) {
  const bool create = mode == OpenMode::kCreate;
  Operation operation = MakeOperation(create ? OperationKind::kCreate : OperationKind::kOpen, path);
  operation.bypassed_cache = mode == OpenMode::kReadDirect;
  const uint64_t restart_count = state_->CurrentRestartCount();
  using Handle = std::unique_ptr<File>;
  HP_ASSIGN(Handle file, Run<Handle>(*state_, operation, [&] { return base_.Open(path, mode); }));
  return std::make_unique<FaultFile>(state_, std::move(file), mode, restart_count);
}

Result<FileStat> FaultEnv::Stat(const std::string& path) {
  return Run<FileStat>(*state_, MakeOperation(OperationKind::kStat, path),
                       [&] { return base_.Stat(path); });
}

Result<FileStat> FaultEnv::StatLink(const std::string& path) {
  return Run<FileStat>(*state_, MakeOperation(OperationKind::kStat, path),
                       [&] { return base_.StatLink(path); });
}

Result<std::vector<std::string>> FaultEnv::List(const std::string& directory) {
  return Run<std::vector<std::string>>(*state_, MakeOperation(OperationKind::kList, directory),
                                       [&] { return base_.List(directory); });
}

Result<void> FaultEnv::CreateDirectory(const std::string& path) {
  return Run<void>(*state_, MakeOperation(OperationKind::kCreateDirectory, path),
                   [&] { return base_.CreateDirectory(path); });
}

Result<void> FaultEnv::Rename(const std::string& from, const std::string& to) {
  Operation operation = MakeOperation(OperationKind::kRename, from);
  operation.to = to;
  return Run<void>(*state_, operation, [&] { return base_.Rename(from, to); });
}

Result<void> FaultEnv::Remove(const std::string& path) {
  return Run<void>(*state_, MakeOperation(OperationKind::kRemove, path),
                   [&] { return base_.Remove(path); });
}

Result<void> FaultEnv::RemoveDirectory(const std::string& path) {
  return Run<void>(*state_, MakeOperation(OperationKind::kRemoveDirectory, path),
                   [&] { return base_.RemoveDirectory(path); });
}

Result<void> FaultEnv::SyncDirectory(const std::string& path) {
  return Run<void>(*state_, MakeOperation(OperationKind::kSyncDirectory, path),
                   [&] { return base_.SyncDirectory(path); });
}

Result<uint64_t> FaultEnv::FreeBytes(const std::string& path) {
  return Run<uint64_t>(*state_, MakeOperation(OperationKind::kFreeBytes, path),
                       [&] { return base_.FreeBytes(path); });
}

Result<std::unique_ptr<FileLock>> FaultEnv::Lock(const std::string& path, LockKind kind,
                                                 LockWait wait) {
  return Run<std::unique_ptr<FileLock>>(*state_, MakeOperation(OperationKind::kLock, path),
                                        [&] { return base_.Lock(path, kind, wait); });
}

Result<std::unique_ptr<AsyncReader>> FaultEnv::NewReader(const ReaderOptions& options) {
  HP_ASSIGN(std::unique_ptr<AsyncReader> base, base_.NewReader(options));
  return std::make_unique<FaultReader>(std::move(base));
}

}  // namespace hotplane
