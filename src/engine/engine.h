// Engine: a booted store with everything it stands on. Threads and lifetimes are decided here.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/worker_pool.h"
#include "boot/boot.h"
#include "engine/expert_records.h"
#include "store/store.h"

namespace hotplane {

struct EngineOptions {
  std::string store_directory;
  std::string generation_prefix;  // empty: the only one there is
  size_t worker_count = 0;        // 0: the CPUs this process may use
  BootOptions boot;               // `pool` is set by the engine
  RecordOptions records;          // `worker_count` is set by the engine
  bool measure_limit = false;     // also measure what the memory can do, after the boot
};

class Engine {
 public:
  // Opens the store; boots nothing yet.
  static Result<std::unique_ptr<Engine>> Open(Env& env, const EngineOptions& options);
  ~Engine();

  // Once. A failure leaves the layers published before it valid until the engine is destroyed.
  Result<void> Boot(const LayerReady& on_layer_ready);

  const Generation& generation() const { return *generation_; }
  WorkerPool& pool() { return *pool_; }
  std::span<const BootedLayer> layers() const;
  // REQUIRES Boot was called.
  const BootReport& report() const;
  double limit_bytes_per_second() const { return limit_bytes_per_second_; }  // 0: not measured
  // One JSON object, with the keys that docs/cli.md lists for `boot`. REQUIRES Boot was called.
  std::string ReportJson() const;

  // One expert's record, from any thread, once the engine is open; with or without a boot, and
  // after one that failed. Each read is verified on its own; see RecordReader for errors and
  // sizes.
  Result<void> ReadDelta(uint32_t layer, uint32_t expert, std::span<std::byte> destination) {
    return records_->Read(RecordKind::kDelta, {layer, expert}, destination);
  }
  Result<void> ReadFp4(uint32_t layer, uint32_t expert, std::span<std::byte> destination) {
    return records_->Read(RecordKind::kFp4, {layer, expert}, destination);
  }
  Result<void> ReadBase(uint32_t layer, uint32_t expert, std::span<std::byte> destination) {
    return records_->Read(RecordKind::kBase, {layer, expert}, destination);
  }
  // The same in batches, through caches, and presence. The engine outlives its pinned records.
  ExpertRecords& records() { return *records_; }

 private:
  Engine() = default;
  void MeasureLimit();

  EngineOptions options_;
  std::unique_ptr<WorkerPool> pool_;
  std::unique_ptr<Generation> generation_;
  std::unique_ptr<BootSession> session_;
  std::unique_ptr<ExpertRecords> records_;  // after what it reads from
  double limit_bytes_per_second_ = 0;
};

}  // namespace hotplane
