// Boots onto a GPU. Skipped, and saying so, where there is none.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "base/fault_guard.h"
#include "base/format_text.h"
#include "base/units.h"
#include "engine/engine.h"
#include "engine/synth.h"
#include "format/checksum.h"
#include "io/test_directory.h"

namespace hotplane {
namespace {

#define SKIP_WITHOUT_GPU()    \
  if (CudaDeviceCount() == 0) \
  GTEST_SKIP() << "no CUDA device: " << OpenCudaDevice(0, {}).error().what()

DeviceOptions SmallRing() { return {.ring_bytes = 64 * kMiB}; }

std::vector<std::byte> RandomBytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (size_t at = 0; at < count; at += sizeof(uint64_t)) {
    const uint64_t eight = random();
    std::memcpy(&bytes[at], &eight, std::min(count - at, sizeof eight));
  }
  return bytes;
}

// Bytes on the device, landed in pieces.
struct Landed {
  std::unique_ptr<Device> device;
  std::unique_ptr<DeviceArena> arena;
  std::unique_ptr<LandingDevice> landing;

  explicit Landed(const std::vector<std::byte>& bytes) {
    device = OpenCudaDevice(0, SmallRing()).value();
    const ByteRange all = {0, bytes.size()};
    arena = device->Allocate(bytes.size(), {&all, 1}).value();
    landing = device->BeginLanding().value();
    Land(bytes, 0);
  }
  void Land(std::span<const std::byte> bytes, uint64_t offset) {
    for (uint64_t at = 0; at < bytes.size(); at += 3 * kMiB) {
      const uint64_t count = std::min<uint64_t>(3 * kMiB, bytes.size() - at);
      std::byte* staged = nullptr;
      while ((staged = landing->Stage(arena->data() + offset + at, count)) == nullptr)
        std::this_thread::yield();
      std::copy_n(bytes.begin() + static_cast<ptrdiff_t>(at), count, staged);
      ASSERT_TRUE(landing->Land(staged, arena->data() + offset + at, count).has_value());
    }
  }
};

TEST(CudaVerify, EveryLengthClassIsHashedAsOnTheCpu) {
  SKIP_WITHOUT_GPU();
  const std::vector<std::byte> bytes = RandomBytes(40 * kMiB, 1);
  Landed landed(bytes);
  ASSERT_TRUE(landed.landing->verifies());
  std::vector<LandedCheck> checks;
  const auto add = [&](uint64_t offset, uint32_t count) {
    checks.push_back({offset, Checksum64({bytes.data() + offset, count}), count});
  };
  for (uint32_t count = 0; count <= 3000; ++count)
    for (const uint64_t shift : {0, 1, 8}) add(count * 128 + shift, count);
  std::mt19937_64 random(2);
  for (int i = 0; i < 3000; ++i)
    add(random() % (30 * kMiB), static_cast<uint32_t>(random() % 270'000));
  for (const uint32_t count : {262'143u, 262'144u, 262'145u, 1'048'576u, 5'000'001u})
    for (const uint64_t shift : {0, 16, 3}) add(shift, count);
  const auto mismatches = landed.landing->Settle(landed.arena->data(), checks);
  ASSERT_TRUE(mismatches.has_value()) << mismatches.error().ToString();
  for (const LandedMismatch& mismatch : *mismatches)
    ADD_FAILURE() << "bytes " << checks[mismatch.check].bytes << " at "
                  << checks[mismatch.check].offset;
}

TEST(CudaVerify, EveryPositionOfAChunkCounts) {
  SKIP_WITHOUT_GPU();
  const std::vector<std::byte> good = RandomBytes(16 * 262'144, 3);
  Landed landed(good);
  std::vector<LandedCheck> checks;
  for (uint64_t at = 0; at < good.size(); at += 262'144)
    checks.push_back({at, Checksum64({good.data() + at, 262'144}), 262'144});
  // The last one is short.
  checks.back().bytes = 100'003;
  checks.back().checksum = Checksum64({good.data() + checks.back().offset, 100'003});
  std::mt19937_64 random(4);
  for (size_t round = 0; round < 200; ++round) {
    std::vector<std::byte> bad = good;
    const size_t chunk = round % checks.size();
    const uint64_t bytes = checks[chunk].bytes;
    const uint64_t places[] = {0,    7,         63,         64,         1023,
                               1024, bytes - 1, bytes - 64, bytes - 65, random() % bytes};
    const uint64_t at = checks[chunk].offset + places[round % std::size(places)];
    bad[at] ^= std::byte{static_cast<uint8_t>(1u << random() % 8)};
    landed.Land(std::span(bad).subspan(checks[chunk].offset, bytes), checks[chunk].offset);
    const auto mismatches = landed.landing->Settle(landed.arena->data(), checks).value();
    ASSERT_EQ(mismatches.size(), 1u) << at;
    EXPECT_EQ(mismatches[0].check, chunk);
    EXPECT_EQ(mismatches[0].found, Checksum64({bad.data() + checks[chunk].offset, bytes}));
    landed.Land(std::span(good).subspan(checks[chunk].offset, bytes), checks[chunk].offset);
    ASSERT_TRUE(landed.landing->Settle(landed.arena->data(), checks).value().empty());
  }
}

class CudaBoot : public testing::Test {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_GPU();
    InstallFaultGuard();
    SynthStoreOptions synth;
    synth.geometry = {6, 1024, 512};
    synth.layers = 5;
    synth.worker_count = 4;
    ASSERT_TRUE(SynthStore(PosixEnv(), store(), synth).has_value());
  }
  std::string store() const { return directory_.path() + "/store"; }
  EngineOptions Options() const {
    EngineOptions options;
    options.store_directory = store();
    options.device.cuda = true;
    options.device_options = SmallRing();
    return options;
  }
  // All parts of a layer, from where they are.
  static std::vector<std::byte> Bytes(Engine& engine, const BootedLayer& layer) {
    std::vector<std::byte> all;
    for (const auto part : {layer.planes13, layer.sc13, layer.planes2, layer.sc2}) {
      std::vector<std::byte> bytes(part.begin(), layer.device < 0 ? part.end() : part.begin());
      if (layer.device >= 0) {
        bytes.resize(part.size());
        EXPECT_TRUE(engine.device()->Download(part.data(), bytes).has_value());
      }
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
  }
  static std::vector<std::vector<std::byte>> Boot(const EngineOptions& options) {
    const auto engine = Engine::Open(PosixEnv(), options).value();
    std::vector<uint32_t> order;
    const Result<void> booted =
        engine->Boot([&](const BootedLayer& layer) { order.push_back(layer.ordinal); });
    EXPECT_TRUE(booted.has_value()) << booted.error().ToString();
    EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
    EXPECT_EQ(engine->report().bytes_read, engine->report().bytes_needed);
    if (options.boot.verify) {
      EXPECT_EQ(engine->report().bytes_verified, engine->report().bytes_needed);
    }
    std::vector<std::vector<std::byte>> layers;
    for (const BootedLayer& layer : engine->layers()) layers.push_back(Bytes(*engine, layer));
    return layers;
  }

  TestDirectory directory_;
};

TEST_F(CudaBoot, TheDeviceHoldsWhatTheHostWould) {
  EngineOptions cpu = Options();
  cpu.device.cuda = false;
  const auto expected = Boot(cpu);
  ASSERT_EQ(expected.size(), 5u);
  for (const bool verify : {true, false}) {
    for (const bool on_device : {true, false}) {
      for (const CacheMode cache : {CacheMode::kKeep, CacheMode::kBypass}) {
        for (const bool drop : {false, true}) {
          EngineOptions options = Options();
          options.boot.verify = verify;
          options.boot.cache = cache;
          options.device_options.verify_on_device = on_device;
          if (drop)
            for (const auto& entry : std::filesystem::recursive_directory_iterator(store()))
              if (entry.is_regular_file())
                PosixEnv().Open(entry.path(), OpenMode::kRead).value()->DropCache(0, 0);
          EXPECT_EQ(Boot(options), expected);
        }
      }
    }
  }
  EngineOptions some = Options();
  some.experts = ExpertRange{1, 4};
  EngineOptions some_cpu = some;
  some_cpu.device.cuda = false;
  EXPECT_EQ(Boot(some), Boot(some_cpu));
  some.experts.reset();
  some.boot.layers = "1-3";
  EXPECT_EQ(Boot(some),
            std::vector<std::vector<std::byte>>(expected.begin() + 1, expected.begin() + 4));
}

TEST_F(CudaBoot, HalfOnTheDeviceWhenNoMoreFits) {
  EngineOptions cpu = Options();
  cpu.device.cuda = false;
  const auto expected = Boot(cpu);
  EngineOptions options = Options();
  options.boot.memory_limit_bytes = 3 * expected[0].size() + kMiB;
  EXPECT_EQ(Boot(options), expected);
  options.base_residency = Residency::kDevice;
  const auto engine = Engine::Open(PosixEnv(), options).value();
  const Result<void> booted = engine->Boot({});
  ASSERT_FALSE(booted.has_value());
  EXPECT_EQ(booted.error().exit_code(), 4);
}

TEST_F(CudaBoot, AFlippedBitIsFoundAndNamed) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(store()))
    if (entry.path().string().find(".base") != std::string::npos) files.push_back(entry.path());
  ASSERT_EQ(files.size(), 5u);
  std::sort(files.begin(), files.end());
  const auto generation = Engine::Open(PosixEnv(), Options()).value();
  const LayerFile layer = generation->generation().OpenLayer(2, Encoding::kBase).value();
  // A byte of every kind of place: sections, gaps, ends of chunks, short last ones.
  std::vector<uint64_t> places;
  for (const Chunk& chunk : layer.chunks())
    for (const uint64_t at :
         {chunk.offset, chunk.offset + chunk.bytes / 2, chunk.offset + chunk.bytes - 1})
      places.push_back(at);
  for (size_t i = 0; i < places.size(); i += 1 + places.size() / 40) {
    const auto flip = [&] {
      std::fstream file(layer.file().path(), std::ios::in | std::ios::out | std::ios::binary);
      char byte = 0;
      file.seekg(static_cast<std::streamoff>(places[i])).get(byte);
      file.seekp(static_cast<std::streamoff>(places[i])).put(static_cast<char>(byte ^ 16));
    };
    flip();
    const auto engine = Engine::Open(PosixEnv(), Options()).value();
    size_t published = 0;
    const Result<void> booted = engine->Boot([&](const BootedLayer&) { ++published; });
    flip();
    ASSERT_FALSE(booted.has_value()) << places[i];
    EXPECT_EQ(booted.error().exit_code(), 3) << booted.error().ToString();
    EXPECT_EQ(booted.error().file(), layer.file().path());
    EXPECT_LE(published, 2u);
  }
  EXPECT_EQ(Boot(Options()).size(), 5u);
}

TEST_F(CudaBoot, RepeatedBootsGiveAllMemoryBack) {
  const auto watch = OpenCudaDevice(0, SmallRing()).value();
  (void)Boot(Options());
  const uint64_t before = watch->Memory()->free_bytes;
  for (int i = 0; i < 8; ++i) (void)Boot(Options());
  EXPECT_EQ(watch->Memory()->free_bytes, before);
}

// Streams, tables, kernels and granules that are not full: what fits-checks leave for them.
TEST_F(CudaBoot, TakesThePlanesAndLittleMore) {
  constexpr uint64_t kBeyondMax = 64 * kMiB;
  for (const uint32_t count : {1u, 5u}) {
    EngineOptions options = Options();
    if (count == 1) options.boot.layers = "2";
    const auto engine = Engine::Open(PosixEnv(), options).value();
    ASSERT_TRUE(engine->Boot({}));
    const BootReport& report = engine->report();
    const uint64_t planes = engine->plan().bytes_device;
    ASSERT_EQ(report.sources.size(), count);
    EXPECT_GE(report.peak_device_bytes, planes);
    EXPECT_LE(report.peak_device_bytes, planes + kBeyondMax);
    EXPECT_GT(report.bytes_device_context, 0u);
    EXPECT_LT(report.bytes_device_context + report.peak_device_bytes,
              engine->device()->Memory()->total_bytes);
  }
}

TEST_F(CudaBoot, SeveralBootsAtOnceInOneProcess) {
  const auto expected = Boot(Options());
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 3; ++i) EXPECT_EQ(Boot(Options()), expected);
    });
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CudaBoot, WhatDoesNotFitIsRefusedBeforeItIsRead) {
  const auto device = OpenCudaDevice(0, SmallRing()).value();
  const DeviceMemory memory = device->Memory().value();
  const ByteRange all = {0, memory.total_bytes};
  const auto arena = device->Allocate(memory.total_bytes, {&all, 1});
  ASSERT_FALSE(arena.has_value());
  EXPECT_EQ(arena.error().exit_code(), 4) << arena.error().ToString();
  EXPECT_EQ(device->Memory()->free_bytes, memory.free_bytes);
}

}  // namespace
}  // namespace hotplane
