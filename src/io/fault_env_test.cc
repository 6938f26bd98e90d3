#include "io/fault_env.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/units.h"
#include "io/mem_env.h"

namespace hotplane {
namespace {

using Content = std::vector<std::byte>;

Content Pattern(size_t bytes, unsigned seed = 1) {
  Content content(bytes);
  for (size_t i = 0; i < bytes; ++i) content[i] = static_cast<std::byte>(i * 37 + seed);
  return content;
}

template <typename T>
int ErrorOf(const Result<T>& result) {
  return result ? 0 : result.error().error_number();
}

class FaultEnvTest : public ::testing::Test {
 protected:
  FaultEnvTest() { memory_.SetFile("/d/f", Pattern(kFileBytes)); }

  std::unique_ptr<File> MustOpen(OpenMode mode, const std::string& path = "/d/f") {
    Result<std::unique_ptr<File>> file = env_.Open(path, mode);
    EXPECT_TRUE(file) << file.error().ToString();
    return file ? std::move(*file) : nullptr;
  }

  static constexpr size_t kFileBytes = 4 * kPageBytes;
  MemEnv memory_;
  FaultEnv env_{memory_};
};

TEST_F(FaultEnvTest, NumbersAndLogsEveryOperation) {
  const std::unique_ptr<File> file = MustOpen(OpenMode::kRead);
  Content buffer(100);
  (void)file->ReadSome(kFileBytes - 30, buffer);
  file->WillNeed(5, 6);
  EXPECT_FALSE(env_.Open("/d/missing", OpenMode::kReadDirect));
  ASSERT_TRUE(env_.Rename("/d/f", "/d/g"));
  EXPECT_FALSE(file->Map(1, 2 * kFileBytes));
  ASSERT_TRUE((*file->Map(100, 200))->Populate(10, 20));

  EXPECT_EQ(env_.operation_count(), 7u);
  const std::vector<Operation> log = env_.Log();
  ASSERT_EQ(log.size(), 8u);
  const OperationKind kinds[] = {OperationKind::kOpen,     OperationKind::kRead,
                                 OperationKind::kWillNeed, OperationKind::kOpen,
                                 OperationKind::kRename,   OperationKind::kMap,
                                 OperationKind::kMap,      OperationKind::kPopulate};
  const uint64_t numbers[] = {1, 2, 0, 3, 4, 5, 6, 7};
  for (size_t i = 0; i < log.size(); ++i) {
    EXPECT_EQ(log[i].kind, kinds[i]) << i;
    EXPECT_EQ(log[i].number, numbers[i]) << i;
  }
  EXPECT_EQ(log[1].path, "/d/f");
  EXPECT_EQ(log[1].offset, kFileBytes - 30);
  EXPECT_EQ(log[1].bytes, 100u);
  EXPECT_EQ(log[1].done_bytes, 30u);
  EXPECT_EQ(log[3].error, ENOENT);
  EXPECT_TRUE(log[3].bypassed_cache);
  EXPECT_EQ(log[4].to, "/d/g");
  EXPECT_EQ(log[5].error, EBADMSG);
  EXPECT_EQ(log[7].offset, 110u);
  EXPECT_EQ(log[7].bytes, 20u);

  env_.ClearLog();
  EXPECT_TRUE(env_.Log().empty());
  ASSERT_TRUE(env_.Stat("/d"));
  EXPECT_EQ(env_.Log().at(0).number, 8u);
}

// Performs every operation once, in a fixed order, and tells which failed by number.
std::set<uint64_t> PerformAll(FaultEnv& env) {
  std::vector<bool> results;
  const auto note = [&results](bool succeeded) { results.push_back(succeeded); };
  Content buffer(10);
  const auto created = env.Open("/d/new", OpenMode::kCreate);
  note(created.has_value());
  if (created) {
    note((*created)->WriteSome(0, buffer).error == 0);
    note((*created)->Allocate(100).has_value());
    note((*created)->Sync().has_value());
  }
  const auto file = env.Open("/d/f", OpenMode::kRead);
  note(file.has_value());
  if (file) {
    note((*file)->ReadSome(0, buffer).error == 0);
    note((*file)->Stat().has_value());
    note((*file)->CachedBytes(0, 0).has_value());
    const auto mapping = (*file)->Map(0, 10);
    note(mapping.has_value());
    if (mapping) note((*mapping)->Populate(0, 10).has_value());
  }
  note(env.Stat("/d/f").has_value());
  note(env.List("/d").has_value());
  note(env.CreateDirectory("/d/e").has_value());
  note(env.SyncDirectory("/d").has_value());
  note(env.FreeBytes("/d").has_value());
  note(env.Lock("/d/lock", LockKind::kShared, LockWait::kTry).has_value());
  note(env.Rename("/d/f", "/d/g").has_value());
  note(env.Remove("/d/g").has_value());
  note(env.RemoveDirectory("/d/e").has_value());
  std::set<uint64_t> failed;
  for (size_t i = 0; i < results.size(); ++i)
    if (!results[i]) failed.insert(i + 1);
  return failed;
}

constexpr uint64_t kAllOperationsCount = 19;

TEST_F(FaultEnvTest, EveryOperationCanFailOnItsOwn) {
  EXPECT_TRUE(PerformAll(env_).empty());
  EXPECT_EQ(env_.operation_count(), kAllOperationsCount);
  std::set<OperationKind> kinds;
  for (const Operation& operation : env_.Log()) kinds.insert(operation.kind);
  EXPECT_EQ(kinds.size(), kAllOperationsCount) << "each operation is of another kind";

  for (uint64_t n = 1; n <= kAllOperationsCount; ++n) {
    for (const int error : {EIO, ENOSPC, EACCES}) {
      MemEnv memory;
      memory.SetFile("/d/f", Pattern(kFileBytes));
      FaultEnv env(memory);
      env.Add({.action = FaultAction::kError, .first = n, .error = error});
      EXPECT_TRUE(PerformAll(env).contains(n));
      EXPECT_EQ(env.Log().at(n - 1).error, error);
    }
  }
}

TEST_F(FaultEnvTest, ErrorsComeWithTheRightCodeAndFile) {
  env_.Add({.action = FaultAction::kError, .kind = OperationKind::kStat, .error = ENOSPC});
  const Result<FileStat> stat = env_.Stat("/d/f");
  ASSERT_FALSE(stat);
  EXPECT_EQ(stat.error().code(), StatusCode::kCapacity);
  EXPECT_EQ(stat.error().file(), "/d/f");
  EXPECT_TRUE(env_.Stat("/d/f")) << "one fault, one failure";
}

TEST_F(FaultEnvTest, FiltersByKindPathAndCount) {
  memory_.SetFile("/d/other", Pattern(10));
  env_.Add({.action = FaultAction::kError,
            .first = 2,
            .count = 2,
            .kind = OperationKind::kRead,
            .path_contains = "oth"});
  const std::unique_ptr<File> file = MustOpen(OpenMode::kRead);
  const std::unique_ptr<File> other = MustOpen(OpenMode::kRead, "/d/other");
  Content buffer(1);
  std::vector<int> errors;
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(file->ReadSome(0, buffer).error, 0);
    EXPECT_TRUE(other->Stat());
    errors.push_back(other->ReadSome(0, buffer).error);
  }
  EXPECT_EQ(errors, (std::vector<int>{0, EIO, EIO, 0, 0}));
}

TEST_F(FaultEnvTest, FaultsCanLastUntilTheyAreCleared) {
  env_.Add({.action = FaultAction::kError, .first = 2, .count = Fault::kForever, .error = EACCES});
  EXPECT_TRUE(env_.Stat("/d"));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ErrorOf(env_.Stat("/d")), EACCES);
  EXPECT_FALSE(env_.crashed());
  env_.ClearFaults();
  EXPECT_TRUE(env_.Stat("/d"));
}

TEST_F(FaultEnvTest, ShortReadsAreLoopedOver) {
  env_.Add({.action = FaultAction::kShort, .count = 5, .bytes = 7});
  env_.Add({.action = FaultAction::kShort, .count = Fault::kForever});
  const std::unique_ptr<File> file = MustOpen(OpenMode::kRead);
  Content content(kFileBytes);
  ASSERT_TRUE(ReadFully(*file, 0, content));
  EXPECT_EQ(content, Pattern(kFileBytes));
  const std::vector<Operation> log = env_.Log();
  for (size_t i = 1; i <= 5; ++i) EXPECT_EQ(log.at(i).done_bytes, 7u);
  EXPECT_EQ(log.at(6).done_bytes, (kFileBytes - 35) / 2);
  EXPECT_EQ(log.back().done_bytes, 1u);
}

TEST_F(FaultEnvTest, ShortDirectReadsStayAligned) {
  env_.Add({.action = FaultAction::kShort, .bytes = kPageBytes + 100});
  env_.Add({.action = FaultAction::kShort, .bytes = 1});
  Content memory(kFileBytes + kPageBytes);
  const auto address = RoundUp(reinterpret_cast<uintptr_t>(memory.data()), kPageBytes);
  const std::span<std::byte> buffer(reinterpret_cast<std::byte*>(address), kFileBytes);
  ASSERT_TRUE(ReadFully(*MustOpen(OpenMode::kReadDirect), 0, buffer));
  EXPECT_EQ(Content(buffer.begin(), buffer.end()), Pattern(kFileBytes));
  EXPECT_EQ(env_.Log().at(1).done_bytes, kPageBytes);
  EXPECT_TRUE(env_.Log().at(1).bypassed_cache);
}

TEST_F(FaultEnvTest, ShortWritesAreLoopedOver) {
  env_.Add({.action = FaultAction::kShort, .count = 4, .kind = OperationKind::kWrite, .bytes = 3});
  ASSERT_TRUE(PublishFile(env_, "/d/g", Pattern(100)));
  EXPECT_EQ(memory_.Files().at("/d/g"), Pattern(100));
  EXPECT_EQ(std::ranges::count(env_.Log(), OperationKind::kWrite, &Operation::kind), 5);
}

TEST_F(FaultEnvTest, InterruptedCallsAreRepeated) {
  env_.Add({.action = FaultAction::kError, .count = 3, .error = EINTR});
  ASSERT_TRUE(PublishFile(env_, "/d/g", Pattern(100)));
  env_.Add({.action = FaultAction::kError, .count = 3, .error = EINTR});
  const Result<Content> content = ReadWholeFile(env_, "/d/g", 1000);
  ASSERT_TRUE(content);
  EXPECT_EQ(*content, Pattern(100));
  EXPECT_EQ(std::ranges::count(env_.Log(), EINTR, &Operation::error), 6);
}

TEST_F(FaultEnvTest, AnEarlyEndIsData) {
  env_.Add({.action = FaultAction::kShort, .kind = OperationKind::kRead, .bytes = 60});
  env_.Add({.action = FaultAction::kEndOfFile, .count = Fault::kForever});
  const Result<Content> content = ReadWholeFile(env_, "/d/f", kMiB);
  ASSERT_FALSE(content);
  EXPECT_EQ(content.error().code(), StatusCode::kData);
  EXPECT_EQ(content.error().found(), "60 bytes");
}

TEST_F(FaultEnvTest, FailedSyncLosesTheContent) {
  env_.Add({.action = FaultAction::kError, .kind = OperationKind::kSync});
  const std::unique_ptr<File> file = MustOpen(OpenMode::kCreate, "/d/g");
  ASSERT_TRUE(WriteFully(*file, 0, Pattern(10)));
  EXPECT_EQ(ErrorOf(file->Sync()), EIO);
  ASSERT_TRUE(env_.SyncDirectory("/d"));
  memory_.Crash(CrashMode::kDropUnsynced);
  EXPECT_EQ(memory_.Files().at("/d/g"), Content());
}

TEST_F(FaultEnvTest, ACrashLastsUntilTheRestartAndKillsWhatWasOpen) {
  const std::unique_ptr<File> file = MustOpen(OpenMode::kRead);
  const Result<std::unique_ptr<Mapping>> mapping = file->Map(0, 10);
  env_.Add({.action = FaultAction::kCrash, .first = 2});
  EXPECT_TRUE(env_.Stat("/d"));
  EXPECT_EQ(ErrorOf(env_.Remove("/d/f")), EIO);
  EXPECT_TRUE(env_.crashed());
  EXPECT_EQ(ErrorOf(env_.Stat("/d")), EIO);
  EXPECT_EQ(ErrorOf(file->Stat()), EIO);
  EXPECT_EQ(memory_.Files().size(), 1u) << "the crashing operation did nothing";

  env_.Restart();
  EXPECT_FALSE(env_.crashed());
  Content buffer(1);
  EXPECT_EQ(file->ReadSome(0, buffer).error, EIO);
  EXPECT_EQ(ErrorOf((*mapping)->Populate(0, 1)), EIO);
  EXPECT_TRUE(MustOpen(OpenMode::kRead)->Stat());
}

TEST_F(FaultEnvTest, ACrashCanTearItsWrite) {
  env_.Add({.action = FaultAction::kCrash, .kind = OperationKind::kWrite, .bytes = 4});
  const std::unique_ptr<File> file = MustOpen(OpenMode::kCreate, "/d/g");
  const IoCount count = file->WriteSome(0, Pattern(10));
  EXPECT_EQ(count.error, EIO);
  EXPECT_EQ(memory_.Files().at("/d/g"), Pattern(4));
  EXPECT_EQ(env_.Log().back().done_bytes, 4u);
}

TEST_F(FaultEnvTest, BitsFlipOnTheWayToTheReaderOnly) {
  env_.Add(BitFlip{.path_contains = "/f", .offset = 5, .flipped_bits = std::byte{0x10}});
  Content expected = Pattern(kFileBytes);
  expected[5] ^= std::byte{0x10};
  EXPECT_EQ(*ReadWholeFile(env_, "/d/f", kMiB), expected);
  EXPECT_EQ(memory_.Files().at("/d/f"), Pattern(kFileBytes));

  const std::unique_ptr<File> file = MustOpen(OpenMode::kRead);
  Content buffer(4);
  ASSERT_TRUE(ReadFully(*file, 2, buffer));
  EXPECT_EQ(buffer[3], expected[5]);
  ASSERT_TRUE(ReadFully(*file, 6, buffer));
  EXPECT_EQ(buffer[0], expected[6]);
  const Result<std::unique_ptr<Mapping>> mapping = file->Map(4, 10);
  ASSERT_TRUE(mapping);
  EXPECT_EQ((*mapping)->bytes()[1], expected[5]);
  EXPECT_TRUE((*mapping)->Populate(0, 10));
  env_.ClearFaults();
  EXPECT_EQ(*ReadWholeFile(env_, "/d/f", kMiB), Pattern(kFileBytes));
}

TEST_F(FaultEnvTest, BitFlipsCanBeCountedAndSpareDirectReads) {
  env_.Add(BitFlip{.offset = 5, .count = 1});
  env_.Add(BitFlip{.offset = 6, .spare_direct = true});
  const Content first = *ReadWholeFile(env_, "/d/f", kMiB);
  EXPECT_NE(first[5], Pattern(10)[5]);
  EXPECT_NE(first[6], Pattern(10)[6]);
  const Content second = *ReadWholeFile(env_, "/d/f", kMiB);
  EXPECT_EQ(second[5], Pattern(10)[5]);
  EXPECT_NE(second[6], Pattern(10)[6]);
  Content memory(kFileBytes + kPageBytes);
  const auto address = RoundUp(reinterpret_cast<uintptr_t>(memory.data()), kPageBytes);
  const std::span<std::byte> buffer(reinterpret_cast<std::byte*>(address), kFileBytes);
  ASSERT_TRUE(ReadFully(*MustOpen(OpenMode::kReadDirect), 0, buffer));
  EXPECT_EQ(Content(buffer.begin(), buffer.end()), Pattern(kFileBytes));
}

// Operations of one publish; a test below fails if that changes.
constexpr uint64_t kPublishOperationCount = 5;

TEST(Publish, EveryErrorLeavesTheOldOrTheNewAndNoTemporary) {
  for (uint64_t n = 1; n <= kPublishOperationCount; ++n) {
    MemEnv memory;
    memory.SetFile("/d/f", Pattern(50, 1));
    FaultEnv env(memory);
    env.Add({.action = FaultAction::kError, .first = n, .error = EIO});
    EXPECT_EQ(ErrorOf(PublishFile(env, "/d/f", Pattern(80, 2))), EIO) << n;
    const MemEnv::Snapshot files = memory.Files();
    EXPECT_EQ(files.size(), 1u) << n;
    const bool renamed = n == kPublishOperationCount;
    EXPECT_EQ(files.at("/d/f"), renamed ? Pattern(80, 2) : Pattern(50, 1)) << n;
  }
}

TEST(Publish, EveryCrashLeavesTheOldOrTheNewWhole) {
  for (const CrashMode mode : {CrashMode::kDropUnsynced, CrashMode::kKeepUnsynced}) {
    for (uint64_t n = 1; n <= kPublishOperationCount; ++n) {
      for (const uint64_t torn_bytes : {0, 33}) {
        MemEnv memory;
        memory.SetFile("/d/f", Pattern(50, 1));
        FaultEnv env(memory);
        env.Add({.action = FaultAction::kCrash, .first = n, .bytes = torn_bytes});
        EXPECT_FALSE(PublishFile(env, "/d/f", Pattern(80, 2)));
        EXPECT_TRUE(env.crashed());
        memory.Crash(mode);
        env.Restart();
        for (const auto& [path, content] : memory.Files()) {
          if (path.starts_with("/d/.tmp-f-")) continue;
          EXPECT_EQ(path, "/d/f");
          EXPECT_TRUE(content == Pattern(50, 1) || content == Pattern(80, 2));
        }
        EXPECT_TRUE(memory.Files().contains("/d/f"));
        ASSERT_TRUE(PublishFile(env, "/d/f", Pattern(80, 2)));
        memory.Crash(CrashMode::kDropUnsynced);
        EXPECT_EQ(memory.Files().at("/d/f"), Pattern(80, 2));
      }
    }
  }
}

TEST(Publish, AProducerThatIgnoresAFailedPiecePublishesNothing) {
  MemEnv memory;
  FaultEnv env(memory);
  env.Add({.action = FaultAction::kError, .kind = OperationKind::kWrite, .error = ENOSPC});
  const Result<void> published = PublishFileInPieces(env, "/f", [](const FileSink& sink) {
    for (int i = 0; i < 3; ++i) (void)sink(Pattern(10));
    return Result<void>();
  });
  EXPECT_EQ(ErrorOf(published), ENOSPC);
  EXPECT_TRUE(memory.Files().empty());
}

TEST(Publish, TakesTheOperationsThatTheSweepsCover) {
  MemEnv memory;
  FaultEnv env(memory);
  ASSERT_TRUE(PublishFile(env, "/f", Pattern(80)));
  EXPECT_EQ(env.operation_count(), kPublishOperationCount);
}

}  // namespace
}  // namespace hotplane
