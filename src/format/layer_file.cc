#include "format/layer_file.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/format_text.h"
#include "base/units.h"
#include "format/tsym4.h"

namespace hotplane {
namespace {

static_assert(std::endian::native == std::endian::little, "disk structs are little-endian");

// No padding: the sizes of the members add up, and every member lies where the document says.
static_assert(std::has_unique_object_representations_v<DiskSection>);
static_assert(std::has_unique_object_representations_v<DiskLayerHeader>);
static_assert(std::is_trivially_copyable_v<DiskLayerHeader>);
static_assert(offsetof(DiskSection, role) == 0);
static_assert(offsetof(DiskSection, flags) == 16);
static_assert(offsetof(DiskSection, reserved) == 20);
static_assert(offsetof(DiskSection, offset) == 24);
static_assert(offsetof(DiskSection, expert_bytes) == 32);
static_assert(offsetof(DiskSection, expert_stride) == 40);
static_assert(offsetof(DiskSection, reserved2) == 48);
static_assert(offsetof(DiskLayerHeader, magic) == 0);
static_assert(offsetof(DiskLayerHeader, version) == 8);
static_assert(offsetof(DiskLayerHeader, header_bytes) == 12);
static_assert(offsetof(DiskLayerHeader, generation) == 16);
static_assert(offsetof(DiskLayerHeader, manifest_digest) == 32);
static_assert(offsetof(DiskLayerHeader, tier) == 48);
static_assert(offsetof(DiskLayerHeader, encoding) == 52);
static_assert(offsetof(DiskLayerHeader, layer) == 56);
static_assert(offsetof(DiskLayerHeader, model_index) == 60);
static_assert(offsetof(DiskLayerHeader, experts) == 64);
static_assert(offsetof(DiskLayerHeader, hidden) == 68);
static_assert(offsetof(DiskLayerHeader, intermediate) == 72);
static_assert(offsetof(DiskLayerHeader, shard_rank) == 76);
static_assert(offsetof(DiskLayerHeader, shard_world) == 80);
static_assert(offsetof(DiskLayerHeader, chunk_bytes) == 84);
static_assert(offsetof(DiskLayerHeader, section_count) == 88);
static_assert(offsetof(DiskLayerHeader, reserved) == 92);
static_assert(offsetof(DiskLayerHeader, chunk_count) == 96);
static_assert(offsetof(DiskLayerHeader, table_offset) == 104);
static_assert(offsetof(DiskLayerHeader, table_bytes) == 112);
static_assert(offsetof(DiskLayerHeader, data_offset) == 120);
static_assert(offsetof(DiskLayerHeader, data_bytes) == 128);
static_assert(offsetof(DiskLayerHeader, file_bytes) == 136);
static_assert(offsetof(DiskLayerHeader, table_checksum) == 144);
static_assert(offsetof(DiskLayerHeader, reserved2) == 152);
static_assert(offsetof(DiskLayerHeader, sections) == 2040);
static_assert(offsetof(DiskLayerHeader, header_checksum) == 4088);

struct FieldName {
  size_t offset;
  size_t bytes;
  std::string_view name;
};

#define HP_FIELD(type, member) \
  { offsetof(type, member), sizeof(type::member), #member }
constexpr FieldName kHeaderFields[] = {
    HP_FIELD(DiskLayerHeader, magic),           HP_FIELD(DiskLayerHeader, version),
    HP_FIELD(DiskLayerHeader, header_bytes),    HP_FIELD(DiskLayerHeader, generation),
    HP_FIELD(DiskLayerHeader, manifest_digest), HP_FIELD(DiskLayerHeader, tier),
    HP_FIELD(DiskLayerHeader, encoding),        HP_FIELD(DiskLayerHeader, layer),
    HP_FIELD(DiskLayerHeader, model_index),     HP_FIELD(DiskLayerHeader, experts),
    HP_FIELD(DiskLayerHeader, hidden),          HP_FIELD(DiskLayerHeader, intermediate),
    HP_FIELD(DiskLayerHeader, shard_rank),      HP_FIELD(DiskLayerHeader, shard_world),
    HP_FIELD(DiskLayerHeader, chunk_bytes),     HP_FIELD(DiskLayerHeader, section_count),
    HP_FIELD(DiskLayerHeader, reserved),        HP_FIELD(DiskLayerHeader, chunk_count),
    HP_FIELD(DiskLayerHeader, table_offset),    HP_FIELD(DiskLayerHeader, table_bytes),
    HP_FIELD(DiskLayerHeader, data_offset),     HP_FIELD(DiskLayerHeader, data_bytes),
    HP_FIELD(DiskLayerHeader, file_bytes),      HP_FIELD(DiskLayerHeader, table_checksum),
    HP_FIELD(DiskLayerHeader, reserved2),       HP_FIELD(DiskLayerHeader, sections),
    HP_FIELD(DiskLayerHeader, header_checksum)};
constexpr FieldName kSectionFields[] = {
    HP_FIELD(DiskSection, role),         HP_FIELD(DiskSection, flags),
    HP_FIELD(DiskSection, reserved),     HP_FIELD(DiskSection, offset),
    HP_FIELD(DiskSection, expert_bytes), HP_FIELD(DiskSection, expert_stride),
    HP_FIELD(DiskSection, reserved2)};
#undef HP_FIELD

const FieldName& FieldAt(std::span<const FieldName> fields, size_t offset) {
  for (const FieldName& field : fields) {
    if (offset < field.offset + field.bytes) return field;
  }
  return fields.back();
}

// A run of bytes of one expert of one section.
struct Piece {
  uint64_t offset;
  uint64_t bytes;
  uint32_t section;
  uint32_t expert;
};

std::vector<Piece> ListPieces(const LayerLayout& layout) {
  std::vector<Piece> pieces;
  pieces.reserve(layout.sections.size() * layout.geometry.experts);
  for (uint32_t section = 0; section < layout.sections.size(); ++section) {
    const Section& s = layout.sections[section];
    for (uint32_t expert = 0; expert < layout.geometry.experts; ++expert) {
      pieces.push_back({layout.PieceOffset(s, expert), s.expert_bytes, section, expert});
    }
  }
  std::ranges::sort(pieces, {}, &Piece::offset);
  return pieces;
}

constexpr uint64_t ChunksOf(uint64_t bytes) {
  return bytes / kChunkBytes + (bytes % kChunkBytes != 0 ? 1 : 0);
}

Section MakeSection(std::string role, uint64_t offset, uint64_t expert_bytes, uint64_t stride) {
  return {std::move(role), true, offset, expert_bytes, stride};
}

struct PartSize {
  const char* role;
  uint64_t expert_bytes;
};

std::vector<PartSize> PartsOf(Encoding encoding, const LayerGeometry& g) {
  switch (encoding) {
    case Encoding::kBase: {
      std::vector<PartSize> parts = {{"planes13", CodePlaneBytes(g.n13(), g.k13())},
                                     {"sc13", ScalePlaneBytes(g.n13(), g.k13())},
                                     {"planes2", CodePlaneBytes(g.n2(), g.k2())},
                                     {"sc2", ScalePlaneBytes(g.n2(), g.k2())}};
      if (g.biases) parts.push_back({"bias13", g.n13() * sizeof(float)});
      if (g.biases) parts.push_back({"bias2", g.n2() * sizeof(float)});
      return parts;
    }
    case Encoding::kDeltaQuintal:
      return {{"fp13", QuintalPlaneBytes(g.n13(), g.k13())},
              {"fp2", QuintalPlaneBytes(g.n2(), g.k2())}};
    case Encoding::kDeltaNibble:
      return {{"fp13", NibblePlaneBytes(g.n13(), g.k13())},
              {"fp2", NibblePlaneBytes(g.n2(), g.k2())}};
    case Encoding::kInvalid: break;
  }
  HP_CHECK(false);
}

uint64_t CountPlannedChunks(const LayerLayout& layout) {
  const uint64_t experts = layout.geometry.experts;
  uint64_t chunk_count = 0;
  uint64_t record_bytes = 0;
  for (const Section& section : layout.sections) {
    chunk_count += ChunksOf(section.expert_bytes) * experts;
    record_bytes += section.expert_bytes;
    const uint64_t section_bytes = section.expert_bytes * experts;
    const bool part_major = TierOf(layout.encoding) == Tier::kBase;
    if (part_major && section_bytes % kAlignBytes != 0) ++chunk_count;
  }
  const bool expert_major = TierOf(layout.encoding) == Tier::kDelta;
  if (expert_major && record_bytes % kAlignBytes != 0) chunk_count += experts;
  return chunk_count;
}

// Sections relative to the start of the data region, and data_bytes.
void PlanSections(LayerLayout& layout) {
  const uint64_t experts = layout.geometry.experts;
  uint64_t cursor = 0;
  if (TierOf(layout.encoding) == Tier::kBase) {
    for (const PartSize& part : PartsOf(layout.encoding, layout.geometry)) {
      layout.sections.push_back(
          MakeSection(part.role, cursor, part.expert_bytes, part.expert_bytes));
      cursor = RoundUp(cursor + part.expert_bytes * experts, kAlignBytes);
    }
    layout.data_bytes = cursor;
    return;
  }
  for (const PartSize& part : PartsOf(layout.encoding, layout.geometry)) {
    layout.sections.push_back(MakeSection(part.role, cursor, part.expert_bytes, 0));
    cursor += part.expert_bytes;
  }
  const uint64_t stride = RoundUp(cursor, kAlignBytes);
  for (Section& section : layout.sections) section.expert_stride = stride;
  layout.data_bytes = stride * experts;
}

// table_bytes, data_offset and file_bytes follow from chunk_count and data_bytes.
void PlaceRegions(LayerLayout& layout) {
  layout.table_bytes = RoundUp(layout.chunk_count * sizeof(uint64_t), kAlignBytes);
  const uint64_t align = layout.data_bytes >= kHugeDataBytes ? kHugeAlignBytes : kAlignBytes;
  layout.data_offset = RoundUp(kHeaderBytes + layout.table_bytes, align);
  layout.file_bytes = layout.data_offset + layout.data_bytes;
}

DiskLayerHeader MakeHeader(const LayerLayout& layout, uint64_t table_checksum) {
  DiskLayerHeader header{};
  std::memcpy(header.magic, kLayerMagic, sizeof kLayerMagic);
  header.version = kLayerFormatVersion;
  header.header_bytes = kHeaderBytes;
  std::memcpy(header.generation, layout.generation.data(), layout.generation.size());
  std::memcpy(header.manifest_digest, layout.manifest_digest.data(), layout.manifest_digest.size());
  header.tier = static_cast<uint32_t>(TierOf(layout.encoding));
  header.encoding = static_cast<uint32_t>(layout.encoding);
  header.layer = layout.layer;
  header.model_index = layout.model_index;
  header.experts = layout.geometry.experts;
  header.hidden = layout.geometry.hidden;
  header.intermediate = layout.geometry.intermediate;
  header.shard_rank = layout.shard_rank;
  header.shard_world = layout.shard_world;
  header.chunk_bytes = kChunkBytes;
  header.section_count = static_cast<uint32_t>(layout.sections.size());
  header.chunk_count = layout.chunk_count;
  header.table_offset = kHeaderBytes;
  header.table_bytes = layout.table_bytes;
  header.data_offset = layout.data_offset;
  header.data_bytes = layout.data_bytes;
  header.file_bytes = layout.file_bytes;
  header.table_checksum = table_checksum;
  for (size_t i = 0; i < layout.sections.size(); ++i) {
    const Section& section = layout.sections[i];
    DiskSection& disk = header.sections[i];
    std::memcpy(disk.role, section.role.data(), section.role.size());
    disk.flags = section.required ? kSectionRequired : 0;
    disk.offset = section.offset;
    disk.expert_bytes = section.expert_bytes;
    disk.expert_stride = section.expert_stride;
  }
  header.header_checksum = Checksum64(
      std::as_bytes(std::span(&header, 1)).first(offsetof(DiskLayerHeader, header_checksum)));
  return header;
}

// Decodes one header page; each step relies on what the steps before it have proved.
class HeaderDecoder {
 public:
  HeaderDecoder(std::span<const std::byte> page, uint64_t file_bytes, const std::string& file)
      : page_(page), actual_file_bytes_(file_bytes), file_(file) {}

  Result<LayerLayout> Decode() {
    HP_TRY(CheckPage());
    HP_TRY(ReadIdentity());
    HP_TRY(ReadSections());
    HP_TRY(CheckKnownSections());
    HP_TRY(PlaceAllSections());
    HP_TRY(CheckCanonical());
    return std::move(layout_);
  }

 private:
  Status Bad(size_t offset, std::string what) const {
    return Status::Data("layer file refused: " + std::move(what)).File(file_).At(offset);
  }
  // The sentence for a field of the header whose value is not allowed.
  template <typename Expected, typename Found>
  Status BadField(size_t offset, const Expected& expected, const Found& found) const {
    return Bad(offset, Text("header field {} has a value no writer gives it",
                            FieldAt(kHeaderFields, offset).name))
        .Expected(Text("{}", expected))
        .Found(Text("{}", found));
  }

  static size_t SectionFieldOffset(size_t index, size_t field_offset) {
    return offsetof(DiskLayerHeader, sections) + index * sizeof(DiskSection) + field_offset;
  }
  Status BadSection(size_t index, size_t field_offset, std::string what) const {
    return Bad(SectionFieldOffset(index, field_offset),
               Text("section {} \"{}\": {}", index,
                    index < layout_.sections.size() ? layout_.sections[index].role : "", what));
  }

  // Magic, version, checksum, length: nothing else of the page is worth reading before.
  Result<void> CheckPage() {
    if (actual_file_bytes_ < kHeaderBytes || page_.size() != kHeaderBytes) {
      return Fail(
          Bad(0, "it is too short to hold a header page")
              .Expected(Text("at least {} bytes", kHeaderBytes))
              .Found(Text("{} bytes", std::min<uint64_t>(actual_file_bytes_, page_.size()))));
    }
    std::memcpy(&header_, page_.data(), sizeof header_);
    if (std::memcmp(header_.magic, kLayerMagic, sizeof kLayerMagic) != 0) {
      uint64_t magic = 0;
      std::memcpy(&magic, header_.magic, sizeof magic);
      return Fail(Bad(0, "it does not begin with the magic of a layer file")
                      .Expected("\"hotplane\"")
                      .Found(Text("bytes {:016x} (little-endian)", magic)));
    }
    if (header_.version != kLayerFormatVersion) {
      return Fail(Bad(offsetof(DiskLayerHeader, version),
                      Text("it has format version {}, this build reads version {}", header_.version,
                           kLayerFormatVersion))
                      .Expected(Text("version {}", kLayerFormatVersion))
                      .Found(Text("version {}", header_.version))
                      .Advice(IsOtherVersion(page_) ? kOtherVersionAdvice
                                                    : "build the layer again: the header is "
                                                      "damaged"));
    }
    const size_t checksum_offset = offsetof(DiskLayerHeader, header_checksum);
    const uint64_t checksum = Checksum64(page_.first(checksum_offset));
    if (checksum != header_.header_checksum) {
      return Fail(Bad(checksum_offset, "its header does not match the header's checksum")
                      .Expected(Text("{:016x}", header_.header_checksum))
                      .Found(Text("{:016x}", checksum)));
    }
    if (header_.file_bytes != actual_file_bytes_) {
      return Fail(Bad(offsetof(DiskLayerHeader, file_bytes), "its length is not what it says")
                      .Expected(Text("{} bytes", header_.file_bytes))
                      .Found(Text("{} bytes", actual_file_bytes_)));
    }
    return {};
  }

  Result<void> ReadIdentity() {
    const auto known = [this](Encoding e) { return header_.encoding == static_cast<uint32_t>(e); };
    if (std::ranges::none_of(kEncodings, known)) {
      return Fail(BadField(offsetof(DiskLayerHeader, encoding), "1, 2 or 3", header_.encoding));
    }
    layout_.encoding = static_cast<Encoding>(header_.encoding);
    std::memcpy(layout_.generation.data(), header_.generation, sizeof header_.generation);
    std::memcpy(layout_.manifest_digest.data(), header_.manifest_digest,
                sizeof header_.manifest_digest);
    layout_.layer = header_.layer;
    layout_.model_index = header_.model_index;
    layout_.geometry = {header_.experts, header_.hidden, header_.intermediate};
    layout_.shard_rank = header_.shard_rank;
    layout_.shard_world = header_.shard_world;
    layout_.table_checksum = header_.table_checksum;
    if (auto geometry = CheckLayerGeometry(layout_.encoding, layout_.geometry); !geometry) {
      return Fail(std::move(geometry.error())
                      .File(file_)
                      .At(offsetof(DiskLayerHeader, experts))
                      .Because("layer file refused"));
    }
    if (header_.shard_world == 0) {
      return Fail(BadField(offsetof(DiskLayerHeader, shard_world), "at least 1", 0));
    }
    if (header_.shard_rank >= header_.shard_world) {
      return Fail(BadField(offsetof(DiskLayerHeader, shard_rank),
                           Text("below the {} of shard_world", header_.shard_world),
                           header_.shard_rank));
    }
    return {};
  }

  Result<void> ReadSections() {
    if (header_.section_count > kSectionCountMax) {
      return Fail(BadField(offsetof(DiskLayerHeader, section_count),
                           Text("at most {}", kSectionCountMax), header_.section_count));
    }
    for (size_t i = 0; i < header_.section_count; ++i) {
      const DiskSection& disk = header_.sections[i];
      Section section;
      section.role.assign(disk.role, strnlen(disk.role, sizeof disk.role));
      section.required = (disk.flags & kSectionRequired) != 0;
      section.offset = disk.offset;
      section.expert_bytes = disk.expert_bytes;
      section.expert_stride = disk.expert_stride;
      const auto allowed = [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
      };
      if (section.role.empty() || section.role.size() == sizeof disk.role ||
          !std::ranges::all_of(section.role, allowed)) {
        return Fail(BadSection(i, offsetof(DiskSection, role), "its role is not a name")
                        .Expected("1 to 15 of a-z 0-9 - _, then NUL"));
      }
      if (layout_.Find(section.role) != nullptr) {
        return Fail(BadSection(i, offsetof(DiskSection, role),
                               Text("the role {} occurs twice", section.role)));
      }
      layout_.sections.push_back(std::move(section));
    }
    return {};
  }

  // The roles that this build knows come first and lie exactly where the plan puts them.
  Result<void> CheckKnownSections() {
    layout_.geometry.biases =
        layout_.encoding == Encoding::kBase && layout_.Find("bias13") != nullptr;
    plan_ = PlanLayerLayout(layout_.encoding, layout_.geometry);
    for (size_t i = 0; i < layout_.sections.size(); ++i) {
      const Section& section = layout_.sections[i];
      if (i >= plan_.sections.size()) {
        if (!section.required) continue;
        return Fail(BadSection(i, offsetof(DiskSection, role),
                               "it is required and this build does not know it")
                        .Advice("use a newer release"));
      }
      if (section.role != plan_.sections[i].role) {
        return Fail(BadSection(i, offsetof(DiskSection, role), "another role belongs here")
                        .Expected(plan_.sections[i].role)
                        .Found(section.role));
      }
    }
    if (layout_.sections.size() < plan_.sections.size()) {
      return Fail(BadField(offsetof(DiskLayerHeader, section_count),
                           Text("at least {}", plan_.sections.size()), layout_.sections.size()));
    }
    return {};
  }

  // Chunk count, table, data offset and the place of every section, from geometry and sizes alone.
  Result<void> PlaceAllSections() {
    const uint64_t experts = layout_.geometry.experts;
    uint64_t piece_chunk_count = 0;
    for (size_t i = 0; i < layout_.sections.size(); ++i) {
      const Section& section = layout_.sections[i];
      if (section.expert_bytes == 0 || section.expert_bytes > actual_file_bytes_) {
        return Fail(BadSection(i, offsetof(DiskSection, expert_bytes), "impossible size")
                        .Expected(Text("1 to {} bytes", actual_file_bytes_))
                        .Found(Text("{} bytes", section.expert_bytes)));
      }
      const uint64_t room_bytes = actual_file_bytes_ - section.expert_bytes;
      const uint64_t last = experts - 1;
      const bool fits = section.offset <= room_bytes &&
                        (last == 0 || section.expert_stride <= room_bytes / last) &&
                        section.expert_stride * last <= room_bytes - section.offset;
      if (!fits) {
        return Fail(BadSection(i, offsetof(DiskSection, offset), "it does not end in the file")
                        .Expected(Text("an end at or before {}", actual_file_bytes_))
                        .Found(Text("offset {}, stride {}, {} experts of {} bytes", section.offset,
                                    section.expert_stride, experts, section.expert_bytes)));
      }
      // At most 2^20 + 2^46 * 2^16: no overflow, because it is checked for every section.
      piece_chunk_count += ChunksOf(section.expert_bytes) * experts;
      if (piece_chunk_count > kChunkCountMax) {
        return Fail(BadField(offsetof(DiskLayerHeader, chunk_count),
                             Text("at most {}", kChunkCountMax), piece_chunk_count));
      }
    }
    return TilePieces();
  }

  // Each piece begins where the one before it ended, or at the next 4 KiB boundary after that.
  Result<void> TilePieces() {
    const std::vector<Piece> pieces = ListPieces(layout_);
    // The table comes before the data and its size depends on the number of gaps: count first.
    uint64_t chunk_count = 0;
    uint64_t cursor = pieces.front().offset;
    const uint64_t data_offset = cursor;
    for (const Piece& piece : pieces) {
      const uint64_t aligned = RoundUp(cursor, kAlignBytes);
      if (piece.offset != cursor && piece.offset != aligned) {
        return Fail(BadSection(piece.section, offsetof(DiskSection, offset),
                               Text("expert {} leaves a hole or overlaps", piece.expert))
                        .Expected(Text("offset {} or {}", cursor, aligned))
                        .Found(Text("offset {}", piece.offset)));
      }
      chunk_count += ChunksOf(piece.bytes) + (piece.offset == cursor ? 0 : 1);
      cursor = piece.offset + piece.bytes;
    }
    const uint64_t end = RoundUp(cursor, kAlignBytes);
    if (end != cursor) ++chunk_count;
    if (chunk_count > kChunkCountMax) {
      return Fail(BadField(offsetof(DiskLayerHeader, chunk_count),
                           Text("at most {}", kChunkCountMax), chunk_count));
    }
    layout_.chunk_count = chunk_count;
    layout_.data_bytes = end - data_offset;
    PlaceRegions(layout_);
    const uint64_t shift =
        layout_.data_offset - plan_.data_offset;  // a longer table, another alignment; may be 0
    for (size_t i = 0; i < plan_.sections.size(); ++i) {
      Section& planned = plan_.sections[i];
      planned.offset += shift;
      const Section& found = layout_.sections[i];
      if (planned.offset != found.offset || planned.expert_bytes != found.expert_bytes ||
          planned.expert_stride != found.expert_stride || !found.required) {
        return Fail(BadSection(i, offsetof(DiskSection, flags), "it is not laid out as its role is")
                        .Expected(Describe(planned))
                        .Found(Describe(found)));
      }
    }
    return {};
  }

  static std::string Describe(const Section& section) {
    return Text("{}, offset {}, {} bytes per expert, stride {}",
                section.required ? "required" : "optional", section.offset, section.expert_bytes,
                section.expert_stride);
  }

  // Whatever is left (sizes, reserved bytes, unused sections, order): writing this layout again
  // must give the same page.
  Result<void> CheckCanonical() {
    if (!std::ranges::is_sorted(layout_.sections, {}, &Section::offset)) {
      return Fail(Bad(offsetof(DiskLayerHeader, sections), "its sections are not in file order"));
    }
    const DiskLayerHeader again = MakeHeader(layout_, layout_.table_checksum);
    const auto expected = std::as_bytes(std::span(&again, 1));
    const size_t offset = std::ranges::mismatch(expected, page_).in1 - expected.begin();
    if (offset == page_.size()) return {};
    const size_t sections_offset = offsetof(DiskLayerHeader, sections);
    std::string name(FieldAt(kHeaderFields, offset).name);
    size_t start = FieldAt(kHeaderFields, offset).offset;
    size_t bytes = FieldAt(kHeaderFields, offset).bytes;
    if (name == "sections") {
      const size_t index = (offset - sections_offset) / sizeof(DiskSection);
      const FieldName& field =
          FieldAt(kSectionFields, (offset - sections_offset) % sizeof(DiskSection));
      name = Text("sections[{}].{}", index, field.name);
      start = SectionFieldOffset(index, field.offset);
      bytes = field.bytes;
    }
    if (bytes > sizeof(uint64_t)) {  // reserved bytes and names: the first wrong byte is enough
      start = offset;
      bytes = 1;
    }
    uint64_t expected_value = 0;
    uint64_t found_value = 0;
    std::memcpy(&expected_value, expected.data() + start, bytes);
    std::memcpy(&found_value, page_.data() + start, bytes);
    return Fail(Bad(start, Text("header field {} has a value no writer gives it", name))
                    .Expected(Text("{}", expected_value))
                    .Found(Text("{}", found_value)));
  }

  std::span<const std::byte> page_;
  uint64_t actual_file_bytes_;
  const std::string& file_;
  DiskLayerHeader header_{};
  LayerLayout layout_;
  LayerLayout plan_;
};

}  // namespace

const Section* LayerLayout::Find(std::string_view role) const {
  const auto found = std::ranges::find(sections, role, &Section::role);
  return found == sections.end() ? nullptr : &*found;
}

Result<void> CheckLayerGeometry(Encoding encoding, const LayerGeometry& geometry) {
  const auto dimension = [](std::string_view name, uint32_t value) -> Result<void> {
    if (value > 0 && value <= kDimensionMax && value % kDimensionMultiple == 0) return {};
    return Fail(Status::Data(Text("{} size cannot be stored in planes", name))
                    .Expected(Text("a multiple of {} from {} to {}", kDimensionMultiple,
                                   kDimensionMultiple, kDimensionMax))
                    .Found(Text("{}", value)));
  };
  HP_TRY(dimension("hidden", geometry.hidden));
  HP_TRY(dimension("intermediate", geometry.intermediate));
  if (geometry.experts == 0 || geometry.experts > kExpertCountMax) {
    return Fail(Status::Data("the number of experts of a layer is out of range")
                    .Expected(Text("1 to {}", kExpertCountMax))
                    .Found(Text("{}", geometry.experts)));
  }
  const LayerLayout layout = PlanLayerLayout(encoding, geometry);
  if (layout.chunk_count > kChunkCountMax) {
    return Fail(Status::Data("the layer is too large for one layer file")
                    .Expected(Text("at most {} chunks", kChunkCountMax))
                    .Found(Text("{} chunks", layout.chunk_count)));
  }
  return {};
}

LayerLayout PlanLayerLayout(Encoding encoding, const LayerGeometry& geometry) {
  LayerLayout layout;
  layout.encoding = encoding;
  layout.geometry = geometry;
  PlanSections(layout);
  layout.chunk_count = CountPlannedChunks(layout);
  PlaceRegions(layout);
  for (Section& section : layout.sections) section.offset += layout.data_offset;
  return layout;
}

std::vector<Chunk> ListChunks(const LayerLayout& layout) {
  std::vector<Chunk> chunks;
  chunks.reserve(layout.chunk_count);
  uint64_t cursor = layout.data_offset;
  const auto close_gap = [&](uint64_t end) {
    if (end == cursor) return;
    chunks.push_back({cursor, static_cast<uint32_t>(end - cursor), -1, 0});
    cursor = end;
  };
  for (const Piece& piece : ListPieces(layout)) {
    close_gap(piece.offset);
    for (const uint64_t end = piece.offset + piece.bytes; cursor < end;) {
      const uint64_t bytes = std::min<uint64_t>(kChunkBytes, end - cursor);
      chunks.push_back({cursor, static_cast<uint32_t>(bytes), static_cast<int32_t>(piece.section),
                        piece.expert});
      cursor += bytes;
    }
  }
  close_gap(layout.file_bytes);
  HP_CHECK(chunks.size() == layout.chunk_count);
  return chunks;
}

std::vector<std::byte> EncodeHeader(const LayerLayout& layout, std::span<const std::byte> table) {
  HP_CHECK(layout.sections.size() <= kSectionCountMax);
  HP_CHECK(table.size() == layout.table_bytes);
  for (const Section& section : layout.sections) {
    HP_CHECK(section.role.size() < sizeof(DiskSection::role));
  }
  const DiskLayerHeader header = MakeHeader(layout, Checksum64(table));
  const auto bytes = std::as_bytes(std::span(&header, 1));
  return {bytes.begin(), bytes.end()};
}

std::vector<std::byte> EncodeTable(std::span<const uint64_t> checksums) {
  std::vector<std::byte> table(RoundUp(checksums.size_bytes(), kAlignBytes));
  if (!checksums.empty()) std::memcpy(table.data(), checksums.data(), checksums.size_bytes());
  return table;
}

Result<LayerLayout> DecodeHeader(std::span<const std::byte> page, uint64_t actual_file_bytes,
                                 const std::string& file) {
  return HeaderDecoder(page, actual_file_bytes, file).Decode();
}

bool IsOtherVersion(std::span<const std::byte> page) {
  if (page.size() < kHeaderBytes) return false;
  DiskLayerHeader header;
  std::memcpy(&header, page.data(), sizeof(header));
  return std::memcmp(header.magic, kLayerMagic, sizeof(kLayerMagic)) == 0 &&
         header.version != kLayerFormatVersion &&
         header.header_checksum ==
             Checksum64(page.first(offsetof(DiskLayerHeader, header_checksum)));
}

Result<std::vector<uint64_t>> DecodeTable(const LayerLayout& layout,
                                          std::span<const std::byte> table,
                                          const std::string& file) {
  const auto bad = [&](uint64_t offset, std::string what) {
    return Status::Data("layer file refused: " + std::move(what)).File(file).At(offset);
  };
  if (table.size() != layout.table_bytes) {
    return Fail(bad(kHeaderBytes, "its chunk table is cut short")
                    .Expected(Text("{} bytes", layout.table_bytes))
                    .Found(Text("{} bytes", table.size())));
  }
  const uint64_t checksum = Checksum64(table);
  if (checksum != layout.table_checksum) {
    return Fail(bad(kHeaderBytes, "its chunk table does not match the table's checksum")
                    .Expected(Text("{:016x}", layout.table_checksum))
                    .Found(Text("{:016x}", checksum)));
  }
  const size_t used_bytes = layout.chunk_count * sizeof(uint64_t);
  const auto padding = table.subspan(used_bytes);
  const auto stain = std::ranges::find_if(padding, [](std::byte b) { return b != std::byte{0}; });
  if (stain != padding.end()) {
    return Fail(bad(kHeaderBytes + used_bytes + static_cast<size_t>(stain - padding.begin()),
                    "the bytes after its chunk table are not zero")
                    .Expected("0")
                    .Found(Text("{}", std::to_integer<unsigned>(*stain))));
  }
  std::vector<uint64_t> checksums(layout.chunk_count);
  std::memcpy(checksums.data(), table.data(), used_bytes);
  return checksums;
}

}  // namespace hotplane
