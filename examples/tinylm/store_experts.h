// The experts computed by hotplane, straight from a booted store: 2-bit base, FP4, or each expert
// at its own of the two.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "experts.h"
#include "model.h"

namespace tinylm {

// A hotplane_precision for each [layer, expert].
using Precisions = std::vector<uint8_t>;

struct StoreOptions {
  std::string store;
  std::string checkpoint;  // what the store was built from; layers that are missing are built of it
  bool fp4 = false;        // FP4 will be asked for
  hotplane_arithmetic arithmetic = HOTPLANE_FAST;
  std::string device = "cpu";
};

class StoreExperts : public Experts {
 public:
  // Boots the store, every byte verified. The experts of the base tier are used until others are
  // asked for.
  static Result<std::unique_ptr<StoreExperts>> Boot(const StoreOptions& options,
                                                    const Config& config);

  // Of all calls that follow; not while a Forward runs.
  void Use(Precisions precisions) { precisions_ = std::move(precisions); }

  Result<void> Forward(const ExpertCall& call) const override;

 private:
  StoreExperts(hotplane::api::Engine engine, const Config& config, hotplane_arithmetic arithmetic)
      : engine_(std::move(engine)),
        config_(config),
        arithmetic_(arithmetic),
        precisions_(config.layers * config.experts, HOTPLANE_PRECISION_BASE) {}

  mutable hotplane::api::Engine engine_;
  Config config_;
  hotplane_arithmetic arithmetic_;
  Precisions precisions_;
};

}  // namespace tinylm
