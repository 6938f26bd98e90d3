#include "engine/expert_records.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/format_text.h"

namespace hotplane {
namespace {

size_t PlaceOf(RecordKind kind) { return static_cast<size_t>(kind) - 1; }

}  // namespace

class ExpertRecords::Source final : public RecordSource {
 public:
  Source(RecordReader& reader, RecordKind kind) : reader_(reader), kind_(kind) {}
  Result<size_t> RecordBytes(ExpertKey key) override {
    HP_ASSIGN(const RecordShape shape, reader_.Shape(kind_, key.layer));
    return shape.bytes;
  }
  Result<void> ReadRecord(ExpertKey key, std::span<std::byte> destination) override {
    return reader_.Read(kind_, key, destination);
  }

 private:
  RecordReader& reader_;
  const RecordKind kind_;
};

ExpertRecords::ExpertRecords(const Generation& generation, const RecordOptions& options)
    : generation_(generation), options_(options), reader_(generation) {
  for (const RecordKind kind : kRecordKinds)
    sources_[PlaceOf(kind)] = std::make_unique<Source>(reader_, kind);
}

ExpertRecords::~ExpertRecords() = default;

Result<void> ExpertRecords::CheckKind(RecordKind kind) const {
  if (std::find(kRecordKinds.begin(), kRecordKinds.end(), kind) != kRecordKinds.end()) return {};
  return Fail(Status::Usage("there is no such kind of record").Expected("delta, fp4 or base"));
}

WorkerPool& ExpertRecords::pool() {
  std::lock_guard lock(pool_mutex_);
  if (pool_ == nullptr) pool_ = std::make_unique<WorkerPool>(options_.worker_count);
  return *pool_;
}

uint64_t ExpertRecords::CacheBytes(RecordKind kind) const {
  if (kind == RecordKind::kDelta) return options_.delta_cache_bytes;
  if (kind == RecordKind::kFp4) return options_.fp4_cache_bytes;
  return options_.base_cache_bytes;
}

// By names only: no layer is opened before one of its records is wanted.
size_t ExpertRecords::LargestRecord(RecordKind kind) const {
  size_t largest = 0;
  const size_t layer_count = generation_.manifest().layers.size();
  for (uint32_t layer = 0; layer < layer_count; ++layer) {
    Encoding encoding = kind == RecordKind::kBase ? Encoding::kBase : Encoding::kDeltaNibble;
    if (kind == RecordKind::kDelta) {
      // Either may be read: the larger one where both are there.
      const auto nibbles =
          generation_.env().Stat(generation_.LayerPath(layer, Encoding::kDeltaNibble));
      const bool may_be_nibbles = nibbles && nibbles->type == FileType::kRegular;
      encoding = may_be_nibbles ? Encoding::kDeltaNibble : Encoding::kDeltaQuintal;
    }
    largest = std::max(largest, RecordShape::Of(encoding, generation_.geometry(layer)).bytes);
  }
  return largest;
}

Result<RecordCache*> ExpertRecords::Cache(RecordKind kind) {
  KindCache& slot = caches_[PlaceOf(kind)];
  if (RecordCache* const cache = slot.ready.load(std::memory_order_acquire)) return cache;
  std::lock_guard lock(slot.mutex);
  if (slot.cache == nullptr) {
    RecordCacheOptions options;
    options.bytes_max = CacheBytes(kind);
    options.slot_bytes = LargestRecord(kind);
    for (const ManifestLayer& layer : generation_.manifest().layers)
      options.experts_per_layer.push_back(layer.geometry.experts);
    Result<std::unique_ptr<RecordCache>> cache =
        RecordCache::Create(options, *sources_[PlaceOf(kind)]);
    if (!cache)
      return Fail(std::move(cache).error().Because(Text("{} records", RecordKindName(kind))));
    slot.cache = *std::move(cache);
    slot.ready.store(slot.cache.get(), std::memory_order_release);
  }
  return slot.cache.get();
}

Result<void> ExpertRecords::ReadBatch(RecordKind kind, uint32_t layer,
                                      std::span<const RecordRequest> requests) {
  HP_TRY(CheckKind(kind));
  for (const RecordRequest& request : requests) HP_TRY(reader_.CheckKey({layer, request.expert}));
  if (requests.empty()) return {};
  return pool().ParallelFor(requests.size(), [&](size_t index, size_t) {
    return reader_.Read(kind, {layer, requests[index].expert}, requests[index].destination);
  });
}

Result<PinnedRecord> ExpertRecords::Get(RecordKind kind, ExpertKey key, RecordAccess access) {
  HP_TRY(CheckKind(kind));
  HP_TRY(reader_.CheckKey(key));
  PinnedRecord record;
  HP_ASSIGN(record.shape, reader_.Shape(kind, key.layer));
  const auto* const resident = kind == RecordKind::kBase ? reader_.Resident(key.layer) : nullptr;
  if (resident != nullptr) {
    const std::array parts = {resident->planes13, resident->sc13, resident->planes2, resident->sc2};
    for (size_t i = 0; i < record.shape.part_count; ++i) {
      const size_t bytes = record.shape.parts[i].bytes;
      record.parts[i] = parts[i].subspan(bytes * key.expert, bytes);
    }
    return record;
  }
  HP_ASSIGN(RecordCache* const cache, Cache(kind));
  HP_ASSIGN(record.handle, cache->Get(key, access));
  for (size_t i = 0; i < record.shape.part_count; ++i) {
    const RecordShape::Part& part = record.shape.parts[i];
    record.parts[i] = record.handle.bytes().subspan(part.offset, part.bytes);
  }
  return record;
}

Result<size_t> ExpertRecords::Prefetch(RecordKind kind, uint32_t layer,
                                       std::span<const uint32_t> experts) {
  HP_TRY(CheckKind(kind));
  for (const uint32_t expert : experts) HP_TRY(reader_.CheckKey({layer, expert}));
  if (experts.empty()) return size_t{0};
  if (kind == RecordKind::kBase && reader_.Resident(layer) != nullptr) return experts.size();
  HP_ASSIGN(RecordCache* const cache, Cache(kind));
  std::atomic<size_t> there{0};
  HP_TRY(pool().ParallelFor(experts.size(), [&](size_t index, size_t) -> Result<void> {
    HP_ASSIGN(const bool cached, cache->Prefetch({layer, experts[index]}));
    if (cached) there.fetch_add(1, std::memory_order_relaxed);
    return {};
  }));
  return there.load();
}

RecordCacheStats ExpertRecords::cache_stats(RecordKind kind) const {
  const RecordCache* const cache = caches_[PlaceOf(kind)].ready.load(std::memory_order_acquire);
  return cache == nullptr ? RecordCacheStats{} : cache->stats();
}

}  // namespace hotplane
