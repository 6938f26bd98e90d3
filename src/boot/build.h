// Build: a checkpoint's routed experts, quantized once into the layer files of a store.
//
// Streams the checkpoint in file order. Workers take experts, several layers may be in flight;
// staging is one workspace per worker and bounded by a byte budget. Output is byte-identical for
// any worker count and ISA. Layers that are already there are left alone, so an interrupted build
// is finished by running it again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "checkpoint/moe_source.h"
#include "quant/quantize.h"
#include "store/store.h"

namespace hotplane {

struct BuildOptions {
  std::string layers;  // SelectLayers text; empty: all
  std::vector<Encoding> encodings = {Encoding::kBase};
  ZeroMode zero_mode = ZeroMode::kAuto;
  size_t worker_count = 0;           // 0: the CPUs this process may use
  uint64_t staging_limit_bytes = 0;  // 0: a quarter of the memory available
  bool no_lock = false;              // build without flock, for file systems that refuse it
  const Kernels* kernels = nullptr;  // null: the best for this CPU
  const CancelToken* cancel = nullptr;
  Progress* progress = nullptr;
};

struct BuildReport {
  Digest128 generation{};
  uint32_t layers_total = 0;  // selected
  uint32_t layers_built = 0;  // at least one file of it was built here
  uint32_t layers_attached =
      0;                      // everything wanted was there, or another process built it meanwhile
  uint64_t bytes_needed = 0;  // source bytes of the layers that had a file missing
  uint64_t bytes_read = 0;    // source bytes read to quantize
  uint64_t bytes_metadata = 0;  // headers read by probing
  uint64_t bytes_built = 0;     // layer files written
  uint64_t bytes_skipped = 0;   // layer files that were there
  uint64_t peak_staging_bytes = 0;
  size_t worker_count = 0;
  const char* isa = "";
  double seconds = 0;
  double seconds_fingerprint = 0;
  double seconds_quantize = 0;  // from the first read to the last publish
  std::vector<std::string> warnings;
};

// Builds what is missing of the wanted layers and encodings. kCapacity before anything is written
// when the files do not fit on the disk or one workspace not in the staging limit; kData naming
// tensor, file, offset and element for a source value that is not finite (for MXFP4: a scale of
// 255). Nothing half-done stays visible, whatever happens.
Result<BuildReport> Build(Env& env, const Checkpoint& checkpoint, const MoeModel& model,
                          const std::string& store_directory, const BuildOptions& options);

}  // namespace hotplane
