#include "format/layer_file.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>

#include "base/sweep_step.h"
#include "base/units.h"
#include "format/document_samples.h"
#include "format/layer_file_samples.h"

namespace hotplane {
namespace {

// The same cases in every run.
[[maybe_unused]] const bool kSeeded = setenv("RC_PARAMS", "seed=20 max_success=300", 0) == 0;

const std::string kFile = "/s/g/layer-0007.base";
constexpr LayerGeometry kSmall = {.experts = 1, .hidden = 64, .intermediate = 64};
constexpr LayerGeometry kDeepSeek = {.experts = 256, .hidden = 4096, .intermediate = 2048};

std::vector<std::byte> SampleFile(const LayerLayout& layout) {
  return MakeLayerFile(layout, [](const Chunk& chunk, std::span<std::byte> bytes) {
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>((chunk.offset + i) * 2654435761u >> 13);
    }
  });
}

std::span<const std::byte> Page(std::span<const std::byte> file) {
  return file.first(kHeaderBytes);
}

// Header, table and every chunk, as a reader checks them.
Result<LayerLayout> DecodeAll(std::span<const std::byte> file) {
  const auto page = file.first(std::min<size_t>(file.size(), kHeaderBytes));
  HP_ASSIGN(LayerLayout layout, DecodeHeader(page, file.size(), kFile));
  HP_ASSIGN(const std::vector<uint64_t> checksums,
            DecodeTable(layout, file.subspan(kHeaderBytes, layout.table_bytes), kFile));
  const std::vector<Chunk> chunks = ListChunks(layout);
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (Checksum64(file.subspan(chunks[i].offset, chunks[i].bytes)) != checksums[i]) {
      return Fail(Status::Data("chunk").File(kFile).At(chunks[i].offset));
    }
  }
  return layout;
}

// Every piece begins where the one before it ended or at the next boundary, and the chunks cover
// the data region without a hole; gaps are shorter than a page.
void ExpectTiled(const LayerLayout& layout) {
  uint64_t cursor = layout.data_offset;
  std::set<std::pair<int32_t, uint32_t>> pieces;
  for (const Chunk& chunk : ListChunks(layout)) {
    ASSERT_EQ(chunk.offset, cursor);
    ASSERT_GT(chunk.bytes, 0u);
    ASSERT_LE(chunk.bytes, kChunkBytes);
    cursor += chunk.bytes;
    if (chunk.section < 0) {
      ASSERT_LT(chunk.bytes, kAlignBytes);
      ASSERT_EQ(cursor % kAlignBytes, 0u);
      continue;
    }
    const Section& section = layout.sections[static_cast<size_t>(chunk.section)];
    const uint64_t piece = layout.PieceOffset(section, chunk.expert);
    ASSERT_EQ((chunk.offset - piece) % kChunkBytes, 0u);
    ASSERT_LE(cursor, piece + section.expert_bytes);
    if (chunk.offset == piece) {
      ASSERT_TRUE(pieces.insert({chunk.section, chunk.expert}).second);
    }
  }
  EXPECT_EQ(cursor, layout.file_bytes);
  EXPECT_EQ(pieces.size(), layout.sections.size() * layout.geometry.experts);
  EXPECT_EQ(layout.file_bytes % kAlignBytes, 0u);
}

TEST(LayerFile, DeepSeekGeometryHasTheSizesOfTheDesign) {
  const LayerLayout base = PlanLayerLayout(Encoding::kBase, kDeepSeek);
  EXPECT_EQ(base.data_bytes, 256 * 27 * kMiB / 4);
  const LayerLayout nibble = PlanLayerLayout(Encoding::kDeltaNibble, kDeepSeek);
  EXPECT_EQ(nibble.Find("fp13")->expert_stride, 12 * kMiB);
  const LayerLayout quintal = PlanLayerLayout(Encoding::kDeltaQuintal, kDeepSeek);
  EXPECT_EQ(quintal.Find("fp13")->expert_stride, 15 * kMiB / 2);
  EXPECT_EQ(quintal.Find("fp2")->offset, quintal.Find("fp13")->offset + 5 * kMiB);
}

TEST(LayerFile, BasePartsAreContiguousOverExpertsAndStartOnPages) {
  const LayerLayout layout = PlanLayerLayout(Encoding::kBase, {3, 64, 192});
  std::vector<std::string> roles;
  uint64_t end = layout.data_offset;
  for (const Section& section : layout.sections) {
    roles.push_back(section.role);
    EXPECT_EQ(section.offset, RoundUp(end, kAlignBytes));
    EXPECT_EQ(section.expert_stride, section.expert_bytes);
    end = section.offset + 3 * section.expert_bytes;
  }
  EXPECT_EQ(roles, (std::vector<std::string>{"planes13", "sc13", "planes2", "sc2"}));
}

TEST(LayerFile, DeltaRecordsStartOnPages) {
  const LayerLayout layout = PlanLayerLayout(Encoding::kDeltaQuintal, {3, 64, 64});
  const Section& fp13 = *layout.Find("fp13");
  const Section& fp2 = *layout.Find("fp2");
  EXPECT_EQ(fp13.expert_bytes, 128u * 64 * 5 / 16);
  EXPECT_EQ(fp2.expert_bytes, 64u * 64 * 5 / 16);
  EXPECT_EQ(fp2.offset, fp13.offset + fp13.expert_bytes);
  EXPECT_EQ(fp13.expert_stride, RoundUp(fp13.expert_bytes + fp2.expert_bytes, kAlignBytes));
  EXPECT_EQ(fp2.expert_stride, fp13.expert_stride);
}

RC_GTEST_PROP(LayerFileProperty, ChunksTileAndHeadersRoundTrip, ()) {
  const Encoding encoding =
      *rc::gen::element(Encoding::kBase, Encoding::kDeltaQuintal, Encoding::kDeltaNibble);
  const LayerGeometry geometry = {*rc::gen::inRange<uint32_t>(1, 20),
                                  64 * *rc::gen::inRange<uint32_t>(1, 40),
                                  64 * *rc::gen::inRange<uint32_t>(1, 40)};
  LayerLayout layout = SampleLayout(encoding, geometry);
  layout.shard_world = *rc::gen::inRange<uint32_t>(1, 9);
  layout.shard_rank = *rc::gen::inRange<uint32_t>(0, layout.shard_world);
  if (*rc::gen::arbitrary<bool>()) {
    layout = WithOptionalSection(layout, "extra", *rc::gen::inRange<uint64_t>(1, 600'000));
  }
  ExpectTiled(layout);
  const std::vector<std::byte> table(layout.table_bytes);
  const std::vector<std::byte> page = EncodeHeader(layout, table);
  const Result<LayerLayout> decoded = DecodeHeader(page, layout.file_bytes, kFile);
  RC_ASSERT(decoded.has_value());
  RC_ASSERT(decoded->generation == layout.generation);
  RC_ASSERT(decoded->geometry == layout.geometry);
  RC_ASSERT(decoded->sections.size() == layout.sections.size());
  RC_ASSERT(EncodeHeader(*decoded, table) == page);
}

TEST(LayerFile, EveryFlippedBitIsFoundAndNamed) {
  for (const Encoding encoding : kEncodings) {
    std::vector<std::byte> file = SampleFile(SampleLayout(encoding, kSmall));
    ASSERT_TRUE(DecodeAll(file).has_value());
    for (size_t bit = 0; bit < file.size() * 8; bit += kSweepStep) {
      file[bit / 8] ^= std::byte{1} << (bit % 8);
      const auto decoded = DecodeAll(file);
      ASSERT_FALSE(decoded.has_value()) << "bit " << bit;
      ASSERT_EQ(decoded.error().exit_code(), 3);
      ASSERT_EQ(decoded.error().file(), kFile);
      ASSERT_TRUE(decoded.error().offset().has_value());
      file[bit / 8] ^= std::byte{1} << (bit % 8);
    }
  }
}

// Behind a right checksum, a header is refused or means what it says: no bit is ignored.
TEST(LayerFile, NoBitOfTheHeaderIsIgnored) {
  const std::vector<std::byte> file = SampleFile(SampleLayout(Encoding::kDeltaNibble, kSmall));
  std::vector<std::byte> page(file.begin(), file.begin() + kHeaderBytes);
  const std::vector<std::byte> table(file.begin() + kHeaderBytes, file.begin() + 8192);
  size_t accepted_count = 0;
  for (size_t bit = 0; bit < offsetof(DiskLayerHeader, header_checksum) * 8; ++bit) {
    std::vector<std::byte> damaged = page;
    damaged[bit / 8] ^= std::byte{1} << (bit % 8);
    FixHeaderChecksum(damaged);
    const auto decoded = DecodeHeader(damaged, file.size(), kFile);
    if (!decoded) {
      ASSERT_EQ(decoded.error().exit_code(), 3) << decoded.error().ToString();
      ASSERT_EQ(decoded.error().file(), kFile);
      continue;
    }
    ++accepted_count;
    const size_t byte = bit / 8;
    const bool identity = (byte >= 16 && byte < 48) || (byte >= 56 && byte < 64) ||
                          (byte >= 76 && byte < 84) || (byte >= 144 && byte < 152);
    ASSERT_TRUE(identity) << "byte " << byte;
  }
  // 32 bytes of digests, layer, model_index, table_checksum; shard_world but for its last bit.
  EXPECT_EQ(accepted_count, (32 + 8 + 8) * 8u + 31);
}

TEST(LayerFile, EveryOtherLengthIsRefused) {
  std::vector<std::byte> file = SampleFile(SampleLayout(Encoding::kBase, kSmall));
  for (size_t bytes = 0; bytes < file.size(); ++bytes) {
    const auto decoded = DecodeAll(std::span(file).first(bytes));
    ASSERT_FALSE(decoded.has_value()) << bytes;
    ASSERT_EQ(decoded.error().exit_code(), 3);
    ASSERT_NE(decoded.error().found().find(Text("{} bytes", bytes)), std::string::npos);
  }
  file.push_back(std::byte{0});
  EXPECT_EQ(DecodeAll(file).error().found(), Text("{} bytes", file.size()));
}

TEST(LayerFile, AnotherVersionSaysWhichItIsAndWhichIsRead) {
  std::vector<std::byte> file = SampleFile(SampleLayout(Encoding::kBase, kSmall));
  file[offsetof(DiskLayerHeader, version)] = std::byte{2};
  const Status status = DecodeHeader(Page(file), file.size(), kFile).error();
  EXPECT_EQ(status.ToString(),
            "layer file refused: it has format version 2, this build reads version 1\n"
            "  file      /s/g/layer-0007.base\n"
            "  offset    8\n"
            "  expected  version 1\n"
            "  found     version 2\n"
            "  to fix    build the layer again: the header is damaged");
  // Written whole, no build replaces it.
  const uint64_t checksum =
      Checksum64(std::span(file).first(offsetof(DiskLayerHeader, header_checksum)));
  std::memcpy(&file[offsetof(DiskLayerHeader, header_checksum)], &checksum, sizeof(checksum));
  EXPECT_EQ(DecodeHeader(Page(file), file.size(), kFile).error().advice(), kOtherVersionAdvice);
}

// Writes one value over a field, makes the checksum right, and returns how the page is refused.
class HeaderDamage {
 public:
  explicit HeaderDamage(const LayerLayout& layout) : file_(SampleFile(layout)) {}
  template <typename T>
  HeaderDamage& Set(size_t offset, T value) {
    std::memcpy(file_.data() + offset, &value, sizeof value);
    return *this;
  }
  Status Refusal() {
    FixHeaderChecksum(std::span(file_).first(kHeaderBytes));
    const auto decoded = DecodeHeader(Page(file_), file_.size(), kFile);
    return decoded ? Status::Usage("accepted") : decoded.error();
  }

 private:
  std::vector<std::byte> file_;
};

constexpr size_t SectionField(size_t index, size_t field) {
  return offsetof(DiskLayerHeader, sections) + index * sizeof(DiskSection) + field;
}

TEST(LayerFile, HostileHeadersAreRefusedWithTheFieldNamed) {
  const LayerLayout base = SampleLayout(Encoding::kBase, kSmall);
  const auto refuse = [&](size_t offset, auto value) {
    return HeaderDamage(base).Set(offset, value).Refusal();
  };
  const auto expect = [](const Status& status, uint64_t offset, const std::string& text) {
    EXPECT_EQ(status.exit_code(), 3);
    EXPECT_EQ(status.offset(), offset) << status.ToString();
    EXPECT_NE(status.ToString().find(text), std::string::npos) << status.ToString();
  };
  expect(refuse(52, uint32_t{0}), 52, "encoding");
  expect(refuse(48, uint32_t{2}), 48, "tier");
  expect(refuse(12, uint32_t{8192}), 12, "header_bytes");
  expect(refuse(64, uint32_t{0}), 64, "number of experts");
  expect(refuse(64, UINT32_MAX), 64, "number of experts");
  expect(refuse(68, uint32_t{65}), 64, "hidden size");
  expect(refuse(72, UINT32_MAX), 64, "intermediate size");
  expect(refuse(72, uint32_t{0}), 64, "intermediate size");
  expect(refuse(80, uint32_t{0}), 80, "shard_world");
  expect(refuse(76, uint32_t{1}), 76, "shard_rank");
  expect(refuse(84, uint32_t{4096}), 84, "chunk_bytes");
  expect(refuse(88, uint32_t{33}), 88, "section_count");
  expect(refuse(88, UINT32_MAX), 88, "section_count");
  expect(refuse(88, uint32_t{3}), 88, "section_count");
  expect(refuse(96, UINT64_MAX), 96, "chunk_count");
  expect(refuse(112, UINT64_MAX), 112, "table_bytes");
  expect(refuse(1000, uint8_t{1}), 1000, "reserved2");
  expect(refuse(SectionField(0, 0), 'x'), SectionField(0, 0), "another role");
  expect(refuse(SectionField(0, 9), 'x'), SectionField(0, 9), "sections[0].role");
  expect(refuse(SectionField(1, 16), uint32_t{0}), SectionField(1, 16), "required");
  expect(refuse(SectionField(1, 16), uint32_t{3}), SectionField(1, 16), "sections[1].flags");
  expect(refuse(SectionField(0, 24), UINT64_MAX), SectionField(0, 24), "end in the file");
  expect(refuse(SectionField(0, 32), uint64_t{0}), SectionField(0, 32), "impossible size");
  expect(refuse(SectionField(0, 32), UINT64_MAX), SectionField(0, 32), "impossible size");
  expect(refuse(SectionField(2, 24), base.sections[0].offset), SectionField(2, 24), "overlaps");
  expect(refuse(SectionField(2, 24), base.sections[2].offset + 4096), SectionField(2, 24), "hole");
  expect(refuse(SectionField(0, 40), uint64_t{1} << 40), SectionField(0, 16), "stride");
}

TEST(LayerFile, AHugeHeaderCostsNothing) {
  LayerLayout layout = SampleLayout(Encoding::kBase, {kExpertCountMax, 64, 64});
  const std::vector<std::byte> table(layout.table_bytes);
  EXPECT_TRUE(DecodeHeader(EncodeHeader(layout, table), layout.file_bytes, kFile).has_value());
  layout = WithOptionalSection(layout, "x", uint64_t{1} << 40);
  layout.table_bytes = kAlignBytes;
  const auto decoded = DecodeHeader(EncodeHeader(layout, std::vector<std::byte>(kAlignBytes)),
                                    layout.file_bytes, kFile);
  ASSERT_FALSE(decoded.has_value());
  EXPECT_EQ(decoded.error().offset(), offsetof(DiskLayerHeader, chunk_count));
}

TEST(LayerFile, UnknownOptionalSectionsAreSkippedAndCovered) {
  for (const Encoding encoding : kEncodings) {
    const LayerLayout layout =
        WithOptionalSection(SampleLayout(encoding, {3, 64, 128}), "extra", 300'001);
    std::vector<std::byte> file = SampleFile(layout);
    const auto decoded = DecodeAll(file);
    ASSERT_TRUE(decoded.has_value()) << decoded.error().ToString();
    ExpectTiled(*decoded);
    EXPECT_FALSE(decoded->Find("extra")->required);
    file[decoded->Find("extra")->offset + 900'002] ^= std::byte{1};
    EXPECT_FALSE(DecodeAll(file).has_value());
  }
}

TEST(LayerFile, UnknownRequiredSectionsAreRefused) {
  LayerLayout layout = WithOptionalSection(SampleLayout(Encoding::kBase, kSmall), "extra", 512);
  layout.sections.back().required = true;
  const auto decoded = DecodeAll(SampleFile(layout));
  ASSERT_FALSE(decoded.has_value());
  EXPECT_NE(decoded.error().what().find("\"extra\": it is required"), std::string::npos);
}

TEST(LayerFile, SectionNamesMustBeNamesAndDiffer) {
  const LayerLayout layout =
      WithOptionalSection(SampleLayout(Encoding::kBase, kSmall), "extra", 512);
  const size_t role = SectionField(4, 0);
  EXPECT_EQ(HeaderDamage(layout).Set(role, '\0').Refusal().offset(), role);
  EXPECT_EQ(HeaderDamage(layout).Set(role, 'B').Refusal().offset(), role);
  EXPECT_EQ(HeaderDamage(layout).Set(role, "sc2").Refusal().offset(), role);
  EXPECT_EQ(HeaderDamage(layout).Set(role, std::array<char, 16>{'a', 'b'}).Refusal().what(),
            "accepted");
}

TEST(LayerFile, TablePaddingMustBeZero) {
  std::vector<std::byte> file = SampleFile(SampleLayout(Encoding::kBase, kSmall));
  file[8191] = std::byte{1};
  const uint64_t checksum = Checksum64(std::span(file).subspan(kHeaderBytes, kAlignBytes));
  std::memcpy(file.data() + offsetof(DiskLayerHeader, table_checksum), &checksum, 8);
  FixHeaderChecksum(std::span(file).first(kHeaderBytes));
  const auto decoded = DecodeAll(file);
  ASSERT_FALSE(decoded.has_value());
  EXPECT_EQ(decoded.error().offset(), 8191u);
}

TEST(LayerFile, GeometryOutOfRangeIsRefused) {
  const auto check = [](LayerGeometry g) { return CheckLayerGeometry(Encoding::kBase, g); };
  EXPECT_TRUE(check(kDeepSeek).has_value());
  EXPECT_TRUE(check({384, 7168, 2048}).has_value());
  EXPECT_FALSE(check({1, 2880 + 32, 64}).has_value());
  EXPECT_FALSE(check({1, 64, 0}).has_value());
  EXPECT_FALSE(check({0, 64, 64}).has_value());
  EXPECT_FALSE(check({kExpertCountMax, kDimensionMax, kDimensionMax}).has_value());
}

TEST(LayerFile, TheDocumentShowsTheseBytes) {
  const LayerLayout layout = SampleLayout(Encoding::kBase, kSmall);
  const std::vector<std::byte> file =
      MakeLayerFile(layout, [](const Chunk& chunk, std::span<std::byte> bytes) {
        constexpr std::byte kFill[] = {std::byte{0xe4}, std::byte{0x7f}, std::byte{0x1b},
                                       std::byte{0x7e}};
        std::ranges::fill(bytes, kFill[chunk.section]);
      });
  ASSERT_TRUE(DecodeAll(file).has_value());
  const std::string dump = HexDump(file);
  EXPECT_EQ(DocumentBlock("docs/format/layer-file.md", "layer_file_test"), dump)
      << "put this into the document:\n"
      << dump;
}

}  // namespace
}  // namespace hotplane
