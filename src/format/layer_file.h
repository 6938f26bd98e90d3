// The layer file: one file per layer, tier and encoding. This header holds the disk structs and the
// pure functions between bytes and layouts; docs/format/layer-file.md is its prose. Little-endian.
//
//   [ header page 4096 ][ chunk checksum table, zero-padded to 4096 ][ data region ... ]
//
// The data region is a sequence of pieces, one per (section, expert). Base files are part-major
// (all experts of planes13, then of sc13, planes2, sc2); delta files are expert-major: one record
// [fp13 | fp2] per expert. Sections of base files and records of delta files start on 4 KiB
// boundaries; gap bytes are zero. Each piece is cut into chunks of 256 KiB (the last may be short)
// and each gap is a chunk of its own, so that the chunks tile the data region exactly and every
// byte has a checksum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "format/checksum.h"
#include "format/kinds.h"

namespace hotplane {

inline constexpr uint32_t kLayerFormatVersion = 1;
inline constexpr char kLayerMagic[8] = {'h', 'o', 't', 'p', 'l', 'a', 'n', 'e'};
inline constexpr uint32_t kHeaderBytes = 4096;
inline constexpr uint32_t kAlignBytes = 4096;
// Large data regions begin at a multiple of a huge page: pieces written there, and mappings of
// them, then fall into the page cache's and the page table's 2 MiB units. Mapped, such a region is
// read at twice the speed (44 against 20 GB/s on two cores of a virtual machine).
inline constexpr uint64_t kHugeAlignBytes = 2 * 1024 * 1024;
inline constexpr uint64_t kHugeDataBytes =
    64 * 1024 * 1024;  // so that 1/32 of it is padding at most
inline constexpr uint32_t kChunkBytes = 256 * 1024;
inline constexpr uint32_t kSectionCountMax = 32;
static_assert(kChunkBytes % kAlignBytes == 0);
// Bounds of what a header may claim, so that a hostile one costs neither memory nor an overflow:
// 2^20 chunks are 256 GiB of data in one layer (24 MiB of chunk list); section bytes stay below
// experts * 3 * dimension^2 = 2^58.
inline constexpr uint32_t kDimensionMax = 1u << 20;    // hidden, intermediate
inline constexpr uint32_t kExpertCountMax = 1u << 16;  // per layer
inline constexpr uint64_t kChunkCountMax = 1u << 20;   // per file
inline constexpr uint32_t kDimensionMultiple = 64;     // of hidden and intermediate

// On disk, 64 bytes.
struct DiskSection {
  char role[16];          // "planes13", "sc13", ...; NUL-padded, at least one NUL
  uint32_t flags;         // bit 0: required (a reader that does not know the role refuses the file)
  uint32_t reserved;      // 0
  uint64_t offset;        // of expert 0's piece, from the start of the file
  uint64_t expert_bytes;  // bytes of one expert's piece
  uint64_t expert_stride;  // from one expert's piece to the next one's
  uint64_t reserved2[2];   // 0
};
static_assert(sizeof(DiskSection) == 64);
inline constexpr uint32_t kSectionRequired = 1;

// On disk, 4096 bytes.
struct DiskLayerHeader {
  char magic[8];
  uint32_t version;
  uint32_t header_bytes;  // 4096
  uint8_t generation[16];
  uint8_t manifest_digest[16];
  uint32_t tier;
  uint32_t encoding;
  uint32_t layer;        // ordinal over MoE layers
  uint32_t model_index;  // the model's own layer index
  uint32_t experts;
  uint32_t hidden;
  uint32_t intermediate;  // of this shard
  uint32_t shard_rank;
  uint32_t shard_world;  // 1 when unsharded
  uint32_t chunk_bytes;  // 262144
  uint32_t section_count;
  uint32_t reserved;  // 0
  uint64_t chunk_count;
  uint64_t table_offset;                                      // 4096
  uint64_t table_bytes;                                       // chunk_count * 8, rounded up to 4096
  uint64_t data_offset;                                       // behind the table, aligned
  uint64_t data_bytes;                                        // multiple of 4096
  uint64_t file_bytes;                                        // data_offset + data_bytes
  uint64_t table_checksum;                                    // XXH3-64 of the table region
  uint8_t reserved2[4096 - 152 - 64 * kSectionCountMax - 8];  // 0
  DiskSection sections[kSectionCountMax];                     // unused entries are zero
  uint64_t header_checksum;                                   // XXH3-64 of the 4088 bytes before it
};
static_assert(sizeof(DiskLayerHeader) == kHeaderBytes);

struct Section {
  std::string role;
  bool required = true;
  uint64_t offset = 0;
  uint64_t expert_bytes = 0;
  uint64_t expert_stride = 0;
};

// A run of bytes with one checksum. `section` indexes LayerLayout::sections; -1 is a gap.
struct Chunk {
  uint64_t offset = 0;  // from the start of the file
  uint32_t bytes = 0;
  int32_t section = -1;
  uint32_t expert = 0;
};

// What a layer file says of itself, and where everything in it lies.
struct LayerLayout {
  Digest128 generation{};
  Digest128 manifest_digest{};
  Encoding encoding = Encoding::kInvalid;
  uint32_t layer = 0;
  uint32_t model_index = 0;
  LayerGeometry geometry;
  uint32_t shard_rank = 0;
  uint32_t shard_world = 1;
  std::vector<Section> sections;
  uint64_t chunk_count = 0;
  uint64_t table_bytes = 0;
  uint64_t data_offset = 0;
  uint64_t data_bytes = 0;
  uint64_t file_bytes = 0;
  uint64_t table_checksum = 0;  // set by decoding; EncodeHeader takes it from the table it is given

  const Section* Find(std::string_view role) const;  // null when there is none
  // Offset of one expert's piece of a section.
  uint64_t PieceOffset(const Section& section, uint32_t expert) const {
    return section.offset + section.expert_stride * expert;
  }
};

// kData when a layer of this geometry cannot be written in this format: a dimension that is 0, not
// a multiple of 64 or above kDimensionMax, no experts or too many, more than kChunkCountMax chunks.
Result<void> CheckLayerGeometry(Encoding encoding, const LayerGeometry& geometry);

// Where the sections of a layer of this geometry lie, data and table sizes included; the identity
// fields of the result are left for the caller. REQUIRES a geometry accepted by CheckLayerGeometry.
LayerLayout PlanLayerLayout(Encoding encoding, const LayerGeometry& geometry);

// The chunks in file order; they tile [data_offset, file_bytes). The i-th table entry belongs to
// the i-th chunk.
std::vector<Chunk> ListChunks(const LayerLayout& layout);

// The 4096 bytes of the header page. `table` is the padded table region.
std::vector<std::byte> EncodeHeader(const LayerLayout& layout, std::span<const std::byte> table);
// The table region of the checksums of ListChunks, zero-padded to 4096.
std::vector<std::byte> EncodeTable(std::span<const uint64_t> checksums);

// Trusts nothing. kData with `file`, offset, expected and found on any difference from what a
// writer of this format writes: magic, version, checksums, reserved bytes, sizes, overlapping or
// unordered pieces, unknown required sections, a file_bytes other than `actual_file_bytes`.
Result<LayerLayout> DecodeHeader(std::span<const std::byte> page, uint64_t actual_file_bytes,
                                 const std::string& file);
// True for a page that another release wrote whole: magic and checksum are right, the version is
// not ours. Every format version keeps those three fields where they are. Such a file is refused,
// but it is not damaged.
bool IsOtherVersion(std::span<const std::byte> page);
// What is to be done about one: no build replaces it.
inline constexpr const char* kOtherVersionAdvice =
    "use the release that wrote it, build into another store, or remove this file";
// Checks the table region against the header and returns the chunk checksums.
Result<std::vector<uint64_t>> DecodeTable(const LayerLayout& layout,
                                          std::span<const std::byte> table,
                                          const std::string& file);

}  // namespace hotplane
