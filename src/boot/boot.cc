#include "boot/boot.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "base/check.h"
#include "base/fault_guard.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/number_text.h"
#include "base/topology.h"
#include "base/trace.h"
#include "base/units.h"
#include "boot/boot_estimate.h"
#include "boot/layer_selection.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Layer {
  LayerFile file;
  std::unique_ptr<Mapping> mapping;  // of the data region; null: read with pread
  std::byte* landed = nullptr;       // in the arena; null: served from the mapping
  bool placed = false;               // `landed` is memory of others
  bool there = false;                // and holds its bytes
  bool in_cache = false;             // some of it, when the boot began
  size_t runs_left = 0;              // of its runs, those that have not landed verified
};

// Chunks that follow each other in one layer's file: one extent of the executor.
struct ChunkRun {
  size_t layer = 0;  // index into State::layers
  size_t first_chunk = 0;
  size_t end_chunk = 0;
  std::unique_ptr<Mapping> mapping;  // a slice of the layer's
};

// A part of a mapping that somebody else owns.
class MappingSlice final : public Mapping {
 public:
  MappingSlice(Mapping& whole, uint64_t offset, uint64_t bytes)
      : whole_(whole), offset_(offset), bytes_(bytes) {}
  std::span<const std::byte> bytes() const override {
    return whole_.bytes().subspan(offset_, bytes_);
  }
  Result<void> Populate(uint64_t offset, uint64_t bytes) override {
    return whole_.Populate(offset_ + offset, bytes);
  }
  // Not of a slice: what is dropped reaches beyond it.
  DroppedRange Drop(uint64_t, uint64_t) override { HP_CHECK(false); }

 private:
  Mapping& whole_;
  const uint64_t offset_;
  const uint64_t bytes_;
};

// Of mapped bytes that may go away.
Result<uint64_t> GuardedChecksum(std::span<const std::byte> bytes, const std::string& path,
                                 uint64_t offset) {
  struct Pass {
    std::span<const std::byte> bytes;
    uint64_t checksum;
    static void Run(void* context) {
      auto& pass = *static_cast<Pass*>(context);
      pass.checksum = Checksum64(pass.bytes);
    }
  };
  Pass pass{bytes, 0};
  if (!FaultGuardInstalled()) {
    Pass::Run(&pass);
  } else if (!CallGuarded(bytes, &Pass::Run, &pass)) {
    return Fail(PagesGone(path, offset, bytes.size()));
  }
  return pass.checksum;
}

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
  std::vector<ChunkRun> runs;  // in file order, layer by layer
  HugeBuffer arena;
  std::unique_ptr<DeviceArena> device_arena;
  bool bypass_cache = false;
  uint64_t bytes_to_allocate = 0;  // of the wanted bytes, those without memory
  const LayerReady* on_layer_ready = nullptr;

  mutable std::mutex mutex;  // guards what follows, and Layer::runs_left
  std::condition_variable published;
  std::vector<BootedLayer> booted;      // reserved up front, so that spans of it stay valid
  bool publishing = false;              // one worker is at it, for all
  std::optional<Result<void>> outcome;  // of Run, once it is over
  BootReport report;

  Result<void> OpenLayers(const std::vector<uint32_t>& ordinals);
  Result<void> CheckMemory() const;
  Result<void> MapLayers();
  // Landing on a device with its own memory.
  bool OnDevice() const { return options.device != nullptr && !options.map; }
  Result<void> AllocateArena();
  Result<std::byte*> AllocateMemory(uint64_t region_bytes);
  bool ChooseBypass() const;
  void ListRuns();
  std::vector<Extent> ListExtents() const;
  Result<void> Execute();
  Result<void> CheckMapped(Layer& layer, uint64_t begin, uint64_t end) const;
  Result<void> RepairChunk(Layer& layer, size_t chunk_index, uint64_t found,
                           std::span<std::byte> staged);
  void PublishReady(size_t run_index);
  BootedLayer Describe(const Layer& layer) const;
  void ReportSources(const Executor& executor);

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
    // Of some experts nothing but their pieces is read.
    layer->file.file().SetReadAhead(!options.experts);
    const LayerLayout& layout = layer->file.layout();
    const uint64_t cached =
        layer->file.file().CachedBytes(layout.data_offset, layout.data_bytes).value_or(0);
    layer->in_cache = cached > 0;
    if (ExpertsOf(layout).end > layout.geometry.experts)
      return Fail(
          Status::Usage(Text("layer {} has no expert {}", ordinal, ExpertsOf(layout).end - 1))
              .Expected(Text("0 to {}", layout.geometry.experts - 1)));
    const uint64_t wanted_bytes = WantedBytes(layer->file);
    if (const auto place = options.places.find(ordinal);
        OnDevice() && place != options.places.end()) {
      layer->landed = place->second.data;
      layer->placed = true;
      layer->there = place->second.there;
    }
    (layer->there ? report.bytes_kept : report.bytes_needed) += wanted_bytes;
    if (!layer->placed) bytes_to_allocate += wanted_bytes;
    report.bytes_metadata += layer->file.bytes_metadata();
    report.sources.push_back(
        {ordinal, "", wanted_bytes, std::min(cached, wanted_bytes), 0, layer->there});
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
    for (const Status& failure : failures) LogStatus(LogLevel::kError, "", failure);
  return Fail(std::move(failures.front())
                  .Because(Text("{} of {} layers cannot be booted; the first", failures.size(),
                                ordinals.size())));
}

Result<void> BootSession::State::CheckMemory() const {
  if (options.map) return {};
  const MemoryLimit machine = ReadMemoryLimit();
  uint64_t limit = options.memory_limit_bytes;
  if (limit == 0 && OnDevice()) {
    HP_ASSIGN(const DeviceMemory memory, options.device->Memory());
    limit = memory.free_bytes;
  } else if (limit == 0) {
    limit = machine.available_bytes;
  }
  if (bytes_to_allocate <= limit) return {};
  const std::string where = OnDevice()            ? " on " + options.device->name()
                            : machine.from_cgroup ? std::string(" (cgroup limit)")
                                                  : std::string();
  return Fail(Status::Capacity("the planes do not fit in memory; nothing was read")
                  .Expected(Text("{} for {}", FormatBytes(bytes_to_allocate),
                                 Counted(report.layers_total, "layers")))
                  .Found(Text("{} available{}", FormatBytes(limit), where))
                  .Advice("--map serves them from the page cache; or boot fewer --layers"));
}

Result<void> BootSession::State::MapLayers() {
  for (auto& layer : layers) {
    if (layer->there) continue;
    // Without the guard a truncated file could end the process: pread reports it instead.
    // Filling the page cache brings what surrounds the pieces of some experts as well.
    const bool exact = bypass_cache || options.experts.has_value();
    if (!options.map && (!FaultGuardInstalled() || (exact && !layer->in_cache))) continue;
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

Result<std::byte*> BootSession::State::AllocateMemory(uint64_t region_bytes) {
  if (!OnDevice()) {
    HP_ASSIGN(arena, HugeBuffer::Allocate(region_bytes));
    return arena.data();
  }
  // Of the layers' places in the arena, what this boot lands.
  std::vector<ByteRange> wanted;
  uint64_t layer_begin = 0;
  size_t run = 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    const std::vector<Chunk>& chunks = layers[l]->file.chunks();
    const LayerLayout& layout = layers[l]->file.layout();
    for (; run < runs.size() && runs[run].layer == l; ++run) {
      if (layers[l]->placed) continue;
      const Chunk& first = chunks[runs[run].first_chunk];
      const Chunk& last = chunks[runs[run].end_chunk - 1];
      wanted.push_back({layer_begin + (first.offset - layout.data_offset),
                        last.offset + last.bytes - first.offset});
    }
    if (!layers[l]->placed) layer_begin += layout.data_bytes;
  }
  const TraceSpan span("allocate", kNoLayer, bytes_to_allocate);
  HP_ASSIGN(device_arena, options.device->Allocate(region_bytes, wanted));
  return device_arena->data();
}

Result<void> BootSession::State::AllocateArena() {
  if (options.map) return {};
  uint64_t region_bytes = 0;
  for (const auto& layer : layers)
    if (!layer->placed) region_bytes += layer->file.layout().data_bytes;
  if (region_bytes == 0) return {};
  HP_ASSIGN(std::byte * landed, AllocateMemory(region_bytes));
  for (auto& layer : layers) {
    if (layer->placed) continue;
    layer->landed = landed;
    landed += layer->file.layout().data_bytes;
  }
  return {};
}

// Whether disk reads pass by the page cache.
bool BootSession::State::ChooseBypass() const {
  if (options.map || options.cache == CacheMode::kKeep) return false;
  if (options.cache == CacheMode::kBypass) return true;
  return PassesByCache(report.bytes_needed, OnDevice(), ReadMemoryLimit().available_bytes);
}

void BootSession::State::ListRuns() {
  for (size_t l = 0; l < layers.size(); ++l) {
    Layer& layer = *layers[l];
    const std::vector<Chunk>& chunks = layer.file.chunks();
    const LayerLayout& layout = layer.file.layout();
    for (size_t c = 0; c < chunks.size();) {
      ChunkRun run;
      run.layer = l;
      run.first_chunk = c;
      while (c < chunks.size() && Wants(layout, chunks[c])) ++c;
      run.end_chunk = c;
      if (run.end_chunk == run.first_chunk) {
        ++c;
        continue;
      }
      const uint64_t begin = chunks[run.first_chunk].offset;
      const uint64_t end = chunks[c - 1].offset + chunks[c - 1].bytes;
      if (layer.mapping != nullptr)
        run.mapping =
            std::make_unique<MappingSlice>(*layer.mapping, begin - layout.data_offset, end - begin);
      ++layer.runs_left;
      runs.push_back(std::move(run));
    }
  }
}

std::vector<Extent> BootSession::State::ListExtents() const {
  std::vector<Extent> extents;
  for (const ChunkRun& run : runs) {
    const Layer& layer = *layers[run.layer];
    const std::span<const Chunk> chunks =
        std::span(layer.file.chunks()).subspan(run.first_chunk, run.end_chunk - run.first_chunk);
    Extent extent;
    extent.file = &layer.file.file();
    extent.offset = chunks.front().offset;
    extent.bytes = chunks.back().offset + chunks.back().bytes - extent.offset;
    if (layer.landed != nullptr)
      extent.destination = layer.landed + (extent.offset - layer.file.layout().data_offset);
    extent.mapping = run.mapping.get();
    extent.chunks = chunks;
    extent.checksums = std::span(layer.file.checksums()).subspan(run.first_chunk, chunks.size());
    extent.trace_layer = layer.file.layout().layer;
    extent.there = layer.there;
    extents.push_back(extent);
  }
  return extents;
}

Result<void> BootSession::State::Execute() {
  const auto allocate_start = Clock::now();
  HP_TRY(AllocateArena());
  ExecutorOptions executor_options;
  executor_options.env = &generation->env();
  executor_options.pool = options.pool;
  executor_options.cancel = options.cancel;
  executor_options.progress = options.progress;
  executor_options.verify = options.verify;
  executor_options.bypass_cache = bypass_cache;
  executor_options.fresh_destinations = !options.map && !OnDevice();
  std::unique_ptr<LandingDevice> landing;
  if (OnDevice()) {
    HP_ASSIGN(landing, options.device->BeginLanding());
    executor_options.device = landing.get();
  }
  Executor executor(
      executor_options, ListExtents(),
      {[this](size_t index) { PublishReady(index); },
       [this](size_t index, size_t chunk, uint64_t found, std::span<std::byte> staged) {
         const ChunkRun& run = runs[index];
         return RepairChunk(*layers[run.layer], run.first_chunk + chunk, found, staged);
       }});
  HP_TRY(executor.Locate());
  run_start = Clock::now();
  report.seconds_allocate = std::chrono::duration<double>(run_start - allocate_start).count();
  if (options.progress != nullptr) options.progress->Begin("booting", report.bytes_needed);
  const Result<void> result = executor.Run();
  const std::lock_guard lock(mutex);
  ReportSources(executor);
  report.read_path = executor.disk_path();
  if (executor.needs_disk() && options.cache == CacheMode::kAuto && !options.map)
    report.read_path += executor_options.bypass_cache
                            ? "; the files do not fit in memory beside the boot"
                            : "; the files fit in memory, the next boot is warm";
  if (!report.read_path.empty()) Log(LogLevel::kInfo, "cold layers: {}", report.read_path);
  const ExecutorCounts counts = executor.counts();
  report.bytes_read = counts.bytes_from_cache + counts.bytes_from_disk;
  report.bytes_read_disk = counts.bytes_from_disk;
  report.bytes_verified = counts.bytes_verified;
  report.seconds_land = SecondsSince(run_start);
  // Where the workers do nothing but allocate and land, the time is shared out; beside a disk that
  // is waited for, allocating costs none.
  if (!executor.needs_disk()) {
    const double populating =
        counts.seconds_populating / static_cast<double>(options.pool->worker_count());
    report.seconds_allocate += populating;
    report.seconds_land -= std::min(populating, report.seconds_land);
  }
  return result;
}

// Every wanted chunk that has a byte in [begin, end) of the data region, anew: pages that left the
// page cache come back from a disk that has just been wrong.
Result<void> BootSession::State::CheckMapped(Layer& layer, uint64_t begin, uint64_t end) const {
  const LayerLayout& layout = layer.file.layout();
  for (size_t i = 0; i < layer.file.chunks().size(); ++i) {
    const Chunk& chunk = layer.file.chunks()[i];
    const uint64_t offset = chunk.offset - layout.data_offset;
    if (offset >= end || offset + chunk.bytes <= begin || !Wants(layout, chunk)) continue;
    HP_TRY(layer.mapping->Populate(offset, chunk.bytes));
    HP_ASSIGN(const uint64_t found,
              GuardedChecksum(layer.mapping->bytes().subspan(offset, chunk.bytes),
                              layer.file.file().path(), chunk.offset));
    if (found != layer.file.checksums()[i]) return Fail(layer.file.ChunkError(i, found));
  }
  return {};
}

Result<void> BootSession::State::RepairChunk(Layer& layer, size_t chunk_index, uint64_t found,
                                             std::span<std::byte> staged) {
  const Chunk& chunk = layer.file.chunks()[chunk_index];
  const Status error = layer.file.ChunkError(chunk_index, found);
  Log(LogLevel::kInfo, "{}: reading it once more past the page cache", error.what());
  {
    std::lock_guard lock(mutex);
    report.bytes_reread += chunk.bytes;
  }
  if (!staged.empty()) {
    HP_TRY(layer.file.RereadChunk(generation->env(), chunk_index, staged));
  } else {
    const uint64_t data_offset = chunk.offset - layer.file.layout().data_offset;
    const DroppedRange dropped = layer.mapping->Drop(data_offset, chunk.bytes);
    HP_TRY(CheckMapped(layer, dropped.begin, dropped.end));
  }
  std::string warning =
      Text("{}; the second read was right: look after this disk or memory", error.what());
  Log(LogLevel::kWarning, "{}", warning);
  std::lock_guard lock(mutex);
  report.warnings.push_back(std::move(warning));
  return {};
}

void BootSession::State::ReportSources(const Executor& executor) {
  std::vector<ExtentSource> sources(layers.size(), ExtentSource::kInvalid);
  for (size_t i = 0; i < runs.size(); ++i) {
    ExtentSource& source = sources[runs[i].layer];
    const bool first = source == ExtentSource::kInvalid;
    source = first || source == executor.source(i) ? executor.source(i) : ExtentSource::kBoth;
  }
  for (size_t l = 0; l < layers.size(); ++l)
    report.sources[l].source = ExtentSourceName(sources[l]);
}

BootedLayer BootSession::State::Describe(const Layer& layer) const {
  const LayerLayout& layout = layer.file.layout();
  const std::byte* const data =
      layer.landed != nullptr ? layer.landed : layer.mapping->bytes().data();
  BootedLayer out;
  out.ordinal = layout.layer;
  out.model_index = layout.model_index;
  const ExpertRange experts = ExpertsOf(layout);
  out.first_expert = experts.begin;
  if (OnDevice()) out.device = options.device->ordinal();
  out.geometry = layout.geometry;
  out.geometry.experts = experts.end - experts.begin;
  out.planes13 = Part(layout, "planes13", data, experts);
  out.sc13 = Part(layout, "sc13", data, experts);
  out.planes2 = Part(layout, "planes2", data, experts);
  out.sc2 = Part(layout, "sc2", data, experts);
  if (layout.geometry.biases) out.bias13 = Part(layout, "bias13", data, experts);
  if (layout.geometry.biases) out.bias2 = Part(layout, "bias2", data, experts);
  out.mapped = layer.landed == nullptr;
  return out;
}

// A slow consumer holds up one worker, not all: whoever comes while one is publishing leaves its
// layer to that one.
void BootSession::State::PublishReady(size_t run_index) {
  std::unique_lock lock(mutex);
  --layers[runs[run_index].layer]->runs_left;
  if (publishing) return;
  publishing = true;
  while (booted.size() < layers.size() && layers[booted.size()]->runs_left == 0) {
    const BootedLayer out = Describe(*layers[booted.size()]);
    report.sources[booted.size()].seconds_ready = SecondsSince(run_start);
    booted.push_back(out);
    published.notify_all();
    lock.unlock();
    const TraceSpan span("publish", out.ordinal, report.sources[booted.size() - 1].bytes);
    if (on_layer_ready != nullptr && *on_layer_ready) (*on_layer_ready)(out);
    lock.lock();
  }
  publishing = false;
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
  state->bypass_cache = state->ChooseBypass();
  HP_TRY(state->MapLayers());
  state->ListRuns();
  state->booted.reserve(state->layers.size());
  state->report.seconds_plan = SecondsSince(state->start);
  return std::unique_ptr<BootSession>(new BootSession(std::move(state)));
}

Result<void> BootSession::Run(const LayerReady& on_layer_ready) {
  State& state = *state_;
  {
    const std::lock_guard lock(state.mutex);
    HP_CHECK(state.booted.empty() && !state.outcome);
  }
  const auto begin = Clock::now();
  state.on_layer_ready = &on_layer_ready;
  Result<void> result = state.Execute();
  state.on_layer_ready = nullptr;
  {
    const std::lock_guard lock(state.mutex);
    state.report.seconds = state.report.seconds_plan + SecondsSince(begin);
    state.outcome = result;
  }
  state.published.notify_all();
  return result;
}

Result<BootedLayer> BootSession::WaitLayer(size_t index, const CancelToken* cancel) const {
  // How long a cancellation may go unnoticed.
  constexpr std::chrono::milliseconds kPollTime{20};
  State& state = *state_;
  if (index >= state.layers.size())
    return Fail(Status::Usage(Text("this boot has no layer at place {}", index))
                    .Expected(Text("below {}", state.layers.size())));
  std::unique_lock lock(state.mutex);
  while (index >= state.booted.size()) {
    if (state.outcome && !*state.outcome) return Fail(state.outcome->error());
    if (cancel != nullptr) HP_TRY(cancel->Check());
    state.published.wait_for(lock, kPollTime);
  }
  return state.booted[index];
}

std::span<const BootedLayer> BootSession::layers() const {
  const std::lock_guard lock(state_->mutex);
  return state_->booted;
}
const BootReport& BootSession::report() const { return state_->report; }

}  // namespace hotplane
