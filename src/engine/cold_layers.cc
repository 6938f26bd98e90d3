#include "engine/cold_layers.h"

#include <chrono>
#include <utility>

#include "base/check.h"
#include "boot/describe.h"
#include "boot/source_stamp.h"

namespace hotplane {

Result<std::unique_ptr<ColdLayers>> ColdLayers::Open(Env& env, const std::string& path) {
  const auto start = std::chrono::steady_clock::now();
  // Of before the fingerprint: files that change meanwhile do not match it later.
  Result<std::string> stamp = MakeSourceStamp(env, path);
  HP_ASSIGN(Checkpoint checkpoint, Checkpoint::Open(env, path));
  std::unique_ptr<ColdLayers> cold(new ColdLayers(std::move(checkpoint)));
  WarnWithoutConfig(cold->checkpoint_);
  HP_ASSIGN(cold->model_, DiscoverMoe(cold->checkpoint_));
  HP_ASSIGN(cold->fingerprint_, Fingerprint(cold->checkpoint_, cold->model_));
  if (stamp) cold->stamp_ = *std::move(stamp);
  cold->seconds_fingerprint_ =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return cold;
}

CheckpointFacts ColdLayers::facts() const {
  CheckpointFacts facts;
  facts.path = checkpoint_.path();
  for (const MoeLayer& layer : model_.layers) facts.source_bytes.push_back(SourceBytes(layer));
  return facts;
}

Result<void> ColdLayers::Pair(const Generation& generation, bool may_write) const {
  HP_TRY(CheckSamePair(generation, checkpoint_, model_, fingerprint_));
  if (may_write && !stamp_.empty()) KeepSourceStamp(generation, stamp_);
  return {};
}

Result<void> ColdLayers::Start(const Generation& generation, const BuildOptions& options,
                               const std::map<uint32_t, std::vector<Encoding>>& needs,
                               const std::vector<uint32_t>& bases_later) {
  HP_CHECK(!started());
  builds_ = std::make_unique<CheckpointBuilds>(generation, checkpoint_, model_, options);
  for (const auto& [layer, encodings] : needs) builds_->Need(layer, encodings);
  HP_ASSIGN(const BuildQueueOptions queue_options, builds_->Prepare(bases_later));
  queue_ = std::make_unique<BuildQueue>(*builds_, queue_options);
  for (const uint32_t layer : builds_->FileOrder()) queue_->Enqueue(layer);
  queue_->Flush();
  return {};
}

Result<void> ColdLayers::Rebuild(uint32_t layer) {
  // Its delta tier may be in flight; how that ends is told to those who wait for it.
  (void)queue_->Wait(layer);
  builds_->Need(layer, {Encoding::kBase}, /*proven_bad=*/true);
  queue_->Forget(layer);
  queue_->Enqueue(layer);
  return queue_->Wait(layer);
}

BuildReport ColdLayers::report() const {
  BuildReport report = builds_ != nullptr ? builds_->report() : BuildReport{};
  report.seconds_fingerprint = seconds_fingerprint_;
  return report;
}

}  // namespace hotplane
