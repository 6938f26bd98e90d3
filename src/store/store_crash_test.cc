// An error or a power cut at every single operation: nothing, or a whole file.
#include <gtest/gtest.h>

#include <cerrno>

#include "io/fault_env.h"
#include "io/mem_env.h"
#include "io/output_place.h"
#include "store/paths.h"
#include "store/store.h"
#include "store/store_samples.h"

namespace hotplane {
namespace {

// One layer, both kinds of layout and a source record: every step that publishes something.
Result<void> Work(Env& env) {
  HP_ASSIGN(const Generation generation,
            Store::OpenOrCreateGeneration(env, "/store", SampleManifest()));
  for (const Encoding encoding : {Encoding::kBase, Encoding::kDeltaQuintal}) {
    HP_ASSIGN(const auto lock, generation.LockLayer(0, LockWait::kBlock));
    const TierProbe probe = generation.Probe(0, encoding);
    if (probe.presence == Presence::kPresent) continue;
    HP_ASSIGN(const auto writer, generation.CreateLayer(0, encoding));
    HP_TRY(WriteSamplePieces(*writer));
    HP_TRY(writer->Publish());
  }
  return generation.PublishSourceRecord(SampleSourceRecord(generation, 0));
}

// The files but the locks.
MemEnv::Snapshot Published(const MemEnv& env) {
  MemEnv::Snapshot files = env.Files();
  std::erase_if(files, [](const auto& f) { return f.first.find("/locks/") != std::string::npos; });
  return files;
}

MemEnv::Snapshot Finished() {
  MemEnv env;
  EXPECT_TRUE(Work(env).has_value());
  return Published(env);
}

uint64_t OperationCount() {
  MemEnv memory;
  FaultEnv env(memory);
  EXPECT_TRUE(Work(env).has_value());
  return env.operation_count();
}

// Whatever is there under its final name is what an uninterrupted run writes.
void ExpectOnlyWholeFiles(const MemEnv& env, const MemEnv::Snapshot& finished, bool temporaries) {
  for (const auto& [path, content] : Published(env)) {
    if (path.find("/.tmp-") != std::string::npos) {
      EXPECT_TRUE(temporaries) << path;
      continue;
    }
    ASSERT_TRUE(finished.contains(path)) << path;
    EXPECT_TRUE(finished.at(path) == content) << path << " is not whole";
  }
}

TEST(StoreFaults, AnErrorAtAnyOperationLeavesWholeFilesAndNoTemporary) {
  const MemEnv::Snapshot finished = Finished();
  const uint64_t operation_count = OperationCount();
  ASSERT_GT(operation_count, 50u);
  for (const int error : {EIO, ENOSPC}) {
    for (uint64_t n = 1; n <= operation_count; ++n) {
      SCOPED_TRACE(n);
      MemEnv memory;
      FaultEnv env(memory);
      env.Add(Fault{.action = FaultAction::kError, .first = n, .error = error});
      const Result<void> worked = Work(env);
      ExpectOnlyWholeFiles(memory, finished, false);
      if (!worked) {
        EXPECT_FALSE(worked.error().file().empty()) << worked.error().ToString();
        EXPECT_NE(worked.error().exit_code(), 2) << worked.error().ToString();
      }
      env.ClearFaults();
      const Result<void> again = Work(env);
      ASSERT_TRUE(again.has_value()) << again.error().ToString();
      EXPECT_TRUE(Published(memory) == finished);
    }
  }
}

TEST(StoreFaults, APowerCutAtAnyOperationLeavesWholeFilesAndTheWorkCanBeFinished) {
  const MemEnv::Snapshot finished = Finished();
  const uint64_t operation_count = OperationCount();
  for (const CrashMode mode : {CrashMode::kDropUnsynced, CrashMode::kKeepUnsynced}) {
    for (uint64_t n = 1; n <= operation_count; ++n) {
      SCOPED_TRACE(n);
      MemEnv memory;
      FaultEnv env(memory);
      env.Add(Fault{.action = FaultAction::kCrash, .first = n, .bytes = 100});
      const Result<void> worked = Work(env);
      memory.Crash(mode);
      env.Restart();
      ExpectOnlyWholeFiles(memory, finished, true);
      if (worked) {
        EXPECT_TRUE(Published(memory) == finished);
      }
      const Result<void> again = Work(env);
      ASSERT_TRUE(again.has_value()) << again.error().ToString();
      // What building again did not clean, because it found the layer finished, gc does.
      ASSERT_TRUE(Store::CollectGarbage(env, "/store", "", false).has_value());
      EXPECT_TRUE(Published(memory) == finished);
      WorkerPool pool(1);
      EXPECT_TRUE(OpenOnly(env, "/store")->Verify(pool, nullptr, {})->findings.empty());
    }
  }
}

TEST(StoreFaults, APowerCutAtAnyOperationOfGcLosesNoOtherGeneration) {
  const auto prepare = [](MemEnv& memory) {
    const std::string doomed = BuildSampleStore(memory, "/store")->directory();
    EXPECT_TRUE(BuildSampleStore(memory, "/store", SampleManifest("other")).has_value());
    memory.Crash(CrashMode::kKeepUnsynced);
    return doomed.substr(doomed.rfind('/') + 1);
  };
  MemEnv counted;
  const std::string name = prepare(counted);
  FaultEnv counter(counted);
  ASSERT_TRUE(Store::CollectGarbage(counter, "/store", name, false).has_value());
  for (const CrashMode mode : {CrashMode::kDropUnsynced, CrashMode::kKeepUnsynced}) {
    for (uint64_t n = 1; n <= counter.operation_count(); ++n) {
      SCOPED_TRACE(n);
      MemEnv memory;
      prepare(memory);
      FaultEnv env(memory);
      env.Add(Fault{.action = FaultAction::kCrash, .first = n});
      (void)Store::CollectGarbage(env, "/store", name, false);
      memory.Crash(mode);
      env.Restart();
      const Store store = Store::Open(env, "/store").value();
      const std::string other = ToHex(GenerationOf(SampleManifest("other").identity));
      WorkerPool pool(1);
      EXPECT_TRUE(store.OpenGeneration(other)->Verify(pool, nullptr, {})->findings.empty());
      // What is left of the doomed one is whole, or no generation any more.
      if (const auto left = store.OpenGeneration(name)) {
        for (const Encoding encoding : kEncodings) {
          EXPECT_EQ(left->Probe(1, encoding).presence, Presence::kPresent);
        }
      } else {
        const auto again = Store::CollectGarbage(env, "/store", "", false);
        ASSERT_TRUE(again.has_value()) << again.error().ToString();
        EXPECT_EQ(memory.List("/store")->size(), 1u);
      }
    }
  }
}

TEST(StoreFaults, AFullDiskIsToldBeforeTheWork) {
  MemEnv env;
  const Generation generation =
      Store::OpenOrCreateGeneration(env, "/store", SampleManifest()).value();
  env.set_capacity_bytes(8192);
  const auto writer = generation.CreateLayer(0, Encoding::kBase);
  ASSERT_FALSE(writer.has_value());
  EXPECT_EQ(writer.error().exit_code(), 4);
  EXPECT_EQ(Published(env).size(), 1u);
}

TEST(StoreFaults, WhereLocksAreRefusedBuildersAreToldWhatToDo) {
  MemEnv memory;
  FaultEnv env(memory);
  env.Add(Fault{.action = FaultAction::kError,
                .count = Fault::kForever,
                .kind = OperationKind::kLock,
                .error = ENOLCK});
  const Generation generation =
      Store::OpenOrCreateGeneration(env, "/store", SampleManifest()).value();
  EXPECT_FALSE(generation.locked());
  const auto lock = generation.LockLayer(0, LockWait::kBlock);
  ASSERT_FALSE(lock.has_value());
  EXPECT_EQ(lock.error().exit_code(), 1);
  EXPECT_NE(lock.error().advice().find("--no-lock"), std::string::npos);
  memory.SetFile(JoinPath(generation.directory(), ".tmp-layer-0000.base-1-2"), {});
  EXPECT_EQ(Store::CollectGarbage(env, "/store", "", false)->kept_in_use.size(), 1u);
}

// Locks that this user may not take are no reason to do without.
TEST(StoreFaults, WhereALockFileIsClosedBuildersAreToldOfItsPermissions) {
  for (const int error : {EACCES, EPERM, EROFS}) {
    MemEnv memory;
    FaultEnv env(memory);
    env.Add(Fault{.action = FaultAction::kError,
                  .count = Fault::kForever,
                  .kind = OperationKind::kLock,
                  .error = error});
    const Generation generation =
        Store::OpenOrCreateGeneration(env, "/store", SampleManifest()).value();
    const auto lock = generation.LockLayer(0, LockWait::kBlock);
    ASSERT_FALSE(lock.has_value());
    EXPECT_EQ(lock.error().advice(), PermissionAdvice(error));
    EXPECT_NE(lock.error().what().find("layer-0000"), std::string::npos);
  }
}

}  // namespace
}  // namespace hotplane
