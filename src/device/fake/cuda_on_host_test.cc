// The threads, warps and blocks that kernels on the host run as.
#include "device/fake/cuda_on_host.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace hotplane {
namespace {

alignas(16) thread_local uint8_t memory[1024 + on_host::kGuardBytes];

TEST(CudaOnHost, EveryThreadOfEveryBlockRunsOnce) {
  std::vector<int> runs(5 * 64);
  on_host::Launch({5, 64}, [&] { ++runs[blockIdx.x * blockDim.x + threadIdx.x]; });
  EXPECT_EQ(runs, std::vector<int>(5 * 64, 1));
}

TEST(CudaOnHost, WhatWasWrittenBeforeABarrierIsSeenBehindIt) {
  std::vector<uint32_t> seen(128);
  on_host::Launch({1, 128, memory, 1024}, [&] {
    auto* const values = reinterpret_cast<uint32_t*>(memory);
    EXPECT_EQ(values[threadIdx.x], 0xFFFFFFFFu);
    __syncthreads();
    values[threadIdx.x] = threadIdx.x;
    __syncthreads();
    seen[threadIdx.x] = values[127 - threadIdx.x];
  });
  for (uint32_t i = 0; i < 128; ++i) EXPECT_EQ(seen[i], 127 - i);
}

TEST(CudaOnHost, WithoutABarrierItIsNot) {
  bool some_not_seen = false;
  for (int again = 0; again < 20; ++again) {
    on_host::Launch({1, 128, memory, 1024}, [&] {
      auto* const values = reinterpret_cast<uint32_t*>(memory);
      values[threadIdx.x] = threadIdx.x;
      some_not_seen |= values[127 - threadIdx.x] != 127 - threadIdx.x;
    });
  }
  EXPECT_TRUE(some_not_seen);
}

TEST(CudaOnHost, BlocksThatWaitForEachOtherKeepTheirSharedMemory) {
  uint32_t arrived = 0;
  std::vector<uint32_t> of_block(7);
  on_host::Launch({7, 32, memory, 1024}, [&] {
    memory[threadIdx.x] = static_cast<uint8_t>(blockIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) {
      ++arrived;
      while (arrived != 7) on_host::WaitForOtherBlocks();
    }
    __syncthreads();
    if (threadIdx.x == 0) of_block[blockIdx.x] = std::accumulate(memory, memory + 32, 0u);
  });
  for (uint32_t i = 0; i < 7; ++i) EXPECT_EQ(of_block[i], 32 * i);
}

// One thread alone goes from wait to wait.
TEST(CudaOnHost, BlocksThatTellEachOtherGoOn) {
  uint32_t turn = 0;
  on_host::Launch({2, 32}, [&] {
    if (threadIdx.x != 0) return;
    for (uint32_t i = 0; i < 10; ++i) {
      while (turn % 2 != blockIdx.x) on_host::WaitForOtherBlocks();
      ++turn;
      on_host::TellOtherBlocks();
    }
  });
  EXPECT_EQ(turn, 20u);
}

TEST(CudaOnHost, WarpsThatWaitForOthersOfTheBlockGoOn) {
  on_host::Launch({2, 128, memory, 1024}, [] {
    const uint32_t warp = threadIdx.x / 32;
    if (threadIdx.x == 0) memory[0] = 0;
    __syncthreads();
    while (memory[0] != warp) on_host::WaitForOtherWarps();
    __syncwarp();
    if (threadIdx.x % 32 == 0) ++memory[0];
    __syncthreads();
    EXPECT_EQ(memory[0], 4);
  });
}

TEST(CudaOnHost, LanesExchange) {
  on_host::Launch({1, 64}, [] {
    const uint32_t lane = threadIdx.x % 32;
    EXPECT_EQ(__shfl_sync(~0u, lane, 5), 5u);
    EXPECT_EQ(__shfl_xor_sync(~0u, lane, 3), lane ^ 3u);
    EXPECT_EQ(__shfl_up_sync(~0u, lane, 4), lane < 4 ? lane : lane - 4);
    EXPECT_EQ(__shfl_xor_sync(~0u, static_cast<float>(lane), 16), static_cast<float>(lane ^ 16u));
    EXPECT_EQ(__ballot_sync(~0u, lane < 3), 7u);
    EXPECT_EQ(__match_any_sync(~0u, lane % 2), lane % 2 == 0 ? 0x55555555u : 0xAAAAAAAAu);
    EXPECT_EQ(__reduce_add_sync(~0u, lane), 496u);
    EXPECT_EQ(__reduce_max_sync(~0u, lane), 31u);
    EXPECT_TRUE(__any_sync(~0u, lane == 31));
    EXPECT_FALSE(__any_sync(~0u, lane == 32));
    EXPECT_EQ(__syncthreads_count(threadIdx.x < 40), 40);
    EXPECT_EQ(__syncthreads_count(threadIdx.x < 3), 3);
  });
}

TEST(CudaOnHost, NumbersAreConvertedAsOnAGpu) {
  EXPECT_EQ(__float2int_rn(2.5f), 2);
  EXPECT_EQ(__float2int_rn(-3.5f), -4);
  EXPECT_EQ(__float2int_rn(1e20f), INT32_MAX);
  EXPECT_EQ(__float2int_rn(-1e20f), INT32_MIN);
  EXPECT_EQ(__float2int_rn(std::nanf("")), 0);
  EXPECT_EQ(__float2uint_rz(3.99f), 3u);
  EXPECT_EQ(__float2uint_rz(-1.0f), 0u);
  EXPECT_EQ(__float2uint_rz(1e20f), UINT32_MAX);
}

using CudaOnHostDeathTest = testing::Test;

TEST(CudaOnHostDeathTest, WhatWouldHangEnds) {
  const on_host::Grid grid = {3, 32, memory, 1024};
  EXPECT_DEATH(on_host::Launch(grid,
                               [] {
                                 while (true) on_host::WaitForOtherBlocks();
                               }),
               "waits for other blocks, which all wait");
  EXPECT_DEATH(on_host::Launch(grid,
                               [] {
                                 while (true) on_host::WaitForOtherWarps();
                               }),
               "waits for other warps, which all wait");
  EXPECT_DEATH(on_host::Launch(grid,
                               [] {
                                 if (threadIdx.x < 16) __syncwarp();
                               }),
               "some lanes wait for their warp, some do not");
  EXPECT_DEATH(on_host::Launch(grid,
                               [] {
                                 if (threadIdx.x < 16)
                                   __syncwarp();
                                 else
                                   __ballot_sync(~0u, true);
                               }),
               "lanes of a warp at different instructions");
}

TEST(CudaOnHostDeathTest, WritesBehindSharedMemoryEnd) {
  EXPECT_DEATH(on_host::Launch({1, 32, memory, 1008}, [] { memory[1008 + threadIdx.x] = 1; }),
               "something was written behind its shared memory");
}

}  // namespace
}  // namespace hotplane
