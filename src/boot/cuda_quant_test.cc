// Matrices and whole builds on a GPU against the CPU's. Skipped, and saying so, where there is
// none.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "base/units.h"
#include "boot/formats_testing.h"
#include "boot/matrix_cases.h"
#include "device/device.h"

namespace hotplane {
namespace {

using namespace matrix_cases;
namespace models = formats_testing;

// No landing happens here.
DeviceOptions SmallRing() { return {.ring_bytes = 16 * kMiB, .thread_count = 2}; }

class CudaQuant : public testing::Test {
 protected:
  void SetUp() override {
    if (CudaDeviceCount() == 0)
      GTEST_SKIP() << "no CUDA device: " << OpenCudaDevice(0, {}).error().what();
    device_ = OpenCudaDevice(0, SmallRing()).value();
  }
  std::unique_ptr<MatrixQuantizer> Quantizer(uint64_t bytes = 4 * kMiB) {
    return device_
        ->NewQuantizer(
            {.source_bytes = bytes, .plane_bytes = 2 * bytes, .thresholds = ScaleThresholds()})
        .value();
  }

  std::unique_ptr<Device> device_;
};

void ExpectAsOnTheCpu(const MatrixCase& each, MatrixQuantizer& quantizer) {
  const auto cpu = NewCpuQuantizer(*SelectKernels(std::nullopt).value());
  const MatrixCounts expected = cpu->Load(each.Source()).value();
  const MatrixCounts counts = quantizer.Load(each.Source()).value();
  ASSERT_EQ(counts.usable, expected.usable) << each.name;
  if (!expected.usable) return;
  EXPECT_EQ(counts.positive_zeros, expected.positive_zeros) << each.name;
  EXPECT_EQ(counts.negative_zeros, expected.negative_zeros) << each.name;
  for (const bool alternate : {false, true}) {
    PlaneBytes wanted(each.source.n, each.source.k);
    PlaneBytes made = wanted;
    ASSERT_TRUE(cpu->Quantize(alternate, wanted.Planes()));
    ASSERT_TRUE(quantizer.Quantize(alternate, made.Planes()));
    EXPECT_TRUE(made == wanted) << each.name;
  }
}

TEST_F(CudaQuant, HardMatricesOfAllFormatsAsOnTheCpu) {
  const auto quantizer = Quantizer();
  ASSERT_NE(quantizer, nullptr);
  for (const MatrixCase& each : AllCases(3)) ExpectAsOnTheCpu(each, *quantizer);
}

TEST_F(CudaQuant, LargeMatricesAsOnTheCpu) {
  const auto quantizer = Quantizer();
  ExpectAsOnTheCpu(Mxfp4Case(512, 1024, 1), *quantizer);
  ExpectAsOnTheCpu(Nvfp4Case(512, 1024, 2), *quantizer);
  ExpectAsOnTheCpu(Nvfp4Case(512, 1024, 8), *quantizer);
  ExpectAsOnTheCpu(Fp8Case(512, 1024, 5), *quantizer);
  for (const SourceFormat format : {SourceFormat::kBf16, SourceFormat::kF16, SourceFormat::kF32})
    ExpectAsOnTheCpu(FloatCase(format, 1024, 512, 3), *quantizer);
}

TEST_F(CudaQuant, WhatIsNotUsableIsSeenInAnyPlace) {
  const auto quantizer = Quantizer();
  Random random(9);
  for (const MatrixCase& each : AllCases(3)) {
    const MatrixCase spoiled = Spoiled(each, random);
    EXPECT_FALSE(quantizer->Load(spoiled.Source()).value().usable) << spoiled.name;
  }
}

TEST_F(CudaQuant, OnlyThePlanesThatAreWanted) {
  const auto quantizer = Quantizer();
  const MatrixCase each = FloatCase(SourceFormat::kBf16, 160, 704, 4);
  ASSERT_TRUE(quantizer->Load(each.Source()).value().usable);
  PlaneBytes all(160, 704);
  ASSERT_TRUE(quantizer->Quantize(false, all.Planes()));
  for (unsigned mask = 0; mask < 16; ++mask) {
    PlaneBytes expected = all;
    const PlaneBytes untouched(160, 704);
    MatrixPlanes planes;
    PlaneBytes some = untouched;
    if ((mask & 1) != 0) planes.codes = some.codes.data();
    if ((mask & 2) != 0) planes.scales = some.scales.data();
    if ((mask & 4) != 0) planes.nibbles = some.nibbles.data();
    if ((mask & 8) != 0) planes.quintals = some.quintals.data();
    if (planes.codes == nullptr) expected.codes = untouched.codes;
    if (planes.scales == nullptr) expected.scales = untouched.scales;
    if (planes.nibbles == nullptr) expected.nibbles = untouched.nibbles;
    if (planes.quintals == nullptr) expected.quintals = untouched.quintals;
    ASSERT_TRUE(quantizer->Quantize(false, planes));
    EXPECT_TRUE(some == expected) << mask;
  }
}

TEST_F(CudaQuant, SeveralThreadsAtOnce) {
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t)
    threads.emplace_back([this, t] {
      const auto quantizer = Quantizer();
      for (uint64_t seed = t; seed < 24; seed += 4) {
        ExpectAsOnTheCpu(FloatCase(SourceFormat::kF32, 160, 704, seed), *quantizer);
        ExpectAsOnTheCpu(Fp8Case(160, 704, seed), *quantizer);
      }
    });
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CudaQuant, AllMemoryIsGivenBack) {
  (void)Quantizer();
  const uint64_t before = device_->Memory()->free_bytes;
  for (int i = 0; i < 8; ++i) (void)Quantizer(64 * kMiB);
  EXPECT_EQ(device_->Memory()->free_bytes, before);
}

// The planes of a store, by path.
using Files = std::map<std::string, std::vector<std::byte>>;

Files LayerFiles(Env& env, const std::string& directory) {
  Files files;
  const std::vector<std::string> names = env.List(directory).value();
  for (const std::string& name : names) {
    const std::string path = directory + "/" + name;
    if (env.List(path)) {
      files.merge(LayerFiles(env, path));
    } else if (name.ends_with(".base") || name.find(".delta-") != std::string::npos) {
      const auto file = env.Open(path, OpenMode::kRead).value();
      std::vector<std::byte>& bytes = files[path];
      bytes.resize(file->Stat().value().bytes);
      EXPECT_TRUE(ReadFully(*file, 0, bytes));
    }
  }
  return files;
}

class CudaBuild : public CudaQuant {
 protected:
  // The layer files that a build of `model` makes.
  Files FilesOf(const Model& model, BuildOptions options, BuildReport* report = nullptr) {
    MemEnv env;
    WriteModel(env, kTestCheckpoint, model, 0, false);
    const Result<BuildReport> built = BuildStore(env, options);
    EXPECT_TRUE(built.has_value()) << built.error().ToString();
    if (built && report != nullptr) *report = *built;
    return LayerFiles(env, kTestStore);
  }
  void ExpectAsOnTheCpu(const Model& model, uint32_t world = 1) {
    BuildOptions options = BothTiers(2);
    options.encodings.push_back(Encoding::kDeltaNibble);
    options.shard_world = world;
    const Files expected = FilesOf(model, options);
    options.device = device_.get();
    BuildReport report;
    const Files made = FilesOf(model, options, &report);
    EXPECT_EQ(expected.size(), 3u * world);
    EXPECT_TRUE(made == expected);
    EXPECT_EQ(report.device, device_->name());
    EXPECT_GT(report.peak_device_bytes, 0u);
    EXPECT_GT(report.bytes_quantized_on_device, 0u);
  }
};

TEST_F(CudaBuild, StoresOfAllFormatsAsOnTheCpu) {
  const auto with = [this](const std::function<void(Model&)>& add) {
    ExpectAsOnTheCpu(models::With(add));
  };
  with([](Model& m) { models::AddDeepSeek(m, models::Mxfp4Layer(1)); });
  with([](Model& m) { models::AddGptOss(m, models::Mxfp4Layer(2)); });
  with([](Model& m) { models::AddModelopt(m, models::Nvfp4Layer(3)); });
  with([](Model& m) { models::AddCompressedNvfp4(m, models::Nvfp4Layer(3)); });
  with([](Model& m) { models::AddFused(m, models::Bf16Layer(4)); });
  with([](Model& m) { models::AddFp8(m, models::Fp8Layer(5, 48, 80), 48, 80, Dtype::kBf16); });
  with([](Model& m) { models::AddFp8(m, models::Fp8Layer(6, 128, 128), 128, 128, Dtype::kF32); });
}

TEST_F(CudaBuild, ShardsAsOnTheCpu) {
  ExpectAsOnTheCpu(models::With([](Model& m) { models::AddModelopt(m, models::Nvfp4Layer(7)); }),
                   2);
}

TEST_F(CudaBuild, EveryZeroModeAsOnTheCpu) {
  const Model model = models::With([](Model& m) {
    models::Layer layer = models::Bf16Layer(8);
    for (auto& expert : layer)
      for (size_t i = 0; i < expert[1].bf16.size(); i += 3)
        expert[1].bf16[i] = i % 2 == 0 ? 0 : 0x8000;
    models::AddBf16(m, layer, "mlp", models::kNamed);
  });
  for (const ZeroMode mode : {ZeroMode::kAuto, ZeroMode::kSign, ZeroMode::kAlternate}) {
    BuildOptions options = BothTiers(2);
    options.zero_mode = mode;
    const Files expected = FilesOf(model, options);
    options.device = device_.get();
    EXPECT_TRUE(FilesOf(model, options) == expected) << ZeroModeName(mode);
  }
}

// What the CPU's build says of a source that is no good.
TEST_F(CudaBuild, BadElementsAreNamedAsOnTheCpu) {
  const auto poke = [](Model& m, const std::string& name, size_t at, std::vector<uint8_t> bytes) {
    std::memcpy(m.tensors.at(name).data.data() + at, bytes.data(), bytes.size());
  };
  const std::string expert = models::Hf(0, 1, 2);
  const std::vector<std::function<void(Model&)>> bad = {
      [&](Model& m) {
        models::AddDeepSeek(m, models::Mxfp4Layer(1));
        poke(m, "layers.0.ffn.experts.1.w2.scale", 77, {255});
      },
      [&](Model& m) {
        models::AddModelopt(m, models::Nvfp4Layer(2));
        poke(m, expert + ".weight_scale", 55, {0x81});
      },
      [&](Model& m) {
        models::AddModelopt(m, models::Nvfp4Layer(2));
        poke(m, expert + ".weight_scale_2", 0, {0, 0, 0x80, 0xFF});
      },
      [&](Model& m) {
        models::AddFp8(m, models::Fp8Layer(3, 64, 64), 64, 64, Dtype::kF32);
        poke(m, expert + ".weight", 1234, {0xFF});
      },
      [&](Model& m) {
        models::AddFp8(m, models::Fp8Layer(3, 64, 64), 64, 64, Dtype::kF32);
        poke(m, expert + ".weight_scale_inv", 4, {0, 0, 0x80, 0xBF});
      },
      [&](Model& m) {
        models::AddBf16(m, models::Bf16Layer(4), "mlp", models::kNamed);
        poke(m, models::Hf(0, 2, 0) + ".weight", 2 * 5000, {0x80, 0xFF});
      }};
  for (const auto& make : bad) {
    const auto fail = [&](Device* device) {
      MemEnv env;
      WriteModel(env, kTestCheckpoint, models::With(make), 0, false);
      BuildOptions options = BothTiers();
      options.device = device;
      const Result<BuildReport> built = BuildStore(env, options);
      EXPECT_FALSE(built);
      return built ? std::string() : built.error().ToString();
    };
    const std::string expected = fail(nullptr);
    EXPECT_FALSE(expected.empty());
    EXPECT_EQ(fail(device_.get()), expected);
  }
}

TEST_F(CudaBuild, WithoutDeviceMemoryTheCpuQuantizes) {
  const Model model = models::With([](Model& m) { models::AddFused(m, models::Bf16Layer(4)); });
  BuildOptions options = BothTiers(2);
  const Files expected = FilesOf(model, options);
  options.device = device_.get();
  options.device_limit_bytes = 1;
  BuildReport report;
  EXPECT_TRUE(FilesOf(model, options, &report) == expected);
  EXPECT_EQ(report.bytes_quantized_on_device, 0u);
  EXPECT_EQ(report.peak_device_bytes, 0u);
}

// The model in models/, or in the folder that HOTPLANE_MODELS names.
TEST_F(CudaBuild, TheBundledModelAsOnTheCpu) {
  const char* const named = std::getenv("HOTPLANE_MODELS");
  const std::string folder = named != nullptr ? named : HOTPLANE_SOURCE_DIR "/models";
  if (!std::filesystem::is_directory(folder)) GTEST_SKIP() << "no folder of models: " << folder;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (!std::filesystem::exists(entry.path() / "config.json")) continue;
    const Checkpoint checkpoint = Checkpoint::Open(PosixEnv(), entry.path()).value();
    const MoeModel model = DiscoverMoe(checkpoint).value();
    const auto files = [&](Device* device) {
      MemEnv env;
      BuildOptions options = BothTiers(2);
      options.device = device;
      const Result<BuildReport> built = Build(env, checkpoint, model, kTestStore, options);
      EXPECT_TRUE(built.has_value()) << built.error().ToString();
      return LayerFiles(env, kTestStore);
    };
    const Files expected = files(nullptr);
    EXPECT_GE(expected.size(), 2u) << entry.path();
    EXPECT_TRUE(files(device_.get()) == expected) << entry.path();
  }
}

}  // namespace
}  // namespace hotplane
