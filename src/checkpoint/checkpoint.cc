#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iterator>
#include <mutex>
#include <utility>

#include "base/bytes_text.h"
#include "base/check.h"
#include "base/format_text.h"
#include "checkpoint/shard_index.h"
#include "io/file_names.h"
#include "io/path_kind.h"

namespace hotplane {
namespace {

constexpr uint64_t kIndexBytesMax = kSafetensorsHeaderBytesMax;
constexpr uint64_t kConfigBytesMax = 16'000'000;
constexpr uint64_t kRevisionBytesMax = 256;

struct Shard {
  std::string path;
  FileStat stat{};
};

// What a shard that is no regular file is, for messages.
Status NotAFile(const std::string& path, const FileStat& stat) {
  if (stat.type == FileType::kInvalid) {
    return Status::Data("a safetensors file is missing")
        .File(path)
        .Expected("a file")
        .Found("nothing, or a symbolic link that leads nowhere")
        .Advice("download the missing file");
  }
  return Status::Data("a safetensors file is not a regular file").File(path).Expected("a file");
}

Status GgufStatus(const std::string& path) {
  return Status::Data("this is a GGUF file, a format that this version does not read")
      .File(path)
      .At(0)
      .Expected("a safetensors checkpoint")
      .Found("GGUF")
      .Advice("fetch the model's safetensors files");
}

// Of the same file at two times.
Result<void> CheckSameFile(const std::string& path, const FileStat& before, const FileStat& now) {
  if (now.bytes == before.bytes && now.device == before.device && now.inode == before.inode &&
      now.modified_ns == before.modified_ns) {
    return {};
  }
  return Fail(Status::Data("a shard changed while the checkpoint was in use")
                  .File(path)
                  .Expected(Text("the file of {} bytes whose header was read", before.bytes))
                  .Found(Text("another one, of {} bytes", now.bytes))
                  .Advice("run again when the checkpoint is complete"));
}

Status HeaderLengthStatus(const std::string& path, uint64_t header_bytes, uint64_t file_bytes) {
  // Reading "version " as a number gives a length far above the limit.
  const bool pointer_file = std::memcmp(&header_bytes, "version ", sizeof(header_bytes)) == 0;
  const uint64_t room = file_bytes - 8;
  Status status =
      Status::Data("the safetensors header length is impossible")
          .File(path)
          .At(0)
          .Expected(Text("at most {} bytes", std::min(room, kSafetensorsHeaderBytesMax)))
          .Found(Text("{} bytes", header_bytes));
  return std::move(status).Advice(pointer_file
                                      ? "this is a Git LFS pointer: fetch the file it stands for"
                                      : "the file is cut short, or is not a safetensors file");
}

// Reads one header and appends its tensors to `tensors`.
Result<void> ReadHeader(Env& env, uint32_t file_number, Shard& shard,
                        std::vector<Tensor>& tensors) {
  // Looking before opening keeps a FIFO or a device from being opened at all.
  HP_ASSIGN(const FileStat named, env.Stat(shard.path));
  if (named.type != FileType::kRegular) return Fail(NotAFile(shard.path, named));
  HP_ASSIGN(const std::unique_ptr<File> file, env.Open(shard.path, OpenMode::kRead));
  HP_ASSIGN(shard.stat, file->Stat());
  const uint64_t file_bytes = shard.stat.bytes;
  std::array<std::byte, 8> length_bytes;
  if (file_bytes < length_bytes.size()) {
    return Fail(Status::Data(file_bytes == 0 ? "a safetensors file is empty"
                                             : "a safetensors file is cut short")
                    .File(shard.path)
                    .At(file_bytes)
                    .Expected("at least 8 bytes")
                    .Found(Text("{} bytes", file_bytes))
                    .Advice("copy or download this file again"));
  }
  HP_TRY(ReadFully(*file, 0, length_bytes));
  if (std::memcmp(length_bytes.data(), "GGUF", 4) == 0) return Fail(GgufStatus(shard.path));
  const auto header_bytes = std::bit_cast<uint64_t>(length_bytes);
  if (header_bytes > kSafetensorsHeaderBytesMax || header_bytes > file_bytes - 8) {
    return Fail(HeaderLengthStatus(shard.path, header_bytes, file_bytes));
  }
  std::vector<std::byte> header(header_bytes);
  HP_TRY(ReadFully(*file, 8, header));
  HP_ASSIGN(std::vector<Tensor> found,
            ParseSafetensorsHeader(AsText(header), file_bytes, shard.path));
  for (Tensor& tensor : found) {
    tensor.file = file_number;
    tensors.push_back(std::move(tensor));
  }
  return {};
}

Result<void> SortAndRefuseTwins(std::vector<Tensor>& tensors, std::span<const std::string> files) {
  std::sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) {
    return std::tie(a.name, a.file) < std::tie(b.name, b.file);
  });
  const auto twin =
      std::adjacent_find(tensors.begin(), tensors.end(),
                         [](const Tensor& a, const Tensor& b) { return a.name == b.name; });
  if (twin == tensors.end()) return {};
  return Fail(Status::Data(Text("tensor {} is in two shards", twin->name))
                  .File(files[std::next(twin)->file])
                  .At(std::next(twin)->offset)
                  .Expected("every tensor name once")
                  .Found(Text("also in {}", files[twin->file]))
                  .Advice("remove the file that does not belong to this checkpoint"));
}

// The index and the shards must say the same. Both are sorted by name; shard numbers agree.
Result<void> CheckIndex(const ShardIndex& index, std::span<const Tensor> tensors,
                        std::span<const std::string> files, const std::string& index_path) {
  auto entry = index.entries.begin();
  auto tensor = tensors.begin();
  while (entry != index.entries.end() || tensor != tensors.end()) {
    const bool entry_only =
        tensor == tensors.end() || (entry != index.entries.end() && entry->tensor < tensor->name);
    if (entry_only) {
      return Fail(
          Status::Data(Text("tensor {} is in the shard index but in no shard", entry->tensor))
              .File(files[entry->shard])
              .Expected(Text("the tensor, as {} says", index_path))
              .Found("no such tensor")
              .Advice("index and shards are of different checkpoints, or a file is stale"));
    }
    if (entry == index.entries.end() || tensor->name < entry->tensor) {
      return Fail(Status::Data(Text("tensor {} is in a shard but not in the index", tensor->name))
                      .File(files[tensor->file])
                      .At(tensor->offset)
                      .Expected(Text("an entry in {}", index_path))
                      .Found("none")
                      .Advice("index and shards are of different checkpoints, or a file is stale"));
    }
    if (entry->shard != tensor->file) {
      return Fail(
          Status::Data(Text("tensor {} is in another shard than the index says", tensor->name))
              .File(files[tensor->file])
              .At(tensor->offset)
              .Expected(Text("the tensor in {}", files[entry->shard]))
              .Found(Text("it in {}", files[tensor->file])));
    }
    ++entry;
    ++tensor;
  }
  return {};
}

// The single .safetensors file of a folder without an index.
Result<std::string> FindSingleFile(Env& env, const std::string& folder) {
  HP_ASSIGN(const std::vector<std::string> names, env.List(folder));
  std::vector<std::string> found;
  for (const std::string& name : names) {
    if (name.ends_with(kSafetensorsSuffix) && !name.starts_with(".")) found.push_back(name);
  }
  if (found.size() == 1) return found.front();
  for (const std::string& name : names) {
    if (found.empty() && name.ends_with(".gguf")) return Fail(GgufStatus(JoinPath(folder, name)));
  }
  if (found.empty()) {
    const PathKind kind = PathKindOf(env, folder);
    const bool store = kind == PathKind::kStore || kind == PathKind::kGeneration;
    return Fail(Status::Usage(store ? "this is a store, not a checkpoint"
                                    : "the folder holds no checkpoint")
                    .File(folder)
                    .Expected(Text("{}, or one .safetensors file", kShardIndexName))
                    .Found(DescribePath(env, folder))
                    .Advice(store ? "give the checkpoint that the store was built from"
                                  : "give the folder that the model's files were fetched into"));
  }
  return Fail(
      Status::Usage("the folder holds several .safetensors files and no index")
          .File(folder)
          .Expected(std::string(kShardIndexName))
          .Found(Text("{} files, the first two are {} and {}", found.size(), found[0], found[1]))
          .Advice(Text("fetch {}, or name one file", kShardIndexName)));
}

// A folder of the Hugging Face cache holds snapshots/REVISION/, with links into blobs/, and
// refs/main with the name of a revision, and no model's files itself. Any other folder is returned
// as it is.
Result<std::string> ResolveSnapshot(Env& env, const std::string& folder) {
  const std::string snapshots = JoinPath(folder, kSnapshotsName);
  HP_ASSIGN(const FileStat stat, env.Stat(snapshots));
  if (stat.type != FileType::kDirectory) return folder;
  HP_ASSIGN(const std::vector<std::string> beside, env.List(folder));
  for (const std::string& name : beside)
    if (name == kShardIndexName || (name.ends_with(kSafetensorsSuffix) && !name.starts_with('.')))
      return folder;
  const std::string main = JoinPath(folder, "refs/main");
  HP_ASSIGN(const FileStat main_stat, env.Stat(main));
  if (main_stat.type == FileType::kRegular) {
    HP_ASSIGN(const std::vector<std::byte> bytes, ReadWholeFile(env, main, kRevisionBytesMax));
    std::string revision(AsText(bytes));
    while (!revision.empty() && revision.back() == '\n') revision.pop_back();
    const bool plain = !revision.empty() && std::ranges::all_of(revision, [](char c) {
      return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    });
    if (plain) return JoinPath(snapshots, revision);
    return Fail(Status::Data("refs/main of the cached model is malformed")
                    .File(main)
                    .Expected("the name of a snapshot, letters and digits"));
  }
  HP_ASSIGN(const std::vector<std::string> names, env.List(snapshots));
  if (names.size() == 1) return JoinPath(snapshots, names.front());
  return Fail(Status::Usage("the cached model does not say which snapshot is meant")
                  .File(folder)
                  .Expected("refs/main, or exactly one folder in snapshots")
                  .Found(Text("{} snapshots and no refs/main", names.size()))
                  .Advice("name the folder of a snapshot"));
}

Result<std::string> ReadConfig(Env& env, const std::string& folder) {
  const std::string path = JoinPath(folder, kConfigName);
  HP_ASSIGN(const FileStat stat, env.Stat(path));
  if (stat.type == FileType::kInvalid) return std::string();
  if (stat.type != FileType::kRegular) {
    return Fail(Status::Data("config.json is not a regular file").File(path).Expected("a file"));
  }
  HP_ASSIGN(const std::vector<std::byte> bytes, ReadWholeFile(env, path, kConfigBytesMax));
  if (bytes.empty())
    return Fail(Status::Data("config.json is empty")
                    .File(path)
                    .Expected("a JSON object, or no such file")
                    .Found("0 bytes")
                    .Advice("fetch it again"));
  return std::string(AsText(bytes));
}

struct FoundFiles {
  std::string folder;
  std::vector<std::string> files;
  std::optional<ShardIndex> index;
};

Result<FoundFiles> FindFiles(Env& env, const std::string& path) {
  HP_ASSIGN(const FileStat stat, env.Stat(path));
  if (stat.type == FileType::kRegular && PathKindOf(env, path) == PathKind::kLayerFile)
    return Fail(Status::Usage("this is a layer file of a store, not a checkpoint")
                    .File(path)
                    .Expected("a folder or a .safetensors file")
                    .Advice("give the checkpoint that the store was built from"));
  if (stat.type == FileType::kRegular) return FoundFiles{ParentPath(path), {path}, std::nullopt};
  if (stat.type != FileType::kDirectory)
    return Fail(Status::Usage("there is no checkpoint at this path")
                    .File(path)
                    .Expected("a folder or a .safetensors file")
                    .Found(stat.type == FileType::kInvalid ? "nothing" : "neither"));
  HP_ASSIGN(const std::string folder, ResolveSnapshot(env, path));
  FoundFiles found{folder, {}, std::nullopt};
  const std::string index_path = JoinPath(folder, kShardIndexName);
  HP_ASSIGN(const FileStat index_stat, env.Stat(index_path));
  if (index_stat.type != FileType::kRegular) {
    HP_ASSIGN(const std::string name, FindSingleFile(env, folder));
    found.files.push_back(JoinPath(folder, name));
    return found;
  }
  HP_ASSIGN(const std::vector<std::byte> text, ReadWholeFile(env, index_path, kIndexBytesMax));
  HP_ASSIGN(found.index, ParseShardIndex(AsText(text), index_path));
  for (const std::string& shard : found.index->shards)
    found.files.push_back(JoinPath(folder, shard));
  return found;
}

}  // namespace

struct Checkpoint::State {
  Env* env = nullptr;
  std::string path;
  std::vector<std::string> files;
  std::vector<FileStat> stats;  // as they were when the headers were read
  std::vector<Tensor> tensors;
  std::string config_text;
  std::mutex mutex;  // guards what follows, by shard
  std::vector<std::unique_ptr<File>> open;
  std::vector<std::unique_ptr<File>> open_direct;
};

Checkpoint::Checkpoint(std::unique_ptr<State> state) : state_(std::move(state)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

const std::string& Checkpoint::path() const { return state_->path; }
std::span<const std::string> Checkpoint::files() const { return state_->files; }
std::span<const Tensor> Checkpoint::tensors() const { return state_->tensors; }
std::string_view Checkpoint::config_text() const { return state_->config_text; }

const Tensor* Checkpoint::Find(std::string_view name) const {
  const auto found = std::lower_bound(
      state_->tensors.begin(), state_->tensors.end(), name,
      [](const Tensor& tensor, std::string_view key) { return tensor.name < key; });
  return found != state_->tensors.end() && found->name == name ? &*found : nullptr;
}

Result<std::vector<std::string>> ListCheckpointFiles(Env& env, const std::string& path) {
  HP_ASSIGN(FoundFiles found, FindFiles(env, path));
  return std::move(found.files);
}

Result<Checkpoint> Checkpoint::Open(Env& env, const std::string& path) {
  HP_ASSIGN(FoundFiles found, FindFiles(env, path));
  auto state = std::make_unique<State>();
  state->env = &env;
  state->path = path;
  state->files = std::move(found.files);
  for (uint32_t i = 0; i < state->files.size(); ++i) {
    Shard shard = {.path = state->files[i]};
    HP_TRY(ReadHeader(env, i, shard, state->tensors));
    state->stats.push_back(shard.stat);
  }
  HP_TRY(SortAndRefuseTwins(state->tensors, state->files));
  if (found.index)
    HP_TRY(CheckIndex(*found.index, state->tensors, state->files,
                      JoinPath(found.folder, kShardIndexName)));
  HP_ASSIGN(state->config_text, ReadConfig(env, found.folder));
  state->open.resize(state->files.size());
  state->open_direct.resize(state->files.size());
  return Checkpoint(std::move(state));
}

Env& Checkpoint::env() const { return *state_->env; }

Result<File*> Checkpoint::OpenShard(uint32_t number, OpenMode mode) const {
  HP_CHECK(mode == OpenMode::kRead || mode == OpenMode::kReadDirect);
  const std::string& path = state_->files[number];
  const std::lock_guard lock(state_->mutex);
  std::unique_ptr<File>& file =
      (mode == OpenMode::kRead ? state_->open : state_->open_direct)[number];
  if (file) return file.get();
  HP_ASSIGN(std::unique_ptr<File> opened, state_->env->Open(path, mode));
  HP_ASSIGN(const FileStat now, opened->Stat());
  HP_TRY(CheckSameFile(path, state_->stats[number], now));
  file = std::move(opened);
  return file.get();
}

Result<void> Checkpoint::Read(const Tensor& tensor, uint64_t offset,
                              std::span<std::byte> destination) const {
  HP_CHECK(offset <= tensor.bytes && destination.size() <= tensor.bytes - offset);
  if (destination.empty()) return {};
  HP_ASSIGN(File * file, OpenShard(tensor.file, OpenMode::kRead));
  Result<void> read = ReadFully(*file, tensor.offset + offset, destination);
  if (!read) return Fail(std::move(read).error().Because(Text("reading tensor {}", tensor.name)));
  return {};
}

Result<void> Checkpoint::CheckUnchanged() const {
  for (size_t i = 0; i < state_->files.size(); ++i) {
    HP_ASSIGN(const FileStat now, state_->env->Stat(state_->files[i]));
    HP_TRY(CheckSameFile(state_->files[i], state_->stats[i], now));
  }
  return {};
}

void Checkpoint::DropCache(const Tensor& tensor) const {
  const std::lock_guard lock(state_->mutex);
  File* file = state_->open[tensor.file].get();
  if (file != nullptr && tensor.bytes > 0) file->DropCache(tensor.offset, tensor.bytes);
}

}  // namespace hotplane
