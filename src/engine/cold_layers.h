// A checkpoint at hand: proved to be the generation's source, and the queue that builds missing
// layers from it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "boot/build.h"
#include "boot/build_queue.h"
#include "boot/plan.h"
#include "checkpoint/moe_source.h"
#include "store/store.h"

namespace hotplane {

class ColdLayers {
 public:
  // Reads headers and the sampled pages of the fingerprint.
  static Result<std::unique_ptr<ColdLayers>> Open(Env& env, const std::string& path);

  const MoeModel& model() const { return model_; }
  // With the zero mode and the shards of `identity`.
  Manifest MakeManifestLike(const Identity& identity) const {
    return MakeManifest(model_, fingerprint_, identity.zero_mode, identity.shard_world);
  }
  CheckpointFacts facts() const;
  double seconds_fingerprint() const { return seconds_fingerprint_; }

  // kData unless the generation was built from this checkpoint; then keeps the source stamp where
  // `may_write`.
  Result<void> Pair(const Generation& generation, bool may_write) const;

  // Starts building, in file order. `needs`: encodings by layer; `bases_later`: layers that Rebuild
  // may be called for. REQUIRES Pair with this generation, which must outlive this. Once.
  Result<void> Start(const Generation& generation, const BuildOptions& options,
                     const std::map<uint32_t, std::vector<Encoding>>& needs,
                     const std::vector<uint32_t>& bases_later);
  bool started() const { return queue_ != nullptr; }
  // REQUIRES started().
  BuildQueue& queue() { return *queue_; }
  // Builds the base of a layer whose file was found bad, and waits for it. REQUIRES started().
  Result<void> Rebuild(uint32_t layer);

  // CheckpointBuilds::IsKept.
  bool IsKept(uint32_t layer) const { return builds_ != nullptr && builds_->IsKept(layer); }

  BuildReport report() const;

 private:
  ColdLayers(Checkpoint checkpoint) : checkpoint_(std::move(checkpoint)) {}

  Checkpoint checkpoint_;
  MoeModel model_;
  Digest128 fingerprint_{};
  std::string stamp_;  // "" where it could not be made
  double seconds_fingerprint_ = 0;
  std::unique_ptr<CheckpointBuilds> builds_;
  std::unique_ptr<BuildQueue> queue_;  // after builds_: it is destroyed first
};

}  // namespace hotplane
