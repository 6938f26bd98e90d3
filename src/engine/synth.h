// Synth: a store of seeded random experts at real geometry, for tests and benchmarks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "format/kinds.h"
#include "io/env.h"

namespace hotplane {

// "ds4-flash", "glm-5.2", "kimi-k2", "gpt-oss-120b", or "E,H,I". kUsage with the list otherwise.
Result<LayerGeometry> ParseGeometry(std::string_view text);

struct SynthStoreOptions {
  LayerGeometry geometry;
  uint32_t layers = 1;
  std::vector<Encoding> encodings = {Encoding::kBase};
  uint64_t seed = 1;
  size_t worker_count = 0;
  const CancelToken* cancel = nullptr;
  double stall_seconds = 0;  // for a lock that nobody lets go of: LockWaiting
  Progress* progress = nullptr;
};

struct SynthReport {
  std::string generation;  // of a store; empty for a checkpoint
  uint64_t bytes_written = 0;
  double seconds = 0;
};

// Packs random MXFP4 experts, so the planes, both tiers and all checksums are what a build would
// write. Layer files that are there already are kept. Before anything is written: kUsage where the
// folder holds a generation that this has not made, kCapacity when they do not fit on the disk,
// kData for a directory or another release's file in a layer's place, kSystem where what is there
// cannot be read.
Result<SynthReport> SynthStore(Env& env, const std::string& directory,
                               const SynthStoreOptions& options);

}  // namespace hotplane
