#include "boot/build_queue.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/nothing_thrown.h"
#include "base/trace.h"
#include "base/units.h"
#include "store/locks.h"

namespace hotplane {
namespace {

// Short beside the seconds that a layer takes to build, long beside the cost of asking.
constexpr std::chrono::milliseconds kBusyPollInterval{20};

// A gap this long between two polls is a process that was stopped or had other things to do.
constexpr std::chrono::seconds kStoppedInterval{2};

// One Status that names every layer that failed; the lowest one's tells the rest.
Status JoinFailures(std::map<uint32_t, Status> failures) {
  for (auto& [layer, status] : failures)
    if (status.code() == StatusCode::kInterrupted || status.code() == StatusCode::kTerminated)
      return std::move(status);
  auto& [first, status] = *failures.begin();
  if (failures.size() == 1) return std::move(status).Because(Text("building layer {}", first));
  std::string list;
  for (const auto& [layer, other] : failures) {
    list += Text("{}{}", list.empty() ? "" : ", ", layer);
    LogStatus(LogLevel::kError, Text("building layer {}", layer), other);
  }
  return std::move(status).Because(Text("building layers {}; the first", list));
}

}  // namespace

struct BuildQueue::Job {
  uint32_t layer = 0;
  std::unique_ptr<LayerBuild> build;
  size_t step_count = 0;
  uint64_t step_bytes = 0;
  size_t next = 0;
  size_t done = 0;
};

BuildQueue::BuildQueue(LayerBuilds& builds, const BuildQueueOptions& options)
    : builds_(builds), options_(options) {
  HP_CHECK(options.batch_size > 0 && options.worker_count > 0);
}

BuildQueue::~BuildQueue() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool BuildQueue::Enqueue(uint32_t layer) {
  std::lock_guard lock(mutex_);
  Layer& entry = layers_[layer];
  if (entry.state != LayerState::kInvalid && entry.state != LayerState::kFailed) return false;
  entry = {LayerState::kPending, nullptr};
  pending_.push_back(layer);
  if (pending_.size() >= options_.batch_size) Fire();
  return true;
}

void BuildQueue::Flush() {
  std::lock_guard lock(mutex_);
  Fire();
}

Result<void> BuildQueue::Wait(uint32_t layer) {
  Lock lock(mutex_);
  while (true) {
    const auto entry = layers_.find(layer);
    if (entry == layers_.end())
      return Fail(Status::Usage(Text("layer {} is waited for and was never enqueued", layer)));
    switch (entry->second.state) {
      case LayerState::kBuilt: return {};
      case LayerState::kFailed: return Fail(*entry->second.failure);
      case LayerState::kPending: Fire(); break;
      default: break;
    }
    done_.wait(lock);
  }
}

Result<void> BuildQueue::Finish() {
  Lock lock(mutex_);
  Fire();
  done_.wait(lock, [this] { return Idle(); });
  const std::shared_ptr<const Status> failure = std::exchange(unreported_, nullptr);
  if (failure != nullptr) return Fail(*failure);
  return {};
}

void BuildQueue::Forget(uint32_t layer) {
  std::lock_guard lock(mutex_);
  const auto entry = layers_.find(layer);
  if (entry == layers_.end()) return;
  HP_CHECK(entry->second.state == LayerState::kBuilt || entry->second.state == LayerState::kFailed);
  layers_.erase(entry);
}

bool BuildQueue::IsBuilt(uint32_t layer) const {
  std::lock_guard lock(mutex_);
  const auto entry = layers_.find(layer);
  return entry != layers_.end() && entry->second.state == LayerState::kBuilt;
}

size_t BuildQueue::pending_count() const {
  std::lock_guard lock(mutex_);
  return pending_.size();
}

uint64_t BuildQueue::peak_staging_bytes() const {
  std::lock_guard lock(mutex_);
  return peak_staging_bytes_;
}

bool BuildQueue::Idle() const {
  return pending_.empty() && fired_.empty() && busy_.empty() && jobs_.empty() &&
         failures_.empty() && active_count_ == 0;
}

void BuildQueue::Fire() {
  if (pending_.empty()) return;
  for (const uint32_t layer : pending_) {
    layers_[layer].state = LayerState::kInFlight;
    fired_.push_back(layer);
  }
  pending_.clear();
  NoteProgress();
  while (threads_.size() < options_.worker_count) {
    threads_.emplace_back([this, index = threads_.size()] {
      NameTraceThread("builder", index);
      Work();
    });
  }
  work_.notify_all();
}

void BuildQueue::Work() {
  Lock lock(mutex_);
  while (!stopping_) {
    Claim claim;
    if (!failures_.empty()) {
      if (active_count_ == 0) {
        SettleFailure();
        continue;
      }
    } else if (FindStep(&claim)) {
      RunClaim(lock, claim);
      continue;
    } else if (CanOpen()) {
      OpenNext(lock);
      continue;
    }
    if (busy_.empty()) {
      work_.wait(lock);
      continue;
    }
    const bool others_only = options_.progress != nullptr && active_count_ == 0;
    if (others_only) ++options_.progress->waiting;
    work_.wait_for(lock, kBusyPollInterval);
    if (others_only) --options_.progress->waiting;
  }
}

// Only of the first layer that has unclaimed steps: a later, smaller one must not keep it from the
// memory it waits for.
bool BuildQueue::FindStep(Claim* claim) const {
  for (const std::shared_ptr<Job>& job : jobs_) {
    if (job->next == job->step_count) continue;
    if (job->step_bytes > options_.staging_limit_bytes - staging_bytes_) return false;
    *claim = {job, job->next};
    return true;
  }
  return false;
}

// One worker at a time opens: were two at it, two layers would be streamed at once for no gain.
bool BuildQueue::CanOpen() const {
  if (opening_) return false;
  for (const std::shared_ptr<Job>& job : jobs_)
    if (job->next < job->step_count) return false;
  if (!fired_.empty()) return true;
  return !busy_.empty() && std::chrono::steady_clock::now() >= next_busy_try_;
}

// The time counts only while there is nothing to do here.
bool BuildQueue::HolderStalls(uint32_t layer, const LayerBuilds::Holder& holder) {
  const auto now = std::chrono::steady_clock::now();
  const auto [entry, first] = holder_marks_.try_emplace(layer, holder.mark);
  const bool stopped = now - std::exchange(last_busy_try_, now) > kStoppedInterval;
  const bool moved = first || std::exchange(entry->second, holder.mark) != holder.mark;
  if (moved || stopped || active_count_ > 0) last_progress_ = now;
  const double idle = std::chrono::duration<double>(now - last_progress_).count();
  return options_.stall_seconds > 0 && idle > options_.stall_seconds;
}

void BuildQueue::OpenNext(Lock& lock) {
  std::deque<uint32_t>& from = fired_.empty() ? busy_ : fired_;
  const bool tried_before = fired_.empty();
  const uint32_t layer = from.front();
  from.pop_front();
  opening_ = true;
  ++active_count_;
  lock.unlock();
  std::unique_ptr<LayerBuild> build;
  const Result<LayerBuilds::Opened> opened = NothingThrown([&]() -> Result<LayerBuilds::Opened> {
    if (options_.cancel != nullptr) HP_TRY(options_.cancel->Check());
    return builds_.Open(layer, &build);
  });
  const bool busy = opened && *opened == LayerBuilds::Opened::kBusy;
  if (busy && !tried_before)
    Log(LogLevel::kInfo, "another process is building layer {}: it comes later, or is reused",
        layer);
  const LayerBuilds::Holder holder = busy ? builds_.HolderOf(layer) : LayerBuilds::Holder();
  lock.lock();
  opening_ = false;
  --active_count_;
  if (!busy) NoteProgress();
  if (!opened) {
    FailLayer(layer, opened.error());
  } else if (*opened == LayerBuilds::Opened::kDone) {
    SetBuilt(layer);
  } else if (busy && HolderStalls(layer, holder)) {
    FailLayer(layer,
              LockStalled(holder.lock_path, Text("layer {}", layer), options_.stall_seconds));
  } else if (busy) {
    busy_.push_back(layer);
    next_busy_try_ = std::chrono::steady_clock::now() + kBusyPollInterval;
  } else {
    HP_CHECK(build != nullptr);
    AddJob(lock, layer, std::move(build));
  }
  work_.notify_all();
}

void BuildQueue::AddJob(Lock& lock, uint32_t layer, std::unique_ptr<LayerBuild> build) {
  auto job = std::make_shared<Job>();
  job->layer = layer;
  job->build = std::move(build);
  job->step_count = job->build->step_count();
  job->step_bytes = job->build->step_bytes();
  jobs_.push_back(job);
  if (job->step_bytes > options_.staging_limit_bytes) {
    FailLayer(layer, Status::Capacity("the staging of one step does not fit in the staging limit")
                         .Expected(FormatBytes(job->step_bytes))
                         .Found(FormatBytes(options_.staging_limit_bytes))
                         .Advice("give a larger --staging-limit"));
  } else if (job->step_count == 0) {
    PublishJob(lock, job);
  }
}

void BuildQueue::RunClaim(Lock& lock, const Claim& claim) {
  Job& job = *claim.job;
  ++job.next;
  ++active_count_;
  staging_bytes_ += job.step_bytes;
  peak_staging_bytes_ = std::max(peak_staging_bytes_, staging_bytes_);
  lock.unlock();
  const Result<void> result = NothingThrown([&]() -> Result<void> {
    if (options_.cancel != nullptr) HP_TRY(options_.cancel->Check());
    return job.build->RunStep(claim.step);
  });
  lock.lock();
  staging_bytes_ -= job.step_bytes;
  --active_count_;
  if (!result) {
    FailLayer(job.layer, result.error());
  } else if (++job.done == job.step_count && failures_.empty()) {
    PublishJob(lock, claim.job);
  }
  work_.notify_all();
}

void BuildQueue::PublishJob(Lock& lock, const std::shared_ptr<Job>& job) {
  ++active_count_;
  lock.unlock();
  const Result<void> published = NothingThrown([&] { return job->build->Publish(); });
  if (published) job->build.reset();
  lock.lock();
  --active_count_;
  if (!published) return FailLayer(job->layer, published.error());
  std::erase(jobs_, job);
  SetBuilt(job->layer);
}

void BuildQueue::SetBuilt(uint32_t layer) {
  layers_[layer] = {LayerState::kBuilt, nullptr};
  done_.notify_all();
}

void BuildQueue::FailLayer(uint32_t layer, Status status) {
  failures_.emplace(layer, std::move(status));
}

// Everything that is not built is dropped and may be enqueued again.
void BuildQueue::SettleFailure() {
  const auto failure = std::make_shared<const Status>(JoinFailures(std::move(failures_)));
  failures_.clear();
  jobs_.clear();
  fired_.clear();
  busy_.clear();
  pending_.clear();
  for (auto& [layer, entry] : layers_)
    if (entry.state == LayerState::kPending || entry.state == LayerState::kInFlight)
      entry = {LayerState::kFailed, failure};
  if (unreported_ == nullptr) unreported_ = failure;
  done_.notify_all();
}

}  // namespace hotplane
