#include <algorithm>
#include <mutex>
#include <utility>

#include "base/format_text.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/units.h"
#include "store/generation_state.h"
#include "store/paths.h"
#include "store/store.h"

namespace hotplane {
namespace {

// Large enough that a disk streams, small enough that cancelling and progress are prompt; a whole
// number of chunks.
constexpr uint64_t kReadBytes = 4 * kMiB;
static_assert(kReadBytes % kChunkBytes == 0);

// Consecutive chunks that are read at once.
struct ChunkRun {
  size_t first;
  size_t count;
  uint64_t bytes;
};

std::vector<ChunkRun> GroupChunks(const std::vector<Chunk>& chunks) {
  std::vector<ChunkRun> runs;
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (runs.empty() || runs.back().bytes + chunks[i].bytes > kReadBytes) runs.push_back({i, 0, 0});
    ++runs.back().count;
    runs.back().bytes += chunks[i].bytes;
  }
  return runs;
}

class Verifier {
 public:
  Verifier(const Generation& generation, WorkerPool& pool, const CancelToken* cancel,
           const ByteProgress& progress)
      : generation_(generation), pool_(pool), cancel_(cancel), progress_(progress) {}

  Result<VerifyReport> Run() {
    HP_ASSIGN(const std::vector<std::string> names,
              generation_.env().List(generation_.directory()));
    for (const std::string& name : names) {
      if (name != kManifestName && !ParseLayerName(name)) continue;
      HP_ASSIGN(const FileStat stat, generation_.env().Stat(PathOf(name)));
      bytes_total_ += stat.bytes;
    }
    HP_TRY(CheckManifest());
    for (const std::string& name : names) {
      const std::optional<LayerName> parsed = ParseLayerName(name);
      if (!parsed) continue;
      ++report_.files_checked;
      if (!CheckName(*parsed)) continue;
      HP_TRY(parsed->encoding == Encoding::kInvalid ? CheckSourceRecord(*parsed)
                                                    : CheckLayerFile(*parsed));
    }
    std::ranges::stable_sort(report_.findings, [](const auto& a, const auto& b) {
      return std::pair(a.file, a.chunk) < std::pair(b.file, b.chunk);
    });
    return std::move(report_);
  }

 private:
  std::string PathOf(const std::string& name) const {
    return JoinPath(generation_.directory(), name);
  }

  void Report(std::string file, const LayerName& name, std::optional<size_t> chunk, Status status) {
    const std::lock_guard lock(mutex_);
    report_.findings.push_back({std::move(file), name.layer, name.rank, chunk, std::move(status)});
  }

  void Advance(uint64_t bytes, uint64_t chunks) {
    const std::lock_guard lock(mutex_);
    report_.bytes_checked += bytes;
    report_.chunks_checked += chunks;
    if (progress_) progress_(report_.bytes_checked, bytes_total_);
  }

  // It was right when the generation was opened; a file that is gone or changed since is damage.
  Result<void> CheckManifest() {
    const std::string path = PathOf(kManifestName);
    ++report_.files_checked;
    HP_ASSIGN(const FileStat stat, generation_.env().Stat(path));
    if (stat.type == FileType::kInvalid) {
      Report(path, {}, std::nullopt, Status::Data("the manifest is missing").File(path));
      return {};
    }
    const auto bytes = ReadWholeFile(generation_.env(), path, kSealedTextBytesMax);
    if (!bytes) {
      Report(path, {}, std::nullopt, bytes.error());
    } else if (Digest(*bytes) != generation_.manifest_digest()) {
      Report(path, {}, std::nullopt,
             Status::Data("the manifest changed while the store was in use")
                 .File(path)
                 .Expected(ToHex(generation_.manifest_digest()))
                 .Found(ToHex(Digest(*bytes))));
    } else {
      Advance(bytes->size(), 0);
    }
    return {};
  }

  Result<void> CheckSourceRecord(const LayerName& name) {
    const std::string path = PathOf(SourceRecordName(name.layer));
    const auto record = generation_.ReadSourceRecord(name.layer);
    if (!record) {
      Report(path, name, std::nullopt, record.error());
      return {};
    }
    HP_ASSIGN(const FileStat stat, generation_.env().Stat(path));
    Advance(stat.bytes, 0);
    return {};
  }

  // A name that no file of this generation has, though one of another could.
  bool CheckName(const LayerName& name) {
    const size_t layers = generation_.manifest().layers.size();
    if (name.layer >= layers) {
      const std::string path = PathOf(name.encoding == Encoding::kInvalid
                                          ? SourceRecordName(name.layer)
                                          : LayerFileName(name.layer, name.rank, name.encoding));
      Report(path, name, std::nullopt,
             Status::Data("no layer of this generation has a file of this name")
                 .File(path)
                 .Expected(Text("layers 0 to {}", layers - 1))
                 .Found(Text("layer {}", name.layer)));
      return false;
    }
    return name.encoding == Encoding::kInvalid || CheckRank(name);
  }

  bool CheckRank(const LayerName& name) {
    const uint32_t world = generation_.world();
    if (world > 1 ? name.rank.has_value() && *name.rank < world : !name.rank) return true;
    const std::string path = PathOf(LayerFileName(name.layer, name.rank, name.encoding));
    Report(path, name, std::nullopt,
           Status::Data("no rank of this generation has a file of this name")
               .File(path)
               .Expected(world > 1 ? Text("ranks 0 to {}", world - 1) : "no rank: it is unsharded")
               .Found(name.rank ? Text("rank {}", *name.rank) : "no rank"));
    return false;
  }

  // Between table and data there is nothing, and nobody but this looks.
  Result<void> CheckPadding(const LayerFile& file, const LayerName& name) {
    const uint64_t begin = kHeaderBytes + file.layout().table_bytes;
    std::vector<std::byte> padding(file.layout().data_offset - begin);
    const std::string& path = file.file().path();
    if (const Result<void> read = ReadFully(file.file(), begin, padding); !read) {
      Report(path, name, std::nullopt, read.error());
      return {};
    }
    const auto bad =
        std::ranges::find_if(padding, [](std::byte byte) { return byte != std::byte{0}; });
    if (bad == padding.end()) return {};
    Report(path, name, std::nullopt,
           Status::Data("the padding before the data is not zero")
               .File(path)
               .At(begin + static_cast<uint64_t>(bad - padding.begin()))
               .Expected("0")
               .Found(Text("{}", std::to_integer<unsigned>(*bad)))
               .Advice("nothing reads it, but something has written there: look after this disk"));
    return {};
  }

  Result<void> CheckLayerFile(const LayerName& name) {
    const Generation ranked = generation_.ForRank(name.rank.value_or(0));
    const Result<LayerFile> file = ranked.OpenLayer(name.layer, name.encoding);
    if (!file) {
      Report(ranked.LayerPath(name.layer, name.encoding), name, std::nullopt, file.error());
      return {};
    }
    file->file().SetReadAhead(true);
    HP_TRY(CheckPadding(*file, name));
    Advance(file->bytes_metadata(), 0);
    const std::vector<ChunkRun> runs = GroupChunks(file->chunks());
    HP_TRY(GrowBuffers(std::ranges::max(runs, {}, &ChunkRun::bytes).bytes));
    return pool_.ParallelFor(runs.size(), [&](size_t index, size_t worker) -> Result<void> {
      if (cancel_ != nullptr) HP_TRY(cancel_->Check());
      CheckRun(*file, runs[index], buffers_[worker].span().first(runs[index].bytes));
      return {};
    });
  }

  // Small stores need small buffers only; what is there is kept from file to file.
  Result<void> GrowBuffers(uint64_t bytes) {
    buffers_.resize(pool_.worker_count());
    for (HugeBuffer& buffer : buffers_) {
      if (buffer.size() >= bytes) continue;
      HP_ASSIGN(buffer, HugeBuffer::Allocate(bytes));
    }
    return {};
  }

  void CheckRun(const LayerFile& file, const ChunkRun& run, std::span<std::byte> buffer) {
    const uint64_t offset = file.chunks()[run.first].offset;
    // Where the large read fails each chunk is read alone, so that the bad ones are named.
    const bool read = ReadFully(file.file(), offset, buffer).has_value();
    for (size_t i = run.first; i < run.first + run.count; ++i) {
      const Chunk& chunk = file.chunks()[i];
      const auto bytes = buffer.subspan(chunk.offset - offset, chunk.bytes);
      Result<void> good = read ? Result<void>() : ReadFully(file.file(), chunk.offset, bytes);
      if (good) good = CheckChunk(file, i, bytes);
      if (!good) {
        LayerName name;
        name.layer = file.layout().layer;
        if (file.layout().shard_world > 1) name.rank = file.layout().shard_rank;
        Report(file.file().path(), name, i, std::move(good.error()));
      }
    }
    Advance(run.bytes, run.count);
  }

  Result<void> CheckChunk(const LayerFile& file, size_t index, std::span<std::byte> bytes) {
    if (Checksum64(bytes) != file.checksums()[index]) {
      HP_TRY(file.RereadChunk(generation_.env(), index, bytes));
      Log(LogLevel::kWarning, "{}: chunk {} was wrong in the page cache and is right on the disk",
          file.file().path(), index);
    }
    const Chunk& chunk = file.chunks()[index];
    if (chunk.section >= 0) return {};
    const auto stain = std::ranges::find_if(bytes, [](std::byte b) { return b != std::byte{0}; });
    if (stain == bytes.end()) return {};
    return Fail(Status::Data(Text("a byte between pieces is not zero, layer {}, chunk {}",
                                  file.layout().layer, index))
                    .File(file.file().path())
                    .At(chunk.offset + static_cast<size_t>(stain - bytes.begin()))
                    .Expected("0")
                    .Found(Text("{}", std::to_integer<unsigned>(*stain))));
  }

  const Generation& generation_;
  WorkerPool& pool_;
  const CancelToken* cancel_;
  const ByteProgress& progress_;
  std::vector<HugeBuffer> buffers_;  // by worker
  uint64_t bytes_total_ = 0;
  std::mutex mutex_;
  VerifyReport report_;
};

}  // namespace

Result<VerifyReport> Generation::Verify(WorkerPool& pool, const CancelToken* cancel,
                                        const ByteProgress& progress) const {
  return Verifier(*this, pool, cancel, progress).Run();
}

}  // namespace hotplane
