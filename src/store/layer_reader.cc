#include "store/layer_reader.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/format_text.h"
#include "base/memory.h"
#include "base/trace.h"
#include "base/units.h"
#include "store/replaceable.h"
#include "store/store.h"

namespace hotplane {
namespace {

// Compares a decoded header with what the generation says; the first difference is told.
Result<void> CheckExpectation(const LayerLayout& layout, const LayerExpectation& expected) {
  const auto differ = [&](size_t offset, std::string_view what, auto wanted,
                          auto found) -> Result<void> {
    if (wanted == found) return {};
    return Fail(Status::Data(
                    Text("layer file refused: it is not the one wanted here, its {} differs", what))
                    .File(expected.path)
                    .At(offset)
                    .Expected(Text("{}", wanted))
                    .Found(Text("{}", found)));
  };
  HP_TRY(differ(offsetof(DiskLayerHeader, generation), "generation", ToHex(expected.generation),
                ToHex(layout.generation)));
  HP_TRY(differ(offsetof(DiskLayerHeader, manifest_digest), "manifest digest",
                ToHex(expected.manifest_digest), ToHex(layout.manifest_digest)));
  HP_TRY(differ(offsetof(DiskLayerHeader, encoding), "encoding", EncodingName(expected.encoding),
                EncodingName(layout.encoding)));
  HP_TRY(differ(offsetof(DiskLayerHeader, layer), "layer", expected.layer, layout.layer));
  HP_TRY(differ(offsetof(DiskLayerHeader, model_index), "model layer index", expected.model_index,
                layout.model_index));
  HP_TRY(differ(offsetof(DiskLayerHeader, experts), "number of experts", expected.geometry.experts,
                layout.geometry.experts));
  HP_TRY(differ(offsetof(DiskLayerHeader, hidden), "hidden size", expected.geometry.hidden,
                layout.geometry.hidden));
  HP_TRY(differ(offsetof(DiskLayerHeader, intermediate), "intermediate size",
                expected.geometry.intermediate, layout.geometry.intermediate));
  if (layout.encoding == Encoding::kBase) {
    HP_TRY(differ(offsetof(DiskLayerHeader, section_count), "having of biases",
                  expected.geometry.biases, layout.geometry.biases));
  }
  HP_TRY(differ(offsetof(DiskLayerHeader, shard_world), "number of shards", expected.shard_world,
                layout.shard_world));
  return differ(offsetof(DiskLayerHeader, shard_rank), "rank", expected.shard_rank,
                layout.shard_rank);
}

Result<void> ReadPastCache(Env& env, const std::string& path, const Chunk& chunk,
                           std::span<std::byte> destination) {
  const uint64_t begin = chunk.offset / kAlignBytes * kAlignBytes;
  const uint64_t end = RoundUp(chunk.offset + chunk.bytes, kAlignBytes);
  HP_ASSIGN(const HugeBuffer buffer, HugeBuffer::Allocate(end - begin));
  HP_ASSIGN(const std::unique_ptr<File> file, env.Open(path, OpenMode::kReadDirect));
  HP_TRY(ReadFully(*file, begin, buffer.span()));
  std::memcpy(destination.data(), buffer.data() + (chunk.offset - begin), chunk.bytes);
  return {};
}

}  // namespace

Result<OpenedHeader> OpenLayerHeader(Env& env, const LayerExpectation& expected) {
  const TraceSpan span("probe", expected.layer, kHeaderBytes);
  OpenedHeader opened;
  Result<std::unique_ptr<File>> file = env.Open(expected.path, OpenMode::kRead);
  if (!file) {
    // Of what no build replaces everybody says the same.
    if (file.error().code() == StatusCode::kData)
      HP_TRY(CheckReplaceable(env, expected.path, expected.layer));
    return Fail(std::move(file.error()));
  }
  opened.file = *std::move(file);
  // Of a tier that stays on disk the header is read, and by no read-ahead any of its data.
  opened.file->SetReadAhead(false);
  HP_ASSIGN(const FileStat stat, opened.file->Stat());
  std::vector<std::byte> page(std::min<uint64_t>(stat.bytes, kHeaderBytes));
  HP_TRY(ReadFully(*opened.file, 0, page));
  if (IsOtherVersion(page)) HP_TRY(CheckReplaceable(env, expected.path, expected.layer));
  HP_ASSIGN(opened.layout, DecodeHeader(page, stat.bytes, expected.path));
  HP_TRY(CheckExpectation(opened.layout, expected));
  return opened;
}

Result<std::vector<uint64_t>> ReadChunkTable(const OpenedHeader& opened) {
  std::vector<std::byte> table(opened.layout.table_bytes);
  HP_TRY(ReadFully(*opened.file, kHeaderBytes, table));
  return DecodeTable(opened.layout, table, opened.file->path());
}

std::string DescribeChunk(const LayerLayout& layout, const Chunk& chunk) {
  const std::string layer = layout.shard_world > 1
                                ? Text("layer {}, rank {}", layout.layer, layout.shard_rank)
                                : Text("layer {}", layout.layer);
  if (chunk.section < 0) return Text("{}, gap between pieces", layer);
  return Text("{}, section {}, expert {}", layer,
              layout.sections[static_cast<size_t>(chunk.section)].role, chunk.expert);
}

Status ChunkMismatch(const LayerLayout& layout, const std::vector<Chunk>& chunks,
                     const std::string& path, size_t chunk_index, uint64_t expected,
                     uint64_t found) {
  const Chunk& chunk = chunks[chunk_index];
  return Status::Data(Text("data does not match its checksum: {}, chunk {} ({} bytes)",
                           DescribeChunk(layout, chunk), chunk_index, chunk.bytes))
      .File(path)
      .At(chunk.offset)
      .Expected(Text("xxh3-64 {:016x}", expected))
      .Found(Text("xxh3-64 {:016x}", found))
      .Advice(
          "remove this file and run `hotplane build` with the checkpoint: only this layer is built "
          "again");
}

Status LayerFile::ChunkError(size_t chunk_index, uint64_t found) const {
  return ChunkMismatch(layout_, chunks_, file_->path(), chunk_index, checksums_[chunk_index],
                       found);
}

Result<void> LayerFile::RereadChunk(Env& env, size_t chunk_index,
                                    std::span<std::byte> destination) const {
  const Chunk& chunk = chunks_[chunk_index];
  HP_CHECK(destination.size() == chunk.bytes);
  // Where direct reads are refused, dropping the cached pages first is the next best thing.
  if (!ReadPastCache(env, file_->path(), chunk, destination)) {
    file_->DropCache(chunk.offset, chunk.bytes);
    HP_TRY(ReadFully(*file_, chunk.offset, destination));
  }
  const uint64_t checksum = Checksum64(destination);
  if (checksum != checksums_[chunk_index]) return Fail(ChunkError(chunk_index, checksum));
  return {};
}

}  // namespace hotplane
