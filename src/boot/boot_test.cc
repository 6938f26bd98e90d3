#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <thread>

#include "base/fault_guard.h"
#include "base/format_text.h"
#include "base/limits.h"
#include "base/memory.h"
#include "base/sweep_step.h"
#include "base/units.h"
#include "boot/boot_testing.h"
#include "io/fault_env.h"

namespace hotplane {
namespace {

class BootTest : public testing::Test {
 protected:
  void SetUp() override {
    WriteCheckpoint(env_, SmallModel());
    const Result<BuildReport> built = BuildStore(env_, BothTiers());
    ASSERT_TRUE(built.has_value()) << built.error().ToString();
    const Result<Booted> booted = BootStore(env_);
    ASSERT_TRUE(booted.has_value()) << booted.error().ToString();
    good_ = *booted;
    for (const auto& [path, content] : StoreFiles(env_))
      if (path.find(".base") != std::string::npos) base_files_.push_back(path);
    ASSERT_EQ(base_files_.size(), 3u);
  }

  MemEnv env_;
  Booted good_;
  std::vector<std::string> base_files_;
};

TEST_F(BootTest, PublishesEveryLayerInOrderAndReadsEachByteOnce) {
  for (const bool map : {false, true}) {
    for (const size_t workers : {1, 2, 8}) {
      FaultEnv watched(env_);
      BootOptions options;
      options.map = map;
      const Booted booted = BootStore(watched, options, workers).value();
      EXPECT_EQ(booted.order, (std::vector<uint32_t>{0, 1, 2}));
      EXPECT_EQ(booted.layers, good_.layers);
      EXPECT_EQ(booted.report.bytes_read, booted.report.bytes_needed);
      EXPECT_EQ(booted.report.bytes_verified, booted.report.bytes_needed);
      EXPECT_EQ(booted.report.bytes_reread, 0u);
      EXPECT_GT(booted.report.bytes_skipped, 0u);
      uint64_t data = 0;
      for (const Operation& operation : watched.Log()) {
        EXPECT_EQ(operation.path.find("delta") != std::string::npos &&
                      operation.kind != OperationKind::kStat,
                  false)
            << OperationName(operation.kind) << " " << operation.path;
        if ((operation.kind == OperationKind::kRead ||
             operation.kind == OperationKind::kPopulate) &&
            operation.path.find(".base") != std::string::npos)
          data += operation.bytes;
      }
      EXPECT_EQ(data, booted.report.bytes_needed + booted.report.bytes_metadata);
    }
  }
}

TEST_F(BootTest, BytesAreTheKernelsOwn) {
  const Checkpoint checkpoint = Checkpoint::Open(env_, kTestCheckpoint).value();
  const MoeModel model = DiscoverMoe(checkpoint).value();
  const Kernels& scalar = *SelectKernels("scalar").value();
  for (const MoeLayer& layer : model.layers) {
    const LayerGeometry& g = layer.geometry;
    std::vector<std::byte> parts[4];
    for (const ExpertTensors& expert : layer.experts) {
      for (const bool down : {false, true}) {
        std::vector<std::byte> weights;
        std::vector<std::byte> scales;
        for (const size_t p : down ? std::vector<size_t>{2} : std::vector<size_t>{0, 1}) {
          std::vector<std::byte> weight(expert.weight[p]->bytes);
          std::vector<std::byte> scale(expert.scale[p]->bytes);
          ASSERT_TRUE(checkpoint.Read(*expert.weight[p], 0, weight).has_value());
          ASSERT_TRUE(checkpoint.Read(*expert.scale[p], 0, scale).has_value());
          weights.insert(weights.end(), weight.begin(), weight.end());
          scales.insert(scales.end(), scale.begin(), scale.end());
        }
        const size_t n = down ? g.n2() : g.n13();
        const size_t k = down ? g.k2() : g.k13();
        std::vector<std::byte> codes(CodePlaneBytes(n, k));
        std::vector<std::byte> plane(ScalePlaneBytes(n, k));
        ASSERT_TRUE(scalar.pack_mxfp4(weights.data(), scales.data(), n, k,
                                      {codes.data(), plane.data(), nullptr, nullptr}));
        auto& c = parts[down ? 2 : 0];
        auto& s = parts[down ? 3 : 1];
        c.insert(c.end(), codes.begin(), codes.end());
        s.insert(s.end(), plane.begin(), plane.end());
      }
    }
    std::vector<std::byte> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    EXPECT_EQ(good_.layers[layer.ordinal], all) << layer.ordinal;
  }
}

TEST_F(BootTest, EveryFlippedBitOfABaseFileIsFoundAndNamed) {
  // Every byte of one file, one bit each, the bit changing with the position; the store tests flip
  // every bit of header and table.
  const std::string& file = base_files_[1];
  const uint64_t bytes = env_.Files().at(file).size();
  for (uint64_t offset = 0; offset < bytes; offset += kSweepStep) {
    const std::byte bit{static_cast<uint8_t>(1u << (offset % 8))};
    env_.CorruptByte(file, offset, bit);
    for (const bool map : {false, true}) {
      BootOptions options;
      options.map = map;
      const Result<Booted> booted = BootStore(env_, options, 1);
      ASSERT_FALSE(booted.has_value()) << "offset " << offset << " map " << map;
      EXPECT_EQ(booted.error().exit_code(), 3) << booted.error().ToString();
      EXPECT_EQ(booted.error().file(), file) << booted.error().ToString();
    }
    env_.CorruptByte(file, offset, bit);
  }
  EXPECT_EQ(BootStore(env_).value().layers, good_.layers);
}

TEST_F(BootTest, NothingAfterABadChunkIsPublished) {
  const uint64_t bytes = env_.Files().at(base_files_[1]).size();
  env_.CorruptByte(base_files_[1], bytes - 4096, std::byte{1});
  const Store store = Store::Open(env_, kTestStore).value();
  const Generation generation = store.OpenGeneration().value();
  WorkerPool pool(4);
  BootOptions options;
  options.pool = &pool;
  const auto session = BootSession::Open(generation, options).value();
  std::vector<uint32_t> order;
  const Result<void> result =
      session->Run([&](const BootedLayer& layer) { order.push_back(layer.ordinal); });
  ASSERT_FALSE(result.has_value());
  EXPECT_LE(order.size(), 1u);
  EXPECT_EQ(session->layers().size(), order.size());
  if (!order.empty()) {
    EXPECT_EQ(order[0], 0u);
    EXPECT_EQ(
        std::vector<std::byte>(session->layers()[0].planes13.begin(),
                               session->layers()[0].planes13.end()),
        std::vector<std::byte>(good_.layers[0].begin(),
                               good_.layers[0].begin() +
                                   static_cast<ptrdiff_t>(session->layers()[0].planes13.size())));
  }
}

TEST_F(BootTest, ABadPageInTheCacheIsReadOnceMoreAndReported) {
  FaultEnv faulty(env_);
  const uint64_t bytes = env_.Files().at(base_files_[2]).size();
  faulty.Add(
      BitFlip{.path_contains = "layer-0002.base", .offset = bytes - 5000, .spare_direct = true});
  const Result<Booted> booted = BootStore(faulty, {}, 1);
  ASSERT_TRUE(booted.has_value()) << booted.error().ToString();
  EXPECT_EQ(booted->layers, good_.layers);
  EXPECT_GT(booted->report.bytes_reread, 0u);
  ASSERT_EQ(booted->report.warnings.size(), 1u);
  EXPECT_NE(booted->report.warnings[0].find("layer 2"), std::string::npos);
}

// Repairing one chunk of a mapped layer drops a huge page from the cache, verified chunks with it.
TEST_F(BootTest, WhatARepairBringsBackFromTheDiskIsCheckedToo) {
  const uint64_t bytes = env_.Files().at(base_files_[1]).size();
  const Store store = Store::Open(env_, kTestStore).value();
  const Generation generation = store.OpenGeneration().value();
  WorkerPool pool(1);
  BootOptions options;
  options.map = true;
  options.pool = &pool;
  for (const bool neighbour_bad : {false, true}) {
    env_.CorruptByte(base_files_[1], bytes - 1, std::byte{4});
    const auto session = BootSession::Open(generation, options).value();
    // The page cache has it wrong, the disk right; of the first chunk it may be the other way
    // round.
    env_.CorruptByte(base_files_[1], bytes - 1, std::byte{4});
    if (neighbour_bad) env_.CorruptByte(base_files_[1], 8192, std::byte{4});
    const Result<void> ran = session->Run({});
    EXPECT_EQ(ran.has_value(), !neighbour_bad);
    EXPECT_EQ(session->layers().size(), neighbour_bad ? 1u : 3u);
    if (neighbour_bad) {
      EXPECT_EQ(ran.error().offset(), 8192u);
      EXPECT_EQ(ran.error().exit_code(), 3);
    } else {
      EXPECT_EQ(session->report().warnings.size(), 1u);
    }
  }
  env_.CorruptByte(base_files_[1], 8192, std::byte{4});
}

TEST_F(BootTest, VerifyNoneServesWhatIsThere) {
  BootOptions options;
  options.verify = false;
  const Booted booted = BootStore(env_, options).value();
  EXPECT_EQ(booted.layers, good_.layers);
  EXPECT_EQ(booted.report.bytes_verified, 0u);
}

TEST_F(BootTest, BootsOnlyTheLayersAskedFor) {
  FaultEnv watched(env_);
  BootOptions options;
  options.layers = "mtp";
  const Booted booted = BootStore(watched, options).value();
  EXPECT_EQ(booted.order, std::vector<uint32_t>{2});
  EXPECT_EQ(booted.layers[0], good_.layers[2]);
  for (const Operation& operation : watched.Log())
    EXPECT_EQ(operation.path.find("layer-0000.base"), std::string::npos);
}

TEST_F(BootTest, NamesAnAbsentLayer) {
  ASSERT_TRUE(env_.Remove(base_files_[1]).has_value());
  const Result<Booted> booted = BootStore(env_);
  ASSERT_FALSE(booted.has_value());
  EXPECT_EQ(booted.error().exit_code(), 3);
  EXPECT_NE(booted.error().ToString().find("layer 1"), std::string::npos)
      << booted.error().ToString();
}

TEST_F(BootTest, SaysBeforeReadingThatItDoesNotFit) {
  FaultEnv watched(env_);
  BootOptions options;
  options.memory_limit_bytes = good_.report.bytes_needed - 1;
  const Result<Booted> booted = BootStore(watched, options);
  ASSERT_FALSE(booted.has_value());
  EXPECT_EQ(booted.error().exit_code(), 4);
  EXPECT_NE(booted.error().advice().find("--map"), std::string::npos);
  for (const Operation& operation : watched.Log())
    EXPECT_FALSE(operation.kind == OperationKind::kRead && operation.offset > 8192);
  options.memory_limit_bytes = good_.report.bytes_needed;
  EXPECT_TRUE(BootStore(env_, options).has_value());
}

TEST_F(BootTest, AnErrorAtAnyOperationServesNothingWrong) {
  FaultEnv counter(env_);
  ASSERT_TRUE(BootStore(counter, {}, 1).has_value());
  const uint64_t operations = counter.operation_count();
  ASSERT_GT(operations, 10u);
  for (uint64_t n = 1; n <= operations; ++n) {
    for (const int error : {EIO, EINTR}) {
      FaultEnv faulty(env_);
      faulty.Add(Fault{.action = FaultAction::kError, .first = n, .error = error});
      const Result<Booted> booted = BootStore(faulty, {}, 1);
      if (booted) {
        EXPECT_EQ(booted->layers, good_.layers) << n;
      } else {
        EXPECT_EQ(booted.error().exit_code(), 1) << booted.error().ToString();
      }
    }
    FaultEnv faulty(env_);
    faulty.Add(Fault{.action = FaultAction::kShort, .first = n});
    const Result<Booted> booted = BootStore(faulty, {}, 1);
    ASSERT_TRUE(booted.has_value()) << n << booted.error().ToString();
    EXPECT_EQ(booted->layers, good_.layers) << n;
  }
}

TEST_F(BootTest, CanBeCancelledFromTheCallback) {
  CancelToken cancel;
  BootOptions options;
  options.cancel = &cancel;
  const Store store = Store::Open(env_, kTestStore).value();
  const Generation generation = store.OpenGeneration().value();
  WorkerPool pool(1);
  options.pool = &pool;
  const auto session = BootSession::Open(generation, options).value();
  const Result<void> result = session->Run([&](const BootedLayer&) { cancel.Cancel(SIGINT); });
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().exit_code(), 130);
  EXPECT_EQ(session->layers().size(), 1u);
}

TEST_F(BootTest, WaitLayerGivesEachLayerFromAnotherThread) {
  const Store store = Store::Open(env_, kTestStore).value();
  const Generation generation = store.OpenGeneration().value();
  WorkerPool pool(2);
  BootOptions options;
  options.pool = &pool;
  const auto session = BootSession::Open(generation, options).value();
  std::vector<uint32_t> waited;
  std::thread consumer([&] {
    for (size_t i = 0; i < 3; ++i) {
      const Result<BootedLayer> layer = session->WaitLayer(i, nullptr);
      if (layer) waited.push_back(layer->ordinal);
    }
  });
  ASSERT_TRUE(session->Run({}).has_value());
  consumer.join();
  EXPECT_EQ(waited, (std::vector<uint32_t>{0, 1, 2}));
  EXPECT_EQ(session->WaitLayer(1, nullptr)->ordinal, 1u);
  EXPECT_EQ(session->WaitLayer(3, nullptr).error().exit_code(), 2);
}

TEST_F(BootTest, WaitLayerEndsWithTheRunsFailureAndWithCancel) {
  const uint64_t bytes = env_.Files().at(base_files_[1]).size();
  env_.CorruptByte(base_files_[1], bytes - 4096, std::byte{1});
  const Store store = Store::Open(env_, kTestStore).value();
  const Generation generation = store.OpenGeneration().value();
  WorkerPool pool(2);
  BootOptions options;
  options.pool = &pool;
  const auto session = BootSession::Open(generation, options).value();
  CancelToken cancel;
  cancel.Cancel(SIGINT);
  EXPECT_EQ(session->WaitLayer(0, &cancel).error().exit_code(), 130);
  Result<BootedLayer> waited = Fail(Status::Usage("not waited"));
  std::thread consumer([&] { waited = session->WaitLayer(2, nullptr); });
  const Result<void> result = session->Run({});
  consumer.join();
  ASSERT_FALSE(result.has_value());
  ASSERT_FALSE(waited.has_value());
  EXPECT_EQ(waited.error().ToString(), result.error().ToString());
}

TEST_F(BootTest, ColdLayersComeFromTheDiskAsToldAndSaySo) {
  for (const CacheMode cache : {CacheMode::kAuto, CacheMode::kKeep, CacheMode::kBypass}) {
    for (const std::string& path : base_files_)
      env_.Open(path, OpenMode::kRead).value()->DropCache(0, 0);
    BootOptions options;
    options.cache = cache;
    const Booted booted = BootStore(env_, options).value();
    EXPECT_EQ(booted.layers, good_.layers);
    EXPECT_EQ(booted.report.bytes_read_disk, booted.report.bytes_needed);
    EXPECT_FALSE(booted.report.read_path.empty());
    if (cache == CacheMode::kAuto) continue;
    for (const BootReport::LayerSource& source : booted.report.sources)
      EXPECT_STREQ(source.source, cache == CacheMode::kKeep ? "disk, buffered" : "disk, direct");
  }
}

// On the real file system: a file cut short while it is read ends in a Status, mapped or not.
TEST(BootPosix, TruncationUnderTheReaderIsAStatus) {
  InstallFaultGuard();
  const std::string root =
      (std::filesystem::temp_directory_path() / Text("hotplane-boot-{}", getpid())).string();
  std::filesystem::create_directories(root);
  Env& env = PosixEnv();
  SynthCheckpointOptions model = SmallModel();
  model.geometry = {8, 512, 256};
  WorkerPool pool(2);
  ASSERT_TRUE(WriteSynthCheckpoint(env, root + "/model", model, pool).has_value());
  const Checkpoint checkpoint = Checkpoint::Open(env, root + "/model").value();
  const MoeModel moe = DiscoverMoe(checkpoint).value();
  ASSERT_TRUE(Build(env, checkpoint, moe, root + "/store", BothTiers()).has_value());
  for (const bool map : {false, true}) {
    const Generation generation = Store::Open(env, root + "/store")->OpenGeneration().value();
    BootOptions options;
    options.pool = &pool;
    options.map = map;
    const auto session = BootSession::Open(generation, options).value();
    const std::string victim = generation.LayerPath(2, Encoding::kBase);
    const auto size = std::filesystem::file_size(victim);
    std::filesystem::resize_file(victim, size / 2);
    const Result<void> result = session->Run({});
    ASSERT_FALSE(result.has_value());
    EXPECT_EQ(result.error().file(), victim) << result.error().ToString();
    EXPECT_TRUE(result.error().exit_code() == 3 || result.error().exit_code() == 1);
    std::filesystem::remove(victim);
    ASSERT_TRUE(Build(env, checkpoint, moe, root + "/store", BothTiers()).has_value());
  }
  std::filesystem::remove_all(root);
}

TEST(Limits, MeasureSomethingPositive) {
  WorkerPool pool(2);
  const HugeBuffer sample = HugeBuffer::Allocate(8 * kMiB).value();
  EXPECT_GT(MeasureReadRate(pool, sample.span()), 1e8);
  EXPECT_GT(MeasureCopyRate(pool, sample.span()).value(), 1e8);
}

}  // namespace
}  // namespace hotplane
