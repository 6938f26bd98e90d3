#include "io/mem_env.h"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "base/check.h"
#include "base/format_text.h"
#include "base/units.h"

namespace hotplane {
namespace {

// Larger than any test, small enough that sums with it do not overflow.
constexpr uint64_t kDefaultCapacityBytes = uint64_t{1} << 50;

using Content = std::vector<std::byte>;

std::vector<std::string> SplitPath(const std::string& path) {
  std::vector<std::string> names;
  size_t begin = 0;
  while (begin <= path.size()) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string name = path.substr(begin, end - begin);
    if (name == "..") {
      if (!names.empty()) names.pop_back();
    } else if (!name.empty() && name != ".") {
      names.push_back(name);
    }
    begin = end + 1;
  }
  return names;
}

std::string NormalizePath(const std::string& path) {
  std::string normal;
  for (const std::string& name : SplitPath(path)) normal += "/" + name;
  return normal.empty() ? "/" : normal;
}

Status ErrorStatus(int error, const char* what, const std::string& path) {
  return Status::FromErrno(error, what).File(path);
}

Status TruncatedStatus(const std::string& path, uint64_t expected_bytes, uint64_t found_bytes) {
  return Status::Data("the file ends early")
      .File(path)
      .At(found_bytes)
      .Expected(Text("at least {} bytes", expected_bytes))
      .Found(Text("{} bytes", found_bytes));
}

bool IsAligned(uint64_t offset, const void* address, size_t bytes) {
  return offset % kPageBytes == 0 && reinterpret_cast<uintptr_t>(address) % kPageBytes == 0 &&
         bytes % kPageBytes == 0;
}

}  // namespace

struct MemEnv::Node {
  using Entries = std::map<std::string, std::shared_ptr<Node>>;

  FileType type = FileType::kInvalid;
  uint64_t inode = 0;
  int64_t modified_ns = 0;

  Content content;  // of a file
  Content durable_content;
  std::vector<bool> cached_pages;

  Entries entries;  // of a directory
  Entries durable_entries;

  size_t shared_lock_count = 0;
  bool exclusively_locked = false;

  void Resize(uint64_t bytes) {
    content.resize(bytes);
    cached_pages.resize(RoundUp(bytes, kPageBytes) / kPageBytes);
  }
  void SetCached(uint64_t offset, uint64_t bytes, bool cached) {
    for (uint64_t at = offset; at < offset + bytes; at = RoundUp(at + 1, kPageBytes))
      if (at / kPageBytes < cached_pages.size()) cached_pages[at / kPageBytes] = cached;
  }
  // The part of a range that lies within the file; bytes 0 means to the end.
  uint64_t RangeBytes(uint64_t offset, uint64_t bytes) const {
    const uint64_t rest = content.size() - std::min<uint64_t>(content.size(), offset);
    return bytes == 0 ? rest : std::min(bytes, rest);
  }
  FileStat Stat() const { return {type, content.size(), kDevice, inode, modified_ns}; }

 private:
  static constexpr uint64_t kDevice = 1;
};

struct MemEnv::State {
  struct Counts {
    uint64_t opens = 0;
    uint64_t read_bytes = 0;
  };
  // Where a path leads. `parent` is null for the root; `node` is null when nothing has the name.
  struct Place {
    std::shared_ptr<Node> parent;
    std::string name;
    std::shared_ptr<Node> node;
    int error = 0;  // ENOENT or ENOTDIR of a directory on the way
  };

  mutable std::mutex mutex;
  std::condition_variable lock_released;
  uint64_t crash_count = 0;
  uint64_t capacity_bytes = kDefaultCapacityBytes;
  bool read_only = false;
  bool direct_refused = false;
  uint64_t last_inode = 0;
  int64_t clock_ns = 0;
  std::map<std::string, Counts> counts;
  std::shared_ptr<Node> root = MakeNode(FileType::kDirectory);

  std::shared_ptr<Node> MakeNode(FileType type) {
    auto node = std::make_shared<Node>();
    node->type = type;
    node->inode = ++last_inode;
    node->modified_ns = ++clock_ns;
    return node;
  }

  Place Find(const std::string& path) const {
    Place place{nullptr, "", root, 0};
    for (const std::string& name : SplitPath(path)) {
      if (place.node == nullptr) return {nullptr, "", nullptr, ENOENT};
      if (place.node->type != FileType::kDirectory) return {nullptr, "", nullptr, ENOTDIR};
      const std::shared_ptr<Node> parent = place.node;
      const auto entry = parent->entries.find(name);
      place = {parent, name, entry == parent->entries.end() ? nullptr : entry->second, 0};
    }
    return place;
  }

  static uint64_t UsedBytes(const Node& node) {
    uint64_t bytes = node.content.size();
    for (const auto& [name, child] : node.entries) bytes += UsedBytes(*child);
    return bytes;
  }
  uint64_t FreeBytes() const { return capacity_bytes - std::min(capacity_bytes, UsedBytes(*root)); }

  // Grows the file to at most `bytes`, as far as there is room.
  void Grow(Node& node, uint64_t bytes) {
    if (bytes <= node.content.size()) return;
    const uint64_t growth_bytes = std::min<uint64_t>(bytes - node.content.size(), FreeBytes());
    node.Resize(node.content.size() + growth_bytes);
  }

  static void CrashNode(Node& node, CrashMode mode) {
    if (mode == CrashMode::kDropUnsynced) {
      node.content = node.durable_content;
      node.entries = node.durable_entries;
    } else {
      node.durable_content = node.content;
      node.durable_entries = node.entries;
    }
    node.cached_pages.assign(RoundUp(node.content.size(), kPageBytes) / kPageBytes, false);
    node.shared_lock_count = 0;
    node.exclusively_locked = false;
    for (const auto& [name, child] : node.entries) CrashNode(*child, mode);
  }
};

class MemEnv::MemMapping final : public Mapping {
 public:
  MemMapping(std::shared_ptr<State> state, std::shared_ptr<Node> node, std::string path,
             uint64_t offset, Content copy)
      : state_(std::move(state)),
        node_(std::move(node)),
        path_(std::move(path)),
        offset_(offset),
        copy_(std::move(copy)),
        crash_count_(state_->crash_count) {}

  std::span<const std::byte> bytes() const override { return copy_; }

  Result<void> Populate(uint64_t offset, uint64_t bytes) override {
    const std::lock_guard lock(state_->mutex);
    if (crash_count_ != state_->crash_count)
      return Fail(ErrorStatus(EIO, "cannot populate the mapping", path_).At(offset_ + offset));
    if (offset > copy_.size() || bytes > copy_.size() - offset)
      return Fail(
          ErrorStatus(EINVAL, "cannot populate beyond the mapping", path_).At(offset_ + offset));
    const uint64_t end = offset_ + offset + bytes;
    if (bytes > 0 && node_->content.size() < end)
      return Fail(TruncatedStatus(path_, end, node_->content.size()));
    node_->SetCached(offset_ + offset, bytes, true);
    state_->counts[NormalizePath(path_)].read_bytes += bytes;
    return {};
  }

  // As the kernel does it: in whole huge pages, which are then what the disk has.
  DroppedRange Drop(uint64_t offset, uint64_t bytes) override {
    const std::lock_guard lock(state_->mutex);
    const uint64_t begin = (offset_ + offset) / kHugePageBytes * kHugePageBytes;
    const uint64_t end = RoundUp(offset_ + offset + bytes, kHugePageBytes);
    const uint64_t first = std::max(begin, offset_);
    const uint64_t last = std::min({end, offset_ + copy_.size(), uint64_t{node_->content.size()}});
    node_->SetCached(first, last - first, false);
    const auto from = node_->content.begin() + static_cast<std::ptrdiff_t>(first);
    std::copy(from, from + static_cast<std::ptrdiff_t>(last - first),
              copy_.begin() + static_cast<std::ptrdiff_t>(first - offset_));
    return {first - offset_, last - offset_};
  }

 private:
  const std::shared_ptr<State> state_;
  const std::shared_ptr<Node> node_;
  const std::string path_;
  const uint64_t offset_;
  Content copy_;  // as it was mapped: what the page cache has
  const uint64_t crash_count_;
};

class MemEnv::MemFile final : public File {
 public:
  MemFile(std::shared_ptr<State> state, std::shared_ptr<Node> node, const std::string& path,
          OpenMode mode)
      : File(path),
        state_(std::move(state)),
        node_(std::move(node)),
        mode_(mode),
        crash_count_(state_->crash_count) {}

  IoCount ReadSome(uint64_t offset, std::span<std::byte> destination) override {
    const std::lock_guard lock(state_->mutex);
    if (IsDead()) return {0, EIO};
    const bool direct = mode_ == OpenMode::kReadDirect;
    if (direct && !IsAligned(offset, destination.data(), destination.size())) return {0, EINVAL};
    if (destination.empty()) return {0, 0};
    const size_t bytes = node_->RangeBytes(offset, destination.size());
    if (bytes == 0) return {0, 0};
    std::memcpy(destination.data(), node_->content.data() + offset, bytes);
    if (!direct) node_->SetCached(offset, bytes, true);
    state_->counts[NormalizePath(path())].read_bytes += bytes;
    return {bytes, 0};
  }

  IoCount WriteSome(uint64_t offset, std::span<const std::byte> source) override {
    const std::lock_guard lock(state_->mutex);
    if (IsDead()) return {0, EIO};
    if (mode_ != OpenMode::kCreate) return {0, EBADF};
    if (state_->read_only) return {0, EROFS};
    if (source.empty()) return {0, 0};
    const uint64_t hole_bytes = offset - std::min<uint64_t>(offset, node_->content.size());
    if (hole_bytes > state_->FreeBytes()) return {0, ENOSPC};
    state_->Grow(*node_, offset + source.size());
    const size_t bytes = node_->RangeBytes(offset, source.size());
    if (bytes == 0) return {0, ENOSPC};
    std::memcpy(node_->content.data() + offset, source.data(), bytes);
    node_->SetCached(offset, bytes, true);
    node_->modified_ns = ++state_->clock_ns;
    return {bytes, 0};
  }

  Result<void> Sync() override {
    const std::lock_guard lock(state_->mutex);
    if (IsDead()) return Fail(ErrorStatus(EIO, "cannot sync", path()));
    node_->durable_content = node_->content;
    return {};
  }

  Result<void> Allocate(uint64_t bytes) override {
    const std::lock_guard lock(state_->mutex);
    const uint64_t growth_bytes = bytes - std::min<uint64_t>(bytes, node_->content.size());
    const int error = IsDead()                             ? EIO
                      : mode_ != OpenMode::kCreate         ? EBADF
                      : state_->read_only                  ? EROFS
                      : growth_bytes > state_->FreeBytes() ? ENOSPC
                                                           : 0;
    if (error != 0)
      return Fail(ErrorStatus(error, "cannot reserve space", path()).Expected(FormatBytes(bytes)));
    state_->Grow(*node_, bytes);
    return {};
  }

  Result<FileStat> Stat() override {
    const std::lock_guard lock(state_->mutex);
    if (IsDead()) return Fail(ErrorStatus(EIO, "cannot stat", path()));
    return node_->Stat();
  }

  Result<std::unique_ptr<Mapping>> Map(uint64_t offset, uint64_t bytes) override {
    const std::lock_guard lock(state_->mutex);
    if (IsDead()) return Fail(ErrorStatus(EIO, "cannot map", path()).At(offset));
    const uint64_t end = offset + bytes < offset ? UINT64_MAX : offset + bytes;
    if (end > node_->content.size())
      return Fail(TruncatedStatus(path(), end, node_->content.size()));
    const std::byte* const first = node_->content.data() + offset;
    return std::make_unique<MemMapping>(state_, node_, path(), offset,
                                        Content(first, first + bytes));
  }

  void WillNeed(uint64_t offset, uint64_t bytes) override { Advise(offset, bytes, true); }
  void DropCache(uint64_t offset, uint64_t bytes) override { Advise(offset, bytes, false); }

  Result<uint64_t> CachedBytes(uint64_t offset, uint64_t bytes) override {
    const std::lock_guard lock(state_->mutex);
    if (IsDead()) return Fail(ErrorStatus(EIO, "cannot tell what is in the page cache", path()));
    const uint64_t end = offset + node_->RangeBytes(offset, bytes);
    uint64_t cached_bytes = 0;
    for (uint64_t at = offset; at < end;) {
      const uint64_t next = std::min(RoundUp(at + 1, kPageBytes), end);
      if (node_->cached_pages[at / kPageBytes]) cached_bytes += next - at;
      at = next;
    }
    return cached_bytes;
  }

 private:
  bool IsDead() const { return crash_count_ != state_->crash_count; }

  void Advise(uint64_t offset, uint64_t bytes, bool cached) {
    const std::lock_guard lock(state_->mutex);
    if (!IsDead()) node_->SetCached(offset, node_->RangeBytes(offset, bytes), cached);
  }

  const std::shared_ptr<State> state_;
  const std::shared_ptr<Node> node_;
  const OpenMode mode_;
  const uint64_t crash_count_;
};

class MemEnv::MemLock final : public FileLock {
 public:
  MemLock(std::shared_ptr<State> state, std::shared_ptr<Node> node, LockKind kind)
      : state_(std::move(state)),
        node_(std::move(node)),
        kind_(kind),
        crash_count_(state_->crash_count) {}

  ~MemLock() override {
    const std::lock_guard lock(state_->mutex);
    if (crash_count_ != state_->crash_count) return;  // the crash released it
    if (kind_ == LockKind::kExclusive)
      node_->exclusively_locked = false;
    else
      --node_->shared_lock_count;
    state_->lock_released.notify_all();
  }

  static bool CanLock(const Node& node, LockKind kind) {
    return !node.exclusively_locked && (kind == LockKind::kShared || node.shared_lock_count == 0);
  }

 private:
  const std::shared_ptr<State> state_;
  const std::shared_ptr<Node> node_;
  const LockKind kind_;
  const uint64_t crash_count_;
};

MemEnv::MemEnv() : state_(std::make_shared<State>()) {}
MemEnv::~MemEnv() = default;

void MemEnv::Crash(CrashMode mode) {
  const std::lock_guard lock(state_->mutex);
  State::CrashNode(*state_->root, mode);
  ++state_->crash_count;
  state_->lock_released.notify_all();
}

void MemEnv::set_capacity_bytes(uint64_t bytes) {
  const std::lock_guard lock(state_->mutex);
  state_->capacity_bytes = bytes;
}

void MemEnv::set_read_only(bool read_only) {
  const std::lock_guard lock(state_->mutex);
  state_->read_only = read_only;
}

void MemEnv::set_direct_refused(bool refused) {
  const std::lock_guard lock(state_->mutex);
  state_->direct_refused = refused;
}

void MemEnv::SetFile(const std::string& path, std::span<const std::byte> content) {
  const std::lock_guard lock(state_->mutex);
  std::shared_ptr<Node> node = state_->root;
  const std::vector<std::string> names = SplitPath(path);
  HP_CHECK(!names.empty());
  for (size_t i = 0; i < names.size(); ++i) {
    const bool is_file = i + 1 == names.size();
    HP_CHECK(node->type == FileType::kDirectory);
    std::shared_ptr<Node>& child = node->entries[names[i]];
    if (child == nullptr)
      child = state_->MakeNode(is_file ? FileType::kRegular : FileType::kDirectory);
    node->durable_entries[names[i]] = child;
    node = child;
  }
  HP_CHECK(node->type == FileType::kRegular);
  node->Resize(content.size());
  std::copy(content.begin(), content.end(), node->content.begin());
  node->durable_content = node->content;
  node->modified_ns = ++state_->clock_ns;
}

void MemEnv::CorruptByte(const std::string& path, uint64_t offset, std::byte flipped_bits) {
  const std::lock_guard lock(state_->mutex);
  const std::shared_ptr<Node> node = state_->Find(path).node;
  HP_CHECK(node != nullptr && offset < node->content.size());
  node->content[offset] ^= flipped_bits;
  if (offset < node->durable_content.size()) node->durable_content[offset] ^= flipped_bits;
}

void MemEnv::Truncate(const std::string& path, uint64_t bytes) {
  const std::lock_guard lock(state_->mutex);
  const std::shared_ptr<Node> node = state_->Find(path).node;
  HP_CHECK(node != nullptr && bytes <= node->content.size());
  node->Resize(bytes);
  node->durable_content = node->content;
}

MemEnv::Snapshot MemEnv::Files() const {
  const std::lock_guard lock(state_->mutex);
  Snapshot files;
  const auto visit = [&files](const auto& self, const Node& node, const std::string& path) -> void {
    if (node.type == FileType::kRegular) files[path] = node.content;
    for (const auto& [name, child] : node.entries) self(self, *child, path + "/" + name);
  };
  visit(visit, *state_->root, "");
  return files;
}

std::vector<std::string> MemEnv::Directories() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<std::string> paths;
  const auto visit = [&paths](const auto& self, const Node& node, const std::string& path) -> void {
    if (node.type == FileType::kDirectory && !path.empty()) paths.push_back(path);
    for (const auto& [name, child] : node.entries) self(self, *child, path + "/" + name);
  };
  visit(visit, *state_->root, "");
  std::sort(paths.begin(), paths.end());
  return paths;
}

uint64_t MemEnv::open_count(const std::string& path) const {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->counts.find(NormalizePath(path));
  return found == state_->counts.end() ? 0 : found->second.opens;
}

uint64_t MemEnv::read_bytes(const std::string& path) const {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->counts.find(NormalizePath(path));
  return found == state_->counts.end() ? 0 : found->second.read_bytes;
}

void MemEnv::ResetCounts() {
  const std::lock_guard lock(state_->mutex);
  state_->counts.clear();
}

Result<std::unique_ptr<File>> MemEnv::Open(const std::string& path, OpenMode mode) {
  const std::lock_guard lock(state_->mutex);
  State::Place place = state_->Find(path);
  const bool create = mode == OpenMode::kCreate;
  const bool direct = mode == OpenMode::kReadDirect;
  const bool exists = place.node != nullptr;
  const bool is_directory = exists && place.node->type == FileType::kDirectory;
  const int error = mode == OpenMode::kInvalid         ? EINVAL
                    : place.error != 0                 ? place.error
                    : create && exists                 ? EEXIST
                    : create && state_->read_only      ? EROFS
                    : !create && !exists               ? ENOENT
                    : direct && state_->direct_refused ? EINVAL
                                                       : 0;
  if (error == 0 && is_directory)
    return Fail(Status::Data("cannot open the file")
                    .File(path)
                    .Expected("a regular file")
                    .Found("a directory"));
  if (error != 0)
    return Fail(
        ErrorStatus(error, create ? "cannot create the file" : "cannot open the file", path));
  if (create) {
    place.node = state_->MakeNode(FileType::kRegular);
    place.parent->entries[place.name] = place.node;
  }
  ++state_->counts[NormalizePath(path)].opens;
  return std::make_unique<MemFile>(state_, place.node, path, mode);
}

Result<FileStat> MemEnv::Stat(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  const State::Place place = state_->Find(path);
  return place.node == nullptr ? FileStat{} : place.node->Stat();
}

Result<std::vector<std::string>> MemEnv::List(const std::string& directory) {
  const std::lock_guard lock(state_->mutex);
  const State::Place place = state_->Find(directory);
  const int error = place.error != 0                           ? place.error
                    : place.node == nullptr                    ? ENOENT
                    : place.node->type != FileType::kDirectory ? ENOTDIR
                                                               : 0;
  if (error != 0) return Fail(ErrorStatus(error, "cannot list the directory", directory));
  std::vector<std::string> names;
  for (const auto& [name, child] : place.node->entries) names.push_back(name);
  return names;
}

Result<void> MemEnv::CreateDirectory(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  const State::Place place = state_->Find(path);
  const int error = place.error != 0        ? place.error
                    : place.node != nullptr ? EEXIST
                    : state_->read_only     ? EROFS
                                            : 0;
  if (error != 0) return Fail(ErrorStatus(error, "cannot create the directory", path));
  place.parent->entries[place.name] = state_->MakeNode(FileType::kDirectory);
  return {};
}

Result<void> MemEnv::Rename(const std::string& from, const std::string& to) {
  const std::lock_guard lock(state_->mutex);
  const State::Place source = state_->Find(from);
  const State::Place target = state_->Find(to);
  const auto is_directory = [](const State::Place& place) {
    return place.node != nullptr && place.node->type == FileType::kDirectory;
  };
  const auto is_within = [](const std::string& path, const std::string& directory) {
    return NormalizePath(path).starts_with(NormalizePath(directory) + "/");
  };
  const bool taken = target.node != nullptr && target.node != source.node;
  const int error = source.error != 0                                        ? source.error
                    : target.error != 0                                      ? target.error
                    : source.parent == nullptr || target.parent == nullptr   ? EBUSY
                    : state_->read_only                                      ? EROFS
                    : source.node == nullptr                                 ? ENOENT
                    : is_within(to, from)                                    ? EINVAL
                    : is_within(from, to)                                    ? ENOTEMPTY
                    : taken && is_directory(target) && !is_directory(source) ? EISDIR
                    : taken && !is_directory(target) && is_directory(source) ? ENOTDIR
                    : taken && !target.node->entries.empty()                 ? ENOTEMPTY
                                                                             : 0;
  if (error != 0)
    return Fail(ErrorStatus(error, "cannot rename", from).Expected(Text("a file named {}", to)));
  if (target.node == source.node) return {};
  source.parent->entries.erase(source.name);
  target.parent->entries[target.name] = source.node;
  return {};
}

Result<void> MemEnv::Remove(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  const State::Place place = state_->Find(path);
  const int error = place.error != 0                           ? place.error
                    : place.node == nullptr                    ? ENOENT
                    : place.node->type == FileType::kDirectory ? EISDIR
                    : state_->read_only                        ? EROFS
                                                               : 0;
  if (error != 0) return Fail(ErrorStatus(error, "cannot remove the file", path));
  place.parent->entries.erase(place.name);
  return {};
}

Result<void> MemEnv::RemoveDirectory(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  const State::Place place = state_->Find(path);
  const int error = place.error != 0                           ? place.error
                    : place.node == nullptr                    ? ENOENT
                    : place.node->type != FileType::kDirectory ? ENOTDIR
                    : place.parent == nullptr                  ? EBUSY
                    : state_->read_only                        ? EROFS
                    : !place.node->entries.empty()             ? ENOTEMPTY
                                                               : 0;
  if (error != 0) return Fail(ErrorStatus(error, "cannot remove the directory", path));
  place.parent->entries.erase(place.name);
  return {};
}

Result<void> MemEnv::SyncDirectory(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  const State::Place place = state_->Find(path);
  const int error = place.error != 0                           ? place.error
                    : place.node == nullptr                    ? ENOENT
                    : place.node->type != FileType::kDirectory ? ENOTDIR
                                                               : 0;
  if (error != 0) return Fail(ErrorStatus(error, "cannot sync the directory", path));
  place.node->durable_entries = place.node->entries;
  return {};
}

Result<uint64_t> MemEnv::FreeBytes(const std::string& path) {
  const std::lock_guard lock(state_->mutex);
  const State::Place place = state_->Find(path);
  if (place.node == nullptr)
    return Fail(
        ErrorStatus(place.error != 0 ? place.error : ENOENT, "cannot tell the free space", path));
  return state_->FreeBytes();
}

Result<std::unique_ptr<FileLock>> MemEnv::Lock(const std::string& path, LockKind kind,
                                               LockWait wait) {
  std::unique_lock lock(state_->mutex);
  const uint64_t crash_count = state_->crash_count;
  for (;;) {
    // Found anew after every wait: what was waited for may have been removed or replaced.
    State::Place place = state_->Find(path);
    const int error = place.error != 0                             ? place.error
                      : place.node == nullptr && state_->read_only ? EROFS
                                                                   : 0;
    if (error != 0) return Fail(ErrorStatus(error, "cannot open the lock file", path));
    if (place.node == nullptr) {
      place.node = state_->MakeNode(FileType::kRegular);
      place.parent->entries[place.name] = place.node;
    }
    if (MemLock::CanLock(*place.node, kind)) {
      if (kind == LockKind::kExclusive)
        place.node->exclusively_locked = true;
      else
        ++place.node->shared_lock_count;
      return std::make_unique<MemLock>(state_, place.node, kind);
    }
    if (wait == LockWait::kTry) return std::unique_ptr<FileLock>();
    state_->lock_released.wait(lock);
    if (crash_count != state_->crash_count) return Fail(ErrorStatus(EIO, "cannot lock", path));
  }
}

}  // namespace hotplane
