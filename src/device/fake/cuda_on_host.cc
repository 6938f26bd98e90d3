#include "device/fake/cuda_on_host.h"

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
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

enum class State { kRuns, kWaitsForBlock, kWaitsForWarp, kEnded };

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
};

struct Block {
  std::vector<Thread> threads;
  void* scheduler = nullptr;
  void* scheduler_course = nullptr;
  const std::function<void()>* kernel = nullptr;
  std::mt19937 random;
};
thread_local Block block;

void Wait(State state) {
  Thread& thread = block.threads[threadIdx.x];
  thread.state = state;
  Course::Return(block.scheduler_course);
  hotplane_on_host_switch(&thread.top, block.scheduler);
}

void RunKernel() {
  (*block.kernel)();
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
}

// True when all lanes have come to the same instruction of the warp, which is then done.
bool DoTogether(Thread* warp) {
  void* lanes[32];
  uint32_t waiting = 0;
  for (uint32_t i = 0; i < 32; ++i)
    if (warp[i].state == State::kWaitsForWarp) lanes[waiting++] = warp[i].operands;
  if (waiting == 0) return false;
  if (waiting != 32) Die("some lanes wait for their warp, some do not");
  for (uint32_t i = 0; i < 32; ++i) {
    if (warp[i].work != warp[0].work) Die("lanes of a warp at different instructions");
    warp[i].state = State::kRuns;
  }
  warp[0].work(lanes);
  return true;
}

// Until all its lanes wait for the block or have ended.
void RunWarp(uint32_t first) {
  Thread* const warp = block.threads.data() + first;
  do {
    const auto chance = static_cast<uint32_t>(block.random() % 32);
    for (uint32_t i = 0; i < 32; ++i) {
      Thread& lane = warp[i ^ chance];
      if (lane.state != State::kRuns) continue;
      threadIdx.x = first + (i ^ chance);
      lane.course->Enter();
      hotplane_on_host_switch(&block.scheduler, lane.top);
    }
  } while (DoTogether(warp));
}

bool PassBarrier() {
  bool some = false;
  for (Thread& thread : block.threads) {
    if (thread.state != State::kWaitsForBlock) continue;
    thread.state = State::kRuns;
    some = true;
  }
  return some;
}

void RunBlock() {
  for (Thread& thread : block.threads) Prepare(&thread);
  std::vector<uint32_t> warps(block.threads.size() / 32);
  std::iota(warps.begin(), warps.end(), 0);
  do {
    std::shuffle(warps.begin(), warps.end(), block.random);
    for (const uint32_t warp : warps) RunWarp(32 * warp);
  } while (PassBarrier());
}

}  // namespace

void Die(const char* why) {
  std::fprintf(stderr, "CUDA on the host, block %u: %s\n", blockIdx.x, why);
  std::abort();
}

void Launch(uint32_t blocks, uint32_t threads, const std::function<void()>& kernel) {
  if (block.threads.size() != threads) block.threads = std::vector<Thread>(threads);
  block.kernel = &kernel;
  block.scheduler_course = Course::Current();
  gridDim = {blocks, 1, 1};
  blockDim = {threads, 1, 1};
  for (uint32_t i = 0; i < blocks; ++i) {
    blockIdx = {i, 0, 0};
    RunBlock();
  }
}

void WaitForBlock() { Wait(State::kWaitsForBlock); }

void Together(void* operands, WarpWork work) {
  Thread& thread = block.threads[threadIdx.x];
  thread.operands = operands;
  thread.work = work;
  Wait(State::kWaitsForWarp);
}

}  // namespace hotplane::on_host
