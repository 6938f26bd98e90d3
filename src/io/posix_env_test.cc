// What only the real file system can show: other processes, full and read-only disks, old kernels.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/magic.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <functional>

#include "base/format_text.h"
#include "base/units.h"
#include "io/env.h"
#include "io/test_directory.h"

namespace hotplane {
namespace {

using Content = std::vector<std::byte>;

constexpr int kSkippedExit = 77;

// Runs a part of a test in a process of its own, for what cannot be taken back: users, mounts,
// system call filters. Its failures are printed and fail this test. False when it asked to skip by
// returning false.
bool InChild(const std::function<bool()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const bool ran = body();
    std::fflush(nullptr);
    _exit(::testing::Test::HasFailure() ? 1 : ran ? 0 : kSkippedExit);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) {
    ADD_FAILURE() << "no child process";
    return true;
  }
  const int exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  EXPECT_TRUE(exit_code == 0 || exit_code == kSkippedExit)
      << "the child ended with wait status " << status;
  return exit_code != kSkippedExit;
}

void Write(const std::string& path, const Content& content) {
  Result<std::unique_ptr<File>> file = PosixEnv().Open(path, OpenMode::kCreate);
  ASSERT_TRUE(file) << file.error().ToString();
  ASSERT_TRUE(WriteFully(**file, 0, content));
  ASSERT_TRUE((*file)->Sync());
}

std::unique_ptr<File> OpenForReading(const std::string& path) {
  Result<std::unique_ptr<File>> file = PosixEnv().Open(path, OpenMode::kRead);
  EXPECT_TRUE(file) << file.error().ToString();
  return file ? std::move(*file) : nullptr;
}

template <typename T>
int ErrorOf(const Result<T>& result) {
  return result ? 0 : result.error().error_number();
}

TEST(PosixEnv, LocksExcludeOtherProcessesUntilTheyEnd) {
  const TestDirectory directory;
  const std::string path = directory / "lock";
  int locked[2];
  int finish[2];
  ASSERT_EQ(pipe(locked), 0);
  ASSERT_EQ(pipe(finish), 0);
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const auto held = PosixEnv().Lock(path, LockKind::kExclusive, LockWait::kTry);
    char byte = held && *held != nullptr ? 'y' : 'n';
    const bool told = write(locked[1], &byte, 1) == 1 && read(finish[0], &byte, 1) == 1;
    _exit(told ? 0 : 1);  // without releasing: the kernel does
  }
  ASSERT_GT(child, 0);
  char byte = 0;
  ASSERT_EQ(read(locked[0], &byte, 1), 1);
  EXPECT_EQ(byte, 'y');
  auto mine = PosixEnv().Lock(path, LockKind::kShared, LockWait::kTry);
  ASSERT_TRUE(mine);
  EXPECT_EQ(*mine, nullptr);
  ASSERT_EQ(write(finish[1], &byte, 1), 1);
  mine = PosixEnv().Lock(path, LockKind::kShared, LockWait::kBlock);
  ASSERT_TRUE(mine);
  EXPECT_NE(*mine, nullptr);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (const int fd : {locked[0], locked[1], finish[0], finish[1]}) close(fd);
}

TEST(PosixEnv, FollowsSymbolicLinks) {
  const TestDirectory directory;
  Write(directory / "blob", Content(100));
  ASSERT_EQ(symlink("blob", (directory / "link").c_str()), 0);
  ASSERT_EQ(symlink("nowhere", (directory / "dangling").c_str()), 0);
  EXPECT_EQ(PosixEnv().Stat(directory / "link")->inode, PosixEnv().Stat(directory / "blob")->inode);
  EXPECT_EQ(PosixEnv().Stat(directory / "dangling")->type, FileType::kInvalid);
  EXPECT_EQ(PosixEnv().StatLink(directory / "dangling")->type, FileType::kOther);
  EXPECT_EQ(PosixEnv().StatLink(directory / "link")->type, FileType::kOther);
  EXPECT_EQ(PosixEnv().StatLink(directory / "blob")->type, FileType::kRegular);
  EXPECT_EQ(PosixEnv().StatLink(directory / "nothing")->type, FileType::kInvalid);
  EXPECT_EQ(OpenForReading(directory / "link")->Stat()->bytes, 100u);
}

TEST(PosixEnv, ACircleOfSymbolicLinksIsNoRegularFile) {
  const TestDirectory directory;
  const std::string path = directory / "itself";
  ASSERT_EQ(symlink("itself", path.c_str()), 0);
  const Result<FileStat> stat = PosixEnv().Stat(path);
  ASSERT_TRUE(stat.has_value()) << stat.error().ToString();
  EXPECT_EQ(stat->type, FileType::kOther);
  const Result<std::unique_ptr<File>> file = PosixEnv().Open(path, OpenMode::kRead);
  ASSERT_FALSE(file.has_value());
  EXPECT_EQ(file.error().code(), StatusCode::kData);
  EXPECT_EQ(file.error().file(), path);
}

TEST(PosixEnv, DescriptorsAreNotInherited) {
  const TestDirectory directory;
  Write(directory / "f", Content(1));
  const int before = dup(0);
  ASSERT_GE(before, 0);
  close(before);  // the lowest free descriptor: the next open takes it
  for (const OpenMode mode : {OpenMode::kRead, OpenMode::kCreate}) {
    const auto file = PosixEnv().Open(directory / (mode == OpenMode::kRead ? "f" : "new"), mode);
    ASSERT_TRUE(file);
    EXPECT_EQ(fcntl(before, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  }
  const auto lock = PosixEnv().Lock(directory / "lock", LockKind::kShared, LockWait::kTry);
  ASSERT_TRUE(lock);
  EXPECT_EQ(fcntl(before, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
}

TEST(PosixEnv, StoresOfOtherUsersCanBeLockedAndRead) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  const TestDirectory directory;
  ASSERT_EQ(chmod(directory.path().c_str(), 0755), 0);
  Write(directory / "lock", {});
  Write(directory / "f", Content(64 * kPageBytes));
  OpenForReading(directory / "f")->DropCache(0, 0);
  ASSERT_EQ(chmod((directory / "lock").c_str(), 0444), 0);
  ASSERT_EQ(chmod((directory / "f").c_str(), 0444), 0);
  const bool ran = InChild([&] {
    constexpr uid_t kNobody = 65534;
    if (seteuid(kNobody) != 0) return false;
    if (access(directory.path().c_str(), R_OK | X_OK) != 0) return false;
    Env& env = PosixEnv();
    const auto lock = env.Lock(directory / "lock", LockKind::kShared, LockWait::kTry);
    EXPECT_TRUE(lock && *lock != nullptr);
    EXPECT_EQ(ErrorOf(env.Lock(directory / "new", LockKind::kShared, LockWait::kTry)), EACCES);
    EXPECT_EQ(ErrorOf(env.Open(directory / "new", OpenMode::kCreate)), EACCES);
    const std::unique_ptr<File> file = OpenForReading(directory / "f");
    // Not knowing is an answer; "all of it", which mincore gives to strangers, is not.
    const Result<uint64_t> cached = file->CachedBytes(0, 0);
    EXPECT_TRUE(cached ? *cached < file->Stat()->bytes : cached.error().error_number() == EPERM);
    return true;
  });
  if (!ran) GTEST_SKIP() << "cannot become another user here";
}

// The calling process sees a kernel without MADV_POPULATE_READ and cachestat.
bool PretendOldKernel() {
  constexpr uint32_t kMadvPopulateRead = 22;
  constexpr uint32_t kCachestatSyscall = 451;
  constexpr uint32_t kAdvice = offsetof(seccomp_data, args) + 2 * sizeof(uint64_t);
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kCachestatSyscall, 3, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 4),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kAdvice),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kMadvPopulateRead, 1, 2),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{sizeof(program) / sizeof(program[0]), program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

TEST(PosixEnv, OldKernelsPopulateByReadingAndCountByMincore) {
  const TestDirectory directory;
  constexpr uint64_t kBytes = 40 * kPageBytes + 5;
  Write(directory / "f", Content(kBytes, std::byte{7}));
  const bool ran = InChild([&] {
    if (!PretendOldKernel() || syscall(451, -1, nullptr, nullptr, 0) != -1 || errno != ENOSYS)
      return false;
    const std::unique_ptr<File> file = OpenForReading(directory / "f");
    EXPECT_EQ(*file->CachedBytes(0, 0), kBytes);
    EXPECT_EQ(*file->CachedBytes(kPageBytes + 1, 2 * kPageBytes), 2 * kPageBytes);
    file->DropCache(0, 0);
    const bool droppable = *file->CachedBytes(0, 0) == 0;
    const Result<std::unique_ptr<Mapping>> mapping = file->Map(kPageBytes + 3, 39 * kPageBytes);
    EXPECT_TRUE((*mapping)->Populate(5, 38 * kPageBytes));
    if (droppable) {
      EXPECT_GE(*file->CachedBytes(0, 0), 38 * kPageBytes);
    }
    EXPECT_EQ((*mapping)->bytes()[5], std::byte{7});
    EXPECT_EQ(truncate((directory / "f").c_str(), 20 * kPageBytes), 0);
    const Result<void> cut = (*mapping)->Populate(0, 39 * kPageBytes);
    EXPECT_FALSE(cut);
    if (!cut) {
      EXPECT_EQ(cut.error().code(), StatusCode::kData);
    }
    return true;
  });
  if (!ran) GTEST_SKIP() << "system call filters are not allowed here";
}

// Mounts a small tmpfs over `path`, in a mount namespace of the calling process's own.
bool MountSmallDisk(const std::string& path) {
  return unshare(CLONE_NEWNS) == 0 &&
         mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("small", path.c_str(), "tmpfs", 0, "size=1m") == 0;
}

TEST(PosixEnv, FilesInMemoryAreCachedWithoutCounting) {
  struct statfs system;
  if (statfs("/dev/shm", &system) != 0 || system.f_type != TMPFS_MAGIC)
    GTEST_SKIP() << "there is no tmpfs here";
  const std::string path = Text("/dev/shm/hotplane-test-{}", getpid());
  {
    const auto file = PosixEnv().Open(path, OpenMode::kCreate).value();
    ASSERT_TRUE(WriteFully(*file, 0, std::vector<std::byte>(3 * kPageBytes + 5)).has_value());
    EXPECT_EQ(*file->CachedBytes(0, 0), 3 * kPageBytes + 5);
    EXPECT_EQ(*file->CachedBytes(kPageBytes, kPageBytes), kPageBytes);
    EXPECT_EQ(*file->CachedBytes(3 * kPageBytes, kPageBytes), 5u);
    EXPECT_EQ(*file->CachedBytes(4 * kPageBytes, 1), 0u);
  }
  EXPECT_TRUE(PosixEnv().Remove(path).has_value());
}

TEST(PosixEnv, FullDiskIsCapacityAndLeavesNothing) {
  const TestDirectory directory;
  const bool ran = InChild([&] {
    if (!MountSmallDisk(directory.path())) return false;
    Env& env = PosixEnv();
    EXPECT_LE(*env.FreeBytes(directory.path()), kMiB);
    const Result<void> published =
        PublishFile(env, directory / "f", Content(2 * kMiB, std::byte{1}));
    EXPECT_FALSE(published);
    if (!published) {
      EXPECT_EQ(published.error().code(), StatusCode::kCapacity) << published.error().ToString();
      EXPECT_EQ(published.error().error_number(), ENOSPC);
      EXPECT_GT(published.error().offset(), 0u);
    }
    EXPECT_TRUE(env.List(directory.path())->empty());
    const auto file = env.Open(directory / "g", OpenMode::kCreate);
    const Result<void> allocated = (*file)->Allocate(2 * kMiB);
    EXPECT_FALSE(allocated);
    if (!allocated) {
      EXPECT_EQ(allocated.error().code(), StatusCode::kCapacity);
    }
    EXPECT_TRUE((*file)->Allocate(kMiB / 2)) << "what was reserved in vain is free again";
    EXPECT_LE(*env.FreeBytes(directory.path()), kMiB / 2);
    return true;
  });
  if (!ran) GTEST_SKIP() << "cannot mount a small tmpfs here";
}

TEST(PosixEnv, ReadOnlyDisksCanBeLockedButNotChanged) {
  const TestDirectory directory;
  const bool ran = InChild([&] {
    if (!MountSmallDisk(directory.path())) return false;
    Write(directory / "lock", {});
    Env& env = PosixEnv();
    if (mount(nullptr, directory.path().c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr) != 0)
      return false;
    const auto lock = env.Lock(directory / "lock", LockKind::kShared, LockWait::kTry);
    EXPECT_TRUE(lock && *lock != nullptr);
    EXPECT_EQ(ErrorOf(env.Lock(directory / "new", LockKind::kShared, LockWait::kTry)), EROFS);
    EXPECT_EQ(ErrorOf(PublishFile(env, directory / "f", Content(10))), EROFS);
    EXPECT_EQ(ErrorOf(CreateDirectories(env, directory / "d")), EROFS);
    EXPECT_EQ(ErrorOf(env.Remove(directory / "lock")), EROFS);
    return true;
  });
  if (!ran) GTEST_SKIP() << "cannot mount a small tmpfs here";
}

}  // namespace
}  // namespace hotplane
