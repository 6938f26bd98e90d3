// BuildQueue: cold layers, enqueued as they are discovered, built in batches by workers in the
// background.
//
// A batch fires when `batch_size` layers are pending, at Flush, and when somebody waits for a
// pending layer, so nothing is ever stranded. A layer that is built, pending or in flight is not
// enqueued twice; whoever wants one that is in flight waits for it. A failure cancels everything
// that is pending or in flight, is told to everyone who waits, and leaves the queue empty and
// usable.
//
// Layers are begun in the order in which they were enqueued. A layer is done in steps (experts):
// workers take steps of the first layer that has any, then of the next, so the source streams in
// order and no worker idles while a last layer is finished. Memory is admitted by bytes: the steps
// that run at one moment never hold more than `staging_limit_bytes` together.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"

namespace hotplane {

// One layer being built. Destroyed without Publish it leaves nothing behind.
class LayerBuild {
 public:
  virtual ~LayerBuild() = default;
  virtual size_t step_count() const = 0;
  // Staging that one running step holds.
  virtual uint64_t step_bytes() const = 0;
  // Each step once; different ones at the same time.
  virtual Result<void> RunStep(size_t step) = 0;
  // After all steps succeeded.
  virtual Result<void> Publish() = 0;
};

// Where the queue gets its layers from. One call at a time.
class LayerBuilds {
 public:
  virtual ~LayerBuilds() = default;
  enum class Opened : uint8_t {
    kInvalid = 0,
    kBuild,  // *build is set
    kDone,   // there is nothing to build: another process published it
    kBusy,   // another process is building it: ask again later
  };
  virtual Result<Opened> Open(uint32_t layer, std::unique_ptr<LayerBuild>* build) = 0;
  // Of a layer that was kBusy: the lock in the way, and a number that changes while its holder
  // works.
  struct Holder {
    std::string lock_path;
    uint64_t mark = 0;
  };
  virtual Holder HolderOf(uint32_t layer) = 0;
};

struct BuildQueueOptions {
  size_t batch_size = 12;
  size_t worker_count = 4;
  uint64_t staging_limit_bytes = UINT64_MAX;
  const CancelToken* cancel = nullptr;
  Progress* progress = nullptr;  // `waiting` is up while it waits for another process
  // So long may there be nothing to do but wait for another process in which nothing changes; then
  // the layer fails with LockStalled. 0: for ever.
  double stall_seconds = 0;
};

// Thread-safe. Must not be used from inside a LayerBuild.
class BuildQueue {
 public:
  // `builds` must outlive the queue. Threads are started by the first batch.
  BuildQueue(LayerBuilds& builds, const BuildQueueOptions& options);
  // Cancels what is not built and joins the workers.
  ~BuildQueue();
  BuildQueue(const BuildQueue&) = delete;
  BuildQueue& operator=(const BuildQueue&) = delete;

  // False when the layer is built, pending or in flight already. A layer that failed or was
  // cancelled can be enqueued again.
  bool Enqueue(uint32_t layer);
  // Fires what is pending, however little.
  void Flush();
  // Until the layer is built. Its batch's failure, or kUsage for a layer that was never enqueued.
  Result<void> Wait(uint32_t layer);
  // Flush, then until nothing is pending or in flight. The first failure since the last Finish.
  Result<void> Finish();
  // Forgets that the layer was built, because its file turned out to be bad: it can be enqueued
  // again. REQUIRES a layer that is not pending or in flight.
  void Forget(uint32_t layer);

  bool IsBuilt(uint32_t layer) const;
  size_t pending_count() const;  // enqueued and not fired
  uint64_t peak_staging_bytes() const;

 private:
  enum class LayerState : uint8_t { kInvalid = 0, kPending, kInFlight, kBuilt, kFailed };
  struct Layer {
    LayerState state = LayerState::kInvalid;
    std::shared_ptr<const Status> failure;  // of kFailed
  };
  struct Job;
  struct Claim {
    std::shared_ptr<Job> job;
    size_t step = 0;
  };
  using Lock = std::unique_lock<std::mutex>;

  // All of them with mutex_ held; those that take the Lock release it while they work.
  void Fire();
  void Work();
  void NoteProgress() { last_progress_ = std::chrono::steady_clock::now(); }
  bool HolderStalls(uint32_t layer, const LayerBuilds::Holder& holder);
  bool FindStep(Claim* claim) const;
  bool CanOpen() const;
  void OpenNext(Lock& lock);
  void AddJob(Lock& lock, uint32_t layer, std::unique_ptr<LayerBuild> build);
  void RunClaim(Lock& lock, const Claim& claim);
  void PublishJob(Lock& lock, const std::shared_ptr<Job>& job);
  void SetBuilt(uint32_t layer);
  void FailLayer(uint32_t layer, Status status);
  void SettleFailure();
  bool Idle() const;

  LayerBuilds& builds_;
  const BuildQueueOptions options_;

  mutable std::mutex mutex_;
  std::condition_variable work_;  // there may be something for a worker
  std::condition_variable done_;  // a layer changed its state
  std::map<uint32_t, Layer> layers_;
  std::deque<uint32_t> pending_;  // not fired
  std::deque<uint32_t> fired_;    // not opened
  std::deque<uint32_t> busy_;     // another process was building them when we tried
  std::chrono::steady_clock::time_point next_busy_try_;
  std::chrono::steady_clock::time_point last_progress_;  // here, or by the holder of a busy layer
  std::chrono::steady_clock::time_point last_busy_try_;
  std::map<uint32_t, uint64_t> holder_marks_;  // by busy layer
  std::vector<std::shared_ptr<Job>> jobs_;     // opened, in order
  size_t active_count_ = 0;                    // opens, steps and publishes that run now
  bool opening_ = false;
  uint64_t staging_bytes_ = 0;
  uint64_t peak_staging_bytes_ = 0;
  std::map<uint32_t, Status> failures_;       // by layer; settled when nothing runs any more
  std::shared_ptr<const Status> unreported_;  // for Finish
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace hotplane
