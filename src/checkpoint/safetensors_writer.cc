#include "checkpoint/safetensors_writer.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/check.h"
#include "base/format_text.h"
#include "base/log.h"
#include "base/units.h"
#include "checkpoint/shard_index.h"
#include "io/path_kind.h"

namespace hotplane {
namespace {

constexpr char kTemporaryPrefix[] = ".tmp-";

std::string JsonText(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

uint64_t TensorSpecBytes(const TensorSpec& spec) {
  uint64_t bytes = DtypeBytes(spec.dtype);
  for (const uint64_t dimension : spec.shape) bytes *= dimension;
  return bytes;
}

std::string EncodeSafetensorsHeader(std::span<const TensorSpec> tensors) {
  std::string json = R"({"__metadata__":{"format":"pt"})";
  uint64_t begin = 0;
  for (const TensorSpec& spec : tensors) {
    const uint64_t end = begin + TensorSpecBytes(spec);
    json += Text(R"(,{}:{{"dtype":"{}","shape":{},"data_offsets":[{},{}]}})", JsonText(spec.name),
                 DtypeName(spec.dtype), ShapeText(spec.shape), begin, end);
    begin = end;
  }
  json += "}";
  json.resize(RoundUp(json.size(), 8), ' ');
  const auto length = std::bit_cast<std::array<char, 8>>(uint64_t{json.size()});
  return std::string(length.data(), length.size()) + json;
}

CheckpointWriter::CheckpointWriter(Env& env, std::string directory, std::vector<TensorSpec> tensors,
                                   CheckpointWriterOptions options)
    : env_(&env),
      directory_(std::move(directory)),
      tensors_(std::move(tensors)),
      options_(std::move(options)) {}

CheckpointWriter::~CheckpointWriter() {
  file_.reset();
  for (size_t i = 0; i < created_.size(); ++i) {
    const std::string path =
        JoinPath(directory_, (i < published_ ? "" : kTemporaryPrefix) + created_[i]);
    if (const Result<void> removed = env_->Remove(path); !removed)
      Log(LogLevel::kWarning, "cannot remove {}: {}", path, removed.error().found());
  }
}

Result<std::unique_ptr<File>> CheckpointWriter::CreateFile(const std::string& name) {
  const std::string path = JoinPath(directory_, name);
  HP_ASSIGN(const FileStat stat, env_->Stat(path));
  if (stat.type != FileType::kInvalid)
    return Fail(Status::FromErrno(EEXIST, "cannot create the file").File(path));
  HP_ASSIGN(std::unique_ptr<File> file,
            env_->Open(JoinPath(directory_, kTemporaryPrefix + name), OpenMode::kCreate));
  created_.push_back(name);
  return file;
}

Result<void> CheckpointWriter::AddFile(
    const std::string& name, const std::function<Result<void>(const FileSink&)>& produce) {
  HP_ASSIGN(const std::unique_ptr<File> file, CreateFile(name));
  uint64_t offset = 0;
  HP_TRY(produce([&](std::span<const std::byte> piece) -> Result<void> {
    HP_TRY(WriteFully(*file, offset, piece));
    offset += piece.size();
    return {};
  }));
  return file->Sync();
}

Result<void> CheckpointWriter::CheckSpace() const {
  HP_ASSIGN(const uint64_t free_bytes, env_->FreeBytes(directory_));
  const uint64_t needed_bytes = data_bytes_ + options_.other_bytes;
  if (needed_bytes <= free_bytes) return {};
  return Fail(Status::Capacity("the checkpoint does not fit on the disk")
                  .File(directory_)
                  .Expected(Text("{} free", FormatBytes(needed_bytes)))
                  .Found(Text("{} free", FormatBytes(free_bytes)))
                  .Advice("free space, name another directory, or write fewer layers"));
}

Result<CheckpointWriter> CheckpointWriter::Create(Env& env, const std::string& directory,
                                                  std::vector<TensorSpec> tensors,
                                                  CheckpointWriterOptions options) {
  CheckpointWriter writer(env, directory, std::move(tensors), std::move(options));
  const PathKind kind = PathKindOf(env, directory);
  if (kind == PathKind::kCheckpoint || kind == PathKind::kStore)
    return Fail(Status::Usage("the folder to write a checkpoint to is in use")
                    .File(directory)
                    .Expected("a new folder, or an empty one")
                    .Found(std::string(PathKindText(kind)))
                    .Advice("name another folder, or remove this one"));
  HP_TRY(CreateDirectories(env, directory));
  writer.PlanShards();
  HP_TRY(writer.CheckSpace());
  HP_TRY(writer.OpenShard());
  return writer;
}

void CheckpointWriter::PlanShards() {
  shards_.push_back({});
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const uint64_t bytes = TensorSpecBytes(tensors_[i]);
    const bool full = options_.shard_bytes_max != 0 && shards_.back().bytes > 0 &&
                      shards_.back().bytes + bytes > options_.shard_bytes_max;
    if (full) shards_.push_back({.name = "", .begin = i, .end = i, .bytes = 0});
    shards_.back().end = i + 1;
    shards_.back().bytes += bytes;
    data_bytes_ += bytes;
  }
  for (size_t i = 0; i < shards_.size(); ++i) {
    shards_[i].name = options_.shard_bytes_max == 0
                          ? "model.safetensors"
                          : Text("model-{:05}-of-{:05}.safetensors", i + 1, shards_.size());
  }
}

Result<void> CheckpointWriter::OpenShard() {
  const Shard& shard = shards_[shard_];
  HP_ASSIGN(file_, CreateFile(shard.name));
  const std::string header =
      EncodeSafetensorsHeader(std::span(tensors_).subspan(shard.begin, shard.end - shard.begin));
  data_start_ = header.size();
  written_ = 0;
  return WriteFully(*file_, 0, std::as_bytes(std::span(header)));
}

Result<void> CheckpointWriter::CloseShard() {
  HP_TRY(file_->Sync());
  file_.reset();
  ++shard_;
  return {};
}

Result<void> CheckpointWriter::Append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (written_ == shards_[shard_].bytes) {
      HP_CHECK(shard_ + 1 < shards_.size());
      HP_TRY(CloseShard());
      HP_TRY(OpenShard());
    }
    const uint64_t room = shards_[shard_].bytes - written_;
    const size_t piece = std::min<uint64_t>(room, bytes.size());
    HP_TRY(WriteFully(*file_, data_start_ + written_, bytes.first(piece)));
    written_ += piece;
    bytes = bytes.subspan(piece);
  }
  return {};
}

std::string CheckpointWriter::EncodeIndex() const {
  std::string text =
      Text("{{\n\"metadata\": {{\"total_size\": {}}},\n\"weight_map\": {{", data_bytes_);
  const char* separator = "\n";
  for (const Shard& shard : shards_) {
    for (size_t i = shard.begin; i < shard.end; ++i) {
      text += Text("{}{}: {}", separator, JsonText(tensors_[i].name), JsonText(shard.name));
      separator = ",\n";
    }
  }
  return text + "\n}\n}\n";
}

Result<void> CheckpointWriter::Finish() {
  HP_CHECK(shard_ + 1 == shards_.size() && written_ == shards_[shard_].bytes);
  HP_TRY(CloseShard());
  const auto add_text = [this](const std::string& name, const std::string& text) {
    return AddFile(name,
                   [&text](const FileSink& sink) { return sink(std::as_bytes(std::span(text))); });
  };
  if (!options_.config_text.empty()) HP_TRY(add_text("config.json", options_.config_text));
  if (options_.shard_bytes_max != 0) {
    HP_TRY(add_text(kShardIndexName, EncodeIndex()));
    std::rotate(created_.begin(), created_.end() - 1, created_.end());
  }
  for (const std::string& name : created_) {
    HP_TRY(env_->Rename(JoinPath(directory_, kTemporaryPrefix + name), JoinPath(directory_, name)));
    ++published_;
    // The index is on disk before any shard can be seen beside it.
    if (published_ == 1) HP_TRY(env_->SyncDirectory(directory_));
  }
  HP_TRY(env_->SyncDirectory(directory_));
  created_.clear();
  return {};
}

}  // namespace hotplane
