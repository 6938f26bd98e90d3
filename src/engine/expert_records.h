// Expert records after boot: reads by expert, and a cache for each kind of them. Needs an opened
// generation and no boot; what a boot landed in memory is used where it helps.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "base/status.h"
#include "base/worker_pool.h"
#include "engine/record_cache.h"
#include "engine/record_reader.h"
#include "store/store.h"

namespace hotplane {

struct RecordOptions {
  // Memory of each kind's cache, reserved at its first use; 0: none.
  uint64_t delta_cache_bytes = 0;
  uint64_t fp4_cache_bytes = 0;
  uint64_t base_cache_bytes = 0;
  size_t worker_count = 0;  // of batched reads; 0: the CPUs this process may use
};

// One record while it is used: its bytes do not change and do not go away.
struct PinnedRecord {
  RecordShape shape;
  // By part of the shape, each contiguous: in a cache, in memory of the handle, or in the resident
  // base.
  std::array<std::span<const std::byte>, 4> parts;
  RecordCache::Handle handle;
};

struct RecordRequest {
  uint32_t expert = 0;
  std::span<std::byte> destination;  // of exactly the bytes of Shape
};

// Thread-safe; also from a boot's on_layer_ready. `generation` outlives it, and it outlives its
// pinned records.
class ExpertRecords {
 public:
  ExpertRecords(const Generation& generation, const RecordOptions& options);
  ~ExpertRecords();

  RecordReader& reader() { return reader_; }

  // One record, as RecordReader::Read; no cache has a part in it.
  Result<void> Read(RecordKind kind, ExpertKey key, std::span<std::byte> destination) {
    return reader_.Read(kind, key, destination);
  }
  // Several records of one layer, in parallel. The Status of the first request that failed, which
  // ends the others early.
  Result<void> ReadBatch(RecordKind kind, uint32_t layer, std::span<const RecordRequest> requests);

  // Through the cache of this kind. Base records of a layer that is resident are its own memory.
  // Errors as RecordReader::Read; kUsage or kCapacity when the cache cannot be what was asked for.
  Result<PinnedRecord> Get(RecordKind kind, ExpertKey key, RecordAccess access);
  // Reads records that are not there into free slots, in parallel; how many of `experts` are in
  // the cache then (a resident base counts as there).
  Result<size_t> Prefetch(RecordKind kind, uint32_t layer, std::span<const uint32_t> experts);

  RecordCacheStats cache_stats(RecordKind kind) const;  // zeros for a cache not used yet

 private:
  class Source;
  struct KindCache {
    std::mutex mutex;
    std::unique_ptr<RecordCache> cache;
    std::atomic<RecordCache*> ready{nullptr};
  };

  WorkerPool& pool();
  uint64_t CacheBytes(RecordKind kind) const;
  size_t LargestRecord(RecordKind kind) const;
  Result<RecordCache*> Cache(RecordKind kind);
  Result<void> CheckKind(RecordKind kind) const;

  const Generation& generation_;
  const RecordOptions options_;
  RecordReader reader_;
  std::array<std::unique_ptr<Source>, kRecordKinds.size()> sources_;
  std::array<KindCache, kRecordKinds.size()> caches_;
  std::mutex pool_mutex_;
  std::unique_ptr<WorkerPool> pool_;  // its own: a boot holds the engine's until it has landed
};

}  // namespace hotplane
