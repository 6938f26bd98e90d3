// A cache of verified records in memory of our own, allocated once.
//
// A hit takes no lock: the record's slot is pinned by one atomic addition, and the key is checked
// in the word that the addition returned. A slot is used again only when nobody pins it, so the
// bytes behind a handle never change. Demand replaces the least recently used record; a bulk pass
// or a prefetch fills free slots and never replaces anything, and what it brought goes first
// while nobody used it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_set>
#include <vector>

#include "base/memory.h"
#include "base/status.h"
#include "engine/record_reader.h"

namespace hotplane {

// Where a cache gets its records from. Called from any thread, several at a time.
class RecordSource {
 public:
  virtual ~RecordSource() = default;
  virtual Result<size_t> RecordBytes(ExpertKey key) = 0;
  // `destination` has exactly RecordBytes. What it holds after success is verified.
  virtual Result<void> ReadRecord(ExpertKey key, std::span<std::byte> destination) = 0;
};

struct RecordCacheOptions {
  uint64_t bytes_max = 0;                   // 0: no slots; every record lives in its handle
  size_t slot_bytes = 0;                    // the largest record that is kept
  std::vector<uint32_t> experts_per_layer;  // by ordinal: the keys there are
};

struct RecordCacheStats {
  uint64_t hits = 0;
  uint64_t misses = 0;     // those that waited for another thread's read included
  uint64_t evictions = 0;  // records replaced
  uint64_t uncached = 0;   // misses that found no slot: the record lives in its handle
  uint64_t prefetched = 0;
  uint64_t failures = 0;  // reads of the source that failed
  uint64_t slot_count = 0;
  uint64_t slots_used = 0;
  uint64_t bytes_used = 0;  // records in slots
  uint64_t bytes_max = 0;   // memory reserved for slots
};

enum class RecordAccess : uint8_t {
  kInvalid = 0,
  kDemand,  // the record becomes the most recently used one; may replace the least recently used
  kBulk,    // a pass over many records: changes no order, replaces nothing
};

// Thread-safe. Must outlive its handles.
class RecordCache {
 public:
  // Pins a record while it is used. Move-only; may be released from any thread.
  class Handle {
   public:
    Handle() = default;
    Handle(Handle&& other) noexcept { *this = std::move(other); }
    Handle& operator=(Handle&& other) noexcept;
    ~Handle();
    std::span<const std::byte> bytes() const { return bytes_; }
    bool cached() const { return cache_ != nullptr; }  // in a slot, not in memory of its own

   private:
    friend class RecordCache;
    RecordCache* cache_ = nullptr;
    uint32_t slot_ = 0;
    HugeBuffer own_;
    std::span<const std::byte> bytes_;
  };

  // kUsage when bytes_max is smaller than one slot; kCapacity when the memory is not there.
  static Result<std::unique_ptr<RecordCache>> Create(const RecordCacheOptions& options,
                                                     RecordSource& source);
  ~RecordCache();  // REQUIRES no handle left

  // REQUIRES a key there is. Of several threads that miss one record, one reads it. Where every
  // slot is pinned, the handle owns the record's memory.
  Result<Handle> Get(ExpertKey key, RecordAccess access);

  // Reads the record into a free slot. False when there is none; true when it is there, or on its
  // way.
  Result<bool> Prefetch(ExpertKey key);

  RecordCacheStats stats() const;

 private:
  // `state` holds the key and the pins in one word, so that pinning and learning what was pinned
  // is one step: (index of the key + 1) << 32 | pins; a slot that is free or being filled has
  // key 0.
  struct alignas(64) Slot {
    std::atomic<uint64_t> state{0};
    std::atomic<uint64_t> last_use{0};  // kUsedBit set by demand; then by time
    size_t record_bytes = 0;            // written only while the slot has no key
  };
  class Reservation;
  static constexpr uint64_t kPinMask = UINT32_MAX;
  static constexpr uint64_t kUsedBit = uint64_t{1} << 63;
  static constexpr uint32_t kNoSlot = UINT32_MAX;

  RecordCache(const RecordCacheOptions& options, RecordSource& source);
  uint32_t IndexOf(ExpertKey key) const;
  std::byte* DataOf(uint32_t slot) const { return memory_.data() + slot * slot_bytes_; }
  bool TryPin(uint32_t key_index, RecordAccess access, Handle& handle);
  void Touch(Slot& slot, RecordAccess access);
  void Unpin(uint32_t slot);
  uint32_t TakeSlot(RecordAccess access);
  uint32_t OldestUnpinned() const;
  uint32_t Evict();
  Result<Handle> Fill(ExpertKey key, size_t bytes, Reservation& reservation, RecordAccess access,
                      bool pin);
  Result<Handle> ReadUncached(ExpertKey key, size_t bytes);

  RecordSource& source_;
  const size_t slot_bytes_;
  std::vector<uint32_t> first_key_;             // by layer; one more at the end
  std::vector<std::atomic<uint32_t>> slot_of_;  // by key index
  std::vector<Slot> slots_;
  HugeBuffer memory_;
  // One shared counter costs a hit some tens of nanoseconds under contention; a record is millions
  // of bytes.
  std::atomic<uint64_t> clock_{0};
  std::atomic<uint64_t> hits_{0};
  std::atomic<uint64_t> misses_{0};

  mutable std::mutex
      mutex_;  // guards what follows, and every change of slot_of_ and of slots' keys
  std::condition_variable filled_;
  std::vector<uint32_t> free_;
  std::unordered_set<uint32_t> in_flight_;  // key indexes that own a slot being filled
  RecordCacheStats counts_;
};

}  // namespace hotplane
