// Fidelity against a second opinion: the source's weights and the oracle's quantization of them,
// summed up in wider arithmetic.
#include "engine/fidelity.h"

#include <gtest/gtest.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <set>

#include "boot/formats_testing.h"
#include "boot/paired_generation.h"

namespace hotplane::formats_testing {
namespace {

Result<FidelityReport> Measure(Env& env, const Generation& generation, size_t workers = 2,
                               const FidelityOptions& options = {}) {
  HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(env, kTestCheckpoint));
  HP_ASSIGN(const MoeModel model, DiscoverMoe(checkpoint));
  WorkerPool pool(workers);
  return MeasureFidelity(generation, checkpoint, model, pool, options);
}

struct Wide {
  long double weights = 0, squares = 0, magnitudes = 0, zeros = 0, zero_nibbles = 0;
  long double error_squares[2] = {}, errors[2] = {}, magnitude_errors[2] = {};
  uint64_t largest[2] = {}, clipped[2] = {};
};

// The tiers' values of one weight: base, then FP4.
void AddWeight(long double w, unsigned nibble, int exponent, Wide& sums) {
  ++sums.weights;
  sums.squares += w * w;
  sums.magnitudes += std::fabs(w);
  sums.zeros += w == 0 ? 1 : 0;
  sums.zero_nibbles += nibble % 8 == 0 ? 1 : 0;
  const long double code = (nibble % 8 >= 5 ? 4 : 1) * (nibble >= 8 ? -1 : 1);
  const long double values[2] = {code, E2m1(nibble)};
  const long double largest[2] = {4, 6};
  for (const size_t tier : {0, 1}) {
    const long double error = std::ldexp(values[tier], exponent) - w;
    sums.error_squares[tier] += error * error;
    sums.errors[tier] += error;
    if (w != 0) sums.magnitude_errors[tier] += w > 0 ? error : -error;
    if (std::fabs(values[tier]) != largest[tier]) continue;
    ++sums.largest[tier];
    if (std::fabs(w) > std::ldexp(largest[tier], exponent)) ++sums.clipped[tier];
  }
}

Wide Expect(const Layer& layer, size_t p) {
  Wide sums;
  for (const auto& expert : layer) {
    const Matrix& m = expert[p];
    const oracle::Matrix quantized = Quantized(m, ShapeOf(p));
    for (size_t i = 0; i < quantized.nibbles.size(); ++i) {
      const unsigned nibble = quantized.nibbles[i];
      const int exponent = quantized.scales[i / 32] - 127;
      const bool verbatim = m.weights.empty();
      AddWeight(verbatim ? std::ldexp(E2m1(nibble), exponent) : m.weights[i], nibble, exponent,
                sums);
    }
  }
  return sums;
}

// Sums of 73 728 terms: a row's 192 first, so that rounding stays far below this.
constexpr double kTolerance = 1e-12;

void ExpectNear(double found, long double expected, long double magnitude) {
  EXPECT_NEAR(static_cast<double>((found - expected) / (magnitude + 1e-300L)), 0, kTolerance);
}

void ExpectSums(const FidelitySums& found, const Wide& expected) {
  EXPECT_EQ(found.weights, expected.weights);
  EXPECT_EQ(found.zeros, expected.zeros);
  EXPECT_EQ(found.zero_nibbles, expected.zero_nibbles);
  ExpectNear(found.squares, expected.squares, expected.squares);
  ExpectNear(found.magnitudes, expected.magnitudes, expected.magnitudes);
  for (const size_t t : {0, 1}) {
    const TierSums& tier = t == 0 ? found.base : found.fp4;
    ExpectNear(tier.error_squares, expected.error_squares[t], expected.squares);
    ExpectNear(tier.errors, expected.errors[t], expected.magnitudes);
    ExpectNear(tier.magnitude_errors, expected.magnitude_errors[t], expected.magnitudes);
    EXPECT_EQ(tier.largest, expected.largest[t]) << t;
    EXPECT_EQ(tier.clipped, expected.clipped[t]) << t;
  }
}

void ExpectReport(const Model& model, const Layer& layer) {
  const Result<Built> built = BuildModel(model);
  ASSERT_TRUE(built) << built.error().ToString();
  const auto report = Measure(*built->env, *built->generation);
  ASSERT_TRUE(report) << report.error().ToString();
  ASSERT_EQ(report->layers.size(), 1u);
  EXPECT_EQ(report->layers[0].base_missing + report->layers[0].fp4_missing, "");
  for (size_t p = 0; p < kProjectionCount; ++p) {
    SCOPED_TRACE(p);
    ExpectSums(report->layers[0].projections[p], Expect(layer, p));
  }
}

TEST(Fidelity, EveryFormatAgainstExactWeights) {
  const Layer mxfp4 = Mxfp4Layer(1);
  const Layer nvfp4 = Nvfp4Layer(2);
  const Layer bf16 = Bf16Layer(3);
  const Layer fp8 = Fp8Layer(4, 48, 80);
  struct Case {
    const char* name;
    const Layer& layer;
    std::function<void(Model&)> add;
  };
  const Case cases[] = {
      {"deepseek", mxfp4, [&](Model& m) { AddDeepSeek(m, mxfp4); }},
      {"packed mxfp4", mxfp4, [&](Model& m) { AddPackedMxfp4(m, mxfp4); }},
      {"gpt-oss", mxfp4, [&](Model& m) { AddGptOss(m, mxfp4); }},
      {"modelopt", nvfp4, [&](Model& m) { AddModelopt(m, nvfp4); }},
      {"compressed nvfp4", nvfp4, [&](Model& m) { AddCompressedNvfp4(m, nvfp4); }},
      {"bf16", bf16, [&](Model& m) { AddBf16(m, bf16, "mlp", kNamed); }},
      {"fused", bf16, [&](Model& m) { AddFused(m, bf16); }},
      {"fp8", fp8, [&](Model& m) { AddFp8(m, fp8, 48, 80, Dtype::kF32); }},
      {"fp8, bf16 scales", fp8, [&](Model& m) { AddFp8(m, fp8, 48, 80, Dtype::kBf16); }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    ExpectReport(With(c.add), c.layer);
  }
}

TEST(Fidelity, ZerosOfOneSignAlternateAndAreCounted) {
  Layer layer = Bf16Layer(5);
  for (auto& expert : layer) {
    for (Matrix& m : expert) {
      for (size_t i = 0; i < m.bf16.size(); i += 3) m.bf16[i] = 0, m.weights[i] = 0;
      for (size_t i = 0; i < 32; ++i) m.bf16[i] = 0, m.weights[i] = 0;
    }
  }
  ExpectReport(With([&](Model& m) { AddBf16(m, layer, "mlp", kNamed); }), layer);
}

// The report without what differs from run to run.
std::string Stable(FidelityReport report) {
  report.seconds = 0;
  return FidelityJson(report);
}

TEST(Fidelity, IsTheSameForAnyNumberOfWorkersAndForShards) {
  MemEnv env;
  WriteModel(env, kTestCheckpoint, With([](Model& m) { AddModelopt(m, Nvfp4Layer(6)); }), 0);
  ASSERT_TRUE(BuildStore(env, BothTiers()));
  const auto store = Store::Open(env, kTestStore);
  const Generation unsharded = store->OpenGeneration().value();
  const std::string once = Stable(Measure(env, unsharded, 1).value());
  for (const size_t workers : {1, 2, 5}) {
    EXPECT_EQ(Stable(Measure(env, unsharded, workers).value()), once) << workers;
  }
  BuildOptions options = BothTiers();
  options.shard_world = 2;
  ASSERT_TRUE(BuildStore(env, options));
  const std::vector<Store::Entry> entries = store->FindGenerations("").value();
  EXPECT_EQ(entries.size(), 2u);
  for (const Store::Entry& entry : entries) {
    const Generation generation = store->OpenGeneration(ToHex(entry.id)).value();
    FidelityReport report = Measure(env, generation).value();
    report.generation = unsharded.id();
    report.bytes_read_store = Measure(env, unsharded).value().bytes_read_store;
    EXPECT_EQ(Stable(report), once) << generation.world();
  }
}

TEST(Fidelity, NibblesAndQuintalsMeasureTheSame) {
  const Model model = With([](Model& m) { AddBf16(m, Bf16Layer(7), "mlp", kNamed); });
  std::array<nlohmann::json, 2> json;
  for (const bool nibbles : {false, true}) {
    MemEnv env;
    WriteModel(env, kTestCheckpoint, model, 0);
    BuildOptions options = BothTiers();
    if (nibbles) options.encodings[1] = Encoding::kDeltaNibble;
    ASSERT_TRUE(BuildStore(env, options));
    const auto report = Measure(env, Store::Open(env, kTestStore)->OpenGeneration().value());
    ASSERT_TRUE(report) << report.error().ToString();
    json[nibbles ? 1 : 0] = nlohmann::json::parse(FidelityJson(*report))["layers"];
  }
  EXPECT_EQ(json[0], json[1]);
}

class Refusals : public testing::Test {
 protected:
  void SetUp() override {
    // Large enough that the fingerprint does not sample every page.
    SynthCheckpointOptions options = SmallModel(SourceFormat::kBf16);
    options.geometry = {3, 512, 512};
    WriteCheckpoint(env_, options);
    ASSERT_TRUE(BuildStore(env_, BothTiers()));
    generation_.emplace(Store::Open(env_, kTestStore)->OpenGeneration().value());
  }
  Status Error(const FidelityOptions& options = {}) {
    const auto report = Measure(env_, *generation_, 2, options);
    EXPECT_FALSE(report);
    return report ? Status::Usage("none") : report.error();
  }

  MemEnv env_;
  std::optional<Generation> generation_;
};

TEST_F(Refusals, AnotherCheckpoint) {
  const auto replace_checkpoint = [this](uint64_t seed) {
    for (const auto& [path, content] : env_.Files()) {
      if (path.rfind(kTestCheckpoint, 0) == 0) {
        ASSERT_TRUE(env_.Remove(path));
      }
    }
    SynthCheckpointOptions other = SmallModel(SourceFormat::kBf16);
    other.geometry = {3, 512, 512};
    other.seed = seed;
    WriteCheckpoint(env_, other);
  };
  replace_checkpoint(8);
  EXPECT_EQ(Error().exit_code(), 3);
  const Checkpoint checkpoint = Checkpoint::Open(env_, kTestCheckpoint).value();
  const auto paired = OpenPairedGeneration(Store::Open(env_, kTestStore).value(), "", checkpoint,
                                           DiscoverMoe(checkpoint).value(), {});
  ASSERT_FALSE(paired);
  EXPECT_EQ(paired.error().exit_code(), 3);

  // The same of a store with two generations, of which neither is right.
  ASSERT_TRUE(BuildStore(env_, BothTiers()));
  replace_checkpoint(9);
  const Checkpoint third = Checkpoint::Open(env_, kTestCheckpoint).value();
  const auto none = OpenPairedGeneration(Store::Open(env_, kTestStore).value(), "", third,
                                         DiscoverMoe(third).value(), {});
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().exit_code(), 3) << none.error().ToString();
}

// The fingerprint samples pages; the digests of the source records see all of them.
TEST_F(Refusals, AByteThatNoSamplingSees) {
  const Checkpoint checkpoint = Checkpoint::Open(env_, kTestCheckpoint).value();
  const MoeModel model = DiscoverMoe(checkpoint).value();
  std::set<std::pair<const Tensor*, uint64_t>> sampled;
  for (const SampledPage& page : ListSampledPages(model)) sampled.emplace(page.tensor, page.offset);
  const Tensor* tensor = nullptr;
  uint64_t offset = 0;
  for (const MoeLayer& layer : model.layers) {
    for (const ExpertTensors& expert : layer.experts) {
      for (const Tensor* candidate : expert.weight) {
        for (uint64_t page = 0; page < candidate->bytes; page += 4096) {
          if (!sampled.contains({candidate, page})) tensor = candidate, offset = page;
        }
      }
    }
  }
  ASSERT_NE(tensor, nullptr);
  env_.CorruptByte(checkpoint.files()[tensor->file], tensor->offset + offset, std::byte{1});
  const Status error = Error();
  EXPECT_EQ(error.exit_code(), 3);
  EXPECT_EQ(error.what().find(tensor->name + " is not what layer"), 0u) << error.ToString();
}

TEST_F(Refusals, DamageInTheStore) {
  const std::string path = generation_->LayerPath(1, Encoding::kBase);
  const LayerFile file = generation_->OpenLayer(1, Encoding::kBase).value();
  const uint64_t at = file.layout().PieceOffset(*file.layout().Find("planes2"), 2);
  env_.CorruptByte(path, at + 5, std::byte{4});
  const Status error = Error();
  EXPECT_EQ(error.exit_code(), 3);
  EXPECT_EQ(error.file(), path);
}

TEST_F(Refusals, NoSourceRecord) {
  ASSERT_TRUE(env_.Remove(generation_->SourceRecordPath(0)));
  EXPECT_EQ(Error().exit_code(), 3);
}

TEST_F(Refusals, LayersThatAreNotThere) { EXPECT_EQ(Error({.layers = "7"}).exit_code(), 2); }

TEST_F(Refusals, Cancelled) {
  CancelToken cancel;
  cancel.Cancel(SIGINT);
  FidelityOptions options;
  options.cancel = &cancel;
  EXPECT_EQ(Error(options).exit_code(), 130);
}

TEST_F(Refusals, AbsentTiersAreToldAndTheRestIsMeasured) {
  ASSERT_TRUE(env_.Remove(generation_->LayerPath(0, Encoding::kBase)));
  ASSERT_TRUE(env_.Remove(generation_->LayerPath(1, Encoding::kDeltaQuintal)));
  const auto report = Measure(env_, *generation_);
  ASSERT_TRUE(report) << report.error().ToString();
  const nlohmann::json json = nlohmann::json::parse(FidelityJson(*report));
  EXPECT_EQ(json["layers"][0]["base"]["missing"], "no base tier");
  EXPECT_EQ(json["layers"][0]["fp4"]["missing"], "no base tier, which has its block exponents");
  EXPECT_EQ(json["layers"][1]["fp4"]["missing"], "no delta tier");
  EXPECT_TRUE(json["layers"][1]["base"]["total"]["relative_rms"].is_number());
  EXPECT_TRUE(json["fp4"].is_null());
  EXPECT_EQ(Error({.layers = "0"}).exit_code(), 3);
}

// What the signed bias is for: at the same squared error, zeros that all become +1 shift every sum
// of many weights, zeros that alternate do not.
TEST(FidelitySums, ZerosOfOneSignShowAsBias) {
  std::vector<double> source(64);
  std::vector<uint8_t> scales(2, 127), one_sign(64, 2), alternating(64);
  for (size_t i = 0; i < 64; ++i) {
    source[i] = i % 4 == 0 ? 4 : i % 4 == 1 ? -4 : 0;
    one_sign[i] = i % 4 == 0 ? 3 : i % 4 == 1 ? 0 : 2;
    alternating[i] = i % 4 == 3 ? 1 : one_sign[i];
  }
  FidelitySums biased, fair;
  biased.AddRow(source, scales, one_sign, {});
  fair.AddRow(source, scales, alternating, {});
  EXPECT_EQ(RelativeRms(biased, biased.base), RelativeRms(fair, fair.base));
  EXPECT_DOUBLE_EQ(*SignedBias(fair, fair.base), 0);
  EXPECT_DOUBLE_EQ(*SignedBias(biased, biased.base), 0.5 / std::sqrt(8.0));
  EXPECT_DOUBLE_EQ(*MagnitudeBias(biased, biased.base), 0);
}

TEST(FidelitySums, OfZerosOnlyHasNoFigures) {
  FidelitySums sums;
  sums.AddRow(std::vector<double>(32, -0.0), std::vector<uint8_t>(1), std::vector<uint8_t>(32, 2),
              std::vector<uint8_t>(32, 8));
  EXPECT_EQ(RelativeRms(sums, sums.base), std::nullopt);
  EXPECT_EQ(SignedBias(sums, sums.base), std::nullopt);
  EXPECT_EQ(MagnitudeBias(sums, sums.base), std::nullopt);
  EXPECT_EQ(sums.negative_zeros, 32u);
  EXPECT_EQ(sums.negative_zero_nibbles, 32u);
  EXPECT_EQ(sums.zero_blocks, 1u);
  EXPECT_GT(sums.exponent_min, sums.exponent_max);
}

}  // namespace
}  // namespace hotplane::formats_testing
