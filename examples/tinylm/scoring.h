// The mean next-byte loss of a text, in windows that know nothing of each other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "experts.h"
#include "model.h"
#include "store_experts.h"

namespace tinylm {

constexpr size_t kWindowBytes = 512;

struct Scoring {
  double loss = 0;                   // mean over the scored bytes, nats
  std::vector<uint8_t> predictions;  // the most likely byte at each scored place
  std::vector<double> routed;        // sum of routing weights, [layer, expert]
};

// HOTPLANE_USAGE where the file has no whole window.
Result<std::string> ReadText(const std::string& path);

// Whole windows of kWindowBytes; the first byte of each is not scored, a remainder is dropped. The
// same result for any number of threads.
Result<Scoring> Score(const Model& model, const Experts& experts, const std::string& text,
                      uint32_t threads);

// Share of places where both predict the same byte.
double Agreement(const Scoring& a, const Scoring& b);

// In each layer FP4 for the experts that carry `share` of the routed weight, the busiest first;
// base for the rest.
Precisions MixedPrecisions(const Config& config, const std::vector<double>& routed, double share);

}  // namespace tinylm
