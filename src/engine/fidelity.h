// Fidelity: how far the weights of a store are from the weights they were made of, by layer, tier
// and projection. Errors are taken against the source's exact numbers, in float64; the stored ones
// come from verified reads of the store, nothing is quantized again.
//
// With w a source weight, q the same weight as a tier has it, sums over the weights of a
// projection, an expert, a layer or a model:
//   relative RMS     sqrt(sum (q-w)^2 / sum w^2)
//   signed bias      mean (q-w) / sqrt(mean w^2). What does not cancel when many weights are
//                    summed up: above 0 when weights come out too large in value, below when too
//                    small. A codebook without symmetry, and zeros that all get one sign, show
//                    here.
//   magnitude bias   sum sign(w)(q-w) over w != 0 / sum |w|. Above 0 when weights come out too far
//                    from zero.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "base/worker_pool.h"
#include "checkpoint/moe_source.h"
#include "quant/quantize.h"
#include "store/store.h"

namespace hotplane {

// What a tier makes of the weights.
struct TierSums {
  double error_squares = 0;     // (q-w)^2
  double errors = 0;            // q-w
  double magnitude_errors = 0;  // sign(w)(q-w), of w != 0
  uint64_t largest = 0;  // of the largest magnitude that the tier has: 6 of FP4, 4 of the base
  uint64_t clipped = 0;  // of them, those whose source is beyond it
};

// Of any number of weights. Sums of disjoint parts add up; in a fixed order they do so to the bit.
struct FidelitySums {
  uint64_t weights = 0;
  uint64_t zeros = 0;           // source weights equal to 0
  uint64_t negative_zeros = 0;  // of them, those with a sign
  double squares = 0;           // w^2
  double magnitudes = 0;        // |w|
  uint64_t zero_nibbles = 0;    // of FP4: magnitude 0
  uint64_t negative_zero_nibbles = 0;
  uint64_t blocks = 0;           // of 32 weights with one exponent
  uint64_t zero_blocks = 0;      // of them, those whose source weights are all 0
  int exponent_min = INT32_MAX;  // of the other blocks: log2 of their scale
  int exponent_max = INT32_MIN;
  TierSums base;
  TierSums fp4;

  void Add(const FidelitySums& other);
  // One row: weights, e8m0 scales per 32 of them, codes, and nibbles (empty: no FP4).
  // REQUIRES weights.size() % 32 == 0.
  void AddRow(std::span<const double> source, std::span<const uint8_t> scales,
              std::span<const uint8_t> codes, std::span<const uint8_t> nibbles);
};

// Nothing where the source has only zeros.
std::optional<double> RelativeRms(const FidelitySums& sums, const TierSums& tier);
std::optional<double> SignedBias(const FidelitySums& sums, const TierSums& tier);
std::optional<double> MagnitudeBias(const FidelitySums& sums, const TierSums& tier);

struct FidelityLayer {
  ManifestLayer layer;
  std::string base_missing;  // empty: it was measured
  std::string fp4_missing;
  std::array<FidelitySums, kProjectionCount> projections;

  FidelitySums Total() const;
};

struct FidelityReport {
  Digest128 generation{};
  std::string model;  // "mxfp4, 4 MoE layers, E=32 H=256 I=128"
  std::vector<FidelityLayer> layers;
  uint64_t bytes_read_checkpoint = 0;
  uint64_t bytes_read_store = 0;
  double seconds = 0;

  // Of all layers whose tier was measured.
  FidelitySums Total(bool fp4) const;
};

struct FidelityOptions {
  std::string layers;                // as SelectLayers takes them
  const Kernels* kernels = nullptr;  // null: the best for this CPU
  const CancelToken* cancel = nullptr;
  Progress* progress = nullptr;
};

// Reads the selected layers' experts from both, one per worker at a time, and proves each source
// tensor by the digest that the store has of it. The report is the same for any number of workers.
// A tier that the store lacks is told in the report. kData when the checkpoint is not what the
// generation was built from, for damage in either, and when no selected layer has a base tier.
Result<FidelityReport> MeasureFidelity(const Generation& generation, const Checkpoint& checkpoint,
                                       const MoeModel& model, WorkerPool& pool,
                                       const FidelityOptions& options);

// One JSON object, with the keys that docs/cli.md lists.
std::string FidelityJson(const FidelityReport& report);

}  // namespace hotplane
