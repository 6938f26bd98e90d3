// The layer file decoder on hostile bytes: as they are, and with the checksums put right, so that
// what is behind them is reached too.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "format/layer_file_samples.h"

namespace hotplane {
namespace {

// The first `bytes` of what follows the header, zeros where the input ends.
std::vector<std::byte> TableFrom(std::span<const std::byte> rest, size_t bytes) {
  std::vector<std::byte> table(bytes);
  std::ranges::copy(rest.first(std::min(rest.size(), bytes)), table.begin());
  return table;
}

// What an accepted file promises: its chunks tile the data region, and writing the layout again
// gives the same page.
void CheckAccepted(const LayerLayout& layout, std::span<const std::byte> page,
                   std::span<const std::byte> rest) {
  uint64_t cursor = layout.data_offset;
  for (const Chunk& chunk : ListChunks(layout)) {
    HP_CHECK(chunk.offset == cursor && chunk.bytes > 0 && chunk.bytes <= kChunkBytes);
    HP_CHECK(chunk.section >= -1 && chunk.section < static_cast<int>(layout.sections.size()));
    HP_CHECK(chunk.expert < layout.geometry.experts);
    cursor += chunk.bytes;
  }
  HP_CHECK(cursor == layout.file_bytes);
  const std::vector<std::byte> table = TableFrom(rest, layout.table_bytes);
  if (const auto checksums = DecodeTable(layout, table, "fuzz")) {
    HP_CHECK(checksums->size() == layout.chunk_count);
    HP_CHECK(std::ranges::equal(EncodeHeader(layout, table), page));
  }
}

void Decode(std::span<const std::byte> page, uint64_t file_bytes, std::span<const std::byte> rest) {
  const auto layout = DecodeHeader(page, file_bytes, "fuzz");
  if (layout) {
    CheckAccepted(*layout, page, rest);
  } else {
    HP_CHECK(layout.error().code() == StatusCode::kData && layout.error().offset().has_value());
  }
}

}  // namespace
}  // namespace hotplane

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hotplane;
  const auto input = std::as_bytes(std::span(data, size));
  Decode(input.first(std::min<size_t>(size, kHeaderBytes)), size, {});
  if (size < kHeaderBytes) return 0;

  std::vector<std::byte> page(input.begin(), input.begin() + kHeaderBytes);
  const auto rest = input.subspan(kHeaderBytes);
  uint64_t file_bytes = 0;
  uint64_t table_bytes = 0;
  std::memcpy(&file_bytes, page.data() + offsetof(DiskLayerHeader, file_bytes), 8);
  std::memcpy(&table_bytes, page.data() + offsetof(DiskLayerHeader, table_bytes), 8);
  if (table_bytes <= 2 * kAlignBytes) {
    const uint64_t checksum = Checksum64(TableFrom(rest, table_bytes));
    std::memcpy(page.data() + offsetof(DiskLayerHeader, table_checksum), &checksum, 8);
  }
  FixHeaderChecksum(page);
  Decode(page, file_bytes, rest);
  return 0;
}
