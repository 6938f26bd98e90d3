// Who computes what in a call of few assignments: every block finds out for itself.
#pragma once

#include "moe/cuda/expert_matrix.h"

namespace hotplane::moe_cuda {

// Some assignments of one expert.
struct Slice {
  uint16_t expert;
  uint16_t begin;  // in `order`
  uint16_t count;
};

// The items of a product that a block has; an item is a slice and a pair of strips, numbered slice
// by slice.
struct Share {
  uint32_t begin, end;
  uint32_t first_slice;
  Matrix matrices[kDecodeOwnSlicesMax];  // of the slices from begin's on
};

struct Routed {
  Slice slices[kDecodeAssignmentsMax];
  uint16_t order[kDecodeAssignmentsMax];  // assignments by expert, ascending in both
  // Time that an item of the slices before each takes, all in all last; see CostOf.
  uint16_t cost_before[kDecodeAssignmentsMax + 1];
  uint32_t slice_count;
  Share shares[2];  // of gate and up, of down
};

// Needed while a Routed is made.
struct RoutingScratch {
  uint32_t ids[kDecodeAssignmentsMax];    // by assignment; kNoId where it is none
  uint8_t begins[kDecodeAssignmentsMax];  // by place in the order: 1 where a slice does
};
static_assert(sizeof(Routed) <= kDecodeRoutedBytes);
inline constexpr uint32_t kNoId = 0xFFFFFFFFu;

// A thread's assignment among all: how many have smaller ids, come before it with the same, and how
// many have the same at all.
struct Rank {
  uint32_t smaller, before, same;
};
__device__ __forceinline__ Rank RankOf(const RoutingScratch& scratch, uint32_t id,
                                       uint32_t assignments) {
  Rank rank = {0, 0, 0};
  // Four at a time; those beyond the last have no id.
  for (uint32_t first = 0; first < assignments; first += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(scratch.ids + first);
    const uint32_t others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      rank.smaller += others[i] < id ? 1 : 0;
      rank.same += others[i] == id ? 1 : 0;
      rank.before += others[i] == id && first + i < threadIdx.x ? 1 : 0;
    }
  }
  return rank;
}

// By all threads of the block, of which the first have an assignment each. A stable sort:
// assignments keep their order.
__device__ __forceinline__ void SortByExpert(const MoeArgs& args, uint32_t slice_tokens,
                                             RoutingScratch* scratch, Routed* routed) {
  const uint32_t a = threadIdx.x;
  const uint32_t assignments = args.tokens * args.top_k;
  uint32_t id = a < assignments ? static_cast<uint32_t>(args.ids[a]) : kNoId;
  if (id >= args.experts) id = kNoId;
  if (a < kDecodeAssignmentsMax) {
    scratch->ids[a] = id;
    scratch->begins[a] = 0;
  }
  __syncthreads();
  uint32_t place = 0;
  Rank rank = {};
  const bool valid = id != kNoId;
  if (valid) {
    rank = RankOf(*scratch, id, assignments);
    place = rank.smaller + rank.before;
    routed->order[place] = static_cast<uint16_t>(a);
    if (rank.before % slice_tokens == 0) scratch->begins[place] = 1;
  }
  __syncthreads();
  // Slices are numbered as they begin in the order.
  const bool begins = valid && rank.before % slice_tokens == 0;
  if (begins) {
    uint32_t at = 0;
    for (uint32_t first = 0; first < place; first += 16) {
      const uint4 flags = *reinterpret_cast<const uint4*>(scratch->begins + first);
      const uint32_t words[4] = {flags.x, flags.y, flags.z, flags.w};
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t from = first + 4 * i;
        const uint32_t there = from >= place ? 0 : min(place - from, 4u);
        at += __popc(there == 4 ? words[i] : words[i] & ((1u << (8 * there)) - 1));
      }
    }
    routed->slices[at] = {static_cast<uint16_t>(id), static_cast<uint16_t>(place),
                          static_cast<uint16_t>(min(rank.same - rank.before, slice_tokens))};
  }
  const uint32_t count = __syncthreads_count(begins ? 1 : 0);
  if (threadIdx.x == 0) routed->slice_count = count;
  __syncthreads();
}

inline constexpr uint32_t kCostMin = 43, kCostMax = 145;
// How long an item of `tokens` tokens takes, relatively: instructions of the inner loop, or the
// time of its bytes, by what was measured on an H200.
__device__ __forceinline__ uint32_t CostOf(uint32_t tier, uint32_t tokens) {
  if (tier == kTierBase) return tokens == 1 ? 43 : tokens == 2 ? 48 : 60;
  if (tier == kTierNibbles) return tokens <= 2 ? 84 : 88;
  if (tier == kTierQuintals) return tokens == 1 ? 120 : tokens == 2 ? 130 : kCostMax;
  // A refused expert takes no time, but a block has room for so many slices only.
  return kCostMin;
}
static_assert(kCostMax * kDecodeAssignmentsMax < 65536);
static_assert(kDecodeAssignmentsMax * kCostMax / kCostMin / kDecodeBlocksMin + 2 <=
              kDecodeOwnSlicesMax);

// Each slice's cost becomes the sum of those before. By the threads of warp 0.
__device__ __forceinline__ void SumCosts(Routed* routed) {
  uint32_t before = 0;
  for (uint32_t first = 0; first < routed->slice_count; first += 32) {
    const uint32_t i = first + threadIdx.x;
    const uint32_t cost = i < routed->slice_count ? routed->cost_before[i + 1] : 0;
    const uint32_t sum = SumUpTo(cost, threadIdx.x);
    if (i < routed->slice_count) routed->cost_before[i + 1] = static_cast<uint16_t>(before + sum);
    before += __shfl_sync(kAllLanes, sum, 31);
  }
  if (threadIdx.x == 0) routed->cost_before[0] = 0;
}

__device__ __forceinline__ uint32_t CostOfSlice(const MoeArgs& args, const Slice& slice) {
  return CostOf(MatrixOf(args, slice.expert, true).tier, slice.count);
}

// Slices and costs of at most 32 assignments: by warp 0, one lane to an assignment.
__device__ __forceinline__ void SortFew(const MoeArgs& args, uint32_t slice_tokens,
                                        Routed* routed) {
  const uint32_t a = threadIdx.x;
  const uint32_t assignments = args.tokens * args.top_k;
  uint32_t id = a < assignments ? static_cast<uint32_t>(args.ids[a]) : kNoId;
  if (id >= args.experts) id = kNoId;
  const uint32_t same = __match_any_sync(kAllLanes, id);
  const uint32_t before = __popc(same & ((1u << a) - 1));
  uint32_t place = before;
  for (uint32_t other = 0; other < assignments; ++other)
    place += __shfl_sync(kAllLanes, id, other) < id ? 1 : 0;
  const bool valid = id != kNoId;
  const bool begins = valid && before % slice_tokens == 0;
  Slice slice = {};
  uint32_t cost = 0;
  if (begins) {
    slice = {static_cast<uint16_t>(id), static_cast<uint16_t>(place),
             static_cast<uint16_t>(min(__popc(same) - before, slice_tokens))};
    cost = CostOfSlice(args, slice);
  }
  // Slices that begin earlier in the order, and their costs.
  uint32_t at = 0, cost_before = 0;
  for (uint32_t other = 0; other < assignments; ++other) {
    const uint32_t its_place = __shfl_sync(kAllLanes, begins ? place : kNoId, other);
    const uint32_t its_cost = __shfl_sync(kAllLanes, cost, other);
    if (its_place >= place) continue;
    ++at;
    cost_before += its_cost;
  }
  if (valid) routed->order[place] = static_cast<uint16_t>(a);
  if (begins) {
    routed->slices[at] = slice;
    routed->cost_before[at + 1] = static_cast<uint16_t>(cost_before + cost);
  }
  const uint32_t count = __popc(__ballot_sync(kAllLanes, begins));
  if (a == 0) {
    routed->slice_count = count;
    routed->cost_before[0] = 0;
  }
}

// n / d, where it is below 2^11 and n below 2^20: their quotient in float32 is not off by 1/2d.
__device__ __forceinline__ uint32_t Quotient(uint32_t n, uint32_t d) {
  return __float2uint_rz(__fdividef(static_cast<float>(n) + 0.5f, static_cast<float>(d)));
}

// Where a block's share of a product's time begins, each slice having `pairs` items; where a share
// ends is asked for as the beginning of the next. By a warp. Rounding moves a boundary for both
// blocks that have it.
struct ShareBegin {
  uint32_t slice, pair;
};
__device__ __forceinline__ ShareBegin ShareBeginOf(const Routed& routed, uint32_t pairs,
                                                   uint32_t block, uint32_t lane) {
  const uint32_t slices = routed.slice_count;
  if (block == gridDim.x) return {slices, 0};
  const uint32_t total = routed.cost_before[slices] * pairs;
  const uint32_t at = __float2uint_rz(static_cast<float>(total) * static_cast<float>(block) *
                                      __frcp_rn(static_cast<float>(gridDim.x)));
  uint32_t found = 0;
  for (uint32_t i = lane; i < slices; i += 32) {
    const uint32_t before = routed.cost_before[i] * pairs;
    const uint32_t cost = routed.cost_before[i + 1] - routed.cost_before[i];
    if (before <= at && at < before + cost * pairs)
      found = i << 16 | min(pairs - 1, Quotient(at - before, cost));
  }
  found = __reduce_max_sync(kAllLanes, found);
  return {found >> 16, found & 0xFFFF};
}

// By a warp.
__device__ __forceinline__ void FindShare(const MoeArgs& args, bool gate_up, uint32_t pairs,
                                          uint32_t lane, const Routed& routed, Share* share) {
  const ShareBegin begin = ShareBeginOf(routed, pairs, blockIdx.x, lane);
  const ShareBegin end = ShareBeginOf(routed, pairs, blockIdx.x + 1, lane);
  if (lane == 0) {
    share->begin = begin.slice * pairs + begin.pair;
    share->end = end.slice * pairs + end.pair;
    share->first_slice = begin.slice;
  }
  if (begin.slice + lane < end.slice + (end.pair != 0 ? 1 : 0))
    share->matrices[lane] = MatrixOf(args, routed.slices[begin.slice + lane].expert, gate_up);
}
static_assert(kDecodeOwnSlicesMax <= 32);

// By all threads of the block, which are in step afterwards.
__device__ __forceinline__ void Route(const MoeArgs& args, uint32_t slice_tokens,
                                      uint32_t gate_up_pairs, uint32_t down_pairs,
                                      RoutingScratch* scratch, Routed* routed) {
  if (args.tokens * args.top_k <= 32) {
    if (threadIdx.x < 32) SortFew(args, slice_tokens, routed);
  } else {
    SortByExpert(args, slice_tokens, scratch, routed);
    for (uint32_t i = threadIdx.x; i < routed->slice_count; i += blockDim.x)
      routed->cost_before[i + 1] = static_cast<uint16_t>(CostOfSlice(args, routed->slices[i]));
    __syncthreads();
    if (threadIdx.x < 32) SumCosts(routed);
  }
  __syncthreads();
  const uint32_t warp = threadIdx.x / 32;
  if (warp < 2)
    FindShare(args, warp == 0, warp == 0 ? gate_up_pairs : down_pairs, threadIdx.x % 32, *routed,
              routed->shares + warp);
  __syncthreads();
}

}  // namespace hotplane::moe_cuda
