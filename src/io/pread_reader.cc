// Reads on threads: for systems without io_uring, and for every Env that is no kernel.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "io/reader.h"

namespace hotplane {
namespace {

// A thread is one request at the disk. 16 of 1 MiB are 16 MiB in flight: 2 ms at 8 GB/s, which is
// longer than any local disk takes to answer.
constexpr size_t kThreadCountMax = 16;

class PreadReader final : public AsyncReader {
 public:
  PreadReader(const ReaderOptions& options, std::string reason)
      : depth_(std::max<size_t>(options.depth, 1)), reason_(std::move(reason)) {
    const size_t thread_count = std::min(depth_, kThreadCountMax);
    threads_.reserve(thread_count);
    for (size_t i = 0; i < thread_count; ++i) threads_.emplace_back([this] { Loop(); });
  }

  ~PreadReader() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  const char* name() const override { return "pread threads"; }
  std::string reason() const override { return reason_; }
  size_t depth() const override { return depth_; }

  void Start(const ReadRequest& request) override {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(request);
    }
    wake_.notify_one();
  }

  Result<void> Collect(std::chrono::milliseconds wait, std::vector<ReadEnd>* ended) override {
    std::unique_lock lock(mutex_);
    if (!done_.wait_for(lock, wait, [this] { return !ended_.empty(); })) return {};
    ended->insert(ended->end(), ended_.begin(), ended_.end());
    ended_.clear();
    return {};
  }

 private:
  void Loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
      if (stopping_) return;
      const ReadRequest request = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      const IoCount count = request.file->ReadSome(request.offset, request.destination);
      lock.lock();
      ended_.push_back({request.tag, count});
      done_.notify_one();
    }
  }

  const size_t depth_;
  const std::string reason_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::condition_variable done_;
  std::deque<ReadRequest> waiting_;
  std::vector<ReadEnd> ended_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<AsyncReader> NewPreadReader(const ReaderOptions& options, std::string reason) {
  return std::make_unique<PreadReader>(options, std::move(reason));
}

}  // namespace hotplane
