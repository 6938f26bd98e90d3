// Proof that a store was built from this checkpoint: every source tensor's digest against the
// layers' source records.
#pragma once

#include <cstdint>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "base/worker_pool.h"
#include "checkpoint/moe_source.h"
#include "store/store.h"

namespace hotplane {

struct SourceReport {
  uint32_t layers_checked = 0;
  uint32_t layers_without_record = 0;  // not built yet
  uint64_t tensors_checked = 0;
  uint64_t bytes_checked = 0;
};

// Reads every expert byte of the built layers. kData naming the first tensor (in file order within
// its layer) that differs, with both digests, or saying how identities differ.
Result<SourceReport> VerifySource(const Generation& generation, const Checkpoint& checkpoint,
                                  const MoeModel& model, WorkerPool& pool,
                                  const CancelToken* cancel, Progress* progress);

}  // namespace hotplane
