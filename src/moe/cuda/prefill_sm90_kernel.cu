// The products of a prefill on Hopper: grouped by expert, weights as the left operand from
// registers, where they are unpacked with their scales while the tensor cores work on those before.
//
// A block has two warpgroups and a tile of 256 weight rows by up to 128 assignments of an expert.
// Each warpgroup has twice 64 rows: gate rows and the up rows that belong to them, or two runs of
// down rows; each warp a strip of 16 in both. Activations come through shared memory, gathered by
// token, 64 of k at a time.
#include "format/tsym4.h"
#include "moe/cuda/finish.h"
#include "moe/cuda/fragments.h"
#include "moe/cuda/wgmma_sm90.h"

namespace hotplane::moe_cuda {
namespace {

constexpr uint32_t kWarpsOfGroup = 4;
constexpr uint32_t kStripsOfBlock = 16;
constexpr uint32_t kRowBytes = 128;  // 64 of k in bfloat16

struct Shared {
  uint16_t tiles_before[kDecodeExpertsMax + 1];
  uint32_t sums[kPrefillThreads / 32];
};

// A tile of a product.
struct Tile {
  uint32_t expert;
  uint32_t begin;  // in `order`
  uint32_t count;  // of assignments, 1 to kPrefillColumns
  uint32_t rows;   // which run of weight rows
};

// Of one strip and 64 of k: what a lane has of codes, nibbles or quintals, and its scales.
template <uint32_t kTier>
struct RawTile;
template <>
struct RawTile<kTierBase> {
  uint2 codes;
  uint32_t scales[2][2];  // [row g, g+8][block]
};
template <>
struct RawTile<kTierNibbles> {
  uint4 nibbles;
  uint32_t scales[2][2];
};
template <>
struct RawTile<kTierQuintals> {
  uint2 codes, words;
  uint32_t last;
  uint32_t scales[2][2];
};

// Where a warp reads a strip.
struct StripSource {
  const uint8_t* codes;
  const uint8_t* fine;
  const uint8_t* scales;
};

template <uint32_t kTier>
__device__ __forceinline__ void Load(const StripSource& from, uint32_t tile, uint32_t lane,
                                     RawTile<kTier>* raw) {
  if constexpr (kTier != kTierNibbles)
    raw->codes = __ldg(reinterpret_cast<const uint2*>(from.codes + tile * kTileCodeBytes) + lane);
  if constexpr (kTier == kTierNibbles)
    raw->nibbles = __ldg(reinterpret_cast<const uint4*>(from.fine + tile * kTileNibbleBytes) + lane);
  if constexpr (kTier == kTierQuintals) {
    const uint8_t* const fine = from.fine + tile * kTileQuintalBytes;
    raw->words = __ldg(reinterpret_cast<const uint2*>(fine) + lane);
    raw->last = __ldg(reinterpret_cast<const uint16_t*>(fine + 256) + lane);
  }
  const uint8_t* const scales = from.scales + tile * kTileScaleBytes + lane / 4;
#pragma unroll
  for (uint32_t block = 0; block < 2; ++block) {
    raw->scales[0][block] = __ldg(scales + block * kStripRows);
    raw->scales[1][block] = __ldg(scales + block * kStripRows + 8);
  }
}

// The left operands of both multiplies of a block, scales included.
template <int kBlock>
__device__ __forceinline__ void Unpack(const RawTile<kTierBase>& raw, uint32_t (&a)[2][4]) {
#pragma unroll
  for (uint32_t row = 0; row < 2; ++row) {
    const CodeSelectors selectors = SelectorsOf(row == 0 ? raw.codes.x : raw.codes.y);
    ScaledLevels levels(raw.scales[row][kBlock]);
    if (raw.scales[row][kBlock] > kLevelScaleMax) {
      // Beyond float32 with the larger levels: infinite, all of them.
      levels.high = 0x7F7FFFFFu;
      levels.low = 0x80;
    }
    uint32_t pairs[2][2];
    ScaledPairs(kBlock == 0 ? selectors.even : selectors.even >> 16,
                kBlock == 0 ? selectors.odd : selectors.odd >> 16, levels, pairs);
#pragma unroll
    for (uint32_t multiply = 0; multiply < 2; ++multiply) {
      a[multiply][row] = pairs[multiply][0];
      a[multiply][2 + row] = pairs[multiply][1];
    }
  }
}

__device__ __forceinline__ void UnpackNibbles(uint2 nibbles, const uint32_t (&scales)[2],
                                              uint32_t (&a)[2][4]) {
  const WeightFragments of = NibbleFragments(nibbles.x, nibbles.y);
#pragma unroll
  for (uint32_t multiply = 0; multiply < 2; ++multiply) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      a[multiply][i] = ScaledNibbles(of.a[multiply][i], scales[i % 2]);
      if (scales[i % 2] > kNibbleScaleMax)
        a[multiply][i] = ScaledFurther(a[multiply][i], scales[i % 2]);
    }
  }
}
template <int kBlock>
__device__ __forceinline__ void Unpack(const RawTile<kTierNibbles>& raw, uint32_t (&a)[2][4]) {
  const uint4& n = raw.nibbles;
  UnpackNibbles(kBlock == 0 ? uint2{n.x, n.z} : uint2{n.y, n.w},
                {raw.scales[0][kBlock], raw.scales[1][kBlock]}, a);
}
template <int kBlock>
__device__ __forceinline__ void Unpack(const RawTile<kTierQuintals>& raw, uint32_t (&a)[2][4]) {
  const uint32_t upper = kBlock == 0 ? raw.words.x : __funnelshift_r(raw.words.x, raw.words.y, 20);
  const uint32_t lower = kBlock == 0 ? raw.words.y >> 8
                                     : __funnelshift_r(raw.words.y, raw.last, 28);
  UnpackNibbles({NibblesOfQuintals(upper, raw.codes.x >> (16 * kBlock)),
                 NibblesOfQuintals(lower, raw.codes.y >> (16 * kBlock))},
                {raw.scales[0][kBlock], raw.scales[1][kBlock]}, a);
}

// A product of the call.
struct Product {
  bool gate_up;
  uint32_t k;
  uint32_t strips;  // of gate, or of down
  const uint16_t* activations;
};

// The strip of a warp in its first (0) or second run of rows; `strips` and more: none.
__device__ __forceinline__ uint32_t StripOf(const Product& product, const Tile& tile,
                                            uint32_t warp, uint32_t run) {
  const uint32_t group = warp / kWarpsOfGroup, in_group = warp % kWarpsOfGroup;
  if (product.gate_up) return tile.rows * kStripsOfBlock / 2 + group * kWarpsOfGroup + in_group;
  return tile.rows * kStripsOfBlock + (2 * group + run) * kWarpsOfGroup + in_group;
}

// Copies activations of a tile into a stage: thread i has chunk i % 8 of rows i/8, i/8 + 32, ...
template <int kColumns>
struct Gather {
  const uint16_t* rows[(kColumns + 31) / 32];
  uint32_t to[(kColumns + 31) / 32];

  __device__ __forceinline__ Gather(const MoeArgs& args, const PrefillArgs& prefill,
                                    const Product& product, const Tile& tile) {
    const uint32_t chunk = threadIdx.x % 8;
#pragma unroll
    for (uint32_t i = 0; i < (kColumns + 31) / 32; ++i) {
      const uint32_t row = threadIdx.x / 8 + 32 * i;
      // Rows beyond the last are computed and left alone.
      const uint32_t place = tile.begin + min(row, tile.count - 1);
      const uint64_t at = product.gate_up ? prefill.order[place] / args.top_k : place;
      rows[i] = product.activations + at * product.k + 8 * chunk;
      to[i] = row * kRowBytes + (chunk ^ row % 8) * 16;
    }
  }
  __device__ __forceinline__ void Issue(uint32_t stage, uint32_t tile, bool active) const {
    if (active) {
#pragma unroll
      for (uint32_t i = 0; i < (kColumns + 31) / 32; ++i)
        if (kColumns % 32 == 0 || 32 * (i + 1) <= kColumns || threadIdx.x / 8 < kColumns % 32)
          ptx::CopyAsync16(stage + to[i], rows[i] + tile * kTileColumns);
    }
    ptx::CommitCopies();
  }
};

template <int kColumns>
__device__ __forceinline__ void MultiplyBlock(uint32_t stage, uint32_t block,
                                              const uint32_t (&a)[2][2][4],
                                              float (&acc)[2][kColumns / 2]) {
  ptx::WgmmaFence();
#pragma unroll
  for (uint32_t multiply = 0; multiply < 2; ++multiply) {
    const uint64_t b = ptx::SwizzledRows(stage + (2 * block + multiply) * 32);
#pragma unroll
    for (uint32_t run = 0; run < 2; ++run)
      ptx::Wgmma<kColumns>::Multiply(acc[run], a[run][multiply], b);
  }
  ptx::WgmmaCommit();
}

// A strip's tile into the second-level cache.
template <uint32_t kTier>
__device__ __forceinline__ void Fetch(const StripSource& from, uint32_t tile, uint32_t lane) {
  constexpr uint32_t kLine = 128;
  if (lane < 4) {
    if (kTier == kTierNibbles)
      ptx::Prefetch(from.fine + tile * kTileNibbleBytes + lane * kLine);
    else if (lane < 2)
      ptx::Prefetch(from.codes + tile * kTileCodeBytes + lane * kLine);
  } else if (kTier == kTierQuintals && lane < 7) {
    ptx::Prefetch(from.fine + tile * kTileQuintalBytes + (lane - 4) * kLine);
  } else if (lane == 7) {
    ptx::Prefetch(from.scales + tile * kTileScaleBytes);
  }
}
// So many tiles ahead of their loads: as long as device memory takes.
constexpr uint32_t kFetchAhead = 3;

// Sums of a tile: acc[run], as of Wgmma.
template <int kColumns, uint32_t kTier>
__device__ __forceinline__ void MultiplyTile(const Gather<kColumns>& gather,
                                             const StripSource (&from)[2], uint32_t tiles,
                                             uint32_t ring, float (&acc)[2][kColumns / 2]) {
  const uint32_t lane = threadIdx.x % 32;
  RawTile<kTier> raw[2];
#pragma unroll
  for (uint32_t run = 0; run < 2; ++run) {
    Load(from[run], 0, lane, &raw[run]);
    for (uint32_t tile = 1; tile < min(kFetchAhead, tiles); ++tile)
      Fetch<kTier>(from[run], tile, lane);
  }
  gather.Issue(ring, 0, true);
  gather.Issue(ring + kPrefillStageBytes, 1, tiles > 1);
  uint32_t a[2][2][2][4];  // [block][run][multiply][register]
#pragma unroll
  for (uint32_t run = 0; run < 2; ++run) {
#pragma unroll
    for (float& value : acc[run]) value = 0;
    Unpack<0>(raw[run], a[0][run]);
  }
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    const uint32_t stage = ring + tile % kPrefillStages * kPrefillStageBytes;
    ptx::WaitForCopies<1>();
    ptx::FenceForAsync();
    __syncthreads();
    gather.Issue(ring + (tile + 2) % kPrefillStages * kPrefillStageBytes, tile + 2,
                 tile + 2 < tiles);
    MultiplyBlock<kColumns>(stage, 0, a[0], acc);
    // The multiplies before those are done, and their registers free.
    ptx::WgmmaWait<1>();
#pragma unroll
    for (uint32_t run = 0; run < 2; ++run) {
      Unpack<1>(raw[run], a[1][run]);
      Load(from[run], min(tile + 1, tiles - 1), lane, &raw[run]);
      if (tile + kFetchAhead < tiles) Fetch<kTier>(from[run], tile + kFetchAhead, lane);
    }
    MultiplyBlock<kColumns>(stage, 1, a[1], acc);
    ptx::WgmmaWait<1>();
#pragma unroll
    for (uint32_t run = 0; run < 2; ++run) Unpack<0>(raw[run], a[0][run]);
  }
  ptx::WgmmaWait<0>();
  ptx::WaitForCopies<0>();
  // Nobody fills a stage anew while others still read it.
  __syncthreads();
}

__device__ __forceinline__ void StoreInner(const MoeArgs& args, const Matrix& matrix,
                                           uint32_t place, uint32_t n, float gate, float up) {
  if (matrix.bias != nullptr) {
    gate += matrix.bias[n];
    up += matrix.bias[args.intermediate + n];
  }
  const uint32_t at = n / kScaleBlock * kScaleBlock + PrefillPlace(n % kScaleBlock);
  args.inner[uint64_t{place} * args.intermediate + at] = ToBf16(Act(args, gate, up));
}

template <int kColumns>
__device__ __forceinline__ void Store(const MoeArgs& args, const PrefillArgs& prefill,
                                      const Product& product, const Matrix& matrix,
                                      const Tile& tile, const float (&acc)[2][kColumns / 2]) {
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (uint32_t i = 0; i < kColumns / 4; ++i) {
    const uint32_t column = i / 2 * 8 + 2 * t + i % 2;
    if (column >= tile.count) continue;
    const uint32_t place = tile.begin + column;
    const uint32_t at = i / 2 * 4 + i % 2;  // in acc; row g+8 two further on
    if (product.gate_up) {
      const uint32_t strip = StripOf(product, tile, warp, 0);
      if (strip >= product.strips) continue;
      const uint32_t n = strip * kStripRows + g;
      StoreInner(args, matrix, place, n, acc[0][at], acc[1][at]);
      StoreInner(args, matrix, place, n + 8, acc[0][at + 2], acc[1][at + 2]);
      continue;
    }
    float* const to = args.results + uint64_t{prefill.order[place]} * args.hidden;
#pragma unroll
    for (uint32_t run = 0; run < 2; ++run) {
      const uint32_t strip = StripOf(product, tile, warp, run);
      if (strip >= product.strips) continue;
      const uint32_t n = strip * kStripRows + g;
      to[n] = acc[run][at] + (matrix.bias != nullptr ? matrix.bias[n] : 0.0f);
      to[n + 8] = acc[run][at + 2] + (matrix.bias != nullptr ? matrix.bias[n + 8] : 0.0f);
    }
  }
}

template <int kColumns, uint32_t kTier>
__device__ __forceinline__ void RunTile(const MoeArgs& args, const PrefillArgs& prefill,
                                        const Product& product, const Matrix& matrix,
                                        const Tile& tile, uint32_t ring) {
  const uint32_t tiles = product.k / static_cast<uint32_t>(kTileColumns);
  StripSource from[2];
#pragma unroll
  for (uint32_t run = 0; run < 2; ++run) {
    const uint32_t strip = min(StripOf(product, tile, threadIdx.x / 32, run), product.strips - 1) +
                           (product.gate_up ? run * product.strips : 0);
    const uint64_t first = uint64_t{strip} * tiles;
    from[run] = {matrix.codes + first * kTileCodeBytes,
                 matrix.fine +
                     first * (kTier == kTierNibbles ? kTileNibbleBytes : kTileQuintalBytes),
                 matrix.scales + first * kTileScaleBytes};
  }
  const Gather<kColumns> gather(args, prefill, product, tile);
  float acc[2][kColumns / 2];
  MultiplyTile<kColumns, kTier>(gather, from, tiles, ring, acc);
  Store<kColumns>(args, prefill, product, matrix, tile, acc);
}

template <uint32_t kTier>
__device__ __forceinline__ void RunTileOf(const MoeArgs& args, const PrefillArgs& prefill,
                                          const Product& product, const Matrix& matrix,
                                          const Tile& tile, uint32_t ring) {
  // Quintals leave fewer registers for sums.
  constexpr uint32_t kColumnsMax = kTier == kTierQuintals ? 96 : kPrefillColumns;
  if (tile.count <= 32) return RunTile<32, kTier>(args, prefill, product, matrix, tile, ring);
  if (tile.count <= 64) return RunTile<64, kTier>(args, prefill, product, matrix, tile, ring);
  if (tile.count <= 96) return RunTile<96, kTier>(args, prefill, product, matrix, tile, ring);
  if constexpr (kTier == kTierQuintals) {
    // They leave too few registers for more columns.
    Tile half = tile;
    for (uint32_t which = 0; which < 2; ++which) {
      half.begin = tile.begin + which * (tile.count / 2);
      half.count = which == 0 ? tile.count / 2 : tile.count - tile.count / 2;
      RunTile<64, kTier>(args, prefill, product, matrix, half, ring);
    }
  } else {
    RunTile<kPrefillColumns, kTier>(args, prefill, product, matrix, tile, ring);
  }
}

// What was refused must not look like a result.
__device__ __forceinline__ void StoreMissing(const MoeArgs& args, const PrefillArgs& prefill,
                                             const Tile& tile) {
  for (uint32_t column = 0; column < tile.count; ++column) {
    float* const row =
        args.results + uint64_t{prefill.order[tile.begin + column]} * args.hidden;
    for (uint32_t n = threadIdx.x; n < args.hidden; n += blockDim.x)
      row[n] = __uint_as_float(0x7FC00000u);
  }
}

__device__ __forceinline__ uint32_t TilesOf(uint32_t assignments) {
  return (assignments + kPrefillColumns - 1) / kPrefillColumns;
}

// Runs of columns before each expert's, all of them last. By all threads.
__device__ __forceinline__ void CountTiles(const MoeArgs& args, const PrefillArgs& prefill,
                                           Shared* shared) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t before = 0;
  for (uint32_t first = 0; first < args.experts; first += blockDim.x) {
    const uint32_t expert = first + threadIdx.x;
    const uint32_t own =
        expert < args.experts ? TilesOf(prefill.begin[expert + 1] - prefill.begin[expert]) : 0;
    uint32_t sum = own;
#pragma unroll
    for (uint32_t by = 1; by < 32; by *= 2) {
      const uint32_t other = __shfl_up_sync(kAllLanes, sum, by);
      if (lane >= by) sum += other;
    }
    if (lane == 31) shared->sums[warp] = sum;
    __syncthreads();
    uint32_t all = 0;
    for (uint32_t i = 0; i < blockDim.x / 32; ++i) {
      if (i < warp) sum += shared->sums[i];
      all += shared->sums[i];
    }
    if (expert < args.experts) shared->tiles_before[expert + 1] = before + sum;
    before += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) shared->tiles_before[0] = 0;
  __syncthreads();
}

__device__ __forceinline__ Tile TileAt(const MoeArgs& args, const PrefillArgs& prefill,
                                       const Shared& shared, uint32_t index, uint32_t row_tiles) {
  const uint32_t run = index / row_tiles;
  uint32_t low = 0, high = args.experts;
  // The last expert whose runs begin at or before `run`.
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (shared.tiles_before[middle] <= run)
      low = middle;
    else
      high = middle;
  }
  // Experts without assignments share the place of the next one.
  const uint32_t begin = prefill.begin[low], end = prefill.begin[low + 1];
  const uint32_t runs = TilesOf(end - begin), at = run - shared.tiles_before[low];
  // As even as they can be.
  const uint32_t first = begin + (end - begin) * at / runs;
  const uint32_t last = begin + (end - begin) * (at + 1) / runs;
  return {low, first, last - first, index - run * row_tiles};
}

// The tiles of experts of one tier; the others are another launch's.
template <uint32_t kTier>
__device__ __forceinline__ void RunProduct(const MoeArgs& args, const PrefillArgs& prefill,
                                           bool gate_up) {
  extern __shared__ uint8_t memory[];
  __shared__ Shared shared;
  CountTiles(args, prefill, &shared);
  constexpr uint32_t kRows = kStripRows;
  const Product product = {gate_up, gate_up ? args.hidden : args.intermediate,
                           (gate_up ? args.intermediate : args.hidden) / kRows,
                           gate_up ? prefill.x : args.inner};
  const uint32_t strips_of_tile = gate_up ? kStripsOfBlock / 2 : kStripsOfBlock;
  const uint32_t row_tiles = (product.strips + strips_of_tile - 1) / strips_of_tile;
  const uint32_t ring = (ptx::SharedAddress(memory) + 1023) / 1024 * 1024;
  const uint32_t count = shared.tiles_before[args.experts] * row_tiles;
  for (uint32_t index = blockIdx.x; index < count; index += gridDim.x) {
    const Tile tile = TileAt(args, prefill, shared, index, row_tiles);
    const Matrix matrix = MatrixOf(args, tile.expert, gate_up);
    if (matrix.tier == kTier)
      RunTileOf<kTier>(args, prefill, product, matrix, tile, ring);
    else if (matrix.tier == kTierMissing && !gate_up && tile.rows == 0)
      StoreMissing(args, prefill, tile);
  }
}

}  // namespace

// One kernel for each tier: together they would need more registers than there are.
extern "C" __global__ void __launch_bounds__(kPrefillThreads, 1)
    hotplane_moe_prefill_base(const __grid_constant__ MoeArgs args,
                              const __grid_constant__ PrefillArgs prefill, uint32_t gate_up) {
  RunProduct<kTierBase>(args, prefill, gate_up != 0);
}
extern "C" __global__ void __launch_bounds__(kPrefillThreads, 1)
    hotplane_moe_prefill_nibbles(const __grid_constant__ MoeArgs args,
                                 const __grid_constant__ PrefillArgs prefill, uint32_t gate_up) {
  RunProduct<kTierNibbles>(args, prefill, gate_up != 0);
}
extern "C" __global__ void __launch_bounds__(kPrefillThreads, 1)
    hotplane_moe_prefill_quintals(const __grid_constant__ MoeArgs args,
                                  const __grid_constant__ PrefillArgs prefill, uint32_t gate_up) {
  RunProduct<kTierQuintals>(args, prefill, gate_up != 0);
}

}  // namespace hotplane::moe_cuda
