// Engine: a booted store with everything it stands on. Threads and lifetimes are decided here.
//
// Open finds the generation, Plan decides what each layer needs, Boot does it: missing layers are
// built from the checkpoint by a queue in the background and published, present ones are read
// meanwhile, and all are handed out in order.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/worker_pool.h"
#include "boot/boot.h"
#include "boot/build.h"
#include "boot/plan.h"
#include "boot/shard_choice.h"
#include "engine/cold_layers.h"
#include "engine/expert_compute.h"
#include "engine/expert_records.h"
#include "store/store.h"

namespace hotplane {

struct EngineOptions {
  std::string store_directory;
  std::string generation_prefix;  // empty: the only one there is, or the checkpoint's
  std::string checkpoint;         // empty: none is at hand
  bool no_build = false;
  size_t worker_count = 0;  // 0: the CPUs this process may use
  DeviceName device;        // where bases land
  DeviceOptions device_options;

  bool base = true;
  bool delta = false;           // the delta tier is wanted: present, or built
  std::string delta_layers;     // SelectLayers texts; empty: of all booted layers
  std::string no_delta_layers;  // of them, those that go without; empty: none
  std::vector<Encoding> delta_encodings = {Encoding::kDeltaQuintal, Encoding::kDeltaNibble};
  Residency base_residency = Residency::kAuto;
  uint64_t reserve_bytes = 0;
  uint64_t pin_delta_bytes = 0;  // of delta records that Boot reads into the records' delta cache
  std::optional<ExpertRange> experts;
  // Which rank of a sharded store this is; with `world`, also how a store that a boot makes is cut.
  ShardRequest shard;

  BootOptions boot;  // `pool` and `device` are set by the engine; `map`: every base on the host
  RecordOptions records;  // `worker_count` is set by the engine
  BuildOptions build;  // of what has to be built; `zero_mode` and the tiers are set by the engine
  std::string isa;     // of the operator: what HOTPLANE_ISA names; empty: the best the CPU runs
  std::optional<ZeroMode> zero_mode;  // none: the generation's; kAuto where there is none yet
  bool dry_run = false;               // nothing is created; Boot must not be called
  bool measure_limit = false;         // also measure what the memory can do, after the boot
};

class Engine {
 public:
  // Opens the store, as the rank that is meant. Where there is none yet and a checkpoint is at
  // hand, makes the generation.
  static Result<std::unique_ptr<Engine>> Open(Env& env, const EngineOptions& options);
  ~Engine();

  // Probes headers and decides. A complete store needs nothing of the checkpoint: its shards are
  // compared by the source stamp, without opening them, and fingerprinted where that differs.
  // kData when the checkpoint is another model's; else as PlanBoot. Once; Boot calls it where that
  // was not done.
  Result<void> Plan();

  // Once. A failure leaves the layers published before it valid until the engine is destroyed. A
  // layer whose file turns out to be bad is built again where a checkpoint is at hand.
  Result<void> Boot(const LayerReady& on_layer_ready);
  // From any thread: blocks until Boot published the layer. Its failure, or kUsage for a layer that
  // this boot does not publish. The pointer is valid until the engine is destroyed.
  Result<const BootedLayer*> WaitLayer(uint32_t ordinal);

  // What is enqueued on `stream` (a CUstream of the engine's device; null: its default stream)
  // after this call runs once Boot has published the layer; the host does not wait. From any
  // thread, at any time, also before Boot. When the boot fails, or the engine is destroyed, the
  // stream goes on: what it computes of a layer that is not published is refused, as
  // TakeMoeRefusal tells. kUsage without a device, for a layer that this boot does not publish, for
  // a stream that is being captured, and where four others wait; the boot's failure once it has
  // failed.
  Result<void> StreamWaitLayer(uint32_t ordinal, void* stream);
  // Blocks until the boot that another thread runs has planned, or ended.
  void WaitPlan();

  // kUsage for a layer that is not published; waits for nothing.
  Result<const BootedLayer*> PublishedLayer(uint32_t ordinal);

  // REQUIRES options without dry_run.
  const Generation& generation() const { return *generation_; }  // as this process's rank sees it
  const Digest128& generation_id() const { return generation_id_; }
  WorkerPool& pool() { return *pool_; }
  // Null: bases land in memory of the host.
  Device* device() { return device_.get(); }
  // REQUIRES Plan or Boot was called.
  const BootPlan& plan() const { return *plan_; }
  std::string PlanJson() const;
  std::span<const BootedLayer> layers() const { return layers_; }
  // REQUIRES Boot was called. Of all that Boot did; sources by layer in the order of publication.
  const BootReport& report() const { return report_; }
  BuildReport build_report() const;
  double limit_bytes_per_second() const { return limit_bytes_per_second_; }  // 0: not measured
  // One JSON object, with the keys that docs/cli.md lists for `boot`. REQUIRES Boot was called.
  std::string ReportJson() const;

  // One expert's record, from any thread, once the engine is open; with or without a boot, and
  // after one that failed. Each read is verified on its own; see RecordReader for errors and
  // sizes.
  Result<void> ReadDelta(uint32_t layer, uint32_t expert, std::span<std::byte> destination) {
    return records_->Read(RecordKind::kDelta, {layer, expert}, destination);
  }
  Result<void> ReadFp4(uint32_t layer, uint32_t expert, std::span<std::byte> destination) {
    return records_->Read(RecordKind::kFp4, {layer, expert}, destination);
  }
  Result<void> ReadBase(uint32_t layer, uint32_t expert, std::span<std::byte> destination) {
    return records_->Read(RecordKind::kBase, {layer, expert}, destination);
  }
  // The same in batches, through caches, and presence. The engine outlives its pinned records.
  // REQUIRES a generation: all but the dry run of a store that is not there yet have one.
  ExpertRecords& records() { return *records_; }

  // y = sum over chosen experts of weight * w2 act(w13 x), of a layer that Boot has published, at
  // base or FP4 by expert; from any thread. A layer on a device is computed there, and y copied
  // back. Errors as ExpertCompute::Forward; kUsage for a layer that is not published.
  Result<void> MoeForward(const MoeRequest& request);
  // The same on arrays in the memory of the layer's device, enqueued on the caller's stream,
  // without a wait: DeviceMoeRequest. First the bytes of its workspace; that also makes the layer
  // ready, and may neither be captured in a graph nor run beside a capture. Both also for a layer
  // that the boot, which has planned, is going to publish on its device: what runs before that is
  // refused, so let the stream wait for the layer.
  Result<uint64_t> MoeWorkspaceBytes(uint32_t layer, uint32_t tokens, uint32_t top_k);
  Result<void> MoeForwardOnDevice(const DeviceMoeRequest& request);
  // What these calls of the layer could not compute since this was last asked; waits for nothing:
  // the caller has waited for its stream. Of a layer that a failed boot did not publish, that
  // failure.
  Result<void> TakeMoeRefusal(uint32_t layer);
  // Copies the FP4 of experts to the layer's device, for good; experts that are there stay.
  // REQUIRES that no MoeForwardOnDevice of this layer is on its way. kData as ReadDelta; kCapacity
  // where device memory ends: the experts before are there.
  Result<void> LoadFp4OnDevice(uint32_t layer, std::span<const uint32_t> experts);

 private:
  Engine(Env& env, const EngineOptions& options) : env_(env), options_(options) {}

  Result<void> OpenDevice();
  Result<uint64_t> DeviceBytes() const;
  Result<void> OpenGeneration();
  LockWaiting Waiting() const;
  Result<void> CheckRoomForWanted() const;
  Result<PlanConfig> SelectWanted() const;
  void TellWhatStaysOnTheHost() const;
  void TellWhatIsBuilt() const;
  Result<void> KeepOfCheckpoint(std::vector<Store::Entry>& candidates);
  Result<void> CreateGeneration();
  // Opens the checkpoint and proves that it is the generation's; `may_write`: keeps its stamp.
  Result<void> EnsureCold(bool may_write);
  Result<void> ComparePresent();
  Result<PlanConfig> MakeConfig() const;
  Result<void> StartBuilds();
  Result<std::map<uint32_t, std::byte*>> PlaceKept();
  Result<void> BootBases();
  Result<void> PinDelta();
  Result<void> PinLayer(const PlanEntry& entry, uint64_t* read_bytes);
  size_t SegmentEnd(size_t begin) const;
  Result<void> BootSegment(size_t begin, size_t end);
  Result<void> RunSession(size_t begin, size_t end);
  Result<void> Publish(const BootedLayer& layer);
  BootedLayer Promise(const PlanEntry& entry) const;
  Result<BootedLayer> PublishedOrPromised(uint32_t ordinal);
  void OpenGates();
  void AddReport(const BootSession& session, double start_seconds, size_t published_before);
  Result<void> Recover(const Status& error);
  void NoteDeviceMemory();
  void Warn(std::string warning);
  void MeasureLimit();

  Env& env_;
  EngineOptions options_;
  std::unique_ptr<WorkerPool> pool_;
  std::unique_ptr<Device> device_;  // before sessions_, whose layers are its memory
  Manifest manifest_;
  Digest128 generation_id_{};
  uint32_t rank_ = 0;
  std::unique_ptr<Generation> generation_;
  std::unique_ptr<DeviceArena> kept_memory_;    // of the bases that are built on the device
  std::map<uint32_t, std::byte*> kept_places_;  // in it, by layer
  std::unique_ptr<ColdLayers> cold_;  // after what it uses, generation_ too: it is destroyed first
  bool paired_ = false;               // cold_ is the generation's source
  std::optional<PlanConfig> config_;
  std::optional<BootPlan> plan_;
  std::vector<std::string> choice_warnings_;  // until the plan tells them
  std::vector<const PlanEntry*> bases_;  // entries of plan_ whose layers are published, in order
  std::set<uint32_t> rebuilt_;
  std::vector<std::unique_ptr<BootSession>> sessions_;
  const LayerReady* on_layer_ready_ = nullptr;
  double seconds_since_boot_began_ = 0;
  std::unique_ptr<StreamGates> gates_;  // by ordinal, for consumers' streams; null without a device

  std::mutex mutex_;  // guards what follows while Boot runs
  std::condition_variable published_;
  std::vector<BootedLayer> layers_;  // reserved up front, so that spans of it stay valid
  bool planned_ = false;
  std::map<uint32_t, BootedLayer> promised_;  // by ordinal, without their parts; written once
  std::optional<Status> failure_;
  bool ended_ = false;
  BootReport report_;
  std::unique_ptr<ExpertRecords> records_;  // after what it reads from; null without a generation
  std::unique_ptr<ExpertCompute> compute_;  // with records_, and after it
  double limit_bytes_per_second_ = 0;
};

}  // namespace hotplane
