// The executor: extents of files to where they belong, every chunk verified, from the page cache
// and from the disk at once.
//
// It knows nothing of layers. Whoever owns the destination's memory says through a LandingDevice
// where the host may put bytes together: on the CPU that is the destination itself; for a device
// with its own memory it is a slot of a pinned ring.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "base/trace.h"
#include "base/units.h"
#include "base/worker_pool.h"
#include "device/landing_device.h"
#include "format/layer_file.h"
#include "io/env.h"

namespace hotplane {

// What cold reads leave behind.
enum class CacheMode : uint8_t {
  kAuto = 0,  // keep, when the files fit in memory beside everything else; else bypass
  kKeep,      // they go through the page cache, so that the next boot is warm
  kBypass,    // O_DIRECT; what is in the page cache already is still taken from there
};

// Destinations are ordinary memory: nothing is staged.
LandingDevice& HostMemory();

// One file range, in whole chunks. All that it points to outlives the executor.
struct Extent {
  File* file = nullptr;              // opened with kRead
  std::byte* destination = nullptr;  // null: the bytes stay in `mapping`, and are only verified
  uint64_t offset = 0;               // in the file
  uint64_t bytes = 0;
  Mapping* mapping = nullptr;                // of exactly this range; null: pread instead
  std::span<const Chunk> chunks;             // tile the range, in order
  std::span<const uint64_t> checksums = {};  // by chunk
  // The bytes are at the destination already, and are only verified there. REQUIRES a device that
  // verifies.
  bool there = false;
  uint32_t trace_layer = kNoLayer;  // how traces call it
};

// Of mapped pages that went away while they were read (FaultGuard): the file was cut short, or its
// disk failed.
Status PagesGone(const std::string& path, uint64_t offset, uint64_t bytes);

// Where an extent's bytes were when it began.
enum class ExtentSource : uint8_t {
  kInvalid = 0,
  kMapped,
  kPageCache,
  kDiskBuffered,
  kDiskDirect,
  kBoth,  // page cache and disk
  kThere,
};
const char* ExtentSourceName(ExtentSource source);  // "page cache", "disk, direct"; "built"

struct ExecutorOptions {
  Env* env = nullptr;               // REQUIRED: of the files
  WorkerPool* pool = nullptr;       // REQUIRED
  LandingDevice* device = nullptr;  // null: HostMemory()
  const CancelToken* cancel = nullptr;
  Progress* progress = nullptr;
  bool verify = true;
  bool bypass_cache = false;  // of reads from the disk
  // The destinations may have no memory yet: they get it a unit at a time, just before it is landed
  // in, and ahead of reads from the disk by workers with nothing else to do. REQUIRES HostMemory.
  bool fresh_destinations = false;
};

// Byte counts of a run, each byte once; valid during and after it.
struct ExecutorCounts {
  uint64_t bytes_from_cache = 0;
  uint64_t bytes_from_disk = 0;
  uint64_t bytes_verified = 0;
  // What workers spent giving memory to fresh destinations of cached units, added up.
  double seconds_populating = 0;
};

class Executor {
 public:
  struct State;  // of the executor's own files

  struct Callbacks {
    // All of an extent is at its destination and verified. Called once per extent, in any order,
    // from a worker, or from a thread of the executor; several may run at once.
    std::function<void(size_t extent)> done;
    // A chunk has checksum `found`. Puts right what is in `staged` (empty for mapped extents), or
    // returns the Status that ends the run. Where the device verifies, `staged` holds nothing yet.
    std::function<Result<void>(size_t extent, size_t chunk, uint64_t found,
                               std::span<std::byte> staged)>
        repair;
  };

  Executor(const ExecutorOptions& options, std::vector<Extent> extents, Callbacks callbacks);
  ~Executor();

  // Looks where every extent's bytes are (page cache or disk), per 4 MiB. Then `source` tells.
  Result<void> Locate();
  ExtentSource source(size_t extent) const;
  // "io_uring, O_DIRECT, 32 requests of 1 MiB"; empty when nothing comes from the disk. Valid
  // after Run.
  const std::string& disk_path() const;
  bool needs_disk() const;

  // Once, after Locate. On failure nothing is in flight any more when it returns.
  Result<void> Run();
  ExecutorCounts counts() const;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace hotplane
