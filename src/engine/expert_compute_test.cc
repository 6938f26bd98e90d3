// The operator over booted stores, against float64 from what the boot and the records hand out.
#include "engine/expert_compute.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "base/fault_guard.h"
#include "base/sanitizers.h"
#include "engine/engine.h"
#include "engine/synth.h"
#include "io/test_directory.h"
#include "moe/reference.h"

namespace hotplane {
namespace {

constexpr uint32_t kExperts = 6;
constexpr uint32_t kHidden = 128;
constexpr uint32_t kIntermediate = 64;
constexpr size_t kTokens = 7;
constexpr size_t kTopK = 3;

class ExpertComputeTest : public testing::Test {
 protected:
  void SetUp() override {
    std::mt19937 random(3);
    for (float& v : x_) v = std::normal_distribution<float>()(random);
    for (float& v : weights_) v = std::uniform_real_distribution<float>(0, 1)(random);
    for (int32_t& id : ids_) id = static_cast<int32_t>(random() % kExperts);
  }

  void MakeStore(std::vector<Encoding> encodings, bool biases = false) {
    SynthStoreOptions options;
    options.geometry = {kExperts, kHidden, kIntermediate, biases};
    options.layers = 2;
    options.encodings = std::move(encodings);
    options.worker_count = 1;
    const auto made = SynthStore(PosixEnv(), store_, options);
    ASSERT_TRUE(made) << made.error().ToString();
    generation_ = made->generation;
  }

  std::unique_ptr<Engine> Boot(EngineOptions options = {}) {
    options.store_directory = store_;
    options.worker_count = 2;
    auto engine = Engine::Open(PosixEnv(), options);
    EXPECT_TRUE(engine) << engine.error().ToString();
    const Result<void> booted = (*engine)->Boot([](const BootedLayer&) {});
    EXPECT_TRUE(booted) << booted.error().ToString();
    return std::move(*engine);
  }

  MoeRequest Request(uint32_t layer) {
    MoeRequest request;
    request.layer = layer;
    request.arithmetic = Arithmetic::kExact;
    request.token_count = kTokens;
    request.top_k = kTopK;
    request.x = x_.data();
    request.ids = ids_.data();
    request.weights = weights_.data();
    request.y = y_.data();
    return request;
  }

  // FP4 as the nibbles that the records give, whatever the store has.
  void ExpectReference(Engine& engine, const MoeRequest& request) {
    const Result<void> done = engine.MoeForward(request);
    ASSERT_TRUE(done) << done.error().ToString();
    const BootedLayer& layer = **engine.WaitLayer(request.layer);
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
      ASSERT_TRUE(engine.ReadFp4(request.layer, e, record));
      expert.fp_encoding = Encoding::kDeltaNibble;
      expert.fp13 = record.data();
      expert.fp2 = record.data() + w13;
    }
    MoeCall call;
    call.geometry = layer.geometry;
    call.activation = engine.generation().manifest().activation;
    call.arithmetic = request.arithmetic;
    call.token_count = request.token_count;
    call.top_k = request.top_k;
    call.x = request.x;
    call.ids = request.ids;
    call.weights = request.weights;
    call.experts = experts;
    const MoeReference reference = ReferenceMoe(call);
    double largest = 0;
    for (size_t i = 0; i < y_.size(); ++i) {
      ASSERT_LE(std::fabs(double{y_[i]} - reference.y[i]), reference.bound[i]) << i;
      largest = std::max(largest, std::fabs(reference.y[i]));
    }
    EXPECT_GT(largest, 0);
  }

  void ExpectFailure(Engine& engine, const MoeRequest& request, StatusCode code,
                     const std::string& text) {
    const Result<void> done = engine.MoeForward(request);
    ASSERT_FALSE(done) << text;
    EXPECT_EQ(done.error().code(), code) << done.error().ToString();
    EXPECT_NE(done.error().ToString().find(text), std::string::npos) << done.error().ToString();
  }

  const TestDirectory directory_;
  const std::string store_ = directory_.path() + "/store";
  std::string generation_;
  std::vector<float> x_ = std::vector<float>(kTokens * kHidden);
  std::vector<float> weights_ = std::vector<float>(kTokens * kTopK);
  std::vector<int32_t> ids_ = std::vector<int32_t>(kTokens * kTopK);
  std::vector<float> y_ = std::vector<float>(kTokens * kHidden);
};

TEST_F(ExpertComputeTest, ComputesBaseFp4AndBothFromEitherEncoding) {
  const std::vector<uint8_t> mixed = {1, 2, 1, 2, 2, 1};
  std::vector<std::vector<float>> fp4;
  for (const Encoding encoding : {Encoding::kDeltaQuintal, Encoding::kDeltaNibble}) {
    ASSERT_NO_FATAL_FAILURE(MakeStore({Encoding::kBase, encoding}));
    const auto engine = Boot();
    MoeRequest request = Request(1);
    ExpectReference(*engine, request);
    request.precisions = mixed;
    ExpectReference(*engine, request);
    request.precisions = {};
    request.precision = Precision::kFp4;
    ExpectReference(*engine, request);
    fp4.push_back(y_);
    request.arithmetic = Arithmetic::kFast;
    ExpectReference(*engine, request);
    std::filesystem::remove_all(store_);
  }
  EXPECT_EQ(fp4[0], fp4[1]);
}

TEST_F(ExpertComputeTest, ComputesLayersWithBiases) {
  ASSERT_NO_FATAL_FAILURE(MakeStore({Encoding::kBase, Encoding::kDeltaQuintal}, true));
  const auto engine = Boot();
  ASSERT_FALSE((*engine->WaitLayer(0))->bias13.empty());
  MoeRequest request = Request(0);
  ExpectReference(*engine, request);
  request.precision = Precision::kFp4;
  ExpectReference(*engine, request);
}

TEST_F(ExpertComputeTest, ComputesFromThePageCache) {
  ASSERT_NO_FATAL_FAILURE(MakeStore({Encoding::kBase, Encoding::kDeltaQuintal}));
  EngineOptions options;
  options.boot.map = true;
  const auto engine = Boot(options);
  ExpectReference(*engine, Request(0));
}

TEST_F(ExpertComputeTest, AMappedFileThatIsCutShortIsAnError) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a jump out of a signal handler confuses ThreadSanitizer";
#endif
  InstallFaultGuard();
  ASSERT_NO_FATAL_FAILURE(MakeStore({Encoding::kBase}));
  EngineOptions options;
  options.boot.map = true;
  const auto engine = Boot(options);
  ASSERT_EQ(truncate((store_ + "/" + generation_ + "/layer-0000.base").c_str(), 4096), 0);
  ExpectFailure(*engine, Request(0), StatusCode::kData, "cut short");
  ExpectReference(*engine, Request(1));
}

// The biases are the last sections of a file.
TEST_F(ExpertComputeTest, MappedBiasesThatAreCutShortAreAnError) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a jump out of a signal handler confuses ThreadSanitizer";
#endif
  InstallFaultGuard();
  ASSERT_NO_FATAL_FAILURE(MakeStore({Encoding::kBase}, true));
  EngineOptions options;
  options.boot.map = true;
  const auto engine = Boot(options);
  const LayerLayout layout = PlanLayerLayout(Encoding::kBase, engine->generation().geometry(0));
  const Section* const biases = layout.Find("bias13");
  ASSERT_NE(biases, nullptr);
  const auto kept = static_cast<off_t>(biases->offset / 4096 * 4096);
  ASSERT_EQ(truncate((store_ + "/" + generation_ + "/layer-0000.base").c_str(), kept), 0);
  ExpectFailure(*engine, Request(0), StatusCode::kData, "cut short");
}

TEST_F(ExpertComputeTest, TheInstructionSetCanBeForced) {
  ASSERT_NO_FATAL_FAILURE(MakeStore({Encoding::kBase}));
  std::vector<std::vector<float>> results;
  for (const char* isa : {"", "scalar"}) {
    EngineOptions options;
    options.isa = isa;
    const auto engine = Boot(options);
    ExpectReference(*engine, Request(0));
    results.push_back(y_);
  }
  EXPECT_EQ(results[0], results[1]);
  EngineOptions options;
  options.isa = "mmx";
  const auto engine = Boot(options);
  ExpectFailure(*engine, Request(0), StatusCode::kUsage, "instruction set");
}

TEST_F(ExpertComputeTest, WhatIsNotThereIsNamedAndNeverZero) {
  ASSERT_NO_FATAL_FAILURE(MakeStore({Encoding::kBase}));
  EngineOptions options;
  options.experts = ExpertRange{1, 4};
  const auto engine = Boot(options);
  ids_.assign(ids_.size(), 2);
  MoeRequest request = Request(0);
  EXPECT_TRUE(engine->MoeForward(request));
  ids_[5] = 4;
  ExpectFailure(*engine, request, StatusCode::kData, "expert 4 was not booted");
  ids_[5] = 2;
  request.precision = Precision::kFp4;
  ExpectFailure(*engine, request, StatusCode::kData, "delta");
  request.precision = Precision::kBase;
  request.layer = 2;
  ExpectFailure(*engine, request, StatusCode::kUsage, "layer 2 is not published");
  request.layer = 0;
  const std::vector<uint8_t> wrong = {1, 1, 3, 1, 1, 1};
  request.precisions = wrong;
  ExpectFailure(*engine, request, StatusCode::kUsage, "expert 2: no such precision");
  request.precisions = std::span(wrong).first(2);
  ExpectFailure(*engine, request, StatusCode::kUsage, "one precision for each expert");
  request.precisions = {};
  x_[3] = NAN;
  ExpectFailure(*engine, request, StatusCode::kUsage, "x [0, 3] is not finite");
}

TEST_F(ExpertComputeTest, ADamagedDeltaRecordIsNamed) {
  ASSERT_NO_FATAL_FAILURE(MakeStore({Encoding::kBase, Encoding::kDeltaQuintal}));
  const std::string path = store_ + "/" + generation_ + "/layer-0000.delta-quintal";
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-5000, std::ios::end);
    file.put('\x7f');
    file.put('\x7f');
  }
  const auto engine = Boot();
  MoeRequest request = Request(0);
  request.precision = Precision::kFp4;
  ids_.assign(ids_.size(), kExperts - 1);
  ExpectFailure(*engine, request, StatusCode::kData, "expert 5");
  request.precision = Precision::kBase;
  ExpectReference(*engine, request);
}

TEST_F(ExpertComputeTest, CallsOfSeveralThreadsAgree) {
  ASSERT_NO_FATAL_FAILURE(MakeStore({Encoding::kBase, Encoding::kDeltaQuintal}));
  EngineOptions options;
  options.records.delta_cache_bytes = 64 << 10;
  const auto engine = Boot(options);
  MoeRequest request = Request(0);
  request.precision = Precision::kFp4;
  ExpectReference(*engine, request);
  std::vector<std::thread> threads;
  std::vector<std::vector<float>> results(4, std::vector<float>(y_.size()));
  for (auto& result : results) {
    threads.emplace_back([&] {
      MoeRequest own = request;
      own.y = result.data();
      for (int i = 0; i < 5; ++i) EXPECT_TRUE(engine->MoeForward(own));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result, y_);
}

}  // namespace
}  // namespace hotplane
