// A fixed set of threads that run index ranges. One pool per process serves build, boot and verify.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.h"

namespace hotplane {

class WorkerPool {
 public:
  // `worker_count` threads in all, the calling one included; 0 means the CPUs this process may use.
  // Fewer, with a warning in the log, where the system refuses threads.
  explicit WorkerPool(size_t worker_count = 0);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  size_t worker_count() const { return threads_.size() + 1; }

  // Runs work(index, worker) for every index in [0, count), indexes claimed in ascending order, on
  // all workers including the caller (worker 0). Returns the Status of the lowest failing index;
  // after a failure no new index is claimed. Calls from several threads run one after another. Not
  // reentrant: `work` must not call ParallelFor of the same pool.
  using Work = std::function<Result<void>(size_t index, size_t worker)>;
  Result<void> ParallelFor(size_t count, const Work& work);

 private:
  struct Job;
  void Loop(size_t worker);
  static void Drain(Job& job, size_t worker);

  std::mutex callers_mutex_;  // one ParallelFor at a time
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  Job* job_ = nullptr;
  uint64_t job_number_ = 0;
  size_t running_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace hotplane
