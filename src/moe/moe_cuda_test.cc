// The operator on a GPU: the cases of the CPU's against float64. Skipped, and saying so, where
// there is none.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "device/fake/fake_cuda.h"
#include "moe/moe_cuda_testing.h"
#include "moe/reference.h"

namespace hotplane {
namespace {

using namespace moe_cases;
using namespace moe_cuda_testing;
using moe_cuda::Refusal;

class MoeOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    gpu_ = Gpu::Open(&why);
    if (gpu_ == nullptr) GTEST_SKIP() << "no CUDA device: " << why;
    moe_ = Load({});
    if (moe_ == nullptr) GTEST_SKIP() << "this build has no kernels for this GPU";
    for (const PrefillKernels kernels : kAllPrefillKernels)
      if (std::unique_ptr<CudaMoe> moe = Load({.prefill = kernels, .few = true}))
        prefills_.push_back(std::move(moe));
    ASSERT_FALSE(prefills_.empty());
    shared_ = Load({.prefill = {}, .few = false});
    ASSERT_NE(shared_, nullptr);
  }

  std::unique_ptr<CudaMoe> Load(const CudaMoeKernels& wanted) {
    Result<std::unique_ptr<CudaMoe>> moe =
        CudaMoe::Load(gpu_->driver, gpu_->context, gpu_->device, wanted);
    EXPECT_TRUE(moe) << moe.error().ToString();
    return moe ? std::move(*moe) : nullptr;
  }

  std::vector<uint16_t> Run(const CudaMoe& moe, const DeviceProblem& problem) {
    const Result<void> done = moe.Forward(problem.call, gpu_->stream);
    EXPECT_TRUE(done) << done.error().ToString();
    EXPECT_EQ(gpu_->Wait(), CUDA_SUCCESS);
    return problem.y.Download<uint16_t>();
  }
  std::vector<uint16_t> Run(const DeviceProblem& problem) { return Run(*moe_, problem); }

  // By every set of kernels that there is for the call.
  template <typename Check>
  void WithAllKernels(const DeviceProblem& problem, Check&& check) {
    const bool decode = problem.call.token_count * problem.call.top_k <= 256;
    if (decode) {
      for (const CudaMoe* moe : {moe_.get(), shared_.get()}) {
        problem.Poison(*gpu_);
        check(*moe, moe->few() ? "decode" : "decode, blocks shared");
      }
      return;
    }
    for (const std::unique_ptr<CudaMoe>& moe : prefills_) {
      problem.Poison(*gpu_);
      check(*moe, NameOf(moe->prefill()));
    }
  }

  // The bound is of the worst case; what is seen is the rounding of act and of y to bfloat16,
  // 2^-9/sqrt(3) at most each, of a sum whose terms cancel.
  static constexpr double kUsual = 0x1p-8;
  // Rounding to FP8 changes results by 2^-5 or more, which the reference does too: what is seen is
  // an activation here and there that is rounded the other way.
  static constexpr double kUsualOfFp8 = 0x1p-6;

  void ExpectWithinTheBound(const DeviceProblem& problem, const std::string& of,
                            double usual = kUsual) {
    const MoeReference reference = ReferenceMoe(problem.host.call);
    WithAllKernels(problem, [&](const CudaMoe& moe, const char* name) {
      const std::string what = of + ", " + name;
      const std::vector<uint16_t> y = Run(moe, problem);
      EXPECT_EQ(problem.refusal.Download<Refusal>()[0].kind, 0u) << what;
      double errors = 0, squares = 0;
      for (size_t i = 0; i < y.size(); ++i) {
        const double error = std::fabs(double{FromBf16(y[i])} - reference.y[i]);
        ASSERT_LE(error, reference.bound[i])
            << what << ", element " << i << ": " << FromBf16(y[i]) << " for " << reference.y[i];
        errors += error * error;
        squares += reference.y[i] * reference.y[i];
      }
      if (squares > 0) {
        EXPECT_LT(std::sqrt(errors / squares), usual) << what;
      }
    });
  }

  std::unique_ptr<Gpu> gpu_;
  std::unique_ptr<CudaMoe> moe_;
  std::unique_ptr<CudaMoe> shared_;                 // without blocks of their own for few
  std::vector<std::unique_ptr<CudaMoe>> prefills_;  // that there are for this GPU
};

// Rows of `token` are NaN and no others are.
void ExpectNanOnly(const std::vector<uint16_t>& y, size_t width,
                   const std::function<bool(size_t token)>& of, const std::string& what) {
  for (size_t i = 0; i < y.size(); ++i)
    ASSERT_EQ(std::isnan(FromBf16(y[i])), of(i / width)) << what << ", element " << i;
}

TEST_F(MoeOnGpu, EveryCaseIsWithinTheBoundOfFloat64) {
  for (const Case& c : kCases) {
    const DeviceProblem problem(*gpu_, c, 7);
    ExpectWithinTheBound(problem, c.name);
  }
}

// Both ways, and widths whose last group of columns is half of one.
TEST_F(MoeOnGpu, Fp8Activations) {
  std::vector<Case> cases = {
      {"gpt-oss", 6, 128, 192, 6, 3, kGptOss, true, Mix::kMixed},
      {"gpt-oss", 6, 192, 64, 90, 3, kGptOss, true, Mix::kMixed},
      {"few assignments of an expert", 40, 64, 128, 65, 4, kDeepSeek, false, Mix::kMixed},
  };
  for (const Mix mix : {Mix::kBase, Mix::kNibbles, Mix::kQuintals})
    for (const size_t tokens : {1, 2, 4, 9, 257})
      cases.push_back({"", 3, 192, 192, tokens, 1, kSilu, false, mix});
  for (const Case& c : cases) {
    DeviceProblem problem(*gpu_, c, 9);
    problem.call.fp8 = true;
    problem.host.call.arithmetic = Arithmetic::kBf16Fp8;
    ExpectWithinTheBound(problem,
                         std::string(c.name) + ", mix " + std::to_string(static_cast<int>(c.mix)) +
                             ", " + std::to_string(c.tokens) + " tokens",
                         kUsualOfFp8);
  }
}

// One number decides what the others of its group become: nothing, where it is large enough. Its
// own weights are next to nothing, so that all that is left is what was kept wrongly.
TEST_F(MoeOnGpu, Fp8GroupsHaveTheScaleOfTheirLargest) {
  for (const Mix mix : {Mix::kBase, Mix::kNibbles, Mix::kQuintals}) {
    for (const size_t tokens : {1, 3, 257}) {
      for (const size_t block : {0, 1, 2, 3, 5}) {
        const Case c = {"", 2, 192, 64, tokens, 1, kSilu, false, mix};
        DeviceProblem problem(*gpu_, c, 9);
        problem.call.fp8 = true;
        const size_t group = block / 4 * 4, end = std::min<size_t>(group + 4, 6);
        for (TestLayer::Expert& expert : problem.host.layer.experts)
          for (size_t i = 0; i < expert.sc13.size(); ++i)
            if (const size_t at = i / 16 % 6; at == block || at < group || at >= end)
              expert.sc13[i] = std::byte(0);
        for (float& x : problem.host.x) x = 0.25f;
        for (size_t token = 0; token < tokens; ++token)
          problem.host.x[token * 192 + block * 32 + 7 * token % 32] = 0x1p20f;
        problem.Upload(*gpu_);
        // Of all experts alike, and by expert: one token is staged by other threads.
        for (const bool by_expert : {true, false}) {
          if (!by_expert) {
            problem.call.wanted = nullptr;
            problem.call.wanted_of_all =
                mix == Mix::kBase ? moe_cuda::kWantBase : moe_cuda::kWantFp4;
          }
          WithAllKernels(problem, [&](const CudaMoe& moe, const char* name) {
            const std::vector<uint16_t> y = Run(moe, problem);
            for (size_t i = 0; i < y.size(); ++i)
              ASSERT_EQ(FromBf16(y[i]), 0.0f) << name << ", mix " << static_cast<int>(mix)
                                              << ", block " << block << ", element " << i;
          });
        }
      }
    }
  }
}

// Where the tier is told for all experts at once, kernels that know it decode.
TEST_F(MoeOnGpu, OneTierForAllExpertsGivesWhatEachTierGives) {
  for (const Mix mix : {Mix::kBase, Mix::kNibbles, Mix::kQuintals}) {
    for (const bool fp8 : {false, true}) {
      for (const size_t tokens : {1, 2, 130}) {
        const Case c = {"", 4, 192, 64, tokens, 2, kDeepSeek, false, mix};
        DeviceProblem problem(*gpu_, c, 4);
        problem.call.fp8 = fp8;
        WithAllKernels(problem, [&](const CudaMoe& moe, const char* name) {
          const uint8_t* const by_expert = std::exchange(problem.call.wanted, nullptr);
          problem.call.wanted_of_all = mix == Mix::kBase ? moe_cuda::kWantBase : moe_cuda::kWantFp4;
          const std::vector<uint16_t> of_all = Run(moe, problem);
          for (const uint8_t tiers :
               {moe_cuda::kFromAnything, mix == Mix::kBase      ? moe_cuda::kFromBase
                                         : mix == Mix::kNibbles ? moe_cuda::kFromNibbles
                                                                : moe_cuda::kFromQuintals}) {
            problem.call.tiers = tiers;
            EXPECT_EQ(Run(moe, problem), of_all) << name << ", " << tokens << " tokens";
          }
          problem.call.tiers = moe_cuda::kFromAnything;
          problem.call.wanted = by_expert;
          EXPECT_EQ(Run(moe, problem), of_all) << name << ", " << tokens << " tokens";
        });
      }
    }
  }
}

// One group of 32 rows to a block, two, and so on (on the fake driver, which has a few blocks),
// those of a block that begin in the middle of a tile, and the last block's, which may be fewer.
TEST_F(MoeOnGpu, EveryNumberOfGroupsOfABlock) {
  for (const Mix mix : {Mix::kBase, Mix::kNibbles, Mix::kQuintals, Mix::kMixed}) {
    for (uint32_t intermediate = 64; intermediate <= 9 * 64; intermediate += 64) {
      const Case c = {"", 3, 192, intermediate, 2, 1, kGptOss, true, mix};
      const DeviceProblem problem(*gpu_, c, intermediate);
      ExpectWithinTheBound(problem, std::to_string(intermediate) + " rows, mix " +
                                        std::to_string(static_cast<int>(mix)));
    }
  }
  // On a GPU of 132 multiprocessors two blocks of five groups to an assignment.
  const Case many = {"", 7, 64, 320, 11, 6, kSilu, false, Mix::kMixed};
  ExpectWithinTheBound(DeviceProblem(*gpu_, many, 1), "66 assignments");
}

// What the fake driver can be asked, null on a GPU.
template <typename Function>
Function* OfFake(const char* name) {
  return reinterpret_cast<Function*>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), name));
}

TEST_F(MoeOnGpu, KernelsAreTakenByWhatTheCallSays) {
  auto* const launches = OfFake<decltype(fake_cuda_calls)>("fake_cuda_calls");
  if (launches == nullptr) GTEST_SKIP() << "a GPU does not tell which kernels were launched";
  using moe_cuda::kFromAnything, moe_cuda::kFromBase, moe_cuda::kFromNibbles;
  using moe_cuda::kFromQuintals, moe_cuda::kWantBase, moe_cuda::kWantFp4;
  struct {
    Mix mix;
    uint8_t wanted, tiers;
    size_t tokens;
    bool fp8, few;
    const char* kernel;
  } const calls[] = {
      {Mix::kBase, kWantBase, kFromAnything, 1, false, true, "hotplane_moe_decode_few"},
      {Mix::kQuintals, kWantFp4, kFromAnything, 1, false, true, "hotplane_moe_decode_few"},
      {Mix::kBase, kWantBase, kFromAnything, 1, false, false, "hotplane_moe_decode_base"},
      {Mix::kBase, kWantBase, kFromAnything, 100, false, true, "hotplane_moe_decode_base"},
      {Mix::kNibbles, kWantFp4, kFromNibbles, 100, false, true, "hotplane_moe_decode_nibbles"},
      {Mix::kQuintals, kWantFp4, kFromQuintals, 100, false, true, "hotplane_moe_decode_quintals"},
      {Mix::kQuintals, kWantFp4, kFromAnything, 100, false, true, "hotplane_moe_decode"},
      {Mix::kBase, kWantBase, kFromBase, 1, true, true, "hotplane_moe_decode_fp8"},
      {Mix::kNibbles, kWantFp4, kFromNibbles, 200, false, true, "hotplane_moe_prefill_mma_nibbles"},
  };
  for (const auto& call : calls) {
    const Case c = {"", 4, 64, 64, call.tokens, 2, kSilu, false, call.mix};
    DeviceProblem problem(*gpu_, c, 1);
    problem.call.wanted = nullptr;
    problem.call.wanted_of_all = call.wanted;
    problem.call.tiers = call.tiers;
    problem.call.fp8 = call.fp8;
    const CudaMoe& moe = call.tokens == 200 ? *prefills_.back() : call.few ? *moe_ : *shared_;
    const uint64_t before = launches(call.kernel);
    Run(moe, problem);
    EXPECT_GT(launches(call.kernel), before) << call.kernel << ", " << call.tokens << " tokens";
  }
}

// What kernels are not told of is no garbage, and not read with the steps of something else.
TEST_F(MoeOnGpu, WhatIsLeftOutOfTheTiersIsRefused) {
  for (const size_t tokens : {1, 100, 200}) {
    const Case c = {"", 4, 128, 64, tokens, 2, kSilu, false, Mix::kQuintals};
    DeviceProblem problem(*gpu_, c, 1);
    problem.call.wanted = nullptr;
    problem.call.wanted_of_all = moe_cuda::kWantFp4;
    problem.call.tiers = moe_cuda::kFromNibbles;
    WithAllKernels(problem, [&](const CudaMoe& moe, const char* name) {
      ExpectNanOnly(
          Run(moe, problem), 128, [](size_t) { return true; },
          std::to_string(tokens) + " tokens, " + name);
      EXPECT_EQ(problem.refusal.Download<Refusal>()[0].kind, moe_cuda::kRefusedExpert) << name;
    });
  }
}

TEST_F(MoeOnGpu, ATokenThatNamesAnExpertTwice) {
  for (const Mix mix : {Mix::kBase, Mix::kNibbles, Mix::kQuintals}) {
    for (const size_t top_k : {2, 3, 5, 7}) {
      const Case c = {"", 4, 192, 64, 1, top_k, kSilu, false, mix, Ids::kRepeated};
      DeviceProblem problem(*gpu_, c, 4);
      problem.call.wanted = nullptr;
      problem.call.wanted_of_all = mix == Mix::kBase ? moe_cuda::kWantBase : moe_cuda::kWantFp4;
      problem.call.tiers = mix == Mix::kBase      ? moe_cuda::kFromBase
                           : mix == Mix::kNibbles ? moe_cuda::kFromNibbles
                                                  : moe_cuda::kFromQuintals;
      ExpectWithinTheBound(
          problem, std::to_string(top_k) + " of mix " + std::to_string(static_cast<int>(mix)));
    }
  }
}

// Fewer multiprocessors, more, and 100 KiB of shared memory, which are blocks of eight warps.
TEST_F(MoeOnGpu, OtherGpus) {
  auto* const become = OfFake<decltype(fake_cuda_gpu)>("fake_cuda_gpu");
  if (become == nullptr) GTEST_SKIP() << "this GPU has what it has";
  constexpr struct {
    int multiprocessors, shared_bytes;
  } kGpus[] = {{40, 100 << 10}, {84, 100 << 10}, {108, 164 << 10}, {200, 228 << 10}};
  for (const auto& gpu : kGpus) {
    become(gpu.multiprocessors, gpu.shared_bytes);
    moe_ = Load({});
    shared_ = Load({.prefill = {}, .few = false});
    ASSERT_NE(moe_, nullptr);
    for (const size_t tokens : {1, 5, 40}) {
      const Case c = {"", 5, 192, 320, tokens, 3, kGptOss, true, Mix::kMixed};
      ExpectWithinTheBound(DeviceProblem(*gpu_, c, 2), std::to_string(gpu.multiprocessors) +
                                                           " multiprocessors, " +
                                                           std::to_string(tokens) + " tokens");
    }
  }
  become(132, 228 << 10);
}

// Kernels that count otherwise leave the counts as they found them.
TEST_F(MoeOnGpu, CallsOfAllSizesShareAWorkspace) {
  std::vector<std::unique_ptr<DeviceProblem>> problems;
  std::vector<std::vector<uint16_t>> expected;
  for (const size_t tokens : {64, 1, 260, 2}) {
    const Case c = {"", 6, 128, 64, tokens, 3, kSilu, false, Mix::kMixed};
    problems.push_back(std::make_unique<DeviceProblem>(*gpu_, c, static_cast<uint32_t>(tokens)));
    expected.push_back(Run(*problems.back()));
  }
  // The largest.
  const Buffer& workspace = problems[2]->workspace;
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < problems.size(); ++i) {
      problems[i]->call.workspace = workspace.as<std::byte>();
      EXPECT_EQ(Run(*problems[i]), expected[i]) << "round " << round << ", call " << i;
    }
  }
}

TEST_F(MoeOnGpu, EveryNumberOfTokensOfAnExpert) {
  for (const Mix mix : {Mix::kBase, Mix::kNibbles, Mix::kQuintals}) {
    for (const size_t tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33}) {
      const Case c = {"", 3, 640, 192, tokens, 1, kSilu, false, mix, Ids::kOneExpert};
      const DeviceProblem problem(*gpu_, c, static_cast<uint32_t>(tokens));
      ExpectWithinTheBound(problem, std::to_string(tokens) + " tokens, mix " +
                                        std::to_string(static_cast<int>(mix)));
    }
  }
}

// All that the table has, with tokens enough for a prefill.
TEST_F(MoeOnGpu, EveryCaseAsAPrefill) {
  for (Case c : kCases) {
    if (c.top_k == 0) continue;
    c.tokens = 256 / c.top_k + 1;
    ExpectWithinTheBound(DeviceProblem(*gpu_, c, 7), c.name);
  }
}

// Experts of so many assignments, and of none between them.
TEST_F(MoeOnGpu, PrefillOfEveryWidth) {
  static constexpr size_t kCounts[] = {1,   0,  15, 16, 17, 31, 32, 33,  0,   47,  48,  49,
                                       63,  64, 65, 80, 81, 96, 97, 111, 112, 113, 127, 128,
                                       129, 7,  0,  8,  9,  95, 79, 225, 257, 2,   3,   5};
  const size_t tokens = std::accumulate(std::begin(kCounts), std::end(kCounts), size_t{0});
  // With many experts of none the average is what takes kernels for few.
  for (const uint32_t experts : {uint32_t{std::size(kCounts)}, uint32_t{300}}) {
    for (const Mix mix : {Mix::kBase, Mix::kNibbles, Mix::kQuintals}) {
      const Case c = {"", experts, 64, 128, tokens, 1, kDeepSeek, false, mix};
      DeviceProblem problem(*gpu_, c, 12);
      problem.host.ids.clear();
      for (size_t e = 0; e < std::size(kCounts); ++e)
        problem.host.ids.insert(problem.host.ids.end(), kCounts[e], static_cast<int32_t>(e));
      std::shuffle(problem.host.ids.begin(), problem.host.ids.end(), std::mt19937(1));
      problem.host.call.ids = problem.host.ids.data();
      problem.Upload(*gpu_);
      ExpectWithinTheBound(problem, std::to_string(experts) + " experts, mix " +
                                        std::to_string(static_cast<int>(mix)));
    }
  }
}

// Above 256 assignments; runs of columns of every width, rows that do not fill a tile.
TEST_F(MoeOnGpu, PrefillOfEveryTier) {
  for (const Mix mix : {Mix::kBase, Mix::kNibbles, Mix::kQuintals, Mix::kMixed}) {
    const Case cases[] = {
        {"uneven", 9, 320, 192, 200, 2, kGptOss, true, mix},
        {"one expert", 2, 128, 64, 257, 1, kSilu, false, mix, Ids::kOneExpert},
        {"one expert, runs of 113", 1, 64, 64, 226, 2, kSilu, false, mix, Ids::kOneExpert},
        {"many experts", 300, 64, 64, 100, 4, kDeepSeek, false, mix},
        {"stages are filled again", 1, 640, 64, 257, 1, kSilu, false, mix},
    };
    for (const Case& c : cases) {
      const DeviceProblem problem(*gpu_, c, 11);
      ExpectWithinTheBound(problem,
                           std::string(c.name) + ", mix " + std::to_string(static_cast<int>(mix)));
    }
  }
}

TEST_F(MoeOnGpu, WideShapes) {
  for (const Mix mix : {Mix::kBase, Mix::kNibbles, Mix::kQuintals, Mix::kMixed}) {
    const Case c = {"", 4, 2880, 704, 3, 2, kGptOss, true, mix};
    const DeviceProblem problem(*gpu_, c, 3);
    ExpectWithinTheBound(problem, "wide");
  }
}

// Every scale byte there is, block by block.
TEST_F(MoeOnGpu, ScalesOfEverySize) {
  for (const Mix mix : {Mix::kBase, Mix::kNibbles, Mix::kQuintals}) {
    for (const int lowest : {0, 60, 120, 180, 225}) {
      const Case c = {"", 2, 128, 64, 5, 1, kSilu, false, mix};
      DeviceProblem on_device(*gpu_, c, 5);
      std::mt19937 random(lowest);
      for (TestLayer::Expert& expert : on_device.host.layer.experts) {
        for (std::byte& byte : expert.sc13) byte = std::byte(lowest + random() % 16);
        for (std::byte& byte : expert.sc2) byte = std::byte(254 - lowest - random() % 16);
      }
      // Gate and up stay where their product is neither infinite nor nothing.
      for (float& x : on_device.host.x) x = std::ldexp(x, std::clamp(130 - lowest, -95, 95));
      on_device.Upload(*gpu_);
      // At the ends of the range act is nearly nothing.
      ExpectWithinTheBound(on_device, std::to_string(lowest), INFINITY);
    }
  }
}

TEST_F(MoeOnGpu, GivesTheSameBitsEveryTime) {
  for (const char* name : {"one token", "prefill", "both precisions in one call"}) {
    const DeviceProblem problem(*gpu_, CaseNamed(name), 3);
    WithAllKernels(problem, [&](const CudaMoe& moe, const char* kernels) {
      const std::vector<uint16_t> first = Run(moe, problem);
      for (int i = 0; i < 20; ++i) EXPECT_EQ(Run(moe, problem), first) << name << ", " << kernels;
    });
  }
}

// Routing included: the ids that count are those at the replay.
TEST_F(MoeOnGpu, AGraphGivesWhatTheCallGives) {
  const GraphCalls calls;
  if (calls.cuStreamBeginCapture == nullptr) GTEST_SKIP() << "this driver has no graphs";
  for (const char* name : {"one token", "prefill", "both precisions in one call"}) {
    DeviceProblem problem(*gpu_, CaseNamed(name), 3);
    WithAllKernels(problem, [&](const CudaMoe& moe, const char* kernels) {
      ASSERT_EQ(calls.cuStreamBeginCapture(gpu_->stream, CU_STREAM_CAPTURE_MODE_RELAXED),
                CUDA_SUCCESS);
      ASSERT_TRUE(moe.Forward(problem.call, gpu_->stream));
      CUgraph graph = nullptr;
      CUgraphExec exec = nullptr;
      ASSERT_EQ(calls.cuStreamEndCapture(gpu_->stream, &graph), CUDA_SUCCESS);
      ASSERT_EQ(calls.cuGraphInstantiate(&exec, graph, 0), CUDA_SUCCESS);
      for (int i = 0; i < 3; ++i) {
        for (int32_t& id : problem.host.ids)
          id = (id + i) % static_cast<int32_t>(problem.call.geometry.experts);
        ASSERT_EQ(gpu_->driver.cuMemcpyHtoDAsync(problem.ids.address(), problem.host.ids.data(),
                                                 problem.ids.bytes(), gpu_->stream),
                  CUDA_SUCCESS);
        ASSERT_EQ(calls.cuGraphLaunch(exec, gpu_->stream), CUDA_SUCCESS);
        ASSERT_EQ(gpu_->Wait(), CUDA_SUCCESS);
        const std::vector<uint16_t> replayed = problem.y.Download<uint16_t>();
        EXPECT_EQ(replayed, Run(moe, problem)) << name << ", " << kernels << ", replay " << i;
      }
      EXPECT_EQ(calls.cuGraphExecDestroy(exec), CUDA_SUCCESS);
      EXPECT_EQ(calls.cuGraphDestroy(graph), CUDA_SUCCESS);
    });
  }
}

TEST_F(MoeOnGpu, WhatIsMissingIsToldAndNotANumber) {
  DeviceProblem problem(*gpu_, CaseNamed("one token at FP4"), 2);
  const auto chosen = static_cast<size_t>(problem.host.ids[0]);
  problem.host.experts[chosen].fp2 = nullptr;
  problem.Upload(*gpu_);
  WithAllKernels(problem, [&](const CudaMoe& moe, const char* name) {
    for (const uint16_t y : Run(moe, problem)) ASSERT_TRUE(std::isnan(FromBf16(y))) << name;
    const Refusal refusal = problem.refusal.Download<Refusal>()[0];
    EXPECT_EQ(refusal.kind, moe_cuda::kRefusedExpert) << name;
    EXPECT_EQ(refusal.expert, chosen) << name;
  });

  // A caller may allow the base instead; then its result is the base's.
  DeviceProblem base(*gpu_, CaseNamed("one token"), 2);
  WithAllKernels(base, [&](const CudaMoe& moe, const char* name) {
    base.call.wanted = nullptr;
    base.call.wanted_of_all = moe_cuda::kWantBase;
    const std::vector<uint16_t> expected = Run(moe, base);
    base.call.wanted_of_all = moe_cuda::kWantFp4OrBase;
    EXPECT_EQ(Run(moe, base), expected) << name;
    EXPECT_EQ(base.refusal.Download<Refusal>()[0].kind, 0u) << name;
  });
}

// Refused experts among many that are computed: more of them than a block could have of others.
TEST_F(MoeOnGpu, ManyMissingExpertsAmongOthers) {
  for (const Mix mix : {Mix::kBase, Mix::kQuintals}) {
    for (const size_t missing : {30, 60, 150}) {
      const Case c = {"", 200, 128, 64, 200, 1, kSilu, false, mix};
      DeviceProblem problem(*gpu_, c, 8);
      std::vector<bool> gone(c.experts);
      for (size_t i = 0; i < c.experts; ++i) problem.host.ids[i] = static_cast<int32_t>(i);
      for (size_t i = 0; i < missing; ++i) {
        gone[20 + i] = true;
        problem.host.experts[20 + i].sc2 = nullptr;
      }
      problem.Upload(*gpu_);
      ExpectNanOnly(
          Run(problem), 128, [&](size_t token) { return gone[token]; },
          std::to_string(missing) + " missing");
      EXPECT_EQ(problem.refusal.Download<Refusal>()[0].kind, moe_cuda::kRefusedExpert);
    }
  }
}

TEST_F(MoeOnGpu, NanStaysVisible) {
  for (const Activation& activation : {kSilu, kDeepSeek, kGptOss}) {
    for (const Mix mix : {Mix::kBase, Mix::kNibbles}) {
      for (const size_t tokens : {3, 300}) {
        const Case c = {"", 4, 128, 64, tokens, 1, activation, false, mix};
        DeviceProblem problem(*gpu_, c, 8);
        problem.host.x[1 * 128 + 70] = std::nanf("");
        problem.Upload(*gpu_);
        for (const bool fp8 : {false, true}) {
          problem.call.fp8 = fp8;
          WithAllKernels(problem, [&](const CudaMoe& moe, const char* name) {
            ExpectNanOnly(
                Run(moe, problem), 128, [](size_t token) { return token == 1; },
                std::to_string(tokens) + " tokens, " + name);
          });
        }
      }
    }
  }
}

TEST_F(MoeOnGpu, PrefillTellsWhatItCannotCompute) {
  for (const Mix mix : {Mix::kBase, Mix::kNibbles, Mix::kQuintals}) {
    const Case c = {"", 5, 128, 64, 300, 1, kSilu, false, mix};
    DeviceProblem problem(*gpu_, c, 8);
    problem.host.experts[3].sc13 = nullptr;
    problem.host.ids[7] = 5;
    problem.host.ids[299] = -1;
    problem.Upload(*gpu_);
    WithAllKernels(problem, [&](const CudaMoe& moe, const char* name) {
      ExpectNanOnly(
          Run(moe, problem), 128,
          [&](size_t token) {
            return problem.host.ids[token] == 3 || problem.host.ids[token] < 0 ||
                   problem.host.ids[token] > 4;
          },
          std::string(name) + ", mix " + std::to_string(static_cast<int>(mix)));
      EXPECT_NE(problem.refusal.Download<Refusal>()[0].kind, 0u);
    });
  }
}

// Prefill folds scales into bfloat16 weights: those that bfloat16 has not become infinite, never
// something else.
TEST_F(MoeOnGpu, PrefillOfScalesOfEverySize) {
  for (const Mix mix : {Mix::kBase, Mix::kNibbles, Mix::kQuintals}) {
    for (const int byte : {0, 1, 2, 127, 128, 129, 130, 200, 250, 252}) {
      const Case c = {"", 2, 128, 64, 300, 1, kSilu, false, mix};
      DeviceProblem problem(*gpu_, c, 5);
      for (TestLayer::Expert& expert : problem.host.layer.experts) {
        for (std::byte& scale : expert.sc13) scale = std::byte(byte);
        for (std::byte& scale : expert.sc2) scale = std::byte(120);
      }
      for (float& x : problem.host.x) x = std::ldexp(x, std::clamp(124 - byte, -100, 100));
      problem.Upload(*gpu_);
      ExpectWithinTheBound(problem, std::to_string(byte), INFINITY);
    }
  }
  const Case c = {"", 2, 128, 64, 300, 1, kSilu, false, Mix::kBase};
  for (const int byte : {253, 254}) {
    DeviceProblem problem(*gpu_, c, 5);
    for (TestLayer::Expert& expert : problem.host.layer.experts)
      for (std::byte& scale : expert.sc13) scale = std::byte(byte);
    problem.Upload(*gpu_);
    WithAllKernels(problem, [&](const CudaMoe& moe, const char* name) {
      for (const uint16_t y : Run(moe, problem))
        ASSERT_FALSE(std::isfinite(FromBf16(y))) << byte << ", " << name;
    });
  }
}

// Of the fake driver: as if it were of another generation.
TEST_F(MoeOnGpu, WithoutWgmmaPrefillTakesMma) {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  const auto fail = reinterpret_cast<decltype(&fake_cuda_fail)>(dlsym(driver, "fake_cuda_fail"));
  if (fail == nullptr) GTEST_SKIP() << "this GPU has what it has";
  if (moe_->prefill() != PrefillKernels::kWgmma) GTEST_SKIP() << "this build has no wgmma";
  // The first module has the kernels of decode.
  fail("cuModuleLoadData", 1, CUDA_ERROR_NO_BINARY_FOR_GPU, false);
  const std::unique_ptr<CudaMoe> other = Load({});
  ASSERT_NE(other, nullptr);
  EXPECT_EQ(other->prefill(), PrefillKernels::kMma);
  fail("cuModuleLoadData", 1, CUDA_ERROR_NO_BINARY_FOR_GPU, false);
  EXPECT_EQ(Load({.prefill = PrefillKernels::kWgmma, .few = true}), nullptr);
}

TEST_F(MoeOnGpu, CallsThatCannotBeAreRefusedBeforeAnythingRuns) {
  const DeviceProblem problem(*gpu_, CaseNamed("one token"), 2);
  const auto refused = [&](auto change, const char* text) {
    CudaMoeCall call = problem.call;
    change(call);
    const Result<void> done = moe_->Forward(call, gpu_->stream);
    ASSERT_FALSE(done) << text;
    EXPECT_EQ(done.error().code(), StatusCode::kUsage);
    EXPECT_NE(done.error().ToString().find(text), std::string::npos) << done.error().ToString();
  };
  refused([](CudaMoeCall& c) { c.x = nullptr; }, "x in device memory");
  refused([](CudaMoeCall& c) { c.y += 1; }, "y at a multiple of 16 bytes");
  refused([](CudaMoeCall& c) { c.workspace_bytes -= 1; }, "the workspace is too small");
  refused([](CudaMoeCall& c) { c.geometry.experts = 1025; }, "1 to 1024 experts");
  refused([](CudaMoeCall& c) { c.geometry.hidden = 96; }, "multiples of 64");
  refused([](CudaMoeCall& c) { c.token_count = 1u << 25; }, "too many tokens");
  refused([](CudaMoeCall& c) { c.top_k = 257; }, "");
  refused([](CudaMoeCall& c) { c.ids = reinterpret_cast<const int32_t*>(7); }, "ids at a multiple");
  refused([](CudaMoeCall& c) { c.weights = reinterpret_cast<const float*>(6); },
          "weights at a multiple");
  refused([](CudaMoeCall& c) { c.tiers = 0; }, "something to compute them from");
  EXPECT_EQ(gpu_->Wait(), CUDA_SUCCESS);
}

TEST_F(MoeOnGpu, AnIdThatIsNoExpertIsToldAndNotANumber) {
  for (const int32_t id : {-1, 8, INT32_MAX, INT32_MIN}) {
    DeviceProblem problem(*gpu_, CaseNamed("both precisions in one call"), 1);
    problem.host.ids[4 * 2 + 1] = id;
    problem.Upload(*gpu_);
    WithAllKernels(problem, [&](const CudaMoe& moe, const char* name) {
      ExpectNanOnly(
          Run(moe, problem), 128, [](size_t token) { return token == 2; },
          std::to_string(id) + ", " + name);
      EXPECT_EQ(problem.refusal.Download<Refusal>()[0].kind, moe_cuda::kRefusedId) << name;
    });
  }
}

}  // namespace
}  // namespace hotplane
