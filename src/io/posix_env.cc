// PosixEnv: the process's real file system.
#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "base/format_text.h"
#include "base/units.h"
#include "io/output_place.h"
#include "io/reader.h"

namespace hotplane {
namespace {

// Linux 5.14; the C library's headers may be older than the kernel.
constexpr int kMadvPopulateRead = 22;
// Linux 6.5, the same number on every architecture.
constexpr long kCachestatSyscall = 451;

struct CachestatRange {
  uint64_t offset;
  uint64_t bytes;  // 0: to the end
};
struct CachestatCounts {
  uint64_t cached;
  uint64_t dirty;
  uint64_t writeback;
  uint64_t evicted;
  uint64_t recently_evicted;
};

template <typename Call>
auto RetryOnSignal(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

// tmpfs: a file there is in the page cache, or in swap as other memory is.
bool IsMemory(int fd) {
  struct statfs system;
  return fstatfs(fd, &system) == 0 && system.f_type == TMPFS_MAGIC;
}

Status ErrnoStatus(const char* what, const std::string& path) {
  const int error = errno;
  return Status::FromErrno(error, what).File(path).Advice(PermissionAdvice(error));
}

Status NotRegular(const std::string& path, const char* found) {
  return Status::Data("cannot open the file").File(path).Expected("a regular file").Found(found);
}

// Closes on destruction. Mappings share it with their file, which may be closed before them.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_;
};

FileStat FromStat(const struct stat& stat) {
  constexpr int64_t kNanosecondsPerSecond = 1'000'000'000;
  FileStat result{};
  result.type = S_ISREG(stat.st_mode)   ? FileType::kRegular
                : S_ISDIR(stat.st_mode) ? FileType::kDirectory
                                        : FileType::kOther;
  result.bytes = static_cast<uint64_t>(stat.st_size);
  result.device = stat.st_dev;
  result.inode = stat.st_ino;
  result.modified_ns = stat.st_mtim.tv_sec * kNanosecondsPerSecond + stat.st_mtim.tv_nsec;
  return result;
}

Result<FileStat> StatDescriptor(int fd, const std::string& path) {
  struct stat stat;
  if (fstat(fd, &stat) != 0) return Fail(ErrnoStatus("cannot stat", path));
  return FromStat(stat);
}

Result<void> CheckNotTruncated(int fd, const std::string& path, uint64_t end) {
  HP_ASSIGN(const FileStat stat, StatDescriptor(fd, path));
  if (stat.bytes >= end) return {};
  return Fail(Status::Data("the file ends early")
                  .File(path)
                  .At(stat.bytes)
                  .Expected(Text("at least {} bytes", end))
                  .Found(Text("{} bytes", stat.bytes)));
}

// Brings [begin, end) into the page cache and names the first page that cannot be read.
Result<void> ReadEveryPage(int fd, const std::string& path, uint64_t begin, uint64_t end) {
  for (uint64_t offset = begin; offset < end; offset = RoundUp(offset + 1, kPageBytes)) {
    char byte;
    const ssize_t count =
        RetryOnSignal([&] { return pread(fd, &byte, 1, static_cast<off_t>(offset)); });
    if (count < 0) return Fail(ErrnoStatus("cannot read", path).At(offset));
    if (count == 0) HP_TRY(CheckNotTruncated(fd, path, end));
  }
  return {};
}

class PosixMapping final : public Mapping {
 public:
  // `address` is where the page that holds file offset `offset` is mapped.
  PosixMapping(std::shared_ptr<Descriptor> descriptor, std::string path, std::byte* address,
               uint64_t offset, uint64_t bytes)
      : descriptor_(std::move(descriptor)),
        path_(std::move(path)),
        address_(address),
        lead_bytes_(offset % kPageBytes),
        offset_(offset),
        bytes_(bytes) {}
  ~PosixMapping() override {
    if (address_ != nullptr) munmap(address_, lead_bytes_ + bytes_);
  }

  std::span<const std::byte> bytes() const override { return {address_ + lead_bytes_, bytes_}; }

  Result<void> Populate(uint64_t offset, uint64_t bytes) override {
    if (bytes == 0) return {};
    if (offset > bytes_ || bytes > bytes_ - offset)
      return Fail(Status::FromErrno(EINVAL, "cannot populate beyond the mapping")
                      .File(path_)
                      .At(offset_ + offset));
    const uint64_t begin = offset_ + offset;
    std::byte* first = address_ + (lead_bytes_ + offset) / kPageBytes * kPageBytes;
    std::byte* last = address_ + lead_bytes_ + offset + bytes;
    const int populated = RetryOnSignal(
        [&] { return madvise(first, static_cast<size_t>(last - first), kMadvPopulateRead); });
    const int error = populated == 0 ? 0 : errno;
    // A file cut inside its last page populates, and reads as zeros from the cut on.
    HP_TRY(CheckNotTruncated(descriptor_->get(), path_, begin + bytes));
    if (error == 0) return {};
    HP_TRY(ReadEveryPage(descriptor_->get(), path_, begin, begin + bytes));
    // EINVAL: a kernel without the advice, for which reading the pages is all there is. Otherwise
    // mapping failed where reading does not; EFAULT stands for a page fault that ended in an error.
    if (error == EINVAL) return {};
    return Fail(Status::FromErrno(error == EFAULT ? EIO : error, "cannot populate the mapping")
                    .File(path_)
                    .At(begin));
  }

  DroppedRange Drop(uint64_t offset, uint64_t bytes) override {
    // A large folio is dropped whole or not at all.
    const uint64_t begin = (offset_ + offset) / kHugePageBytes * kHugePageBytes;
    const uint64_t end = RoundUp(offset_ + offset + bytes, kHugePageBytes);
    const uint64_t first = std::max(begin, offset_ - lead_bytes_);
    const uint64_t last = std::min(end, offset_ + bytes_);
    (void)madvise(address_ + (first - (offset_ - lead_bytes_)), last - first, MADV_DONTNEED);
    (void)posix_fadvise(descriptor_->get(), static_cast<off_t>(begin),
                        static_cast<off_t>(end - begin), POSIX_FADV_DONTNEED);
    return {std::max(first, offset_) - offset_, last - offset_};
  }

 private:
  const std::shared_ptr<Descriptor> descriptor_;
  const std::string path_;
  std::byte* const address_;
  const uint64_t lead_bytes_;
  const uint64_t offset_;
  const uint64_t bytes_;
};

// mincore reports every page as resident to who could not write the file; so the answer counts only
// when this process could.
Result<void> CheckMincoreIsTrue(int fd, const std::string& path) {
  struct stat stat;
  if (fstat(fd, &stat) != 0) return Fail(ErrnoStatus("cannot stat", path));
  const uid_t user = geteuid();
  if (user == 0 || user == stat.st_uid) return {};
  if (faccessat(AT_FDCWD, Text("/proc/self/fd/{}", fd).c_str(), W_OK, AT_EACCESS) == 0) return {};
  return Fail(Status::FromErrno(EPERM, "cannot tell what is in the page cache").File(path));
}

Result<uint64_t> CountByMincore(int fd, const std::string& path, uint64_t begin, uint64_t end) {
  HP_TRY(CheckMincoreIsTrue(fd, path));
  constexpr uint64_t kWindowBytes = kGiB;  // its answer takes 256 KiB
  std::vector<unsigned char> resident(kWindowBytes / kPageBytes);
  uint64_t cached = 0;
  for (uint64_t at = begin / kPageBytes * kPageBytes; at < end; at += kWindowBytes) {
    const uint64_t bytes = std::min(kWindowBytes, end - at);
    void* const address = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(at));
    if (address == MAP_FAILED) return Fail(ErrnoStatus("cannot map", path).At(at));
    const int failed = mincore(address, bytes, resident.data());
    const int error = errno;
    munmap(address, bytes);
    if (failed != 0)
      return Fail(Status::FromErrno(error, "cannot tell what is in the page cache").File(path));
    for (uint64_t page = at; page < at + bytes; page += kPageBytes) {
      if ((resident[(page - at) / kPageBytes] & 1) == 0) continue;
      cached += std::min(page + kPageBytes, end) - std::max(page, begin);
    }
  }
  return cached;
}

// Since Linux 6.16 ext4, XFS and btrfs all fill the page cache with large folios, both where reads
// run ahead and where mappings advised to huge pages are populated. WILLNEED fills it with single
// pages: from the same disk 1.0 GB/s instead of 2.6, and the next boot maps these pages at 11 GB/s
// instead of hundreds. Older kernels have single pages anyway, and without the hint too few
// requests at the disk.
bool KernelHasLargeFolios() {
  static const bool has = [] {
    utsname name{};
    unsigned major = 0;
    unsigned minor = 0;
    if (uname(&name) != 0 || std::sscanf(name.release, "%u.%u", &major, &minor) != 2) return false;
    return major > 6 || (major == 6 && minor >= 16);
  }();
  return has;
}

bool ReadsLargeFolios(int fd) {
  struct statfs stat;
  if (!KernelHasLargeFolios() || fstatfs(fd, &stat) != 0) return false;
  const auto type = static_cast<uint64_t>(stat.f_type);
  return type == EXT4_SUPER_MAGIC || type == XFS_SUPER_MAGIC || type == BTRFS_SUPER_MAGIC;
}

class PosixFile final : public File {
 public:
  PosixFile(std::string path, std::shared_ptr<Descriptor> descriptor)
      : File(std::move(path)), descriptor_(std::move(descriptor)) {}

  IoCount ReadSome(uint64_t offset, std::span<std::byte> destination) override {
    const ssize_t count =
        pread(fd(), destination.data(), destination.size(), static_cast<off_t>(offset));
    return count < 0 ? IoCount{0, errno} : IoCount{static_cast<size_t>(count), 0};
  }

  IoCount WriteSome(uint64_t offset, std::span<const std::byte> source) override {
    const ssize_t count = pwrite(fd(), source.data(), source.size(), static_cast<off_t>(offset));
    return count < 0 ? IoCount{0, errno} : IoCount{static_cast<size_t>(count), 0};
  }

  Result<void> Sync() override {
    if (RetryOnSignal([this] { return fsync(fd()); }) != 0)
      return Fail(ErrnoStatus("cannot sync", path()));
    return {};
  }

  Result<void> Allocate(uint64_t bytes) override {
    if (bytes == 0) return {};
    const off_t size = static_cast<off_t>(bytes);
    if (RetryOnSignal([&] { return fallocate(fd(), 0, 0, size); }) == 0) return {};
    if (errno == EOPNOTSUPP) {
      HP_ASSIGN(const FileStat stat, Stat());
      if (stat.bytes >= bytes || RetryOnSignal([&] { return ftruncate(fd(), size); }) == 0)
        return {};
    }
    return Fail(ErrnoStatus("cannot reserve space", path()).Expected(FormatBytes(bytes)));
  }

  Result<FileStat> Stat() override { return StatDescriptor(fd(), path()); }

  Result<std::unique_ptr<Mapping>> Map(uint64_t offset, uint64_t bytes) override {
    const uint64_t end = offset + bytes < offset ? UINT64_MAX : offset + bytes;
    HP_TRY(CheckNotTruncated(fd(), path(), end));
    if (bytes == 0)
      return std::make_unique<PosixMapping>(descriptor_, path(), nullptr, 0, uint64_t{0});
    const uint64_t lead_bytes = offset % kPageBytes;
    void* const address = mmap(nullptr, lead_bytes + bytes, PROT_READ, MAP_SHARED, fd(),
                               static_cast<off_t>(offset - lead_bytes));
    if (address == MAP_FAILED) return Fail(ErrnoStatus("cannot map", path()).At(offset));
    // Advice only: where files can have huge pages, populating reads and maps 2 MiB at a time.
    (void)madvise(address, lead_bytes + bytes, MADV_HUGEPAGE);
    return std::make_unique<PosixMapping>(descriptor_, path(), static_cast<std::byte*>(address),
                                          offset, bytes);
  }

  void WillNeed(uint64_t offset, uint64_t bytes) override {
    if (ReadsLargeFolios(fd())) return;
    (void)posix_fadvise(fd(), static_cast<off_t>(offset), static_cast<off_t>(bytes),
                        POSIX_FADV_WILLNEED);
  }

  void SetReadAhead(bool on) override {
    (void)posix_fadvise(fd(), 0, 0, on ? POSIX_FADV_NORMAL : POSIX_FADV_RANDOM);
  }

  void DropCache(uint64_t offset, uint64_t bytes) override {
    (void)posix_fadvise(fd(), static_cast<off_t>(offset), static_cast<off_t>(bytes),
                        POSIX_FADV_DONTNEED);
  }

  Result<uint64_t> CachedBytes(uint64_t offset, uint64_t bytes) override {
    HP_ASSIGN(const FileStat stat, Stat());
    const uint64_t rest = stat.bytes - std::min(stat.bytes, offset);
    const uint64_t range_bytes = bytes == 0 ? rest : std::min(bytes, rest);
    if (range_bytes == 0) return uint64_t{0};
    // Counting the small pages of a file of 74 GiB would take a quarter of a second.
    if (IsMemory(fd())) return range_bytes;
    CachestatRange range{offset, range_bytes};
    CachestatCounts counts{};
    if (syscall(kCachestatSyscall, fd(), &range, &counts, 0U) == 0)
      return std::min(counts.cached * kPageBytes, range_bytes);
    return CountByMincore(fd(), path(), offset, offset + range_bytes);
  }

  int descriptor() const override { return fd(); }

 private:
  int fd() const { return descriptor_->get(); }

  const std::shared_ptr<Descriptor> descriptor_;
};

// flock belongs to the open file description, so closing the descriptor releases it.
class PosixLock final : public FileLock {
 public:
  explicit PosixLock(std::unique_ptr<Descriptor> descriptor) : descriptor_(std::move(descriptor)) {}

 private:
  const std::unique_ptr<Descriptor> descriptor_;
};

// Read-only stores and stores of other users can be locked as well: flock needs no write access.
// The first error is the telling one when the file cannot be opened either way.
Result<std::unique_ptr<Descriptor>> OpenLockFile(const std::string& path) {
  const auto open_with = [&path](int flags) {
    return std::make_unique<Descriptor>(
        RetryOnSignal([&] { return open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, 0666); }));
  };
  std::unique_ptr<Descriptor> descriptor = open_with(O_RDWR | O_CREAT);
  const int first_error = errno;
  if (!descriptor->valid()) descriptor = open_with(O_RDONLY);
  if (!descriptor->valid())
    return Fail(Status::FromErrno(first_error, "cannot open the lock file")
                    .File(path)
                    .Advice(PermissionAdvice(first_error)));
  return descriptor;
}

// False when the locked file was removed or replaced while this process waited for it: holding it
// would exclude nobody.
bool StillNames(const std::string& path, int fd) {
  struct stat locked;
  struct stat named;
  return fstat(fd, &locked) == 0 && stat(path.c_str(), &named) == 0 &&
         locked.st_dev == named.st_dev && locked.st_ino == named.st_ino;
}

class PosixEnvironment final : public Env {
 public:
  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode) override {
    // O_NONBLOCK: a FIFO in a file's place must not hang us in open; regular files ignore it.
    int flags = O_CLOEXEC | O_NONBLOCK;
    switch (mode) {
      case OpenMode::kRead: flags |= O_RDONLY; break;
      case OpenMode::kReadDirect: flags |= O_RDONLY | O_DIRECT; break;
      case OpenMode::kCreate: flags |= O_RDWR | O_CREAT | O_EXCL; break;
      case OpenMode::kInvalid:
        return Fail(Status::FromErrno(EINVAL, "cannot open the file").File(path));
    }
    auto descriptor = std::make_shared<Descriptor>(
        RetryOnSignal([&] { return open(path.c_str(), flags, 0666); }));
    if (!descriptor->valid() && errno == ENXIO) return Fail(NotRegular(path, "a socket"));
    if (!descriptor->valid() && errno == ELOOP && mode != OpenMode::kCreate)
      return Fail(NotRegular(path, "symbolic links that lead round in a circle"));
    if (!descriptor->valid())
      return Fail(ErrnoStatus(
          mode == OpenMode::kCreate ? "cannot create the file" : "cannot open the file", path));
    HP_ASSIGN(const FileStat stat, StatDescriptor(descriptor->get(), path));
    // A directory opens for reading, and only refuses the first read.
    if (stat.type == FileType::kDirectory) return Fail(NotRegular(path, "a directory"));
    if (stat.type != FileType::kRegular) return Fail(NotRegular(path, "a FIFO, socket or device"));
    return std::make_unique<PosixFile>(path, std::move(descriptor));
  }

  Result<FileStat> Stat(const std::string& path) override {
    struct stat result;
    if (stat(path.c_str(), &result) == 0) return FromStat(result);
    if (errno == ENOENT || errno == ENOTDIR) return FileStat{};
    if (errno == ELOOP) {
      FileStat circle{};
      circle.type = FileType::kOther;
      return circle;
    }
    return Fail(ErrnoStatus("cannot stat", path));
  }

  Result<FileStat> StatLink(const std::string& path) override {
    struct stat result;
    if (lstat(path.c_str(), &result) == 0) return FromStat(result);
    if (errno == ENOENT || errno == ENOTDIR) return FileStat{};
    return Fail(ErrnoStatus("cannot stat", path));
  }

  Result<std::vector<std::string>> List(const std::string& directory) override {
    const auto close_directory = [](DIR* handle) { closedir(handle); };
    const std::unique_ptr<DIR, decltype(close_directory)> handle(opendir(directory.c_str()),
                                                                 close_directory);
    if (handle == nullptr) return Fail(ErrnoStatus("cannot list the directory", directory));
    std::vector<std::string> names;
    for (;;) {
      errno = 0;
      const dirent* const entry = readdir(handle.get());
      if (entry == nullptr) break;
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    if (errno != 0) return Fail(ErrnoStatus("cannot list the directory", directory));
    std::sort(names.begin(), names.end());
    return names;
  }

  Result<void> CreateDirectory(const std::string& path) override {
    return Check(mkdir(path.c_str(), 0777), "cannot create the directory", path);
  }

  Result<void> Rename(const std::string& from, const std::string& to) override {
    if (rename(from.c_str(), to.c_str()) == 0) return {};
    return Fail(ErrnoStatus("cannot rename", from).Expected(Text("a file named {}", to)));
  }

  Result<void> Remove(const std::string& path) override {
    return Check(unlink(path.c_str()), "cannot remove the file", path);
  }

  Result<void> RemoveDirectory(const std::string& path) override {
    return Check(rmdir(path.c_str()), "cannot remove the directory", path);
  }

  Result<void> SyncDirectory(const std::string& path) override {
    const Descriptor descriptor(
        RetryOnSignal([&] { return open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
    if (!descriptor.valid()) return Fail(ErrnoStatus("cannot open the directory", path));
    if (RetryOnSignal([&] { return fsync(descriptor.get()); }) == 0) return {};
    // Some network and user-space file systems have no such call for directories, and order their
    // own metadata.
    if (errno == EINVAL) return {};
    return Fail(ErrnoStatus("cannot sync the directory", path));
  }

  bool MayCreateIn(const std::string& directory) override {
    return faccessat(AT_FDCWD, directory.c_str(), W_OK | X_OK, AT_EACCESS) == 0 || errno == ENOENT;
  }

  Result<uint64_t> FreeBytes(const std::string& path) override {
    struct statvfs stat;
    if (RetryOnSignal([&] { return statvfs(path.c_str(), &stat); }) != 0)
      return Fail(ErrnoStatus("cannot tell the free space", path));
    return uint64_t{stat.f_bavail} * uint64_t{stat.f_frsize};
  }

  Result<std::unique_ptr<FileLock>> Lock(const std::string& path, LockKind kind,
                                         LockWait wait) override {
    const int operation =
        (kind == LockKind::kShared ? LOCK_SH : LOCK_EX) | (wait == LockWait::kTry ? LOCK_NB : 0);
    // Some user-space file systems give a file another inode number at every look.
    constexpr int kAttemptsMax = 16;
    for (int attempt = 1;; ++attempt) {
      HP_ASSIGN(std::unique_ptr<Descriptor> descriptor, OpenLockFile(path));
      if (RetryOnSignal([&] { return flock(descriptor->get(), operation); }) != 0) {
        if (errno == EWOULDBLOCK) return std::unique_ptr<FileLock>();
        return Fail(ErrnoStatus("cannot lock", path));
      }
      if (StillNames(path, descriptor->get()) || attempt == kAttemptsMax)
        return std::make_unique<PosixLock>(std::move(descriptor));
    }
  }

  Result<std::unique_ptr<AsyncReader>> NewReader(const ReaderOptions& options) override {
    if (std::getenv("HOTPLANE_NO_IO_URING") != nullptr)
      return NewPreadReader(options, "HOTPLANE_NO_IO_URING is set");
    Result<std::unique_ptr<AsyncReader>> reader = NewUringReader(options);
    if (reader) return reader;
    const Status& refusal = reader.error();
    return NewPreadReader(options, Text("{}: {}", refusal.what(), refusal.found()));
  }

 private:
  static Result<void> Check(int result, const char* what, const std::string& path) {
    if (result != 0) return Fail(ErrnoStatus(what, path));
    return {};
  }
};

}  // namespace

Env& PosixEnv() {
  // Never destroyed: objects that live to the end of the process may still use it.
  static Env* const env = new PosixEnvironment;
  return *env;
}

}  // namespace hotplane
