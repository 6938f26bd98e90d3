// Build: a checkpoint's routed experts, quantized once into the layer files of a store.
//
// Streams the checkpoint in file order, ahead of the workers. Workers take experts, several layers
// may be in flight; staging is one workspace per worker and what is read ahead, and bounded by a
// byte budget. Output is byte-identical for
// any worker count and ISA. Layers that are already there are left alone, so an interrupted build
// is finished by running it again.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "boot/build_queue.h"
#include "boot/expert_quantizer.h"
#include "boot/layer_selection.h"
#include "boot/read_ahead.h"
#include "checkpoint/moe_source.h"
#include "quant/quantize.h"
#include "store/store.h"

namespace hotplane {

struct BuildOptions {
  std::string layers;  // SelectLayers text; empty: all
  std::vector<Encoding> encodings = {Encoding::kBase};
  ZeroMode zero_mode = ZeroMode::kAuto;
  uint32_t shard_world = 1;          // of the generation that Build makes: files for so many ranks
  std::optional<uint32_t> rank;      // build only this rank's files; none: every rank's
  size_t worker_count = 0;           // 0: the CPUs this process may use
  size_t batch_size = 12;            // layers that a BuildQueue fires together
  uint64_t staging_limit_bytes = 0;  // 0: a quarter of the memory available
  double stall_seconds = 0;          // for a lock that nobody lets go of: LockWaiting
  bool no_lock = false;              // build without flock, for file systems that refuse it
  const Kernels* kernels = nullptr;  // null: the best for this CPU
  // Matrices are quantized on it by as many workers as its memory allows, by the CPU for the
  // others; what is written does not depend on it. Null: none.
  Device* device = nullptr;
  uint64_t device_limit_bytes = 0;  // of its memory for that; 0: what is free at the beginning
  // Bases, by layer, that are kept on `device` as well: each in memory there of its file's data
  // region, where memory stands behind the experts `kept_experts` (none: all) and, of all, the
  // gaps. REQUIRES one rank.
  std::map<uint32_t, std::byte*> keep;
  std::optional<ExpertRange> kept_experts;
  const CancelToken* cancel = nullptr;
  Progress* progress = nullptr;
};

struct BuildReport {
  Digest128 generation{};
  uint32_t shard_world = 1;
  uint32_t layers_total = 0;    // selected
  uint32_t layers_built = 0;    // at least one file of it was built here
  uint32_t layers_rebuilt = 0;  // of them, those of which a file was there and damaged
  uint32_t layers_attached =
      0;                      // everything wanted was there, or another process built it meanwhile
  uint64_t bytes_needed = 0;  // source bytes of the layers that had a file missing
  uint64_t bytes_read = 0;    // source bytes read to quantize
  uint64_t bytes_read_ahead = 0;  // of them, before a worker asked for them
  std::string read_path;          // how, and why so; empty: nothing was read
  uint64_t bytes_metadata = 0;    // headers read by probing
  uint64_t bytes_built = 0;       // layer files written
  uint64_t bytes_skipped = 0;     // layer files that were there
  uint64_t peak_staging_bytes = 0;
  std::string device = "cpu";              // or its name
  uint64_t bytes_quantized_on_device = 0;  // of bytes_read
  uint64_t peak_device_bytes = 0;          // of its memory, for sources and planes
  size_t worker_count = 0;
  const char* isa = "";
  double seconds = 0;
  double seconds_fingerprint = 0;
  double seconds_quantize = 0;  // from the first read to the last publish
  std::vector<std::string> warnings;
};

// What building this layer reads from its checkpoint.
uint64_t SourceBytes(const MoeLayer& layer);

// Layers of one generation, built from its checkpoint: what a BuildQueue runs. A step is an expert,
// in file order; its staging is one workspace, of which there are as many as steps ran at once. Of
// a sharded generation an expert is read and quantized once and whole, then cut for every rank that
// lacks a file.
class CheckpointBuilds final : public LayerBuilds {
 public:
  // All references must outlive this. REQUIRES a model whose manifest is the generation's.
  CheckpointBuilds(const Generation& generation, const Checkpoint& checkpoint,
                   const MoeModel& model, const BuildOptions& options);
  ~CheckpointBuilds() override;

  // What the queue builds of a layer when it opens it, as far as it is still missing then;
  // `proven_bad`: also files whose header is right, because their data is not.
  void Need(uint32_t layer, std::vector<Encoding> encodings, bool proven_bad = false);
  // Before the first layer is enqueued: kernels, disk space for all that is needed, workers and
  // admission. Layers of `bases_later` may still be needed afterwards, with their base alone.
  // kCapacity with the numbers.
  Result<BuildQueueOptions> Prepare(const std::vector<uint32_t>& bases_later = {});
  // The needed layers in the order in which they lie in the checkpoint.
  std::vector<uint32_t> FileOrder() const;

  Result<Opened> Open(uint32_t layer, std::unique_ptr<LayerBuild>* build) override;
  Holder HolderOf(uint32_t layer) override;

  // The layer's base was built and published by this, and is on the device where `keep` says; that
  // it is right there is not proved.
  bool IsKept(uint32_t layer) const;

  // A copy; counts what is done so far.
  BuildReport report() const;

 private:
  class Unit;
  struct LayerNeed {
    std::vector<Encoding> encodings;
    bool proven_bad = false;
  };
  struct Workspace {
    ExpertQuantizer quantizer;
    HugeBuffer slice;  // of one piece, for one rank
  };
  Result<void> CheckSpace() const;
  struct Absent {
    std::vector<Encoding> encodings;
    bool damaged = false;  // a file of one of them is there
  };
  Result<Absent> Missing(const Generation& of_rank, uint32_t layer, const LayerNeed& need) const;
  Result<void> PrepareDevice();
  // Null: the device's memory is given out.
  Device* TakeDeviceShare();
  // Before the first layer that is built.
  Result<void> StartReads();
  Result<ExpertQuantizer> NewQuantizer();
  Result<Workspace> TakeWorkspace();
  void ReturnWorkspace(Workspace workspace);
  void SetAside(Workspace workspace);

  const Generation& generation_;
  const Checkpoint& checkpoint_;
  const MoeModel& model_;
  const BuildOptions options_;
  std::vector<Generation> ranks_;  // the generation as each rank to build for sees it
  const Kernels* kernels_ = nullptr;
  std::vector<const MoeLayer*> workspace_layers_;
  PlanesWanted workspace_planes_;
  uint64_t workspace_bytes_ = 0;
  uint64_t slice_bytes_ = 0;   // of them
  uint64_t device_bytes_ = 0;  // of one workspace

  ReadAheadOptions read_options_;

  mutable std::mutex mutex_;
  std::map<uint32_t, LayerNeed> needs_;
  std::map<uint32_t, size_t> busy_;  // layer -> place in ranks_ whose lock another process held
  std::set<uint32_t> kept_;
  // Outlive the workspaces, whose devices read from there.
  std::unique_ptr<ReadAhead> reads_;  // null: nothing was built so far
  std::unique_ptr<HostRegistration> registered_reads_;
  std::vector<Workspace> workspaces_;  // not in use
  std::vector<Workspace> failed_workspaces_;
  uint64_t device_left_bytes_ = 0;
  BuildReport report_;
};

// kUsage, with the numbers and what would do, when a layer's intermediate size cannot be cut into
// the manifest's number of shards of a multiple of 64.
Result<void> CheckShardWorld(const Manifest& manifest);

// Before the folder of a new generation is made: whether so many bytes of layer files fit on the
// disk that it will be on. kCapacity with the numbers. A generation that is there is not new.
Result<void> CheckRoomForNew(Env& env, const std::string& store_directory, const Manifest& manifest,
                             uint64_t bytes);

// A warning where nothing tells the activation.
void WarnWithoutConfig(const Checkpoint& checkpoint);

// Builds what is missing of the wanted layers and encodings, of every rank. kUsage as
// CheckShardWorld. kCapacity before anything is written
// when the files do not fit on the disk or one workspace not in the staging limit; kData naming
// tensor, file, offset and element for a source value that is not finite (for MXFP4: a scale of
// 255); kSystem naming a layer file that is there and cannot be read. Nothing half-done stays
// visible, whatever happens.
Result<BuildReport> Build(Env& env, const Checkpoint& checkpoint, const MoeModel& model,
                          const std::string& store_directory, const BuildOptions& options);

}  // namespace hotplane
