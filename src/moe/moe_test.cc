// The operator: one table of cases, every variant, against float64.
#include "moe/moe.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <iterator>
#include <limits>
#include <random>
#include <string_view>
#include <vector>

#include "moe/moe_cases.h"
#include "moe/reference.h"
#include "moe/routing.h"

namespace hotplane {
namespace {

using namespace moe_cases;

constexpr Arithmetic kArithmetics[] = {Arithmetic::kExact, Arithmetic::kFast, Arithmetic::kFp8};
const char* NameOf(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kFast  ? "fast"
         : arithmetic == Arithmetic::kFp8 ? "FP8"
                                          : "exact";
}

std::vector<float> Compute(Problem& problem, const MoeKernels& kernels, WorkerPool& pool) {
  const Result<void> checked = CheckMoeCall(problem.call);
  EXPECT_TRUE(checked) << checked.error().ToString();
  const Result<void> done = MoeForward(problem.call, kernels, pool);
  EXPECT_TRUE(done) << done.error().ToString();
  return problem.y;
}

TEST(MoeForward, EveryVariantIsWithinTheBoundOfFloat64) {
  WorkerPool pool(2);
  for (const Case& c : kCases) {
    for (const Arithmetic arithmetic : kArithmetics) {
      Problem problem(c, 7);
      problem.call.arithmetic = arithmetic;
      const MoeReference reference = ReferenceMoe(problem.call);
      for (const MoeKernels* kernels : AvailableMoeKernels()) {
        const std::vector<float> y = Compute(problem, *kernels, pool);
        for (size_t i = 0; i < y.size(); ++i)
          ASSERT_LE(std::fabs(double{y[i]} - reference.y[i]), reference.bound[i])
              << c.name << ", " << kernels->name << ", " << NameOf(arithmetic) << ", element " << i;
      }
    }
  }
}

// The worst case of the fast arithmetic is far above what happens: every activation wrong by half a
// step in the direction of its weight. So its error is measured too. For normal activations a step
// is about 2.1/127 of their deviation, its rounding 1/sqrt(12) of that, 0.5%; once for x and once
// for act.
TEST(MoeForward, TheErrorIsSmallBesideTheResult) {
  WorkerPool pool(2);
  for (const Arithmetic arithmetic : kArithmetics) {
    Problem problem(CaseNamed("prefill"), 7);
    problem.call.arithmetic = arithmetic;
    const MoeReference reference = ReferenceMoe(problem.call);
    const std::vector<float> y = Compute(problem, *AvailableMoeKernels().front(), pool);
    double errors = 0, squares = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      errors += std::pow(double{y[i]} - reference.y[i], 2);
      squares += std::pow(reference.y[i], 2);
    }
    // sqrt(x^2 + act^2) of the above is 0.7%, and act's steps are wider than those of a normal
    // distribution: 1.1% is what was seen. FP8 activations are rounded in the reference too.
    EXPECT_LT(std::sqrt(errors / squares), arithmetic == Arithmetic::kFast ? 0.015 : 1e-6)
        << NameOf(arithmetic);
  }
}

TEST(MoeForward, IsTheSameForEveryVariantThreadCountAndRun) {
  for (const Arithmetic arithmetic : kArithmetics) {
    Problem problem(CaseNamed("prefill"), 3);
    problem.call.arithmetic = arithmetic;
    WorkerPool one(1);
    const std::vector<float> expected = Compute(problem, *AvailableMoeKernels().front(), one);
    for (const size_t workers : {1, 2, 3, 7}) {
      WorkerPool pool(workers);
      for (const MoeKernels* kernels : AvailableMoeKernels())
        EXPECT_EQ(Compute(problem, *kernels, pool), expected) << kernels->name << ", " << workers;
    }
  }
}

TEST(MoeForward, ATokenGivesTheSameAloneAndAmongOthers) {
  for (const Arithmetic arithmetic : kArithmetics) {
    Problem problem(CaseNamed("prefill"), 4);
    problem.call.arithmetic = arithmetic;
    WorkerPool pool(2);
    const MoeKernels& kernels = *AvailableMoeKernels().front();
    const std::vector<float> all = Compute(problem, kernels, pool);
    const size_t width = problem.call.geometry.hidden;
    for (const size_t token : {size_t{0}, size_t{42}, problem.call.token_count - 1}) {
      MoeCall alone = problem.call;
      std::vector<float> y(width);
      alone.token_count = 1;
      alone.x += token * width;
      alone.ids += token * alone.top_k;
      alone.weights += token * alone.top_k;
      alone.y = y.data();
      ASSERT_TRUE(MoeForward(alone, kernels, pool));
      EXPECT_TRUE(
          std::equal(y.begin(), y.end(), all.begin() + static_cast<ptrdiff_t>(token * width)));
    }
  }
}

TEST(MoeForward, Fp4IsTheSameToTheBitFromNibblesAndFromQuintals) {
  WorkerPool pool(2);
  for (const Arithmetic arithmetic : kArithmetics) {
    std::vector<std::vector<float>> results;
    for (const Mix mix : {Mix::kNibbles, Mix::kQuintals}) {
      Case c = CaseNamed("prefill");
      c.mix = mix;
      Problem problem(c, 5);
      problem.call.arithmetic = arithmetic;
      results.push_back(Compute(problem, *AvailableMoeKernels().front(), pool));
    }
    EXPECT_EQ(results[0], results[1]);
  }
}

// What FP8 costs: of normal activations half a step is 2^-5 to 2^-4 of the magnitude, its rounding
// 2.6% on average; once for x and once for act.
TEST(MoeForward, Fp8ActivationsChangeTheResultByPercents) {
  WorkerPool pool(2);
  Problem problem(CaseNamed("prefill"), 7);
  problem.call.arithmetic = Arithmetic::kExact;
  const std::vector<float> exact = Compute(problem, *AvailableMoeKernels().front(), pool);
  problem.call.arithmetic = Arithmetic::kFp8;
  const std::vector<float> fp8 = Compute(problem, *AvailableMoeKernels().front(), pool);
  double differences = 0, squares = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    differences += std::pow(double{fp8[i]} - double{exact[i]}, 2);
    squares += std::pow(double{exact[i]}, 2);
  }
  EXPECT_GT(std::sqrt(differences / squares), 0.02);
  EXPECT_LT(std::sqrt(differences / squares), 0.06);
}

RC_GTEST_PROP(MoeForward, AnyShapeIsWithinTheBound, ()) {
  Case c = {"random", 1, 64, 64, 1, 1};
  c.experts = *rc::gen::inRange<uint32_t>(1, 9);
  c.hidden = 64 * *rc::gen::inRange<uint32_t>(1, 4);
  c.intermediate = 64 * *rc::gen::inRange<uint32_t>(1, 4);
  c.tokens = *rc::gen::inRange<size_t>(0, 12);
  c.top_k = *rc::gen::inRange<size_t>(0, 5);
  c.mix = Mix::kMixed;
  c.biases = *rc::gen::arbitrary<bool>();
  c.activation = *rc::gen::element(kSilu, kDeepSeek, kGptOss);
  Problem problem(c, *rc::gen::arbitrary<uint32_t>());
  problem.call.arithmetic =
      *rc::gen::elementOf(std::vector(std::begin(kArithmetics), std::end(kArithmetics)));
  const MoeReference reference = ReferenceMoe(problem.call);
  WorkerPool pool(2);
  for (const MoeKernels* kernels : AvailableMoeKernels()) {
    const std::vector<float> y = Compute(problem, *kernels, pool);
    for (size_t i = 0; i < y.size(); ++i)
      RC_ASSERT(std::fabs(double{y[i]} - reference.y[i]) <= reference.bound[i]);
  }
}

// Finite inputs whose products are infinite: never zeros, never something finite.
TEST(MoeForward, OverflowIsSeenInTheResult) {
  WorkerPool pool(1);
  for (const Arithmetic arithmetic : kArithmetics) {
    for (const MoeKernels* kernels : AvailableMoeKernels()) {
      Problem problem(CaseNamed("one token"), 6);
      problem.call.arithmetic = arithmetic;
      for (float& x : problem.x) x *= 1e37f;
      const std::vector<float> y = Compute(problem, *kernels, pool);
      for (const float v : y) ASSERT_FALSE(std::isfinite(v)) << kernels->name;
    }
  }
}

TEST(MoeForward, NoTokensAreNoWork) {
  WorkerPool pool(1);
  MoeCall call;
  EXPECT_TRUE(CheckMoeCall(call));
  EXPECT_TRUE(MoeForward(call, *AvailableMoeKernels().front(), pool));
}

void ExpectRefused(const MoeCall& call, const std::string& text) {
  const Result<void> checked = CheckMoeCall(call);
  ASSERT_FALSE(checked) << text;
  EXPECT_EQ(checked.error().code(), StatusCode::kUsage);
  EXPECT_NE(checked.error().ToString().find(text), std::string::npos) << checked.error().ToString();
}

TEST(CheckMoeCall, NamesWhatIsWrongAndWhere) {
  Problem problem(CaseNamed("both precisions in one call"), 1);
  const float kBad[] = {std::nanf(""), std::numeric_limits<float>::infinity(),
                        -std::numeric_limits<float>::infinity()};
  for (const float bad : kBad) {
    problem.x[128 * 2 + 5] = bad;
    ExpectRefused(problem.call, "x [2, 5] is not finite");
    problem.x[128 * 2 + 5] = 0;
    problem.weights[4 * 8 + 3] = bad;
    ExpectRefused(problem.call, "weights [8, 3] is not finite");
    problem.weights[4 * 8 + 3] = 0;
  }
  for (const int32_t id : {-1, 8, INT32_MIN, INT32_MAX}) {
    problem.ids[4 * 1 + 2] = id;
    ExpectRefused(problem.call, "ids [1, 2] is no expert of it");
  }
  problem.ids[4 * 1 + 2] = 7;
  EXPECT_TRUE(CheckMoeCall(problem.call));
  const auto without = [&](auto member, const char* text) {
    MoeCall call = problem.call;
    call.*member = nullptr;
    ExpectRefused(call, text);
  };
  without(&MoeCall::x, "x is null");
  without(&MoeCall::y, "y is null");
  without(&MoeCall::ids, "ids is null");
  without(&MoeCall::weights, "weights is null");
  MoeCall call = problem.call;
  call.arithmetic = Arithmetic::kInvalid;
  ExpectRefused(call, "no such arithmetic");
  call = problem.call;
  call.token_count = size_t{1} << 40;
  ExpectRefused(call, "too many tokens");
  call.top_k = 0;
  ExpectRefused(call, "too many tokens");
}

TEST(MoeForward, AMissingPartIsNamedAndNeverZero) {
  WorkerPool pool(1);
  const MoeKernels& kernels = *AvailableMoeKernels().front();
  const auto expect = [&](const Case& c, auto member, const char* part) {
    Problem problem(c, 2);
    const auto chosen = static_cast<size_t>(problem.ids[0]);
    problem.experts[chosen].*member = {};
    const Result<void> done = MoeForward(problem.call, kernels, pool);
    ASSERT_FALSE(done) << part;
    EXPECT_EQ(done.error().code(), StatusCode::kData);
    const std::string text = done.error().ToString();
    EXPECT_NE(text.find("expert " + std::to_string(chosen)), std::string::npos) << text;
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_EQ(problem.y[0], 12345.0f);
  };
  expect(CaseNamed("one token"), &ExpertWeights::precision, "every part");
  expect(CaseNamed("one token"), &ExpertWeights::planes13, "planes13");
  expect(CaseNamed("one token"), &ExpertWeights::planes2, "planes2");
  expect(CaseNamed("one token"), &ExpertWeights::sc13, "sc13");
  expect(CaseNamed("one token"), &ExpertWeights::sc2, "sc2");
  expect(CaseNamed("one token at FP4"), &ExpertWeights::fp13, "fp13");
  expect(CaseNamed("one token at FP4"), &ExpertWeights::fp2, "fp2");
  expect(CaseNamed("one token at FP4 from quintals"), &ExpertWeights::planes13, "planes13");
  expect(CaseNamed("gpt-oss"), &ExpertWeights::bias13, "bias13");
  expect(CaseNamed("gpt-oss"), &ExpertWeights::bias2, "bias2");
}

TEST(MoeForward, QuintalsOfOtherCodesAreFound) {
  Problem problem(CaseNamed("one token at FP4 from quintals"), 2);
  const auto chosen = static_cast<size_t>(problem.ids[0]);
  // A word of all ones is above 624.
  for (std::byte& byte : problem.layer.experts[chosen].quintals2) byte = std::byte{255};
  WorkerPool pool(1);
  const Result<void> done = MoeForward(problem.call, *AvailableMoeKernels().front(), pool);
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().code(), StatusCode::kData);
}

TEST(RouteByExpert, IsStableAndComplete) {
  const std::vector<int32_t> ids = {3, 1, 3, 0, 1, 3};
  const Routing routing = RouteByExpert(ids, 5);
  EXPECT_EQ(routing.order, (std::vector<uint32_t>{3, 1, 4, 0, 2, 5}));
  ASSERT_EQ(routing.groups.size(), 3u);
  EXPECT_EQ(routing.groups[1].expert, 1u);
  EXPECT_EQ(routing.groups[1].begin, 1u);
  EXPECT_EQ(routing.groups[1].end, 3u);
  EXPECT_EQ(routing.groups[2].expert, 3u);
}

}  // namespace
}  // namespace hotplane
