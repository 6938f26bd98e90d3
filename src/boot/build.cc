#include "boot/build.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <optional>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/topology.h"
#include "base/trace.h"
#include "base/units.h"
#include "boot/layer_selection.h"
#include "boot/source_stamp.h"

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

// A layer being built: its lock, its writers, and what is done. Destroyed unpublished, it removes
// the temporaries.
class CheckpointBuilds::Unit final : public LayerBuild {
 public:
  Unit(CheckpointBuilds& owner, const MoeLayer& layer, std::unique_ptr<FileLock> lock)
      : owner_(owner),
        layer_(layer),
        expert_order_(ExpertsInFileOrder(layer)),
        lock_(std::move(lock)) {}

  Result<void> CreateFiles(const std::vector<Encoding>& missing) {
    AddWanted(missing, wanted_);
    for (const Encoding encoding : missing) {
      HP_ASSIGN(writers_[encoding], owner_.generation_.CreateLayer(layer_.ordinal, encoding));
    }
    return {};
  }

  size_t step_count() const override { return expert_order_.size(); }
  uint64_t step_bytes() const override { return owner_.workspace_bytes_; }
  Result<void> RunStep(size_t step) override;
  Result<void> Publish() override;

 private:
  Result<void> WritePieces(uint32_t expert, const ExpertPieces& pieces);

  CheckpointBuilds& owner_;
  const MoeLayer& layer_;
  const std::vector<uint32_t> expert_order_;
  PlanesWanted wanted_;
  std::unique_ptr<FileLock> lock_;
  std::map<Encoding, std::unique_ptr<LayerFileWriter>> writers_;
  std::mutex mutex_;
  std::vector<SourceTensorDigest> digests_;  // guarded by mutex_
};

Result<void> CheckpointBuilds::Unit::WritePieces(uint32_t expert, const ExpertPieces& pieces) {
  for (const auto& [encoding, writer] : writers_) {
    if (encoding == Encoding::kBase) {
      HP_TRY(writer->WritePiece("planes13", expert, pieces.planes13));
      HP_TRY(writer->WritePiece("sc13", expert, pieces.sc13));
      HP_TRY(writer->WritePiece("planes2", expert, pieces.planes2));
      HP_TRY(writer->WritePiece("sc2", expert, pieces.sc2));
      if (pieces.bias13.empty()) continue;
      HP_TRY(writer->WritePiece("bias13", expert, pieces.bias13));
      HP_TRY(writer->WritePiece("bias2", expert, pieces.bias2));
    } else {
      const bool quintals = encoding == Encoding::kDeltaQuintal;
      HP_TRY(writer->WritePiece("fp13", expert, quintals ? pieces.quintals13 : pieces.nibbles13));
      HP_TRY(writer->WritePiece("fp2", expert, quintals ? pieces.quintals2 : pieces.nibbles2));
    }
  }
  return {};
}

Result<void> CheckpointBuilds::Unit::RunStep(size_t step) {
  const uint32_t expert = expert_order_[step];
  HP_ASSIGN(ExpertQuantizer quantizer, owner_.TakeWorkspace());
  std::vector<SourceTensorDigest> digests;
  HP_ASSIGN(const ExpertPieces pieces,
            quantizer.Run(owner_.checkpoint_, layer_, expert, wanted_, &digests));
  HP_TRY(WritePieces(expert, pieces));
  const uint64_t bytes_read = quantizer.bytes_read();
  owner_.ReturnWorkspace(std::move(quantizer));
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
  // The record goes first: a layer file never stands without the proof of what it was made from,
  // and a tier added later from changed weights is refused here, before anything of it is visible.
  HP_TRY(owner_.generation_.PublishSourceRecord(record));
  uint64_t bytes = 0;
  for (auto& [encoding, writer] : writers_) {
    HP_TRY(writer->Publish());
    bytes += writer->layout().file_bytes;
  }
  writers_.clear();
  lock_.reset();
  {
    std::lock_guard lock(owner_.mutex_);
    ++owner_.report_.layers_built;
    owner_.report_.bytes_built += bytes;
  }
  Log(LogLevel::kDebug, "layer {} published, {}", record.layer, FormatBytes(bytes));
  return {};
}

CheckpointBuilds::CheckpointBuilds(const Generation& generation, const Checkpoint& checkpoint,
                                   const MoeModel& model, const BuildOptions& options)
    : generation_(generation), checkpoint_(checkpoint), model_(model), options_(options) {
  report_.generation = generation.id();
}

CheckpointBuilds::~CheckpointBuilds() = default;

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

std::vector<Encoding> CheckpointBuilds::Missing(uint32_t layer, const LayerNeed& need) const {
  if (need.proven_bad) return need.encodings;
  std::vector<Encoding> missing;
  for (const Encoding encoding : need.encodings)
    if (generation_.Probe(layer, encoding).presence != Presence::kPresent)
      missing.push_back(encoding);
  return missing;
}

Result<void> CheckpointBuilds::CheckSpace() const {
  uint64_t bytes = 0;
  for (const auto& [layer, need] : needs_)
    for (const Encoding encoding : Missing(layer, need))
      bytes += PlanLayerLayout(encoding, model_.layers[layer].geometry).file_bytes;
  HP_ASSIGN(const uint64_t free_bytes, generation_.env().FreeBytes(generation_.directory()));
  if (bytes <= free_bytes) return {};
  return Fail(
      Status::Capacity("the layers to build do not fit on the disk")
          .File(generation_.directory())
          .Expected(Text("{} free ({} bytes)", FormatBytes(bytes), bytes))
          .Found(Text("{} free ({} bytes)", FormatBytes(free_bytes), free_bytes))
          .Advice("free space, choose another --store, or build fewer --layers or --tiers"));
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
  for (const MoeLayer* layer : workspace_layers_)
    workspace_bytes_ =
        std::max(workspace_bytes_, ExpertQuantizer::WorkspaceBytes(*layer, workspace_planes_));
  BuildQueueOptions queue;
  queue.batch_size = options_.batch_size;
  queue.cancel = options_.cancel;
  queue.progress = options_.progress;
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
    Log(LogLevel::kWarning, "{} workers instead of {}: {} of staging each, limit {}", fitting,
        wanted_count, FormatBytes(workspace_bytes_), FormatBytes(limit));
  queue.worker_count = std::min(wanted_count, fitting);
  report_.worker_count = queue.worker_count;
  return queue;
}

Result<ExpertQuantizer> CheckpointBuilds::TakeWorkspace() {
  {
    std::lock_guard lock(mutex_);
    if (!workspaces_.empty()) {
      ExpertQuantizer quantizer = std::move(workspaces_.back());
      workspaces_.pop_back();
      return quantizer;
    }
  }
  HP_ASSIGN(
      ExpertQuantizer quantizer,
      ExpertQuantizer::Create(*kernels_, workspace_layers_, workspace_planes_, options_.zero_mode));
  std::lock_guard lock(mutex_);
  report_.peak_staging_bytes += quantizer.workspace_bytes();
  return quantizer;
}

void CheckpointBuilds::ReturnWorkspace(ExpertQuantizer quantizer) {
  std::lock_guard lock(mutex_);
  report_.bytes_read += quantizer.bytes_read();
  workspaces_.push_back(std::move(quantizer));
}

Result<LayerBuilds::Opened> CheckpointBuilds::Open(uint32_t layer,
                                                   std::unique_ptr<LayerBuild>* build) {
  std::unique_ptr<FileLock> file_lock;
  if (!options_.no_lock) {
    const TraceSpan span("wait", layer);
    HP_ASSIGN(file_lock, generation_.LockLayer(layer, LockWait::kTry, options_.cancel));
    if (file_lock == nullptr) return Opened::kBusy;
  }
  LayerNeed need;
  {
    std::lock_guard lock(mutex_);
    const auto entry = needs_.find(layer);
    HP_CHECK(entry != needs_.end());
    need = entry->second;
  }
  // Whoever held the lock before us may have published what we are after.
  const std::vector<Encoding> missing = Missing(layer, need);
  if (missing.empty()) {
    std::lock_guard lock(mutex_);
    ++report_.layers_attached;
    report_.bytes_needed -= SourceBytes(model_.layers[layer]);
    return Opened::kDone;
  }
  auto unit = std::make_unique<Unit>(*this, model_.layers[layer], std::move(file_lock));
  HP_TRY(unit->CreateFiles(missing));
  *build = std::move(unit);
  return Opened::kBuild;
}

BuildReport CheckpointBuilds::report() const {
  std::lock_guard lock(mutex_);
  return report_;
}

namespace {

// Tells the builds what is missing; the rest goes into the report.
void NeedMissing(const Generation& generation, const std::vector<uint32_t>& ordinals,
                 const BuildOptions& options, CheckpointBuilds& builds, BuildReport& report) {
  for (const uint32_t ordinal : ordinals) {
    bool missing = false;
    for (const Encoding encoding : options.encodings) {
      const TierProbe probe = generation.Probe(ordinal, encoding);
      report.bytes_metadata += probe.bytes_metadata;
      if (probe.presence == Presence::kPresent) {
        report.bytes_skipped += probe.layout.file_bytes;
        continue;
      }
      missing = true;
      if (probe.presence == Presence::kDamaged) {
        report.warnings.push_back(Text("layer {} ({}) is damaged and is built again: {}", ordinal,
                                       EncodingName(encoding), probe.reason->what()));
        Log(LogLevel::kWarning, "{}", report.warnings.back());
      }
    }
    if (missing) {
      builds.Need(ordinal, options.encodings);
    } else {
      ++report.layers_attached;
    }
  }
}

}  // namespace

Result<BuildReport> Build(Env& env, const Checkpoint& checkpoint, const MoeModel& model,
                          const std::string& store_directory, const BuildOptions& options) {
  const auto start = Clock::now();
  if (options.progress != nullptr) options.progress->Begin("fingerprinting the checkpoint", 0);
  const Result<std::string> stamp = MakeSourceStamp(env, checkpoint.path());
  HP_ASSIGN(const Digest128 fingerprint, Fingerprint(checkpoint, model));
  BuildReport found;
  found.seconds_fingerprint = SecondsSince(start);
  const Manifest manifest = MakeManifest(model, fingerprint, options.zero_mode);
  HP_ASSIGN(const std::vector<uint32_t> ordinals, SelectLayers(options.layers, manifest));
  HP_ASSIGN(const Generation generation,
            Store::OpenOrCreateGeneration(env, store_directory, manifest));
  // The stamp is of before the fingerprint: files that change meanwhile do not match it later.
  if (stamp) KeepSourceStamp(generation, *stamp);
  CheckpointBuilds builds(generation, checkpoint, model, options);
  NeedMissing(generation, ordinals, options, builds, found);
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
