// Export of a generation as a planes cache, so that who came from one can go back.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "base/worker_pool.h"
#include "engine/planes_cache.h"
#include "quant/quantize.h"
#include "store/store.h"

namespace hotplane {

struct PlanesCacheExportOptions {
  std::string output_directory;
  // What the program will call its checkpoint; only then it finds the files. Empty: as the
  // generation was imported.
  std::string checkpoint_id;
  bool delta = true;                 // where the store has it
  std::optional<Encoding> fp4;       // none: quintals, where all layers with a delta tier have them
  std::optional<uint32_t> rank;      // none: all
  const Kernels* kernels = nullptr;  // null: the best for this CPU
  const CancelToken* cancel = nullptr;
  Progress* progress = nullptr;
};

struct PlanesCacheExportReport {
  std::string checkpoint_id;
  Encoding fp4 = Encoding::kInvalid;  // what meta.json says of the FP4 files, written or not
  std::vector<std::string> folders;   // of the ranks
  uint32_t layers = 0;
  uint32_t files_written = 0;
  uint32_t files_kept = 0;  // were there with the right content
  uint64_t bytes_written = 0;
  double seconds = 0;
  std::vector<std::string> warnings;
};

// Every chunk is verified before it is used. Files appear under their names when they are whole,
// with their digests; meta.json, without which nobody looks at them, comes last. What is there with
// the same content is kept, anything else of these names replaced. Layers whose base is absent are
// left out, with a warning. Memory is a few experts.
//
// kUsage without a checkpoint_id, or for one that is no printable ASCII; kData for layers with
// biases, which a cache has no place for, when no layer has a base, and for damage; kCapacity when
// the disk is too small, found out first.
Result<PlanesCacheExportReport> ExportPlanesCache(const Generation& generation, WorkerPool& pool,
                                                  const PlanesCacheExportOptions& options);

}  // namespace hotplane
