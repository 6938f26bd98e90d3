#include "boot/build.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "base/check.h"
#include "base/log.h"
#include "base/topology.h"
#include "base/units.h"
#include "base/worker_pool.h"
#include "boot/expert_quantizer.h"
#include "boot/layer_selection.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

PlanesWanted WantedPlanes(std::span<const Encoding> encodings) {
  PlanesWanted wanted;
  for (const Encoding encoding : encodings) {
    if (encoding == Encoding::kBase) wanted.base = true;
    if (encoding == Encoding::kDeltaNibble) wanted.nibbles = true;
    if (encoding == Encoding::kDeltaQuintal) wanted.quintals = true;
  }
  return wanted;
}

uint64_t SourceBytes(const MoeLayer& layer) {
  uint64_t bytes = 0;
  for (const ExpertTensors& expert : layer.experts)
    for (const Tensor* tensor : expert.All()) bytes += tensor->bytes;
  return bytes;
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

// A layer being built: its lock, its writers, and what is still to do. Freed, temporaries removed,
// when the build fails.
struct LayerJob {
  const MoeLayer* layer = nullptr;
  std::vector<Encoding> missing;
  PlanesWanted wanted;
  std::vector<uint32_t> expert_order;  // in file order
  size_t next = 0;                     // index into expert_order; guarded by Builder::mutex_
  std::unique_ptr<FileLock> lock;
  std::map<Encoding, std::unique_ptr<LayerFileWriter>> writers;
  std::mutex mutex;
  size_t done = 0;                          // guarded by mutex
  std::vector<SourceTensorDigest> digests;  // guarded by mutex
};

class Builder {
 public:
  Builder(Env& env, const Checkpoint& checkpoint, const MoeModel& model,
          const BuildOptions& options)
      : env_(env), checkpoint_(checkpoint), model_(model), options_(options) {}

  Result<BuildReport> Run(const std::string& store_directory);

 private:
  Result<void> PlanMissing(const std::vector<uint32_t>& ordinals);
  Result<void> CheckSpace() const;
  Result<size_t> ChooseWorkerCount() const;
  Result<void> Work(ExpertQuantizer& quantizer);

  struct Claim {
    std::shared_ptr<LayerJob> job;
    uint32_t expert = 0;
  };
  // The next expert in file order; a null job when there is nothing left.
  Result<Claim> ClaimNext();
  // Locks a pending layer and looks again. A null job when another process built it or, with
  // LockWait::kTry, is building it (the layer then goes to busy_).
  Result<std::shared_ptr<LayerJob>> OpenJob(uint32_t ordinal, LockWait wait);
  Result<void> BuildExpert(LayerJob& job, uint32_t expert, ExpertQuantizer& quantizer);
  Result<void> WritePieces(LayerJob& job, uint32_t expert, const ExpertPieces& pieces);
  Result<void> PublishJob(LayerJob& job);
  Result<void> CheckCancel() const {
    return options_.cancel != nullptr ? options_.cancel->Check() : Result<void>();
  }

  Env& env_;
  const Checkpoint& checkpoint_;
  const MoeModel& model_;
  const BuildOptions& options_;
  std::optional<Generation> generation_;
  const Kernels* kernels_ = nullptr;

  std::mutex mutex_;
  std::deque<uint32_t> pending_;  // layers not yet opened, in file order
  std::deque<uint32_t> busy_;     // layers that another process was building when we tried
  std::shared_ptr<LayerJob> open_job_;

  std::atomic<bool> failed_{false};  // a worker failed: the others stop at their next claim

  std::mutex report_mutex_;
  BuildReport report_;
};

Result<void> Builder::PlanMissing(const std::vector<uint32_t>& ordinals) {
  std::vector<std::pair<FilePosition, uint32_t>> order;
  for (const uint32_t ordinal : ordinals) {
    const MoeLayer& layer = model_.layers[ordinal];
    bool missing = false;
    for (const Encoding encoding : options_.encodings) {
      const TierProbe probe = generation_->Probe(ordinal, encoding);
      report_.bytes_metadata += probe.bytes_metadata;
      if (probe.presence == Presence::kPresent) {
        report_.bytes_skipped += probe.layout.file_bytes;
        continue;
      }
      missing = true;
      if (probe.presence == Presence::kDamaged) {
        report_.warnings.push_back(Text("layer {} ({}) is damaged and is built again: {}", ordinal,
                                        EncodingName(encoding), probe.reason->what()));
        Log(LogLevel::kWarning, "{}", report_.warnings.back());
      }
    }
    if (!missing) {
      ++report_.layers_attached;
      continue;
    }
    report_.bytes_needed += SourceBytes(layer);
    order.emplace_back(PositionOf(layer), ordinal);
  }
  std::sort(order.begin(), order.end());
  for (const auto& [position, ordinal] : order) pending_.push_back(ordinal);
  return {};
}

Result<void> Builder::CheckSpace() const {
  uint64_t bytes = 0;
  for (const uint32_t ordinal : pending_)
    for (const Encoding encoding : options_.encodings)
      if (generation_->Probe(ordinal, encoding).presence != Presence::kPresent)
        bytes += PlanLayerLayout(encoding, model_.layers[ordinal].geometry).file_bytes;
  HP_ASSIGN(const uint64_t free_bytes, env_.FreeBytes(generation_->directory()));
  if (bytes <= free_bytes) return {};
  return Fail(
      Status::Capacity("the layers to build do not fit on the disk")
          .File(generation_->directory())
          .Expected(Text("{} free ({} bytes)", FormatBytes(bytes), bytes))
          .Found(Text("{} free ({} bytes)", FormatBytes(free_bytes), free_bytes))
          .Advice("free space, choose another --store, or build fewer --layers or --tiers"));
}

Result<size_t> Builder::ChooseWorkerCount() const {
  const size_t wanted_count = options_.worker_count != 0 ? options_.worker_count : UsableCpuCount();
  const uint64_t limit = options_.staging_limit_bytes != 0 ? options_.staging_limit_bytes
                                                           : ReadMemoryLimit().available_bytes / 4;
  uint64_t workspace = 0;
  for (const uint32_t ordinal : pending_)
    workspace = std::max(workspace, ExpertQuantizer::WorkspaceBytes(
                                        model_.layers[ordinal], WantedPlanes(options_.encodings)));
  if (workspace > limit)
    return Fail(Status::Capacity("the staging of one expert does not fit in the staging limit")
                    .Expected(Text("at least {} ({} bytes)", FormatBytes(workspace), workspace))
                    .Found(Text("{} ({} bytes)", FormatBytes(limit), limit))
                    .Advice(Text("--staging-limit {}M or more", workspace / kMiB + 1)));
  const size_t fitting = workspace == 0 ? wanted_count : limit / workspace;
  if (fitting < wanted_count)
    Log(LogLevel::kWarning, "{} workers instead of {}: {} of staging each, limit {}", fitting,
        wanted_count, FormatBytes(workspace), FormatBytes(limit));
  return std::min(wanted_count, fitting);
}

Result<std::shared_ptr<LayerJob>> Builder::OpenJob(uint32_t ordinal, LockWait wait) {
  auto job = std::make_shared<LayerJob>();
  job->layer = &model_.layers[ordinal];
  if (!options_.no_lock) {
    HP_ASSIGN(job->lock, generation_->LockLayer(ordinal, wait, options_.cancel));
    if (job->lock == nullptr) {
      busy_.push_back(ordinal);
      return std::shared_ptr<LayerJob>();
    }
  }
  // Whoever held the lock before us may have published what we are after.
  for (const Encoding encoding : options_.encodings)
    if (generation_->Probe(ordinal, encoding).presence != Presence::kPresent)
      job->missing.push_back(encoding);
  if (job->missing.empty()) {
    std::lock_guard lock(report_mutex_);
    ++report_.layers_attached;
    report_.bytes_needed -= SourceBytes(*job->layer);
    return std::shared_ptr<LayerJob>();
  }
  job->wanted = WantedPlanes(job->missing);
  for (const Encoding encoding : job->missing) {
    HP_ASSIGN(job->writers[encoding], generation_->CreateLayer(ordinal, encoding));
  }
  std::vector<std::pair<FilePosition, uint32_t>> order;
  for (uint32_t e = 0; e < job->layer->experts.size(); ++e)
    order.emplace_back(PositionOf(job->layer->experts[e]), e);
  std::sort(order.begin(), order.end());
  for (const auto& [position, expert] : order) job->expert_order.push_back(expert);
  return job;
}

Result<Builder::Claim> Builder::ClaimNext() {
  std::lock_guard lock(mutex_);
  HP_TRY(CheckCancel());
  while (open_job_ == nullptr || open_job_->next == open_job_->expert_order.size()) {
    open_job_ = nullptr;
    if (pending_.empty() && busy_.empty()) return Claim{};
    // Layers that another process holds come last, so that builders beside each other share the
    // work.
    const bool wait = pending_.empty();
    std::deque<uint32_t>& queue = wait ? busy_ : pending_;
    const uint32_t ordinal = queue.front();
    queue.pop_front();
    HP_ASSIGN(open_job_, OpenJob(ordinal, wait ? LockWait::kBlock : LockWait::kTry));
  }
  return Claim{open_job_, open_job_->expert_order[open_job_->next++]};
}

Result<void> Builder::WritePieces(LayerJob& job, uint32_t expert, const ExpertPieces& pieces) {
  for (const auto& [encoding, writer] : job.writers) {
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

Result<void> Builder::BuildExpert(LayerJob& job, uint32_t expert, ExpertQuantizer& quantizer) {
  std::vector<SourceTensorDigest> digests;
  HP_ASSIGN(const ExpertPieces pieces,
            quantizer.Run(checkpoint_, *job.layer, expert, job.wanted, &digests));
  HP_TRY(WritePieces(job, expert, pieces));
  {
    std::lock_guard lock(report_mutex_);
    report_.bytes_read += quantizer.bytes_read();
  }
  if (options_.progress != nullptr) options_.progress->Add(quantizer.bytes_read());
  bool last;
  {
    std::lock_guard lock(job.mutex);
    std::move(digests.begin(), digests.end(), std::back_inserter(job.digests));
    last = ++job.done == job.expert_order.size();
  }
  if (last) HP_TRY(PublishJob(job));
  return {};
}

Result<void> Builder::PublishJob(LayerJob& job) {
  HP_TRY(checkpoint_.CheckUnchanged());
  SourceRecord record;
  record.generation = generation_->id();
  record.layer = job.layer->ordinal;
  record.tensors = std::move(job.digests);
  std::sort(record.tensors.begin(), record.tensors.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  // The record goes first: a layer file never stands without the proof of what it was made from,
  // and a tier added later from changed weights is refused here, before anything of it is visible.
  HP_TRY(generation_->PublishSourceRecord(record));
  uint64_t bytes = 0;
  for (auto& [encoding, writer] : job.writers) {
    HP_TRY(writer->Publish());
    bytes += writer->layout().file_bytes;
  }
  job.writers.clear();
  job.lock.reset();
  std::lock_guard lock(report_mutex_);
  ++report_.layers_built;
  report_.bytes_built += bytes;
  Log(LogLevel::kDebug, "layer {} published, {}", record.layer, FormatBytes(bytes));
  return {};
}

Result<void> Builder::Work(ExpertQuantizer& quantizer) {
  const auto step = [&]() -> Result<bool> {
    HP_ASSIGN(Claim claim, ClaimNext());
    if (claim.job == nullptr) return false;
    HP_TRY(BuildExpert(*claim.job, claim.expert, quantizer));
    return true;
  };
  while (!failed_.load(std::memory_order_relaxed)) {
    const Result<bool> more = step();
    if (!more) {
      failed_ = true;
      return Fail(more.error());
    }
    if (!*more) return {};
  }
  return {};
}

Result<BuildReport> Builder::Run(const std::string& store_directory) {
  const auto start = Clock::now();
  if (options_.progress != nullptr) options_.progress->Begin("fingerprinting the checkpoint", 0);
  HP_ASSIGN(const Digest128 fingerprint, Fingerprint(checkpoint_, model_));
  report_.seconds_fingerprint = SecondsSince(start);
  const Manifest manifest = MakeManifest(model_, fingerprint, options_.zero_mode);
  HP_ASSIGN(const std::vector<uint32_t> ordinals, SelectLayers(options_.layers, manifest));
  kernels_ = options_.kernels;
  if (kernels_ == nullptr) {
    HP_ASSIGN(kernels_, SelectKernels(std::nullopt));
  }
  HP_ASSIGN(generation_, Store::OpenOrCreateGeneration(env_, store_directory, manifest));
  report_.generation = generation_->id();
  report_.layers_total = static_cast<uint32_t>(ordinals.size());
  report_.isa = kernels_->name;
  HP_TRY(PlanMissing(ordinals));
  HP_TRY(CheckSpace());
  HP_ASSIGN(report_.worker_count, ChooseWorkerCount());

  if (!pending_.empty()) {
    const auto quantize_start = Clock::now();
    if (options_.progress != nullptr) options_.progress->Begin("quantizing", report_.bytes_needed);
    std::vector<const MoeLayer*> layers;
    for (const uint32_t ordinal : pending_) layers.push_back(&model_.layers[ordinal]);
    const PlanesWanted wanted = WantedPlanes(options_.encodings);
    std::vector<ExpertQuantizer> quantizers;
    for (size_t w = 0; w < report_.worker_count; ++w) {
      HP_ASSIGN(ExpertQuantizer quantizer,
                ExpertQuantizer::Create(*kernels_, layers, wanted, options_.zero_mode));
      report_.peak_staging_bytes += quantizer.workspace_bytes();
      quantizers.push_back(std::move(quantizer));
    }
    WorkerPool pool(report_.worker_count);
    // One index per worker: each then claims experts until there are none, or one of them failed.
    HP_TRY(pool.ParallelFor(report_.worker_count,
                            [&](size_t index, size_t) { return Work(quantizers[index]); }));
    report_.seconds_quantize = SecondsSince(quantize_start);
  }
  report_.seconds = SecondsSince(start);
  return std::move(report_);
}

}  // namespace

Result<BuildReport> Build(Env& env, const Checkpoint& checkpoint, const MoeModel& model,
                          const std::string& store_directory, const BuildOptions& options) {
  return Builder(env, checkpoint, model, options).Run(store_directory);
}

}  // namespace hotplane
