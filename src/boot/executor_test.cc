// The executor on files of its own, without a store: every source path, every mix of page cache and
// disk, every fault.
#include "boot/executor.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <random>
#include <thread>

#include "base/fault_guard.h"
#include "base/format_text.h"
#include "base/memory.h"
#include "base/units.h"
#include "io/fault_env.h"
#include "io/mem_env.h"
#include "io/reader.h"
#include "io/test_directory.h"

namespace hotplane {
namespace {

constexpr uint64_t kDataOffset = 2 * kPageBytes;

// Files of seeded bytes with chunks of uneven length, opened, and memory for all of them.
struct Files {
  struct OneFile {
    std::string path;
    std::vector<std::byte> data;  // after kDataOffset
    std::vector<Chunk> chunks;
    std::vector<uint64_t> checksums;
    std::unique_ptr<File> file;
    std::unique_ptr<Mapping> mapping;
  };
  std::vector<OneFile> files;
  HugeBuffer memory;
  uint64_t bytes = 0;

  // `chunk_bytes_max` is cut down at random, so that few chunks start on a page; 0: none does.
  Files(Env& env, const std::string& root, size_t count, uint64_t file_bytes,
        uint32_t chunk_bytes_max) {
    std::mt19937 random(5);
    for (size_t f = 0; f < count; ++f) {
      OneFile& one = files.emplace_back();
      one.path = Text("{}/file{}", root, f);
      one.data.resize(file_bytes);
      for (uint64_t i = 0; i < file_bytes; ++i)
        one.data[i] = static_cast<std::byte>(i * 31 + i / 4093 + f * 7);
      for (uint64_t at = 0; at < file_bytes;) {
        uint32_t length = chunk_bytes_max - static_cast<uint32_t>(random() % 3 * 512);
        if (chunk_bytes_max == 0) length = 64 * kKiB + (at == 0 ? 512 : 0);
        length = static_cast<uint32_t>(std::min<uint64_t>(length, file_bytes - at));
        one.chunks.push_back({kDataOffset + at, length, 0, 0});
        one.checksums.push_back(Checksum64({one.data.data() + at, length}));
        at += length;
      }
      const auto writer = env.Open(one.path, OpenMode::kCreate).value();
      EXPECT_TRUE(WriteFully(*writer, 0, std::vector<std::byte>(kDataOffset)));
      EXPECT_TRUE(WriteFully(*writer, kDataOffset, one.data));
      EXPECT_TRUE(writer->Sync());
      bytes += file_bytes;
    }
    memory = HugeBuffer::Allocate(bytes).value();
  }

  Result<void> Open(Env& env, bool map) {
    for (OneFile& one : files) {
      one.mapping.reset();
      HP_ASSIGN(one.file, env.Open(one.path, OpenMode::kRead));
      if (!map) continue;
      HP_ASSIGN(one.mapping, one.file->Map(kDataOffset, one.data.size()));
    }
    std::fill(memory.data(), memory.data() + bytes, std::byte{0xee});
    return {};
  }

  // Leaves in the page cache all but the pieces of `piece_bytes` that `drop` names. By reading
  // those that stay: the kernel drops no part of a large folio.
  template <typename Drop>
  void DropPieces(Env& env, uint64_t piece_bytes, const Drop& drop) {
    std::vector<std::byte> piece(piece_bytes);
    for (size_t f = 0; f < files.size(); ++f) {
      const auto file = env.Open(files[f].path, OpenMode::kRead).value();
      files[f].mapping.reset();  // mapped pages are not dropped either
      file->SetReadAhead(false);
      file->DropCache(0, 0);
      const uint64_t file_bytes = files[f].data.size();
      for (uint64_t at = 0; at < file_bytes; at += piece_bytes) {
        if (drop(f, at / piece_bytes)) continue;
        const size_t count = std::min(piece_bytes, file_bytes - at);
        EXPECT_TRUE(ReadFully(*file, kDataOffset + at, std::span(piece).first(count)));
      }
    }
  }

  std::vector<Extent> Extents() const {
    std::vector<Extent> extents;
    std::byte* to = memory.data();
    for (const OneFile& one : files) {
      Extent extent;
      extent.file = one.file.get();
      extent.destination = to;
      extent.offset = kDataOffset;
      extent.bytes = one.data.size();
      extent.mapping = one.mapping.get();
      extent.chunks = one.chunks;
      extent.checksums = one.checksums;
      extents.push_back(extent);
      to += one.data.size();
    }
    return extents;
  }

  bool Landed() const {
    const std::byte* at = memory.data();
    for (const OneFile& one : files) {
      if (std::memcmp(at, one.data.data(), one.data.size()) != 0) return false;
      at += one.data.size();
    }
    return true;
  }
};

struct Outcome {
  Result<void> result;
  std::vector<ExtentSource> sources;
  std::vector<size_t> done;
  ExecutorCounts counts;
  std::string disk_path;
};

Outcome Execute(Env& env, Files& files, ExecutorOptions options, bool map, size_t workers = 2) {
  Outcome outcome;
  outcome.result = files.Open(env, map);
  if (!outcome.result) return outcome;
  WorkerPool pool(workers);
  std::mutex mutex;
  options.env = &env;
  options.pool = &pool;
  Executor executor(
      options, files.Extents(),
      {[&](size_t extent) {
         const std::lock_guard lock(mutex);
         outcome.done.push_back(extent);
       },
       [&](size_t extent, size_t chunk, uint64_t, std::span<std::byte>) {
         return Result<void>(Fail(Status::Data(Text("extent {} chunk {}", extent, chunk))));
       }});
  outcome.result = executor.Locate();
  if (outcome.result) outcome.result = executor.Run();
  for (size_t i = 0; i < files.files.size(); ++i) outcome.sources.push_back(executor.source(i));
  outcome.counts = executor.counts();
  outcome.disk_path = executor.disk_path();
  return outcome;
}

uint64_t ReadBytes(const FaultEnv& env) {
  uint64_t bytes = 0;
  for (const Operation& operation : env.Log())
    if (operation.kind == OperationKind::kRead)
      bytes += operation.done_bytes;
    else if (operation.kind == OperationKind::kPopulate)
      bytes += operation.bytes;
  return bytes;
}

// In memory

constexpr uint64_t kSmallFile = 13 * kMiB;
constexpr uint32_t kOddChunk = 256 * kKiB;

class ExecutorTest : public testing::Test {
 protected:
  ExecutorTest() : files_(memory_, "", 3, kSmallFile, kOddChunk) {}
  MemEnv memory_;
  Files files_;
};

// File 0 cached, file 1 not, every second 4 MiB of file 2.
bool DropMixed(size_t file, uint64_t piece) { return file == 1 || (file == 2 && piece % 2 == 1); }

TEST_F(ExecutorTest, EveryMixLandsTheSameBytesReadOnceEach) {
  InstallFaultGuard();
  for (const bool map : {false, true}) {
    for (const bool bypass : {false, true}) {
      for (const size_t workers : {1, 2, 5}) {
        for (const int mix : {0, 1, 2}) {
          FaultEnv watched(memory_);
          files_.DropPieces(memory_, 4 * kMiB, [&](size_t file, uint64_t piece) {
            return mix == 0 ? false : mix == 1 ? true : DropMixed(file, piece);
          });
          ExecutorOptions options;
          options.bypass_cache = bypass;
          const Outcome outcome = Execute(watched, files_, options, map, workers);
          ASSERT_TRUE(outcome.result.has_value()) << outcome.result.error().ToString();
          EXPECT_TRUE(files_.Landed());
          EXPECT_EQ(outcome.done.size(), 3u);
          EXPECT_EQ(outcome.counts.bytes_verified, files_.bytes);
          EXPECT_EQ(outcome.counts.bytes_from_cache + outcome.counts.bytes_from_disk, files_.bytes);
          EXPECT_EQ(ReadBytes(watched), files_.bytes);
          const ExtentSource disk =
              bypass ? ExtentSource::kDiskDirect : ExtentSource::kDiskBuffered;
          const std::vector<ExtentSource> expected =
              mix == 0 ? std::vector<ExtentSource>(3, ExtentSource::kPageCache)
              : mix == 1
                  ? std::vector<ExtentSource>(3, disk)
                  : std::vector<ExtentSource>{ExtentSource::kPageCache, disk, ExtentSource::kBoth};
          EXPECT_EQ(outcome.sources, expected);
          for (const Operation& operation : watched.Log()) {
            if (operation.kind != OperationKind::kRead || mix != 1) continue;
            EXPECT_EQ(operation.bypassed_cache, bypass);
          }
        }
      }
    }
  }
}

TEST_F(ExecutorTest, DirectReadsRefusedGoThroughThePageCacheAndSaySo) {
  memory_.set_direct_refused(true);
  files_.DropPieces(memory_, 4 * kMiB, [](size_t, uint64_t) { return true; });
  ExecutorOptions options;
  options.bypass_cache = true;
  const Outcome outcome = Execute(memory_, files_, options, false);
  ASSERT_TRUE(outcome.result.has_value());
  EXPECT_TRUE(files_.Landed());
  EXPECT_EQ(outcome.sources[0], ExtentSource::kDiskBuffered);
  EXPECT_NE(outcome.disk_path.find("refuses O_DIRECT"), std::string::npos) << outcome.disk_path;
}

TEST_F(ExecutorTest, AFaultAtAnyOperationServesNothingWrong) {
  InstallFaultGuard();
  // File 0 comes from the disk, file 1 from both.
  MemEnv memory;
  Files files(memory, "", 2, 5 * kMiB, kOddChunk);
  const auto drop = [](size_t file, uint64_t piece) { return file == 0 || piece == 1; };
  for (const bool bypass : {false, true}) {
    ExecutorOptions options;
    options.bypass_cache = bypass;
    FaultEnv counter(memory);
    files.DropPieces(memory, 4 * kMiB, drop);
    ASSERT_TRUE(Execute(counter, files, options, true, 1).result.has_value());
    const uint64_t operations = counter.operation_count();
    ASSERT_GT(operations, 10u);
    for (uint64_t n = 1; n <= operations; ++n) {
      const Fault faults[] = {
          {.action = FaultAction::kError, .first = n, .error = EIO},
          {.action = FaultAction::kError, .first = n, .count = 3, .error = EINTR},
          {.action = FaultAction::kError,
           .first = n,
           .kind = OperationKind::kRead,
           .error = EAGAIN},
          {.action = FaultAction::kShort, .first = n},
          {.action = FaultAction::kEndOfFile, .first = n},
          {.action = FaultAction::kCrash, .first = n},
      };
      for (const Fault& fault : faults) {
        files.DropPieces(memory, 4 * kMiB, drop);
        FaultEnv faulty(memory);
        faulty.Add(fault);
        const Outcome outcome = Execute(faulty, files, options, true, 1);
        const bool passes =
            fault.error == EINTR || fault.error == EAGAIN || fault.action == FaultAction::kShort;
        if (outcome.result) {
          EXPECT_TRUE(files.Landed()) << n;
        } else {
          EXPECT_FALSE(passes) << n << outcome.result.error().ToString();
          EXPECT_EQ(outcome.result.error().exit_code(),
                    fault.action == FaultAction::kEndOfFile ? 3 : 1)
              << outcome.result.error().ToString();
          EXPECT_FALSE(outcome.result.error().file().empty());
        }
      }
    }
  }
}

TEST_F(ExecutorTest, EagainForEverIsAnError) {
  files_.DropPieces(memory_, 4 * kMiB, DropMixed);
  FaultEnv faulty(memory_);
  faulty.Add(Fault{.action = FaultAction::kError,
                   .count = Fault::kForever,
                   .kind = OperationKind::kRead,
                   .error = EAGAIN});
  const Outcome outcome = Execute(faulty, files_, {}, false);
  ASSERT_FALSE(outcome.result.has_value());
  EXPECT_EQ(outcome.result.error().exit_code(), 1);
}

TEST_F(ExecutorTest, ABadChunkIsHandedToRepairByName) {
  for (const bool drop : {false, true}) {
    files_.DropPieces(memory_, 4 * kMiB, [&](size_t, uint64_t) { return drop; });
    memory_.CorruptByte("/file1", kDataOffset + kSmallFile - 1, std::byte{4});
    const Outcome outcome = Execute(memory_, files_, {}, true);
    memory_.CorruptByte("/file1", kDataOffset + kSmallFile - 1, std::byte{4});
    ASSERT_FALSE(outcome.result.has_value());
    EXPECT_EQ(outcome.result.error().what(),
              Text("extent 1 chunk {}", files_.files[1].chunks.size() - 1));
    EXPECT_EQ(std::count(outcome.done.begin(), outcome.done.end(), 1u), 0);
  }
}

TEST_F(ExecutorTest, CancelEndsTheRun) {
  for (const bool drop : {false, true}) {
    files_.DropPieces(memory_, 4 * kMiB, [&](size_t, uint64_t) { return drop; });
    CancelToken cancel;
    cancel.Cancel(SIGINT);
    ASSERT_TRUE(files_.Open(memory_, true).has_value());
    WorkerPool pool(2);
    ExecutorOptions options;
    options.env = &memory_;
    options.pool = &pool;
    Executor executor(options, files_.Extents(), {[](size_t) { FAIL(); }, {}});
    ASSERT_TRUE(executor.Locate().has_value());
    ExecutorOptions cancelled = options;
    cancelled.cancel = &cancel;
    Executor late(cancelled, files_.Extents(), {[](size_t) { FAIL(); }, {}});
    const Result<void> located = late.Locate();
    ASSERT_FALSE(located.has_value());
    EXPECT_EQ(located.error().exit_code(), 130);
  }
  // In the middle: one worker, cancelled by what the first whole file calls.
  for (const bool drop : {false, true}) {
    files_.DropPieces(memory_, 4 * kMiB, [&](size_t, uint64_t) { return drop; });
    CancelToken cancel;
    ASSERT_TRUE(files_.Open(memory_, true).has_value());
    WorkerPool pool(1);
    ExecutorOptions options;
    options.env = &memory_;
    options.pool = &pool;
    options.cancel = &cancel;
    size_t done_count = 0;
    Executor executor(options, files_.Extents(),
                      {[&](size_t) {
                         ++done_count;
                         cancel.Cancel(SIGTERM);
                       },
                       {}});
    ASSERT_TRUE(executor.Locate().has_value());
    const Result<void> result = executor.Run();
    ASSERT_FALSE(result.has_value());
    EXPECT_EQ(result.error().exit_code(), 143);
    EXPECT_EQ(done_count, 1u);
  }
}

// A device with its own memory, as a GPU: everything goes through a ring of few slots.
class RingDevice final : public LandingDevice {
 public:
  RingDevice(size_t slot_count, uint64_t slot_bytes)
      : memory_(HugeBuffer::Allocate(slot_count * slot_bytes).value()), slot_bytes_(slot_bytes) {
    for (size_t i = 0; i < slot_count; ++i) free_.push_back(memory_.data() + i * slot_bytes);
  }
  std::byte* Stage(std::byte*, uint64_t bytes) override {
    EXPECT_LE(bytes, slot_bytes_);
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return nullptr;
    std::byte* const slot = free_.back();
    free_.pop_back();
    return slot;
  }
  Result<void> Land(std::byte* staged, std::byte* destination, uint64_t bytes) override {
    std::copy(staged, staged + bytes, destination);
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(std::count(free_.begin(), free_.end(), staged), 0) << "landed twice";
    free_.push_back(staged);
    landed_bytes_ += bytes;
    return {};
  }
  Result<void> Wait() override { return {}; }
  uint64_t landed_bytes() const { return landed_bytes_; }

 private:
  HugeBuffer memory_;
  const uint64_t slot_bytes_;
  std::mutex mutex_;
  std::vector<std::byte*> free_;
  uint64_t landed_bytes_ = 0;
};

TEST_F(ExecutorTest, ADeviceWithItsOwnMemoryGetsEverythingThroughItsRing) {
  for (const size_t slots : {1, 2, 7}) {
    for (const bool bypass : {false, true}) {
      files_.DropPieces(memory_, 4 * kMiB, DropMixed);
      RingDevice ring(slots, kStagedBytesMax);
      ExecutorOptions options;
      options.bypass_cache = bypass;
      options.device = &ring;
      const Outcome outcome = Execute(memory_, files_, options, true);
      ASSERT_TRUE(outcome.result.has_value()) << outcome.result.error().ToString();
      EXPECT_TRUE(files_.Landed());
      EXPECT_EQ(ring.landed_bytes(), files_.bytes);
    }
  }
}

// A GPU as the executor sees it: copies wait in a queue until somebody asks for them, and what
// landed is hashed on the device alone.
class SlowDevice final : public LandingDevice {
 public:
  SlowDevice(size_t slot_count, uint64_t piece_bytes)
      : ring_(HugeBuffer::Allocate(slot_count * kStagedBytesMax).value()),
        piece_bytes_(piece_bytes) {
    for (size_t i = 0; i < slot_count; ++i) free_.push_back(ring_.data() + i * kStagedBytesMax);
  }
  std::byte* Stage(std::byte*, uint64_t bytes) override {
    EXPECT_LE(bytes, kStagedBytesMax);
    const std::lock_guard lock(mutex_);
    if (free_.empty()) LandOldest();
    if (free_.empty()) return nullptr;
    std::byte* const slot = free_.back();
    free_.pop_back();
    return slot;
  }
  Result<void> Land(std::byte* staged, std::byte* destination, uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    queue_.push_back({staged, destination, bytes});
    return {};
  }
  Result<void> Wait() override {
    const std::lock_guard lock(mutex_);
    while (!queue_.empty()) LandOldest();
    return {};
  }
  uint64_t piece_bytes() const override { return piece_bytes_; }
  bool verifies() const override { return true; }
  Result<std::vector<LandedMismatch>> Settle(const std::byte* destination,
                                             std::span<const LandedCheck> checks) override {
    HP_TRY(Wait());
    std::vector<LandedMismatch> mismatches;
    for (size_t i = 0; i < checks.size(); ++i) {
      uint64_t found = Checksum64({destination + checks[i].offset, checks[i].bytes});
      if (broken_) ++found;
      if (found != checks[i].checksum) mismatches.push_back({i, found});
    }
    return mismatches;
  }
  bool AllCameBack(size_t slot_count) const { return queue_.empty() && free_.size() == slot_count; }
  void Break() { broken_ = true; }

 private:
  struct Copy {
    std::byte* staged;
    std::byte* destination;
    uint64_t bytes;
  };
  // REQUIRES mutex_.
  void LandOldest() {
    if (queue_.empty()) return;
    const Copy copy = queue_.front();
    queue_.erase(queue_.begin());
    std::copy(copy.staged, copy.staged + copy.bytes, copy.destination);
    // What is read from the slot after this is not what landed.
    std::fill(copy.staged, copy.staged + copy.bytes, std::byte{0xdd});
    free_.push_back(copy.staged);
  }

  HugeBuffer ring_;
  const uint64_t piece_bytes_;
  bool broken_ = false;
  std::mutex mutex_;
  std::vector<std::byte*> free_;
  std::vector<Copy> queue_;
};

TEST_F(ExecutorTest, ADeviceThatVerifiesGetsEveryByteAndIsAskedOnce) {
  InstallFaultGuard();
  for (const uint64_t piece_bytes : {kMiB, 4 * kMiB, kStagedBytesMax}) {
    for (const size_t workers : {1, 3}) {
      for (const bool map : {false, true}) {
        for (const bool verify : {false, true}) {
          files_.DropPieces(memory_, 4 * kMiB, DropMixed);
          SlowDevice device(2, piece_bytes);
          ExecutorOptions options;
          options.device = &device;
          options.verify = verify;
          Outcome outcome = Execute(memory_, files_, options, map, workers);
          ASSERT_TRUE(outcome.result.has_value()) << outcome.result.error().ToString();
          EXPECT_TRUE(files_.Landed());
          EXPECT_TRUE(device.AllCameBack(2));
          std::sort(outcome.done.begin(), outcome.done.end());
          EXPECT_EQ(outcome.done, (std::vector<size_t>{0, 1, 2}));
          EXPECT_EQ(outcome.counts.bytes_verified, verify ? files_.bytes : 0);
        }
      }
    }
  }
}

// Boots one damaged file onto a device; `repair` puts the right bytes in its staged memory.
Result<void> LandDamaged(MemEnv& memory, Files& files, SlowDevice& device, bool repair) {
  const uint64_t place = kDataOffset + kSmallFile / 2;
  memory.CorruptByte("/file1", place, std::byte{4});
  const Result<void> opened = files.Open(memory, true);
  WorkerPool pool(2);
  ExecutorOptions options;
  options.env = &memory;
  options.pool = &pool;
  options.device = &device;
  const std::vector<Extent> extents = files.Extents();
  Executor executor(options, extents,
                    {[](size_t) {},
                     [&](size_t extent, size_t chunk, uint64_t, std::span<std::byte> staged) {
                       const Chunk& bad = extents[extent].chunks[chunk];
                       EXPECT_LE(bad.offset, place);
                       EXPECT_LT(place, bad.offset + bad.bytes);
                       EXPECT_EQ(staged.size(), bad.bytes);
                       if (!repair) return Result<void>(Fail(Status::Data("beyond repair")));
                       std::copy_n(files.files[extent].data.begin() +
                                       static_cast<ptrdiff_t>(bad.offset - kDataOffset),
                                   bad.bytes, staged.begin());
                       return Result<void>();
                     }});
  Result<void> result = opened;
  if (result) result = executor.Locate();
  if (result) result = executor.Run();
  memory.CorruptByte("/file1", place, std::byte{4});
  return result;
}

TEST_F(ExecutorTest, WhatADeviceFindsWrongIsReadAgainAndComparedThere) {
  InstallFaultGuard();
  SlowDevice device(2, 4 * kMiB);
  const Result<void> repaired = LandDamaged(memory_, files_, device, true);
  ASSERT_TRUE(repaired.has_value()) << repaired.error().ToString();
  EXPECT_TRUE(files_.Landed());
  EXPECT_TRUE(device.AllCameBack(2));
  const Result<void> refused = LandDamaged(memory_, files_, device, false);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().what(), "beyond repair");
}

TEST_F(ExecutorTest, ADeviceThatSpoilsRightBytesIsNamed) {
  InstallFaultGuard();
  SlowDevice device(2, 4 * kMiB);
  device.Break();
  const Result<void> result = [&] {
    const Result<void> opened = files_.Open(memory_, true);
    EXPECT_TRUE(opened.has_value());
    WorkerPool pool(2);
    ExecutorOptions options;
    options.env = &memory_;
    options.pool = &pool;
    options.device = &device;
    Executor executor(
        options, files_.Extents(),
        {[](size_t) { ADD_FAILURE() << "published"; },
         [](size_t, size_t, uint64_t, std::span<std::byte>) { return Result<void>(); }});
    EXPECT_TRUE(executor.Locate().has_value());
    return executor.Run();
  }();
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().exit_code(), 1);
  EXPECT_NE(result.error().what().find("wrong on the device"), std::string::npos);
}

// Chunks that end on no page but the file's last: units are cut between pages then, and stay short.
TEST(ExecutorUnits, WhereNoChunkEndsOnAPageTheyStayShort) {
  MemEnv memory;
  Files files(memory, "", 1, 80 * kMiB, 0);
  for (const bool bypass : {false, true}) {
    files.DropPieces(memory, 4 * kMiB, DropMixed);
    RingDevice ring(3, kStagedBytesMax);
    ExecutorOptions options;
    options.bypass_cache = bypass;
    options.device = &ring;
    const Outcome outcome = Execute(memory, files, options, false);
    ASSERT_TRUE(outcome.result.has_value()) << outcome.result.error().ToString();
    EXPECT_TRUE(files.Landed());
  }
}

// On the real file system

class ExecutorPosix : public testing::TestWithParam<bool> {  // without io_uring
 protected:
  ExecutorPosix() : files_(PosixEnv(), directory_.path(), 2, 40 * kMiB, kOddChunk) {
    InstallFaultGuard();
    if (GetParam()) setenv("HOTPLANE_NO_IO_URING", "1", 1);
  }
  ~ExecutorPosix() override { unsetenv("HOTPLANE_NO_IO_URING"); }

  // Where the system cannot drop or tell, there is nothing to see here.
  bool CanDrop() {
    files_.DropPieces(PosixEnv(), 4 * kMiB, [](size_t, uint64_t) { return true; });
    const auto file = PosixEnv().Open(files_.files[0].path, OpenMode::kRead).value();
    const Result<uint64_t> cached = file->CachedBytes(kDataOffset, files_.files[0].data.size());
    return cached && *cached < kMiB;
  }

  TestDirectory directory_;
  Files files_;
};

TEST_P(ExecutorPosix, EveryMixLandsTheSameBytes) {
  if (!CanDrop()) GTEST_SKIP() << "the page cache cannot be dropped here";
  if (!GetParam() && std::string(PosixEnv().NewReader({}).value()->name()) != "io_uring")
    GTEST_SKIP() << "io_uring is refused: " << PosixEnv().NewReader({}).value()->reason();
  for (const bool bypass : {false, true}) {
    for (const bool half : {false, true}) {
      files_.DropPieces(PosixEnv(), 4 * kMiB,
                        [&](size_t, uint64_t piece) { return !half || piece % 2 == 1; });
      FaultEnv watched(PosixEnv());
      ExecutorOptions options;
      options.bypass_cache = bypass;
      const Outcome outcome = Execute(watched, files_, options, half);
      ASSERT_TRUE(outcome.result.has_value()) << outcome.result.error().ToString();
      EXPECT_TRUE(files_.Landed());
      EXPECT_EQ(ReadBytes(watched), files_.bytes);
      // Mapped extents are filled by the page cache, unless they are to pass by it.
      const bool fills = half && !bypass;
      EXPECT_EQ(outcome.disk_path.find(fills        ? "into the page cache"
                                       : GetParam() ? "pread threads"
                                                    : "io_uring"),
                0)
          << outcome.disk_path;
      EXPECT_EQ(outcome.sources[0] == ExtentSource::kBoth, half);
      const auto file = PosixEnv().Open(files_.files[0].path, OpenMode::kRead).value();
      const uint64_t cached = file->CachedBytes(kDataOffset, 40 * kMiB).value();
      if (outcome.disk_path.find("refuses") != std::string::npos) continue;
      if (!bypass) {
        EXPECT_GT(cached, 39 * kMiB) << "the next boot is not warm";
      } else if (!half) {
        EXPECT_LT(cached, kMiB) << "O_DIRECT went through the page cache";
      }
    }
  }
}

TEST_P(ExecutorPosix, TruncationUnderTheReaderIsAStatus) {
  if (!CanDrop()) GTEST_SKIP() << "the page cache cannot be dropped here";
  for (const bool bypass : {false, true}) {
    for (const bool drop : {false, true}) {
      files_.DropPieces(PosixEnv(), 4 * kMiB, [&](size_t, uint64_t) { return drop; });
      ASSERT_TRUE(files_.Open(PosixEnv(), true).has_value());
      WorkerPool pool(2);
      ExecutorOptions options;
      options.env = &PosixEnv();
      options.pool = &pool;
      options.bypass_cache = bypass;
      Executor executor(options, files_.Extents(),
                        {[](size_t) {},
                         [](size_t, size_t, uint64_t, std::span<std::byte>) {
                           return Result<void>(Fail(Status::Data("a chunk")));
                         }});
      ASSERT_TRUE(executor.Locate().has_value());
      const std::string& victim = files_.files[1].path;
      std::filesystem::resize_file(victim, kDataOffset + 21 * kMiB + 77);
      const Result<void> result = executor.Run();
      ASSERT_FALSE(result.has_value());
      EXPECT_TRUE(result.error().exit_code() == 3 || result.error().exit_code() == 1)
          << result.error().ToString();
      std::filesystem::remove(victim);
      const auto writer = PosixEnv().Open(victim, OpenMode::kCreate).value();
      ASSERT_TRUE(WriteFully(*writer, kDataOffset, files_.files[1].data));
      ASSERT_TRUE(writer->Sync());
    }
  }
}

TEST_P(ExecutorPosix, CancelledWithReadsInFlightLeavesTheMemoryAlone) {
  if (!CanDrop()) GTEST_SKIP() << "the page cache cannot be dropped here";
  ASSERT_TRUE(files_.Open(PosixEnv(), false).has_value());
  CancelToken cancel;
  WorkerPool pool(2);
  ExecutorOptions options;
  options.env = &PosixEnv();
  options.pool = &pool;
  options.bypass_cache = true;
  options.cancel = &cancel;
  Executor executor(options, files_.Extents(), {[](size_t) {}, {}});
  ASSERT_TRUE(executor.Locate().has_value());
  std::thread canceller([&cancel] { cancel.Cancel(SIGINT); });
  const Result<void> result = executor.Run();
  canceller.join();
  EXPECT_TRUE(result.has_value() || result.error().exit_code() == 130);
  const std::vector<std::byte> after(files_.memory.data(), files_.memory.data() + files_.bytes);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(std::equal(after.begin(), after.end(), files_.memory.data()));
}

std::string ReaderName(const testing::TestParamInfo<bool>& info) {
  return info.param ? "PreadThreads" : "IoUring";
}

INSTANTIATE_TEST_SUITE_P(Readers, ExecutorPosix, testing::Bool(), ReaderName);

}  // namespace
}  // namespace hotplane
