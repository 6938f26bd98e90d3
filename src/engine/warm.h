// Warm: reads layer files into the page cache, so that the next boot costs the copy and nothing
// else.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "base/worker_pool.h"
#include "store/store.h"

namespace hotplane {

struct WarmReport {
  uint32_t files = 0;
  uint64_t bytes = 0;
  uint64_t bytes_cached_before = 0;
  uint64_t bytes_cached_after = 0;
  uint64_t bytes_available = 0;  // what the page cache may grow to
  double seconds = 0;
  std::vector<std::string> warnings;  // says when the files cannot stay
};

// Reads every present layer file of these tiers, of one rank or, without `rank`, of all. Absent
// files are left out; with none at all it is kData.
Result<WarmReport> Warm(const Generation& generation, const std::vector<Tier>& tiers,
                        WorkerPool& pool, const CancelToken* cancel, Progress* progress,
                        std::optional<uint32_t> rank = std::nullopt);

}  // namespace hotplane
