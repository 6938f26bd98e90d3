// A crash, or an error, at every single operation of an import: what the cache holds and what the
// store holds together are always everything, and running it again finishes it.
#include "base/sweep_step.h"
#include "engine/planes_cache_testing.h"
#include "io/fault_env.h"

namespace hotplane {
namespace {

bool IsPlanes(const std::string& path) {
  return path.starts_with(Text("{}/", kTestCache)) && path.ends_with(".bin");
}

size_t CachedFiles(const MemEnv& env) {
  size_t count = 0;
  for (const auto& [path, content] : env.Files()) count += IsPlanes(path);
  return count;
}

// Each part is in the cache as it was, or in the store, verified.
void CheckNothingIsLost(MemEnv& env, const MemEnv::Snapshot& cached, Encoding fp4,
                        const PartBytesMap& parts) {
  const MemEnv::Snapshot now = env.Files();
  std::map<std::string, uint32_t> gone;  // folder and layer -> files
  for (const auto& [path, content] : cached) {
    if (!IsPlanes(path)) continue;
    const auto found = now.find(path);
    if (found == now.end()) {
      ++gone[path];
    } else {
      EXPECT_EQ(found->second, content) << path;
    }
  }
  if (gone.empty()) return;
  const auto store = Store::Open(env, kImportedStore);
  ASSERT_TRUE(store.has_value()) << store.error().ToString();
  const auto generation = store->OpenGeneration();
  ASSERT_TRUE(generation.has_value()) << generation.error().ToString();
  for (const auto& [path, count] : gone) {
    const std::string name = path.substr(path.rfind('/') + 1);
    const auto layer = static_cast<uint32_t>(name[5] - '0');
    const std::string part = name.substr(7, name.rfind('.') - 7);
    const auto rank = static_cast<uint32_t>(ParentPath(path).back() - '0');
    const Encoding encoding = part.starts_with("fp") ? fp4 : Encoding::kBase;
    EXPECT_EQ(ReadPart(generation->ForRank(rank), layer, encoding, part),
              parts.at(Text("{} {} {}", rank, layer, part)))
        << path;
  }
}

void FinishAndCompare(MemEnv& env, bool move, uint32_t world, Encoding fp4,
                      const PartBytesMap& parts) {
  const auto finished = Import(env, TestImport(world, move));
  // All was moved, and only folders were left to remove.
  const bool nothing_left =
      !finished && move && finished.error().what() == "there is no planes cache here";
  ASSERT_TRUE(finished.has_value() || nothing_left) << finished.error().ToString();
  EXPECT_EQ(AllParts(env, kImportedStore, fp4), parts);
  EXPECT_EQ(CachedFiles(env), move ? 0u : 2 * world * kPlanesCacheParts.size());
  WorkerPool pool(1);
  const auto generation = Store::Open(env, kImportedStore)->OpenGeneration();
  EXPECT_TRUE(generation->Verify(pool, nullptr, {})->findings.empty());
}

struct Case {
  bool move;
  uint32_t world;
  Encoding fp4;
  CrashMode mode;
  bool torn;
};

class ImportCrash : public testing::TestWithParam<Case> {};

TEST_P(ImportCrash, AtEveryOperationLosesNothingAndCanBeFinished) {
  const Case& c = GetParam();
  MemEnv whole;
  WriteCache(whole, c.world, c.fp4);
  const PartBytesMap parts = AllParts(whole, kTestStore, c.fp4);
  const MemEnv::Snapshot cached = whole.Files();
  FaultEnv counted(whole);
  const auto report = Import(counted, TestImport(c.world, c.move));
  ASSERT_TRUE(report.has_value()) << report.error().ToString();
  const uint64_t operations = counted.operation_count();
  ASSERT_GT(operations, 100u);
  if (c.move) {
    EXPECT_EQ(report->files_removed, 2 * c.world * kPlanesCacheParts.size() + c.world);
    EXPECT_EQ(whole.Stat(Text("{}/v2", kTestCache))->type, FileType::kInvalid);
  }
  for (uint64_t n = 1; n <= operations; n += kSweepStep) {
    SCOPED_TRACE(Text("crash at operation {} of {}", n, operations));
    MemEnv env;
    for (const auto& [path, content] : cached)
      if (path.starts_with(kTestCache)) env.SetFile(path, content);
    FaultEnv faulty(env);
    faulty.Add(
        Fault{.action = FaultAction::kCrash, .first = n, .bytes = c.torn ? uint64_t{100} : 0});
    EXPECT_FALSE(Import(faulty, TestImport(c.world, c.move)).has_value());
    env.Crash(c.mode);
    CheckNothingIsLost(env, cached, c.fp4, parts);
    FinishAndCompare(env, c.move, c.world, c.fp4, parts);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Modes, ImportCrash,
    testing::Values(Case{true, 1, Encoding::kDeltaQuintal, CrashMode::kDropUnsynced, false},
                    Case{true, 2, Encoding::kDeltaNibble, CrashMode::kDropUnsynced, true},
                    Case{true, 2, Encoding::kDeltaQuintal, CrashMode::kKeepUnsynced, false},
                    Case{false, 1, Encoding::kDeltaNibble, CrashMode::kDropUnsynced, true},
                    Case{false, 1, Encoding::kDeltaQuintal, CrashMode::kKeepUnsynced, true}),
    [](const auto& each) {
      const Case& c = each.param;
      return Text("{}{}{}{}{}", c.move ? "Move" : "Copy", c.world, EncodingName(c.fp4).substr(6),
                  c.mode == CrashMode::kDropUnsynced ? "Dropped" : "Kept", c.torn ? "Torn" : "");
    });

// Two crashes, the second while the first is being finished.
TEST(ImportCrashes, ASecondOneWhileFinishingLosesNothing) {
  MemEnv whole;
  WriteCache(whole, 1, Encoding::kDeltaQuintal);
  const PartBytesMap parts = AllParts(whole, kTestStore, Encoding::kDeltaQuintal);
  const MemEnv::Snapshot cached = whole.Files();
  for (uint64_t first = 20; first <= 400; first += 37) {
    for (uint64_t second = 1; second <= 300; second += 23 * kSweepStep) {
      MemEnv env;
      for (const auto& [path, content] : cached)
        if (path.starts_with(kTestCache)) env.SetFile(path, content);
      for (const uint64_t n : {first, second}) {
        FaultEnv faulty(env);
        faulty.Add(Fault{.action = FaultAction::kCrash, .first = n});
        (void)Import(faulty, TestImport(1, true), 2);
        env.Crash(CrashMode::kDropUnsynced);
        CheckNothingIsLost(env, cached, Encoding::kDeltaQuintal, parts);
      }
      FinishAndCompare(env, true, 1, Encoding::kDeltaQuintal, parts);
      if (HasFailure()) return;
    }
  }
}

TEST(ImportFault, AnErrorAtEveryOperationLosesNothingAndIsNamed) {
  MemEnv whole;
  WriteCache(whole, 1, Encoding::kDeltaQuintal);
  const PartBytesMap parts = AllParts(whole, kTestStore, Encoding::kDeltaQuintal);
  const MemEnv::Snapshot cached = whole.Files();
  FaultEnv counted(whole);
  ASSERT_TRUE(Import(counted, TestImport(1, true)).has_value());
  const uint64_t operations = counted.operation_count();
  for (const int error : {EIO, ENOSPC}) {
    for (uint64_t n = 1; n <= operations; n += kSweepStep) {
      SCOPED_TRACE(Text("errno {} at operation {} of {}", error, n, operations));
      MemEnv env;
      for (const auto& [path, content] : cached)
        if (path.starts_with(kTestCache)) env.SetFile(path, content);
      FaultEnv faulty(env);
      faulty.Add(Fault{.action = FaultAction::kError, .first = n, .error = error});
      const auto report = Import(faulty, TestImport(1, true));
      if (!report) {
        EXPECT_TRUE(report.error().exit_code() == 1 || report.error().exit_code() == 4)
            << report.error().ToString();
        EXPECT_FALSE(report.error().what().empty());
      }
      env.Crash(CrashMode::kDropUnsynced);
      CheckNothingIsLost(env, cached, Encoding::kDeltaQuintal, parts);
      FinishAndCompare(env, true, 1, Encoding::kDeltaQuintal, parts);
      if (HasFailure()) return;
    }
  }
}

// A bit that flips between the disk and the comparison: nothing is removed.
TEST(ImportFault, WhatDoesNotReadBackIsNotRemoved) {
  MemEnv env;
  WriteCache(env, 1, Encoding::kDeltaQuintal);
  const size_t files = CachedFiles(env);
  FaultEnv faulty(env);
  faulty.Add(BitFlip{.path_contains = "layer-0000.delta-quintal", .offset = 8192 + 77});
  const auto report = Import(faulty, TestImport(1, true));
  ASSERT_FALSE(report.has_value());
  EXPECT_EQ(report.error().code(), StatusCode::kData);
  EXPECT_NE(report.error().advice().find("nothing of this layer was removed"), std::string::npos);
  EXPECT_EQ(CachedFiles(env), files);
}

TEST(ImportFault, NoRoomIsFoundOutBeforeAnythingIsWritten) {
  MemEnv env;
  WriteCache(env, 1, Encoding::kDeltaQuintal);
  uint64_t used = 0;
  for (const auto& [path, content] : env.Files()) used += content.size();
  const MemEnv::Snapshot before = env.Files();
  env.set_capacity_bytes(used + 30000);
  const auto report = Import(env, TestImport(1, false));
  ASSERT_FALSE(report.has_value());
  EXPECT_EQ(report.error().code(), StatusCode::kCapacity);
  EXPECT_EQ(env.Files(), before);
  // Moving needs the room of one layer, and of what is around the planes in the others.
  uint64_t layer = 0;
  for (const Encoding encoding : {Encoding::kBase, Encoding::kDeltaQuintal})
    layer += PlanLayerLayout(encoding, {2, 64, 64}).file_bytes;
  env.set_capacity_bytes(used + layer + 30000);
  const auto moved = Import(env, TestImport(1, true));
  ASSERT_TRUE(moved.has_value()) << moved.error().ToString();
}

// An export makes folders first and files later: who removes what is empty waits for it.
TEST(ImportLock, FoldersAreRemovedWhileNobodyExports) {
  MemEnv env;
  WriteCache(env, 1, Encoding::kDeltaQuintal);
  const std::string lock_path = JoinPath(kTestCache, kPlanesCacheLockName);
  const PlanesCacheMeta meta = TestMeta(1, 0, Encoding::kDeltaQuintal);
  const std::string folder = PlanesCacheRankPath(kTestCache, meta);
  PlanesCacheImportOptions options = TestImport(1, true);
  options.stall_seconds = 0.2;
  // At the end of a move, then once more when all was moved and a kill left the folders.
  for (const bool again : {false, true}) {
    if (again) {
      ASSERT_TRUE(CreateDirectories(env, folder));
    }
    auto lock = env.Lock(lock_path, LockKind::kExclusive, LockWait::kTry);
    ASSERT_TRUE(lock.has_value() && *lock != nullptr);
    const auto waited = Import(env, options);
    ASSERT_FALSE(waited.has_value());
    EXPECT_EQ(waited.error().code(), StatusCode::kSystem);
    EXPECT_EQ(waited.error().file(), lock_path);
    EXPECT_EQ(env.Stat(folder)->type, FileType::kDirectory);
    lock->reset();
    const auto done = Import(env, options);
    ASSERT_TRUE(done.has_value()) << done.error().ToString();
    EXPECT_EQ(done->moved_before, again);
    EXPECT_EQ(env.Stat(folder)->type, FileType::kInvalid);
    EXPECT_EQ(env.List(kTestCache).value(), std::vector<std::string>{kPlanesCacheLockName});
  }
}

TEST(ImportLock, ALockFileOfItsOwnGoesWithTheFolders) {
  MemEnv env;
  WriteCache(env, 1, Encoding::kDeltaQuintal);
  for (const bool again : {false, true}) {
    const auto done = Import(env, TestImport(1, true));
    ASSERT_TRUE(done.has_value()) << done.error().ToString();
    EXPECT_EQ(done->moved_before, again);
    EXPECT_EQ(env.List(kTestCache).value(), std::vector<std::string>{});
  }
}

TEST(ImportCancel, EndsBetweenPieces) {
  MemEnv env;
  WriteCache(env, 1, Encoding::kDeltaQuintal);
  const size_t files = CachedFiles(env);
  CancelToken cancel;
  cancel.Cancel(2);
  PlanesCacheImportOptions options = TestImport(1, true);
  options.cancel = &cancel;
  const auto report = Import(env, options);
  ASSERT_FALSE(report.has_value());
  EXPECT_EQ(report.error().code(), StatusCode::kInterrupted);
  EXPECT_EQ(CachedFiles(env), files);
  for (const auto& [path, content] : env.Files())
    EXPECT_EQ(path.find(".tmp"), std::string::npos) << path;
}

}  // namespace
}  // namespace hotplane
