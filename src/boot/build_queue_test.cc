#include "boot/build_queue.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "base/format_text.h"

namespace hotplane {
namespace {

struct FakeLayer {
  size_t step_count = 3;
  uint64_t step_bytes = 10;
  std::optional<size_t> failing_step = {};  // == step_count: Publish fails
  size_t busy_count = 0;                    // opens that find another process at work
  bool published_elsewhere = false;
  std::optional<size_t> throwing_step = {};  // SIZE_MAX: Open throws; == step_count: Publish
};

void ThrowAt(const FakeLayer& fake, size_t step) {
  if (fake.throwing_step == step) throw std::bad_alloc();
}

// Layers whose building is counted and watched.
class FakeBuilds final : public LayerBuilds {
 public:
  explicit FakeBuilds(std::map<uint32_t, FakeLayer> layers = {}) : layers_(std::move(layers)) {}

  Result<Opened> Open(uint32_t layer, std::unique_ptr<LayerBuild>* build) override {
    std::lock_guard lock(mutex_);
    opened_.push_back(layer);
    FakeLayer& fake = layers_[layer];
    if (fake.busy_count > 0) {
      --fake.busy_count;
      return Opened::kBusy;
    }
    if (fake.published_elsewhere) return Opened::kDone;
    ThrowAt(fake, SIZE_MAX);
    if (!open_.insert(layer).second) wrong_ = Text("layer {} was opened twice at once", layer);
    *build = std::make_unique<Build>(*this, layer, fake);
    return Opened::kBuild;
  }

  // The holder of a busy layer: its number stays until `still_after` calls were made.
  Holder HolderOf(uint32_t layer) override {
    std::lock_guard lock(mutex_);
    const size_t calls = ++holder_calls_;
    return {Text("/store/locks/layer-{:04}", layer), std::min(calls, still_after_)};
  }
  void HoldStillAfter(size_t calls) { still_after_ = calls; }
  size_t holder_calls() const {
    std::lock_guard lock(mutex_);
    return holder_calls_;
  }

  void Heal() {
    std::lock_guard lock(mutex_);
    for (auto& [layer, fake] : layers_) fake.failing_step.reset();
  }
  std::string wrong() const {
    std::lock_guard lock(mutex_);
    return wrong_;
  }
  std::map<uint32_t, int> published() const {
    std::lock_guard lock(mutex_);
    return published_;
  }
  std::vector<uint32_t> opened() const {
    std::lock_guard lock(mutex_);
    return opened_;
  }
  uint64_t peak_bytes() const { return peak_bytes_; }

 private:
  class Build final : public LayerBuild {
   public:
    Build(FakeBuilds& owner, uint32_t layer, const FakeLayer& fake)
        : owner_(owner), layer_(layer), fake_(fake), ran_(fake.step_count) {}
    ~Build() override {
      std::lock_guard lock(owner_.mutex_);
      owner_.open_.erase(layer_);
    }
    size_t step_count() const override { return fake_.step_count; }
    uint64_t step_bytes() const override { return fake_.step_bytes; }
    Result<void> RunStep(size_t step) override {
      const uint64_t bytes = owner_.bytes_ += fake_.step_bytes;
      uint64_t peak = owner_.peak_bytes_;
      while (bytes > peak && !owner_.peak_bytes_.compare_exchange_weak(peak, bytes)) {
      }
      std::this_thread::yield();
      {
        std::lock_guard lock(owner_.mutex_);
        if (ran_[step]) owner_.wrong_ = Text("layer {}, step {} ran twice", layer_, step);
        ran_[step] = true;
      }
      owner_.bytes_ -= fake_.step_bytes;
      ThrowAt(fake_, step);
      if (fake_.failing_step == step) return Fail(Status::Data(Text("bad layer {}", layer_)));
      return {};
    }
    Result<void> Publish() override {
      std::lock_guard lock(owner_.mutex_);
      if (std::find(ran_.begin(), ran_.end(), false) != ran_.end())
        owner_.wrong_ = Text("layer {} was published before its steps ran", layer_);
      ThrowAt(fake_, fake_.step_count);
      if (fake_.failing_step == fake_.step_count)
        return Fail(Status::System(Text("no room for layer {}", layer_)));
      ++owner_.published_[layer_];
      return {};
    }

   private:
    FakeBuilds& owner_;
    const uint32_t layer_;
    const FakeLayer fake_;
    std::vector<bool> ran_;
  };

  mutable std::mutex mutex_;
  std::map<uint32_t, FakeLayer> layers_;
  std::set<uint32_t> open_;
  std::vector<uint32_t> opened_;
  std::map<uint32_t, int> published_;
  std::string wrong_;
  size_t holder_calls_ = 0;
  size_t still_after_ = 0;
  std::atomic<uint64_t> bytes_{0};
  std::atomic<uint64_t> peak_bytes_{0};
};

TEST(BuildQueue, FiresAtTheBatchSizeAndNotBefore) {
  FakeBuilds builds;
  BuildQueue queue(builds, {.batch_size = 3, .worker_count = 2});
  EXPECT_TRUE(queue.Enqueue(0));
  EXPECT_TRUE(queue.Enqueue(1));
  EXPECT_EQ(queue.pending_count(), 2u);
  EXPECT_TRUE(builds.opened().empty());
  EXPECT_TRUE(queue.Enqueue(2));
  EXPECT_EQ(queue.pending_count(), 0u);
  for (const uint32_t layer : {2, 0, 1}) EXPECT_TRUE(queue.Wait(layer).has_value());
  // The final short batch.
  EXPECT_TRUE(queue.Enqueue(3));
  EXPECT_FALSE(queue.IsBuilt(3));
  queue.Flush();
  EXPECT_TRUE(queue.Finish().has_value());
  EXPECT_TRUE(queue.IsBuilt(3));
  EXPECT_EQ(builds.published(), (std::map<uint32_t, int>{{0, 1}, {1, 1}, {2, 1}, {3, 1}}));
  EXPECT_EQ(builds.opened(), (std::vector<uint32_t>{0, 1, 2, 3}));
}

// A holder that does nothing any more ends the wait with the lock's name; one that works is waited
// for as long as it takes.
TEST(BuildQueue, AHolderThatStallsEndsTheWait) {
  constexpr size_t kForever = 1u << 30;
  Progress progress;
  FakeBuilds builds({{1, {.busy_count = kForever}}});
  {
    BuildQueue queue(builds, {.worker_count = 2, .progress = &progress, .stall_seconds = 0.1});
    for (const uint32_t layer : {0, 1, 2}) queue.Enqueue(layer);
    const Result<void> finished = queue.Finish();
    ASSERT_FALSE(finished.has_value());
    EXPECT_EQ(finished.error().code(), StatusCode::kSystem);
    EXPECT_EQ(finished.error().file(), "/store/locks/layer-0001");
    EXPECT_NE(finished.error().what().find("no progress for 0.1 s"), std::string::npos);
    EXPECT_TRUE(queue.IsBuilt(0) && queue.IsBuilt(2));
  }
  EXPECT_EQ(progress.waiting.load(), 0);
}

TEST(BuildQueue, AHolderThatWorksIsWaitedFor) {
  // 20 ms between two looks: ten times as long as the time after which it would be given up.
  FakeBuilds builds({{1, {.busy_count = 50}}});
  builds.HoldStillAfter(1000);
  BuildQueue queue(builds, {.worker_count = 2, .stall_seconds = 0.1});
  for (const uint32_t layer : {0, 1, 2}) queue.Enqueue(layer);
  const Result<void> finished = queue.Finish();
  EXPECT_TRUE(finished.has_value()) << finished.error().ToString();
  EXPECT_EQ(builds.holder_calls(), 50u);
}

TEST(BuildQueue, TakesALayerOnceWhateverItsState) {
  FakeBuilds builds;
  BuildQueue queue(builds, {.batch_size = 2, .worker_count = 1});
  EXPECT_TRUE(queue.Enqueue(5));
  EXPECT_FALSE(queue.Enqueue(5));  // pending
  queue.Flush();
  EXPECT_FALSE(queue.Enqueue(5));  // in flight, or built
  EXPECT_TRUE(queue.Wait(5).has_value());
  EXPECT_FALSE(queue.Enqueue(5));  // built
  EXPECT_TRUE(queue.Finish().has_value());
  EXPECT_EQ(builds.published(), (std::map<uint32_t, int>{{5, 1}}));
  queue.Forget(5);
  EXPECT_TRUE(queue.Enqueue(5));
  EXPECT_TRUE(queue.Wait(5).has_value());
  EXPECT_EQ(builds.published(), (std::map<uint32_t, int>{{5, 2}}));
}

TEST(BuildQueue, WaitingForAPendingLayerFiresIt) {
  FakeBuilds builds;
  BuildQueue queue(builds, {});
  EXPECT_TRUE(queue.Enqueue(1));
  EXPECT_TRUE(queue.Wait(1).has_value());
  const Result<void> unknown = queue.Wait(2);
  ASSERT_FALSE(unknown.has_value());
  EXPECT_EQ(unknown.error().exit_code(), 2);
}

TEST(BuildQueue, AFailureCancelsTheRestNamesItAndLeavesTheQueueUsable) {
  FakeBuilds builds({{1, {.step_count = 3, .failing_step = 2}}});
  BuildQueue queue(builds, {.batch_size = 100, .worker_count = 1});
  for (uint32_t layer = 0; layer < 6; ++layer) queue.Enqueue(layer);
  const Result<void> failed = queue.Finish();
  ASSERT_FALSE(failed.has_value());
  EXPECT_EQ(failed.error().what(), "building layer 1: bad layer 1");
  EXPECT_EQ(failed.error().exit_code(), 3);
  EXPECT_EQ(builds.published(), (std::map<uint32_t, int>{{0, 1}}));
  EXPECT_EQ(queue.pending_count(), 0u);
  EXPECT_TRUE(queue.Wait(0).has_value());
  for (uint32_t layer = 1; layer < 6; ++layer) {
    ASSERT_FALSE(queue.Wait(layer).has_value()) << layer;
    EXPECT_EQ(queue.Wait(layer).error().what(), "building layer 1: bad layer 1");
  }
  EXPECT_TRUE(queue.Finish().has_value()) << "told once";
  builds.Heal();
  for (uint32_t layer = 0; layer < 6; ++layer) EXPECT_EQ(queue.Enqueue(layer), layer != 0);
  EXPECT_TRUE(queue.Finish().has_value());
  for (const auto& [layer, count] : builds.published()) EXPECT_EQ(count, 1) << layer;
  EXPECT_EQ(builds.published().size(), 6u);
}

// Nothing above a worker's thread would catch it: the process would end, and leave temporaries.
TEST(BuildQueue, MemoryThatIsNotThereFailsTheLayerAndEndsNoProcess) {
  for (const size_t step : {SIZE_MAX, size_t{0}, size_t{2}, size_t{3}}) {
    FakeBuilds builds({{1, {.step_count = 3, .throwing_step = step}}});
    BuildQueue queue(builds, {.batch_size = 2, .worker_count = 3});
    EXPECT_TRUE(queue.Enqueue(0));
    EXPECT_TRUE(queue.Enqueue(1));
    const Result<void> waited = queue.Wait(1);
    ASSERT_FALSE(waited.has_value()) << step;
    EXPECT_EQ(waited.error().exit_code(), 4) << waited.error().ToString();
    EXPECT_NE(waited.error().ToString().find("out of memory"), std::string::npos);
    EXPECT_FALSE(queue.Finish().has_value());
    EXPECT_EQ(builds.wrong(), "");
  }
}

TEST(BuildQueue, NamesEveryLayerThatFailed) {
  FakeBuilds builds(
      {{3, {.step_count = 1, .failing_step = 0}}, {4, {.step_count = 1, .failing_step = 0}}});
  // Both layers' steps run before either failure is settled, or the second is cancelled: over many
  // rounds both are seen.
  bool both = false;
  for (int round = 0; round < 2000 && !both; ++round) {
    BuildQueue queue(builds, {.batch_size = 2, .worker_count = 2});
    queue.Enqueue(3);
    queue.Enqueue(4);
    const Result<void> failed = queue.Finish();
    ASSERT_FALSE(failed.has_value());
    both = failed.error().what() == "building layers 3, 4; the first: bad layer 3";
    if (!both) {
      EXPECT_EQ(failed.error().what(), "building layer 3: bad layer 3");
    }
  }
  EXPECT_TRUE(both);
}

TEST(BuildQueue, LayersOfOtherProcessesComeLastAndAreReused) {
  FakeBuilds builds({{0, {.busy_count = 2, .published_elsewhere = true}}, {1, {.busy_count = 1}}});
  BuildQueue queue(builds, {.batch_size = 4, .worker_count = 2});
  for (uint32_t layer = 0; layer < 4; ++layer) queue.Enqueue(layer);
  EXPECT_TRUE(queue.Finish().has_value());
  EXPECT_EQ(builds.published(), (std::map<uint32_t, int>{{1, 1}, {2, 1}, {3, 1}}));
  EXPECT_TRUE(queue.Wait(0).has_value());
}

TEST(BuildQueue, RefusesAStepThatNeverFits) {
  FakeBuilds builds({{2, {.step_bytes = 101}}});
  BuildQueue queue(builds, {.worker_count = 2, .staging_limit_bytes = 100});
  queue.Enqueue(2);
  const Result<void> refused = queue.Wait(2);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().exit_code(), 4);
  EXPECT_EQ(builds.peak_bytes(), 0u);
}

TEST(BuildQueue, CanBeCancelledWhileAnotherProcessHoldsALayer) {
  FakeBuilds builds({{0, {.busy_count = SIZE_MAX}}});
  CancelToken cancel;
  BuildQueue queue(builds, {.worker_count = 2, .cancel = &cancel});
  queue.Enqueue(0);
  queue.Flush();
  cancel.Cancel(SIGINT);
  const Result<void> cancelled = queue.Finish();
  ASSERT_FALSE(cancelled.has_value());
  EXPECT_EQ(cancelled.error().exit_code(), 130);
}

TEST(BuildQueue, DestructionDropsWhatIsNotBuilt) {
  FakeBuilds builds({{0, {.busy_count = SIZE_MAX}}});
  {
    BuildQueue queue(builds, {.batch_size = 2, .worker_count = 3});
    queue.Enqueue(0);
    queue.Enqueue(1);
    queue.Enqueue(2);
  }
  EXPECT_EQ(builds.wrong(), "");
  EXPECT_EQ(builds.published().count(2), 0u);
}

// The same cases in every run; RC_PARAMS of the caller wins.
[[maybe_unused]] const bool kSeeded = setenv("RC_PARAMS", "seed=20 max_success=300", 0) == 0;

// What a consumer does, drawn at random.
struct Act {
  enum Kind { kEnqueue, kFlush, kWait } kind;
  uint32_t layer;
};

std::vector<std::vector<Act>> DrawConsumers(uint32_t layer_count) {
  const auto act = rc::gen::map(
      rc::gen::pair(rc::gen::inRange(0, 10), rc::gen::inRange<uint32_t>(0, layer_count)),
      [](const std::pair<int, uint32_t>& draw) {
        return Act{draw.first < 6   ? Act::kEnqueue
                   : draw.first < 7 ? Act::kFlush
                                    : Act::kWait,
                   draw.second};
      });
  return *rc::gen::container<std::vector<std::vector<Act>>>(
      *rc::gen::inRange<size_t>(1, 5), rc::gen::container<std::vector<Act>>(30, act));
}

std::map<uint32_t, FakeLayer> DrawLayers(uint32_t layer_count, uint64_t limit_bytes) {
  std::map<uint32_t, FakeLayer> layers;
  for (uint32_t layer = 0; layer < layer_count; ++layer) {
    FakeLayer fake;
    fake.step_count = *rc::gen::inRange<size_t>(1, 6);
    fake.step_bytes = *rc::gen::inRange<uint64_t>(1, limit_bytes + 1);
    if (*rc::gen::inRange(0, 8) == 0)
      fake.failing_step = *rc::gen::inRange<size_t>(0, fake.step_count + 1);
    layers[layer] = fake;
  }
  return layers;
}

TEST(BuildQueue, NeverTwiceNeverLostNeverAboveTheBudget) {
  EXPECT_TRUE(rc::check("random interleavings", [] {
    const uint32_t layer_count = *rc::gen::inRange<uint32_t>(1, 16);
    const uint64_t limit_bytes = *rc::gen::inRange<uint64_t>(1, 100);
    FakeBuilds builds(DrawLayers(layer_count, limit_bytes));
    const std::vector<std::vector<Act>> consumers = DrawConsumers(layer_count);
    BuildQueue queue(builds, {.batch_size = *rc::gen::inRange<size_t>(1, 13),
                              .worker_count = *rc::gen::inRange<size_t>(1, 5),
                              .staging_limit_bytes = limit_bytes});
    std::mutex mutex;
    std::set<uint32_t> enqueued;
    std::vector<std::thread> threads;
    for (const std::vector<Act>& acts : consumers) {
      threads.emplace_back([&, acts] {
        for (const Act& act : acts) {
          if (act.kind == Act::kFlush) queue.Flush();
          if (act.kind == Act::kWait) (void)queue.Wait(act.layer);
          if (act.kind != Act::kEnqueue) continue;
          queue.Enqueue(act.layer);
          std::lock_guard lock(mutex);
          enqueued.insert(act.layer);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    (void)queue.Finish();

    // Each is built once, or its consumers are told of a failure.
    const std::map<uint32_t, int> published = builds.published();
    for (const uint32_t layer : enqueued) {
      RC_ASSERT(queue.Wait(layer).has_value() == (published.count(layer) == 1));
      RC_ASSERT(queue.IsBuilt(layer) == (published.count(layer) == 1));
    }
    for (const auto& [layer, count] : published) RC_ASSERT(count == 1);
    RC_ASSERT(builds.wrong() == "");
    RC_ASSERT(builds.peak_bytes() <= limit_bytes);
    RC_ASSERT(queue.peak_staging_bytes() <= limit_bytes);

    // After the failures the queue is as good as new.
    builds.Heal();
    RC_ASSERT(queue.pending_count() == 0u);
    for (uint32_t layer = 0; layer < layer_count; ++layer)
      RC_ASSERT(queue.Enqueue(layer) == (published.count(layer) == 0));
    RC_ASSERT(queue.Finish().has_value());
    RC_ASSERT(builds.published().size() == layer_count);
    for (const auto& [layer, count] : builds.published()) RC_ASSERT(count == 1);
    RC_ASSERT(builds.wrong() == "");
    RC_ASSERT(builds.peak_bytes() <= limit_bytes);
  }));
}

// So that nobody takes it for a stall.
TEST(BuildQueue, SaysWhenAllThatIsLeftIsWithAnotherProcess) {
  FakeBuilds builds({{0, {.step_count = 1}}, {1, {.step_count = 1, .busy_count = 25}}});
  Progress progress;
  {
    BuildQueue queue(builds, {.batch_size = 2, .worker_count = 2, .progress = &progress});
    queue.Enqueue(0);
    queue.Enqueue(1);
    bool waited = false;
    while (!queue.IsBuilt(1)) {
      waited = waited || progress.waiting > 0;
      std::this_thread::yield();
    }
    EXPECT_TRUE(waited);
    ASSERT_TRUE(queue.Finish().has_value());
  }
  EXPECT_EQ(progress.waiting, 0);
}

}  // namespace
}  // namespace hotplane
