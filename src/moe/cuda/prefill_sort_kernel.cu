// Before the products of a prefill: assignments by expert, activations in the order of the
// products.
#include "format/tsym4.h"
#include "moe/cuda/expert_matrix.h"
#include "moe/cuda/ptx.h"
#include "moe/fp8.h"

namespace hotplane::moe_cuda {
namespace {

constexpr uint32_t kThreads = kPrefillSortThreads;
constexpr uint32_t kWarps = kThreads / 32;

// No expert, and larger than all.
constexpr uint32_t kNobody = 0xFFFFFFFFu;

__device__ __forceinline__ uint32_t IdAt(const MoeArgs& args, uint32_t a, uint32_t assignments) {
  return a < assignments ? static_cast<uint32_t>(args.ids[a]) : kNobody;
}

// The block's sum, for all threads.
__device__ __forceinline__ uint32_t SumOfBlock(uint32_t value, uint32_t (&of_warp)[kWarps]) {
  value = __reduce_add_sync(kAllLanes, value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  uint32_t sum = 0;
#pragma unroll
  for (uint32_t warp = 0; warp < kWarps; ++warp) sum += of_warp[warp];
  return sum;
}

}  // namespace

// One block for each expert, which looks at all assignments: stable, and nothing to wait for.
extern "C" __global__ void __launch_bounds__(kThreads)
    hotplane_moe_sort(const __grid_constant__ MoeArgs args,
                      const __grid_constant__ PrefillArgs prefill) {
  __shared__ uint32_t of_warp[kWarps];
  const uint32_t expert = blockIdx.x;
  const uint32_t assignments = args.tokens * args.top_k;
  uint32_t smaller = 0, same = 0;
  for (uint32_t a = threadIdx.x; a < assignments; a += kThreads) {
    const uint32_t id = IdAt(args, a, assignments);
    smaller += id < expert ? 1 : 0;
    same += id == expert ? 1 : 0;
  }
  const uint32_t begin = SumOfBlock(smaller, of_warp);
  const uint32_t end = begin + SumOfBlock(same, of_warp);
  if (threadIdx.x == 0) prefill.begin[expert] = begin;
  if (threadIdx.x == 0 && expert + 1 == args.experts) prefill.begin[args.experts] = end;
  uint32_t place = begin;
  for (uint32_t first = 0; first < assignments && place < end; first += kThreads) {
    const uint32_t a = first + threadIdx.x;
    const bool mine = IdAt(args, a, assignments) == expert;
    const uint32_t votes = __ballot_sync(kAllLanes, mine);
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = __popc(votes);
    __syncthreads();
    uint32_t before = __popc(votes & ((1u << threadIdx.x % 32) - 1)), all = 0;
#pragma unroll
    for (uint32_t warp = 0; warp < kWarps; ++warp) {
      if (warp < threadIdx.x / 32) before += of_warp[warp];
      all += of_warp[warp];
    }
    if (mine) prefill.order[place + before] = a;
    place += all;
  }
}

// A thread puts one block of 32 activations in the order of PrefillColumn.
extern "C" __global__ void __launch_bounds__(kThreads)
    hotplane_moe_arrange(const __grid_constant__ MoeArgs args,
                         const __grid_constant__ PrefillArgs prefill) {
  const uint64_t block = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (block >= uint64_t{args.tokens} * args.hidden / kScaleBlock) return;
  const uint4* const from = reinterpret_cast<const uint4*>(args.x + block * kScaleBlock);
  uint4* const to = reinterpret_cast<uint4*>(prefill.x + block * kScaleBlock);
  uint4 read[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) read[i] = from[i];
  const uint32_t words[16] = {read[0].x, read[0].y, read[0].z, read[0].w, read[1].x, read[1].y,
                              read[1].z, read[1].w, read[2].x, read[2].y, read[2].z, read[2].w,
                              read[3].x, read[3].y, read[3].z, read[3].w};
  const auto word = [&](uint32_t at) {
    const uint32_t column = PrefillColumn(at);
    return ptx::Permute(words[column / 2], words[8 + column / 2],
                        column % 2 == 0 ? 0x5410 : 0x7632);
  };
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i)
    to[i] = {word(4 * i), word(4 * i + 1), word(4 * i + 2), word(4 * i + 3)};
}

// Activations of either product become FP8 where they are: [rows, columns], in any order inside a
// block of 32. A warp to a group, four columns to a lane.
extern "C" __global__ void __launch_bounds__(kThreads)
    hotplane_moe_round_fp8(uint16_t* values, uint64_t rows, uint32_t columns) {
  const uint32_t groups = (columns + fp8::kGroup - 1) / fp8::kGroup;
  const uint64_t group = (uint64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (group >= rows * groups) return;
  const uint64_t row = group / groups;
  const uint32_t column =
      static_cast<uint32_t>(group - row * groups) * fp8::kGroup + threadIdx.x % 32 * 4;
  const bool there = column < columns;
  uint2* const at = reinterpret_cast<uint2*>(values + row * columns + column);
  const uint2 read = there ? *at : uint2{0, 0};
  const uint32_t words[2] = {read.x, read.y};
  uint32_t largest = 0;
#pragma unroll
  for (const uint32_t word : words)
    largest = max(largest, max(word & 0x7FFFu, word >> 16 & 0x7FFFu));
  const uint32_t scale = fp8::ScaleFor(__reduce_max_sync(kAllLanes, largest));
  // Exact: these products are bfloat16.
  const auto rounded = [&](uint32_t word) {
    const float low = fp8::Rounded(__uint_as_float(word << 16), scale);
    const float high = fp8::Rounded(__uint_as_float(word & 0xFFFF0000u), scale);
    return ptx::Permute(__float_as_uint(low), __float_as_uint(high), 0x7632);
  };
  if (there) *at = {rounded(words[0]), rounded(words[1])};
}

}  // namespace hotplane::moe_cuda
