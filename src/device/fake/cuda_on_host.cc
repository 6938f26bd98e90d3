#include "device/fake/cuda_on_host.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "base/sanitizers.h"

// Goes on where the stack `to` was left, and leaves this one in `*from`. Of the library's own
// switches each is two system calls.
extern "C" void hotplane_on_host_switch(void** from, void* to);
asm(R"(
.text
.type hotplane_on_host_switch, @function
hotplane_on_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hotplane_on_host_switch, .-hotplane_on_host_switch
)");

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

thread_local IndexOnHost threadIdx, blockIdx, blockDim, gridDim;

namespace hotplane::on_host {
namespace {

constexpr size_t kStackBytes = 256 << 10;

enum class State {
  kRuns,
  kWaitsForBlock,
  kWaitsForWarp,
  kWaitsForOtherWarps,
  kWaitsForOthers,
  kEnded
};

// What is known to ThreadSanitizer as a thread's course of calls.
class Course {
 public:
#ifdef __SANITIZE_THREAD__
  Course() : course_(__tsan_create_fiber(0)) {}
  ~Course() { __tsan_destroy_fiber(course_); }
  void Enter() { __tsan_switch_to_fiber(course_, 0); }
  static void* Current() { return __tsan_get_current_fiber(); }
  static void Return(void* to) { __tsan_switch_to_fiber(to, 0); }

 private:
  void* course_;
#else
  void Enter() {}
  static void* Current() { return nullptr; }
  static void Return(void*) {}
#endif
};

struct Thread {
  std::unique_ptr<std::byte[]> stack{new std::byte[kStackBytes]};
  std::unique_ptr<Course> course{new Course};
  void* top = nullptr;  // of the stack, while another one is used
  State state = State::kEnded;
  void* operands = nullptr;
  WarpWork work = nullptr;
  std::shared_ptr<void> own;
};

struct Block {
  uint32_t index = 0;
  std::vector<Thread> threads;
  std::vector<uint8_t> shared;  // while another block runs
  uint32_t counting = 0;        // at the barrier that is waited at
  uint32_t counted = 0;         // at the last one
};

struct Running {
  Grid grid;
  const std::function<void()>* kernel = nullptr;
  Block* block = nullptr;
  void* scheduler = nullptr;
  void* scheduler_course = nullptr;
  uint64_t steps = 0;  // more than looking whether others have gone on
  std::mt19937 random;
  std::vector<std::unique_ptr<Block>> unused;
};
thread_local Running running;

constexpr uint8_t kOfNoUse = 0xFF;

Thread& Current() { return running.block->threads[threadIdx.x]; }

void Wait(State state) {
  Thread& thread = Current();
  thread.state = state;
  Course::Return(running.scheduler_course);
  hotplane_on_host_switch(&thread.top, running.scheduler);
}

void RunKernel() {
  (*running.kernel)();
  Wait(State::kEnded);
}

// The next switch to its stack enters RunKernel, as if that had been called.
void Prepare(Thread* thread) {
  constexpr size_t kRegisters = 6;
  void* frame[kRegisters + 2] = {};
  frame[kRegisters] = reinterpret_cast<void*>(&RunKernel);
  const auto end = reinterpret_cast<uintptr_t>(thread->stack.get() + kStackBytes) / 16 * 16;
  thread->top = reinterpret_cast<void*>(end - sizeof frame);
  std::memcpy(thread->top, frame, sizeof frame);
  thread->state = State::kRuns;
  thread->own.reset();
}

// True when all lanes have come to the same instruction of the warp, which is then done.
bool DoTogether(Thread* warp) {
  void* lanes[32];
  uint32_t waiting = 0, elsewhere = 0;
  for (uint32_t i = 0; i < 32; ++i) {
    if (warp[i].state == State::kWaitsForWarp) lanes[waiting++] = warp[i].operands;
    if (warp[i].state == State::kWaitsForOthers || warp[i].state == State::kWaitsForOtherWarps)
      ++elsewhere;
  }
  if (waiting == 0 || waiting + elsewhere == 32) {
    if (waiting != 32) return false;
  } else {
    Die("some lanes wait for their warp, some do not");
  }
  for (uint32_t i = 0; i < 32; ++i) {
    if (warp[i].work != warp[0].work) Die("lanes of a warp at different instructions");
    warp[i].state = State::kRuns;
  }
  warp[0].work(lanes);
  ++running.steps;
  return true;
}

// Until all its lanes wait for the block, for other warps or blocks, or have ended.
void RunWarp(uint32_t first) {
  Thread* const warp = running.block->threads.data() + first;
  do {
    const auto chance = static_cast<uint32_t>(running.random() % 32);
    for (uint32_t i = 0; i < 32; ++i) {
      Thread& lane = warp[i ^ chance];
      if (lane.state != State::kRuns) continue;
      threadIdx.x = first + (i ^ chance);
      lane.course->Enter();
      hotplane_on_host_switch(&running.scheduler, lane.top);
    }
  } while (DoTogether(warp));
}

bool SomeAre(State state) {
  const std::vector<Thread>& threads = running.block->threads;
  return std::any_of(threads.begin(), threads.end(),
                     [&](const Thread& thread) { return thread.state == state; });
}
void Resume(State state) {
  for (Thread& thread : running.block->threads)
    if (thread.state == state) thread.state = State::kRuns;
}

bool PassBarrier() {
  if (SomeAre(State::kWaitsForOthers) || SomeAre(State::kWaitsForOtherWarps) ||
      !SomeAre(State::kWaitsForBlock))
    return false;
  Block* const block = running.block;
  block->counted = std::exchange(block->counting, 0);
  Resume(State::kWaitsForBlock);
  ++running.steps;
  return true;
}

// True where warps wait for others of the block, of which some have gone on since `steps`.
bool LookAgain(uint64_t steps) {
  if (!SomeAre(State::kWaitsForOtherWarps)) return false;
  if (running.steps == steps) Die("waits for other warps, which all wait");
  Resume(State::kWaitsForOtherWarps);
  return true;
}

std::unique_ptr<Block> Begin(uint32_t index) {
  std::unique_ptr<Block> block;
  if (running.unused.empty()) {
    block = std::make_unique<Block>();
  } else {
    block = std::move(running.unused.back());
    running.unused.pop_back();
  }
  block->index = index;
  if (block->threads.size() != running.grid.threads)
    block->threads = std::vector<Thread>(running.grid.threads);
  for (Thread& thread : block->threads) Prepare(&thread);
  block->counting = 0;
  block->shared.assign(running.grid.shared_bytes + kGuardBytes, kOfNoUse);
  return block;
}

// Until it has ended, which is told, or waits for others.
bool RunBlock(Block* block) {
  running.block = block;
  blockIdx = {block->index, 0, 0};
  const Grid& grid = running.grid;
  if (grid.shared != nullptr) std::copy(block->shared.begin(), block->shared.end(), grid.shared);
  Resume(State::kWaitsForOthers);
  std::vector<uint32_t> warps(block->threads.size() / 32);
  std::iota(warps.begin(), warps.end(), 0);
  uint64_t steps;
  do {
    steps = running.steps;
    std::shuffle(warps.begin(), warps.end(), running.random);
    for (const uint32_t warp : warps) RunWarp(32 * warp);
  } while (PassBarrier() || LookAgain(steps));
  if (grid.shared != nullptr) {
    std::copy_n(grid.shared, block->shared.size(), block->shared.begin());
    const auto guard = block->shared.begin() + grid.shared_bytes;
    if (std::count(guard, block->shared.end(), kOfNoUse) != kGuardBytes)
      Die("something was written behind its shared memory");
  }
  return !SomeAre(State::kWaitsForOthers);
}

}  // namespace

void Die(const char* why) {
  std::fprintf(stderr, "CUDA on the host, block %u: %s\n", blockIdx.x, why);
  std::abort();
}

void Launch(const Grid& grid, const std::function<void()>& kernel) {
  running.grid = grid;
  running.kernel = &kernel;
  running.scheduler_course = Course::Current();
  gridDim = {grid.blocks, 1, 1};
  blockDim = {grid.threads, 1, 1};
  std::vector<uint32_t> order(grid.blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), running.random);
  std::vector<std::unique_ptr<Block>> waiting;
  const auto run = [&](std::unique_ptr<Block> block) {
    const bool ended = RunBlock(block.get());
    (ended ? running.unused : waiting).push_back(std::move(block));
  };
  for (const uint32_t index : order) run(Begin(index));
  while (!waiting.empty()) {
    const uint64_t steps = running.steps;
    std::vector<std::unique_ptr<Block>> blocks = std::exchange(waiting, {});
    const size_t count = blocks.size();
    for (std::unique_ptr<Block>& block : blocks) run(std::move(block));
    if (waiting.size() == count && running.steps == steps)
      Die("waits for other blocks, which all wait");
  }
}

const Grid& CurrentGrid() { return running.grid; }

void WaitForBlock() { Wait(State::kWaitsForBlock); }

uint32_t CountInBlock(bool predicate) {
  if (predicate) ++running.block->counting;
  WaitForBlock();
  return running.block->counted;
}

void WaitForOtherWarps() { Wait(State::kWaitsForOtherWarps); }

void WaitForOtherBlocks() { Wait(State::kWaitsForOthers); }

void TellOtherBlocks() { ++running.steps; }

void Together(void* operands, WarpWork work) {
  Thread& thread = Current();
  thread.operands = operands;
  thread.work = work;
  Wait(State::kWaitsForWarp);
}

std::shared_ptr<void>& OwnOfThread() { return Current().own; }

}  // namespace hotplane::on_host
