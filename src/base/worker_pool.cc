#include "base/worker_pool.h"

#include <atomic>
#include <optional>
#include <system_error>

#include "base/log.h"
#include "base/nothing_thrown.h"
#include "base/topology.h"
#include "base/trace.h"

namespace hotplane {

struct WorkerPool::Job {
  const Work* work;
  size_t count;
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  size_t failed_index = 0;
  std::optional<Status> failure;
};

WorkerPool::WorkerPool(size_t worker_count) {
  if (worker_count == 0) worker_count = UsableCpuCount();
  threads_.reserve(worker_count - 1);
  try {
    for (size_t worker = 1; worker < worker_count; ++worker)
      threads_.emplace_back([this, worker] { Loop(worker); });
  } catch (const std::system_error& error) {
    // A limit on processes or memory: slower with fewer, but the same work.
    Log(LogLevel::kWarning, "{} workers instead of {}: {}", threads_.size() + 1, worker_count,
        error.what());
  }
}

WorkerPool::~WorkerPool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::Drain(Job& job, size_t worker) {
  while (!job.failed.load(std::memory_order_relaxed)) {
    const size_t index = job.next.fetch_add(1, std::memory_order_relaxed);
    if (index >= job.count) return;
    // Nor may an exception leave this frame while other workers use the job.
    Result<void> result = NothingThrown([&] { return (*job.work)(index, worker); });
    if (result) continue;
    std::lock_guard lock(job.mutex);
    if (!job.failure || index < job.failed_index) {
      job.failed_index = index;
      job.failure = std::move(result).error();
    }
    job.failed.store(true, std::memory_order_relaxed);
  }
}

void WorkerPool::Loop(size_t worker) {
  NameTraceThread("worker", worker);
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stopping_ || (job_ != nullptr && job_number_ != seen); });
    if (stopping_) return;
    seen = job_number_;
    Job* const job = job_;
    ++running_;
    lock.unlock();
    Drain(*job, worker);
    lock.lock();
    if (--running_ == 0) done_.notify_all();
  }
}

Result<void> WorkerPool::ParallelFor(size_t count, const Work& work) {
  std::lock_guard caller(callers_mutex_);
  Job job;
  job.work = &work;
  job.count = count;
  {
    std::lock_guard lock(mutex_);
    job_ = &job;
    ++job_number_;
  }
  wake_.notify_all();
  Drain(job, 0);
  {
    std::unique_lock lock(mutex_);
    job_ = nullptr;
    done_.wait(lock, [&] { return running_ == 0; });
  }
  if (job.failure) return Fail(*std::move(job.failure));
  return {};
}

}  // namespace hotplane
