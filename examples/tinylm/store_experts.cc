#include "store_experts.h"

namespace tinylm {
namespace {

// Memory for the FP4 records of every expert: nibbles, the larger encoding, each from a new page.
uint64_t DeltaBytes(const Config& config) {
  const uint64_t record_bytes = 3 * config.hidden * config.intermediate / 2;
  return (record_bytes + 4095) / 4096 * 4096 * config.layers * config.experts;
}

std::string SizesText(size_t layers, size_t experts, size_t hidden, size_t intermediate) {
  return std::to_string(layers) + " layers of " + std::to_string(experts) + " experts of " +
         std::to_string(hidden) + " x " + std::to_string(intermediate);
}

}  // namespace

Result<std::unique_ptr<StoreExperts>> StoreExperts::Boot(const StoreOptions& options,
                                                         const Config& config) {
  hotplane::api::BootOptions boot;
  boot.checkpoint = options.checkpoint;
  boot.device = options.device;
  if (options.fp4) {
    boot.want_delta = true;
    boot.delta_cache_bytes = DeltaBytes(config);
    boot.pin_delta_bytes = boot.delta_cache_bytes;
  }
  auto engine = hotplane::api::Engine::Boot(options.store, boot);
  if (!engine) return Failure(engine.error());

  const std::vector<hotplane_layer> layers = engine->Layers();
  const std::string wanted =
      SizesText(config.layers, config.experts, config.hidden, config.intermediate);
  if (layers.size() != config.layers) {
    return Failure(HOTPLANE_DATA, "the store is of another model", options.store, wanted,
                   std::to_string(layers.size()) + " layers");
  }
  for (const hotplane_layer& layer : layers) {
    const std::string found =
        SizesText(layers.size(), layer.experts, layer.hidden, layer.intermediate);
    if (found != wanted) {
      return Failure(HOTPLANE_DATA, "the store is of another model", options.store, wanted, found);
    }
    if (!options.fp4 || layer.device < 0) continue;
    const Result<void> loaded = engine->MoeLoadFp4(layer.ordinal);
    if (!loaded) return Failure(loaded.error());
  }
  return std::unique_ptr<StoreExperts>(
      new StoreExperts(std::move(*engine), config, options.arithmetic));
}

Result<void> StoreExperts::Forward(const ExpertCall& call) const {
  hotplane_moe moe;
  hotplane_moe_init(&moe);
  moe.layer = static_cast<uint32_t>(call.layer);
  moe.token_count = static_cast<uint32_t>(call.tokens);
  moe.top_k = static_cast<uint32_t>(config_.top_k);
  moe.arithmetic = arithmetic_;
  moe.precisions = &precisions_[call.layer * config_.experts];
  moe.x = call.x;
  moe.ids = call.ids;
  moe.weights = call.weights;
  moe.y = call.y;
  return engine_.MoeForward(moe);
}

}  // namespace tinylm
