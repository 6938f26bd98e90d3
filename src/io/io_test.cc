// What every Env promises, run over each of them; and the functions of env.h that use one.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <stdlib.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "base/format_text.h"
#include "base/units.h"
#include "io/env.h"
#include "io/fault_env.h"
#include "io/mem_env.h"
#include "io/test_directory.h"

namespace hotplane {
namespace {

using Content = std::vector<std::byte>;

Content Pattern(size_t bytes, unsigned seed = 1) {
  Content content(bytes);
  for (size_t i = 0; i < bytes; ++i) content[i] = static_cast<std::byte>(i * 131 + seed + i / 251);
  return content;
}

enum class Backend { kPosix, kMemory, kFaultFree };

std::string BackendName(Backend backend) {
  switch (backend) {
    case Backend::kPosix: return "Posix";
    case Backend::kMemory: return "Memory";
    case Backend::kFaultFree: return "FaultFree";
  }
  return "Unknown";
}

class EnvTest : public ::testing::TestWithParam<Backend> {
 protected:
  EnvTest() : faulty_(memory_) {
    if (GetParam() == Backend::kPosix) return;
    root_ = "/root";
    EXPECT_TRUE(env().CreateDirectory(root_));
  }

  Env& env() {
    switch (GetParam()) {
      case Backend::kPosix: return PosixEnv();
      case Backend::kMemory: return memory_;
      case Backend::kFaultFree: break;
    }
    return faulty_;
  }
  std::string At(const std::string& name) const { return JoinPath(root_, name); }

  std::unique_ptr<File> MustOpen(const std::string& name, OpenMode mode) {
    Result<std::unique_ptr<File>> file = env().Open(At(name), mode);
    EXPECT_TRUE(file) << file.error().ToString();
    return file ? std::move(*file) : nullptr;
  }
  void Write(const std::string& name, const Content& content) {
    const std::unique_ptr<File> file = MustOpen(name, OpenMode::kCreate);
    ASSERT_NE(file, nullptr);
    ASSERT_TRUE(WriteFully(*file, 0, content));
  }
  void Cut(const std::string& name, uint64_t bytes) {
    if (GetParam() == Backend::kPosix)
      std::filesystem::resize_file(At(name), bytes);
    else
      memory_.Truncate(At(name), bytes);
  }
  Content Read(const std::string& name) {
    Result<Content> content = ReadWholeFile(env(), At(name), kGiB);
    EXPECT_TRUE(content) << content.error().ToString();
    return content ? *content : Content();
  }
  std::vector<std::string> Names(const std::string& directory) {
    Result<std::vector<std::string>> names = env().List(directory);
    EXPECT_TRUE(names) << names.error().ToString();
    return names ? *names : std::vector<std::string>();
  }

 private:
  TestDirectory directory_;
  MemEnv memory_;
  FaultEnv faulty_;
  std::string root_ = directory_.path();
};

INSTANTIATE_TEST_SUITE_P(Backends, EnvTest,
                         ::testing::Values(Backend::kPosix, Backend::kMemory, Backend::kFaultFree),
                         [](const auto& instance) { return BackendName(instance.param); });

template <typename T>
int ErrorOf(const Result<T>& result) {
  return result ? 0 : result.error().error_number();
}

TEST_P(EnvTest, ReadsWhatWasWritten) {
  const Content content = Pattern(3 * kPageBytes + 17);
  Write("f", content);
  EXPECT_EQ(Read("f"), content);

  const std::unique_ptr<File> file = MustOpen("f", OpenMode::kRead);
  EXPECT_EQ(file->path(), At("f"));
  Content part(100);
  ASSERT_TRUE(ReadFully(*file, kPageBytes - 50, part));
  EXPECT_TRUE(std::equal(part.begin(), part.end(), content.begin() + kPageBytes - 50));
}

TEST_P(EnvTest, EndOfFileIsZeroBytesWithoutAnError) {
  Write("f", Pattern(10));
  const std::unique_ptr<File> file = MustOpen("f", OpenMode::kRead);
  Content buffer(20);
  const IoCount tail = file->ReadSome(4, buffer);
  EXPECT_EQ(tail.bytes, 6u);
  EXPECT_EQ(tail.error, 0);
  for (const uint64_t offset : {10, 11, 100000}) {
    const IoCount beyond = file->ReadSome(offset, buffer);
    EXPECT_EQ(beyond.bytes, 0u) << offset;
    EXPECT_EQ(beyond.error, 0) << offset;
  }
}

TEST_P(EnvTest, OverwritesInPlaceAndFillsHolesWithZeros) {
  const std::unique_ptr<File> file = MustOpen("f", OpenMode::kCreate);
  ASSERT_TRUE(WriteFully(*file, 0, Pattern(100)));
  ASSERT_TRUE(WriteFully(*file, 10, Pattern(5, 77)));
  ASSERT_TRUE(WriteFully(*file, 200, Pattern(1, 9)));
  ASSERT_TRUE(file->Sync());
  Content expected = Pattern(100);
  const Content middle = Pattern(5, 77);
  std::copy(middle.begin(), middle.end(), expected.begin() + 10);
  expected.resize(201);
  expected[200] = Pattern(1, 9)[0];
  EXPECT_EQ(Read("f"), expected);
}

TEST_P(EnvTest, CreateIsExclusive) {
  Write("f", Pattern(10));
  EXPECT_EQ(ErrorOf(env().Open(At("f"), OpenMode::kCreate)), EEXIST);
  EXPECT_EQ(Read("f"), Pattern(10));
  EXPECT_EQ(ErrorOf(env().Open(At("missing/f"), OpenMode::kCreate)), ENOENT);
  EXPECT_EQ(ErrorOf(env().Open(At("f/f"), OpenMode::kCreate)), ENOTDIR);
}

TEST_P(EnvTest, FailedOpenNamesTheFileAndTheReason) {
  const Result<std::unique_ptr<File>> file = env().Open(At("missing"), OpenMode::kRead);
  ASSERT_FALSE(file);
  EXPECT_EQ(file.error().code(), StatusCode::kSystem);
  EXPECT_EQ(file.error().error_number(), ENOENT);
  EXPECT_EQ(file.error().file(), At("missing"));
  const Result<std::unique_ptr<File>> directory = env().Open(At(""), OpenMode::kRead);
  ASSERT_FALSE(directory);
  EXPECT_EQ(directory.error().code(), StatusCode::kData);
  EXPECT_EQ(directory.error().found(), "a directory");
  EXPECT_EQ(ErrorOf(env().Open(At("f"), OpenMode::kInvalid)), EINVAL);
}

TEST_P(EnvTest, FilesOpenedForReadingRefuseWrites) {
  Write("f", Pattern(10));
  const std::unique_ptr<File> file = MustOpen("f", OpenMode::kRead);
  EXPECT_EQ(file->WriteSome(0, Pattern(1)).error, EBADF);
  EXPECT_FALSE(file->Allocate(100));
  EXPECT_EQ(Read("f"), Pattern(10));
}

TEST_P(EnvTest, StatTellsTypeSizeAndIdentity) {
  Write("f", Pattern(1234));
  ASSERT_TRUE(env().CreateDirectory(At("d")));
  const Result<FileStat> file = env().Stat(At("f"));
  ASSERT_TRUE(file);
  EXPECT_EQ(file->type, FileType::kRegular);
  EXPECT_EQ(file->bytes, 1234u);
  EXPECT_EQ(env().Stat(At("d"))->type, FileType::kDirectory);

  const Result<FileStat> opened = MustOpen("f", OpenMode::kRead)->Stat();
  ASSERT_TRUE(opened);
  EXPECT_EQ(opened->inode, file->inode);
  EXPECT_EQ(opened->device, file->device);
  ASSERT_TRUE(env().Rename(At("f"), At("g")));
  EXPECT_EQ(env().Stat(At("g"))->inode, file->inode);
  Write("f", Pattern(1));
  EXPECT_NE(env().Stat(At("f"))->inode, file->inode);
}

TEST_P(EnvTest, StatOfAMissingPathIsNotAnError) {
  Write("f", Pattern(1));
  for (const char* name : {"missing", "missing/x", "f/x"}) {
    const Result<FileStat> stat = env().Stat(At(name));
    ASSERT_TRUE(stat) << name;
    EXPECT_EQ(stat->type, FileType::kInvalid) << name;
  }
}

TEST_P(EnvTest, ListsSortedNames) {
  ASSERT_TRUE(env().CreateDirectory(At("m")));
  for (const char* name : {"zz", "a", ".tmp-x", "B"}) Write(name, {});
  EXPECT_EQ(Names(At("")), (std::vector<std::string>{".tmp-x", "B", "a", "m", "zz"}));
  EXPECT_TRUE(Names(At("m")).empty());
  EXPECT_EQ(ErrorOf(env().List(At("missing"))), ENOENT);
  EXPECT_EQ(ErrorOf(env().List(At("a"))), ENOTDIR);
}

TEST_P(EnvTest, RenameReplacesAndOpenFilesKeepTheirContent) {
  Write("old", Pattern(10, 1));
  Write("new", Pattern(20, 2));
  const std::unique_ptr<File> replaced = MustOpen("old", OpenMode::kRead);
  ASSERT_TRUE(env().Rename(At("new"), At("old")));
  EXPECT_EQ(Read("old"), Pattern(20, 2));
  EXPECT_EQ(Names(At("")), std::vector<std::string>{"old"});
  Content content(10);
  ASSERT_TRUE(ReadFully(*replaced, 0, content));
  EXPECT_EQ(content, Pattern(10, 1));
  EXPECT_EQ(ErrorOf(env().Rename(At("missing"), At("old"))), ENOENT);
  EXPECT_EQ(Read("old"), Pattern(20, 2));
}

TEST_P(EnvTest, RemovesFilesAndEmptyDirectories) {
  ASSERT_TRUE(env().CreateDirectory(At("d")));
  Write("d/f", Pattern(5));
  EXPECT_EQ(ErrorOf(env().CreateDirectory(At("d"))), EEXIST);
  EXPECT_EQ(ErrorOf(env().RemoveDirectory(At("d"))), ENOTEMPTY);
  EXPECT_EQ(ErrorOf(env().Remove(At("d"))), EISDIR);
  EXPECT_EQ(ErrorOf(env().RemoveDirectory(At("d/f"))), ENOTDIR);
  const std::unique_ptr<File> open = MustOpen("d/f", OpenMode::kRead);
  EXPECT_TRUE(env().Remove(At("d/f")));
  EXPECT_EQ(ErrorOf(env().Remove(At("d/f"))), ENOENT);
  Content content(5);
  EXPECT_TRUE(ReadFully(*open, 0, content));
  EXPECT_TRUE(env().SyncDirectory(At("d")));
  EXPECT_TRUE(env().RemoveDirectory(At("d")));
  EXPECT_EQ(ErrorOf(env().SyncDirectory(At("d"))), ENOENT);
}

TEST_P(EnvTest, AllocateSetsTheSizeAndNeverShrinks) {
  const std::unique_ptr<File> file = MustOpen("f", OpenMode::kCreate);
  ASSERT_TRUE(file->Allocate(0));
  EXPECT_EQ(file->Stat()->bytes, 0u);
  ASSERT_TRUE(file->Allocate(5000));
  EXPECT_EQ(file->Stat()->bytes, 5000u);
  ASSERT_TRUE(file->Allocate(100));
  EXPECT_EQ(file->Stat()->bytes, 5000u);
  EXPECT_EQ(Read("f"), Content(5000));
}

TEST_P(EnvTest, FreeBytesIsSomething) {
  const Result<uint64_t> bytes = env().FreeBytes(At(""));
  ASSERT_TRUE(bytes);
  EXPECT_GT(*bytes, 0u);
  EXPECT_EQ(ErrorOf(env().FreeBytes(At("missing"))), ENOENT);
}

TEST_P(EnvTest, ReadFullyTellsWhereAFileEnds) {
  Write("f", Pattern(1000));
  const std::unique_ptr<File> file = MustOpen("f", OpenMode::kRead);
  Content buffer(500);
  const Result<void> read = ReadFully(*file, 800, buffer);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code(), StatusCode::kData);
  EXPECT_EQ(read.error().file(), At("f"));
  EXPECT_EQ(read.error().offset(), 800u);
  EXPECT_EQ(read.error().expected(), "500 bytes");
  EXPECT_EQ(read.error().found(), "200 bytes");
}

TEST_P(EnvTest, DirectReadsOfATruncatedFileAreData) {
  Write("f", Pattern(kPageBytes + 100));
  const Result<std::unique_ptr<File>> file = env().Open(At("f"), OpenMode::kReadDirect);
  if (ErrorOf(file) == EINVAL) GTEST_SKIP() << "no O_DIRECT here";
  ASSERT_TRUE(file);
  Content memory(5 * kPageBytes);
  const auto address = RoundUp(reinterpret_cast<uintptr_t>(memory.data()), kPageBytes);
  const std::span<std::byte> buffer(reinterpret_cast<std::byte*>(address), 4 * kPageBytes);
  const Result<void> read = ReadFully(**file, 0, buffer);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code(), StatusCode::kData) << read.error().ToString();
  EXPECT_EQ(read.error().found(), "4196 bytes");
  const Content content = Pattern(kPageBytes + 100);
  EXPECT_TRUE(std::equal(content.begin(), content.end(), buffer.begin()));
}

TEST_P(EnvTest, ReadWholeFileRefusesWhatIsTooLarge) {
  Write("f", Pattern(1000));
  EXPECT_TRUE(ReadWholeFile(env(), At("f"), 1000));
  const Result<Content> content = ReadWholeFile(env(), At("f"), 999);
  ASSERT_FALSE(content);
  EXPECT_EQ(content.error().code(), StatusCode::kData);
  EXPECT_EQ(content.error().found(), "1000 bytes");
  EXPECT_EQ(ErrorOf(ReadWholeFile(env(), At("missing"), 10)), ENOENT);
}

TEST_P(EnvTest, MapsAnyRange) {
  const Content content = Pattern(5 * kPageBytes + 100);
  Write("f", content);
  const std::unique_ptr<File> file = MustOpen("f", OpenMode::kRead);
  for (const uint64_t offset : {uint64_t{0}, kPageBytes, kPageBytes + 1, 5 * kPageBytes + 99}) {
    const uint64_t bytes = content.size() - offset;
    Result<std::unique_ptr<Mapping>> mapping = file->Map(offset, bytes);
    ASSERT_TRUE(mapping);
    ASSERT_TRUE((*mapping)->Populate(0, bytes));
    ASSERT_TRUE((*mapping)->Populate(bytes / 2, bytes - bytes / 2));
    const std::span<const std::byte> mapped = (*mapping)->bytes();
    EXPECT_TRUE(std::equal(mapped.begin(), mapped.end(), content.begin() + offset, content.end()));
    EXPECT_EQ(ErrorOf((*mapping)->Populate(1, bytes)), EINVAL);
    EXPECT_EQ(ErrorOf((*mapping)->Populate(UINT64_MAX, 2)), EINVAL);
  }
  Result<std::unique_ptr<Mapping>> empty = file->Map(content.size(), 0);
  ASSERT_TRUE(empty);
  EXPECT_TRUE((*empty)->bytes().empty());
  EXPECT_TRUE((*empty)->Populate(0, 0));
}

TEST_P(EnvTest, AMappingOutlivesItsFile) {
  Write("f", Pattern(kPageBytes));
  Result<std::unique_ptr<Mapping>> mapping = MustOpen("f", OpenMode::kRead)->Map(0, kPageBytes);
  ASSERT_TRUE(mapping);
  ASSERT_TRUE(env().Remove(At("f")));
  ASSERT_TRUE((*mapping)->Populate(0, kPageBytes));
  EXPECT_EQ((*mapping)->bytes()[100], Pattern(kPageBytes)[100]);
}

TEST_P(EnvTest, MappingBeyondTheEndIsData) {
  Write("f", Pattern(100));
  const std::unique_ptr<File> file = MustOpen("f", OpenMode::kRead);
  for (const uint64_t bytes : {uint64_t{101}, UINT64_MAX}) {
    const Result<std::unique_ptr<Mapping>> mapping = file->Map(0, bytes);
    ASSERT_FALSE(mapping);
    EXPECT_EQ(mapping.error().code(), StatusCode::kData);
    EXPECT_EQ(mapping.error().found(), "100 bytes");
  }
  EXPECT_FALSE(file->Map(50, UINT64_MAX));
}

TEST_P(EnvTest, PopulateAfterTruncationIsAStatus) {
  Write("f", Pattern(8 * kPageBytes));
  Result<std::unique_ptr<Mapping>> mapping =
      MustOpen("f", OpenMode::kRead)->Map(kPageBytes, 7 * kPageBytes);
  ASSERT_TRUE(mapping);
  for (const uint64_t left :
       {8 * kPageBytes - 1, 6 * kPageBytes + 1, 6 * kPageBytes, uint64_t{0}}) {
    Cut("f", left);
    const Result<void> populated = (*mapping)->Populate(2 * kPageBytes, 5 * kPageBytes);
    ASSERT_FALSE(populated);
    EXPECT_EQ(populated.error().code(), StatusCode::kData);
    EXPECT_EQ(populated.error().file(), At("f"));
    EXPECT_EQ(populated.error().expected(), Text("at least {} bytes", 8 * kPageBytes));
    EXPECT_EQ(populated.error().found(), Text("{} bytes", left));
  }
}

TEST_P(EnvTest, PageCacheCanBeAskedAndAdvised) {
  constexpr uint64_t kBytes = 64 * kPageBytes + 10;
  const std::unique_ptr<File> file = MustOpen("f", OpenMode::kCreate);
  ASSERT_TRUE(WriteFully(*file, 0, Pattern(kBytes)));
  ASSERT_TRUE(file->Sync());
  Result<uint64_t> cached = file->CachedBytes(0, 0);
  if (!cached) GTEST_SKIP() << cached.error().ToString();
  EXPECT_EQ(*cached, kBytes);
  EXPECT_EQ(*file->CachedBytes(kPageBytes, kPageBytes), kPageBytes);
  EXPECT_EQ(*file->CachedBytes(kBytes, 5), 0u);
  file->DropCache(0, 0);
  cached = file->CachedBytes(0, 0);
  ASSERT_TRUE(cached);
  if (*cached == kBytes) GTEST_SKIP() << "this file system keeps its pages";
  EXPECT_EQ(*cached, 0u);
  const std::unique_ptr<Mapping> mapping = *file->Map(0, kBytes);
  ASSERT_TRUE(mapping->Populate(0, kBytes));
  EXPECT_EQ(*file->CachedBytes(0, 0), kBytes);
  mapping->Drop(0, kBytes);
  EXPECT_EQ(*file->CachedBytes(0, 0), 0u) << "mapped pages are dropped by their own mapping";
  ASSERT_TRUE(mapping->Populate(0, kBytes));
  EXPECT_TRUE(std::ranges::equal(mapping->bytes(), Pattern(kBytes)));
  file->WillNeed(0, 0);
}

struct LockCase {
  LockKind held;
  LockKind wanted;
  bool granted;
};

TEST_P(EnvTest, LocksConflictUnlessBothAreShared) {
  constexpr LockKind kShared = LockKind::kShared;
  constexpr LockKind kExclusive = LockKind::kExclusive;
  for (const LockCase& test : {LockCase{kShared, kShared, true},
                               {kShared, kExclusive, false},
                               {kExclusive, kShared, false},
                               {kExclusive, kExclusive, false}}) {
    Result<std::unique_ptr<FileLock>> held = env().Lock(At("lock"), test.held, LockWait::kBlock);
    ASSERT_TRUE(held);
    ASSERT_NE(*held, nullptr);
    Result<std::unique_ptr<FileLock>> wanted = env().Lock(At("lock"), test.wanted, LockWait::kTry);
    ASSERT_TRUE(wanted);
    EXPECT_EQ(*wanted != nullptr, test.granted);
    wanted->reset();
    held->reset();
    wanted = env().Lock(At("lock"), test.wanted, LockWait::kTry);
    ASSERT_TRUE(wanted);
    EXPECT_NE(*wanted, nullptr) << "released locks are free";
  }
  EXPECT_EQ(env().Stat(At("lock"))->type, FileType::kRegular);
  EXPECT_EQ(ErrorOf(env().Lock(At("missing/lock"), kShared, LockWait::kTry)), ENOENT);
}

TEST_P(EnvTest, ABlockedLockIsGrantedWhenTheHolderLetsGo) {
  Result<std::unique_ptr<FileLock>> held =
      env().Lock(At("lock"), LockKind::kExclusive, LockWait::kTry);
  ASSERT_TRUE(held);
  std::atomic<bool> granted{false};
  std::thread waiter([&] {
    Result<std::unique_ptr<FileLock>> lock =
        env().Lock(At("lock"), LockKind::kExclusive, LockWait::kBlock);
    granted = lock && *lock != nullptr;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(granted);
  held->reset();
  waiter.join();
  EXPECT_TRUE(granted);
}

TEST_P(EnvTest, ALockOnARemovedFileIsNotHandedOut) {
  Result<std::unique_ptr<FileLock>> held =
      env().Lock(At("lock"), LockKind::kExclusive, LockWait::kTry);
  ASSERT_TRUE(held);
  std::unique_ptr<FileLock> late;
  std::thread waiter([&] {
    Result<std::unique_ptr<FileLock>> lock =
        env().Lock(At("lock"), LockKind::kExclusive, LockWait::kBlock);
    if (lock) late = std::move(*lock);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ASSERT_TRUE(env().Remove(At("lock")));
  held->reset();
  waiter.join();
  ASSERT_NE(late, nullptr);
  // Had it locked the removed file, this would be granted as well.
  const Result<std::unique_ptr<FileLock>> other =
      env().Lock(At("lock"), LockKind::kExclusive, LockWait::kTry);
  ASSERT_TRUE(other);
  EXPECT_EQ(*other, nullptr);
}

TEST_P(EnvTest, PublishReplacesAndLeavesNoTemporary) {
  ASSERT_TRUE(PublishFile(env(), At("f"), Pattern(100, 1)));
  ASSERT_TRUE(PublishFile(env(), At("f"), Pattern(70, 2)));
  EXPECT_EQ(Read("f"), Pattern(70, 2));
  EXPECT_EQ(Names(At("")), std::vector<std::string>{"f"});
  const std::string longest(255, 'n');
  ASSERT_TRUE(PublishFile(env(), At(longest), Pattern(1)));
  ASSERT_TRUE(env().CreateDirectory(At("d")));
  EXPECT_FALSE(PublishFile(env(), At("d"), Pattern(1))) << "a directory is in the way";
  EXPECT_FALSE(PublishFile(env(), At("missing/f"), Pattern(1)));
  EXPECT_EQ(Names(At("")), (std::vector<std::string>{"d", "f", longest}));
}

TEST_P(EnvTest, PublishesPieceByPieceOrNotAtAll) {
  const Content content = Pattern(1000);
  const auto pieces = [&content](const FileSink& sink) -> Result<void> {
    for (const size_t at : {0, 300, 600})
      HP_TRY(sink(std::span(content).subspan(at, at == 600 ? 400 : 300)));
    return {};
  };
  ASSERT_TRUE(PublishFileInPieces(env(), At("f"), pieces));
  EXPECT_EQ(Read("f"), content);
  const auto failing = [&content](const FileSink& sink) -> Result<void> {
    HP_TRY(sink(content));
    return Fail(Status::Data("the source is bad"));
  };
  EXPECT_EQ(PublishFileInPieces(env(), At("g"), failing).error().what(), "the source is bad");
  EXPECT_EQ(Names(At("")), std::vector<std::string>{"f"});
}

TEST_P(EnvTest, CreatesDirectoriesWithTheirParents) {
  ASSERT_TRUE(CreateDirectories(env(), At("a/b/c")));
  EXPECT_EQ(env().Stat(At("a/b/c"))->type, FileType::kDirectory);
  EXPECT_TRUE(CreateDirectories(env(), At("a/b/c")));
  EXPECT_TRUE(CreateDirectories(env(), At("a/b/c/")));
  Write("f", {});
  for (const char* name : {"f", "f/d"}) {
    const Result<void> created = CreateDirectories(env(), At(name));
    ASSERT_FALSE(created) << name;
    EXPECT_EQ(created.error().error_number(), ENOTDIR);
    EXPECT_EQ(created.error().file(), At("f"));
  }
}

TEST(Paths, JoinAndParent) {
  EXPECT_EQ(JoinPath("a/b", "c"), "a/b/c");
  EXPECT_EQ(JoinPath("a/", "c"), "a/c");
  EXPECT_EQ(JoinPath("/", "c"), "/c");
  EXPECT_EQ(JoinPath("", "c"), "c");
  EXPECT_EQ(ParentPath("a/b/c"), "a/b");
  EXPECT_EQ(ParentPath("c"), ".");
  EXPECT_EQ(ParentPath("a/b/"), "a");
  EXPECT_EQ(ParentPath("a//b"), "a");
  EXPECT_EQ(ParentPath("/c"), "/");
  EXPECT_EQ(ParentPath("//c"), "/");
  EXPECT_EQ(ParentPath("/"), "/");
  EXPECT_EQ(ParentPath("."), ".");
  EXPECT_EQ(ParentPath(""), ".");
}

// Random histories of a small tree: the memory Env must answer every step as the kernel does.

// Read by the first property: the same histories in every run, unless the caller chooses others.
const bool kSeeded = setenv("RC_PARAMS", "seed=20 max_success=300", 0) == 0;

struct Step {
  int kind;
  std::string name;
  std::string other;
};

std::string Answer(const Result<void>& result) { return Text("{}", ErrorOf(result)); }

std::string Perform(Env& env, const std::string& root, const Step& step) {
  const std::string path = JoinPath(root, step.name);
  switch (step.kind) {
    case 0: {
      Result<std::unique_ptr<File>> file = env.Open(path, OpenMode::kCreate);
      if (file) (void)WriteFully(**file, 0, Pattern(step.other.size() + 1));
      return Text("{}", ErrorOf(file));
    }
    case 1: return Answer(env.CreateDirectory(path));
    case 2: return Answer(env.Remove(path));
    case 3: return Answer(env.RemoveDirectory(path));
    case 4: return Answer(env.Rename(path, JoinPath(root, step.other)));
    case 5: {
      const Result<Content> content = ReadWholeFile(env, path, kMiB);
      return Text("{} {}", ErrorOf(content), content ? content->size() : 0);
    }
    case 6: {
      const Result<std::vector<std::string>> names = env.List(path);
      std::string answer = Text("{}", ErrorOf(names));
      if (names)
        for (const std::string& name : *names) answer += " " + name;
      return answer;
    }
    case 7: {
      const Result<FileStat> stat = env.Stat(path);
      if (!stat) return Text("{}", ErrorOf(stat));
      const bool regular = stat->type == FileType::kRegular;
      return Text("type {} bytes {}", int(stat->type), regular ? stat->bytes : 0);
    }
  }
  return Answer(env.SyncDirectory(path));
}

TEST(Model, MemoryAnswersAsTheKernelDoes) {
  const auto name = rc::gen::element<std::string>("a", "b", "d", "d/a", "d/e", "d/e/a", "b/a");
  const auto step =
      rc::gen::build<Step>(rc::gen::set(&Step::kind, rc::gen::inRange(0, 9)),
                           rc::gen::set(&Step::name, name), rc::gen::set(&Step::other, name));
  const auto holds = rc::check("memory and kernel agree", [&step] {
    const auto steps = *rc::gen::container<std::vector<Step>>(step);
    const TestDirectory directory;
    MemEnv memory;
    RC_ASSERT(memory.CreateDirectory("/root").has_value());
    for (const Step& one : steps) {
      const std::string kernel = Perform(PosixEnv(), directory.path(), one);
      const std::string in_memory = Perform(memory, "/root", one);
      RC_LOG() << one.kind << " " << one.name << " " << one.other << "\n";
      RC_ASSERT(in_memory == kernel);
    }
  });
  EXPECT_TRUE(holds && kSeeded);
}

}  // namespace
}  // namespace hotplane
