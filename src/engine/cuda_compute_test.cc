// Experts of layers on a GPU, by the engine: on arrays of the host and of the device. Skipped, and
// saying so, where there is none; ctest also runs this on the fake driver of src/device/fake.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <random>

#include "base/units.h"
#include "checkpoint/synth_checkpoint.h"
#include "device/fake/fake_cuda.h"
#include "engine/engine.h"
#include "engine/synth.h"
#include "io/test_directory.h"
#include "moe/moe_cuda_testing.h"
#include "moe/reference.h"

namespace hotplane {
namespace {

using moe_cuda_testing::Buffer;
using moe_cuda_testing::Gpu;

constexpr uint32_t kExperts = 6;
constexpr uint32_t kHidden = 128;
constexpr uint32_t kIntermediate = 64;
constexpr size_t kTokens = 7;
constexpr size_t kTopK = 3;
const std::vector<uint8_t> kMixed = {1, 2, 1, 2, 2, 1};

class CudaComputeTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    gpu_ = Gpu::Open(&why);
    if (gpu_ == nullptr) GTEST_SKIP() << "no CUDA device: " << why;
    std::mt19937 random(3);
    for (float& v : x_) v = FromBf16(ToBf16(std::normal_distribution<float>()(random)));
    for (float& v : weights_) v = std::uniform_real_distribution<float>(0, 1)(random);
    for (int32_t& id : ids_) id = static_cast<int32_t>(random() % kExperts);
  }

  // The engine that boots it on the GPU, and one on the host to compare with.
  void Make(std::vector<Encoding> encodings, bool biases = false, EngineOptions options = {}) {
    host_ = nullptr;
    engine_ = nullptr;
    options.store_directory = directory_.path() + "/store-" + std::to_string(++stores_);
    SynthStoreOptions synth;
    synth.geometry = {store_experts_, kHidden, kIntermediate, biases};
    synth.layers = 2;
    synth.encodings = std::move(encodings);
    synth.worker_count = 1;
    const auto made = SynthStore(PosixEnv(), options.store_directory, synth);
    ASSERT_TRUE(made) << made.error().ToString();
    options.worker_count = 2;
    host_ = Boot(options);
    options.device.cuda = true;
    options.device_options.ring_bytes = 16 * kMiB;
    options.device_options.thread_count = 2;
    engine_ = Boot(options);
  }
  static std::unique_ptr<Engine> Boot(const EngineOptions& options) {
    auto engine = Engine::Open(PosixEnv(), options);
    EXPECT_TRUE(engine) << engine.error().ToString();
    const Result<void> booted = (*engine)->Boot([](const BootedLayer&) {});
    EXPECT_TRUE(booted) << booted.error().ToString();
    return std::move(*engine);
  }

  MoeRequest Request(uint32_t layer) {
    MoeRequest request;
    request.layer = layer;
    request.arithmetic = Arithmetic::kFast;
    request.token_count = kTokens;
    request.top_k = kTopK;
    request.x = x_.data();
    request.ids = ids_.data();
    request.weights = weights_.data();
    request.y = y_.data();
    return request;
  }

  // FP4 as the nibbles that the records give, whatever the store has.
  void ExpectReference(const MoeRequest& request, const std::vector<float>& y) {
    const BootedLayer& layer = **host_->WaitLayer(request.layer);
    std::vector<std::vector<std::byte>> records;
    std::vector<ExpertWeights> experts(kExperts);
    for (uint32_t e = 0; e < kExperts; ++e) {
      const auto piece = [&](std::span<const std::byte> part) {
        return part.empty() ? nullptr : part.data() + part.size() / kExperts * e;
      };
      ExpertWeights& expert = experts[e];
      expert.precision = request.precisions.empty() ? request.precision
                                                    : static_cast<Precision>(request.precisions[e]);
      expert.planes13 = piece(layer.planes13);
      expert.sc13 = piece(layer.sc13);
      expert.planes2 = piece(layer.planes2);
      expert.sc2 = piece(layer.sc2);
      expert.bias13 = piece(layer.bias13);
      expert.bias2 = piece(layer.bias2);
      if (expert.precision == Precision::kBase) continue;
      const size_t w13 = NibblePlaneBytes(2 * kIntermediate, kHidden);
      std::vector<std::byte>& record = records.emplace_back(w13 / 2 * 3);
      ASSERT_TRUE(host_->ReadFp4(request.layer, e, record));
      expert.fp_encoding = Encoding::kDeltaNibble;
      expert.fp13 = record.data();
      expert.fp2 = record.data() + w13;
    }
    MoeCall call;
    call.geometry = layer.geometry;
    call.activation = host_->generation().manifest().activation;
    call.arithmetic = Arithmetic::kBf16;
    call.token_count = request.token_count;
    call.top_k = request.top_k;
    call.x = request.x;
    call.ids = request.ids;
    call.weights = request.weights;
    call.experts = experts;
    const MoeReference reference = ReferenceMoe(call);
    double largest = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      ASSERT_LE(std::fabs(double{y[i]} - reference.y[i]), reference.bound[i]) << i;
      largest = std::max(largest, std::fabs(reference.y[i]));
    }
    EXPECT_GT(largest, 0);
  }
  void ExpectComputes(const MoeRequest& request) {
    std::fill(y_.begin(), y_.end(), 12345.0f);
    const Result<void> done = engine_->MoeForward(request);
    ASSERT_TRUE(done) << done.error().ToString();
    ExpectReference(request, y_);
  }
  void ExpectFailure(const Result<void>& done, StatusCode code, const std::string& text) {
    ASSERT_FALSE(done) << text;
    EXPECT_EQ(done.error().code(), code) << done.error().ToString();
    EXPECT_NE(done.error().ToString().find(text), std::string::npos) << done.error().ToString();
  }

  void Clear(CUdeviceptr at, size_t bytes) {
    EXPECT_EQ(gpu_->driver.cuMemsetD8(at, 0, bytes), CUDA_SUCCESS);
    EXPECT_EQ(gpu_->driver.cuCtxSynchronize(), CUDA_SUCCESS);
  }

  // The same call on arrays of the device, with the stream of `gpu_`.
  struct OnDevice {
    Buffer x, ids, weights, y, precisions, workspace;
    DeviceMoeRequest request;
  };
  OnDevice Place(uint32_t layer, std::vector<uint8_t> precisions = {}) {
    const auto tokens = static_cast<uint32_t>(x_.size() / kHidden);
    OnDevice call;
    std::vector<uint16_t> rounded;
    for (const float v : x_) rounded.push_back(ToBf16(v));
    call.x = Buffer(*gpu_, std::span<const uint16_t>(rounded));
    call.ids = Buffer(*gpu_, std::span<const int32_t>(ids_));
    call.weights = Buffer(*gpu_, std::span<const float>(weights_));
    call.y = Buffer(*gpu_, std::span<const uint16_t>(rounded));
    const Result<uint64_t> bytes = engine_->MoeWorkspaceBytes(layer, tokens, kTopK);
    EXPECT_TRUE(bytes) << bytes.error().ToString();
    call.workspace = Buffer(*gpu_, *bytes);
    Clear(call.workspace.address(), kDeviceWorkspaceZeros);
    call.request.layer = layer;
    if (!precisions.empty()) {
      call.precisions = Buffer(*gpu_, std::span<const uint8_t>(precisions));
      call.request.precisions = call.precisions.as<uint8_t>();
    }
    call.request.token_count = tokens;
    call.request.top_k = kTopK;
    call.request.x = call.x.as<uint16_t>();
    call.request.ids = call.ids.as<int32_t>();
    call.request.weights = call.weights.as<float>();
    call.request.y = call.y.as<uint16_t>();
    call.request.workspace = call.workspace.as<std::byte>();
    call.request.workspace_bytes = call.workspace.bytes();
    call.request.stream = gpu_->stream;
    return call;
  }
  std::vector<float> Run(const OnDevice& call) {
    const Result<void> done = engine_->MoeForwardOnDevice(call.request);
    EXPECT_TRUE(done) << done.error().ToString();
    EXPECT_EQ(gpu_->Wait(), CUDA_SUCCESS);
    std::vector<float> y;
    for (const uint16_t v : call.y.Download<uint16_t>()) y.push_back(FromBf16(v));
    return y;
  }

  std::unique_ptr<Gpu> gpu_;
  const TestDirectory directory_;
  int stores_ = 0;
  uint32_t store_experts_ = kExperts;  // of what Make makes; ExpectReference knows kExperts
  std::unique_ptr<Engine> host_, engine_;
  std::vector<float> x_ = std::vector<float>(kTokens * kHidden);
  std::vector<float> weights_ = std::vector<float>(kTokens * kTopK);
  std::vector<int32_t> ids_ = std::vector<int32_t>(kTokens * kTopK);
  std::vector<float> y_ = std::vector<float>(kTokens * kHidden);
};

TEST_F(CudaComputeTest, ComputesBaseFp4AndBothFromEitherEncoding) {
  for (const Encoding encoding : {Encoding::kDeltaQuintal, Encoding::kDeltaNibble}) {
    for (const bool biases : {false, true}) {
      ASSERT_NO_FATAL_FAILURE(Make({Encoding::kBase, encoding}, biases));
      MoeRequest request = Request(1);
      ExpectComputes(request);
      request.precisions = kMixed;
      ExpectComputes(request);
      request.precisions = {};
      request.precision = Precision::kFp4;
      ExpectComputes(request);
      // Records that are on the device are computed from there.
      ASSERT_TRUE(engine_->LoadFp4OnDevice(1, std::vector<uint32_t>{1, 4}));
      const std::vector<float> copied = y_;
      ExpectComputes(request);
      EXPECT_EQ(y_, copied);
      request.token_count = 0;
      EXPECT_TRUE(engine_->MoeForward(request));
    }
  }
}

TEST_F(CudaComputeTest, ComputesOnArraysOfTheDeviceOnTheCallersStream) {
  ASSERT_NO_FATAL_FAILURE(Make({Encoding::kBase, Encoding::kDeltaQuintal}));
  MoeRequest request = Request(1);
  OnDevice call = Place(1);
  const std::vector<float> base = Run(call);
  ExpectReference(request, base);
  ASSERT_TRUE(engine_->MoeForward(request));
  EXPECT_EQ(base, y_);

  std::vector<uint32_t> all(kExperts);
  std::iota(all.begin(), all.end(), 0);
  ASSERT_TRUE(engine_->LoadFp4OnDevice(1, all));
  call.request.precision = DevicePrecision::kFp4;
  const std::vector<float> fp4 = Run(call);
  request.precision = Precision::kFp4;
  ExpectReference(request, fp4);
  EXPECT_EQ(Run(Place(1)), base);

  request.precisions = kMixed;
  ExpectReference(request, Run(Place(1, kMixed)));
  EXPECT_TRUE(engine_->TakeMoeRefusal(1));
}

TEST_F(CudaComputeTest, KernelsThatKnowTheTierComputeWhatIsOfOne) {
  auto* const launches = reinterpret_cast<decltype(&fake_cuda_calls)>(
      dlsym(dlopen("libcuda.so.1", RTLD_NOW), "fake_cuda_calls"));
  if (launches == nullptr) GTEST_SKIP() << "a GPU does not tell which kernels were launched";
  // Too many for blocks of their own.
  constexpr size_t kMany = 60;
  for (std::vector<float>* floats : {&x_, &y_}) floats->resize(kMany * kHidden, 0.25f);
  weights_.resize(kMany * kTopK, 0.5f);
  ids_.resize(kMany * kTopK, 3);
  const auto expect_launch = [&](const char* kernel, const std::function<void()>& call) {
    const uint64_t before = launches(kernel);
    call();
    EXPECT_EQ(launches(kernel), before + 1) << kernel;
  };
  for (const Encoding encoding : {Encoding::kDeltaQuintal, Encoding::kDeltaNibble}) {
    const char* const of_fp4 = encoding == Encoding::kDeltaQuintal ? "hotplane_moe_decode_quintals"
                                                                   : "hotplane_moe_decode_nibbles";
    ASSERT_NO_FATAL_FAILURE(Make({Encoding::kBase, encoding}));
    MoeRequest request = Request(1);
    request.token_count = kMany;
    expect_launch("hotplane_moe_decode_base", [&] { ExpectComputes(request); });
    expect_launch("hotplane_moe_decode_base", [&] { Run(Place(1)); });
    request.precision = Precision::kFp4;
    expect_launch(of_fp4, [&] { ExpectComputes(request); });
    std::vector<uint32_t> all(kExperts);
    std::iota(all.begin(), all.end(), 0);
    ASSERT_TRUE(engine_->LoadFp4OnDevice(1, all));
    OnDevice call = Place(1);
    call.request.precision = DevicePrecision::kFp4;
    expect_launch(of_fp4, [&] { ExpectReference(request, Run(call)); });
    call.request.precision = DevicePrecision::kFp4OrBase;
    expect_launch("hotplane_moe_decode", [&] { ExpectReference(request, Run(call)); });
  }
}

TEST_F(CudaComputeTest, Fp4ThatIsNotOnTheDeviceFallsBackOrIsTold) {
  ASSERT_NO_FATAL_FAILURE(Make({Encoding::kBase, Encoding::kDeltaNibble}));
  std::fill(ids_.begin(), ids_.end(), 2);
  ids_[0] = 5;
  const std::vector<float> base = Run(Place(0));
  OnDevice call = Place(0);
  call.request.precision = DevicePrecision::kFp4OrBase;
  EXPECT_EQ(Run(call), base);
  EXPECT_TRUE(engine_->TakeMoeRefusal(0));

  ASSERT_TRUE(engine_->LoadFp4OnDevice(0, std::vector<uint32_t>{2}));
  MoeRequest request = Request(0);
  const std::vector<uint8_t> only_2 = {1, 1, 2, 1, 1, 1};
  request.precisions = only_2;
  ExpectReference(request, Run(call));

  call.request.precision = DevicePrecision::kFp4;
  const std::vector<float> y = Run(call);
  for (size_t i = 0; i < y.size(); ++i) ASSERT_EQ(std::isnan(y[i]), i < kHidden) << i;
  EXPECT_TRUE(engine_->TakeMoeRefusal(1));
  ExpectFailure(engine_->TakeMoeRefusal(0), StatusCode::kData, "layer 0: expert 5");
  EXPECT_TRUE(engine_->TakeMoeRefusal(0)) << "told once";
}

// Also where their records went bad meanwhile.
TEST_F(CudaComputeTest, Fp4ThatIsOnTheDeviceIsNotReadAgain) {
  ASSERT_NO_FATAL_FAILURE(Make({Encoding::kBase, Encoding::kDeltaNibble}));
  ASSERT_TRUE(engine_->LoadFp4OnDevice(1, std::vector<uint32_t>{1, 4}));
  size_t damaged = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory_.path())) {
    if (!entry.is_regular_file() ||
        entry.path().filename().string().find("nibble") == std::string::npos)
      continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    const std::string zeros(entry.file_size() - 4096, 0);
    file.seekp(4096).write(zeros.data(), static_cast<std::streamsize>(zeros.size()));
    damaged += file.good() ? 1 : 0;
  }
  ASSERT_EQ(damaged, 2u);
  const Result<void> again = engine_->LoadFp4OnDevice(1, std::vector<uint32_t>{4, 1});
  EXPECT_TRUE(again) << again.error().ToString();
  ExpectFailure(engine_->LoadFp4OnDevice(1, std::vector<uint32_t>{1, 2}), StatusCode::kData,
                "expert 2");
}

TEST_F(CudaComputeTest, WhatCannotBeComputedIsNamed) {
  ASSERT_NO_FATAL_FAILURE(Make({Encoding::kBase}));
  MoeRequest request = Request(1);
  request.precision = Precision::kFp4;
  ExpectFailure(engine_->MoeForward(request), StatusCode::kData, "layer 1, expert ");
  ExpectFailure(engine_->LoadFp4OnDevice(1, std::vector<uint32_t>{3}), StatusCode::kData,
                "expert 3");
  ExpectFailure(engine_->LoadFp4OnDevice(1, std::vector<uint32_t>{kExperts}), StatusCode::kUsage,
                "expert 6");
  ids_[4] = kExperts;
  ExpectFailure(engine_->MoeForward(Request(1)), StatusCode::kUsage, "ids [1, 1]");
  const std::vector<float> y = Run(Place(1));
  for (size_t i = 0; i < y.size(); ++i) ASSERT_EQ(std::isnan(y[i]), i / kHidden == 1) << i;
  ExpectFailure(engine_->TakeMoeRefusal(1), StatusCode::kUsage, "assignment 4");
  ids_[4] = 0;

  OnDevice call = Place(1);
  call.request.workspace_bytes -= 1;
  ExpectFailure(engine_->MoeForwardOnDevice(call.request), StatusCode::kUsage, "workspace");
  call = Place(1);
  call.request.x = nullptr;
  ExpectFailure(engine_->MoeForwardOnDevice(call.request), StatusCode::kUsage, "x");
  call.request.precision = static_cast<DevicePrecision>(4);
  ExpectFailure(engine_->MoeForwardOnDevice(call.request), StatusCode::kUsage, "precision");
  call.request.layer = 0;
  call.request.precision = DevicePrecision::kBase;
  ExpectFailure(engine_->MoeForwardOnDevice(call.request), StatusCode::kUsage, "not prepared");
  call.request.layer = 2;
  ExpectFailure(engine_->MoeForwardOnDevice(call.request), StatusCode::kUsage, "layer 2");
  ExpectFailure(host_->TakeMoeRefusal(1), StatusCode::kUsage, "memory of the host");
}

TEST_F(CudaComputeTest, SomeExpertsAndLayersOnTheHost) {
  EngineOptions some;
  some.experts = ExpertRange{2, 5};
  ASSERT_NO_FATAL_FAILURE(Make({Encoding::kBase}, false, some));
  ExpectFailure(engine_->MoeForward(Request(1)), StatusCode::kData, "was not booted");
  for (int32_t& id : ids_) id = 2 + id % 3;
  ASSERT_TRUE(engine_->MoeForward(Request(1)));
  const std::vector<float> y = y_;
  EXPECT_EQ(Run(Place(1)), y);

  // A base that stays in the page cache is computed on the host, and only there.
  EngineOptions host;
  host.base_residency = Residency::kHost;
  ASSERT_NO_FATAL_FAILURE(Make({Encoding::kBase}, false, host));
  ASSERT_TRUE(engine_->MoeForward(Request(1)));
  const std::vector<float> on_host = y_;
  ASSERT_TRUE(host_->MoeForward(Request(1)));
  EXPECT_EQ(on_host, y_);
  EXPECT_FALSE(engine_->MoeWorkspaceBytes(1, 1, 1));
}

// The tables of many assignments are as long as the model's layer has experts, booted or not.
TEST_F(CudaComputeTest, SomeOfManyExpertsAndManyTokens) {
  store_experts_ = 128;
  EngineOptions some;
  some.experts = ExpertRange{64, 68};
  ASSERT_NO_FATAL_FAILURE(Make({Encoding::kBase}, false, some));
  const size_t tokens = 100;
  x_.resize(tokens * kHidden);
  for (size_t i = kTokens * kHidden; i < x_.size(); ++i) x_[i] = x_[i % (kTokens * kHidden)];
  weights_.assign(tokens * kTopK, 0.5f);
  ids_.resize(tokens * kTopK);
  for (size_t i = 0; i < ids_.size(); ++i) ids_[i] = 64 + static_cast<int32_t>(i * 7 % 4);
  y_.assign(x_.size(), 0);
  MoeRequest request = Request(1);
  request.token_count = tokens;
  ASSERT_TRUE(engine_->MoeForward(request));
  EXPECT_EQ(Run(Place(1)), y_);
  EXPECT_NE(y_, std::vector<float>(y_.size()));
  EXPECT_TRUE(engine_->TakeMoeRefusal(1));

  ids_[290] = 128;
  const std::vector<float> y = Run(Place(1));
  for (size_t i = 0; i < y.size(); ++i)
    ASSERT_EQ(std::isnan(y[i]), i / kHidden == 290 / kTopK) << i;
  ExpectFailure(engine_->TakeMoeRefusal(1), StatusCode::kUsage, "assignment 290");
}

// The planes are given back after the calls that read them.
TEST_F(CudaComputeTest, AnEngineEndsAfterItsCalls) {
  ASSERT_NO_FATAL_FAILURE(Make({Encoding::kBase}));
  const OnDevice call = Place(0);
  const std::vector<float> expected = Run(call);
  Clear(call.y.address(), call.y.bytes());
  ASSERT_TRUE(engine_->MoeForwardOnDevice(call.request));
  engine_ = nullptr;
  ASSERT_EQ(gpu_->Wait(), CUDA_SUCCESS);
  std::vector<float> y;
  for (const uint16_t v : call.y.Download<uint16_t>()) y.push_back(FromBf16(v));
  EXPECT_EQ(y, expected);
}

// Other kernels than those of few tokens: both round act and y to bfloat16, and sum in another
// order.
TEST_F(CudaComputeTest, ManyTokensAreThoseOfSmallCalls) {
  ASSERT_NO_FATAL_FAILURE(Make({Encoding::kBase}));
  const size_t times = 60;
  std::vector<float> x, weights, y(times * y_.size());
  std::vector<int32_t> ids;
  for (size_t i = 0; i < times; ++i) {
    x.insert(x.end(), x_.begin(), x_.end());
    weights.insert(weights.end(), weights_.begin(), weights_.end());
    ids.insert(ids.end(), ids_.begin(), ids_.end());
  }
  MoeRequest request = Request(0);
  ASSERT_TRUE(engine_->MoeForward(request));
  request.token_count *= times;
  request.x = x.data();
  request.ids = ids.data();
  request.weights = weights.data();
  request.y = y.data();
  ASSERT_TRUE(engine_->MoeForward(request));
  float largest = 0;
  for (const float value : y_) largest = std::max(largest, std::fabs(value));
  for (size_t i = 0; i < y.size(); ++i)
    ASSERT_NEAR(y[i], y_[i % y_.size()], largest * 0x1p-6f) << i;
}

// Streams that wait for layers of a boot, with what they compute of them enqueued behind.
class CudaStreamWaits : public CudaComputeTest {
 protected:
  static constexpr size_t kStreams = 4;

  // A store of two layers, what is expected of each, and an engine that has not booted.
  void OpenOnly() {
    ASSERT_NO_FATAL_FAILURE(Make({Encoding::kBase}));
    for (const uint32_t layer : {0u, 1u}) expected_.push_back(Run(Place(layer)));
    EngineOptions options;
    options.store_directory = directory_.path() + "/store-" + std::to_string(stores_);
    options.worker_count = 2;
    options.device.cuda = true;
    options.device_options.ring_bytes = 16 * kMiB;
    options.device_options.thread_count = 2;
    engine_ = Engine::Open(PosixEnv(), options).value();
    ASSERT_TRUE(engine_->Plan());
    for (size_t i = 0; i < kStreams; ++i) {
      CUstream stream = nullptr;
      ASSERT_EQ(gpu_->driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
      streams_.push_back(stream);
    }
    for (const uint32_t layer : {0u, 1u})
      for (size_t i = 0; i < kStreams; ++i) calls_[layer].push_back(Place(layer));
  }
  void TearDown() override {
    engine_ = nullptr;
    for (CUstream stream : streams_) (void)gpu_->driver.cuStreamDestroy(stream);
  }
  void Enqueue(uint32_t layer, bool waits = true) {
    for (size_t i = 0; i < kStreams; ++i) {
      if (waits) {
        const auto waiting = engine_->StreamWaitLayer(layer, streams_[i]);
        ASSERT_TRUE(waiting) << waiting.error().ToString();
      }
      calls_[layer][i].request.stream = streams_[i];
      const auto enqueued = engine_->MoeForwardOnDevice(calls_[layer][i].request);
      ASSERT_TRUE(enqueued) << enqueued.error().ToString();
    }
  }
  // Callbacks of a boot come on a thread without a context.
  CurrentContext InContext() const { return {gpu_->driver, gpu_->context}; }
  // The first of them.
  bool StreamsWait() const {
    const CurrentContext current = InContext();
    for (CUstream stream : std::span(streams_).first(kStreams)) {
      CUevent event = nullptr;
      EXPECT_EQ(gpu_->driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
      EXPECT_EQ(gpu_->driver.cuEventRecord(event, stream), CUDA_SUCCESS);
      CUresult passed = CUDA_ERROR_NOT_READY;
      for (int again = 0; again < 20 && passed == CUDA_ERROR_NOT_READY; ++again)
        passed = gpu_->driver.cuEventQuery(event);
      EXPECT_EQ(gpu_->driver.cuEventDestroy(event), CUDA_SUCCESS);
      if (passed != CUDA_ERROR_NOT_READY) return false;
    }
    return true;
  }
  void FinishStreams() {
    for (CUstream stream : streams_)
      ASSERT_EQ(gpu_->driver.cuStreamSynchronize(stream), CUDA_SUCCESS);
  }
  std::vector<float> ResultOf(uint32_t layer, size_t stream) {
    const CurrentContext current = InContext();
    std::vector<float> y;
    for (const uint16_t v : calls_[layer][stream].y.Download<uint16_t>()) y.push_back(FromBf16(v));
    return y;
  }
  void ExpectComputed(uint32_t layer) {
    for (size_t i = 0; i < kStreams; ++i) EXPECT_EQ(ResultOf(layer, i), expected_[layer]) << i;
    const auto refused = engine_->TakeMoeRefusal(layer);
    EXPECT_TRUE(refused) << refused.error().ToString();
  }
  void ExpectNothingComputed(uint32_t layer) {
    for (size_t i = 0; i < kStreams; ++i)
      for (const float v : ResultOf(layer, i)) ASSERT_TRUE(std::isnan(v)) << i;
  }

  std::vector<std::vector<float>> expected_;  // by layer
  std::vector<CUstream> streams_;
  std::vector<OnDevice> calls_[2];  // by layer and stream
};

TEST_F(CudaStreamWaits, LayersAreComputedAsTheyArePublished) {
  ASSERT_NO_FATAL_FAILURE(OpenOnly());
  ASSERT_NO_FATAL_FAILURE(Enqueue(0));
  ASSERT_NO_FATAL_FAILURE(Enqueue(1));
  EXPECT_TRUE(StreamsWait());
  size_t published = 0;
  const auto booted = engine_->Boot([&](const BootedLayer& layer) {
    // The first ones end while the last layer is held up, by this call.
    EXPECT_EQ(layer.ordinal, published++);
    if (layer.ordinal == 0) {
      EXPECT_TRUE(StreamsWait());
    }
  });
  ASSERT_TRUE(booted) << booted.error().ToString();
  ASSERT_EQ(published, 2u);
  ASSERT_NO_FATAL_FAILURE(FinishStreams());
  ExpectComputed(0);
  ExpectComputed(1);
  // After the publication there is nothing to wait for.
  for (OnDevice& call : calls_[1]) Clear(call.y.address(), call.y.bytes());
  ASSERT_NO_FATAL_FAILURE(Enqueue(1));
  ASSERT_NO_FATAL_FAILURE(FinishStreams());
  ExpectComputed(1);
}

TEST_F(CudaStreamWaits, TheFirstLayerIsUsedWhileTheBootGoesOn) {
  ASSERT_NO_FATAL_FAILURE(OpenOnly());
  ASSERT_NO_FATAL_FAILURE(Enqueue(0));
  const auto booted = engine_->Boot([&](const BootedLayer& layer) {
    if (layer.ordinal != 0) return;
    FinishStreams();
    ExpectComputed(0);
    // For the next one, from within the boot.
    Enqueue(1);
    EXPECT_TRUE(StreamsWait());
  });
  ASSERT_TRUE(booted) << booted.error().ToString();
  ASSERT_NO_FATAL_FAILURE(FinishStreams());
  ExpectComputed(1);
}

TEST_F(CudaStreamWaits, AfterAFailedBootStreamsGoOnWithoutTheLayer) {
  ASSERT_NO_FATAL_FAILURE(OpenOnly());
  std::string file;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory_.path()))
    if (entry.path().filename() == "layer-0001.base") file = entry.path();
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(-4000, std::ios::end);
  stream << "damaged";
  stream.close();
  ASSERT_NO_FATAL_FAILURE(Enqueue(0));
  ASSERT_NO_FATAL_FAILURE(Enqueue(1));
  const auto booted = engine_->Boot({});
  ExpectFailure(booted, StatusCode::kData, file);
  ASSERT_NO_FATAL_FAILURE(FinishStreams());
  ExpectComputed(0);
  ExpectNothingComputed(1);
  ExpectFailure(engine_->TakeMoeRefusal(1), StatusCode::kData, file);
  ExpectFailure(engine_->StreamWaitLayer(1, streams_[0]), StatusCode::kData, file);
  EXPECT_TRUE(engine_->StreamWaitLayer(0, streams_[0]));
  // Whoever does not wait gets nothing either.
  for (OnDevice& call : calls_[1]) Clear(call.y.address(), call.y.bytes());
  ASSERT_NO_FATAL_FAILURE(Enqueue(1, /*waits=*/false));
  ASSERT_NO_FATAL_FAILURE(FinishStreams());
  ExpectNothingComputed(1);
}

TEST_F(CudaStreamWaits, WithoutAWaitNothingIsComputedBeforeThePublication) {
  ASSERT_NO_FATAL_FAILURE(OpenOnly());
  ASSERT_NO_FATAL_FAILURE(Enqueue(1, /*waits=*/false));
  ASSERT_NO_FATAL_FAILURE(FinishStreams());
  ExpectNothingComputed(1);
  ExpectFailure(engine_->TakeMoeRefusal(1), StatusCode::kUsage, "before it was published");
  ASSERT_TRUE(engine_->Boot({}));
  ASSERT_NO_FATAL_FAILURE(Enqueue(1, /*waits=*/false));
  ASSERT_NO_FATAL_FAILURE(FinishStreams());
  ExpectComputed(1);
}

TEST_F(CudaStreamWaits, AnEngineThatEndsLetsItsStreamsGo) {
  ASSERT_NO_FATAL_FAILURE(OpenOnly());
  ASSERT_NO_FATAL_FAILURE(Enqueue(0));
  ASSERT_NO_FATAL_FAILURE(Enqueue(1));
  EXPECT_TRUE(StreamsWait());
  engine_ = nullptr;
  ASSERT_NO_FATAL_FAILURE(FinishStreams());
  ExpectNothingComputed(0);
  ExpectNothingComputed(1);
}

TEST_F(CudaStreamWaits, LayersThatDoNotComeAreRefused) {
  ASSERT_NO_FATAL_FAILURE(OpenOnly());
  ExpectFailure(engine_->StreamWaitLayer(2, streams_[0]), StatusCode::kUsage, "layer 2");
  EngineOptions options;
  options.store_directory = directory_.path() + "/store-" + std::to_string(stores_);
  options.device.cuda = true;
  options.boot.layers = "0";
  const auto engine = Engine::Open(PosixEnv(), options).value();
  EXPECT_TRUE(engine->StreamWaitLayer(1, streams_[0])) << "not planned yet";
  ASSERT_TRUE(engine->Boot({}));
  EXPECT_EQ(gpu_->driver.cuStreamSynchronize(streams_[0]), CUDA_SUCCESS);
  ExpectFailure(engine->StreamWaitLayer(1, streams_[0]), StatusCode::kUsage, "layer 1");
}

// Nothing of a build may wait for all that is enqueued on the device.
TEST_F(CudaStreamWaits, WhileTheirLayersAreBuilt) {
  constexpr uint32_t kLayers = 3;
  // Others have streams too, as torch has pools of 32.
  constexpr size_t kIdleStreams = 40;
  for (size_t i = 0; i < kIdleStreams + kStreams; ++i) {
    streams_.push_back(nullptr);
    ASSERT_EQ(gpu_->driver.cuStreamCreate(&streams_.back(), CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  }
  std::rotate(streams_.begin(), streams_.end() - kStreams, streams_.end());
  for (const bool damaged : {false, true}) {
    const std::string folder = directory_.path() + (damaged ? "/damaged" : "/well");
    SynthCheckpointOptions synth;
    synth.format = SourceFormat::kBf16;
    synth.geometry = {4, 256, 128};
    synth.main_layers = kLayers;
    synth.shard_bytes_max = 0;
    WorkerPool pool(2);
    ASSERT_TRUE(WriteSynthCheckpoint(PosixEnv(), folder, synth, pool).has_value());
    if (damaged) {
      // A weight of the last layer becomes NaN.
      std::fstream file(folder + "/model.safetensors",
                        std::ios::in | std::ios::out | std::ios::binary);
      ASSERT_TRUE(file.is_open());
      file.seekp(0, std::ios::end);
      file.seekp(static_cast<std::streamoff>(file.tellp()) / 16 * 14);
      file << "\xff\x7f";
    }
    EngineOptions options;
    options.store_directory = folder + "-store";
    options.checkpoint = folder;
    options.worker_count = 2;
    options.device.cuda = true;
    options.device_options.ring_bytes = 16 * kMiB;
    options.base_residency = Residency::kDevice;
    const auto engine = Engine::Open(PosixEnv(), options).value();
    for (size_t i = 0; i < kStreams; ++i) {
      for (const size_t layer : {i % kLayers, (i + 1) % kLayers})
        ASSERT_TRUE(engine->StreamWaitLayer(static_cast<uint32_t>(layer), streams_[i]));
    }
    ExpectFailure(engine->StreamWaitLayer(0, streams_[kStreams]), StatusCode::kUsage,
                  "too many streams");
    EXPECT_TRUE(StreamsWait());
    const Result<void> booted = engine->Boot({});
    EXPECT_EQ(booted.has_value(), !damaged) << (booted ? "" : booted.error().ToString());
    ASSERT_NO_FATAL_FAILURE(FinishStreams());
    EXPECT_EQ(engine->report().bytes_read, 0u);
  }
}

}  // namespace
}  // namespace hotplane
