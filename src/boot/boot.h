// Boot: the base tier of a generation into memory, every chunk verified, layers handed out in
// order.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "base/worker_pool.h"
#include "boot/executor.h"
#include "boot/layer_selection.h"
#include "device/device.h"
#include "store/store.h"

namespace hotplane {

struct BootOptions {
  std::string layers;  // SelectLayers text; empty: all
  // Only these experts of each layer: the others are neither read nor published. None: all.
  std::optional<ExpertRange> experts;
  bool map = false;  // serve the layers from the page cache instead of landing them in own memory
  bool verify = true;
  CacheMode cache = CacheMode::kAuto;
  WorkerPool* pool = nullptr;  // REQUIRED
  // Where layers land, unless `map`; outlives the session, one session at a time. Null: memory of
  // the host.
  Device* device = nullptr;
  // Layers, by ordinal, that have memory on the device already: of their whole data region where
  // all experts are wanted, else of the wanted pieces at least; it outlives the session. `there`:
  // their bytes are in it, and are verified like those that land. REQUIRES a device; for `there`
  // one that verifies.
  struct Place {
    std::byte* data = nullptr;
    bool there = false;
  };
  std::map<uint32_t, Place> places;
  const CancelToken* cancel = nullptr;
  Progress* progress = nullptr;
  // Memory that landing may take; 0: what the device, or else the machine or the cgroup, has
  // available.
  uint64_t memory_limit_bytes = 0;
};

// A published layer. Parts are [E, ...] arrays, contiguous over all booted experts, in plane order.
struct BootedLayer {
  uint32_t ordinal = 0;
  uint32_t model_index = 0;
  uint32_t first_expert = 0;
  LayerGeometry geometry;  // its experts are those that were booted
  // -1: the parts are host memory. Else they are memory of this CUDA device, which the host cannot
  // read.
  int device = -1;
  std::span<const std::byte> planes13, sc13, planes2, sc2;
  std::span<const std::byte> bias13, bias2;  // float32 [E, 2I] and [E, H]; empty without biases
  bool mapped = false;  // served from the page cache: a file cut short is a SIGBUS for the reader
};

struct BootReport {
  struct LayerSource {
    uint32_t ordinal = 0;
    // "page cache", "disk, buffered", "disk, direct", "both", "mapped", "built"; empty before Run.
    const char* source = "";
    uint64_t bytes = 0;
    uint64_t bytes_cached = 0;  // of them in the page cache when the boot began
    double seconds_ready = 0;   // from the start of Run to its publication
    bool kept = false;          // it was there: not read
  };
  uint32_t layers_total = 0;
  uint64_t bytes_needed = 0;      // data regions, padding included; of some experts their pieces
  uint64_t bytes_read = 0;        // of them, read once each
  uint64_t bytes_kept = 0;        // of layers that were built on the device and stayed there
  uint64_t bytes_read_delta = 0;  // of bytes_read, delta records that are pinned; else base
  uint64_t bytes_pinned = 0;      // memory that is kept for them
  uint64_t bytes_read_disk = 0;   // of bytes_read, those that were not in the page cache
  uint64_t bytes_reread = 0;      // repeats of bad chunks
  uint64_t bytes_metadata = 0;    // headers and tables
  uint64_t bytes_skipped = 0;  // files of these layers that this boot does not touch (delta tier)
  uint64_t bytes_verified = 0;
  double seconds = 0;           // of Open and Run together
  double seconds_plan = 0;      // headers, tables, memory check
  double seconds_allocate = 0;  // memory reserved, and given to what landed from the page cache
  double seconds_land = 0;      // read, verify, publish
  double seconds_pin = 0;       // delta records read into pinned memory
  std::string device = "cpu";   // or its name
  double seconds_device = 0;    // to open it: in no other figure
  double seconds_device_context = 0;  // of it
  double seconds_device_ring = 0;     // of it, after the context
  uint64_t bytes_ring = 0;            // pinned for it
  uint64_t bytes_device_context = 0;  // of its memory in use when it had been opened: its context's
                                      // own, and of others
  uint64_t peak_device_bytes = 0;     // of its memory, the most beyond that
  std::vector<LayerSource> sources;
  std::string read_path;  // how cold layers were read, and why so; empty: none was
  std::vector<std::string> warnings;
};

// Called in layer order, one call at a time, from a thread of the boot, the moment a layer's bytes
// are at their place and verified. Must not call into the session.
using LayerReady = std::function<void(const BootedLayer&)>;

// One boot. The layers stay valid until it is destroyed, after a failed Run those that were
// published before the failure.
class BootSession {
 public:
  // Reads headers and tables of the wanted layers and nothing else. kData naming every layer that
  // is absent or damaged; kCapacity when landing does not fit in memory, with the numbers.
  static Result<std::unique_ptr<BootSession>> Open(const Generation& generation,
                                                   const BootOptions& options);
  ~BootSession();

  // Once.
  Result<void> Run(const LayerReady& on_layer_ready);

  // The layer at place `index` of this boot, as soon as it is published: from any thread, also
  // before Run, which another one must call. A failed Run ends the wait with its Status, as does
  // `cancel` (which may be null).
  Result<BootedLayer> WaitLayer(size_t index, const CancelToken* cancel) const;

  std::span<const BootedLayer> layers() const;  // published, in order
  const BootReport& report() const;

 private:
  struct State;
  explicit BootSession(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace hotplane
