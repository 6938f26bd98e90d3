// Small layer files for tests and fuzzers: whole files in memory, and damage with the checksums put
// right again, so that it is found by what the checksums do not say.
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "format/layer_file.h"

namespace hotplane {

// The identity of the sample files: generation 00 01 02 ..., manifest digest f0 f1 f2 ...
inline LayerLayout SampleLayout(Encoding encoding, const LayerGeometry& geometry) {
  LayerLayout layout = PlanLayerLayout(encoding, geometry);
  for (size_t i = 0; i < layout.generation.size(); ++i) {
    layout.generation[i] = static_cast<uint8_t>(i);
    layout.manifest_digest[i] = static_cast<uint8_t>(0xf0 + i);
  }
  layout.layer = 7;
  layout.model_index = 10;
  return layout;
}

// A whole file; fill(chunk, bytes) writes the data of every chunk that is not a gap.
template <typename Fill>
std::vector<std::byte> MakeLayerFile(const LayerLayout& layout, const Fill& fill) {
  std::vector<std::byte> file(layout.file_bytes);
  std::vector<uint64_t> checksums;
  for (const Chunk& chunk : ListChunks(layout)) {
    const std::span<std::byte> bytes = std::span(file).subspan(chunk.offset, chunk.bytes);
    if (chunk.section >= 0) fill(chunk, bytes);
    checksums.push_back(Checksum64(bytes));
  }
  const std::vector<std::byte> table = EncodeTable(checksums);
  const std::vector<std::byte> header = EncodeHeader(layout, table);
  std::memcpy(file.data(), header.data(), header.size());
  std::memcpy(file.data() + kHeaderBytes, table.data(), table.size());
  return file;
}

// Makes the header's own checksum right, whatever the page says. REQUIRES kHeaderBytes.
inline void FixHeaderChecksum(std::span<std::byte> page) {
  const size_t offset = offsetof(DiskLayerHeader, header_checksum);
  const uint64_t checksum = Checksum64(page.first(offset));
  std::memcpy(page.data() + offset, &checksum, sizeof checksum);
}

// The layout with one more section behind the others, its pieces one after another.
inline LayerLayout WithOptionalSection(LayerLayout layout, const std::string& role,
                                       uint64_t expert_bytes) {
  const uint64_t experts = layout.geometry.experts;
  const uint64_t old_data_offset = layout.data_offset;
  const uint64_t added_bytes = expert_bytes * experts;
  const uint64_t padded_bytes = (added_bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
  layout.sections.push_back({role, false, layout.file_bytes, expert_bytes, expert_bytes});
  layout.chunk_count += (expert_bytes + kChunkBytes - 1) / kChunkBytes * experts +
                        (padded_bytes == added_bytes ? 0 : 1);
  layout.data_bytes += padded_bytes;
  layout.table_bytes = (layout.chunk_count * 8 + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
  const uint64_t align = layout.data_bytes >= kHugeDataBytes ? kHugeAlignBytes : kAlignBytes;
  layout.data_offset = (kHeaderBytes + layout.table_bytes + align - 1) / align * align;
  layout.file_bytes = layout.data_offset + layout.data_bytes;
  for (Section& section : layout.sections) section.offset += layout.data_offset - old_data_offset;
  return layout;
}

}  // namespace hotplane
