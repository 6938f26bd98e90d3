#include <array>
#include <atomic>
#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/format_text.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/trace.h"
#include "base/units.h"
#include "store/generation_state.h"
#include "store/layer_reader.h"
#include "store/paths.h"
#include "store/replaceable.h"
#include "store/store.h"

namespace hotplane {
namespace {

class TemporaryLayerFile final : public LayerFileWriter {
 public:
  TemporaryLayerFile(Env& env, LayerExpectation target, LayerLayout layout, std::string temporary,
                     std::unique_ptr<File> file)
      : env_(env),
        target_(std::move(target)),
        layout_(std::move(layout)),
        chunks_(ListChunks(layout_)),
        checksums_(chunks_.size()),
        temporary_(std::move(temporary)),
        file_(std::move(file)),
        first_chunks_(layout_.sections.size() * layout_.geometry.experts),
        written_(layout_.sections.size() * layout_.geometry.experts) {
    for (size_t i = chunks_.size(); i-- > 0;) {
      const Chunk& chunk = chunks_[i];
      if (chunk.section >= 0) first_chunks_[PieceIndex(chunk.section, chunk.expert)] = i;
    }
  }

  ~TemporaryLayerFile() override {
    if (!temporary_exists_) return;
    file_.reset();
    if (const Result<void> removed = env_.Remove(temporary_); !removed) {
      Log(LogLevel::kWarning, "cannot remove {}: {}", temporary_, removed.error().found());
    }
  }

  const LayerLayout& layout() const override { return layout_; }

  Result<void> WritePiece(std::string_view role, uint32_t expert,
                          std::span<const std::byte> bytes) override {
    const Section* section = layout_.Find(role);
    HP_CHECK(section != nullptr && expert < layout_.geometry.experts);
    HP_CHECK(bytes.size() == section->expert_bytes);
    const size_t piece = PieceIndex(section - layout_.sections.data(), expert);
    HP_CHECK(!written_[piece].exchange(true));
    HP_TRY(WriteFully(*file_, layout_.PieceOffset(*section, expert), bytes));
    for (size_t done = 0, i = first_chunks_[piece]; done < bytes.size(); ++i) {
      checksums_[i] = Checksum64(bytes.subspan(done, chunks_[i].bytes));
      done += chunks_[i].bytes;
    }
    return {};
  }

  Result<void> Publish() override {
    for (const std::atomic<bool>& written : written_) HP_CHECK(written);
    const TraceSpan span("publish file", target_.layer, layout_.file_bytes);
    HP_TRY(WriteGaps());
    const std::vector<std::byte> table = EncodeTable(checksums_);
    HP_TRY(WriteFully(*file_, kHeaderBytes, table));
    HP_TRY(WriteFully(*file_, 0, EncodeHeader(layout_, table)));
    // Content before name: were the rename to reach the disk first, a power cut would leave a
    // published name with unwritten bytes behind it.
    HP_TRY(file_->Sync());
    HP_ASSIGN(const bool lost_race, KeepPublished());
    if (lost_race) return {};
    HP_TRY(env_.Rename(temporary_, target_.path));
    temporary_exists_ = false;
    // Without this the name itself could be lost in a power cut after we said it was published.
    return env_.SyncDirectory(ParentPath(target_.path));
  }

 private:
  size_t PieceIndex(std::ptrdiff_t section, uint32_t expert) const {
    return static_cast<size_t>(section) * layout_.geometry.experts + expert;
  }

  Result<void> WriteGaps() {
    static constexpr std::array<std::byte, kAlignBytes> kZeros{};
    for (size_t i = 0; i < chunks_.size(); ++i) {
      if (chunks_[i].section >= 0) continue;
      const auto zeros = std::span(kZeros).first(chunks_[i].bytes);
      HP_TRY(WriteFully(*file_, chunks_[i].offset, zeros));
      checksums_[i] = Checksum64(zeros);
    }
    return {};
  }

  // True when a whole and valid file is already published under the name: builders without locks
  // raced, and losing is success. A file is replaced only when it was proved bad, so all of it is
  // read. kData when it is valid and says something else than ours: then one of the two was built
  // from other source bytes, and nobody can tell which is meant.
  Result<bool> KeepPublished() const {
    HP_ASSIGN(const FileStat stat, env_.Stat(target_.path));
    if (stat.type == FileType::kInvalid) return false;
    const Result<OpenedHeader> opened = OpenLayerHeader(env_, target_);
    if (!opened) return ReplaceBad(opened.error());
    const Result<std::vector<uint64_t>> stored = ReadChunkTable(*opened);
    if (!stored) return ReplaceBad(stored.error());
    if (const Result<void> read = CheckEveryChunk(*opened, *stored); !read) {
      return ReplaceBad(read.error());
    }
    if (*stored == checksums_) return true;
    return Fail(
        Status::Data(Text("layer {} is already published with other content", target_.layer))
            .File(target_.path)
            .Advice("it was built from other source bytes: use the checkpoint that the "
                    "store was built from, or build into a new store"));
  }

  static Result<bool> ReplaceBad(const Status& reason) {
    const bool bad = reason.code() == StatusCode::kData || reason.error_number() == EIO;
    if (!bad) return Fail(reason);
    // Whoever looked before the build has warned of it.
    Log(LogLevel::kInfo, "a damaged file is replaced by the one that was built just now: {}",
        reason.file());
    return false;
  }

  Result<void> CheckEveryChunk(const OpenedHeader& opened,
                               const std::vector<uint64_t>& stored) const {
    const std::vector<Chunk> chunks = ListChunks(opened.layout);
    HP_ASSIGN(const HugeBuffer buffer, HugeBuffer::Allocate(kChunkBytes));
    for (size_t i = 0; i < chunks.size(); ++i) {
      const auto bytes = buffer.span().first(chunks[i].bytes);
      HP_TRY(ReadFully(*opened.file, chunks[i].offset, bytes));
      const uint64_t checksum = Checksum64(bytes);
      if (checksum == stored[i]) continue;
      return Fail(ChunkMismatch(opened.layout, chunks, target_.path, i, stored[i], checksum));
    }
    return {};
  }

  Env& env_;
  const LayerExpectation target_;
  const LayerLayout layout_;
  const std::vector<Chunk> chunks_;
  std::vector<uint64_t> checksums_;
  const std::string temporary_;
  std::unique_ptr<File> file_;
  bool temporary_exists_ = true;
  std::vector<size_t> first_chunks_;  // by piece
  std::vector<std::atomic<bool>> written_;
};

}  // namespace

Result<std::unique_ptr<LayerFileWriter>> CreateLayerFile(Env& env, const LayerExpectation& target) {
  HP_TRY(CheckReplaceable(env, target.path, target.layer));
  LayerLayout layout = PlanLayerLayout(target.encoding, target.geometry);
  layout.generation = target.generation;
  layout.manifest_digest = target.manifest_digest;
  layout.layer = target.layer;
  layout.model_index = target.model_index;
  layout.shard_rank = target.shard_rank;
  layout.shard_world = target.shard_world;
  const std::optional<uint32_t> rank =
      target.shard_world > 1 ? std::optional(target.shard_rank) : std::nullopt;
  const std::string name = LayerFileName(target.layer, rank, target.encoding);
  const std::string temporary = JoinPath(ParentPath(target.path), TemporaryName(name));
  HP_ASSIGN(std::unique_ptr<File> file, env.Open(temporary, OpenMode::kCreate));
  const uint64_t file_bytes = layout.file_bytes;
  File& created = *file;
  auto writer = std::make_unique<TemporaryLayerFile>(env, target, std::move(layout), temporary,
                                                     std::move(file));
  // No room is found out now rather than after the work.
  HP_TRY(created.Allocate(file_bytes));
  return writer;
}

}  // namespace hotplane
