// Damage of every kind, to every bit: found, named, never served.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/format_text.h"
#include "base/log.h"
#include "base/sweep_step.h"
#include "format/layer_file_samples.h"
#include "io/fault_env.h"
#include "io/mem_env.h"
#include "store/paths.h"
#include "store/store.h"
#include "store/store_samples.h"

namespace hotplane {
namespace {

constexpr LayerGeometry kOneExpert = {.experts = 1, .hidden = 64, .intermediate = 64};

class StoreDamage : public testing::Test {
 protected:
  StoreDamage()
      : generation_(BuildSampleStore(env_, "/store", SampleManifest("one", kOneExpert)).value()) {}

  std::vector<std::byte> Content(const std::string& path) { return env_.Files().at(path); }

  // What verify says, with one worker so that its buffer is the only cost.
  std::vector<VerifyFinding> Findings() {
    return generation_.Verify(pool_, nullptr, {}).value().findings;
  }

  MemEnv env_;
  Generation generation_;
  WorkerPool pool_{1};
};

TEST_F(StoreDamage, EveryBitOfHeaderAndTableIsFoundByOpeningAndNamed) {
  const std::string path = generation_.LayerPath(0, Encoding::kBase);
  for (uint64_t offset = 0; offset < 2 * kHeaderBytes; offset += kSweepStep) {
    for (int bit = 0; bit < 8; ++bit) {
      env_.CorruptByte(path, offset, std::byte{1} << bit);
      const auto opened = generation_.OpenLayer(0, Encoding::kBase);
      ASSERT_FALSE(opened.has_value()) << offset;
      ASSERT_EQ(opened.error().exit_code(), 3);
      ASSERT_EQ(opened.error().file(), path);
      const Presence presence = generation_.Probe(0, Encoding::kBase).presence;
      ASSERT_EQ(presence, offset < kHeaderBytes ? Presence::kDamaged : Presence::kPresent);
      env_.CorruptByte(path, offset, std::byte{1} << bit);
    }
  }
  env_.CorruptByte(path, 77, std::byte{1});
  const auto findings = Findings();
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].file, path);
  EXPECT_FALSE(findings[0].chunk.has_value());
}

TEST_F(StoreDamage, EveryByteOfTheDataIsFoundByVerifyAndNamed) {
  for (const Encoding encoding : kEncodings) {
    const std::string path = generation_.LayerPath(1, encoding);
    const LayerFile file = generation_.OpenLayer(1, encoding).value();
    const uint64_t file_bytes = file.layout().file_bytes;
    // Only this layer file is left to read, so that a run of all bytes stays short.
    for (const Encoding other : kEncodings) {
      (void)env_.Remove(generation_.LayerPath(0, other));
    }
    // The part-major file has gaps of every kind; a sample of the others keeps the test short.
    const uint64_t step = (encoding == Encoding::kBase ? 1 : 7) * kSweepStep;
    for (uint64_t offset = file.layout().data_offset; offset < file_bytes; offset += step) {
      const std::byte flip = std::byte{1} << (offset % 8);
      env_.CorruptByte(path, offset, flip);
      const auto findings = Findings();
      env_.CorruptByte(path, offset, flip);
      ASSERT_EQ(findings.size(), 1u) << offset;
      ASSERT_EQ(findings[0].file, path);
      ASSERT_EQ(findings[0].layer, 1u);
      const Chunk& chunk = file.chunks()[findings[0].chunk.value()];
      ASSERT_TRUE(chunk.offset <= offset && offset < chunk.offset + chunk.bytes);
      const std::string text = findings[0].status.ToString();
      ASSERT_EQ(findings[0].status.offset(), chunk.offset);
      const std::string place =
          chunk.section < 0 ? "gap"
                            : file.layout().sections[static_cast<size_t>(chunk.section)].role;
      ASSERT_NE(text.find(place), std::string::npos) << text;
    }
    ASSERT_TRUE(Findings().empty());
    ASSERT_TRUE(env_.Remove(path).has_value());
  }
}

TEST_F(StoreDamage, EveryBadChunkIsReportedAndGoodFilesStayGood) {
  const std::string base = generation_.LayerPath(0, Encoding::kBase);
  const std::string delta = generation_.LayerPath(1, Encoding::kDeltaNibble);
  const LayerFile file = generation_.OpenLayer(0, Encoding::kBase).value();
  for (const Chunk& chunk : file.chunks()) env_.CorruptByte(base, chunk.offset, std::byte{4});
  env_.CorruptByte(delta, 0, std::byte{1});
  env_.CorruptByte(JoinPath(generation_.directory(), SourceRecordName(0)), 100, std::byte{1});
  ASSERT_TRUE(env_.Remove(JoinPath(generation_.directory(), kManifestName)).has_value());
  const auto findings = Findings();
  ASSERT_EQ(findings.size(), file.chunks().size() + 3);
  for (size_t i = 0; i < file.chunks().size(); ++i) {
    EXPECT_EQ(findings[i].file, base);
    EXPECT_EQ(findings[i].chunk, i);
    EXPECT_NE(findings[i].status.expected(), findings[i].status.found());
  }
  EXPECT_EQ(findings[file.chunks().size()].layer, 0u);
  EXPECT_EQ(findings[file.chunks().size() + 1].file, delta);
  EXPECT_EQ(findings.back().status.what(), "the manifest is missing");
}

TEST_F(StoreDamage, EveryOtherLengthIsFound) {
  const std::string path = generation_.LayerPath(0, Encoding::kDeltaQuintal);
  const std::vector<std::byte> content = Content(path);
  for (uint64_t bytes = content.size(); bytes-- > 0;) {
    env_.Truncate(path, bytes);
    const TierProbe probe = generation_.Probe(0, Encoding::kDeltaQuintal);
    ASSERT_EQ(probe.presence, Presence::kDamaged);
    ASSERT_EQ(probe.reason->exit_code(), 3);
    ASSERT_FALSE(generation_.OpenLayer(0, Encoding::kDeltaQuintal).has_value());
  }
  std::vector<std::byte> longer = content;
  longer.push_back(std::byte{0});
  env_.SetFile(path, longer);
  EXPECT_EQ(generation_.Probe(0, Encoding::kDeltaQuintal).presence, Presence::kDamaged);
  EXPECT_EQ(Findings().size(), 1u);
  env_.SetFile(path, content);
  EXPECT_TRUE(Findings().empty());
}

// A whole and valid file that is not the one wanted here.
TEST_F(StoreDamage, AFileOfAnotherLayerTierModelOrManifestIsRefused) {
  const auto refusal = [&](std::span<const std::byte> content) {
    env_.SetFile(generation_.LayerPath(0, Encoding::kBase), content);
    const TierProbe probe = generation_.Probe(0, Encoding::kBase);
    EXPECT_EQ(probe.presence, Presence::kDamaged);
    return probe.reason ? probe.reason->ToString() : "accepted";
  };
  const auto expect = [&](std::span<const std::byte> content, const std::string& text) {
    const std::string found = refusal(content);
    EXPECT_NE(found.find("its " + text + " differs"), std::string::npos) << found;
  };
  expect(Content(generation_.LayerPath(1, Encoding::kBase)), "layer");
  expect(Content(generation_.LayerPath(0, Encoding::kDeltaNibble)), "encoding");

  MemEnv other_env;
  const auto other = [&](const Manifest& manifest) {
    const Generation built = BuildSampleStore(other_env, "/other", manifest).value();
    return other_env.Files().at(built.LayerPath(0, Encoding::kBase));
  };
  expect(other(SampleManifest("two", kOneExpert)), "generation");
  // The same identity under another description: what a pruned or edited model would do.
  Manifest edited = SampleManifest("one", kOneExpert);
  edited.top_k = 7;
  expect(other(edited), "manifest digest");

  LayerLayout layout = PlanLayerLayout(Encoding::kBase, kOneExpert);
  layout.generation = generation_.id();
  layout.manifest_digest = generation_.manifest_digest();
  layout.model_index = 1;
  const auto made = [](const LayerLayout& as) {
    return MakeLayerFile(as, [](const Chunk&, std::span<std::byte>) {});
  };
  env_.SetFile(generation_.LayerPath(0, Encoding::kBase), made(layout));
  EXPECT_EQ(generation_.Probe(0, Encoding::kBase).presence, Presence::kPresent);
  LayerLayout changed = layout;
  changed.model_index = 2;
  expect(made(changed), "model layer index");
  changed = layout;
  changed.shard_world = 2;
  expect(made(changed), "number of shards");
  for (const LayerGeometry& geometry :
       {LayerGeometry{2, 64, 64}, LayerGeometry{1, 128, 64}, LayerGeometry{1, 64, 128}}) {
    changed = PlanLayerLayout(Encoding::kBase, geometry);
    changed.generation = layout.generation;
    changed.manifest_digest = layout.manifest_digest;
    changed.model_index = layout.model_index;
    EXPECT_NE(refusal(made(changed)).find("differs"), std::string::npos);
  }
  std::vector<std::byte> later = made(layout);
  later[offsetof(DiskLayerHeader, version)] = std::byte{9};
  EXPECT_NE(refusal(later).find("format version 9, this build reads version 1"), std::string::npos);
}

TEST_F(StoreDamage, BytesBetweenPiecesMustBeZeroEvenWithARightChecksum) {
  const std::string path = generation_.LayerPath(0, Encoding::kBase);
  const LayerFile file = generation_.OpenLayer(0, Encoding::kBase).value();
  std::vector<std::byte> content = Content(path);
  std::vector<uint64_t> checksums = file.checksums();
  size_t stained = 0;
  for (size_t i = 0; i < file.chunks().size(); ++i) {
    const Chunk& chunk = file.chunks()[i];
    if (chunk.section >= 0) continue;
    content[chunk.offset + 5] = std::byte{9};
    checksums[i] = Checksum64(std::span(content).subspan(chunk.offset, chunk.bytes));
    stained = i;
  }
  const std::vector<std::byte> table = EncodeTable(checksums);
  const std::vector<std::byte> header = EncodeHeader(file.layout(), table);
  std::ranges::copy(header, content.begin());
  std::ranges::copy(table, content.begin() + kHeaderBytes);
  env_.SetFile(path, content);
  const auto findings = Findings();
  ASSERT_FALSE(findings.empty());
  EXPECT_EQ(findings.back().chunk, stained);
  EXPECT_EQ(findings.back().status.offset(), file.chunks()[stained].offset + 5);
}

TEST_F(StoreDamage, ADamagedManifestIsRefusedAndComesBackFromTheCheckpoint) {
  const std::string path = JoinPath(generation_.directory(), kManifestName);
  env_.CorruptByte(path, 90, std::byte{1});
  const auto opened = OpenOnly(env_, "/store");
  ASSERT_FALSE(opened.has_value());
  EXPECT_EQ(opened.error().exit_code(), 3);
  EXPECT_EQ(opened.error().file(), path);
  EXPECT_EQ(Findings().size(), 1u);
  ASSERT_TRUE(env_.Remove(path).has_value());
  const Manifest manifest = SampleManifest("one", kOneExpert);
  EXPECT_EQ(
      Store::OpenOrCreateGeneration(env_, "/store", manifest)->Probe(0, Encoding::kBase).presence,
      Presence::kPresent);
}

TEST_F(StoreDamage, ADirectoryWithTheManifestOfAnotherGenerationIsRefused) {
  const Generation other =
      Store::OpenOrCreateGeneration(env_, "/other", SampleManifest("two")).value();
  env_.SetFile(JoinPath(generation_.directory(), kManifestName),
               Content(JoinPath(other.directory(), kManifestName)));
  const auto opened = OpenOnly(env_, "/store");
  ASSERT_FALSE(opened.has_value());
  EXPECT_EQ(opened.error().expected(), ToHex(generation_.id()));
  EXPECT_EQ(opened.error().found(), ToHex(other.id()));
}

TEST_F(StoreDamage, ARebuildReplacesAFileThatWasProvedBad) {
  for (const uint64_t offset : {uint64_t{9}, uint64_t{4100}, uint64_t{8200}}) {
    const std::string path = generation_.LayerPath(0, Encoding::kBase);
    const std::vector<std::byte> good = Content(path);
    env_.CorruptByte(path, offset, std::byte{16});
    ASSERT_TRUE(BuildSampleLayer(generation_, 0, Encoding::kBase).has_value());
    EXPECT_EQ(Content(path), good) << offset;
  }
}

TEST_F(StoreDamage, ReadErrorsAreReportedByChunkAndTheRestIsChecked) {
  FaultEnv faulty(env_);
  const Generation generation = OpenOnly(faulty, "/store").value();
  const std::string path = generation.LayerPath(0, Encoding::kBase);
  const LayerFile file = generation.OpenLayer(0, Encoding::kBase).value();
  // The header, the table and then the whole data region in one read; after that chunk by chunk.
  faulty.Add(Fault{.action = FaultAction::kError,
                   .first = 3,
                   .count = 2,
                   .kind = OperationKind::kRead,
                   .path_contains = LayerFileName(0, std::nullopt, Encoding::kBase)});
  const auto report = generation.Verify(pool_, nullptr, {});
  ASSERT_TRUE(report.has_value());
  ASSERT_EQ(report->findings.size(), 1u);
  EXPECT_EQ(report->findings[0].chunk, 0u);
  EXPECT_EQ(report->findings[0].status.exit_code(), 1);
  EXPECT_EQ(report->findings[0].file, path);
}

TEST_F(StoreDamage, LackOfMemoryIsNoDamage) {
  FaultEnv faulty(env_);
  const Generation generation = OpenOnly(faulty, "/store").value();
  faulty.Add(Fault{.action = FaultAction::kError,
                   .count = Fault::kForever,
                   .kind = OperationKind::kOpen,
                   .path_contains = LayerFileName(0, std::nullopt, Encoding::kBase),
                   .error = ENOMEM});
  const TierProbe probe = generation.Probe(0, Encoding::kBase);
  EXPECT_EQ(probe.presence, Presence::kUnreadable);
  EXPECT_EQ(probe.reason->code(), StatusCode::kCapacity);
}

TEST_F(StoreDamage, ABadPageInTheCacheIsNotDamageOnTheDisk) {
  FaultEnv faulty(env_);
  const Generation generation = OpenOnly(faulty, "/store").value();
  faulty.Add(BitFlip{.path_contains = LayerFileName(0, std::nullopt, Encoding::kBase),
                     .offset = 2 * kHeaderBytes + 3,
                     .spare_direct = true});
  std::string lines;
  SetLogSink([&](LogLevel, std::string_view line) { lines += line; });
  const auto report = generation.Verify(pool_, nullptr, {});
  SetLogSink({});
  EXPECT_TRUE(report->findings.empty());
  EXPECT_NE(lines.find("wrong in the page cache"), std::string::npos);
}

}  // namespace
}  // namespace hotplane
