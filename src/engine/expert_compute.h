// The operator over a booted layer: which weights a call needs, and where they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/worker_pool.h"
#include "boot/boot.h"
#include "engine/expert_records.h"
#include "moe/moe.h"

namespace hotplane {

// One forward of one layer; arrays as in MoeCall.
struct MoeRequest {
  uint32_t layer = 0;  // ordinal
  Arithmetic arithmetic = Arithmetic::kFast;
  Precision precision = Precision::kBase;  // of every expert, unless `precisions`
  std::span<const uint8_t> precisions;     // [E], a Precision each; empty
  size_t token_count = 0;
  size_t top_k = 0;
  const float* x = nullptr;
  const int32_t* ids = nullptr;
  const float* weights = nullptr;
  float* y = nullptr;
};

// Thread-safe: calls from several threads share the cores one after another. `records` outlives it.
class ExpertCompute {
 public:
  // `isa`: of SelectMoeKernels; empty: the best one.
  ExpertCompute(ExpertRecords& records, size_t worker_count, std::string isa)
      : records_(records), worker_count_(worker_count), isa_(std::move(isa)) {}

  // `layer` is published and on the host. Experts of FP4 are taken through the cache of delta
  // records, several at once, and stay pinned until the call ends: those that find no slot there
  // have memory of their own meanwhile. Errors as CheckMoeCall, MoeForward and ExpertRecords::Get;
  // kUsage for a layer that lives on a device; kData naming an expert that this boot does not have.
  // Of a sharded store this rank's part of the sum.
  Result<void> Forward(const BootedLayer& layer, const Activation& activation,
                       const MoeRequest& request);

 private:
  Result<std::vector<ExpertWeights>> AddExperts(const BootedLayer& layer, const MoeRequest& request,
                                                uint32_t expert_count,
                                                std::vector<PinnedRecord>& pinned);
  WorkerPool& pool();
  Result<const MoeKernels*> Kernels();

  ExpertRecords& records_;
  const size_t worker_count_;
  const std::string isa_;
  std::mutex mutex_;  // guards what is made at the first call
  const MoeKernels* kernels_ = nullptr;
  std::unique_ptr<WorkerPool> pool_;  // its own: a boot holds the engine's until it has landed
};

}  // namespace hotplane
