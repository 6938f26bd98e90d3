// What the workers and the disk driver of one executor run share. Private to the executor.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "base/nothing_thrown.h"
#include "boot/executor.h"
#include "io/whole_reader.h"

namespace hotplane {

// What a CacheFiller brings in at a time, and what is landed at a time in ordinary memory. Large
// enough that a page-table populate call (about 20 us) is under 5% of it, small enough that the
// last one is soon done.
inline constexpr uint64_t kUnitBytes = 4 * 1024 * 1024;
static_assert(kUnitBytes % kReadRequestBytes == 0 && kStagedBytesMax > kUnitBytes);
static_assert(kChunkBytes <= kUnitBytes);

// How a unit's bytes come into memory.
enum class UnitPath : uint8_t {
  kInvalid = 0,
  kCached,  // they are in the page cache: a worker takes them from there
  kFilled,  // a CacheFiller brings them into the page cache first
  kRead,    // the DiskDriver reads them to where they are staged
};

struct Unit {
  size_t extent = 0;
  size_t first_chunk = 0;  // of the extent
  size_t end_chunk = 0;
  uint64_t offset = 0;  // in the file
  uint64_t bytes = 0;
  UnitPath path = UnitPath::kInvalid;
  std::byte* staged = nullptr;  // while it is on its way
  uint64_t requests_left = 0;
};

// How far ahead of the reads their destinations get memory: 64 MiB, twice what a reader of the
// default depth has in flight.
inline constexpr size_t kFreshAheadUnits = 16;
static_assert(kFreshAheadUnits * kUnitBytes >= 2 * ReaderOptions{}.depth * kReadRequestBytes);
// How many filled units may wait for a worker: 64 MiB do not leave the page cache again before they
// are hashed, and keep the workers busy for some milliseconds.
inline constexpr size_t kFilledUnitsMax = 16;

// What a worker does next.
struct Job {
  size_t unit;
  bool populate;            // gives its destination memory, no more
  size_t window_units = 0;  // above 0: so many of cache_units, from place `unit`, as one window
};

class ExtentFinisher;

struct Executor::State {
  ExecutorOptions options;
  std::vector<Extent> extents;
  Callbacks callbacks;
  std::vector<ExtentSource> sources;
  std::vector<Unit> units;
  std::vector<size_t> cache_units;  // indexes, in order
  std::vector<size_t> fill_units;
  std::vector<size_t> disk_units;
  std::string disk_path;
  std::unique_ptr<std::atomic<uint64_t>[]> units_left;  // by extent
  std::vector<size_t> first_unit_of;                    // by extent
  ExtentFinisher* finisher = nullptr;  // of a device that verifies; null: workers finish extents

  std::atomic<uint64_t> bytes_from_cache{0};
  std::atomic<uint64_t> bytes_from_disk{0};
  std::atomic<uint64_t> bytes_verified{0};
  std::atomic<int64_t> populating_ns{0};

  std::mutex mutex;  // guards what follows
  std::condition_variable wake;
  std::deque<size_t> read_units;    // have been, and wait for a worker
  std::deque<size_t> filled_units;  // likewise
  std::condition_variable room;     // one was taken from filled_units
  size_t next_cache_unit = 0;       // index into cache_units
  size_t next_fresh_unit = 0;       // index into disk_units: the next to be given memory
  size_t staged_unit_count = 0;     // of disk_units
  size_t units_done = 0;
  std::optional<Status> failure;
  size_t failed_unit = 0;  // the lowest; its failure is the one that is told

  void Fail(size_t unit, Status status);
  void Landed(size_t unit);
  // Until few enough filled units wait for a worker; false: the run has failed.
  bool WaitForRoomToFill();
  bool Failed();
  // Blocks until there is something to do; none: the run is over.
  std::optional<Job> NextJob(size_t worker);
  void Work(const Job& job);
  // REQUIRES the mutex. Cached units in a row that the device takes without staging.
  std::optional<Job> TakeWindowLocked();
  void RunWindow(size_t first_place, size_t count);
  // False: nothing was landed.
  Result<bool> LandWindow(size_t first_place, size_t count);
  // REQUIRES the mutex. The next disk unit without memory, among those that are read soon.
  std::optional<size_t> TakeFreshLocked();
  void Populate(const Unit& unit) const;

  // Whether the extent is verified where it lands, after it landed, by the finisher.
  bool SettlesLater(const Extent& extent) const {
    return finisher != nullptr && extent.destination != nullptr;
  }

  void ListUnits(size_t extent);
  void Locate(size_t extent);
  // REQUIRES the mutex. None: nothing has landed, or the run is over.
  std::optional<size_t> TakeFrontLocked(std::deque<size_t>& queue);
  void RunUnit(size_t unit_index);
  Result<void> WorkOn(size_t unit_index);
  // The unit is on its way to its destination, or there.
  Result<void> Account(const Unit& unit);
  Result<void> LandFromCache(Unit& unit, std::span<uint64_t> found);
  Result<void> Verify(Unit& unit, std::span<const uint64_t> found);
  Result<std::byte*> Stage(const Unit& unit);
  std::byte* Destination(const Unit& unit) const;
};

// Finishes landed extents on a device that verifies, one after the other, so that no worker waits
// for what is still in flight.
class ExtentFinisher {
 public:
  explicit ExtentFinisher(Executor::State& state) : state_(state) {}
  ~ExtentFinisher() { Finish(); }
  void Start();
  void Add(size_t extent);  // all of its units were landed
  void Finish();            // returns when all that was added is finished, or the run has failed

 private:
  void Loop();
  Result<void> Settle(size_t index);
  Result<void> Repair(size_t index, const LandedMismatch& mismatch, const LandedCheck& check);

  Executor::State& state_;
  std::thread thread_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::deque<size_t> landed_;
  bool over_ = false;
};

// Brings units into the page cache through their mappings, with a few threads: where the kernel has
// huge pages for files, the next boot then finds them, which no read would have made.
class CacheFiller {
 public:
  explicit CacheFiller(Executor::State& state) : state_(state) {}
  ~CacheFiller() { Wait(); }
  void Start();
  void Wait();  // until all fill units are in the page cache, or the run has failed

 private:
  void Loop(size_t thread);
  Result<void> Fill(size_t place);  // index into fill_units

  Executor::State& state_;
  std::atomic<size_t> next_{0};
  std::vector<std::thread> threads_;
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
  };

  void Drive();
  void StartRequests();
  bool NextUnitToStage();
  void Ended(size_t unit_index);

  Executor::State& state_;
  std::vector<std::unique_ptr<File>> direct_files_;  // by extent; null: buffered
  std::unique_ptr<WholeReader> reader_;
  size_t next_disk_unit_ = 0;
  size_t units_landed_ = 0;
  bool stage_refused_ = false;  // no memory for the next unit at the last look
  std::deque<Request> ready_;   // not started
};

}  // namespace hotplane
