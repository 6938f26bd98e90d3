// What MemEnv adds to an Env: power cuts, limits, counts and damage. The rest is in io_test.cc.
#include "io/mem_env.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "base/units.h"

namespace hotplane {
namespace {

using Content = std::vector<std::byte>;

template <typename T>
int ErrorOf(const Result<T>& result) {
  return result ? 0 : result.error().error_number();
}

std::unique_ptr<File> MustOpen(Env& env, const std::string& path, OpenMode mode) {
  Result<std::unique_ptr<File>> file = env.Open(path, mode);
  EXPECT_TRUE(file) << file.error().ToString();
  return file ? std::move(*file) : nullptr;
}

// Content of `bytes` bytes, all `value`.
Content Filled(size_t bytes, int value) { return Content(bytes, static_cast<std::byte>(value)); }

std::unique_ptr<File> Create(Env& env, const std::string& path, const Content& content) {
  std::unique_ptr<File> file = MustOpen(env, path, OpenMode::kCreate);
  EXPECT_TRUE(WriteFully(*file, 0, content));
  return file;
}

TEST(MemEnvCrash, UnsyncedContentIsLost) {
  MemEnv env;
  const std::unique_ptr<File> file = Create(env, "/f", Filled(10, 1));
  ASSERT_TRUE(file->Sync());
  ASSERT_TRUE(env.SyncDirectory("/"));
  ASSERT_TRUE(WriteFully(*file, 5, Filled(10, 2)));
  env.Crash(CrashMode::kDropUnsynced);
  EXPECT_EQ(env.Files(), (MemEnv::Snapshot{{"/f", Filled(10, 1)}}));
}

TEST(MemEnvCrash, AFileWhoseNameAloneWasSyncedIsEmpty) {
  MemEnv env;
  Create(env, "/f", Filled(10, 1));
  ASSERT_TRUE(env.SyncDirectory("/"));
  env.Crash(CrashMode::kDropUnsynced);
  EXPECT_EQ(env.Files(), (MemEnv::Snapshot{{"/f", {}}}));
}

TEST(MemEnvCrash, AFileWhoseNameWasNotSyncedIsGone) {
  MemEnv env;
  ASSERT_TRUE(Create(env, "/f", Filled(10, 1))->Sync());
  env.Crash(CrashMode::kDropUnsynced);
  EXPECT_TRUE(env.Files().empty());
}

TEST(MemEnvCrash, UnsyncedDirectoryChangesAreUndone) {
  MemEnv env;
  env.SetFile("/d/kept", Filled(1, 1));
  env.SetFile("/d/old", Filled(2, 2));
  ASSERT_TRUE(env.Remove("/d/kept"));
  ASSERT_TRUE(env.Rename("/d/old", "/d/new"));
  ASSERT_TRUE(env.CreateDirectory("/d/e"));
  env.Crash(CrashMode::kDropUnsynced);
  EXPECT_EQ(env.Files(), (MemEnv::Snapshot{{"/d/kept", Filled(1, 1)}, {"/d/old", Filled(2, 2)}}));
  EXPECT_EQ(env.Directories(), std::vector<std::string>{"/d"});
}

TEST(MemEnvCrash, SyncedDirectoryChangesStay) {
  MemEnv env;
  env.SetFile("/d/removed", Filled(1, 1));
  env.SetFile("/d/old", Filled(2, 2));
  ASSERT_TRUE(env.Remove("/d/removed"));
  ASSERT_TRUE(env.Rename("/d/old", "/d/new"));
  ASSERT_TRUE(env.CreateDirectory("/d/e"));
  ASSERT_TRUE(env.SyncDirectory("/d"));
  env.Crash(CrashMode::kDropUnsynced);
  EXPECT_EQ(env.Files(), (MemEnv::Snapshot{{"/d/new", Filled(2, 2)}}));
  EXPECT_EQ(env.Directories(), (std::vector<std::string>{"/d", "/d/e"}));
}

TEST(MemEnvCrash, SyncingAChildDoesNotSaveItsParent) {
  MemEnv env;
  ASSERT_TRUE(env.CreateDirectory("/d"));
  ASSERT_TRUE(Create(env, "/d/f", Filled(1, 1))->Sync());
  ASSERT_TRUE(env.SyncDirectory("/d"));
  env.Crash(CrashMode::kDropUnsynced);
  EXPECT_TRUE(env.Directories().empty());
}

TEST(MemEnvCrash, ReplacedContentComesBackWhenTheRenameWasNotSynced) {
  MemEnv env;
  env.SetFile("/f", Filled(3, 1));
  ASSERT_TRUE(Create(env, "/.tmp-f", Filled(4, 2))->Sync());
  ASSERT_TRUE(env.Rename("/.tmp-f", "/f"));
  env.Crash(CrashMode::kDropUnsynced);
  EXPECT_EQ(env.Files(), (MemEnv::Snapshot{{"/f", Filled(3, 1)}}));
}

TEST(MemEnvCrash, PublishedFilesAndCreatedDirectoriesSurvive) {
  MemEnv env;
  ASSERT_TRUE(CreateDirectories(env, "/a/b"));
  ASSERT_TRUE(PublishFile(env, "/a/b/f", Filled(100, 1)));
  env.Crash(CrashMode::kDropUnsynced);
  EXPECT_EQ(env.Files(), (MemEnv::Snapshot{{"/a/b/f", Filled(100, 1)}}));
}

TEST(MemEnvCrash, KeepingEverythingMakesItDurable) {
  MemEnv env;
  ASSERT_TRUE(env.CreateDirectory("/d"));
  Create(env, "/d/f", Filled(10, 1));
  env.Crash(CrashMode::kKeepUnsynced);
  EXPECT_EQ(env.Files(), (MemEnv::Snapshot{{"/d/f", Filled(10, 1)}}));
  env.Crash(CrashMode::kDropUnsynced);
  EXPECT_EQ(env.Files(), (MemEnv::Snapshot{{"/d/f", Filled(10, 1)}}));
}

TEST(MemEnvCrash, WhatWasHandedOutIsDead) {
  MemEnv env;
  env.SetFile("/f", Filled(10, 1));
  const std::unique_ptr<File> file = MustOpen(env, "/f", OpenMode::kRead);
  const std::unique_ptr<File> created = Create(env, "/g", Filled(1, 1));
  const Result<std::unique_ptr<Mapping>> mapping = file->Map(0, 10);
  ASSERT_TRUE(mapping);
  Result<std::unique_ptr<FileLock>> lock = env.Lock("/f", LockKind::kExclusive, LockWait::kTry);
  ASSERT_TRUE(lock && *lock != nullptr);
  env.Crash(CrashMode::kKeepUnsynced);

  Content buffer(10);
  EXPECT_EQ(file->ReadSome(0, buffer).error, EIO);
  EXPECT_EQ(created->WriteSome(0, buffer).error, EIO);
  EXPECT_EQ(ErrorOf(created->Sync()), EIO);
  EXPECT_EQ(ErrorOf(created->Allocate(5)), EIO);
  EXPECT_EQ(ErrorOf(file->Stat()), EIO);
  EXPECT_EQ(ErrorOf(file->Map(0, 1)), EIO);
  EXPECT_EQ(ErrorOf(file->CachedBytes(0, 0)), EIO);
  EXPECT_EQ(ErrorOf((*mapping)->Populate(0, 1)), EIO);

  const Result<std::unique_ptr<FileLock>> after =
      env.Lock("/f", LockKind::kExclusive, LockWait::kTry);
  ASSERT_TRUE(after);
  EXPECT_NE(*after, nullptr);
  lock->reset();  // must not release the lock of the next life
  EXPECT_EQ(*env.Lock("/f", LockKind::kShared, LockWait::kTry), nullptr);
  EXPECT_TRUE(MustOpen(env, "/f", OpenMode::kRead)->Stat());
}

TEST(MemEnvCrash, EndsTheWaitForALock) {
  MemEnv env;
  const Result<std::unique_ptr<FileLock>> held =
      env.Lock("/lock", LockKind::kExclusive, LockWait::kTry);
  int error = 0;
  std::thread waiter(
      [&] { error = ErrorOf(env.Lock("/lock", LockKind::kShared, LockWait::kBlock)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  env.Crash(CrashMode::kKeepUnsynced);
  waiter.join();
  // A waiter that starts only after the crash finds the lock free.
  EXPECT_TRUE(error == EIO || error == 0);
}

TEST(MemEnv, FullDiskTakesWhatFits) {
  MemEnv env;
  env.SetFile("/f", Filled(60, 1));
  env.set_capacity_bytes(100);
  EXPECT_EQ(*env.FreeBytes("/"), 40u);
  const std::unique_ptr<File> file = MustOpen(env, "/g", OpenMode::kCreate);
  EXPECT_EQ(ErrorOf(file->Allocate(41)), ENOSPC);
  EXPECT_EQ(file->Allocate(41).error().code(), StatusCode::kCapacity);
  EXPECT_EQ(file->Stat()->bytes, 0u);
  const IoCount count = file->WriteSome(0, Filled(50, 2));
  EXPECT_EQ(count.bytes, 40u);
  EXPECT_EQ(count.error, 0);
  EXPECT_EQ(file->WriteSome(40, Filled(1, 2)).error, ENOSPC);
  EXPECT_EQ(file->WriteSome(4000, Filled(1, 2)).error, ENOSPC);
  EXPECT_EQ(file->WriteSome(0, Filled(40, 3)).bytes, 40u) << "what is there can be overwritten";
  EXPECT_EQ(*env.FreeBytes("/"), 0u);
  ASSERT_TRUE(env.Remove("/f"));
  EXPECT_EQ(*env.FreeBytes("/"), 60u);
}

TEST(MemEnv, FailedPublishOnAFullDiskLeavesNothing) {
  MemEnv env;
  env.SetFile("/f", Filled(60, 1));
  env.set_capacity_bytes(100);
  const Result<void> published = PublishFile(env, "/f", Filled(50, 2));
  ASSERT_FALSE(published);
  EXPECT_EQ(published.error().code(), StatusCode::kCapacity);
  EXPECT_EQ(published.error().offset(), 40u);
  EXPECT_EQ(env.Files(), (MemEnv::Snapshot{{"/f", Filled(60, 1)}}));
}

TEST(MemEnv, ReadOnlyRefusesEveryChange) {
  MemEnv env;
  env.SetFile("/d/f", Filled(10, 1));
  const std::unique_ptr<File> open = Create(env, "/g", {});
  const MemEnv::Snapshot before = env.Files();
  env.set_read_only(true);
  EXPECT_EQ(ErrorOf(env.Open("/h", OpenMode::kCreate)), EROFS);
  EXPECT_EQ(open->WriteSome(0, Filled(1, 1)).error, EROFS);
  EXPECT_EQ(ErrorOf(open->Allocate(1)), EROFS);
  EXPECT_EQ(ErrorOf(env.CreateDirectory("/e")), EROFS);
  EXPECT_EQ(ErrorOf(env.Rename("/d/f", "/d/h")), EROFS);
  EXPECT_EQ(ErrorOf(env.Remove("/d/f")), EROFS);
  EXPECT_EQ(ErrorOf(env.RemoveDirectory("/d")), EROFS);
  EXPECT_EQ(ErrorOf(env.Lock("/new", LockKind::kShared, LockWait::kTry)), EROFS);
  EXPECT_TRUE(*env.Lock("/d/f", LockKind::kShared, LockWait::kTry));
  EXPECT_TRUE(ReadWholeFile(env, "/d/f", 10));
  EXPECT_EQ(env.Files(), before);
}

TEST(MemEnv, DirectReadsMustBeAlignedAndCanBeRefused) {
  MemEnv env;
  env.SetFile("/f", Filled(2 * kPageBytes, 1));
  Content memory(3 * kPageBytes);
  const auto address = RoundUp(reinterpret_cast<uintptr_t>(memory.data()), kPageBytes);
  const std::span<std::byte> aligned(reinterpret_cast<std::byte*>(address), 2 * kPageBytes);
  const std::unique_ptr<File> file = MustOpen(env, "/f", OpenMode::kReadDirect);
  EXPECT_EQ(file->ReadSome(0, aligned).bytes, 2 * kPageBytes);
  EXPECT_EQ(file->ReadSome(512, aligned).error, EINVAL);
  EXPECT_EQ(file->ReadSome(0, aligned.first(100)).error, EINVAL);
  EXPECT_EQ(file->ReadSome(0, aligned.subspan(8, kPageBytes)).error, EINVAL);
  EXPECT_EQ(*file->CachedBytes(0, 0), 0u) << "direct reads leave nothing in the page cache";
  env.set_direct_refused(true);
  EXPECT_EQ(ErrorOf(env.Open("/f", OpenMode::kReadDirect)), EINVAL);
  EXPECT_TRUE(env.Open("/f", OpenMode::kRead));
}

TEST(MemEnv, KnowsWhichPagesAreCached) {
  MemEnv env;
  env.SetFile("/f", Filled(4 * kPageBytes + 10, 1));
  const std::unique_ptr<File> file = MustOpen(env, "/f", OpenMode::kRead);
  EXPECT_EQ(*file->CachedBytes(0, 0), 0u);
  Content buffer(2);
  ASSERT_TRUE(ReadFully(*file, kPageBytes - 1, buffer));
  EXPECT_EQ(*file->CachedBytes(0, 0), 2 * kPageBytes);
  EXPECT_EQ(*file->CachedBytes(kPageBytes + 1, 2 * kPageBytes), kPageBytes - 1);
  file->WillNeed(4 * kPageBytes, 0);
  EXPECT_EQ(*file->CachedBytes(0, 0), 2 * kPageBytes + 10);
  file->DropCache(0, kPageBytes);
  EXPECT_EQ(*file->CachedBytes(0, 0), kPageBytes + 10);
  env.Crash(CrashMode::kKeepUnsynced);
  EXPECT_EQ(*MustOpen(env, "/f", OpenMode::kRead)->CachedBytes(0, 0), 0u);
}

TEST(MemEnv, CountsOpensAndBytes) {
  MemEnv env;
  env.SetFile("/d/f", Filled(100, 1));
  const std::unique_ptr<File> file = MustOpen(env, "/d/../d/./f", OpenMode::kRead);
  Content buffer(40);
  ASSERT_TRUE(ReadFully(*file, 0, buffer));
  ASSERT_TRUE((*file->Map(0, 100))->Populate(10, 20));
  EXPECT_FALSE(env.Open("/missing", OpenMode::kRead));
  EXPECT_EQ(env.open_count("/d/f"), 1u);
  EXPECT_EQ(env.read_bytes("d/f"), 60u);
  EXPECT_EQ(env.open_count("/missing"), 0u);
  EXPECT_EQ(env.read_bytes("/missing"), 0u);
  env.ResetCounts();
  EXPECT_EQ(env.open_count("/d/f"), 0u);
  EXPECT_EQ(env.read_bytes("/d/f"), 0u);
}

TEST(MemEnv, DamageIsSeenByOpenFilesAndSurvivesCrashes) {
  MemEnv env;
  env.SetFile("/f", Filled(10, 1));
  const std::unique_ptr<File> file = MustOpen(env, "/f", OpenMode::kRead);
  env.CorruptByte("/f", 3, std::byte{0x80});
  Content expected = Filled(10, 1);
  expected[3] = std::byte{0x81};
  Content buffer(10);
  ASSERT_TRUE(ReadFully(*file, 0, buffer));
  EXPECT_EQ(buffer, expected);
  env.Crash(CrashMode::kDropUnsynced);
  EXPECT_EQ(env.Files()["/f"], expected);
  env.Truncate("/f", 4);
  env.Crash(CrashMode::kDropUnsynced);
  EXPECT_EQ(env.Files()["/f"].size(), 4u);
}

TEST(MemEnv, WhatWasHandedOutMayOutliveIt) {
  std::unique_ptr<File> file;
  Result<std::unique_ptr<FileLock>> lock;
  {
    MemEnv env;
    file = Create(env, "/f", Filled(10, 1));
    lock = env.Lock("/f", LockKind::kShared, LockWait::kTry);
  }
  EXPECT_EQ(file->Stat()->bytes, 10u);
  lock->reset();
}

}  // namespace
}  // namespace hotplane
