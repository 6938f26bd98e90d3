#include "boot/boot.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>

#include "base/check.h"
#include "base/fault_guard.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/topology.h"
#include "base/trace.h"
#include "base/units.h"
#include "boot/layer_selection.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// What a worker takes at a time: whole chunks, about this many bytes. Large enough that a
// page-table populate call (about 20 us) is under 5% of it, small enough that 44 layers keep every
// core busy to the end.
constexpr uint64_t kUnitBytes = 4 * kMiB;

// How far ahead of a worker the disk is asked for data: at 100 us a request and 10 GB/s of disk, 16
// units keep it busy.
constexpr size_t kReadAheadUnits = 16;

struct Layer {
  LayerFile file;
  std::unique_ptr<Mapping> mapping;  // of the data region; null: read with pread
  std::byte* landed = nullptr;       // in the arena; null: served from the mapping
  bool cold = false;
  std::atomic<size_t> units_left{0};
};

struct Unit {
  size_t layer = 0;  // index into State::layers
  size_t first_chunk = 0;
  size_t end_chunk = 0;
  uint64_t offset = 0;  // from the start of the file
  uint64_t bytes = 0;
};

// The body of a guarded call: copies or hashes the chunks of a unit and keeps what it found.
struct UnitPass {
  const std::byte* source;  // of the unit's first byte
  std::byte* destination;   // null: hash only
  const Chunk* chunks;
  size_t chunk_count;
  uint64_t* found;  // checksums by chunk; null: copy only

  static void Run(void* context) {
    const auto& pass = *static_cast<const UnitPass*>(context);
    const uint64_t base = pass.chunks[0].offset;
    for (size_t i = 0; i < pass.chunk_count; ++i) {
      const Chunk& chunk = pass.chunks[i];
      const std::byte* const from = pass.source + (chunk.offset - base);
      if (pass.destination == nullptr) {
        if (pass.found != nullptr) pass.found[i] = Checksum64({from, chunk.bytes});
        continue;
      }
      std::byte* const to = pass.destination + (chunk.offset - base);
      if (pass.found != nullptr) {
        pass.found[i] = CopyWithChecksum64(to, from, chunk.bytes);
      } else {
        std::memcpy(to, from, chunk.bytes);
      }
    }
  }
};

std::span<const std::byte> Part(const LayerLayout& layout, std::string_view role,
                                const std::byte* data, ExpertRange experts) {
  const Section* const section = layout.Find(role);
  HP_CHECK(section != nullptr && section->expert_stride == section->expert_bytes);
  return {data + (layout.PieceOffset(*section, experts.begin) - layout.data_offset),
          section->expert_bytes * (experts.end - experts.begin)};
}

}  // namespace

struct BootSession::State {
  const Generation* generation = nullptr;
  BootOptions options;
  Clock::time_point start;
  Clock::time_point run_start;
  std::vector<std::unique_ptr<Layer>> layers;
  std::vector<Unit> units;
  HugeBuffer arena;

  std::mutex mutex;                 // guards what follows
  std::vector<BootedLayer> booted;  // reserved up front, so that spans of it stay valid
  BootReport report;
  const LayerReady* on_layer_ready = nullptr;

  Result<void> OpenLayers(const std::vector<uint32_t>& ordinals);
  Result<void> CheckMemory() const;
  Result<void> MapLayers();
  void ListUnits();
  Result<void> AllocateArena();
  Result<void> RunUnit(size_t index);
  Result<void> ReadUnit(Layer& layer, const Unit& unit, uint64_t* found);
  Result<void> RepairChunk(Layer& layer, size_t chunk_index, uint64_t found);
  void PublishReady();

  ExpertRange ExpertsOf(const LayerLayout& layout) const {
    return options.experts.value_or(ExpertRange{0, layout.geometry.experts});
  }
  // Gaps are read where all experts are, so that every byte of the region is verified.
  bool Wants(const LayerLayout& layout, const Chunk& chunk) const {
    const ExpertRange experts = ExpertsOf(layout);
    if (experts == ExpertRange{0, layout.geometry.experts}) return true;
    return chunk.section >= 0 && chunk.expert >= experts.begin && chunk.expert < experts.end;
  }
  uint64_t WantedBytes(const LayerFile& file) const {
    uint64_t bytes = 0;
    for (const Chunk& chunk : file.chunks())
      if (Wants(file.layout(), chunk)) bytes += chunk.bytes;
    return bytes;
  }
};

Result<void> BootSession::State::OpenLayers(const std::vector<uint32_t>& ordinals) {
  std::vector<Status> failures;
  for (const uint32_t ordinal : ordinals) {
    Result<LayerFile> file = generation->OpenLayer(ordinal, Encoding::kBase);
    if (!file) {
      failures.push_back(std::move(file).error());
      continue;
    }
    auto layer = std::make_unique<Layer>();
    layer->file = *std::move(file);
    const LayerLayout& layout = layer->file.layout();
    const uint64_t cached =
        layer->file.file().CachedBytes(layout.data_offset, layout.data_bytes).value_or(0);
    // A page or two may have been evicted of a file that is warm for all practical purposes.
    layer->cold = cached < layout.data_bytes - layout.data_bytes / 64;
    if (ExpertsOf(layout).end > layout.geometry.experts)
      return Fail(
          Status::Usage(Text("layer {} has no expert {}", ordinal, ExpertsOf(layout).end - 1))
              .Expected(Text("0 to {}", layout.geometry.experts - 1)));
    const uint64_t wanted_bytes = WantedBytes(layer->file);
    report.bytes_needed += wanted_bytes;
    report.bytes_metadata += layer->file.bytes_metadata();
    report.sources.push_back({ordinal,
                              options.map   ? "mapped"
                              : layer->cold ? "disk"
                                            : "page cache",
                              wanted_bytes, std::min(cached, wanted_bytes), 0});
    for (const Encoding encoding : {Encoding::kDeltaQuintal, Encoding::kDeltaNibble}) {
      // By name only: a tier this boot does not use is not opened.
      const auto stat = generation->env().Stat(generation->LayerPath(ordinal, encoding));
      if (stat && stat->type == FileType::kRegular) report.bytes_skipped += stat->bytes;
    }
    layers.push_back(std::move(layer));
  }
  report.layers_total = static_cast<uint32_t>(ordinals.size());
  if (failures.empty()) return {};
  if (failures.size() > 1)
    for (const Status& failure : failures) Log(LogLevel::kError, "{}", failure.ToString());
  return Fail(std::move(failures.front())
                  .Because(Text("{} of {} layers cannot be booted; the first", failures.size(),
                                ordinals.size())));
}

Result<void> BootSession::State::CheckMemory() const {
  if (options.map) return {};
  const MemoryLimit machine = ReadMemoryLimit();
  const uint64_t limit =
      options.memory_limit_bytes != 0 ? options.memory_limit_bytes : machine.available_bytes;
  if (report.bytes_needed <= limit) return {};
  return Fail(
      Status::Capacity("the planes do not fit in memory; nothing was read")
          .Expected(Text("{} for {} layers", FormatBytes(report.bytes_needed), report.layers_total))
          .Found(Text("{} available{}", FormatBytes(limit),
                      machine.from_cgroup ? " (cgroup limit)" : ""))
          .Advice("--map serves them from the page cache; or boot fewer --layers"));
}

Result<void> BootSession::State::MapLayers() {
  for (auto& layer : layers) {
    // Without the guard a truncated file could end the process: pread reports it instead.
    if (!options.map && (!FaultGuardInstalled() || layer->cold)) continue;
    const LayerLayout& layout = layer->file.layout();
    Result<std::unique_ptr<Mapping>> mapping =
        layer->file.file().Map(layout.data_offset, layout.data_bytes);
    if (mapping) {
      layer->mapping = *std::move(mapping);
    } else if (options.map) {
      return Fail(std::move(mapping).error());
    } else {
      Log(LogLevel::kInfo, "cannot map {}: reading it instead ({})", layer->file.file().path(),
          mapping.error().what());
    }
  }
  return {};
}

void BootSession::State::ListUnits() {
  for (size_t l = 0; l < layers.size(); ++l) {
    const std::vector<Chunk>& chunks = layers[l]->file.chunks();
    const LayerLayout& layout = layers[l]->file.layout();
    for (size_t c = 0; c < chunks.size();) {
      if (!Wants(layout, chunks[c])) {
        ++c;
        continue;
      }
      Unit unit{l, c, c, chunks[c].offset, 0};
      while (unit.end_chunk < chunks.size() && Wants(layout, chunks[unit.end_chunk]) &&
             (unit.bytes == 0 || unit.bytes + chunks[unit.end_chunk].bytes <= kUnitBytes))
        unit.bytes += chunks[unit.end_chunk++].bytes;
      c = unit.end_chunk;
      units.push_back(unit);
      ++layers[l]->units_left;
    }
  }
}

Result<void> BootSession::State::AllocateArena() {
  if (options.map) return {};
  uint64_t region_bytes = 0;
  for (const auto& layer : layers) region_bytes += layer->file.layout().data_bytes;
  HP_ASSIGN(arena, HugeBuffer::Allocate(region_bytes));
  uint64_t offset = 0;
  for (auto& layer : layers) {
    layer->landed = arena.data() + offset;
    offset += layer->file.layout().data_bytes;
  }
  // Pieces of other experts keep their places, but no memory stands behind them.
  if (report.bytes_needed < region_bytes) return {};
  // Touched here by all workers, so that landing runs at copy speed.
  constexpr uint64_t kTouchBytes = 32 * kMiB;
  if (options.progress != nullptr) options.progress->Begin("allocating", report.bytes_needed);
  return options.pool->ParallelFor(
      (arena.size() + kTouchBytes - 1) / kTouchBytes, [&](size_t index, size_t) -> Result<void> {
        if (options.cancel != nullptr) HP_TRY(options.cancel->Check());
        const TraceSpan span("allocate", kNoLayer, kTouchBytes);
        const uint64_t begin = index * kTouchBytes;
        const uint64_t end = std::min<uint64_t>(begin + kTouchBytes, arena.size());
        for (uint64_t byte = begin; byte < end; byte += kPageBytes) {
          volatile std::byte* const page = arena.data() + byte;
          *page = std::byte{0};
        }
        if (options.progress != nullptr) options.progress->Add(end - begin);
        return {};
      });
}

Result<void> BootSession::State::ReadUnit(Layer& layer, const Unit& unit, uint64_t* found) {
  const LayerLayout& layout = layer.file.layout();
  const uint64_t data_offset = unit.offset - layout.data_offset;
  UnitPass pass{nullptr, nullptr, layer.file.chunks().data() + unit.first_chunk,
                unit.end_chunk - unit.first_chunk, found};
  if (layer.mapping == nullptr) {
    std::byte* const destination = layer.landed + data_offset;
    {
      const TraceSpan span("read", layout.layer, unit.bytes, "disk");
      HP_TRY(ReadFully(layer.file.file(), unit.offset, {destination, unit.bytes}));
    }
    const TraceSpan span("verify", layout.layer, unit.bytes);
    pass.source = destination;
    UnitPass::Run(&pass);
    return {};
  }
  {
    const TraceSpan span("read", layout.layer, unit.bytes, "page cache");
    HP_TRY(layer.mapping->Populate(data_offset, unit.bytes));
  }
  const TraceSpan span("verify", layout.layer, unit.bytes);
  pass.source = layer.mapping->bytes().data() + data_offset;
  if (layer.landed != nullptr) pass.destination = layer.landed + data_offset;
  if (pass.destination == nullptr && found == nullptr) return {};
  if (!FaultGuardInstalled()) {
    UnitPass::Run(&pass);
    return {};
  }
  if (CallGuarded({pass.source, unit.bytes}, &UnitPass::Run, &pass)) return {};
  return Fail(Status::System("the file was cut short, or its disk failed, while it was read")
                  .File(layer.file.file().path())
                  .At(unit.offset)
                  .Expected(Text("{} readable bytes", unit.bytes))
                  .Found("a bus error")
                  .Advice("`hotplane verify` tells what is left of the file"));
}

Result<void> BootSession::State::RepairChunk(Layer& layer, size_t chunk_index, uint64_t found) {
  const Chunk& chunk = layer.file.chunks()[chunk_index];
  const Status error = layer.file.ChunkError(chunk_index, found);
  Log(LogLevel::kWarning, "{}: reading it once more past the page cache", error.what());
  {
    std::lock_guard lock(mutex);
    report.bytes_reread += chunk.bytes;
  }
  const uint64_t data_offset = chunk.offset - layer.file.layout().data_offset;
  if (layer.landed != nullptr) {
    HP_TRY(layer.file.RereadChunk(generation->env(), chunk_index,
                                  {layer.landed + data_offset, chunk.bytes}));
  } else {
    layer.file.file().DropCache(chunk.offset, chunk.bytes);
    HP_TRY(layer.mapping->Populate(data_offset, chunk.bytes));
    const uint64_t again = Checksum64(layer.mapping->bytes().subspan(data_offset, chunk.bytes));
    if (again != layer.file.checksums()[chunk_index])
      return Fail(layer.file.ChunkError(chunk_index, again));
  }
  std::lock_guard lock(mutex);
  report.warnings.push_back(
      Text("{}; the second read was right: look after this disk or memory", error.what()));
  return {};
}

Result<void> BootSession::State::RunUnit(size_t index) {
  const Unit& unit = units[index];
  Layer& layer = *layers[unit.layer];
  if (options.cancel != nullptr) HP_TRY(options.cancel->Check());
  if (layer.cold && index + kReadAheadUnits < units.size()) {
    const Unit& ahead = units[index + kReadAheadUnits];
    if (layers[ahead.layer]->cold)
      layers[ahead.layer]->file.file().WillNeed(ahead.offset, ahead.bytes);
  }
  std::vector<uint64_t> found(options.verify ? unit.end_chunk - unit.first_chunk : 0);
  HP_TRY(ReadUnit(layer, unit, options.verify ? found.data() : nullptr));
  for (size_t i = 0; i < found.size(); ++i) {
    const size_t chunk_index = unit.first_chunk + i;
    if (found[i] != layer.file.checksums()[chunk_index])
      HP_TRY(RepairChunk(layer, chunk_index, found[i]));
  }
  if (options.progress != nullptr) options.progress->Add(unit.bytes);
  {
    std::lock_guard lock(mutex);
    report.bytes_read += unit.bytes;
    if (options.verify) report.bytes_verified += unit.bytes;
  }
  if (layer.units_left.fetch_sub(1) == 1) PublishReady();
  return {};
}

void BootSession::State::PublishReady() {
  std::lock_guard lock(mutex);
  while (booted.size() < layers.size() && layers[booted.size()]->units_left == 0) {
    const Layer& layer = *layers[booted.size()];
    const LayerLayout& layout = layer.file.layout();
    const TraceSpan span("publish", layout.layer, layout.data_bytes);
    const std::byte* const data =
        layer.landed != nullptr ? layer.landed : layer.mapping->bytes().data();
    BootedLayer out;
    out.ordinal = layout.layer;
    out.model_index = layout.model_index;
    const ExpertRange experts = ExpertsOf(layout);
    out.first_expert = experts.begin;
    out.geometry = layout.geometry;
    out.geometry.experts = experts.end - experts.begin;
    out.planes13 = Part(layout, "planes13", data, experts);
    out.sc13 = Part(layout, "sc13", data, experts);
    out.planes2 = Part(layout, "planes2", data, experts);
    out.sc2 = Part(layout, "sc2", data, experts);
    report.sources[booted.size()].seconds_ready = SecondsSince(run_start);
    booted.push_back(out);
    if (on_layer_ready != nullptr && *on_layer_ready) (*on_layer_ready)(out);
  }
}

BootSession::BootSession(std::unique_ptr<State> state) : state_(std::move(state)) {}
BootSession::~BootSession() = default;

Result<std::unique_ptr<BootSession>> BootSession::Open(const Generation& generation,
                                                       const BootOptions& options) {
  HP_CHECK(options.pool != nullptr);
  auto state = std::make_unique<State>();
  state->generation = &generation;
  state->options = options;
  state->start = Clock::now();
  const TraceSpan span("plan");
  HP_ASSIGN(const std::vector<uint32_t> ordinals,
            SelectLayers(options.layers, generation.manifest()));
  HP_TRY(state->OpenLayers(ordinals));
  HP_TRY(state->CheckMemory());
  HP_TRY(state->MapLayers());
  state->ListUnits();
  state->booted.reserve(state->layers.size());
  state->report.seconds_plan = SecondsSince(state->start);
  return std::unique_ptr<BootSession>(new BootSession(std::move(state)));
}

Result<void> BootSession::Run(const LayerReady& on_layer_ready) {
  State& state = *state_;
  HP_CHECK(state.booted.empty());
  const auto allocate_start = Clock::now();
  HP_TRY(state.AllocateArena());
  state.run_start = Clock::now();
  state.report.seconds_allocate =
      std::chrono::duration<double>(state.run_start - allocate_start).count();
  state.on_layer_ready = &on_layer_ready;
  if (state.options.progress != nullptr)
    state.options.progress->Begin("booting", state.report.bytes_needed);
  for (size_t i = 0; i < std::min(kReadAheadUnits, state.units.size()); ++i) {
    const Unit& unit = state.units[i];
    if (state.layers[unit.layer]->cold)
      state.layers[unit.layer]->file.file().WillNeed(unit.offset, unit.bytes);
  }
  const Result<void> result = state.options.pool->ParallelFor(
      state.units.size(), [&](size_t index, size_t) { return state.RunUnit(index); });
  state.on_layer_ready = nullptr;
  state.report.seconds_land = SecondsSince(state.run_start);
  state.report.seconds = state.report.seconds_plan + SecondsSince(allocate_start);
  return result;
}

std::span<const BootedLayer> BootSession::layers() const { return state_->booted; }
const BootReport& BootSession::report() const { return state_->report; }

}  // namespace hotplane
