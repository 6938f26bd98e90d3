#include "engine/expert_records.h"

#include <gtest/gtest.h>

#include <thread>

#include "boot/boot_testing.h"
#include "engine/export.h"
#include "io/fault_env.h"

namespace hotplane {
namespace {

using Bytes = std::vector<std::byte>;

// A built store; what each record must be is what `export` writes, expert by expert.
class ExpertRecordsTest : public testing::Test {
 protected:
  void SetUp() override {
    SynthCheckpointOptions model = SmallModel();
    // Several chunks per part, so that a bad one is neither the first nor the last.
    model.geometry = {3, 1024, 512};
    model.main_layers = 2;
    model.mtp_layers = 0;
    WriteCheckpoint(env_, model);
    const Result<BuildReport> built = BuildStore(env_, BothTiers());
    ASSERT_TRUE(built.has_value()) << built.error().ToString();
    OpenIn(env_);
  }

  void OpenIn(Env& env, RecordOptions options = {}) {
    records_.reset();
    generation_.emplace(Store::Open(env, kTestStore).value().OpenGeneration().value());
    options.worker_count = 2;
    records_ = std::make_unique<ExpertRecords>(*generation_, options);
  }

  Bytes Exported(RecordKind kind, ExpertKey key) {
    const Generation generation = Store::Open(env_, kTestStore).value().OpenGeneration().value();
    std::vector<std::string> parts = {"fp13", "fp2"};
    if (kind == RecordKind::kBase) parts = {"planes13", "sc13", "planes2", "sc2"};
    Bytes joined;
    for (const std::string& part : parts) {
      ExportOptions options;
      options.layer = key.layer;
      options.expert = key.expert;
      options.part = part;
      options.encoded = kind == RecordKind::kDelta;
      options.output_path = "/exported";
      const auto report = ExportPart(generation, options);
      EXPECT_TRUE(report.has_value()) << report.error().ToString();
      const Bytes bytes = ReadWholeFile(env_, "/exported", 1 << 30).value();
      joined.insert(joined.end(), bytes.begin(), bytes.end());
    }
    return joined;
  }

  Result<Bytes> Read(RecordKind kind, ExpertKey key) {
    HP_ASSIGN(const RecordShape shape, records_->reader().Shape(kind, key.layer));
    Bytes bytes(shape.bytes);
    HP_TRY(records_->Read(kind, key, bytes));
    return bytes;
  }

  std::string PathOf(uint32_t layer, Encoding encoding) const {
    return generation_->LayerPath(layer, encoding);
  }
  uint64_t OffsetOf(uint32_t layer, Encoding encoding, std::string_view role,
                    uint32_t expert) const {
    const LayerLayout layout = generation_->Probe(layer, encoding).layout;
    return layout.PieceOffset(*layout.Find(role), expert);
  }

  MemEnv env_;
  std::optional<Generation> generation_;
  std::unique_ptr<ExpertRecords> records_;
};

Bytes Joined(const PinnedRecord& record) {
  Bytes bytes;
  for (const auto& part : record.parts) bytes.insert(bytes.end(), part.begin(), part.end());
  return bytes;
}

TEST_F(ExpertRecordsTest, RecordsAreWhatExportWrites) {
  for (const RecordKind kind : kRecordKinds)
    for (uint32_t layer = 0; layer < 2; ++layer)
      for (uint32_t expert = 0; expert < 3; ++expert) {
        const ExpertKey key{layer, expert};
        const Bytes truth = Exported(kind, key);
        EXPECT_EQ(Read(kind, key).value(), truth) << RecordKindName(kind);
        for (const RecordAccess access : {RecordAccess::kDemand, RecordAccess::kBulk})
          EXPECT_EQ(Joined(records_->Get(kind, key, access).value()), truth);
      }
}

TEST_F(ExpertRecordsTest, NibblesServeWithoutQuintalsAndWithoutABase) {
  BuildOptions nibbles;
  nibbles.encodings = {Encoding::kDeltaNibble};
  nibbles.worker_count = 1;
  const Bytes truth = Exported(RecordKind::kFp4, {1, 2});
  ASSERT_TRUE(BuildStore(env_, nibbles).has_value());
  ASSERT_TRUE(env_.Remove(PathOf(1, Encoding::kBase)).has_value());
  EXPECT_EQ(Read(RecordKind::kFp4, {1, 2}).value(), truth);
  // Both are there: quintals are what is stored, as a boot plan attaches them.
  EXPECT_EQ(records_->reader().ProbeDelta(1)->encoding, Encoding::kDeltaQuintal);
  ASSERT_TRUE(env_.Remove(PathOf(1, Encoding::kDeltaQuintal)).has_value());
  OpenIn(env_);
  EXPECT_EQ(records_->reader().ProbeDelta(1)->encoding, Encoding::kDeltaNibble);
  EXPECT_EQ(Read(RecordKind::kDelta, {1, 2}).value(), truth);
  EXPECT_EQ(Read(RecordKind::kFp4, {1, 2}).value(), truth);
}

TEST_F(ExpertRecordsTest, PresenceIsToldByTheHeaderAndFailsClosed) {
  const std::string path = PathOf(0, Encoding::kDeltaQuintal);
  FaultEnv watched(env_);
  OpenIn(watched);
  watched.ClearLog();
  EXPECT_EQ(records_->reader().ProbeDelta(0)->presence, Presence::kPresent);
  for (const Operation& operation : watched.Log()) {
    if (operation.kind == OperationKind::kRead) {
      EXPECT_LE(operation.offset + operation.bytes, 4096u);
    }
  }

  env_.CorruptByte(path, 100, std::byte{1});
  const auto damaged = records_->reader().ProbeDelta(0).value();
  EXPECT_EQ(damaged.presence, Presence::kDamaged);
  EXPECT_EQ(damaged.reason->file(), path);
  EXPECT_EQ(Read(RecordKind::kDelta, {0, 0}).error().code(), StatusCode::kData);
  ASSERT_TRUE(env_.Remove(path).has_value());
  EXPECT_EQ(records_->reader().ProbeDelta(0)->presence, Presence::kAbsent);
  EXPECT_EQ(Read(RecordKind::kFp4, {0, 0}).error().code(), StatusCode::kData);
  EXPECT_EQ(records_->reader().ProbeDelta(2).error().code(), StatusCode::kUsage);
  EXPECT_TRUE(Read(RecordKind::kBase, {0, 0}).has_value());
}

TEST_F(ExpertRecordsTest, AFileThatAppearsLaterIsFound) {
  const std::string path = PathOf(0, Encoding::kDeltaQuintal);
  const Bytes content = env_.Files().at(path);
  ASSERT_TRUE(env_.Remove(path).has_value());
  EXPECT_FALSE(Read(RecordKind::kDelta, {0, 1}).has_value());
  env_.SetFile(path, content);
  EXPECT_EQ(Read(RecordKind::kDelta, {0, 1}).value(), Exported(RecordKind::kDelta, {0, 1}));
}

TEST_F(ExpertRecordsTest, AFileIsOpenedOnceAndOnlyWhenWanted) {
  const std::string delta = PathOf(0, Encoding::kDeltaQuintal);
  std::vector<Bytes> truth;
  for (uint32_t expert = 0; expert < 3; ++expert)
    truth.push_back(Exported(RecordKind::kDelta, {0, expert}));
  env_.ResetCounts();
  EXPECT_TRUE(Read(RecordKind::kBase, {0, 0}).has_value());
  EXPECT_EQ(env_.open_count(delta), 0u);
  std::vector<Bytes> buffers(3, Bytes(records_->reader().Shape(RecordKind::kDelta, 0)->bytes));
  std::vector<RecordRequest> requests;
  for (uint32_t expert = 0; expert < 3; ++expert) requests.push_back({expert, buffers[expert]});
  ASSERT_TRUE(records_->ReadBatch(RecordKind::kDelta, 0, requests).has_value());
  EXPECT_EQ(buffers, truth);
  EXPECT_EQ(env_.open_count(delta), 1u);
  EXPECT_EQ(env_.open_count(PathOf(1, Encoding::kDeltaQuintal)), 0u);
}

TEST_F(ExpertRecordsTest, EveryReadIsVerifiedNotOnlyTheFirst) {
  const std::string path = PathOf(1, Encoding::kDeltaQuintal);
  const uint64_t offset = OffsetOf(1, Encoding::kDeltaQuintal, "fp13", 1) + kChunkBytes + 17;
  ASSERT_TRUE(Read(RecordKind::kDelta, {1, 1}).has_value());
  env_.CorruptByte(path, offset, std::byte{4});
  const Status error = Read(RecordKind::kDelta, {1, 1}).error();
  EXPECT_EQ(error.code(), StatusCode::kData);
  EXPECT_EQ(error.file(), path);
  EXPECT_EQ(error.offset(), offset - 17);
  EXPECT_NE(error.what().find("layer 1, section fp13, expert 1"), std::string::npos);
  EXPECT_EQ(Read(RecordKind::kFp4, {1, 1}).error().code(), StatusCode::kData);
  EXPECT_EQ(records_->Get(RecordKind::kDelta, {1, 1}, RecordAccess::kDemand).error().code(),
            StatusCode::kData);
  // The neighbours and the engine stay usable.
  EXPECT_EQ(Read(RecordKind::kDelta, {1, 0}).value(), Exported(RecordKind::kDelta, {1, 0}));
  env_.CorruptByte(path, offset, std::byte{4});
  EXPECT_EQ(Read(RecordKind::kDelta, {1, 1}).value(), Exported(RecordKind::kDelta, {1, 1}));
}

TEST_F(ExpertRecordsTest, ABadPageInThePageCacheIsReadPastIt) {
  for (const RecordKind kind : kRecordKinds) {
    const Encoding encoding = kind == RecordKind::kBase ? Encoding::kBase : Encoding::kDeltaQuintal;
    FaultEnv faulty(env_);
    OpenIn(faulty);
    const std::string role = kind == RecordKind::kBase ? "planes2" : "fp2";
    faulty.Add(BitFlip{.path_contains = PathOf(0, encoding),
                       .offset = OffsetOf(0, encoding, role, 2) + 5,
                       .flipped_bits = std::byte{16},
                       .spare_direct = true});
    EXPECT_EQ(Read(kind, {0, 2}).value(), Exported(kind, {0, 2}));
    EXPECT_GT(records_->reader().stats().bytes_reread, 0u);
  }
}

TEST_F(ExpertRecordsTest, DiskErrorsAndTruncationAreToldAndPass) {
  FaultEnv faulty(env_);
  OpenIn(faulty);
  const std::string path = PathOf(0, Encoding::kDeltaQuintal);
  ASSERT_TRUE(Read(RecordKind::kDelta, {0, 0}).has_value());
  faulty.Add(
      Fault{.action = FaultAction::kError, .kind = OperationKind::kRead, .path_contains = path});
  EXPECT_EQ(Read(RecordKind::kDelta, {0, 0}).error().code(), StatusCode::kSystem);
  EXPECT_TRUE(Read(RecordKind::kDelta, {0, 0}).has_value());
  faulty.Add(Fault{.action = FaultAction::kShort,
                   .count = 3,
                   .kind = OperationKind::kRead,
                   .path_contains = path});
  EXPECT_EQ(Read(RecordKind::kDelta, {0, 0}).value(), Exported(RecordKind::kDelta, {0, 0}));
  env_.Truncate(path, OffsetOf(0, Encoding::kDeltaQuintal, "fp13", 2) + 100);
  EXPECT_EQ(Read(RecordKind::kDelta, {0, 2}).error().code(), StatusCode::kData);
  EXPECT_TRUE(Read(RecordKind::kDelta, {0, 0}).has_value());
}

TEST_F(ExpertRecordsTest, QuintalsOfOtherWeightsAreRefused) {
  const std::string path = PathOf(0, Encoding::kDeltaQuintal);
  // A store whose checksums are right and whose tiers do not belong together.
  ASSERT_TRUE(env_.Remove(path).has_value());
  const auto lock = generation_->LockLayer(0, LockWait::kBlock).value();
  const auto writer = generation_->CreateLayer(0, Encoding::kDeltaQuintal).value();
  for (const Section& section : writer->layout().sections)
    for (uint32_t expert = 0; expert < 3; ++expert)
      ASSERT_TRUE(
          writer->WritePiece(section.role, expert, Bytes(section.expert_bytes, std::byte{255}))
              .has_value());
  ASSERT_TRUE(writer->Publish().has_value());
  const Status error = Read(RecordKind::kFp4, {0, 0}).error();
  EXPECT_EQ(error.code(), StatusCode::kData);
  EXPECT_EQ(error.file(), path);
}

TEST_F(ExpertRecordsTest, UsageIsChecked) {
  Bytes small(8);
  for (const RecordKind kind : kRecordKinds) {
    EXPECT_EQ(records_->Read(kind, {0, 0}, small).error().code(), StatusCode::kUsage);
    EXPECT_EQ(Read(kind, {2, 0}).error().code(), StatusCode::kUsage);
    EXPECT_EQ(Read(kind, {0, 3}).error().code(), StatusCode::kUsage);
    EXPECT_EQ(records_->Get(kind, {0, 3}, RecordAccess::kDemand).error().code(),
              StatusCode::kUsage);
    const uint32_t experts[] = {0, 9};
    EXPECT_EQ(records_->Prefetch(kind, 0, experts).error().code(), StatusCode::kUsage);
    const RecordRequest requests[] = {{9, small}};
    EXPECT_EQ(records_->ReadBatch(kind, 0, requests).error().code(), StatusCode::kUsage);
  }
  EXPECT_EQ(records_->reader().Shape(RecordKind::kInvalid, 0).error().code(), StatusCode::kUsage);
}

TEST_F(ExpertRecordsTest, TheCacheReadsTheStoreOnce) {
  RecordOptions options;
  options.delta_cache_bytes = 64 << 20;
  options.fp4_cache_bytes = 1;
  OpenIn(env_, options);
  const uint32_t experts[] = {0, 1, 2};
  EXPECT_EQ(records_->Prefetch(RecordKind::kDelta, 0, experts).value(), 3u);
  const uint64_t read = records_->reader().stats().bytes_read;
  for (const uint32_t expert : experts) {
    const auto record =
        records_->Get(RecordKind::kDelta, {0, expert}, RecordAccess::kDemand).value();
    EXPECT_EQ(Joined(record), Exported(RecordKind::kDelta, {0, expert}));
    EXPECT_TRUE(record.handle.cached());
  }
  EXPECT_EQ(records_->reader().stats().bytes_read, read);
  EXPECT_EQ(records_->cache_stats(RecordKind::kDelta).hits, 3u);
  EXPECT_EQ(records_->cache_stats(RecordKind::kBase).hits, 0u);
  // A cache that cannot be: told by the call that needs it, the others go on.
  EXPECT_EQ(records_->Get(RecordKind::kFp4, {0, 0}, RecordAccess::kDemand).error().code(),
            StatusCode::kUsage);
  EXPECT_TRUE(records_->Get(RecordKind::kBase, {0, 0}, RecordAccess::kDemand).has_value());
}

TEST_F(ExpertRecordsTest, AResidentBaseIsNotReadAgain) {
  const Bytes truth = Exported(RecordKind::kFp4, {0, 1});
  const Bytes base_truth = Exported(RecordKind::kBase, {0, 1});
  Bytes parts[4];
  for (uint32_t expert = 0; expert < 3; ++expert) {
    const Bytes base = Exported(RecordKind::kBase, {0, expert});
    const RecordShape shape = records_->reader().Shape(RecordKind::kBase, 0).value();
    for (size_t i = 0; i < 4; ++i) {
      const auto piece = std::span(base).subspan(shape.parts[i].offset, shape.parts[i].bytes);
      parts[i].insert(parts[i].end(), piece.begin(), piece.end());
    }
  }
  OpenIn(env_);
  records_->reader().SetResident(0, {parts[0], parts[1], parts[2], parts[3]});
  env_.ResetCounts();
  EXPECT_EQ(Read(RecordKind::kFp4, {0, 1}).value(), truth);
  EXPECT_EQ(Read(RecordKind::kBase, {0, 1}).value(), base_truth);
  const auto pinned = records_->Get(RecordKind::kBase, {0, 1}, RecordAccess::kDemand).value();
  EXPECT_EQ(Joined(pinned), base_truth);
  EXPECT_EQ(pinned.parts[0].data(), parts[0].data() + pinned.parts[0].size());
  EXPECT_EQ(env_.open_count(PathOf(0, Encoding::kBase)), 0u);
}

TEST_F(ExpertRecordsTest, ManyThreadsReadRightBytes) {
  RecordOptions options;
  options.delta_cache_bytes = 3 * records_->reader().Shape(RecordKind::kDelta, 0)->bytes;
  OpenIn(env_, options);
  std::vector<Bytes> truth;
  for (uint32_t i = 0; i < 6; ++i) truth.push_back(Exported(RecordKind::kDelta, {i / 3, i % 3}));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (uint32_t round = 0; round < 24; ++round) {
        const uint32_t i = (round * (t + 1) + t) % 6;
        const auto record =
            records_->Get(RecordKind::kDelta, {i / 3, i % 3}, RecordAccess::kDemand);
        if (!record || Joined(*record) != truth[i]) ++wrong;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  EXPECT_GT(records_->cache_stats(RecordKind::kDelta).evictions, 0u);
}

}  // namespace
}  // namespace hotplane
