// A crash at every operation of an export: what carries a meta.json is whole, and running it again
// finishes it to the same files.
#include "engine/export_planes_cache.h"

#include "base/sweep_step.h"
#include "engine/planes_cache_testing.h"
#include "io/fault_env.h"

namespace hotplane {
namespace {

Result<PlanesCacheExportReport> Export(Env& env) {
  HP_ASSIGN(const Store store, Store::Open(env, kTestStore));
  HP_ASSIGN(const Generation generation, store.OpenGeneration());
  WorkerPool pool(1);
  PlanesCacheExportOptions options;
  options.output_directory = kTestCache;
  options.checkpoint_id = "a model of tests";
  return ExportPlanesCache(generation, pool, options);
}

MemEnv::Snapshot Below(const MemEnv& env, const std::string& folder) {
  MemEnv::Snapshot files;
  for (const auto& [path, content] : env.Files())
    if (path.starts_with(folder + "/") && path.find("/locks/") == std::string::npos &&
        !path.ends_with(kPlanesCacheLockName))
      files.emplace(path, content);
  return files;
}

TEST(ExportPlanesCache, WritesWhatTheProgramWouldHave) {
  for (const Encoding fp4 : {Encoding::kDeltaQuintal, Encoding::kDeltaNibble}) {
    MemEnv env;
    WriteCache(env, 2, fp4);
    const MemEnv::Snapshot cached = Below(env, kTestCache);
    for (const auto& [path, content] : cached) ASSERT_TRUE(env.Remove(path).has_value());
    const auto report = Export(env);
    ASSERT_TRUE(report.has_value()) << report.error().ToString();
    EXPECT_EQ(report->fp4, fp4);
    MemEnv::Snapshot exported = Below(env, kTestCache);
    std::erase_if(exported, [](const auto& file) { return file.first.ends_with(".sha256"); });
    EXPECT_EQ(exported, cached);
  }
}

TEST(ExportPlanesCache, ACrashAtEveryOperationLeavesWhatCanBeFinished) {
  MemEnv whole;
  WriteCache(whole, 2, Encoding::kDeltaQuintal);
  const MemEnv::Snapshot stored = Below(whole, kTestStore);
  for (const auto& [path, content] : Below(whole, kTestCache))
    ASSERT_TRUE(whole.Remove(path).has_value());
  FaultEnv counted(whole);
  ASSERT_TRUE(Export(counted).has_value());
  const MemEnv::Snapshot exported = Below(whole, kTestCache);
  for (uint64_t n = 1; n <= counted.operation_count(); n += kSweepStep) {
    SCOPED_TRACE(Text("crash at operation {} of {}", n, counted.operation_count()));
    MemEnv env;
    for (const auto& [path, content] : stored) env.SetFile(path, content);
    FaultEnv faulty(env);
    faulty.Add(Fault{.action = FaultAction::kCrash, .first = n, .bytes = 50});
    EXPECT_FALSE(Export(faulty).has_value());
    env.Crash(n % 2 == 0 ? CrashMode::kDropUnsynced : CrashMode::kKeepUnsynced);
    const MemEnv::Snapshot left = Below(env, kTestCache);
    for (const auto& [path, content] : left) {
      if (!path.ends_with(kPlanesCacheMetaName)) continue;
      const std::string folder = ParentPath(path);
      for (const auto& [name, right] : exported) {
        if (ParentPath(name) != folder) continue;
        EXPECT_TRUE(left.contains(name) && left.at(name) == right) << name;
      }
    }
    ASSERT_TRUE(Export(env).has_value());
    EXPECT_EQ(Below(env, kTestCache), exported);
    EXPECT_EQ(Below(env, kTestStore), stored);
    if (HasFailure()) return;
  }
}

// Over a whole cache of another model with the same name: at any time it is that one, this one, or
// none (no meta file), never some of both.
TEST(ExportPlanesCache, ACrashOverAnotherModelsCacheNeverMixesThem) {
  MemEnv whole;
  WriteCache(whole, 2, Encoding::kDeltaQuintal);
  const MemEnv::Snapshot stored = Below(whole, kTestStore);
  for (const auto& [path, content] : Below(whole, kTestCache))
    ASSERT_TRUE(whole.Remove(path).has_value());
  ASSERT_TRUE(Export(whole).has_value());
  const MemEnv::Snapshot exported = Below(whole, kTestCache);
  MemEnv::Snapshot other = exported;
  for (auto& [path, content] : other)
    if (path.ends_with(".bin")) content.back() ^= std::byte{1};
  const auto start = [&](MemEnv& env) {
    for (const auto& [path, content] : stored) env.SetFile(path, content);
    for (const auto& [path, content] : other) env.SetFile(path, content);
  };
  MemEnv undisturbed;
  start(undisturbed);
  FaultEnv counted(undisturbed);
  ASSERT_TRUE(Export(counted).has_value());
  for (uint64_t n = 1; n <= counted.operation_count(); n += kSweepStep) {
    SCOPED_TRACE(Text("crash at operation {} of {}", n, counted.operation_count()));
    MemEnv env;
    start(env);
    FaultEnv faulty(env);
    faulty.Add(Fault{.action = FaultAction::kCrash, .first = n, .bytes = 50});
    EXPECT_FALSE(Export(faulty).has_value());
    env.Crash(n % 2 == 0 ? CrashMode::kDropUnsynced : CrashMode::kKeepUnsynced);
    const MemEnv::Snapshot left = Below(env, kTestCache);
    for (const auto& [path, content] : left) {
      if (!path.ends_with(kPlanesCacheMetaName)) continue;
      bool is_this = true, is_other = true;
      for (const auto& [name, right] : exported) {
        if (ParentPath(name) != ParentPath(path)) continue;
        is_this = is_this && left.contains(name) && left.at(name) == right;
        is_other = is_other && left.contains(name) && left.at(name) == other.at(name);
      }
      EXPECT_TRUE(is_this || is_other) << path;
    }
    ASSERT_TRUE(Export(env).has_value());
    EXPECT_TRUE(Below(env, kTestCache) == exported);
    if (HasFailure()) return;
  }
}

TEST(ExportPlanesCache, LayersAndTiersOfAnotherExportAreRefused) {
  for (const char* name : {"layer7.planes13.bin", "layer0.fp9.bin"}) {
    MemEnv env;
    WriteCache(env, 1, Encoding::kDeltaQuintal);
    ASSERT_TRUE(Export(env).has_value());
    const MemEnv::Snapshot before = Below(env, kTestCache);
    const std::string folder = ParentPath(before.begin()->first);
    env.SetFile(JoinPath(folder, name), std::vector<std::byte>(8));
    const auto report = Export(env);
    ASSERT_FALSE(report.has_value()) << name;
    EXPECT_EQ(report.error().code(), StatusCode::kData);
    EXPECT_NE(report.error().ToString().find(name), std::string::npos);
  }
}

}  // namespace
}  // namespace hotplane
