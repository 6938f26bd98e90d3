#include "engine/record_cache.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/format_text.h"
#include "base/topology.h"
#include "base/units.h"

namespace hotplane {
namespace {

size_t SlotCount(const RecordCacheOptions& options) {
  if (options.bytes_max == 0 || options.slot_bytes == 0) return 0;
  uint64_t key_count = 0;
  for (const uint32_t experts : options.experts_per_layer) key_count += experts;
  return std::min(options.bytes_max / RoundUp(options.slot_bytes, kPageBytes), key_count);
}

}  // namespace

RecordCache::Handle& RecordCache::Handle::operator=(Handle&& other) noexcept {
  std::swap(cache_, other.cache_);
  std::swap(slot_, other.slot_);
  std::swap(own_, other.own_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

RecordCache::Handle::~Handle() {
  if (cache_ != nullptr) cache_->Unpin(slot_);
}

// A slot that was taken for a key and has no record yet; given back unless it was published.
class RecordCache::Reservation {
 public:
  Reservation(RecordCache& cache, uint32_t key_index, uint32_t slot)
      : cache_(cache), key_index_(key_index), slot_(slot) {}
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  ~Reservation() {
    {
      std::lock_guard lock(cache_.mutex_);
      cache_.in_flight_.erase(key_index_);
      if (!published_) {
        cache_.free_.push_back(slot_);
        ++cache_.counts_.failures;
      }
    }
    cache_.filled_.notify_all();
  }

  uint32_t slot() const { return slot_; }
  void Publish(bool pin) {
    std::lock_guard lock(cache_.mutex_);
    // An addition, because readers that lost the race for the slot's last record may pin it for a
    // moment. Release: the record's bytes come before its key.
    cache_.slots_[slot_].state.fetch_add((uint64_t{key_index_} + 1) << 32 | (pin ? 1 : 0),
                                         std::memory_order_release);
    cache_.slot_of_[key_index_].store(slot_, std::memory_order_release);
    cache_.counts_.bytes_used += cache_.slots_[slot_].record_bytes;
    ++cache_.counts_.slots_used;
    if (!pin) ++cache_.counts_.prefetched;
    published_ = true;
  }

 private:
  RecordCache& cache_;
  const uint32_t key_index_;
  const uint32_t slot_;
  bool published_ = false;
};

RecordCache::RecordCache(const RecordCacheOptions& options, RecordSource& source)
    : source_(source),
      slot_bytes_(RoundUp(options.slot_bytes, kPageBytes)),
      first_key_(1, 0),
      slots_(SlotCount(options)) {
  for (const uint32_t experts : options.experts_per_layer)
    first_key_.push_back(first_key_.back() + experts);
  slot_of_ = std::vector<std::atomic<uint32_t>>(first_key_.back());
  for (std::atomic<uint32_t>& slot : slot_of_) slot.store(kNoSlot, std::memory_order_relaxed);
  for (size_t slot = slots_.size(); slot > 0; --slot)
    free_.push_back(static_cast<uint32_t>(slot - 1));
}

Result<std::unique_ptr<RecordCache>> RecordCache::Create(const RecordCacheOptions& options,
                                                         RecordSource& source) {
  std::unique_ptr<RecordCache> cache(new RecordCache(options, source));
  if (options.bytes_max == 0) return cache;
  if (cache->slots_.empty())
    return Fail(Status::Usage("a record cache is smaller than one record")
                    .Expected(Text("0, or at least {}", FormatBytes(cache->slot_bytes_)))
                    .Found(FormatBytes(options.bytes_max)));
  const uint64_t bytes = cache->slots_.size() * cache->slot_bytes_;
  const uint64_t available = ReadMemoryLimit().available_bytes;
  if (bytes > available)
    return Fail(Status::Capacity("the record cache does not fit in memory")
                    .Expected(FormatBytes(bytes))
                    .Found(Text("{} available", FormatBytes(available)))
                    .Advice("give it less; records that are not cached are read when wanted"));
  HP_ASSIGN(cache->memory_, HugeBuffer::Allocate(bytes));
  return cache;
}

RecordCache::~RecordCache() {
  for (const Slot& slot : slots_) HP_CHECK((slot.state.load() & kPinMask) == 0);
}

uint32_t RecordCache::IndexOf(ExpertKey key) const {
  HP_CHECK(key.layer + 1 < first_key_.size() &&
           key.expert < first_key_[key.layer + 1] - first_key_[key.layer]);
  return first_key_[key.layer] + key.expert;
}

void RecordCache::Touch(Slot& slot, RecordAccess access) {
  if (access != RecordAccess::kDemand) return;
  slot.last_use.store(kUsedBit | clock_.fetch_add(1, std::memory_order_relaxed),
                      std::memory_order_relaxed);
}

bool RecordCache::TryPin(uint32_t key_index, RecordAccess access, Handle& handle) {
  const uint32_t index = slot_of_[key_index].load(std::memory_order_acquire);
  if (index == kNoSlot) return false;
  Slot& slot = slots_[index];
  const uint64_t before = slot.state.fetch_add(1, std::memory_order_acquire);
  if (before >> 32 != uint64_t{key_index} + 1) {
    Unpin(index);
    return false;
  }
  Touch(slot, access);
  handle.cache_ = this;
  handle.slot_ = index;
  handle.bytes_ = {DataOf(index), slot.record_bytes};
  return true;
}

void RecordCache::Unpin(uint32_t slot) {
  // Release: what was read through the handle comes before the slot's next record.
  slots_[slot].state.fetch_sub(1, std::memory_order_release);
}

// REQUIRES mutex_. A linear look at all slots is some microseconds for thousands of them, and the
// read that follows takes milliseconds.
uint32_t RecordCache::OldestUnpinned() const {
  uint64_t oldest = UINT64_MAX;
  uint32_t found = kNoSlot;
  for (uint32_t i = 0; i < slots_.size(); ++i) {
    const uint64_t state = slots_[i].state.load(std::memory_order_relaxed);
    const uint64_t last_use = slots_[i].last_use.load(std::memory_order_relaxed);
    if (state >> 32 == 0 || (state & kPinMask) != 0 || last_use >= oldest) continue;
    oldest = last_use;
    found = i;
  }
  return found;
}

// REQUIRES mutex_.
uint32_t RecordCache::Evict() {
  while (true) {
    const uint32_t victim = OldestUnpinned();
    if (victim == kNoSlot) return kNoSlot;
    Slot& slot = slots_[victim];
    const auto key = slot.state.load(std::memory_order_relaxed) >> 32;
    // A reader that pinned it meanwhile keeps its record. Acquire: pairs with Unpin.
    uint64_t unpinned = key << 32;
    if (!slot.state.compare_exchange_strong(unpinned, 0, std::memory_order_acq_rel)) continue;
    slot_of_[key - 1].store(kNoSlot, std::memory_order_release);
    counts_.bytes_used -= slot.record_bytes;
    --counts_.slots_used;
    ++counts_.evictions;
    return victim;
  }
}

// REQUIRES mutex_.
uint32_t RecordCache::TakeSlot(RecordAccess access) {
  if (!free_.empty()) {
    const uint32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  return access == RecordAccess::kDemand ? Evict() : kNoSlot;
}

Result<RecordCache::Handle> RecordCache::Fill(ExpertKey key, size_t bytes, Reservation& reservation,
                                              RecordAccess access, bool pin) {
  Slot& slot = slots_[reservation.slot()];
  slot.record_bytes = bytes;
  HP_TRY(source_.ReadRecord(key, {DataOf(reservation.slot()), bytes}));
  slot.last_use.store(clock_.fetch_add(1, std::memory_order_relaxed), std::memory_order_relaxed);
  Touch(slot, access);
  reservation.Publish(pin);
  Handle handle;
  if (!pin) return handle;
  handle.cache_ = this;
  handle.slot_ = reservation.slot();
  handle.bytes_ = {DataOf(handle.slot_), slot.record_bytes};
  return handle;
}

Result<RecordCache::Handle> RecordCache::ReadUncached(ExpertKey key, size_t bytes) {
  Handle handle;
  HP_ASSIGN(handle.own_, HugeBuffer::Allocate(bytes));
  Result<void> read = source_.ReadRecord(key, handle.own_.span());
  std::lock_guard lock(mutex_);
  ++(read ? counts_.uncached : counts_.failures);
  HP_TRY(std::move(read));
  handle.bytes_ = handle.own_.span();
  return handle;
}

Result<RecordCache::Handle> RecordCache::Get(ExpertKey key, RecordAccess access) {
  const uint32_t key_index = IndexOf(key);
  Handle handle;
  if (TryPin(key_index, access, handle)) {
    hits_.fetch_add(1, std::memory_order_relaxed);
    return handle;
  }
  misses_.fetch_add(1, std::memory_order_relaxed);
  HP_ASSIGN(const size_t bytes, source_.RecordBytes(key));
  if (slots_.empty() || bytes > slot_bytes_) return ReadUncached(key, bytes);
  std::unique_lock lock(mutex_);
  while (true) {
    if (TryPin(key_index, access, handle)) return handle;
    if (!in_flight_.contains(key_index)) break;
    filled_.wait(lock);
  }
  in_flight_.insert(key_index);
  const uint32_t slot = TakeSlot(access);
  if (slot == kNoSlot) {
    in_flight_.erase(key_index);
    lock.unlock();
    return ReadUncached(key, bytes);
  }
  Reservation reservation(*this, key_index, slot);
  lock.unlock();
  return Fill(key, bytes, reservation, access, /*pin=*/true);
}

Result<bool> RecordCache::Prefetch(ExpertKey key) {
  const uint32_t key_index = IndexOf(key);
  HP_ASSIGN(const size_t bytes, source_.RecordBytes(key));
  std::unique_lock lock(mutex_);
  if (slot_of_[key_index].load(std::memory_order_relaxed) != kNoSlot ||
      in_flight_.contains(key_index))
    return true;
  if (bytes > slot_bytes_) return false;
  in_flight_.insert(key_index);
  const uint32_t slot = TakeSlot(RecordAccess::kBulk);
  if (slot == kNoSlot) {
    in_flight_.erase(key_index);
    return false;
  }
  Reservation reservation(*this, key_index, slot);
  lock.unlock();
  HP_TRY(Fill(key, bytes, reservation, RecordAccess::kBulk, /*pin=*/false));
  return true;
}

RecordCacheStats RecordCache::stats() const {
  std::lock_guard lock(mutex_);
  RecordCacheStats stats = counts_;
  stats.hits = hits_.load(std::memory_order_relaxed);
  stats.misses = misses_.load(std::memory_order_relaxed);
  stats.slot_count = slots_.size();
  stats.bytes_max = memory_.size();
  return stats;
}

}  // namespace hotplane
