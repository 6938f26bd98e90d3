#include "engine/record_cache.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <list>
#include <map>
#include <random>
#include <thread>

namespace hotplane {
namespace {

// Records are a function of their key; counts reads, and fails where it is told to.
class TestSource final : public RecordSource {
 public:
  explicit TestSource(size_t record_bytes) : record_bytes_(record_bytes) {}

  Result<size_t> RecordBytes(ExpertKey key) override { return record_bytes_ + 8 * key.layer; }
  Result<void> ReadRecord(ExpertKey key, std::span<std::byte> destination) override {
    reads.fetch_add(1);
    while (blocked.load()) std::this_thread::yield();
    if (failing.load()) {
      std::fill(destination.begin(), destination.end(), std::byte{0xee});
      return Fail(Status::Data("told to fail"));
    }
    for (size_t i = 0; i < destination.size(); ++i) destination[i] = ByteOf(key, i);
    return {};
  }
  static std::byte ByteOf(ExpertKey key, size_t index) {
    return static_cast<std::byte>(key.layer * 131 + key.expert * 31 + index * 7 + index / 256);
  }
  bool IsWhole(ExpertKey key, std::span<const std::byte> bytes) {
    if (bytes.size() != *RecordBytes(key)) return false;
    for (size_t i = 0; i < bytes.size(); ++i)
      if (bytes[i] != ByteOf(key, i)) return false;
    return true;
  }

  std::atomic<uint64_t> reads{0};
  std::atomic<bool> failing{false};
  std::atomic<bool> blocked{false};

 private:
  const size_t record_bytes_;
};

constexpr uint32_t kExperts = 8;
constexpr uint32_t kLayers = 2;

std::unique_ptr<RecordCache> MakeCache(RecordSource& source, size_t slots) {
  RecordCacheOptions options;
  options.bytes_max = slots * 4096;
  options.slot_bytes = 4096;
  options.experts_per_layer.assign(kLayers, kExperts);
  return RecordCache::Create(options, source).value();
}

TEST(RecordCache, ServesASecondUseFromMemory) {
  TestSource source(1000);
  const auto cache = MakeCache(source, 2);
  for (int i = 0; i < 3; ++i) {
    const auto record = cache->Get({1, 3}, RecordAccess::kDemand).value();
    EXPECT_TRUE(record.cached());
    EXPECT_TRUE(source.IsWhole({1, 3}, record.bytes()));
  }
  EXPECT_EQ(source.reads.load(), 1u);
  const RecordCacheStats stats = cache->stats();
  EXPECT_EQ(stats.hits, 2u);
  EXPECT_EQ(stats.misses, 1u);
  EXPECT_EQ(stats.slots_used, 1u);
  EXPECT_EQ(stats.bytes_used, 1008u);
  EXPECT_EQ(stats.bytes_max, 2u * 4096);
}

TEST(RecordCache, ReplacesTheLeastRecentlyUsed) {
  TestSource source(16);
  const auto cache = MakeCache(source, 2);
  for (const uint32_t expert : {0, 1, 0, 2}) cache->Get({0, expert}, RecordAccess::kDemand).value();
  source.reads = 0;
  cache->Get({0, 0}, RecordAccess::kDemand).value();
  cache->Get({0, 2}, RecordAccess::kDemand).value();
  EXPECT_EQ(source.reads.load(), 0u);
  cache->Get({0, 1}, RecordAccess::kDemand).value();
  EXPECT_EQ(source.reads.load(), 1u);
}

TEST(RecordCache, APinnedRecordIsNeverReplaced) {
  TestSource source(64);
  const auto cache = MakeCache(source, 2);
  const auto pinned = cache->Get({0, 0}, RecordAccess::kDemand).value();
  for (uint32_t round = 0; round < 3; ++round)
    for (uint32_t expert = 1; expert < kExperts; ++expert)
      EXPECT_TRUE(cache->Get({0, expert}, RecordAccess::kDemand).value().cached());
  EXPECT_TRUE(source.IsWhole({0, 0}, pinned.bytes()));
  const auto other = cache->Get({1, 0}, RecordAccess::kDemand).value();
  EXPECT_TRUE(other.cached());
  // Every slot is pinned now: the record lives in its handle.
  const auto alone = cache->Get({1, 1}, RecordAccess::kDemand).value();
  EXPECT_FALSE(alone.cached());
  EXPECT_TRUE(source.IsWhole({1, 1}, alone.bytes()));
  EXPECT_TRUE(source.IsWhole({0, 0}, pinned.bytes()));
  EXPECT_TRUE(source.IsWhole({1, 0}, other.bytes()));
  EXPECT_EQ(cache->stats().uncached, 1u);
}

TEST(RecordCache, BulkFillsFreeSlotsAndReplacesNothing) {
  TestSource source(64);
  const auto cache = MakeCache(source, 3);
  cache->Get({0, 0}, RecordAccess::kDemand).value();
  EXPECT_TRUE(cache->Prefetch({0, 1}).value());
  EXPECT_TRUE(cache->Prefetch({0, 1}).value());
  EXPECT_TRUE(cache->Get({0, 2}, RecordAccess::kBulk).value().cached());
  for (uint32_t expert = 3; expert < kExperts; ++expert) {
    EXPECT_FALSE(cache->Prefetch({0, expert}).value());
    EXPECT_FALSE(cache->Get({0, expert}, RecordAccess::kBulk).value().cached());
  }
  EXPECT_EQ(cache->stats().evictions, 0u);
  // What nobody used goes before what was used, however long ago.
  cache->Get({1, 0}, RecordAccess::kDemand).value();
  source.reads = 0;
  cache->Get({0, 0}, RecordAccess::kDemand).value();
  EXPECT_EQ(source.reads.load(), 0u);
  cache->Get({0, 1}, RecordAccess::kDemand).value();
  EXPECT_EQ(source.reads.load(), 1u);
}

TEST(RecordCache, AFailedReadLeavesNothingBehind) {
  TestSource source(64);
  const auto cache = MakeCache(source, 1);
  source.failing = true;
  EXPECT_EQ(cache->Get({0, 0}, RecordAccess::kDemand).error().code(), StatusCode::kData);
  EXPECT_FALSE(cache->Prefetch({0, 0}).has_value());
  source.failing = false;
  const auto record = cache->Get({0, 0}, RecordAccess::kDemand).value();
  EXPECT_TRUE(record.cached());
  EXPECT_TRUE(source.IsWhole({0, 0}, record.bytes()));
  EXPECT_EQ(cache->stats().failures, 2u);
}

TEST(RecordCache, OneOfSeveralThreadsThatMissReads) {
  TestSource source(64);
  const auto cache = MakeCache(source, 2);
  source.blocked = true;
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      const auto record = cache->Get({0, 5}, RecordAccess::kDemand).value();
      if (source.IsWhole({0, 5}, record.bytes())) ++right;
    });
  while (cache->stats().misses < 4) std::this_thread::yield();
  source.blocked = false;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right.load(), 4);
  EXPECT_EQ(source.reads.load(), 1u);
}

TEST(RecordCache, WithoutSlotsEveryRecordLivesInItsHandle) {
  TestSource source(64);
  const auto cache = MakeCache(source, 0);
  const auto record = cache->Get({0, 0}, RecordAccess::kDemand).value();
  EXPECT_FALSE(record.cached());
  EXPECT_TRUE(source.IsWhole({0, 0}, record.bytes()));
  EXPECT_FALSE(cache->Prefetch({0, 0}).value());
}

TEST(RecordCache, RefusesSizesThatCannotBe) {
  TestSource source(64);
  RecordCacheOptions options;
  options.slot_bytes = 5000;
  options.bytes_max = 8191;
  options.experts_per_layer = {kExperts};
  EXPECT_EQ(RecordCache::Create(options, source).error().code(), StatusCode::kUsage);
  // Never more slots than there are records.
  options.bytes_max = UINT64_MAX;
  EXPECT_EQ(RecordCache::Create(options, source).value()->stats().slot_count, kExperts);
  options.slot_bytes = size_t{1} << 45;
  EXPECT_EQ(RecordCache::Create(options, source).error().code(), StatusCode::kCapacity);
}

// What the cache promises, in a few lines: used records by age behind unused ones by age.
struct Model {
  size_t slot_count;
  std::list<uint32_t> unused, used;  // oldest first
  std::map<uint32_t, int> pins;

  bool Has(uint32_t key) const {
    return std::count(unused.begin(), unused.end(), key) != 0 ||
           std::count(used.begin(), used.end(), key) != 0;
  }
  bool Evict() {
    for (auto* list : {&unused, &used})
      for (auto it = list->begin(); it != list->end(); ++it)
        if (pins[*it] == 0) {
          list->erase(it);
          return true;
        }
    return false;
  }
  // Whether the record is in a slot afterwards.
  bool Access(uint32_t key, bool demand) {
    if (!Has(key)) {
      const bool room = unused.size() + used.size() < slot_count || (demand && Evict());
      if (!room) return false;
      unused.push_back(key);
    }
    if (demand) {
      unused.remove(key);
      used.remove(key);
      used.push_back(key);
    }
    return true;
  }
};

TEST(RecordCache, DoesWhatTheModelDoes) {
  const bool held = rc::check("cache and model agree", [] {
    TestSource source(32);
    const size_t slot_count = *rc::gen::inRange<size_t>(1, 7);
    const auto cache = MakeCache(source, slot_count);
    Model model{slot_count, {}, {}, {}};
    std::vector<std::pair<uint32_t, RecordCache::Handle>> handles;
    const auto steps = *rc::gen::container<std::vector<std::pair<int, uint32_t>>>(
        rc::gen::pair(rc::gen::inRange(0, 5), rc::gen::inRange<uint32_t>(0, kLayers * kExperts)));
    for (const auto& [action, key] : steps) {
      const ExpertKey expert{key / kExperts, key % kExperts};
      if (action == 4) {
        if (handles.empty()) continue;
        const size_t victim = key % handles.size();
        if (handles[victim].second.cached()) --model.pins[handles[victim].first];
        handles.erase(handles.begin() + static_cast<std::ptrdiff_t>(victim));
        continue;
      }
      const bool expect_read = !model.Has(key);
      const bool expect_cached = model.Access(key, action < 2);
      const uint64_t reads = source.reads.load();
      if (action == 3) {
        RC_ASSERT(cache->Prefetch(expert).value() == expect_cached);
        RC_ASSERT(source.reads.load() - reads == (expect_read && expect_cached ? 1u : 0u));
        continue;
      }
      auto record =
          cache->Get(expert, action < 2 ? RecordAccess::kDemand : RecordAccess::kBulk).value();
      RC_ASSERT(record.cached() == expect_cached);
      RC_ASSERT(source.reads.load() - reads == (expect_read ? 1u : 0u));
      if (action != 1) continue;
      if (record.cached()) ++model.pins[key];
      handles.emplace_back(key, std::move(record));
    }
    for (const auto& [key, handle] : handles)
      RC_ASSERT(source.IsWhole({key / kExperts, key % kExperts}, handle.bytes()));
    RC_ASSERT(cache->stats().slots_used == model.unused.size() + model.used.size());
  });
  EXPECT_TRUE(held);
}

// Many threads, few slots: what is handed out is the record asked for, and stays it.
TEST(RecordCache, NeverHandsOutAnotherRecordUnderPressure) {
  TestSource source(600);
  const auto cache = MakeCache(source, 3);
  std::atomic<uint64_t> wrong{0};
  std::vector<std::thread> threads;
  constexpr int kThreads = 8;
  constexpr int kRounds = 2000;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      std::minstd_rand random(static_cast<uint32_t>(t) + 1);
      std::vector<std::pair<ExpertKey, RecordCache::Handle>> kept;
      for (int round = 0; round < kRounds; ++round) {
        const ExpertKey key{static_cast<uint32_t>(random() % kLayers),
                            static_cast<uint32_t>(random() % kExperts)};
        if (random() % 8 == 0) {
          (void)cache->Prefetch(key);
          continue;
        }
        auto record =
            cache->Get(key, random() % 4 == 0 ? RecordAccess::kBulk : RecordAccess::kDemand);
        if (!record || !source.IsWhole(key, record->bytes())) ++wrong;
        if (record && random() % 4 == 0) kept.emplace_back(key, *std::move(record));
        if (kept.size() > 2) {
          for (const auto& [kept_key, handle] : kept)
            if (!source.IsWhole(kept_key, handle.bytes())) ++wrong;
          kept.clear();
        }
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0u);
  const RecordCacheStats stats = cache->stats();
  EXPECT_GT(stats.hits, 0u);
  EXPECT_GT(stats.evictions, 0u);
  EXPECT_LE(stats.slots_used, 3u);
}

}  // namespace
}  // namespace hotplane
