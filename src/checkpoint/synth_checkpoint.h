// Synthetic checkpoints: seeded random weights of a given geometry under real names, written as a
// stream. For `hotplane synth`, benchmarks and tests.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/cancel.h"
#include "base/status.h"
#include "base/worker_pool.h"
#include "format/kinds.h"
#include "io/env.h"

namespace hotplane {

struct SynthCheckpointOptions {
  // kMxfp4 is written with DeepSeek names, the others with per-expert HF names: kNvfp4 as modelopt
  // does, kFp8 in blocks of 128 x 128.
  SourceFormat format = SourceFormat::kMxfp4;
  LayerGeometry geometry;  // hidden and intermediate: multiples of 64
  uint32_t main_layers = 1;
  uint32_t dense_layers = 0;  // of the main layers, the first ones, without experts
  uint32_t mtp_layers = 0;
  uint32_t top_k = 0;  // 0: the lower of 6 and the experts
  uint64_t seed = 1;
  uint64_t shard_bytes_max = uint64_t{4} << 30;  // 0: one file without an index
};

struct SynthCheckpointReport {
  uint64_t data_bytes = 0;
  uint64_t tensor_count = 0;
};

// `directory` must not hold a checkpoint yet. The bytes depend on the options alone: the same on
// every machine, for every number of workers; the weights of a tensor depend on its name and the
// seed alone. Buffers 16 MiB. kUsage when the geometry is not supported.
Result<SynthCheckpointReport> WriteSynthCheckpoint(
    Env& env, const std::string& directory, const SynthCheckpointOptions& options, WorkerPool& pool,
    const CancelToken* cancel = nullptr,
    const std::function<void(uint64_t bytes_done, uint64_t bytes_total)>& progress = {});

}  // namespace hotplane
