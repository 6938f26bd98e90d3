#include "engine/engine.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/limits.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/number_text.h"
#include "base/topology.h"
#include "base/units.h"
#include "boot/describe.h"
#include "boot/layer_selection.h"
#include "boot/plan_facts.h"
#include "boot/source_stamp.h"
#include "checkpoint/model_config.h"
#include "engine/report_json.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

// Before anything is given back: its end may wait for streams that wait for layers.
Engine::~Engine() { OpenGates(); }

void Engine::OpenGates() {
  for (size_t gate = 0; gates_ != nullptr && gate < manifest_.layers.size(); ++gate)
    gates_->Open(gate);
}

Result<std::unique_ptr<Engine>> Engine::Open(Env& env, const EngineOptions& options) {
  if (options.boot.map && options.base_residency == Residency::kDevice)
    return Fail(Status::Usage("the bases are to be mapped, and to be on the device")
                    .Expected("the bases in the page cache, or in memory of our own")
                    .Found("both")
                    .Advice("leave out --map to land them, or --base device to map them"));
  std::unique_ptr<Engine> engine(new Engine(env, options));
  engine->pool_ = std::make_unique<WorkerPool>(options.worker_count);
  HP_TRY(engine->OpenGeneration());
  HP_TRY(engine->OpenDevice());
  if (engine->generation_ != nullptr) {
    engine->manifest_ = engine->generation_->manifest();
    const ZeroMode stored = engine->manifest_.identity.zero_mode;
    if (options.zero_mode && *options.zero_mode != stored)
      return Fail(Status::Usage("the generation was built with another zero mode")
                      .File(engine->generation_->directory())
                      .Expected(Text("--zero-mode {}", ZeroModeName(*options.zero_mode)))
                      .Found(std::string(ZeroModeName(stored)))
                      .Advice("leave --zero-mode out, or `hotplane build` with it first"));
  }
  engine->generation_id_ = GenerationOf(engine->manifest_.identity);
  if (engine->device_ != nullptr) {
    HP_ASSIGN(engine->gates_, engine->device_->NewGates(engine->manifest_.layers.size()));
  }
  if (engine->generation_ != nullptr) {
    engine->options_.records.worker_count = options.worker_count;
    uint64_t& cache_bytes = engine->options_.records.delta_cache_bytes;
    cache_bytes = std::max(cache_bytes, options.pin_delta_bytes);
    engine->records_ =
        std::make_unique<ExpertRecords>(*engine->generation_, engine->options_.records);
    engine->compute_ = std::make_unique<ExpertCompute>(*engine->records_, options.worker_count,
                                                       options.isa, engine->device_.get());
  }
  return engine;
}

Result<void> Engine::OpenDevice() {
  if (!options_.device.cuda) return {};
  options_.device_options.thread_count = pool_->worker_count();
  HP_ASSIGN(device_, OpenCudaDevice(options_.device.ordinal, options_.device_options));
  const bool may_build = !options_.checkpoint.empty() && !options_.no_build;
  if (may_build) HP_TRY(device_->LoadQuantizer());
  const DeviceTimes times = device_->times();
  report_.device = device_->name();
  report_.seconds_device = times.all;
  report_.seconds_device_context = times.context;
  report_.seconds_device_ring = times.ring;
  report_.bytes_ring = device_->pinned_bytes();
  const DeviceMemory at_open = device_->memory_at_open();
  report_.bytes_device_context = at_open.total_bytes - at_open.free_bytes;
  return {};
}

// Where memory was taken: the driver's own, for streams and kernels, is known to it alone. What
// others take or give back meanwhile counts too.
void Engine::NoteDeviceMemory() {
  if (device_ == nullptr) return;
  const Result<DeviceMemory> memory = device_->Memory();
  if (!memory) return;
  const uint64_t at_open = device_->memory_at_open().free_bytes;
  const uint64_t taken = at_open - std::min(at_open, memory->free_bytes);
  const std::lock_guard lock(mutex_);
  report_.peak_device_bytes = std::max(report_.peak_device_bytes, taken);
}

// What bases may take where they land.
Result<uint64_t> Engine::DeviceBytes() const {
  const uint64_t asked = options_.boot.memory_limit_bytes;
  if (device_ == nullptr) return asked != 0 ? asked : ReadMemoryLimit().available_bytes;
  HP_ASSIGN(const DeviceMemory memory, device_->Memory());
  const uint64_t usable = UsableDeviceBytes(memory.free_bytes);
  return asked != 0 ? std::min(asked, usable) : usable;
}

Result<void> Engine::OpenGeneration() {
  const Result<Store> store = Store::Open(env_, options_.store_directory);
  const bool may_build = !options_.checkpoint.empty() && !options_.no_build;
  std::vector<Store::Entry> candidates;
  if (store) {
    HP_ASSIGN(candidates, store->FindGenerations(options_.generation_prefix));
  }
  if (!store || candidates.empty()) {
    const bool empty =
        !store || store->ListGenerations().value_or(std::vector<Digest128>()).empty();
    if (empty && may_build && options_.generation_prefix.empty()) return CreateGeneration();
    if (!store) return Fail(store.error());
  }
  if (candidates.size() > 1 && options_.generation_prefix.empty() && !options_.checkpoint.empty())
    HP_TRY(KeepOfCheckpoint(candidates));
  std::string name = options_.generation_prefix;
  if (!candidates.empty()) {
    ShardRequest request = options_.shard;
    request.builds = may_build;
    HP_ASSIGN(GenerationChoice choice,
              ChooseGeneration(candidates, request, options_.store_directory));
    name = ToHex(choice.id);
    choice_warnings_ = std::move(choice.warnings);
  }
  HP_ASSIGN(const Generation generation,
            store->OpenGeneration(name, {.cancel = options_.boot.cancel,
                                         .stall_seconds = options_.build.stall_seconds}));
  HP_ASSIGN(rank_, ChooseRank(options_.shard, generation.world(), generation.directory()));
  generation_ = std::make_unique<Generation>(generation.ForRank(rank_));
  return {};
}

// Of several generations those that were built from this checkpoint; all, where none was.
Result<void> Engine::KeepOfCheckpoint(std::vector<Store::Entry>& candidates) {
  HP_TRY(EnsureCold(/*may_write=*/true));
  std::vector<Store::Entry> mine;
  for (const Store::Entry& entry : candidates) {
    if (!entry.identity) continue;
    if (options_.zero_mode && *options_.zero_mode != entry.identity->zero_mode) continue;
    if (GenerationOf(cold_->MakeManifestLike(*entry.identity).identity) == entry.id)
      mine.push_back(entry);
  }
  if (!mine.empty()) candidates = std::move(mine);
  return {};
}

Result<void> Engine::CheckRoomForWanted() const {
  HP_ASSIGN(const PlanConfig wanted, SelectWanted());
  uint64_t bytes = 0;
  const auto add = [&](const std::vector<uint32_t>& layers, Encoding encoding) {
    for (const uint32_t layer : layers)
      bytes +=
          PlanLayerLayout(encoding,
                          manifest_.layers[layer].geometry.OfShard(manifest_.identity.shard_world))
              .file_bytes;
  };
  if (wanted.base) add(wanted.layers, Encoding::kBase);
  add(wanted.delta_layers, wanted.delta_encodings.front());
  return CheckRoomForNew(env_, options_.store_directory, manifest_, bytes);
}

Result<void> Engine::CreateGeneration() {
  HP_TRY(EnsureCold(/*may_write=*/true));
  Identity wanted;
  wanted.zero_mode = options_.zero_mode.value_or(ZeroMode::kAuto);
  wanted.shard_world = options_.shard.world.value_or(1);
  manifest_ = cold_->MakeManifestLike(wanted);
  HP_TRY(CheckShardWorld(manifest_));
  HP_ASSIGN(rank_, ChooseRank(options_.shard, wanted.shard_world, options_.store_directory));
  HP_TRY(Store::CheckPlace(env_, options_.store_directory));
  if (options_.dry_run) return {};
  HP_TRY(CheckRoomForWanted());
  HP_ASSIGN(const Generation generation,
            Store::OpenOrCreateGeneration(env_, options_.store_directory, manifest_, Waiting()));
  generation_ = std::make_unique<Generation>(generation.ForRank(rank_));
  return {};
}

LockWaiting Engine::Waiting() const {
  return {options_.boot.cancel, options_.build.stall_seconds, options_.boot.progress};
}

Result<void> Engine::EnsureCold(bool may_write) {
  if (cold_ == nullptr) {
    if (options_.boot.progress != nullptr)
      options_.boot.progress->Begin("fingerprinting the checkpoint", 0);
    HP_ASSIGN(cold_, ColdLayers::Open(env_, options_.checkpoint));
  }
  if (paired_ || generation_ == nullptr) return {};
  HP_TRY(cold_->Pair(*generation_, may_write && !options_.dry_run));
  // The manifest holds what the config tells beside the weights: the store checks that too.
  const Manifest manifest = cold_->MakeManifestLike(generation_->manifest().identity);
  if (manifest != generation_->manifest())
    HP_TRY(Store::OpenOrCreateGeneration(env_, options_.store_directory, manifest, Waiting()));
  paired_ = true;
  return {};
}

// Everything is there and a checkpoint was named: is it this store's? Its shards are opened only
// when they do not look like those that the store was built from.
Result<void> Engine::ComparePresent() {
  if (paired_) return {};
  const Result<std::string> stamp = MakeSourceStamp(env_, options_.checkpoint);
  if (stamp && MatchesSourceStamp(*generation_, *stamp)) {
    Log(LogLevel::kInfo,
        "the store is complete and {} has not changed since it was built from: "
        "no shard is opened",
        options_.checkpoint);
    return {};
  }
  const Result<void> opened =
      stamp ? EnsureCold(/*may_write=*/false) : Result<void>(Fail(stamp.error()));
  if (opened) return {};
  const Status& failure = opened.error();
  // One that is read as a checkpoint is another model's; of one that is damaged nothing is known,
  // and nothing is wanted.
  if (failure.code() == StatusCode::kData) {
    const Result<Checkpoint> checkpoint = Checkpoint::Open(env_, options_.checkpoint);
    if (checkpoint && ParseModelConfig(checkpoint->config_text(), failure.file())) return opened;
  }
  const bool interrupted =
      failure.code() == StatusCode::kInterrupted || failure.code() == StatusCode::kTerminated;
  if (interrupted) return opened;
  Warn(Text("the store is complete; {} could not be compared with it: {}", options_.checkpoint,
            failure.ToLine()));
  return {};
}

// Layers and tiers, by what is asked for and the model.
Result<PlanConfig> Engine::SelectWanted() const {
  PlanConfig config;
  HP_ASSIGN(config.layers, SelectLayers(options_.boot.layers, manifest_));
  config.base = options_.base;
  if (options_.delta) {
    std::vector<uint32_t> without;
    if (!options_.no_delta_layers.empty()) {
      HP_ASSIGN(without, SelectLayers(options_.no_delta_layers, manifest_));
    }
    HP_ASSIGN(const std::vector<uint32_t> wanted, SelectLayers(options_.delta_layers, manifest_));
    for (const uint32_t layer : wanted)
      if (std::binary_search(config.layers.begin(), config.layers.end(), layer) &&
          !std::binary_search(without.begin(), without.end(), layer))
        config.delta_layers.push_back(layer);
  }
  config.delta_encodings = options_.delta_encodings;
  return config;
}

Result<PlanConfig> Engine::MakeConfig() const {
  HP_ASSIGN(PlanConfig config, SelectWanted());
  config.base_residency = options_.boot.map ? Residency::kHost : options_.base_residency;
  HP_ASSIGN(config.device_bytes, DeviceBytes());
  config.reserve_bytes = options_.reserve_bytes;
  config.experts = options_.experts;
  config.delta_pinned_bytes = options_.pin_delta_bytes;
  config.host_bytes = ReadMemoryLimit().available_bytes;
  config.device_is_host = device_ == nullptr;
  config.keeps_built = device_ != nullptr && device_->verifies();
  config.no_build = options_.no_build;
  config.shard_rank = rank_;
  config.shard_world = manifest_.identity.shard_world;
  return config;
}

Result<void> Engine::Plan() {
  HP_CHECK(!plan_);
  const auto start = Clock::now();
  HP_ASSIGN(config_, MakeConfig());
  StoreProbe probe;
  if (generation_ != nullptr) {
    probe = ProbeStore(*generation_, *config_);
  } else {
    probe.complete = false;
    probe.facts.directory = options_.store_directory;
    probe.facts.manifest = manifest_;
    probe.facts.layers.resize(manifest_.layers.size());
  }
  if (!options_.checkpoint.empty() && !options_.no_build) {
    if (probe.complete) {
      HP_TRY(ComparePresent());
    } else {
      HP_TRY(EnsureCold(/*may_write=*/true));
      probe.facts.checkpoint = cold_->facts();
      if (generation_ != nullptr)
        probe.facts.store_writable = options_.dry_run || options_.build.no_lock
                                         ? generation_->env().MayCreateIn(generation_->directory())
                                         : StoreWritable(*generation_, config_->layers.front());
    }
  }
  HP_ASSIGN(plan_, PlanBoot(probe.facts, *config_));
  for (const std::string& warning : plan_->warnings) Warn(warning);
  for (std::string& warning : choice_warnings_) {
    plan_->warnings.push_back(warning);
    const std::lock_guard lock(mutex_);
    report_.warnings.push_back(std::move(warning));
  }
  choice_warnings_.clear();
  if (!options_.boot.verify) Warn("no byte is checked, as asked");
  if (records_ != nullptr)
    for (const PlanEntry& entry : plan_->entries)
      if (TierOf(entry.encoding) == Tier::kDelta && entry.action != PlanAction::kSkip)
        records_->reader().PreferDelta(entry.layer, entry.encoding);
  for (const PlanEntry& entry : plan_->entries)
    if (entry.encoding == Encoding::kBase && entry.action != PlanAction::kSkip)
      bases_.push_back(&entry);
  TellWhatStaysOnTheHost();
  std::lock_guard lock(mutex_);
  layers_.reserve(bases_.size());
  for (const PlanEntry* entry : bases_) promised_.emplace(entry->layer, Promise(*entry));
  planned_ = true;
  published_.notify_all();
  report_.bytes_metadata = probe.bytes_metadata;
  report_.seconds_plan = SecondsSince(start);
  return {};
}

BootedLayer Engine::Promise(const PlanEntry& entry) const {
  const ManifestLayer& of_model = manifest_.layers[entry.layer];
  BootedLayer layer;
  layer.ordinal = entry.layer;
  layer.model_index = of_model.model_index;
  layer.geometry = of_model.geometry.OfShard(manifest_.identity.shard_world);
  if (options_.experts) {
    layer.first_expert = options_.experts->begin;
    layer.geometry.experts = options_.experts->end - options_.experts->begin;
  }
  if (device_ != nullptr && entry.residency == Residency::kDevice)
    layer.device = device_->ordinal();
  return layer;
}

// Of bases that go where there is room: who expected all of them on the device reads it here.
void Engine::TellWhatStaysOnTheHost() const {
  if (config_->base_residency != Residency::kAuto) return;
  const auto on_host = std::count_if(bases_.begin(), bases_.end(), [](const PlanEntry* entry) {
    return entry->residency == Residency::kHost;
  });
  if (on_host == 0) return;
  Log(LogLevel::kInfo,
      "{} of {} do not fit in the {} that there are for them: served from the page cache of the "
      "host",
      on_host, Counted(bases_.size(), "layers"), FormatBytes(plan_->device_limit_bytes));
}

// Memory for the bases that are built on the device, all at once, and where each of them is in it.
Result<std::map<uint32_t, std::byte*>> Engine::PlaceKept() {
  std::map<uint32_t, uint64_t> offsets;
  std::vector<ByteRange> wanted;
  uint64_t bytes = 0;
  for (const PlanEntry* entry : bases_) {
    if (entry->bytes_kept == 0) continue;
    const LayerLayout layout = PlanLayerLayout(
        Encoding::kBase,
        manifest_.layers[entry->layer].geometry.OfShard(manifest_.identity.shard_world));
    offsets[entry->layer] = bytes;
    if (!options_.experts) wanted.push_back({bytes, layout.data_bytes});
    for (const Section& section : layout.sections)
      if (options_.experts)
        wanted.push_back(
            {bytes + layout.PieceOffset(section, options_.experts->begin) - layout.data_offset,
             section.expert_stride * (options_.experts->end - options_.experts->begin)});
    bytes += layout.data_bytes;
  }
  std::map<uint32_t, std::byte*> places;
  if (bytes == 0) return places;
  HP_ASSIGN(kept_memory_, device_->Allocate(bytes, wanted));
  for (const auto& [layer, offset] : offsets) places[layer] = kept_memory_->data() + offset;
  return places;
}

// Warnings have told of the damaged ones; here is all of it, and what it will cost.
void Engine::TellWhatIsBuilt() const {
  std::string what;
  for (const Tier tier : {Tier::kBase, Tier::kDelta}) {
    std::vector<uint32_t> layers;
    for (const uint32_t layer : config_->layers)
      if (plan_->Of(layer, tier).action == PlanAction::kBuild) layers.push_back(layer);
    if (layers.empty()) continue;
    what += Text("{}{} of layer{} {}", what.empty() ? "" : "; ", TierName(tier),
                 layers.size() == 1 ? "" : "s", LayerListText(layers, manifest_));
  }
  Log(LogLevel::kInfo, "the store lacks {}: built from {}, {} to read and {} to write", what,
      options_.checkpoint, FormatBytes(plan_->bytes_checkpoint), FormatBytes(plan_->bytes_built));
}

Result<void> Engine::StartBuilds() {
  if (!plan_->builds()) return {};
  TellWhatIsBuilt();
  std::map<uint32_t, std::vector<Encoding>> needs;
  for (const PlanEntry& entry : plan_->entries)
    if (entry.action == PlanAction::kBuild) needs[entry.layer].push_back(entry.encoding);
  BuildOptions build = options_.build;
  build.zero_mode = manifest_.identity.zero_mode;
  build.rank = rank_;  // the others build theirs, maybe elsewhere
  build.cancel = options_.boot.cancel;
  build.progress = options_.boot.progress;
  if (build.staging_limit_bytes == 0) {
    // A quarter of what the planes leave.
    const uint64_t available = ReadMemoryLimit().available_bytes;
    const uint64_t planes_bytes = device_ == nullptr ? plan_->bytes_device : 0;
    build.staging_limit_bytes = (available - std::min(available, planes_bytes)) / 4 + 64 * kMiB;
  }
  if (build.progress != nullptr)
    build.progress->Begin("building and booting",
                          plan_->bytes_checkpoint + plan_->bytes_store - plan_->bytes_pinned);
  build.device = device_.get();
  if (device_ != nullptr) {
    // What the planes leave; 0 would be no limit.
    HP_ASSIGN(const uint64_t device_bytes, DeviceBytes());
    const uint64_t taken = plan_->bytes_device + options_.reserve_bytes;
    build.device_limit_bytes = std::max<uint64_t>(1, device_bytes - std::min(device_bytes, taken));
    HP_ASSIGN(kept_places_, PlaceKept());
    build.keep = kept_places_;
    build.kept_experts = options_.experts;
  }
  std::vector<uint32_t> bases;
  for (const PlanEntry* entry : bases_) bases.push_back(entry->layer);
  return cold_->Start(*generation_, build, needs, bases);
}

Result<void> Engine::Boot(const LayerReady& on_layer_ready) {
  HP_CHECK(!ended_ && !options_.dry_run);
  on_layer_ready_ = &on_layer_ready;
  const double planned_seconds = plan_ ? report_.seconds_plan : 0;
  const auto start = Clock::now();
  const Result<void> booted = [&]() -> Result<void> {
    try {
      if (!plan_) HP_TRY(Plan());
      HP_TRY(StartBuilds());
      HP_TRY(BootBases());
      if (cold_ != nullptr && cold_->started()) HP_TRY(cold_->queue().Finish());
      return PinDelta();
    } catch (const std::bad_alloc&) {
      // An end for those that wait too.
      return Fail(Status::Capacity("out of memory"));
    }
  }();
  on_layer_ready_ = nullptr;
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
    if (!booted) failure_ = booted.error();
    if (plan_) {
      report_.layers_total = plan_->layers_total;
      report_.bytes_needed += plan_->bytes_store;
      report_.bytes_skipped = plan_->bytes_skipped;
    }
    report_.seconds = planned_seconds + SecondsSince(start);
  }
  published_.notify_all();
  OpenGates();
  HP_TRY(booted);
  if (options_.measure_limit) MeasureLimit();
  return {};
}

// Runs of layers that are ready at the moment and live in the same place, one session each, in
// order; where the next layer is still being built, it is waited for.
Result<void> Engine::BootBases() {
  const auto start = Clock::now();
  while (layers_.size() < bases_.size()) {
    const size_t begin = layers_.size();
    if (bases_[begin]->action == PlanAction::kBuild)
      HP_TRY(cold_->queue().Wait(bases_[begin]->layer));
    seconds_since_boot_began_ = SecondsSince(start);
    HP_TRY(BootSegment(begin, SegmentEnd(begin)));
  }
  return {};
}

// As a bulk pass: what a consumer of an early layer has asked for meanwhile keeps its place. A
// record that cannot be read does not end the boot: it was not promised to be in memory, and
// whoever needs it is told.
Result<void> Engine::PinDelta() {
  if (plan_->bytes_pinned == 0) return {};
  const auto start = Clock::now();
  if (options_.boot.progress != nullptr)
    options_.boot.progress->Begin("pinning delta records", plan_->bytes_pinned);
  uint64_t read_bytes = 0;
  for (const PlanEntry& entry : plan_->entries) {
    if (entry.pinned_experts == 0) continue;
    const Result<void> pinned = PinLayer(entry, &read_bytes);
    if (pinned) continue;
    if (pinned.error().code() != StatusCode::kData && pinned.error().code() != StatusCode::kSystem)
      return pinned;
    Warn(Text("layer {}: its delta records are not all pinned: {}", entry.layer,
              pinned.error().ToLine()));
  }
  std::lock_guard lock(mutex_);
  report_.bytes_read += read_bytes;
  report_.bytes_read_delta = read_bytes;
  report_.bytes_verified += read_bytes;
  report_.bytes_pinned = records_->cache_stats(RecordKind::kDelta).bytes_max;
  report_.seconds_pin = SecondsSince(start);
  return {};
}

Result<void> Engine::PinLayer(const PlanEntry& entry, uint64_t* read_bytes) {
  // Some 100 MB: a step of the progress, and how long a cancellation may go unnoticed.
  constexpr uint32_t kExpertsAtOnce = 16;
  HP_ASSIGN(const RecordShape shape, records_->reader().Shape(RecordKind::kDelta, entry.layer));
  const uint32_t begin = options_.experts ? options_.experts->begin : 0;
  for (uint32_t done = 0; done < entry.pinned_experts; done += kExpertsAtOnce) {
    if (options_.boot.cancel != nullptr) HP_TRY(options_.boot.cancel->Check());
    std::vector<uint32_t> experts(std::min(kExpertsAtOnce, entry.pinned_experts - done));
    std::iota(experts.begin(), experts.end(), begin + done);
    const uint64_t before = records_->cache_stats(RecordKind::kDelta).prefetched;
    const Result<size_t> cached = records_->Prefetch(RecordKind::kDelta, entry.layer, experts);
    // Beside a record that is bad the others were read.
    const uint64_t read = records_->cache_stats(RecordKind::kDelta).prefetched - before;
    *read_bytes += read * shape.bytes;
    if (options_.boot.progress != nullptr) options_.boot.progress->Add(read * shape.bytes);
    if (!cached) return Fail(cached.error());
    if (*cached == experts.size()) continue;
    Warn(Text("layer {}: {} delta records found no place in pinned memory", entry.layer,
              entry.pinned_experts - done - *cached));
    break;
  }
  return {};
}

size_t Engine::SegmentEnd(size_t begin) const {
  size_t end = begin + 1;
  while (end < bases_.size() && bases_[end]->residency == bases_[begin]->residency &&
         (bases_[end]->action != PlanAction::kBuild || cold_->queue().IsBuilt(bases_[end]->layer)))
    ++end;
  return end;
}

Result<void> Engine::BootSegment(size_t begin, size_t end) {
  const Result<void> ran = RunSession(begin, end);
  return ran ? ran : Recover(ran.error());
}

Result<void> Engine::RunSession(size_t begin, size_t end) {
  BootOptions options = options_.boot;
  options.pool = pool_.get();
  options.device = device_.get();
  options.map = bases_[begin]->residency == Residency::kHost;
  options.experts = options_.experts;
  options.layers.clear();
  for (size_t i = begin; i < end; ++i)
    options.layers += Text("{}{}", i == begin ? "" : ",", bases_[i]->layer);
  for (size_t i = begin; i < end; ++i)
    if (const auto place = kept_places_.find(bases_[i]->layer); place != kept_places_.end())
      options.places[place->first] = {place->second, cold_->IsKept(place->first)};
  // Building and landing share one account of what is done.
  const bool building = cold_ != nullptr && cold_->started();
  if (building) options.progress = nullptr;
  HP_ASSIGN(std::unique_ptr<BootSession> session, BootSession::Open(*generation_, options));
  const double start_seconds = seconds_since_boot_began_;
  Result<void> told;
  const Result<void> ran = session->Run([&](const BootedLayer& layer) {
    if (building && options_.boot.progress != nullptr)
      options_.boot.progress->Add(bases_[layers_.size()]->bytes_store);
    // Mapped pages may leave the page cache and come back unverified; landed ones stay.
    if (layer.device < 0 && !options.map && options.verify && !options.experts)
      records_->reader().SetResident(layer.ordinal,
                                     {layer.planes13, layer.sc13, layer.planes2, layer.sc2});
    // By then all is there that landing takes.
    if (layers_.size() == begin) NoteDeviceMemory();
    Result<void> published = Publish(layer);
    if (told) told = std::move(published);
  });
  NoteDeviceMemory();
  AddReport(*session, start_seconds, begin);
  sessions_.push_back(std::move(session));
  HP_TRY(ran);
  return told;
}

// A layer that the device could not be told of is published, and its stream waits on: until the
// boot ends with that failure.
Result<void> Engine::Publish(const BootedLayer& layer) {
  Result<void> told;
  {
    // Together: whoever makes the layer ready on the device finds it published, or is found here.
    std::lock_guard lock(mutex_);
    if (compute_ != nullptr) told = compute_->Publish(layer);
    layers_.push_back(layer);
  }
  published_.notify_all();
  if (gates_ != nullptr && told) gates_->Open(layer.ordinal);
  if (on_layer_ready_ != nullptr && *on_layer_ready_) (*on_layer_ready_)(layer);
  return told;
}

// What a failed session read of layers that it did not publish is read again by the next one.
void Engine::AddReport(const BootSession& session, double start_seconds, size_t published_before) {
  const BootReport& part = session.report();
  const size_t published_count = session.layers().size();
  uint64_t published_bytes = 0;
  uint64_t kept_bytes = 0;
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < published_count; ++i) {
    BootReport::LayerSource source = part.sources[i];
    source.seconds_ready += start_seconds;
    (source.kept ? kept_bytes : published_bytes) += source.bytes;
    // What was to be built here, and another process has built, is read from its file after all.
    const bool planned_kept = bases_[published_before + i]->bytes_kept > 0;
    if (planned_kept && !source.kept) report_.bytes_needed += source.bytes;
    report_.sources.push_back(source);
  }
  HP_CHECK(layers_.size() == published_before + published_count);
  const uint64_t read_bytes = std::min(part.bytes_read, published_bytes);
  report_.bytes_read += read_bytes;
  report_.bytes_read_disk += part.bytes_read_disk;
  if (!part.read_path.empty()) report_.read_path = part.read_path;
  report_.bytes_reread += part.bytes_reread + (part.bytes_read - read_bytes);
  report_.bytes_kept += kept_bytes;
  report_.bytes_verified += std::min(part.bytes_verified, read_bytes + kept_bytes);
  report_.bytes_metadata += part.bytes_metadata;
  report_.seconds_allocate += part.seconds_allocate;
  report_.seconds_land += part.seconds_land;
  report_.seconds_plan += part.seconds_plan;
  report_.warnings.insert(report_.warnings.end(), part.warnings.begin(), part.warnings.end());
}

// The error of a layer file for which there is a remedy: the layer is built again, once. A file
// that may not be read is not known to be bad, and is left alone.
Result<void> Engine::Recover(const Status& error) {
  const bool of_file = error.code() == StatusCode::kData ||
                       (error.code() == StatusCode::kSystem &&
                        (error.error_number() == 0 || error.error_number() == EIO));
  const auto bad = std::find_if(bases_.begin(), bases_.end(), [&](const PlanEntry* entry) {
    return generation_->LayerPath(entry->layer, Encoding::kBase) == error.file();
  });
  if (!of_file || bad == bases_.end()) return Fail(error);
  if (options_.checkpoint.empty() || options_.no_build)
    return Fail(Status(error).Advice(
        "`hotplane boot --checkpoint CHECKPOINT` builds this layer again and boots; or remove the "
        "file and run `hotplane build`"));
  const uint32_t layer = (*bad)->layer;
  if (!rebuilt_.insert(layer).second) return Fail(error);
  Warn(Text("layer {} is built again from the checkpoint: {}", layer, error.what()));
  const Result<void> rebuilt = [&]() -> Result<void> {
    HP_TRY(EnsureCold(/*may_write=*/true));
    if (!cold_->started()) {
      BuildOptions build = options_.build;
      build.zero_mode = manifest_.identity.zero_mode;
      build.rank = rank_;
      build.cancel = options_.boot.cancel;
      HP_TRY(cold_->Start(*generation_, build, {}, {layer}));
    }
    return cold_->Rebuild(layer);
  }();
  if (rebuilt) return {};
  LogStatus(LogLevel::kError, "", error);
  return Fail(
      Status(rebuilt.error()).Because(Text("layer {} is bad and was not built again", layer)));
}

Result<const BootedLayer*> Engine::WaitLayer(uint32_t ordinal) {
  std::unique_lock lock(mutex_);
  while (true) {
    for (const BootedLayer& layer : layers_)
      if (layer.ordinal == ordinal) return &layer;
    if (failure_) return Fail(*failure_);
    if (ended_) break;
    published_.wait(lock);
  }
  return Fail(Status::Usage(Text("layer {} is not among those that this boot publishes", ordinal)));
}

void Engine::WaitPlan() {
  std::unique_lock lock(mutex_);
  published_.wait(lock, [this] { return planned_ || ended_; });
}

Result<void> Engine::StreamWaitLayer(uint32_t ordinal, void* stream) {
  if (gates_ == nullptr)
    return Fail(Status::Usage("streams wait for layers of engines with a device")
                    .Advice("boot with the device \"cuda\""));
  const Status unknown =
      Status::Usage(Text("layer {} is not among those that this boot publishes", ordinal));
  {
    const std::lock_guard lock(mutex_);
    if (ordinal >= manifest_.layers.size() || (planned_ && promised_.count(ordinal) == 0))
      return Fail(unknown);
    const bool published = std::any_of(layers_.begin(), layers_.end(),
                                       [&](const auto& layer) { return layer.ordinal == ordinal; });
    if (ended_ && !published) return Fail(failure_ ? *failure_ : unknown);
  }
  return gates_->Enqueue(ordinal, stream);
}

// Promised: a layer without its parts, which the boot is going to publish, or has failed to.
Result<BootedLayer> Engine::PublishedOrPromised(uint32_t ordinal) {
  const Result<const BootedLayer*> published = PublishedLayer(ordinal);
  if (published) return **published;
  const std::lock_guard lock(mutex_);
  const auto promised = promised_.find(ordinal);
  if (promised == promised_.end()) return Fail(published.error());
  return promised->second;
}

Result<const BootedLayer*> Engine::PublishedLayer(uint32_t ordinal) {
  const std::lock_guard lock(mutex_);
  for (const BootedLayer& published : layers_)
    if (published.ordinal == ordinal) return &published;
  return Fail(Status::Usage(Text("layer {} is not published", ordinal))
                  .Expected("a layer that the boot has handed out")
                  .Advice("wait for the layer first"));
}

Result<void> Engine::MoeForward(const MoeRequest& request) {
  HP_ASSIGN(const BootedLayer* const layer, PublishedLayer(request.layer));
  return compute_->Forward(*layer, manifest_.activation, request);
}

Result<uint64_t> Engine::MoeWorkspaceBytes(uint32_t layer, uint32_t tokens, uint32_t top_k) {
  HP_ASSIGN(const BootedLayer found, PublishedOrPromised(layer));
  HP_ASSIGN(const uint64_t bytes, compute_->PrepareOnDevice(found, tokens, top_k));
  if (!found.planes13.empty()) return bytes;
  // It may have been published before there was anything to tell of it.
  const Result<const BootedLayer*> published = PublishedLayer(layer);
  if (published) HP_TRY(compute_->Publish(**published));
  return bytes;
}

Result<void> Engine::MoeForwardOnDevice(const DeviceMoeRequest& request) {
  HP_ASSIGN(const BootedLayer layer, PublishedOrPromised(request.layer));
  return compute_->ForwardOnDevice(layer, manifest_.activation, request);
}

Result<void> Engine::TakeMoeRefusal(uint32_t layer) {
  HP_ASSIGN(const BootedLayer found, PublishedOrPromised(layer));
  const Result<void> refused = compute_->TakeRefusal(found);
  if (refused || !found.planes13.empty()) return refused;
  const std::lock_guard lock(mutex_);
  if (failure_) return Fail(*failure_);
  return Fail(Status::Usage(Text("layer {} was used before it was published", layer))
                  .Found(refused.error().found())
                  .Advice("let the stream wait for the layer before"));
}

Result<void> Engine::LoadFp4OnDevice(uint32_t layer, std::span<const uint32_t> experts) {
  HP_ASSIGN(const BootedLayer* const published, PublishedLayer(layer));
  return compute_->LoadFp4(*published, experts);
}

void Engine::Warn(std::string warning) {
  Log(LogLevel::kWarning, "{}", warning);
  std::lock_guard lock(mutex_);
  report_.warnings.push_back(std::move(warning));
}

void Engine::MeasureLimit() {
  // Less than this would be measured in the caches.
  constexpr size_t kSampleBytesMin = 64 * kMiB;
  constexpr size_t kSampleBytesMax = 512 * kMiB;
  if (device_ != nullptr) {
    const Result<DeviceRates> rates = device_->MeasureRates();
    if (rates) limit_bytes_per_second_ = rates->pinned_copy_16mib;
    return;
  }
  std::span<const std::byte> sample;
  for (const BootedLayer& layer : layers())
    if (layer.planes13.size() > sample.size()) sample = layer.planes13;
  HugeBuffer own;
  if (sample.size() < kSampleBytesMin) {
    Result<HugeBuffer> buffer = HugeBuffer::Allocate(kSampleBytesMin);
    if (!buffer) return;
    own = *std::move(buffer);
    std::memset(own.data(), 1, own.size());
    sample = own.span();
  }
  sample = sample.first(std::min(sample.size(), kSampleBytesMax));
  if (options_.boot.map) {
    limit_bytes_per_second_ = MeasureReadRate(*pool_, sample);
    return;
  }
  const Result<double> rate = MeasureCopyRate(*pool_, sample);
  if (rate) {
    limit_bytes_per_second_ = *rate;
  } else {
    Log(LogLevel::kWarning, "the memory's limit was not measured: {}", rate.error().what());
  }
}

BuildReport Engine::build_report() const {
  return cold_ == nullptr ? BuildReport{} : cold_->report();
}

std::string Engine::PlanJson() const { return BootPlanJson(*plan_, generation_id_); }

std::string Engine::ReportJson() const {
  return BootReportJson(report_, *plan_, build_report(), generation_id_, limit_bytes_per_second_);
}

}  // namespace hotplane
