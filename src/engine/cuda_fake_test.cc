// Boots onto a CUDA driver that fails wherever the test wants: src/device/fake. ctest runs this
// with the fake first in the search path of libraries; it skips where that is not so.
#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <bit>
#include <filesystem>
#include <fstream>

#include "base/fault_guard.h"
#include "base/format_text.h"
#include "base/units.h"
#include "checkpoint/synth_checkpoint.h"
#include "device/cuda/driver.h"
#include "device/fake/fake_cuda.h"
#include "engine/engine.h"
#include "engine/synth.h"
#include "io/mem_env.h"
#include "io/test_directory.h"

namespace hotplane {
namespace {

// The fake's controls, from the library that the driver was found in.
struct Controls {
  Controls() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    const auto find = [library](const char* name, auto* out) {
      *out = reinterpret_cast<std::decay_t<decltype(*out)>>(dlsym(library, name));
    };
    find("fake_cuda_fail", &fail);
    find("fake_cuda_heal", &heal);
    find("fake_cuda_failed", &failed);
    find("fake_cuda_live", &live);
    find("fake_cuda_calls", &calls);
    find("fake_cuda_memory", &memory);
    find("fake_cuda_uploaded", &uploaded);
    find("fake_cuda_frees_while_waiting", &frees_while_waiting);
  }
  decltype(&fake_cuda_fail) fail = nullptr;
  decltype(&fake_cuda_heal) heal = nullptr;
  decltype(&fake_cuda_failed) failed = nullptr;
  decltype(&fake_cuda_live) live = nullptr;
  decltype(&fake_cuda_calls) calls = nullptr;
  decltype(&fake_cuda_memory) memory = nullptr;
  decltype(&fake_cuda_uploaded) uploaded = nullptr;
  decltype(&fake_cuda_frees_while_waiting) frees_while_waiting = nullptr;
};

class FakeCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (fake.memory == nullptr) GTEST_SKIP() << "libcuda.so.1 is not the fake one";
    InstallFaultGuard();
    fake.heal();
    fake.memory(uint64_t{1} << 34);
    SynthStoreOptions synth;
    synth.geometry = {4, 512, 256};
    synth.layers = 3;
    synth.worker_count = 2;
    ASSERT_TRUE(SynthStore(PosixEnv(), store(), synth).has_value());
  }
  void TearDown() override {
    if (fake.heal != nullptr) fake.heal();
  }
  std::string store() const { return directory_.path() + "/store"; }

  EngineOptions Options(bool verify_on_device = true) const {
    EngineOptions options;
    options.store_directory = store();
    options.worker_count = 2;
    options.device.cuda = true;
    options.device_options.ring_bytes = 16 * kMiB;
    options.device_options.thread_count = 2;
    options.device_options.verify_on_device = verify_on_device;
    options.base_residency = Residency::kDevice;
    return options;
  }

  // The layers' bytes as the device has them.
  Result<std::vector<std::vector<std::byte>>> Boot(const EngineOptions& options) {
    HP_ASSIGN(const std::unique_ptr<Engine> engine, Engine::Open(PosixEnv(), options));
    HP_TRY(engine->Boot({}));
    std::vector<std::vector<std::byte>> layers;
    for (const BootedLayer& layer : engine->layers()) {
      std::vector<std::byte>& all = layers.emplace_back();
      for (const auto part : {layer.planes13, layer.sc13, layer.planes2, layer.sc2}) {
        std::vector<std::byte> bytes(part.begin(), layer.device < 0 ? part.end() : part.begin());
        if (layer.device >= 0) {
          bytes.resize(part.size());
          HP_TRY(engine->device()->Download(part.data(), bytes));
        }
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
    }
    failed_before_end_ = fake.failed() != 0;
    return layers;
  }
  std::vector<std::vector<std::byte>> HostBytes() {
    EngineOptions options = Options();
    options.device.cuda = false;
    options.base_residency = Residency::kAuto;
    return *Boot(options);
  }

  static inline const Controls fake;
  TestDirectory directory_;
  bool failed_before_end_ = false;  // of the last boot, before its engine was destroyed
};

TEST_F(FakeCuda, ABootLandsWhatTheHostHasAndGivesAllBack) {
  const auto expected = HostBytes();
  for (const bool verify_on_device : {true, false}) {
    const uint64_t launches = fake.calls("cuLaunchKernel");
    const auto booted = Boot(Options(verify_on_device));
    ASSERT_TRUE(booted) << booted.error().ToString();
    EXPECT_EQ(*booted, expected);
    EXPECT_EQ(fake.calls("cuLaunchKernel") > launches, verify_on_device);
    EXPECT_EQ(fake.live(), 0);
  }
}

// Each call that can fail does so at its first, second, ... use, out of memory and otherwise, until
// a boot goes through without meeting the failure.
TEST_F(FakeCuda, AFailureOfAnyCallIsAStatusAndLeavesNothingBehind) {
  const auto expected = HostBytes();
  const char* const kFunctions[] = {
      "cuDeviceGetCount",     "cuDeviceGet",         "cuDeviceGetName",
      "cuDeviceGetAttribute", "cuMemGetInfo",        "cuDevicePrimaryCtxRetain",
      "cuMemHostAlloc",       "cuMemHostRegister",   "cuMemGetAllocationGranularity",
      "cuMemAddressReserve",  "cuMemCreate",         "cuMemMap",
      "cuMemSetAccess",       "cuMemcpyHtoDAsync",   "cuMemcpyDtoH",
      "cuStreamCreate",       "cuStreamSynchronize", "cuStreamWaitEvent",
      "cuEventCreate",        "cuEventRecord",       "cuEventQuery",
      "cuEventSynchronize",   "cuModuleLoadData",    "cuModuleGetFunction",
      "cuLaunchKernel"};
  for (const char* function : kFunctions) {
    for (const CUresult error : {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_LAUNCH_FAILED}) {
      for (uint64_t skip = 0;; ++skip) {
        fake.fail(function, skip, error, false);
        const auto booted = Boot(Options());
        const bool met = fake.failed() != 0;
        fake.heal();
        ASSERT_TRUE(met || skip > 0 || std::string(function) == "cuEventQuery")
            << function << " is not called any more";
        ASSERT_EQ(fake.live(), 0) << function << ", call " << skip;
        if (booted) {
          ASSERT_EQ(*booted, expected) << function << ", call " << skip;
        }
        if (!met) break;
        if (booted) continue;  // there was another way
        EXPECT_NE(booted.error().code(), StatusCode::kData) << booted.error().ToString();
        if (error == CUDA_ERROR_OUT_OF_MEMORY && std::string(function) == "cuMemCreate") {
          EXPECT_EQ(booted.error().exit_code(), 4) << booted.error().ToString();
        }
      }
    }
  }
  const auto well = Boot(Options());
  ASSERT_TRUE(well) << well.error().ToString();
  EXPECT_EQ(*well, expected);
}

TEST_F(FakeCuda, ALostDeviceEndsTheBootWherever) {
  const auto expected = HostBytes();
  const uint64_t before = fake.calls("");
  ASSERT_TRUE(Boot(Options()));
  const uint64_t calls = fake.calls("") - before;
  for (uint64_t at = 0; at < calls; at += 1 + calls / 60) {
    fake.fail("", at, CUDA_ERROR_ILLEGAL_ADDRESS, true);
    const auto booted = Boot(Options());
    const bool met = fake.failed() != 0;
    fake.heal();
    ASSERT_EQ(fake.live(), 0) << "lost at call " << at;
    if (!met) continue;
    if (booted) {
      EXPECT_FALSE(failed_before_end_) << "lost at call " << at;
      EXPECT_EQ(*booted, expected) << "lost at call " << at;
    } else {
      EXPECT_EQ(booted.error().exit_code(), 1) << booted.error().ToString();
    }
  }
  EXPECT_TRUE(Boot(Options()));
}

TEST_F(FakeCuda, WhatDoesNotFitIsRefusedBeforeAByteIsCopied) {
  fake.memory(260 * kMiB);
  const uint64_t copies = fake.calls("cuMemcpyHtoDAsync");
  const auto booted = Boot(Options());
  ASSERT_FALSE(booted);
  EXPECT_EQ(booted.error().exit_code(), 4) << booted.error().ToString();
  EXPECT_EQ(fake.calls("cuMemcpyHtoDAsync"), copies);
  EXPECT_EQ(fake.live(), 0);
  EngineOptions some = Options();
  some.base_residency = Residency::kAuto;
  const auto rest_on_host = Boot(some);
  ASSERT_TRUE(rest_on_host) << rest_on_host.error().ToString();
  EXPECT_EQ(*rest_on_host, HostBytes());
}

TEST_F(FakeCuda, AFlippedBitIsFoundByTheDeviceAndNamed) {
  const std::string file = [&] {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(store()))
      if (entry.path().filename() == "layer-0001.base") return entry.path().string();
    return std::string();
  }();
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(-4000, std::ios::end);
  stream.put('\x55');
  stream.put('\x55');
  stream.close();
  const auto booted = Boot(Options());
  ASSERT_FALSE(booted);
  EXPECT_EQ(booted.error().exit_code(), 3) << booted.error().ToString();
  EXPECT_EQ(booted.error().file(), file);
  EXPECT_EQ(fake.live(), 0);
}

// Forwards of booted layers, on arrays of the host and on what the fake takes for memory of the
// device.
class FakeCudaCompute : public FakeCuda {
 protected:
  static constexpr uint32_t kTokens = 3, kTopK = 2, kHidden = 128;

  void SetUp() override {
    FakeCuda::SetUp();
    if (IsSkipped()) return;
    SynthStoreOptions synth;
    synth.geometry = {4, kHidden, 64};
    synth.layers = 2;
    synth.encodings = {Encoding::kBase, Encoding::kDeltaQuintal};
    synth.worker_count = 1;
    ASSERT_TRUE(SynthStore(PosixEnv(), fp4_store(), synth).has_value());
  }
  std::string fp4_store() const { return directory_.path() + "/fp4"; }

  struct Outcome {
    std::vector<float> on_host;
    std::vector<uint16_t> on_device;
    bool operator==(const Outcome&) const = default;
  };

  Result<Outcome> Compute() {
    EngineOptions options = Options();
    options.store_directory = fp4_store();
    HP_ASSIGN(const std::unique_ptr<Engine> engine, Engine::Open(PosixEnv(), options));
    HP_TRY(engine->Boot({}));
    calls_before_ = fake.calls("");
    Outcome outcome;
    outcome.on_host.resize(kTokens * kHidden);
    std::vector<float> x(kTokens * kHidden);
    alignas(16) int32_t ids[] = {0, 3, 1, 1, 2, 0};
    alignas(16) float weights[] = {1, 0.5f, -1, 2, 0.25f, 1};
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 13) - 6;
    MoeRequest request;
    request.layer = 1;
    request.arithmetic = Arithmetic::kFast;
    request.precision = Precision::kFp4;
    request.token_count = kTokens;
    request.top_k = kTopK;
    request.x = x.data();
    request.ids = ids;
    request.weights = weights;
    request.y = outcome.on_host.data();
    HP_TRY(engine->MoeForward(request));
    HP_TRY(engine->LoadFp4OnDevice(1, std::vector<uint32_t>{0, 1, 2, 3}));
    HP_ASSIGN(const uint64_t bytes, engine->MoeWorkspaceBytes(1, kTokens, kTopK));
    std::vector<uint16_t> rounded(x.size());
    // Small whole numbers are bfloat16 as they are.
    for (size_t i = 0; i < x.size(); ++i)
      rounded[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(x[i]) >> 16);
    outcome.on_device.resize(x.size());
    std::vector<std::byte> workspace(bytes);
    DeviceMoeRequest on_device;
    on_device.layer = 1;
    on_device.precision = DevicePrecision::kFp4;
    on_device.token_count = kTokens;
    on_device.top_k = kTopK;
    on_device.x = rounded.data();
    on_device.ids = ids;
    on_device.weights = weights;
    on_device.y = outcome.on_device.data();
    on_device.workspace = workspace.data();
    on_device.workspace_bytes = bytes;
    HP_TRY(engine->MoeForwardOnDevice(on_device));
    HP_ASSIGN(const CudaDriver* const driver, FindCudaDriver());
    const CUresult waited = driver->cuStreamSynchronize(nullptr);
    // Of a device that is well the work goes on while its arrays are there.
    if (waited != CUDA_SUCCESS) (void)driver->cuStreamSynchronize(nullptr);
    HP_CUDA_TRY(*driver, "cannot wait", waited);
    HP_TRY(engine->TakeMoeRefusal(1));
    return outcome;
  }

  uint64_t calls_before_ = 0;  // of Compute's: those of the boot
};

TEST_F(FakeCudaCompute, AFailureOfAnyCallIsAStatusAndLeavesNothingBehind) {
  const auto expected = Compute();
  ASSERT_TRUE(expected) << expected.error().ToString();
  const char* const kFunctions[] = {
      "cuDeviceGetAttribute", "cuMemAlloc",          "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync",
      "cuStreamCreate",       "cuStreamSynchronize", "cuModuleLoadData",  "cuModuleGetFunction",
      "cuFuncSetAttribute",   "cuLaunchKernelEx"};
  for (const char* function : kFunctions) {
    for (const CUresult error : {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_LAUNCH_FAILED}) {
      for (uint64_t skip = 0;; ++skip) {
        fake.fail(function, skip, error, false);
        const auto computed = Compute();
        const bool met = fake.failed() != 0;
        fake.heal();
        ASSERT_TRUE(met || skip > 0) << function << " is not called any more";
        ASSERT_EQ(fake.live(), 0) << function << ", call " << skip;
        if (computed) {
          ASSERT_EQ(*computed, *expected) << function << ", call " << skip;
        } else {
          EXPECT_NE(computed.error().code(), StatusCode::kData) << computed.error().ToString();
        }
        if (!met) break;
      }
    }
  }
}

// Those that wait by themselves wait for the default stream too, and end what callers capture.
TEST_F(FakeCudaCompute, CopiesBackAreOnAStreamOfItsOwn) {
  const uint64_t waiting = fake.calls("cuMemcpyDtoH"), own = fake.calls("cuMemcpyDtoHAsync");
  const auto computed = Compute();
  ASSERT_TRUE(computed) << computed.error().ToString();
  EXPECT_EQ(fake.calls("cuMemcpyDtoH"), waiting);
  EXPECT_EQ(fake.calls("cuMemcpyDtoHAsync"), own + 3) << "y, its refusal and the layer's";
}

TEST_F(FakeCudaCompute, ALostDeviceIsAStatusWherever) {
  ASSERT_TRUE(Compute());
  const uint64_t end = fake.calls(""), first = calls_before_;
  const uint64_t before = end;
  ASSERT_TRUE(Compute());
  const uint64_t boot = calls_before_ - before;
  for (uint64_t at = boot; at < boot + (end - first); ++at) {
    fake.fail("", at, CUDA_ERROR_ILLEGAL_ADDRESS, true);
    const auto computed = Compute();
    const bool met = fake.failed() != 0;
    fake.heal();
    ASSERT_EQ(fake.live(), 0) << "lost at call " << at;
    if (met && computed) {
      EXPECT_EQ(*computed, *Compute()) << "lost at call " << at;
    }
  }
}

// Streams that wait for layers, as their words and as host functions.
class FakeCudaGates : public FakeCuda {
 protected:
  // A stream waits for every layer of a boot, a second one for the last; true: both have passed.
  Result<bool> BootWithWaits() {
    HP_ASSIGN(const std::unique_ptr<Engine> engine, Engine::Open(PosixEnv(), Options()));
    HP_ASSIGN(const CudaDriver* const driver, FindCudaDriver());
    Streams streams(*driver);
    HP_TRY(streams.Open());
    for (const uint32_t layer : {0u, 1u, 2u})
      HP_TRY(engine->StreamWaitLayer(layer, streams.stream[0]));
    HP_TRY(engine->StreamWaitLayer(2, streams.stream[1]));
    HP_ASSIGN(const bool early, streams.Passed());
    EXPECT_FALSE(early);
    HP_TRY(engine->Boot({}));
    return streams.Passed();
  }

  struct Streams {
    explicit Streams(const CudaDriver& of) : driver(of) {}
    ~Streams() {
      for (CUevent each : event)
        if (each != nullptr) (void)driver.cuEventDestroy(each);
      for (CUstream each : stream)
        if (each != nullptr) (void)driver.cuStreamDestroy(each);
    }
    Result<void> Open() {
      const CurrentContext current(driver, nullptr);
      for (size_t i : {0, 1}) {
        HP_CUDA_TRY(driver, "stream", driver.cuStreamCreate(&stream[i], CU_STREAM_NON_BLOCKING));
        HP_CUDA_TRY(driver, "event", driver.cuEventCreate(&event[i], CU_EVENT_DISABLE_TIMING));
      }
      return {};
    }
    Result<bool> Passed() {
      bool all = true;
      for (size_t i : {0, 1}) {
        HP_CUDA_TRY(driver, "record", driver.cuEventRecord(event[i], stream[i]));
        CUresult passed = CUDA_ERROR_NOT_READY;
        for (int again = 0; again < 5 && passed == CUDA_ERROR_NOT_READY; ++again)
          passed = driver.cuEventQuery(event[i]);
        if (passed != CUDA_ERROR_NOT_READY) HP_CUDA_TRY(driver, "query", passed);
        all = all && passed == CUDA_SUCCESS;
      }
      return all;
    }
    const CudaDriver& driver;
    CUstream stream[2] = {};
    CUevent event[2] = {};
  };
};

TEST_F(FakeCudaGates, WhereTheDeviceCannotWaitForMemoryHostFunctionsDo) {
  const uint64_t words = fake.calls("cuStreamWaitValue32");
  const uint64_t functions = fake.calls("cuLaunchHostFunc");
  const auto passed = BootWithWaits();
  ASSERT_TRUE(passed) << passed.error().ToString();
  EXPECT_TRUE(*passed);
  EXPECT_EQ(fake.calls("cuStreamWaitValue32") - words, 4u);
  EXPECT_EQ(fake.calls("cuLaunchHostFunc"), functions);
  fake.fail("cuStreamWaitValue32", 0, CUDA_ERROR_NOT_SUPPORTED, false);
  const auto by_host = BootWithWaits();
  ASSERT_TRUE(by_host) << by_host.error().ToString();
  EXPECT_EQ(fake.calls("cuStreamWaitValue32") - words, 5u) << "asked once";
  EXPECT_EQ(fake.calls("cuLaunchHostFunc") - functions, 4u);
  EXPECT_EQ(fake.live(), 0);
}

TEST_F(FakeCudaGates, AFailureOfAnyCallIsAStatusAndLeavesNothingBehind) {
  const char* const kFunctions[] = {
      "cuMemHostAlloc",      "cuStreamIsCapturing", "cuEventCreate",
      "cuStreamWaitValue32", "cuEventRecord",       "cuCtxGetStreamPriorityRange",
      "cuEventSynchronize",  "cuFuncLoad",          "cuStreamCreateWithPriority"};
  for (const char* function : kFunctions) {
    for (uint64_t skip = 0;; ++skip) {
      fake.fail(function, skip, CUDA_ERROR_LAUNCH_FAILED, false);
      const auto passed = BootWithWaits();
      const bool met = fake.failed() != 0;
      fake.heal();
      ASSERT_TRUE(met || skip > 0) << function << " is not called any more";
      ASSERT_EQ(fake.live(), 0) << function << ", call " << skip;
      if (!met) break;
    }
  }
  EXPECT_TRUE(BootWithWaits());
}

// The queues are the process's: streams of all its engines count, and count no more when they have
// passed.
TEST_F(FakeCudaGates, AtMostFourStreamsOfAProcessWait) {
  const CudaDriver* const driver = FindCudaDriver().value();
  Streams first(*driver), second(*driver), third(*driver);
  for (Streams* streams : {&first, &second, &third}) ASSERT_TRUE(streams->Open());
  {
    const auto one = Engine::Open(PosixEnv(), Options()).value();
    const auto other = Engine::Open(PosixEnv(), Options()).value();
    for (CUstream stream : first.stream) ASSERT_TRUE(one->StreamWaitLayer(0, stream));
    for (CUstream stream : second.stream) ASSERT_TRUE(other->StreamWaitLayer(2, stream));
    for (Engine* engine : {one.get(), other.get()}) {
      const auto refused = engine->StreamWaitLayer(1, third.stream[0]);
      ASSERT_FALSE(refused);
      EXPECT_EQ(refused.error().code(), StatusCode::kUsage);
      EXPECT_NE(refused.error().what().find("of this process"), std::string::npos);
      // One that waits already may wait for more, for either engine's layers.
      EXPECT_TRUE(engine->StreamWaitLayer(1, first.stream[0]));
    }
    ASSERT_TRUE(one->Boot({}));
    // first.stream[0] goes on to wait for `other`.
    EXPECT_TRUE(other->StreamWaitLayer(1, third.stream[0]));
    EXPECT_FALSE(other->StreamWaitLayer(1, third.stream[1]));
    ASSERT_TRUE(other->Boot({}));
  }
  // Those of engines that are gone are not counted.
  const auto engine = Engine::Open(PosixEnv(), Options()).value();
  for (Streams* streams : {&first, &second})
    for (CUstream stream : streams->stream) EXPECT_TRUE(engine->StreamWaitLayer(0, stream));
  EXPECT_FALSE(engine->StreamWaitLayer(0, third.stream[0]));
}

TEST_F(FakeCudaGates, AnEngineWithoutADeviceHasNoGates) {
  EngineOptions options = Options();
  options.device.cuda = false;
  options.base_residency = Residency::kAuto;
  const auto engine = Engine::Open(PosixEnv(), options).value();
  const auto waits = engine->StreamWaitLayer(0, nullptr);
  ASSERT_FALSE(waits);
  EXPECT_EQ(waits.error().exit_code(), 2) << waits.error().ToString();
}

// Builds from a checkpoint, in memory of the host but for the matrices.
class FakeCudaBuild : public FakeCuda {
 protected:
  static inline const std::string kCheckpoint = "/model";

  void SetUp() override {
    FakeCuda::SetUp();
    SynthCheckpointOptions synth;
    synth.format = SourceFormat::kFp8;
    synth.geometry = {3, 128, 64};
    synth.main_layers = 2;
    WorkerPool pool(1);
    ASSERT_TRUE(WriteSynthCheckpoint(env_, kCheckpoint, synth, pool).has_value());
    expected_ = Planes(Build(nullptr));
    ASSERT_FALSE(expected_.empty());
  }
  // Into a fresh store.
  Result<BuildReport> Build(Device* device) {
    store_ = Text("/store-{}", ++stores_);
    HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(env_, kCheckpoint));
    HP_ASSIGN(const MoeModel model, DiscoverMoe(checkpoint));
    BuildOptions options;
    options.encodings = {Encoding::kBase, Encoding::kDeltaQuintal};
    options.worker_count = 2;
    options.device = device;
    return hotplane::Build(env_, checkpoint, model, store_, options);
  }
  Result<BuildReport> BuildOnDevice() {
    HP_ASSIGN(const std::unique_ptr<Device> device,
              OpenCudaDevice(0, {.ring_bytes = 16 * kMiB, .thread_count = 1}));
    return Build(device.get());
  }
  // Of the last build; none where there is no whole layer.
  std::vector<std::byte> Planes(const Result<BuildReport>& built) {
    std::vector<std::byte> all;
    if (!built) return all;
    const Generation generation = Store::Open(env_, store_)->OpenGeneration("").value();
    for (const uint32_t layer : {0u, 1u}) {
      for (const Encoding encoding : {Encoding::kBase, Encoding::kDeltaQuintal}) {
        const LayerFile file = generation.OpenLayer(layer, encoding).value();
        std::vector<std::byte> bytes(file.layout().file_bytes - file.layout().data_offset);
        EXPECT_TRUE(ReadFully(file.file(), file.layout().data_offset, bytes));
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
    }
    return all;
  }
  // The build is done and right, or a Status of the system or of the memory; nothing is left.
  void ExpectHonest(const Result<BuildReport>& built, const std::string& when) {
    ASSERT_EQ(fake.live(), 0) << when;
    if (built) {
      ASSERT_EQ(Planes(built), expected_) << when;
    } else {
      const int code = built.error().exit_code();
      EXPECT_TRUE(code == 1 || code == 4) << when << ": " << built.error().ToString();
    }
  }

  MemEnv env_;
  int stores_ = 0;
  std::string store_;
  std::vector<std::byte> expected_;
};

TEST_F(FakeCudaBuild, OnTheDeviceAsOnTheCpuAndAllIsGivenBack) {
  const uint64_t launches = fake.calls("cuLaunchKernel");
  const auto built = BuildOnDevice();
  ASSERT_TRUE(built) << built.error().ToString();
  EXPECT_EQ(built->bytes_quantized_on_device, built->bytes_read);
  EXPECT_EQ(Planes(built), expected_);
  // Each matrix is counted and quantized.
  EXPECT_EQ(fake.calls("cuLaunchKernel") - launches, 2u * 3 * 3 * 2);
  EXPECT_EQ(fake.live(), 0);
}

TEST_F(FakeCudaBuild, AFailureOfAnyCallIsAStatusOrLeavesItToTheCpu) {
  const char* const kFunctions[] = {
      "cuMemGetInfo",      "cuMemAlloc",         "cuMemHostAlloc",   "cuMemHostRegister",
      "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync",  "cuStreamCreate",   "cuEventCreate",
      "cuEventRecord",     "cuEventSynchronize", "cuModuleLoadData", "cuModuleGetFunction",
      "cuLaunchKernel"};
  for (const char* function : kFunctions) {
    for (const CUresult error : {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_LAUNCH_FAILED}) {
      for (uint64_t skip = 0; skip < 20; ++skip) {
        fake.fail(function, skip, error, false);
        const auto built = BuildOnDevice();
        const bool met = fake.failed() != 0;
        fake.heal();
        ExpectHonest(built, Text("{}, call {}", function, skip));
        if (!met) break;
        if (error == CUDA_ERROR_LAUNCH_FAILED) {
          EXPECT_FALSE(built) << function << ", call " << skip;
        }
      }
    }
  }
  EXPECT_TRUE(BuildOnDevice());
}

TEST_F(FakeCudaBuild, ALostDeviceEndsTheBuildWherever) {
  // About as many are those that give back, after the last layer.
  constexpr uint64_t kLastCalls = 50;
  const uint64_t before = fake.calls("");
  ASSERT_TRUE(BuildOnDevice());
  const uint64_t calls = fake.calls("") - before;
  for (uint64_t at = 0; at < calls; at += 1 + calls / 50) {
    fake.fail("", at, CUDA_ERROR_ILLEGAL_ADDRESS, true);
    const auto built = BuildOnDevice();
    const bool met = fake.failed() != 0;
    fake.heal();
    ExpectHonest(built, Text("lost at call {}", at));
    if (met && at + kLastCalls < calls) {
      EXPECT_FALSE(built) << "lost at call " << at;
    }
  }
  EXPECT_TRUE(BuildOnDevice());
}

// Only some workers' matrices fit beside what else is there.
TEST_F(FakeCudaBuild, WhatDoesNotFitIsLeftToTheCpu) {
  fake.memory(256 * kMiB + 4096);
  const auto built = BuildOnDevice();
  ASSERT_TRUE(built) << built.error().ToString();
  EXPECT_EQ(built->bytes_quantized_on_device, 0u);
  ExpectHonest(built, "no memory");
}

// Cold boots from a checkpoint.
class FakeCudaCold : public FakeCuda {
 protected:
  static constexpr uint64_t kSourceBytes = 2 * 3 * 3 * 128 * 64 * 2;  // of WriteCheckpoint

  void WriteCheckpoint() {
    SynthCheckpointOptions synth;
    synth.format = SourceFormat::kBf16;
    synth.geometry = {3, 128, 64};
    synth.main_layers = 2;
    WorkerPool pool(1);
    ASSERT_TRUE(WriteSynthCheckpoint(PosixEnv(), checkpoint(), synth, pool).has_value());
  }
  std::string checkpoint() const { return directory_.path() + "/model"; }
  EngineOptions ColdOptions(bool cuda = true) {
    EngineOptions options = Options();
    options.device.cuda = cuda;
    if (!cuda) options.base_residency = Residency::kAuto;
    options.store_directory = directory_.path() + Text("/cold-{}", ++stores_);
    options.checkpoint = checkpoint();
    return options;
  }
  int stores_ = 0;
};

TEST_F(FakeCudaCold, WhatIsBuiltOnTheDeviceIsNotCopiedThereAgain) {
  ASSERT_NO_FATAL_FAILURE(WriteCheckpoint());
  const auto expected = Boot(ColdOptions(false));
  ASSERT_TRUE(expected) << expected.error().ToString();
  const uint64_t downloads = fake.calls("cuMemcpyDtoHAsync");
  const uint64_t uploaded = fake.uploaded();
  const auto layers = Boot(ColdOptions());
  ASSERT_TRUE(layers) << layers.error().ToString();
  EXPECT_EQ(*layers, *expected);
  EXPECT_GT(fake.calls("cuMemcpyDtoHAsync"), downloads);
  // The sources, the workers' tables of thresholds, and the gaps of the files.
  EXPECT_GE(fake.uploaded() - uploaded, kSourceBytes);
  EXPECT_LT(fake.uploaded() - uploaded, kSourceBytes + 2 * 2048 + 2 * 4 * kPageBytes);
  EXPECT_EQ(fake.live(), 0);
}

// Where the device has no memory for a worker, the CPU quantizes, and its planes go there once.
TEST_F(FakeCudaCold, WhatTheCpuQuantizesIsCopiedThereAndKept) {
  ASSERT_NO_FATAL_FAILURE(WriteCheckpoint());
  const auto expected = Boot(ColdOptions(false));
  ASSERT_TRUE(expected) << expected.error().ToString();
  EngineOptions options = ColdOptions();
  uint64_t planes = 0;
  for (const auto& layer : *expected) planes += layer.size();
  options.boot.memory_limit_bytes = planes + 3 * kPageBytes * 2;
  const auto engine = Engine::Open(PosixEnv(), options).value();
  const auto booted = engine->Boot({});
  ASSERT_TRUE(booted) << booted.error().ToString();
  EXPECT_EQ(engine->build_report().bytes_quantized_on_device, 0u);
  EXPECT_EQ(engine->report().bytes_read, 0u);
  EXPECT_EQ(engine->report().bytes_verified, engine->report().bytes_kept);
  EXPECT_GT(engine->report().bytes_kept, 0u);
}

// A stream waits for layers that are built meanwhile, on the CPU where the device has no memory for
// a worker: to give memory back would wait for that stream, for ever.
TEST_F(FakeCudaCold, NothingIsGivenBackWhileAStreamWaitsForWhatIsBuilt) {
  ASSERT_NO_FATAL_FAILURE(WriteCheckpoint());
  const auto expected = Boot(ColdOptions(false));
  ASSERT_TRUE(expected) << expected.error().ToString();
  const CudaDriver* const driver = FindCudaDriver().value();
  for (const char* function : {"", "cuStreamCreate", "cuEventCreate", "cuMemAlloc",
                               "cuMemHostAlloc", "cuMemHostRegister", "cuMemcpyHtoDAsync"}) {
    for (uint64_t skip = 0; skip < 4; ++skip) {
      {
        const auto engine = Engine::Open(PosixEnv(), ColdOptions()).value();
        CUstream stream = nullptr;
        {
          const CurrentContext current(*driver, nullptr);
          ASSERT_EQ(driver->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
        }
        ASSERT_TRUE(engine->StreamWaitLayer(1, stream));
        const uint64_t frees = fake.frees_while_waiting();
        if (*function != '\0') fake.fail(function, skip, CUDA_ERROR_OUT_OF_MEMORY, false);
        const auto booted = engine->Boot({});
        if (booted) {
          EXPECT_EQ(fake.frees_while_waiting(), frees) << function << ", call " << skip;
        }
        fake.heal();
        (void)driver->cuStreamDestroy(stream);
      }
      ASSERT_EQ(fake.live(), 0) << function << ", call " << skip;
      if (*function == '\0') break;
    }
  }
}

TEST_F(FakeCudaCold, AFailureOfAnyCallIsAStatusAndLeavesNothingBehind) {
  ASSERT_NO_FATAL_FAILURE(WriteCheckpoint());
  const auto expected = Boot(ColdOptions(false));
  for (const char* function : {"cuMemCreate", "cuMemAlloc", "cuMemcpyHtoDAsync",
                               "cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuLaunchKernel",
                               "cuEventSynchronize", "cuStreamCreateWithPriority"}) {
    for (uint64_t skip = 0; skip < 40; ++skip) {
      fake.fail(function, skip, CUDA_ERROR_LAUNCH_FAILED, false);
      const auto booted = Boot(ColdOptions());
      const bool met = fake.failed() != 0;
      fake.heal();
      ASSERT_TRUE(met || skip > 0) << function << " is not called any more";
      ASSERT_EQ(fake.live(), 0) << function << ", call " << skip;
      if (booted) {
        ASSERT_EQ(*booted, *expected) << function << ", call " << skip;
      }
      if (!met) break;
    }
  }
}

}  // namespace
}  // namespace hotplane
