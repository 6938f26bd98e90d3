// Bases that a boot builds on a GPU stay there, verified against their files. Skipped, and saying
// so, where there is no GPU; ctest also runs this on the fake driver of src/device/fake.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "base/fault_guard.h"
#include "base/units.h"
#include "boot/formats_testing.h"
#include "checkpoint/synth_checkpoint.h"
#include "engine/engine.h"
#include "engine/synth.h"
#include "io/test_directory.h"

namespace hotplane {
namespace {

namespace models = formats_testing;

DeviceOptions SmallRing() { return {.ring_bytes = 16 * kMiB, .thread_count = 2}; }

// All parts of a layer, from where they are.
std::vector<std::byte> PartsOf(Device* device, const BootedLayer& layer) {
  std::vector<std::byte> all;
  for (const auto part :
       {layer.planes13, layer.sc13, layer.planes2, layer.sc2, layer.bias13, layer.bias2}) {
    std::vector<std::byte> bytes(part.begin(), layer.device < 0 ? part.end() : part.begin());
    if (layer.device >= 0) {
      bytes.resize(part.size());
      EXPECT_TRUE(device->Download(part.data(), bytes).has_value());
    }
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

class CudaBuild : public testing::Test {
 protected:
  void SetUp() override {
    if (CudaDeviceCount() == 0)
      GTEST_SKIP() << "no CUDA device: " << OpenCudaDevice(0, {}).error().what();
    InstallFaultGuard();
  }

  std::string WriteCheckpoint(SourceFormat format, uint32_t layers) {
    SynthCheckpointOptions synth;
    synth.format = format;
    synth.geometry = {4, 256, 128};
    synth.main_layers = layers;
    WorkerPool pool(2);
    const std::string path = NewPath();
    EXPECT_TRUE(WriteSynthCheckpoint(PosixEnv(), path, synth, pool).has_value());
    return path;
  }
  std::string NewPath() { return directory_.path() + "/" + std::to_string(++paths_); }

  EngineOptions Options(const std::string& checkpoint, bool cuda = true) {
    EngineOptions options;
    options.store_directory = NewPath();
    options.checkpoint = checkpoint;
    options.worker_count = 2;
    options.device.cuda = cuda;
    options.device_options = SmallRing();
    if (cuda) options.base_residency = Residency::kDevice;
    return options;
  }

  struct Booted {
    std::vector<std::vector<std::byte>> layers;
    BootReport report;
    BootPlan plan;
  };
  Booted Boot(const EngineOptions& options) {
    Booted booted;
    const auto engine = Engine::Open(PosixEnv(), options).value();
    const Result<void> ran = engine->Boot({});
    EXPECT_TRUE(ran.has_value()) << ran.error().ToString();
    for (const BootedLayer& layer : engine->layers())
      booted.layers.push_back(PartsOf(engine->device(), layer));
    booted.report = engine->report();
    booted.plan = engine->plan();
    EXPECT_EQ(booted.report.bytes_read, booted.report.bytes_needed);
    EXPECT_EQ(booted.report.bytes_verified, booted.report.bytes_read + booted.report.bytes_kept);
    EXPECT_EQ(booted.report.bytes_kept, booted.plan.bytes_kept);
    EXPECT_EQ(booted.report.bytes_needed, booted.plan.bytes_store);
    return booted;
  }
  // The cold boot keeps all it builds; the next one reads the same from the files.
  void ExpectKept(EngineOptions options) {
    EngineOptions cpu = options;
    cpu.device.cuda = false;
    cpu.base_residency = Residency::kAuto;
    cpu.store_directory = NewPath();
    const Booted expected = Boot(cpu);
    EXPECT_EQ(expected.report.bytes_kept, 0u);
    ASSERT_FALSE(expected.layers.empty());
    const Booted cold = Boot(options);
    EXPECT_EQ(cold.layers, expected.layers);
    EXPECT_EQ(cold.report.bytes_kept, expected.report.bytes_read);
    EXPECT_EQ(cold.report.bytes_read, 0u);
    EXPECT_EQ(cold.plan.bytes_device, cold.report.bytes_kept);
    for (const BootReport::LayerSource& layer : cold.report.sources)
      EXPECT_STREQ(layer.source, "built");
    const Booted warm = Boot(options);
    EXPECT_EQ(warm.layers, expected.layers);
    EXPECT_EQ(warm.report.bytes_kept, 0u);
    EXPECT_EQ(warm.report.bytes_read, cold.report.bytes_kept);
  }

  TestDirectory directory_;
  int paths_ = 0;
};

TEST_F(CudaBuild, BasesOfAllFormatsStayOnTheDevice) {
  for (const SourceFormat format :
       {SourceFormat::kMxfp4, SourceFormat::kNvfp4, SourceFormat::kFp8, SourceFormat::kBf16})
    ExpectKept(Options(WriteCheckpoint(format, 3)));
}

// Rows of gate and up that alternate are quantized on the CPU, and copied there with the biases.
TEST_F(CudaBuild, WhatTheCpuMakesOfALayerIsPutThereToo) {
  const std::string path = NewPath();
  WriteModel(PosixEnv(), path,
             models::With([](Model& model) { models::AddGptOss(model, models::Mxfp4Layer(2)); }),
             0);
  ExpectKept(Options(path));
}

TEST_F(CudaBuild, WithTheDeltaTierForARankAndOfSomeExperts) {
  const std::string checkpoint = WriteCheckpoint(SourceFormat::kBf16, 2);
  EngineOptions delta = Options(checkpoint);
  delta.delta = true;
  ExpectKept(delta);
  EngineOptions rank = Options(checkpoint);
  rank.shard.world = 2;
  rank.shard.rank = 1;
  ExpectKept(rank);
  EngineOptions some = Options(checkpoint);
  some.experts = ExpertRange{1, 3};
  ExpectKept(some);
  EngineOptions unverified = Options(checkpoint);
  unverified.boot.verify = false;
  const auto engine = Engine::Open(PosixEnv(), unverified).value();
  ASSERT_TRUE(engine->Boot({}));
  EXPECT_GT(engine->report().bytes_kept, 0u);
  EXPECT_EQ(engine->report().bytes_verified, 0u);
}

TEST_F(CudaBuild, TakesThePlanesTheWorkersMemoryAndLittleMoreAndGivesAllBack) {
  const auto watch = OpenCudaDevice(0, SmallRing()).value();
  const std::string checkpoint = WriteCheckpoint(SourceFormat::kFp8, 3);
  uint64_t free_bytes = 0;
  for (int i = 0; i < 4; ++i) {
    {
      const auto engine = Engine::Open(PosixEnv(), Options(checkpoint)).value();
      ASSERT_TRUE(engine->Boot({}));
      const uint64_t planes = engine->plan().bytes_device;
      const uint64_t workers = engine->build_report().peak_device_bytes;
      EXPECT_GT(workers, 0u);
      EXPECT_GE(engine->report().peak_device_bytes, planes + workers);
      EXPECT_LE(engine->report().peak_device_bytes, planes + workers + 64 * kMiB);
    }
    // The driver may keep of a first time what the next ones use.
    if (i > 0) {
      EXPECT_EQ(watch->Memory()->free_bytes, free_bytes);
    }
    free_bytes = watch->Memory()->free_bytes;
  }
}

TEST_F(CudaBuild, BesideLayersThatAreThere) {
  EngineOptions options = Options(WriteCheckpoint(SourceFormat::kFp8, 4));
  EngineOptions cpu = options;
  cpu.device.cuda = false;
  cpu.base_residency = Residency::kAuto;
  cpu.store_directory = NewPath();
  const Booted expected = Boot(cpu);
  options.boot.layers = "1,3";
  (void)Boot(options);
  options.boot.layers.clear();
  const Booted mixed = Boot(options);
  EXPECT_EQ(mixed.layers, expected.layers);
  EXPECT_EQ(mixed.report.bytes_kept, expected.report.bytes_read / 2);
  EXPECT_EQ(mixed.report.bytes_read, expected.report.bytes_read / 2);
  for (const BootReport::LayerSource& layer : mixed.report.sources)
    EXPECT_EQ(layer.kept, layer.ordinal % 2 == 0) << layer.source;
}

// Nothing stays unverified: where the CPU verifies, it does so before the bytes land.
TEST_F(CudaBuild, WithoutVerificationOnTheDeviceTheFileIsRead) {
  EngineOptions options = Options(WriteCheckpoint(SourceFormat::kMxfp4, 2));
  options.device_options.verify_on_device = false;
  const Booted booted = Boot(options);
  EXPECT_EQ(booted.report.bytes_kept, 0u);
  EXPECT_GT(booted.report.bytes_read, 0u);
}

TEST_F(CudaBuild, BytesInPlaceThatAreNotTheFilesAreReadFromIt) {
  SynthStoreOptions synth;
  synth.geometry = {4, 256, 128};
  synth.layers = 2;
  synth.worker_count = 1;
  const std::string path = NewPath();
  ASSERT_TRUE(SynthStore(PosixEnv(), path, synth).has_value());
  const Generation generation = Store::Open(PosixEnv(), path)->OpenGeneration("").value();
  const LayerFile file = generation.OpenLayer(1, Encoding::kBase).value();
  std::vector<std::byte> data(file.layout().data_bytes);
  ASSERT_TRUE(ReadFully(file.file(), file.layout().data_offset, data).has_value());

  const auto device = OpenCudaDevice(0, SmallRing()).value();
  const ByteRange all = {0, data.size()};
  const auto memory = device->Allocate(data.size(), {&all, 1}).value();
  WorkerPool pool(2);
  for (const bool damaged : {false, true}) {
    std::vector<std::byte> there = data;
    if (damaged) there[data.size() / 2] ^= std::byte{4};
    ASSERT_TRUE(device->Upload(there, memory->data()).has_value());
    BootOptions options;
    options.pool = &pool;
    options.device = device.get();
    options.places[1] = {memory->data(), true};
    const auto session = BootSession::Open(generation, options).value();
    const Result<void> ran = session->Run({});
    ASSERT_TRUE(ran.has_value()) << ran.error().ToString();
    ASSERT_EQ(session->layers().size(), 2u);
    EXPECT_STREQ(session->report().sources[1].source, "built");
    EXPECT_EQ(session->report().bytes_kept, data.size());
    EXPECT_EQ(session->report().bytes_reread > 0, damaged);
    EXPECT_EQ(session->report().warnings.size(), damaged ? 1u : 0u);
    std::vector<std::byte> found(data.size());
    ASSERT_TRUE(device->Download(memory->data(), found).has_value());
    EXPECT_EQ(found, data);
  }
}

}  // namespace
}  // namespace hotplane
