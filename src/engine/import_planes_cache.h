// Import: the files of a planes cache into layer files of a store, without the checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "base/worker_pool.h"
#include "checkpoint/model_config.h"
#include "engine/planes_cache.h"
#include "format/manifest.h"
#include "quant/quantize.h"
#include "store/store.h"

namespace hotplane {

// What a planes cache does not tell: the shape of each of its layers, by the number in its file
// names. A file's size gives E * H * I only.
struct LayersGeometry {
  struct Range {
    uint32_t first = 0;
    uint32_t last = 0;
    LayerGeometry geometry;  // of the whole layer, whatever the ranks
  };
  std::vector<Range> ranges;         // ascending, disjoint: these layers and no others
  std::optional<LayerGeometry> all;  // instead of ranges: every layer that is found
};
// "GEOMETRY" as of ParseGeometry, or "A-B:GEOMETRY;C:GEOMETRY". kUsage.
Result<LayersGeometry> ParseLayersGeometry(std::string_view text);
// "43" or "43-44", ascending. kUsage.
Result<std::vector<uint32_t>> ParseLayerNumbers(std::string_view text);

// kUsage when one lies inside the other: neither may be written into, or removed from, as the
// other.
Result<void> CheckCacheApart(const std::string& cache_directory,
                             const std::string& store_directory);

struct PlanesCacheImportOptions {
  std::string key_prefix;  // where the cache holds several models or configurations
  LayersGeometry geometry;
  std::vector<uint32_t> mtp_layers;  // of the file names
  // Activation and top-k, as of a checkpoint's config.json, and a shape that the geometry must
  // agree with. None: silu(gate) * up.
  std::optional<ModelConfig> config;
  std::optional<uint32_t> rank;  // import this rank's folder alone; none: all must be there
  bool delta = true;             // false: leave fp13 and fp2 where they are
  // After a layer was imported, or found in the store, all its bytes there are read back from the
  // disk and compared with the cache's; then the cache's files of it are removed. REQUIRES delta.
  bool move = false;
  bool no_lock = false;
  double stall_seconds = 0;          // for a lock that nobody lets go of: LockWaiting
  const Kernels* kernels = nullptr;  // null: the best for this CPU
  const CancelToken* cancel = nullptr;
  Progress* progress = nullptr;
};

struct PlanesCacheImportReport {
  Digest128 generation{};
  uint32_t shard_world = 1;
  uint32_t layers_total = 0;     // of the cache, with or without files that are left
  uint32_t layers_imported = 0;  // at least one file of it was written
  uint32_t layers_attached = 0;  // everything was there
  uint64_t bytes_read = 0;       // of the cache
  uint64_t bytes_built = 0;      // layer files written
  uint64_t bytes_compared = 0;   // of the store, before files were removed
  uint64_t bytes_removed = 0;    // from the cache
  uint32_t files_removed = 0;
  // --move alone: nothing of a cache is in its folder, and the store has imported planes. The other
  // fields are of no import then, `generation` is the first of them.
  bool moved_before = false;
  double seconds = 0;
  std::vector<std::string> warnings;
};

// The manifest's identity is made of what the cache calls its checkpoint, its zero mode and its
// ranks; layers keep the numbers of the file names. Layer files that are there are left alone, but
// for one expert that is compared, so an import that was cut short is finished by running it again.
// Files are published as a build publishes them. Memory is a few experts, whatever the model.
//
// Before anything is written: kUsage for a cache as of ScanPlanesCache or a geometry that planes
// cannot have; kData naming the file for a size other than the geometry's, a missing part or rank,
// or a layer outside the geometry; kCapacity when the disk is too small. Later kData for a scale of
// 255, FP4 that does not belong to its base, a digest that does not match, or a layer that the
// store has with other bytes.
Result<PlanesCacheImportReport> ImportPlanesCache(Env& env, const std::string& cache_directory,
                                                  const std::string& store_directory,
                                                  WorkerPool& pool,
                                                  const PlanesCacheImportOptions& options);

}  // namespace hotplane
