// Readers: io_uring, threads, and the faulty twin over both.
#include "io/reader.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/memory.h"
#include "base/units.h"
#include "io/fault_env.h"
#include "io/mem_env.h"
#include "io/test_directory.h"
#include "io/whole_reader.h"

namespace hotplane {
namespace {

constexpr std::chrono::milliseconds kLong{10'000};
constexpr size_t kFileBytes = 96 * kPageBytes;

std::vector<std::byte> Pattern() {
  std::vector<std::byte> content(kFileBytes);
  for (size_t i = 0; i < kFileBytes; ++i) content[i] = static_cast<std::byte>(i * 131 + i / 251);
  return content;
}

enum class Backend { kPosix, kPosixThreads, kMemory, kFaultFree, kFaultFreePosix };

class ReaderTest : public testing::TestWithParam<Backend> {
 protected:
  ReaderTest() : faulty_memory_(memory_), faulty_posix_(PosixEnv()) {
    const bool on_disk = GetParam() == Backend::kPosix || GetParam() == Backend::kPosixThreads ||
                         GetParam() == Backend::kFaultFreePosix;
    path_ = on_disk ? directory_ / "file" : "/file";
    const auto file = env().Open(path_, OpenMode::kCreate).value();
    EXPECT_TRUE(WriteFully(*file, 0, content_));
    EXPECT_TRUE(file->Sync());
    if (GetParam() == Backend::kPosixThreads) setenv("HOTPLANE_NO_IO_URING", "1", 1);
    reader_ = env().NewReader({.depth = 8}).value();
    unsetenv("HOTPLANE_NO_IO_URING");
    buffer_ = HugeBuffer::Allocate(kFileBytes).value();
  }

  Env& env() {
    switch (GetParam()) {
      case Backend::kMemory: return memory_;
      case Backend::kFaultFree: return faulty_memory_;
      case Backend::kFaultFreePosix: return faulty_posix_;
      default: return PosixEnv();
    }
  }

  // All of the file in pieces of `piece` bytes, at most depth() at once.
  void ReadAll(File& file, size_t piece) {
    size_t started = 0;
    size_t ended_bytes = 0;
    size_t in_flight = 0;
    std::vector<ReadEnd> ended;
    while (ended_bytes < kFileBytes) {
      while (started < kFileBytes && in_flight < reader_->depth()) {
        reader_->Start({&file, started, buffer_.span().subspan(started, piece), started});
        started += piece;
        ++in_flight;
      }
      ended.clear();
      ASSERT_TRUE(reader_->Collect(kLong, &ended).has_value());
      ASSERT_FALSE(ended.empty());
      for (const ReadEnd& end : ended) {
        ASSERT_EQ(end.count.error, 0);
        ASSERT_EQ(end.count.bytes, piece) << "at " << end.tag;
        ended_bytes += end.count.bytes;
        --in_flight;
      }
    }
    EXPECT_TRUE(std::equal(content_.begin(), content_.end(), buffer_.data()));
  }

  const std::vector<std::byte> content_ = Pattern();
  TestDirectory directory_;
  MemEnv memory_;
  FaultEnv faulty_memory_;
  FaultEnv faulty_posix_;
  std::string path_;
  HugeBuffer buffer_;
  std::unique_ptr<AsyncReader> reader_;
};

TEST_P(ReaderTest, ReadsAFileInPiecesThroughTheCacheAndPastIt) {
  for (const OpenMode mode : {OpenMode::kRead, OpenMode::kReadDirect}) {
    const auto file = env().Open(path_, mode);
    if (!file && file.error().error_number() == EINVAL) GTEST_SKIP() << "no O_DIRECT here";
    std::fill(buffer_.data(), buffer_.data() + kFileBytes, std::byte{0});
    ReadAll(**file, 4 * kPageBytes);
  }
}

TEST_P(ReaderTest, TheEndOfTheFileIsAShortCountAndThenNone) {
  const auto file = env().Open(path_, OpenMode::kRead).value();
  reader_->Start({file.get(), kFileBytes - 100, buffer_.span().first(4096), 1});
  reader_->Start({file.get(), kFileBytes, buffer_.span().subspan(8192, 4096), 2});
  std::vector<ReadEnd> ended;
  while (ended.size() < 2) ASSERT_TRUE(reader_->Collect(kLong, &ended).has_value());
  for (const ReadEnd& end : ended) {
    EXPECT_EQ(end.count.error, 0);
    EXPECT_EQ(end.count.bytes, end.tag == 1 ? 100u : 0u);
  }
}

TEST_P(ReaderTest, NothingInFlightEndsWithTheTime) {
  std::vector<ReadEnd> ended;
  EXPECT_TRUE(reader_->Collect(std::chrono::milliseconds(1), &ended).has_value());
  EXPECT_TRUE(ended.empty());
}

TEST_P(ReaderTest, DestroyedWithRequestsInFlightTouchesNothingAfterwards) {
  const auto file = env().Open(path_, OpenMode::kRead).value();
  for (size_t i = 0; i < reader_->depth(); ++i)
    reader_->Start({file.get(), i * kPageBytes, buffer_.span().subspan(i * kPageBytes, 4096), i});
  reader_.reset();
  std::vector<std::byte> after(buffer_.data(), buffer_.data() + kFileBytes);
  usleep(2000);
  EXPECT_TRUE(std::equal(after.begin(), after.end(), buffer_.data()));
}

std::string BackendName(const testing::TestParamInfo<Backend>& info) {
  switch (info.param) {
    case Backend::kPosix: return "Posix";
    case Backend::kPosixThreads: return "PosixThreads";
    case Backend::kMemory: return "Memory";
    case Backend::kFaultFree: return "FaultFree";
    case Backend::kFaultFreePosix: return "FaultFreePosix";
  }
  return "Unknown";
}

INSTANTIATE_TEST_SUITE_P(Backends, ReaderTest,
                         testing::Values(Backend::kPosix, Backend::kPosixThreads, Backend::kMemory,
                                         Backend::kFaultFree, Backend::kFaultFreePosix),
                         BackendName);

TEST(PosixReader, SaysWhichItIsAndWhyNot) {
  setenv("HOTPLANE_NO_IO_URING", "1", 1);
  const auto threads = PosixEnv().NewReader({}).value();
  unsetenv("HOTPLANE_NO_IO_URING");
  EXPECT_STREQ(threads->name(), "pread threads");
  EXPECT_EQ(threads->reason(), "HOTPLANE_NO_IO_URING is set");
  const auto reader = PosixEnv().NewReader({}).value();
  EXPECT_EQ(reader->reason().empty(), std::string(reader->name()) == "io_uring");
}

TEST(PosixReader, IoUringRefusedBySeccompFallsBackToThreads) {
  const pid_t child = fork();
  if (child == 0) {
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
      _exit(77);
    const auto reader = PosixEnv().NewReader({});
    _exit(reader && std::string((*reader)->name()) == "pread threads" &&
                  !(*reader)->reason().empty()
              ? 0
              : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "no system call filters here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(FaultReader, InjectsWhatItIsTold) {
  MemEnv memory;
  const std::vector<std::byte> content = Pattern();
  memory.SetFile("/file", content);
  FaultEnv env(memory);
  env.Add(Fault{.action = FaultAction::kError, .first = 1, .kind = OperationKind::kRead});
  env.Add(Fault{.action = FaultAction::kShort, .first = 2, .kind = OperationKind::kRead});
  env.Add(Fault{.action = FaultAction::kEndOfFile, .first = 3, .kind = OperationKind::kRead});
  env.Add(BitFlip{.offset = 5, .count = 1});
  const auto file = env.Open("/file", OpenMode::kRead).value();
  const auto reader = env.NewReader({}).value();
  std::vector<std::byte> buffer(4 * 1024);
  for (uint64_t tag = 0; tag < 4; ++tag)
    reader->Start(
        {file.get(), tag == 3 ? 0 : 1024 * tag, std::span(buffer).subspan(1024 * tag, 1024), tag});
  std::vector<ReadEnd> ended;
  while (ended.size() < 4) ASSERT_TRUE(reader->Collect(kLong, &ended).has_value());
  std::sort(ended.begin(), ended.end(),
            [](const ReadEnd& a, const ReadEnd& b) { return a.tag < b.tag; });
  EXPECT_EQ(ended[0].count.error, EIO);
  EXPECT_EQ(ended[1].count.bytes, 512u);
  EXPECT_EQ(ended[2].count.error, 0);
  EXPECT_EQ(ended[2].count.bytes, 0u);
  EXPECT_EQ(ended[3].count.bytes, 1024u);
  EXPECT_EQ(buffer[3 * 1024 + 5], content[5] ^ std::byte{1});
  uint64_t done_bytes = 0;
  for (const Operation& operation : env.Log()) done_bytes += operation.done_bytes;
  EXPECT_EQ(done_bytes, 512u + 1024u);
}

class WholeReaderTest : public testing::Test {
 protected:
  WholeReaderTest() {
    memory_.SetFile("/file", content_);
    file_ = env_.Open("/file", OpenMode::kRead).value();
    direct_ = env_.Open("/file", OpenMode::kReadDirect).value();
    buffer_ = HugeBuffer::Allocate(kFileBytes).value();
  }

  // One read of the file's first `bytes` from `offset` on, into whole pages.
  WholeReadEnd Read(uint64_t offset, size_t bytes) {
    WholeReader reader(env_.NewReader({.depth = 2}).value());
    reader.Start({.file = file_.get(),
                  .direct = direct_.get(),
                  .offset = offset,
                  .destination = buffer_.span().first(RoundUp(bytes, kPageBytes)),
                  .needed_bytes = bytes,
                  .tag = 9});
    std::vector<WholeReadEnd> ended;
    while (ended.empty()) EXPECT_TRUE(reader.Collect(kLong, &ended).has_value());
    EXPECT_EQ(reader.in_flight(), 0u);
    EXPECT_EQ(ended[0].tag, 9u);
    return ended[0];
  }
  bool Right(uint64_t offset, size_t bytes) const {
    return std::equal(buffer_.data(), buffer_.data() + bytes,
                      content_.begin() + static_cast<ptrdiff_t>(offset));
  }
  // How many reads were direct, of how many.
  std::pair<size_t, size_t> DirectReads() {
    std::pair<size_t, size_t> count{0, 0};
    for (const Operation& operation : env_.Log()) {
      if (operation.kind != OperationKind::kRead) continue;
      ++count.second;
      if (operation.bypassed_cache) ++count.first;
    }
    env_.ClearLog();
    return count;
  }

  // The last page is half full.
  const std::vector<std::byte> content_ = [] {
    std::vector<std::byte> content = Pattern();
    content.resize(kFileBytes - kPageBytes / 2);
    return content;
  }();
  MemEnv memory_;
  FaultEnv env_{memory_};
  std::unique_ptr<File> file_;
  std::unique_ptr<File> direct_;
  HugeBuffer buffer_;
};

TEST_F(WholeReaderTest, ReadsDirectlyAlsoIntoTheEndOfTheFile) {
  const uint64_t offset = kFileBytes - 3 * kPageBytes;
  const WholeReadEnd end = Read(offset, content_.size() - offset);
  ASSERT_TRUE(end.result) << end.result.error().ToString();
  EXPECT_EQ(end.bytes, content_.size() - offset);
  EXPECT_TRUE(Right(offset, content_.size() - offset));
  EXPECT_EQ(DirectReads(), std::make_pair(size_t{1}, size_t{1}));
}

TEST_F(WholeReaderTest, GoesOnWhereAShortCountLeftOff) {
  env_.Add(Fault{.action = FaultAction::kShort,
                 .count = 4,
                 .kind = OperationKind::kRead,
                 .bytes = kPageBytes});
  ASSERT_TRUE(Read(0, 16 * kPageBytes).result);
  EXPECT_TRUE(Right(0, 16 * kPageBytes));
  EXPECT_EQ(DirectReads(), std::make_pair(size_t{5}, size_t{5}));
}

TEST_F(WholeReaderTest, WhatIsNotAlignedGoesThroughThePageCache) {
  ASSERT_TRUE(Read(100, 2 * kPageBytes).result);
  EXPECT_TRUE(Right(100, 2 * kPageBytes));
  EXPECT_EQ(DirectReads(), std::make_pair(size_t{0}, size_t{1}));
}

TEST_F(WholeReaderTest, TriesAgainAfterSignalsAndRefusals) {
  for (const int error : {EINTR, EAGAIN, EINVAL}) {
    env_.ClearFaults();
    env_.Add(Fault{
        .action = FaultAction::kError, .count = 1, .kind = OperationKind::kRead, .error = error});
    ASSERT_TRUE(Read(kPageBytes, 4 * kPageBytes).result) << error;
    EXPECT_TRUE(Right(kPageBytes, 4 * kPageBytes));
    EXPECT_EQ(DirectReads(), std::make_pair(size_t{error == EINVAL ? 1u : 2u}, size_t{2}));
  }
}

TEST_F(WholeReaderTest, TellsErrorsAndTheEndOfTheFile) {
  env_.Add(Fault{.action = FaultAction::kShort, .kind = OperationKind::kRead, .bytes = kPageBytes});
  env_.Add(Fault{.action = FaultAction::kError, .first = 2, .kind = OperationKind::kRead});
  WholeReadEnd end = Read(kPageBytes, 4 * kPageBytes);
  ASSERT_FALSE(end.result);
  EXPECT_EQ(end.result.error().error_number(), EIO);
  EXPECT_EQ(end.result.error().file(), "/file");
  EXPECT_EQ(end.result.error().offset(), 2 * kPageBytes);

  env_.ClearFaults();
  env_.Add(Fault{.action = FaultAction::kError,
                 .count = Fault::kForever,
                 .kind = OperationKind::kRead,
                 .error = EAGAIN});
  end = Read(0, kPageBytes);
  ASSERT_FALSE(end.result);
  EXPECT_EQ(end.result.error().error_number(), EAGAIN);

  env_.ClearFaults();
  end = Read(kFileBytes - kPageBytes, kPageBytes);
  ASSERT_FALSE(end.result);
  EXPECT_EQ(end.result.error().exit_code(), 3);
  EXPECT_EQ(end.result.error().offset(), content_.size());
}

}  // namespace
}  // namespace hotplane
