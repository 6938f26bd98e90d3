#include "boot/build.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/number_text.h"
#include "base/topology.h"
#include "base/trace.h"
#include "base/units.h"
#include "boot/layer_selection.h"
#include "boot/plan.h"
#include "boot/source_stamp.h"
#include "quant/slice.h"
#include "store/paths.h"
#include "store/replaceable.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void AddWanted(std::span<const Encoding> encodings, PlanesWanted& wanted) {
  for (const Encoding encoding : encodings) {
    if (encoding == Encoding::kBase) wanted.base = true;
    if (encoding == Encoding::kDeltaNibble) wanted.nibbles = true;
    if (encoding == Encoding::kDeltaQuintal) wanted.quintals = true;
  }
}

// Where the first weight of something lies in the checkpoint: sorting by it streams the files in
// order.
using FilePosition = std::tuple<uint32_t, uint64_t>;

FilePosition PositionOf(const ExpertTensors& expert) {
  FilePosition first{UINT32_MAX, UINT64_MAX};
  for (const Tensor* tensor : expert.weight)
    first = std::min(first, FilePosition{tensor->file, tensor->offset});
  return first;
}

FilePosition PositionOf(const MoeLayer& layer) {
  FilePosition first{UINT32_MAX, UINT64_MAX};
  for (const ExpertTensors& expert : layer.experts) first = std::min(first, PositionOf(expert));
  return first;
}

// The largest piece that one of `world` ranks gets: a row of nibbles is longer than its scales, or
// than a bias.
uint64_t SliceBytesMax(const MoeLayer& layer, uint32_t world) {
  if (world == 1) return 0;
  const LayerGeometry shard = layer.geometry.OfShard(world);
  return std::max(NibblePlaneBytes(shard.n13(), shard.k13()),
                  NibblePlaneBytes(shard.n2(), shard.k2()));
}

// On the disk of `directory`, which is there.
Result<void> CheckRoom(Env& env, const std::string& directory, uint64_t bytes) {
  HP_ASSIGN(const uint64_t free_bytes, env.FreeBytes(directory));
  if (bytes <= free_bytes) return {};
  return Fail(
      Status::Capacity("the layers to build do not fit on the disk")
          .File(directory)
          .Expected(Text("{} free ({} bytes)", FormatBytes(bytes), bytes))
          .Found(Text("{} free ({} bytes)", FormatBytes(free_bytes), free_bytes))
          .Advice("free space, choose another --store, or build fewer --layers or --tiers"));
}

LockWaiting WaitingOf(const BuildOptions& options) {
  return {options.cancel, options.stall_seconds, options.progress};
}

// "layer 3 (base, rank 1)"
std::string LayerText(const Generation& of_rank, uint32_t layer, Encoding encoding) {
  return Text("layer {} ({}{})", layer, EncodingName(encoding),
              of_rank.world() > 1 ? Text(", rank {}", of_rank.rank()) : "");
}

std::vector<uint32_t> ExpertsInFileOrder(const MoeLayer& layer) {
  std::vector<std::pair<FilePosition, uint32_t>> order;
  for (uint32_t e = 0; e < layer.experts.size(); ++e)
    order.emplace_back(PositionOf(layer.experts[e]), e);
  std::sort(order.begin(), order.end());
  std::vector<uint32_t> experts;
  for (const auto& [position, expert] : order) experts.push_back(expert);
  return experts;
}

}  // namespace

uint64_t SourceBytes(const MoeLayer& layer) {
  uint64_t bytes = 0;
  for (const ExpertTensors& expert : layer.experts)
    for (const Tensor* tensor : expert.All()) bytes += tensor->bytes;
  return bytes;
}

// A layer being built: its locks, its writers, and what is done. Destroyed unpublished, it removes
// the temporaries.
class CheckpointBuilds::Unit final : public LayerBuild {
 public:
  Unit(CheckpointBuilds& owner, const MoeLayer& layer)
      : owner_(owner), layer_(layer), expert_order_(ExpertsInFileOrder(layer)) {}
  ~Unit() override {
    if (piece_count_ > 0) owner_.reads_->Drop(first_piece_, piece_count_ * expert_order_.size());
  }

  // `lock` is of these files, or null where locks are not used.
  Result<void> CreateFiles(const Generation& of_rank, const std::vector<Encoding>& missing,
                           std::unique_ptr<FileLock> lock) {
    AddWanted(missing, wanted_);
    locks_.push_back(std::move(lock));
    for (const Encoding encoding : missing) {
      Output output{.rank = of_rank.rank(), .encoding = encoding, .writer = nullptr};
      HP_ASSIGN(output.writer, of_rank.CreateLayer(layer_.ordinal, encoding));
      if (encoding == Encoding::kBase) HP_TRY(BeginKeeping(output.writer->layout()));
      outputs_.push_back(std::move(output));
    }
    return {};
  }

  bool has_files() const { return !outputs_.empty(); }
  void NoteDamage() { damaged_ = true; }

  // From now on its experts are read ahead.
  void ListReads() {
    std::vector<SourcePiece> pieces;
    for (const uint32_t expert : expert_order_) {
      std::vector<SourcePiece> of_expert = ExpertQuantizer::SourcePieces(layer_, expert);
      piece_count_ = of_expert.size();
      std::move(of_expert.begin(), of_expert.end(), std::back_inserter(pieces));
    }
    first_piece_ = owner_.reads_->Add(std::move(pieces));
  }

  size_t step_count() const override { return expert_order_.size(); }
  uint64_t step_bytes() const override { return owner_.workspace_bytes_; }
  Result<void> RunStep(size_t step) override;
  Result<void> Publish() override;

 private:
  struct Output {
    uint32_t rank = 0;
    Encoding encoding = Encoding::kInvalid;
    std::unique_ptr<LayerFileWriter> writer;
  };
  Result<void> BeginKeeping(const LayerLayout& layout);
  // Where a piece of the base is kept; null: it is not.
  std::byte* PlaceOf(std::string_view role, uint32_t expert) const;
  BasePlaces PlacesOf(uint32_t expert) const;
  Result<void> WritePieces(const Output& output, uint32_t expert, const ExpertPieces& pieces,
                           std::span<std::byte> scratch);
  // `in_place`: whole, it is where it is kept already.
  Result<void> WritePiece(const Output& output, std::string_view role, uint32_t expert,
                          std::span<const std::byte> piece, bool in_place);
  Result<void> WriteGateUp(const Output& output, std::string_view role, uint32_t expert,
                           std::span<const std::byte> whole, std::span<std::byte> scratch,
                           bool in_place = false);
  Result<void> WriteDown(const Output& output, std::string_view role, uint32_t expert,
                         std::span<const std::byte> whole, std::span<std::byte> scratch,
                         bool in_place = false);
  Result<void> WriteDownBias(const Output& output, uint32_t expert,
                             std::span<const std::byte> whole, std::span<std::byte> scratch);
  Shard ShardOf(const Output& output) const { return {output.rank, owner_.generation_.world()}; }

  CheckpointBuilds& owner_;
  const MoeLayer& layer_;
  const std::vector<uint32_t> expert_order_;
  uint64_t first_piece_ = 0;
  uint64_t piece_count_ = 0;  // of one expert
  PlanesWanted wanted_;
  std::vector<std::unique_ptr<FileLock>> locks_;
  std::vector<Output> outputs_;
  bool damaged_ = false;       // one of them replaces a file
  std::byte* keep_ = nullptr;  // device memory of the base's data region; null: it is not kept
  LayerLayout keep_layout_;    // with keep_
  std::mutex mutex_;
  std::vector<SourceTensorDigest> digests_;  // guarded by mutex_
};

// What no piece covers is zero in the file.
Result<void> CheckpointBuilds::Unit::BeginKeeping(const LayerLayout& layout) {
  const auto place = owner_.options_.keep.find(layer_.ordinal);
  if (place == owner_.options_.keep.end()) return {};
  keep_ = place->second;
  keep_layout_ = layout;
  if (owner_.options_.kept_experts) return {};
  std::vector<std::byte> zeros;
  for (const Chunk& chunk : ListChunks(layout)) {
    if (chunk.section >= 0) continue;
    zeros.resize(std::max<size_t>(zeros.size(), chunk.bytes));
    HP_TRY(owner_.options_.device->Upload(std::span(zeros).first(chunk.bytes),
                                          keep_ + (chunk.offset - layout.data_offset)));
  }
  return {};
}

std::byte* CheckpointBuilds::Unit::PlaceOf(std::string_view role, uint32_t expert) const {
  const std::optional<ExpertRange>& kept = owner_.options_.kept_experts;
  if (keep_ == nullptr || (kept && (expert < kept->begin || expert >= kept->end))) return nullptr;
  const Section* const section = keep_layout_.Find(role);
  HP_CHECK(section != nullptr);
  return keep_ + (keep_layout_.PieceOffset(*section, expert) - keep_layout_.data_offset);
}

// Of a shard a device does not make the pieces as they are kept.
BasePlaces CheckpointBuilds::Unit::PlacesOf(uint32_t expert) const {
  if (owner_.generation_.world() > 1) return {};
  return {PlaceOf("planes13", expert), PlaceOf("sc13", expert), PlaceOf("planes2", expert),
          PlaceOf("sc2", expert)};
}

Result<void> CheckpointBuilds::Unit::WritePiece(const Output& output, std::string_view role,
                                                uint32_t expert, std::span<const std::byte> piece,
                                                bool in_place) {
  if (output.encoding == Encoding::kBase && !in_place)
    if (std::byte* const place = PlaceOf(role, expert); place != nullptr)
      HP_TRY(owner_.options_.device->Upload(piece, place));
  return output.writer->WritePiece(role, expert, piece);
}

Result<void> CheckpointBuilds::Unit::WriteGateUp(const Output& output, std::string_view role,
                                                 uint32_t expert, std::span<const std::byte> whole,
                                                 std::span<std::byte> scratch, bool in_place) {
  const Shard shard = ShardOf(output);
  if (shard.world == 1) return WritePiece(output, role, expert, whole, in_place);
  const std::span<std::byte> slice = scratch.first(whole.size() / shard.world);
  SliceGateUp(whole, shard, slice);
  return WritePiece(output, role, expert, slice, false);
}

Result<void> CheckpointBuilds::Unit::WriteDown(const Output& output, std::string_view role,
                                               uint32_t expert, std::span<const std::byte> whole,
                                               std::span<std::byte> scratch, bool in_place) {
  const Shard shard = ShardOf(output);
  if (shard.world == 1) return WritePiece(output, role, expert, whole, in_place);
  const std::span<std::byte> slice = scratch.first(whole.size() / shard.world);
  SliceDown(whole, layer_.geometry.hidden, shard, slice);
  return WritePiece(output, role, expert, slice, false);
}

// The ranks' outputs are summed: the bias of down must come in once, and from one rank whole, so
// that the sum is exact.
Result<void> CheckpointBuilds::Unit::WriteDownBias(const Output& output, uint32_t expert,
                                                   std::span<const std::byte> whole,
                                                   std::span<std::byte> scratch) {
  if (output.rank == 0) return WritePiece(output, "bias2", expert, whole, false);
  const std::span<std::byte> zeros = scratch.first(whole.size());
  std::ranges::fill(zeros, std::byte{0});
  return WritePiece(output, "bias2", expert, zeros, false);
}

Result<void> CheckpointBuilds::Unit::WritePieces(const Output& output, uint32_t expert,
                                                 const ExpertPieces& pieces,
                                                 std::span<std::byte> scratch) {
  if (output.encoding != Encoding::kBase) {
    const bool quintals = output.encoding == Encoding::kDeltaQuintal;
    HP_TRY(WriteGateUp(output, "fp13", expert, quintals ? pieces.quintals13 : pieces.nibbles13,
                       scratch));
    return WriteDown(output, "fp2", expert, quintals ? pieces.quintals2 : pieces.nibbles2, scratch);
  }
  const bool in_place13 = pieces.w13_in_place;
  const bool in_place2 = pieces.w2_in_place;
  HP_TRY(WriteGateUp(output, "planes13", expert, pieces.planes13, scratch, in_place13));
  HP_TRY(WriteGateUp(output, "sc13", expert, pieces.sc13, scratch, in_place13));
  HP_TRY(WriteDown(output, "planes2", expert, pieces.planes2, scratch, in_place2));
  HP_TRY(WriteDown(output, "sc2", expert, pieces.sc2, scratch, in_place2));
  if (pieces.bias13.empty()) return {};
  HP_TRY(WriteGateUp(output, "bias13", expert, pieces.bias13, scratch));
  return WriteDownBias(output, expert, pieces.bias2, scratch);
}

Result<void> CheckpointBuilds::Unit::RunStep(size_t step) {
  const uint32_t expert = expert_order_[step];
  // Before the workspace: a device that failed may still read from its memory.
  std::optional<TakenPieces> reads;
  reads.emplace(*owner_.reads_, first_piece_ + step * piece_count_, piece_count_);
  HP_ASSIGN(Workspace workspace, owner_.TakeWorkspace());
  std::vector<SourceTensorDigest> digests;
  const Result<ExpertPieces> made = workspace.quantizer.Run(
      owner_.checkpoint_, layer_, expert, wanted_, PlacesOf(expert), *reads, &digests);
  if (!made) {
    owner_.SetAside(std::move(workspace));
    return Fail(made.error());
  }
  const ExpertPieces& pieces = *made;
  reads.reset();
  for (const Output& output : outputs_) {
    if (Result<void> wrote = WritePieces(output, expert, pieces, workspace.slice.span()); !wrote) {
      owner_.SetAside(std::move(workspace));
      return wrote;
    }
  }
  const uint64_t bytes_read = workspace.quantizer.bytes_read();
  owner_.ReturnWorkspace(std::move(workspace));
  if (owner_.options_.progress != nullptr) owner_.options_.progress->Add(bytes_read);
  std::lock_guard lock(mutex_);
  std::move(digests.begin(), digests.end(), std::back_inserter(digests_));
  return {};
}

Result<void> CheckpointBuilds::Unit::Publish() {
  const TraceSpan span("publish", layer_.ordinal);
  HP_TRY(owner_.checkpoint_.CheckUnchanged());
  SourceRecord record;
  record.generation = owner_.generation_.id();
  record.layer = layer_.ordinal;
  record.tensors = std::move(digests_);
  std::sort(record.tensors.begin(), record.tensors.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  std::unique_ptr<FileLock> publishing;
  if (!owner_.options_.no_lock) {
    HP_ASSIGN(publishing,
              owner_.generation_.LockPublishing(layer_.ordinal, WaitingOf(owner_.options_)));
  }
  // The record goes first: a layer file never stands without the proof of what it was made from,
  // and a tier added later from changed weights is refused here, before anything of it is visible.
  HP_TRY(owner_.generation_.PublishSourceRecord(record));
  uint64_t bytes = 0;
  for (const Output& output : outputs_) {
    HP_TRY(output.writer->Publish());
    bytes += output.writer->layout().file_bytes;
  }
  outputs_.clear();
  publishing.reset();
  locks_.clear();
  {
    std::lock_guard lock(owner_.mutex_);
    ++owner_.report_.layers_built;
    if (damaged_) ++owner_.report_.layers_rebuilt;
    owner_.report_.bytes_built += bytes;
    if (keep_ != nullptr) owner_.kept_.insert(layer_.ordinal);
  }
  Log(LogLevel::kDebug, "layer {} published, {}", record.layer, FormatBytes(bytes));
  return {};
}

CheckpointBuilds::CheckpointBuilds(const Generation& generation, const Checkpoint& checkpoint,
                                   const MoeModel& model, const BuildOptions& options)
    : generation_(generation), checkpoint_(checkpoint), model_(model), options_(options) {
  report_.generation = generation.id();
  report_.shard_world = generation.world();
  for (uint32_t rank = 0; rank < generation.world(); ++rank)
    if (!options.rank || *options.rank == rank) ranks_.push_back(generation.ForRank(rank));
  HP_CHECK(!ranks_.empty());
  HP_CHECK(options_.keep.empty() || (options_.device != nullptr && ranks_.size() == 1));
}

CheckpointBuilds::~CheckpointBuilds() {
  if (reads_ != nullptr) Log(LogLevel::kInfo, "the checkpoint was read {}", reads_->path());
}

void CheckpointBuilds::Need(uint32_t layer, std::vector<Encoding> encodings, bool proven_bad) {
  std::lock_guard lock(mutex_);
  needs_[layer] = {std::move(encodings), proven_bad};
  report_.bytes_needed += SourceBytes(model_.layers[layer]);
}

std::vector<uint32_t> CheckpointBuilds::FileOrder() const {
  std::vector<std::pair<FilePosition, uint32_t>> order;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [layer, need] : needs_)
      order.emplace_back(PositionOf(model_.layers[layer]), layer);
  }
  std::sort(order.begin(), order.end());
  std::vector<uint32_t> layers;
  for (const auto& [position, layer] : order) layers.push_back(layer);
  return layers;
}

Result<CheckpointBuilds::Absent> CheckpointBuilds::Missing(const Generation& of_rank,
                                                           uint32_t layer,
                                                           const LayerNeed& need) const {
  if (need.proven_bad) return Absent{need.encodings, true};
  Absent missing;
  for (const Encoding encoding : need.encodings) {
    const TierProbe probe = of_rank.Probe(layer, encoding);
    if (probe.presence == Presence::kUnreadable)
      return Fail(UnreadableFile(*probe.reason, LayerText(of_rank, layer, encoding)));
    if (probe.presence == Presence::kPresent) continue;
    missing.encodings.push_back(encoding);
    missing.damaged |= probe.presence == Presence::kDamaged;
  }
  return missing;
}

Result<void> CheckpointBuilds::CheckSpace() const {
  uint64_t bytes = 0;
  for (const auto& [layer, need] : needs_)
    for (const Generation& of_rank : ranks_) {
      HP_ASSIGN(const Absent missing, Missing(of_rank, layer, need));
      for (const Encoding encoding : missing.encodings)
        bytes += PlanLayerLayout(encoding, generation_.geometry(layer)).file_bytes;
    }
  return CheckRoom(generation_.env(), generation_.directory(), bytes);
}

Result<BuildQueueOptions> CheckpointBuilds::Prepare(const std::vector<uint32_t>& bases_later) {
  kernels_ = options_.kernels;
  if (kernels_ == nullptr) {
    HP_ASSIGN(kernels_, SelectKernels(std::nullopt));
  }
  std::lock_guard lock(mutex_);
  report_.isa = kernels_->name;
  HP_TRY(CheckSpace());
  workspace_layers_.clear();
  for (const auto& [layer, need] : needs_) {
    workspace_layers_.push_back(&model_.layers[layer]);
    AddWanted(need.encodings, workspace_planes_);
  }
  for (const uint32_t layer : bases_later) workspace_layers_.push_back(&model_.layers[layer]);
  if (!bases_later.empty()) workspace_planes_.base = true;
  for (const MoeLayer* layer : workspace_layers_) {
    slice_bytes_ = std::max(slice_bytes_, SliceBytesMax(*layer, generation_.world()));
    workspace_bytes_ =
        std::max(workspace_bytes_, ExpertQuantizer::WorkspaceBytes(*layer, workspace_planes_));
    for (const SourcePiece& piece : ExpertQuantizer::SourcePieces(*layer, 0))
      read_options_.slot_bytes = std::max(read_options_.slot_bytes, ReadAhead::SlotBytes(piece));
  }
  workspace_bytes_ += slice_bytes_ + read_options_.slot_bytes;
  HP_TRY(PrepareDevice());
  BuildQueueOptions queue;
  queue.batch_size = options_.batch_size;
  queue.cancel = options_.cancel;
  queue.progress = options_.progress;
  queue.stall_seconds = options_.stall_seconds;
  queue.staging_limit_bytes = options_.staging_limit_bytes != 0
                                  ? options_.staging_limit_bytes
                                  : ReadMemoryLimit().available_bytes / 4;
  const uint64_t limit = queue.staging_limit_bytes;
  if (workspace_bytes_ > limit)
    return Fail(Status::Capacity("the staging of one expert does not fit in the staging limit")
                    .Expected(Text("at least {} ({} bytes)", FormatBytes(workspace_bytes_),
                                   workspace_bytes_))
                    .Found(Text("{} ({} bytes)", FormatBytes(limit), limit))
                    .Advice(Text("--staging-limit {}M or more", workspace_bytes_ / kMiB + 1)));
  const size_t wanted_count = options_.worker_count != 0 ? options_.worker_count : UsableCpuCount();
  const size_t fitting = workspace_bytes_ == 0 ? wanted_count : limit / workspace_bytes_;
  if (fitting < wanted_count)
    Log(LogLevel::kWarning, "{} instead of {}: {} of staging each, limit {}",
        Counted(fitting, "workers"), wanted_count, FormatBytes(workspace_bytes_),
        FormatBytes(limit));
  queue.worker_count = std::min(wanted_count, fitting);
  report_.worker_count = queue.worker_count;
  read_options_.worker_count = queue.worker_count;
  read_options_.cancel = options_.cancel;
  read_options_.shared = generation_.world() > 1 && options_.rank.has_value();
  if (workspace_bytes_ == 0) return queue;
  // Workers come first; what the limit leaves is read ahead into.
  const uint64_t slot_bytes = read_options_.slot_bytes;
  read_options_.ahead_count =
      std::min<uint64_t>(ReadAhead::AheadCountMax(slot_bytes),
                         (limit - queue.worker_count * workspace_bytes_) / slot_bytes);
  queue.staging_limit_bytes -= read_options_.ahead_count * slot_bytes;
  return queue;
}

Result<void> CheckpointBuilds::PrepareDevice() {
  if (options_.device == nullptr || workspace_layers_.empty()) return {};
  report_.device = options_.device->name();
  device_bytes_ = ExpertQuantizer::DeviceBytes(workspace_layers_, workspace_planes_);
  device_left_bytes_ = options_.device_limit_bytes;
  if (device_left_bytes_ > 0) return {};
  HP_ASSIGN(const DeviceMemory memory, options_.device->Memory());
  device_left_bytes_ = memory.free_bytes;
  return {};
}

Result<void> CheckpointBuilds::StartReads() {
  if (reads_ != nullptr) return {};
  HP_ASSIGN(std::unique_ptr<ReadAhead> reads, ReadAhead::Create(checkpoint_, read_options_));
  if (options_.device != nullptr) {
    Result<std::unique_ptr<HostRegistration>> registered =
        options_.device->Register(reads->memory());
    if (registered) {
      registered_reads_ = *std::move(registered);
    } else if (registered.error().code() == StatusCode::kCapacity) {
      Log(LogLevel::kWarning, "sources go to the device more slowly: {}",
          registered.error().what());
    } else {
      return Fail(std::move(registered).error());
    }
  }
  const std::lock_guard lock(mutex_);
  reads_ = std::move(reads);
  report_.peak_staging_bytes += reads_->memory().size();
  return {};
}

Device* CheckpointBuilds::TakeDeviceShare() {
  if (options_.device == nullptr) return nullptr;
  const std::lock_guard lock(mutex_);
  if (device_left_bytes_ < device_bytes_) return nullptr;
  device_left_bytes_ -= device_bytes_;
  return options_.device;
}

Result<ExpertQuantizer> CheckpointBuilds::NewQuantizer() {
  Device* const device = TakeDeviceShare();
  Result<ExpertQuantizer> quantizer = ExpertQuantizer::Create(
      *kernels_, workspace_layers_, workspace_planes_, options_.zero_mode, device);
  if (quantizer || device == nullptr || quantizer.error().code() != StatusCode::kCapacity)
    return quantizer;
  Log(LogLevel::kWarning, "a worker quantizes on the CPU: {}", quantizer.error().what());
  return ExpertQuantizer::Create(*kernels_, workspace_layers_, workspace_planes_,
                                 options_.zero_mode);
}

Result<CheckpointBuilds::Workspace> CheckpointBuilds::TakeWorkspace() {
  {
    std::lock_guard lock(mutex_);
    if (!workspaces_.empty()) {
      Workspace workspace = std::move(workspaces_.back());
      workspaces_.pop_back();
      return workspace;
    }
  }
  Workspace workspace;
  if (slice_bytes_ > 0) {
    HP_ASSIGN(workspace.slice, HugeBuffer::Allocate(slice_bytes_));
  }
  HP_ASSIGN(workspace.quantizer, NewQuantizer());
  std::lock_guard lock(mutex_);
  report_.peak_staging_bytes += workspace.quantizer.workspace_bytes() + slice_bytes_;
  report_.peak_device_bytes += workspace.quantizer.device_bytes();
  return workspace;
}

void CheckpointBuilds::ReturnWorkspace(Workspace workspace) {
  std::lock_guard lock(mutex_);
  report_.bytes_read += workspace.quantizer.bytes_read();
  report_.bytes_quantized_on_device += workspace.quantizer.bytes_on_device();
  workspaces_.push_back(std::move(workspace));
}

// Until the builds end: to give back device memory may mean to wait for streams that wait for what
// was to be built.
void CheckpointBuilds::SetAside(Workspace workspace) {
  std::lock_guard lock(mutex_);
  failed_workspaces_.push_back(std::move(workspace));
}

Result<LayerBuilds::Opened> CheckpointBuilds::Open(uint32_t layer,
                                                   std::unique_ptr<LayerBuild>* build) {
  LayerNeed need;
  {
    std::lock_guard lock(mutex_);
    const auto entry = needs_.find(layer);
    HP_CHECK(entry != needs_.end());
    need = entry->second;
  }
  // Of all ranks or of none: the layer is read once.
  std::vector<std::unique_ptr<FileLock>> locks(ranks_.size());
  for (size_t i = 0; i < ranks_.size() && !options_.no_lock; ++i) {
    const TraceSpan span("wait", layer);
    HP_ASSIGN(locks[i], ranks_[i].LockLayer(layer, LockWait::kTry));
    if (locks[i] != nullptr) continue;
    const std::lock_guard lock(mutex_);
    busy_[layer] = i;
    return Opened::kBusy;
  }
  auto unit = std::make_unique<Unit>(*this, model_.layers[layer]);
  for (size_t i = 0; i < ranks_.size(); ++i) {
    // Whoever held the lock before us may have published what we are after.
    HP_ASSIGN(const Absent missing, Missing(ranks_[i], layer, need));
    if (missing.encodings.empty()) continue;
    HP_TRY(unit->CreateFiles(ranks_[i], missing.encodings, std::move(locks[i])));
    if (missing.damaged) unit->NoteDamage();
  }
  if (unit->has_files()) {
    HP_TRY(StartReads());
    unit->ListReads();
    *build = std::move(unit);
    return Opened::kBuild;
  }
  std::lock_guard lock(mutex_);
  ++report_.layers_attached;
  report_.bytes_needed -= SourceBytes(model_.layers[layer]);
  return Opened::kDone;
}

LayerBuilds::Holder CheckpointBuilds::HolderOf(uint32_t layer) {
  size_t place = 0;
  {
    const std::lock_guard lock(mutex_);
    place = busy_.at(layer);
  }
  return {ranks_[place].LayerLockPath(layer), ranks_[place].BuilderMark(layer)};
}

bool CheckpointBuilds::IsKept(uint32_t layer) const {
  std::lock_guard lock(mutex_);
  return kept_.count(layer) != 0;
}

BuildReport CheckpointBuilds::report() const {
  std::lock_guard lock(mutex_);
  BuildReport report = report_;
  if (reads_ == nullptr) return report;
  report.read_path = reads_->path();
  report.bytes_read_ahead = reads_->bytes_ahead();
  return report;
}

namespace {

// Whoever gives another encoding than the store has gets a second delta tier, of about the same
// size.
void TellSecondDelta(const Generation& generation, const std::vector<uint32_t>& ordinals,
                     const BuildOptions& options) {
  const Generation first = generation.ForRank(options.rank.value_or(0));
  const auto is_there = [&](uint32_t layer, Encoding encoding) {
    const auto stat = first.env().Stat(first.LayerPath(layer, encoding));
    return stat && stat->type == FileType::kRegular;
  };
  const auto wanted = [&](Encoding encoding) {
    return std::ranges::count(options.encodings, encoding) > 0;
  };
  std::vector<uint32_t> layers;
  const bool nibbles = wanted(Encoding::kDeltaNibble);
  if (nibbles == wanted(Encoding::kDeltaQuintal)) return;
  const Encoding made = nibbles ? Encoding::kDeltaNibble : Encoding::kDeltaQuintal;
  const Encoding other = nibbles ? Encoding::kDeltaQuintal : Encoding::kDeltaNibble;
  for (const uint32_t layer : ordinals)
    if (is_there(layer, other) && !is_there(layer, made)) layers.push_back(layer);
  if (layers.empty()) return;
  Log(LogLevel::kInfo, "there is a delta tier as {} of layer{} {}: one as {} is built beside it",
      nibbles ? "quintals" : "nibbles", layers.size() == 1 ? "" : "s",
      LayerListText(layers, generation.manifest()), nibbles ? "nibbles" : "quintals");
}

// Tells the builds what is missing; the rest goes into the report.
Result<void> NeedMissing(const Generation& generation, const std::vector<uint32_t>& ordinals,
                         const BuildOptions& options, CheckpointBuilds& builds,
                         BuildReport& report) {
  // True when the file is missing.
  const auto probe_file = [&](uint32_t ordinal, uint32_t rank, Encoding encoding) -> Result<bool> {
    const TierProbe probe = generation.ForRank(rank).Probe(ordinal, encoding);
    report.bytes_metadata += probe.bytes_metadata;
    if (probe.presence == Presence::kPresent) {
      report.bytes_skipped += probe.layout.file_bytes;
      return false;
    }
    if (probe.presence == Presence::kDamaged) {
      const Generation of_rank = generation.ForRank(rank);
      HP_TRY(CheckReplaceable(of_rank.env(), of_rank.LayerPath(ordinal, encoding), ordinal));
      report.warnings.push_back(Text("{} is damaged and is built again: {}",
                                     LayerText(generation.ForRank(rank), ordinal, encoding),
                                     probe.reason->what()));
      Log(LogLevel::kWarning, "{}", report.warnings.back());
    }
    return true;
  };
  std::vector<uint32_t> missing_layers;
  for (const uint32_t ordinal : ordinals) {
    bool missing = false;
    for (uint32_t rank = 0; rank < generation.world(); ++rank) {
      if (options.rank && *options.rank != rank) continue;
      for (const Encoding encoding : options.encodings) {
        HP_ASSIGN(const bool absent, probe_file(ordinal, rank, encoding));
        missing |= absent;
      }
    }
    if (missing) {
      builds.Need(ordinal, options.encodings);
      missing_layers.push_back(ordinal);
    } else {
      ++report.layers_attached;
    }
  }
  TellSecondDelta(generation, missing_layers, options);
  return {};
}

}  // namespace

Result<void> CheckRoomForNew(Env& env, const std::string& store_directory, const Manifest& manifest,
                             uint64_t bytes) {
  std::string place = JoinPath(store_directory, ToHex(GenerationOf(manifest.identity)));
  HP_ASSIGN(const FileStat there, env.Stat(JoinPath(place, kManifestName)));
  if (there.type != FileType::kInvalid) return {};
  for (;; place = ParentPath(place)) {
    HP_ASSIGN(const FileStat stat, env.Stat(place));
    if (stat.type == FileType::kDirectory) return CheckRoom(env, place, bytes);
    if (stat.type != FileType::kInvalid) return {};  // no folder can be made: that is told later
  }
}

Result<void> CheckShardWorld(const Manifest& manifest) {
  const uint32_t world = manifest.identity.shard_world;
  uint32_t units = 0;  // of 64, that every layer's intermediate size can be cut into
  for (const ManifestLayer& layer : manifest.layers)
    units = std::gcd(units, layer.geometry.intermediate / kDimensionMultiple);
  if (world > 0 && units % world == 0) return {};
  std::string fitting;
  for (uint32_t w = 2; w <= units; ++w)
    if (units % w == 0) fitting += Text("{}{}", fitting.empty() ? "" : ", ", w);
  const auto bad = std::find_if(
      manifest.layers.begin(), manifest.layers.end(), [world](const ManifestLayer& layer) {
        return world == 0 || layer.geometry.intermediate / kDimensionMultiple % world != 0;
      });
  return Fail(
      Status::Usage(Text("the experts cannot be cut into {} shards", world))
          .Expected(fitting.empty() ? "no --tp: the experts are too narrow to be cut"
                                    : "--tp " + fitting)
          .Found(
              Text("layer {} has an intermediate size of {}, and {} / {} is not a multiple of {}",
                   bad->ordinal, bad->geometry.intermediate, bad->geometry.intermediate, world,
                   kDimensionMultiple))
          .Advice("choose another --tp"));
}

void WarnWithoutConfig(const Checkpoint& checkpoint) {
  if (!checkpoint.config_text().empty()) return;
  Log(LogLevel::kWarning,
      "{} has no config.json: silu(gate) * up without a limit is taken for the activation, which "
      "is "
      "wrong for models that clamp it; fetch the config.json that belongs to the checkpoint",
      checkpoint.path());
}

Result<BuildReport> Build(Env& env, const Checkpoint& checkpoint, const MoeModel& model,
                          const std::string& store_directory, const BuildOptions& options) {
  const auto start = Clock::now();
  WarnWithoutConfig(checkpoint);
  if (options.progress != nullptr) options.progress->Begin("fingerprinting the checkpoint", 0);
  const Result<std::string> stamp = MakeSourceStamp(env, checkpoint.path());
  HP_ASSIGN(const Digest128 fingerprint, Fingerprint(checkpoint, model));
  BuildReport found;
  found.seconds_fingerprint = SecondsSince(start);
  const Manifest manifest =
      MakeManifest(model, fingerprint, options.zero_mode, options.shard_world);
  HP_TRY(CheckShardWorld(manifest));
  HP_ASSIGN(const std::vector<uint32_t> ordinals, SelectLayers(options.layers, manifest));
  HP_TRY(Store::CheckPlace(env, store_directory));
  uint64_t bytes = 0;
  for (const uint32_t layer : ordinals)
    for (const Encoding encoding : options.encodings)
      bytes +=
          PlanLayerLayout(encoding, manifest.layers[layer].geometry.OfShard(options.shard_world))
              .file_bytes;
  HP_TRY(CheckRoomForNew(env, store_directory, manifest,
                         options.rank ? bytes : bytes * options.shard_world));
  HP_ASSIGN(const Generation generation,
            Store::OpenOrCreateGeneration(env, store_directory, manifest, WaitingOf(options)));
  // The stamp is of before the fingerprint: files that change meanwhile do not match it later.
  if (stamp) KeepSourceStamp(generation, *stamp);
  CheckpointBuilds builds(generation, checkpoint, model, options);
  HP_TRY(NeedMissing(generation, ordinals, options, builds, found));
  HP_ASSIGN(const BuildQueueOptions queue_options, builds.Prepare());
  const std::vector<uint32_t> layers = builds.FileOrder();
  const auto quantize_start = Clock::now();
  if (!layers.empty()) {
    if (options.progress != nullptr)
      options.progress->Begin("quantizing", builds.report().bytes_needed);
    BuildQueue queue(builds, queue_options);
    for (const uint32_t layer : layers) queue.Enqueue(layer);
    HP_TRY(queue.Finish());
  }
  BuildReport report = builds.report();
  report.layers_total = static_cast<uint32_t>(ordinals.size());
  report.layers_attached += found.layers_attached;
  report.bytes_metadata = found.bytes_metadata;
  report.bytes_skipped = found.bytes_skipped;
  report.warnings = std::move(found.warnings);
  report.seconds_fingerprint = found.seconds_fingerprint;
  if (!layers.empty()) report.seconds_quantize = SecondsSince(quantize_start);
  report.seconds = SecondsSince(start);
  return report;
}

}  // namespace hotplane
