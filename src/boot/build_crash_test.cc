// A crash at every single operation of a build: whatever is left is whole, and a second run
// finishes it to the same bytes.
#include "base/format_text.h"
#include "base/sweep_step.h"
#include "boot/boot_testing.h"
#include "io/fault_env.h"

namespace hotplane {
namespace {

struct Reference {
  StoreContent store_files;
  std::vector<std::vector<std::byte>> layers;
  uint64_t operations = 0;
};

void WriteModel(MemEnv& env) {
  SynthCheckpointOptions model = SmallModel();
  model.geometry.experts = 2;
  WriteCheckpoint(env, model);
}

// Where nobody knows what is in the page cache, all of the checkpoint is read ahead.
const Fault kReadAhead{
    .action = FaultAction::kError, .count = Fault::kForever, .kind = OperationKind::kCachedBytes};

Reference MakeReference(bool read_ahead = false) {
  MemEnv env;
  WriteModel(env);
  FaultEnv counted(env);
  if (read_ahead) counted.Add(kReadAhead);
  const Result<BuildReport> report = BuildStore(counted, BothTiers());
  EXPECT_TRUE(report.has_value()) << report.error().ToString();
  return {StoreFiles(env), BootStore(env).value().layers, counted.operation_count()};
}

// Every layer that boots on its own has the right bytes. Returns how many do.
size_t CheckWhatBoots(MemEnv& env, const Reference& reference) {
  size_t booted_count = 0;
  for (uint32_t layer = 0; layer < reference.layers.size(); ++layer) {
    BootOptions options;
    options.layers = Text("{}", layer);
    const Result<Booted> booted = BootStore(env, options, 1);
    if (!booted) {
      // No store yet is wrong usage, a store without the layer is a refusal.
      const int code = booted.error().exit_code();
      EXPECT_TRUE(code == 2 || code == 3) << booted.error().ToString();
      continue;
    }
    EXPECT_EQ(booted->layers[0], reference.layers[layer]);
    ++booted_count;
  }
  return booted_count;
}

void FinishAndCompare(MemEnv& env, const Reference& reference) {
  const Result<BuildReport> finished = BuildStore(env, BothTiers());
  ASSERT_TRUE(finished.has_value()) << finished.error().ToString();
  ASSERT_TRUE(Store::CollectGarbage(env, kTestStore, {}, false).has_value());
  EXPECT_EQ(StoreFiles(env), reference.store_files);
  WorkerPool pool(1);
  const Generation generation = Store::Open(env, kTestStore)->OpenGeneration().value();
  const VerifyReport verified = generation.Verify(pool, nullptr, {}).value();
  EXPECT_TRUE(verified.findings.empty());
  EXPECT_EQ(BootStore(env).value().layers, reference.layers);
}

class BuildCrash : public testing::TestWithParam<std::tuple<CrashMode, bool>> {};

TEST_P(BuildCrash, AtEveryOperationLeavesAStoreThatCanBeFinished) {
  const auto [mode, torn] = GetParam();
  const Reference reference = MakeReference();
  ASSERT_GT(reference.operations, 50u);
  size_t booted_most = 0;
  for (uint64_t n = 1; n <= reference.operations; n += kSweepStep) {
    SCOPED_TRACE(Text("crash at operation {} of {}", n, reference.operations));
    MemEnv env;
    WriteModel(env);
    FaultEnv faulty(env);
    faulty.Add(Fault{.action = FaultAction::kCrash, .first = n, .bytes = torn ? uint64_t{100} : 0});
    EXPECT_FALSE(BuildStore(faulty, BothTiers()).has_value());
    ASSERT_TRUE(faulty.crashed());
    env.Crash(mode);
    booted_most = std::max(booted_most, CheckWhatBoots(env, reference));
    FinishAndCompare(env, reference);
    if (HasFailure()) return;
  }
  if (kSweepStep == 1) {
    EXPECT_EQ(booted_most, reference.layers.size());
  }
}

// With several workers the order of operations changes from run to run; every order must survive.
TEST_P(BuildCrash, OfSeveralWorkers) {
  const auto [mode, torn] = GetParam();
  const Reference reference = MakeReference(true);
  for (uint64_t n = 1; n <= reference.operations; n += 7) {
    SCOPED_TRACE(Text("crash at operation {} of about {}", n, reference.operations));
    MemEnv env;
    WriteModel(env);
    FaultEnv faulty(env);
    faulty.Add(Fault{.action = FaultAction::kCrash, .first = n, .bytes = torn ? uint64_t{100} : 0});
    faulty.Add(kReadAhead);
    (void)BuildStore(faulty, BothTiers(3));
    env.Crash(mode);
    CheckWhatBoots(env, reference);
    FinishAndCompare(env, reference);
    if (HasFailure()) return;
  }
}

// Not a crash but an error: the build fails and cleans up behind itself.
TEST(BuildFault, AnErrorAtEveryOperationLeavesNoTemporary) {
  const Reference reference = MakeReference(true);
  for (const int error : {EIO, ENOSPC, EINTR}) {
    for (uint64_t n = 1; n <= reference.operations; n += kSweepStep) {
      SCOPED_TRACE(Text("errno {} at operation {} of {}", error, n, reference.operations));
      MemEnv env;
      WriteModel(env);
      FaultEnv faulty(env);
      faulty.Add(Fault{.action = FaultAction::kError, .first = n, .error = error});
      faulty.Add(kReadAhead);
      const Result<BuildReport> report = BuildStore(faulty, BothTiers());
      if (!report) {
        EXPECT_TRUE(report.error().exit_code() == 1 || report.error().exit_code() == 4 ||
                    report.error().exit_code() == 3)
            << report.error().ToString();
      }
      size_t temporaries = 0;
      for (const auto& [path, content] : StoreFiles(env))
        temporaries += path.find(".tmp") != std::string::npos;
      // A failing Remove can only leave what it was to remove.
      EXPECT_LE(temporaries, 1u);
      CheckWhatBoots(env, reference);
      FinishAndCompare(env, reference);
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Modes, BuildCrash,
    testing::Combine(testing::Values(CrashMode::kDropUnsynced, CrashMode::kKeepUnsynced),
                     testing::Bool()),
    [](const auto& mode) {
      return std::string(std::get<0>(mode.param) == CrashMode::kDropUnsynced ? "Dropped" : "Kept") +
             (std::get<1>(mode.param) ? "Torn" : "Whole");
    });

}  // namespace
}  // namespace hotplane
