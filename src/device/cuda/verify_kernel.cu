// One thread block hashes one check. The sums of its blocks of 1024 bytes are made by all warps,
// then eight threads run through them in order.
#include "device/cuda/verify_args.h"
#include "device/xxh3.h"

namespace hotplane {
namespace {

using namespace xxh3;

constexpr unsigned kWarpThreads = 32;
constexpr unsigned kWarps = kVerifyThreads / kWarpThreads;
// Sums kept at a time: all blocks of a chunk of 256 KiB. 16 KiB, so that an SM holds eight of these
// thread blocks.
constexpr uint64_t kSumsAtATime = 256;

// A thread reads 16 bytes: two neighbouring lanes of a stripe. 32 threads read 8 stripes.
struct Pair {
  uint64_t even;
  uint64_t odd;
};

template <bool kAligned>
__device__ Pair ReadPair(const uint8_t* at) {
  if (kAligned) {
    const ulonglong2 words = *reinterpret_cast<const ulonglong2*>(at);
    return {words.x, words.y};
  }
  return {Read64(at), Read64(at + 8)};
}

__device__ void AddPair(const Pair& words, const Pair& keys, Pair* sum) {
  sum->even += LaneTerm(words.even, keys.even) + words.odd;
  sum->odd += LaneTerm(words.odd, keys.odd) + words.even;
}

// Over the eight stripes that a warp has read.
__device__ Pair AcrossStripes(Pair sum) {
  for (unsigned by = 4; by < kWarpThreads; by *= 2) {
    sum.even += __shfl_xor_sync(0xFFFFFFFFu, sum.even, by);
    sum.odd += __shfl_xor_sync(0xFFFFFFFFu, sum.odd, by);
  }
  return sum;
}

// The keys of this thread's two lanes, in the first and in the last eight stripes of a block.
struct ThreadKeys {
  Pair low;
  Pair high;
};

__device__ ThreadKeys KeysOf(const Secret& secret, unsigned lane_of_warp) {
  const unsigned first = lane_of_warp / 4 + lane_of_warp % 4 * 2;
  return {{secret.words[first], secret.words[first + 1]},
          {secret.words[first + 8], secret.words[first + 9]}};
}

// The sums of `stripes` (at most 16) stripes, in the threads 0 to 3 of the warp.
template <bool kAligned>
__device__ Pair SumBlock(const uint8_t* block, uint64_t stripes, const ThreadKeys& keys,
                         unsigned lane_of_warp) {
  Pair sum = {0, 0};
  const unsigned stripe = lane_of_warp / 4;
  const uint8_t* const at = block + 16 * lane_of_warp;
  if (stripe < stripes) AddPair(ReadPair<kAligned>(at), keys.low, &sum);
  if (stripe + 8 < stripes) AddPair(ReadPair<kAligned>(at + 512), keys.high, &sum);
  return AcrossStripes(sum);
}

template <bool kAligned>
__device__ uint64_t HashLong(const Secret& secret, const uint8_t* data, uint64_t bytes,
                             uint64_t* sums) {
  __shared__ uint64_t lanes[kLaneCount];
  const unsigned thread = threadIdx.x;
  const unsigned lane_of_warp = thread % kWarpThreads;
  const ThreadKeys keys = KeysOf(secret, lane_of_warp);
  const uint64_t blocks = BlockCount(bytes);
  const int lane = static_cast<int>(thread % kLaneCount);
  const uint64_t scramble_key = secret.words[kScrambleKeys / 8 + thread % kLaneCount];
  uint64_t running = FirstLane(lane);
  // The stripes after the last whole block are one more sum, without a scramble.
  for (uint64_t begin = 0; begin <= blocks; begin += kSumsAtATime) {
    const uint64_t end = begin + kSumsAtATime <= blocks ? begin + kSumsAtATime : blocks + 1;
#pragma unroll 4
    for (uint64_t block = begin + thread / kWarpThreads; block < end; block += kWarps) {
      const uint64_t stripes = block < blocks ? kStripesPerBlock : TailStripeCount(bytes);
      const Pair sum = SumBlock<kAligned>(data + block * kBlockBytes, stripes, keys, lane_of_warp);
      if (lane_of_warp < 4) {
        sums[(block - begin) * kLaneCount + 2 * lane_of_warp] = sum.even;
        sums[(block - begin) * kLaneCount + 2 * lane_of_warp + 1] = sum.odd;
      }
    }
    __syncthreads();
    if (thread < kLaneCount) {
#pragma unroll 8
      for (uint64_t block = begin; block < end; ++block) {
        running += sums[(block - begin) * kLaneCount + thread];
        if (block < blocks) running = Scramble(running, scramble_key);
      }
    }
    __syncthreads();
  }
  if (thread < kLaneCount) {
    const uint8_t* const last = data + bytes - kStripeBytes;
    const uint64_t word = Read64(last + 8 * thread);
    const uint64_t neighbour = Read64(last + 8 * (thread ^ 1));
    lanes[thread] = running + LaneTerm(word, Key(secret, kLastStripeKeys + 8 * thread)) + neighbour;
  }
  __syncthreads();
  return thread == 0 ? Merge(secret, lanes, bytes) : 0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kVerifyThreads)
    hotplane_verify(const uint8_t* data, const VerifyCheck* checks, VerifyOutcome outcome,
                    Secret secret) {
  __shared__ uint64_t sums[kSumsAtATime * kLaneCount];
  __shared__ VerifyCheck check;
  // In host memory: read once.
  if (threadIdx.x == 0) check = checks[blockIdx.x];
  __syncthreads();
  const uint8_t* const at = data + check.offset;
  uint64_t found = 0;
  if (check.bytes <= kShortBytesMax) {
    if (threadIdx.x == 0) found = HashShort(secret, at, check.bytes);
  } else if (reinterpret_cast<uintptr_t>(at) % 16 == 0) {
    found = HashLong<true>(secret, at, check.bytes, sums);
  } else {
    found = HashLong<false>(secret, at, check.bytes, sums);
  }
  if (threadIdx.x != 0 || found == check.checksum) return;
  outcome.found[blockIdx.x] = found;
  outcome.bad_at[blockIdx.x] = 1;
  *outcome.bad = 1;
}

}  // namespace hotplane
