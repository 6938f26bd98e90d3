// What the workers and the disk driver of one executor run share. Private to the executor.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>

#include "boot/executor.h"
#include "io/reader.h"

namespace hotplane {

// What is landed and verified at a time: whole chunks, about this many bytes. Large enough that a
// page-table populate call (about 20 us) is under 5% of it, small enough that the last one is soon
// done.
inline constexpr uint64_t kUnitBytes = 4 * 1024 * 1024;
// What the disk is asked for at a time. Smaller requests cost more of them per byte, larger ones
// are cut by the block layer anyway.
inline constexpr uint64_t kRequestBytes = 1024 * 1024;
static_assert(kUnitBytes % kRequestBytes == 0);

struct Unit {
  size_t extent = 0;
  size_t first_chunk = 0;  // of the extent
  size_t end_chunk = 0;
  uint64_t offset = 0;  // in the file
  uint64_t bytes = 0;
  bool from_disk = false;
  std::byte* staged = nullptr;  // of disk units, while they are on their way
  uint64_t requests_left = 0;
};

struct Executor::State {
  ExecutorOptions options;
  std::vector<Extent> extents;
  Callbacks callbacks;
  std::vector<ExtentSource> sources;
  std::vector<Unit> units;
  std::vector<size_t> cache_units;  // indexes, in order
  std::vector<size_t> disk_units;
  std::string disk_path;
  std::unique_ptr<std::atomic<uint64_t>[]> units_left;  // by extent

  std::atomic<uint64_t> bytes_from_cache{0};
  std::atomic<uint64_t> bytes_from_disk{0};
  std::atomic<uint64_t> bytes_verified{0};

  std::mutex mutex;  // guards what follows
  std::condition_variable wake;
  std::deque<size_t> landed_units;  // from the disk, to be verified
  size_t next_cache_unit = 0;       // index into cache_units
  size_t units_done = 0;
  std::optional<Status> failure;
  size_t failed_unit = 0;  // the lowest; its failure is the one that is told

  void Fail(size_t unit, Status status);
  bool Failed();
  // Blocks until there is a unit to work on; none: the run is over.
  std::optional<size_t> NextUnit();

  void ListUnits(size_t extent);
  void Locate(size_t extent);
  // REQUIRES the mutex. None: nothing has landed, or the run is over.
  std::optional<size_t> TakeLandedLocked();
  void RunUnit(size_t unit_index);
  Result<void> WorkOn(size_t unit_index);
  Result<void> LandFromCache(Unit& unit, std::span<uint64_t> found);
  Result<void> Verify(Unit& unit, std::span<const uint64_t> found);
  Result<std::byte*> Stage(const Unit& unit);
  std::byte* Destination(const Unit& unit) const;
};

// Keeps the disk busy: one thread, one reader, requests of all disk units in file order.
class DiskDriver {
 public:
  explicit DiskDriver(Executor::State& state);
  // Opens what direct reads need and makes the reader; sets State::disk_path.
  Result<void> Prepare();
  // Until all disk units have landed, or the run has failed or was cancelled.
  void Run();

 private:
  struct Request {
    size_t unit;
    uint64_t offset;  // in the file
    std::span<std::byte> destination;
    bool direct;
    int retries = 0;
  };

  void StartRequests();
  bool NextUnitToStage();
  void StartRequest(Request request);
  Result<void> Ended(Request request, IoCount count);
  Result<void> Continue(Request request, size_t done_bytes);
  bool CanBeDirect(const Unit& unit, const std::byte* staged) const;
  File& FileFor(const Request& request) const;

  Executor::State& state_;
  std::vector<std::unique_ptr<File>> direct_files_;  // by extent; null: buffered
  std::unique_ptr<AsyncReader> reader_;
  size_t next_disk_unit_ = 0;
  size_t units_landed_ = 0;
  bool stage_refused_ = false;    // no memory for the next unit at the last look
  std::deque<Request> ready_;     // not started
  std::vector<Request> running_;  // by tag
  std::vector<uint64_t> free_tags_;
};

}  // namespace hotplane
