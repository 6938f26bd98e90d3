// Export of a whole model as a Hugging Face folder whose routed experts are the store's, at a
// precision per expert, as BF16 tensors: for any program that loads such folders.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "base/units.h"
#include "base/worker_pool.h"
#include "checkpoint/moe_source.h"
#include "engine/precision_map.h"
#include "quant/quantize.h"
#include "store/store.h"

namespace hotplane {

struct HfExportOptions {
  std::string output_directory;
  uint64_t shard_bytes_max = 5 * kGiB;  // above 0; a larger tensor gets a file of its own
  const Kernels* kernels = nullptr;     // null: the best for this CPU
  // Files of the checkpoint's folder that are no weights; of a single file its neighbours are not
  // its own.
  bool copy_other_files = true;
  const CancelToken* cancel = nullptr;
  Progress* progress = nullptr;
};

struct HfExportReport {
  uint64_t bytes_written = 0;  // tensor data
  uint64_t tensors_written = 0;
  uint64_t tensors_copied = 0;   // of them, as they were
  uint64_t tensors_dropped = 0;  // scales of the experts' source format
  uint64_t experts_base = 0;     // experts, over all layers
  uint64_t experts_fp4 = 0;
  std::vector<std::string> files_copied;  // tokenizer and the like, by name
  std::vector<std::string> warnings;
};

// The experts under the checkpoint's own names, or, for formats without BF16 weights of their own,
// under those that transformers has for them; every other tensor byte for byte; config.json without
// quantization_config; every other regular file of the folder that holds no weights. Memory is
// bounded by one expert per worker. Files appear under their names when all of them are whole.
//
// kUsage when the output directory is there and not empty; kCapacity when the disk is too small,
// found out first; kData when the checkpoint is not what the generation was built from, a tier that
// `precision` asks for is absent (naming the layers), a value is not exact in BF16 (naming layer
// and expert), or for damage.
Result<HfExportReport> ExportHf(const Generation& generation, const Checkpoint& checkpoint,
                                const MoeModel& model, const PrecisionMap& precision,
                                WorkerPool& pool, const HfExportOptions& options);

}  // namespace hotplane
