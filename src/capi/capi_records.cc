// What a store holds, and expert records.
#include <cstddef>
#include <cstring>
#include <span>
#include <utility>

#include "capi/capi_state.h"

struct hotplane_record {
  std::shared_ptr<hotplane::capi::EngineState> state;  // first: the pin goes before it
  hotplane_kind kind;
  hotplane::ExpertKey key;
  hotplane::PinnedRecord record;
};

namespace hotplane::capi {
namespace {

Result<RecordKind> KindOf(hotplane_kind kind) {
  switch (kind) {
    case HOTPLANE_DELTA: return RecordKind::kDelta;
    case HOTPLANE_FULL: return RecordKind::kFp4;
    case HOTPLANE_BASE: return RecordKind::kBase;
  }
  return Fail(Status::Usage("there is no such kind of record")
                  .Expected("HOTPLANE_DELTA, HOTPLANE_FULL or HOTPLANE_BASE")
                  .Found(Text("{}", static_cast<int>(kind))));
}

hotplane_encoding EncodingOf(Encoding encoding) {
  switch (encoding) {
    case Encoding::kBase: return HOTPLANE_BASE_PLANES;
    case Encoding::kDeltaQuintal: return HOTPLANE_QUINTALS;
    case Encoding::kDeltaNibble: return HOTPLANE_NIBBLES;
    case Encoding::kInvalid: break;
  }
  return hotplane_encoding{};
}

hotplane_presence PresenceOf(Presence presence) {
  switch (presence) {
    case Presence::kPresent: return HOTPLANE_PRESENT;
    case Presence::kAbsent: return HOTPLANE_ABSENT;
    case Presence::kUnreadable: return HOTPLANE_UNREADABLE;
    case Presence::kDamaged:
    case Presence::kInvalid: break;
  }
  return HOTPLANE_DAMAGED;
}

Result<ExpertRecords*> RecordsOf(const hotplane_engine* engine) {
  HP_TRY(Need(engine != nullptr, "an engine is needed"));
  return &engine->state->engine->records();
}

hotplane_activation ActivationOf(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::kSiluGatedClamped: return HOTPLANE_SILU_CLAMPED;
    case ActivationKind::kSwigluOai: return HOTPLANE_SWIGLU_OAI;
    case ActivationKind::kSiluGated:
    case ActivationKind::kInvalid: break;
  }
  return HOTPLANE_SILU;
}

Result<void> DescribeLayer(const hotplane_engine* engine, uint32_t layer,
                           hotplane_layer_info* info) {
  HP_ASSIGN(ExpertRecords* const records, RecordsOf(engine));
  const Generation& generation = engine->state->engine->generation();
  HP_ASSIGN(const RecordReader::DeltaProbe delta, records->reader().ProbeDelta(layer));
  const ManifestLayer& of_model = generation.manifest().layers[layer];
  hotplane_layer_info full = {};
  full.ordinal = layer;
  full.model_index = of_model.model_index;
  full.mtp = of_model.mtp ? 1 : 0;
  full.experts = of_model.geometry.experts;
  full.hidden = of_model.geometry.hidden;
  full.intermediate = generation.geometry(layer).intermediate;
  full.base = PresenceOf(generation.Probe(layer, Encoding::kBase).presence);
  full.delta = PresenceOf(delta.presence);
  full.delta_encoding = EncodingOf(delta.encoding);
  return FillStruct(full, sizeof(full), info);
}

Result<void> ReadRecords(const hotplane_engine* engine, hotplane_kind kind, uint32_t layer,
                         std::span<const uint32_t> experts, void* const* destinations,
                         size_t bytes) {
  HP_ASSIGN(ExpertRecords* const records, RecordsOf(engine));
  HP_ASSIGN(const RecordKind record_kind, KindOf(kind));
  std::vector<RecordRequest> requests;
  for (size_t i = 0; i < experts.size(); ++i) {
    HP_TRY(Need(destinations[i] != nullptr, "a destination is needed"));
    requests.push_back({experts[i], {static_cast<std::byte*>(destinations[i]), bytes}});
  }
  return records->ReadBatch(record_kind, layer, requests);
}

}  // namespace
}  // namespace hotplane::capi

using hotplane::Result;
using hotplane::capi::FillStruct;
using hotplane::capi::Guarded;
using hotplane::capi::InitStruct;
using hotplane::capi::KindOf;
using hotplane::capi::Need;
using hotplane::capi::RecordsOf;

extern "C" {

void hotplane_store_init(hotplane_store* store) { InitStruct(store); }

hotplane_code hotplane_describe(const hotplane_engine* engine, hotplane_store* store) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(engine != nullptr, "an engine is needed"));
    const hotplane::Generation& generation = engine->state->engine->generation();
    hotplane_store full = {};
    full.generation = engine->state->generation_text.c_str();
    full.directory = generation.directory().c_str();
    full.layer_count = static_cast<uint32_t>(generation.manifest().layers.size());
    full.top_k = generation.manifest().top_k.value_or(0);
    full.rank = generation.rank();
    full.world = generation.world();
    const hotplane::Activation& activation = generation.manifest().activation;
    full.activation = hotplane::capi::ActivationOf(activation.kind);
    full.activation_limit = activation.limit;
    full.activation_alpha = activation.alpha;
    return FillStruct(full, offsetof(hotplane_store, activation), store);
  });
}

void hotplane_layer_info_init(hotplane_layer_info* info) { InitStruct(info); }

hotplane_code hotplane_describe_layer(const hotplane_engine* engine, uint32_t layer,
                                      hotplane_layer_info* info) {
  return Guarded([&] { return hotplane::capi::DescribeLayer(engine, layer, info); });
}

hotplane_code hotplane_record_bytes(const hotplane_engine* engine, hotplane_kind kind,
                                    uint32_t layer, size_t* bytes) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(bytes != nullptr, "a place for the size is needed"));
    HP_ASSIGN(hotplane::ExpertRecords* const records, RecordsOf(engine));
    HP_ASSIGN(const hotplane::RecordKind record_kind, KindOf(kind));
    HP_ASSIGN(const hotplane::RecordShape shape, records->reader().Shape(record_kind, layer));
    *bytes = shape.bytes;
    return {};
  });
}

hotplane_code hotplane_read_record(hotplane_engine* engine, hotplane_kind kind, uint32_t layer,
                                   uint32_t expert, void* destination, size_t destination_bytes) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(destination != nullptr, "a destination is needed"));
    HP_ASSIGN(hotplane::ExpertRecords* const records, RecordsOf(engine));
    HP_ASSIGN(const hotplane::RecordKind record_kind, KindOf(kind));
    return records->Read(record_kind, {layer, expert},
                         {static_cast<std::byte*>(destination), destination_bytes});
  });
}

hotplane_code hotplane_read_records(hotplane_engine* engine, hotplane_kind kind, uint32_t layer,
                                    const uint32_t* experts, void* const* destinations,
                                    size_t count, size_t destination_bytes) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(count == 0 || (experts != nullptr && destinations != nullptr),
                "experts and their destinations are needed"));
    return hotplane::capi::ReadRecords(engine, kind, layer, {experts, count}, destinations,
                                       destination_bytes);
  });
}

hotplane_code hotplane_record_get(hotplane_engine* engine, hotplane_kind kind, uint32_t layer,
                                  uint32_t expert, int bulk, hotplane_record** record) {
  if (record != nullptr) *record = nullptr;
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(record != nullptr, "a place for the record is needed"));
    HP_ASSIGN(hotplane::ExpertRecords* const records, RecordsOf(engine));
    HP_ASSIGN(const hotplane::RecordKind record_kind, KindOf(kind));
    const hotplane::ExpertKey key{layer, expert};
    HP_ASSIGN(
        hotplane::PinnedRecord pinned,
        records->Get(record_kind, key,
                     bulk != 0 ? hotplane::RecordAccess::kBulk : hotplane::RecordAccess::kDemand));
    *record = new hotplane_record{engine->state, kind, key, std::move(pinned)};
    return {};
  });
}

void hotplane_record_view_init(hotplane_record_view* view) { InitStruct(view); }

hotplane_code hotplane_record_look(const hotplane_record* record, hotplane_record_view* view) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(record != nullptr, "a record is needed"));
    hotplane_record_view full = {};
    full.kind = record->kind;
    full.encoding = hotplane::capi::EncodingOf(record->record.shape.encoding);
    full.layer = record->key.layer;
    full.expert = record->key.expert;
    full.part_count = static_cast<uint32_t>(record->record.shape.part_count);
    for (size_t i = 0; i < full.part_count; ++i) {
      full.parts[i] = record->record.parts[i].data();
      full.part_bytes[i] = record->record.parts[i].size();
    }
    return FillStruct(full, sizeof(full), view);
  });
}

void hotplane_record_release(hotplane_record* record) { delete record; }

hotplane_code hotplane_prefetch(hotplane_engine* engine, hotplane_kind kind, uint32_t layer,
                                const uint32_t* experts, size_t count, size_t* cached) {
  if (cached != nullptr) *cached = 0;
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(count == 0 || experts != nullptr, "experts are needed"));
    HP_ASSIGN(hotplane::ExpertRecords* const records, RecordsOf(engine));
    HP_ASSIGN(const hotplane::RecordKind record_kind, KindOf(kind));
    HP_ASSIGN(const size_t there, records->Prefetch(record_kind, layer, std::span(experts, count)));
    if (cached != nullptr) *cached = there;
    return {};
  });
}

void hotplane_cache_stats_init(hotplane_cache_stats* stats) { InitStruct(stats); }

hotplane_code hotplane_get_cache_stats(const hotplane_engine* engine, hotplane_kind kind,
                                       hotplane_cache_stats* stats) {
  return Guarded([&]() -> Result<void> {
    HP_ASSIGN(hotplane::ExpertRecords* const records, RecordsOf(engine));
    HP_ASSIGN(const hotplane::RecordKind record_kind, KindOf(kind));
    const hotplane::RecordCacheStats counts = records->cache_stats(record_kind);
    hotplane_cache_stats full = {};
    full.hits = counts.hits;
    full.misses = counts.misses;
    full.evictions = counts.evictions;
    full.uncached = counts.uncached;
    full.prefetched = counts.prefetched;
    full.failures = counts.failures;
    full.slot_count = counts.slot_count;
    full.slots_used = counts.slots_used;
    full.bytes_used = counts.bytes_used;
    full.bytes_max = counts.bytes_max;
    return FillStruct(full, sizeof(full), stats);
  });
}

}  // extern "C"
