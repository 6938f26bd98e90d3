// The products of a prefill on Hopper: grouped by expert, weights as the left operand from
// registers, where they are unpacked with their scales while the tensor cores work on those before.
//
// A block has four warpgroups and a tile of 256 weight rows (128 of gate and their 128 of up, or
// 256 of down) by up to 112 assignments of an expert; each warp has a strip of 16 rows.
// Activations, gathered by token, and weights come through shared memory, 64 of k at a time; sums
// leave through it, so that gate meets up and rows are written whole.
#include "format/tsym4.h"
#include "moe/cuda/finish.h"
#include "moe/cuda/fragments.h"
#include "moe/cuda/wgmma_sm90.h"

namespace hotplane::moe_cuda {
namespace {

constexpr uint32_t kStripsOfBlock = kPrefillThreads / 32;
constexpr uint32_t kRowsOfBlock = kStripsOfBlock * kStripRows;
constexpr uint32_t kRowBytes = 128;  // 64 of k in bfloat16

// A tile of a product.
struct Tile {
  uint32_t expert;
  uint32_t begin;  // in `order`
  uint32_t count;  // of assignments, 1 to kPrefillColumns
  uint32_t rows;   // which run of weight rows
};

// What all threads know, and no register should hold.
struct Shared {
  Tile tile;
  Matrix matrix;
  uint32_t row_tiles;
  uint32_t count;  // of tiles
  uint16_t tiles_before[kDecodeExpertsMax + 1];
  uint32_t sums[kPrefillThreads / 32];
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

// A strip's tile in a stage: codes, then nibbles or quintals, then scales.
template <uint32_t kTier>
struct StripBytes {
  static constexpr uint32_t kCodes = kTier == kTierNibbles ? 0 : kTileCodeBytes;
  static constexpr uint32_t kFine = kTier == kTierNibbles    ? kTileNibbleBytes
                                    : kTier == kTierQuintals ? kTileQuintalBytes
                                                             : 0;
  static constexpr uint32_t kScales = kCodes + kFine;
  static constexpr uint32_t kAll = kScales + kTileScaleBytes;
  static_assert(kPrefillWeights + kStripsOfBlock * kAll <= kPrefillStageBytes);
};

// Copies a warp's strip into a stage, a lane's pieces of 16 bytes. The warp alone reads them.
template <uint32_t kTier>
struct Weights {
  using Bytes = StripBytes<kTier>;
  static constexpr uint32_t kScaleLanes = kTileScaleBytes / 16;
  const uint8_t* codes;
  const uint8_t* fine;
  const uint8_t* scales;
  uint32_t slot;  // in a stage

  __device__ __forceinline__ Weights(const Matrix& matrix, uint64_t first_tile) {
    const uint32_t lane = threadIdx.x % 32;
    slot = kPrefillWeights + threadIdx.x / 32 * Bytes::kAll;
    codes = matrix.codes + first_tile * kTileCodeBytes + lane * 16;
    fine = matrix.fine + first_tile * Bytes::kFine + lane * 16;
    scales = matrix.scales + first_tile * kTileScaleBytes + lane * 16;
  }
  // The next tile.
  __device__ __forceinline__ void Issue(uint32_t stage) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t to = stage + slot + lane * 16;
    if (Bytes::kCodes != 0 && lane * 16 < kTileCodeBytes) ptx::CopyAsync16(to, codes);
    if (Bytes::kFine == 512 || lane * 16 + 1 <= Bytes::kFine)
      ptx::CopyAsync16(to + Bytes::kCodes, fine);
    if (lane < kScaleLanes) ptx::CopyAsync16(to + Bytes::kScales, scales);
    codes += kTileCodeBytes;
    fine += Bytes::kFine;
    scales += kTileScaleBytes;
  }
  // What the lane needs of it.
  __device__ __forceinline__ void Load(const uint8_t* stage, RawTile<kTier>* raw) const {
    const uint32_t lane = threadIdx.x % 32;
    const uint8_t* const strip = stage + slot;
    if constexpr (kTier != kTierNibbles)
      raw->codes = *reinterpret_cast<const uint2*>(strip + lane * 8);
    if constexpr (kTier == kTierNibbles)
      raw->nibbles = *reinterpret_cast<const uint4*>(strip + lane * 16);
    if constexpr (kTier == kTierQuintals) {
      raw->words = *reinterpret_cast<const uint2*>(strip + Bytes::kCodes + lane * 8);
      raw->last = *reinterpret_cast<const uint16_t*>(strip + Bytes::kCodes + 256 + lane * 2);
    }
#pragma unroll
    for (uint32_t row = 0; row < 2; ++row) {
#pragma unroll
      for (uint32_t block = 0; block < 2; ++block)
        raw->scales[row][block] = strip[Bytes::kScales + block * kStripRows + row * 8 + lane / 4];
    }
  }
};

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
  const uint32_t factors[2] = {FactorOf(scales[0]), FactorOf(scales[1])};
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i)
    a[i / 4][i % 4] = ptx::MultiplyPair(of.a[i / 4][i % 4], factors[i % 2]);
  if (__any_sync(kAllLanes, max(scales[0], scales[1]) > kNibbleScaleMax)) {
    const uint32_t further[2] = {FurtherFactorOf(scales[0]), FurtherFactorOf(scales[1])};
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      a[i / 4][i % 4] = ptx::MultiplyPair(a[i / 4][i % 4], further[i % 2]);
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
  const uint32_t lower =
      kBlock == 0 ? raw.words.y >> 8 : __funnelshift_r(raw.words.y, raw.last, 28);
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

// The strip of this warp in the matrix. Beyond the last one: that, whose rows are computed again.
__device__ __forceinline__ uint32_t StripOf(const Product& product, const Tile& tile) {
  const uint32_t warp = threadIdx.x / 32;
  if (!product.gate_up) return min(tile.rows * kStripsOfBlock + warp, product.strips - 1);
  constexpr uint32_t kHalf = kStripsOfBlock / 2;
  const uint32_t strip = min(tile.rows * kHalf + warp % kHalf, product.strips - 1);
  return strip + warp / kHalf * product.strips;
}

// Copies activations of a tile into a stage: thread i has chunk i % 8 of rows i/8, i/8 + 64, ...
template <int kColumns>
struct Gather {
  static constexpr uint32_t kRowsAtATime = kPrefillThreads / 8;
  static constexpr uint32_t kTimes = (kColumns + kRowsAtATime - 1) / kRowsAtATime;
  const uint16_t* activations;
  uint32_t rows[kTimes];
  uint32_t to;  // of the first row; the next are whole groups of eight further on

  __device__ __forceinline__ Gather(const MoeArgs& args, const PrefillArgs& prefill,
                                    const Product& product, const Tile& tile)
      : activations(product.activations) {
    const uint32_t chunk = threadIdx.x % 8, first = threadIdx.x / 8;
    to = first * kRowBytes + (chunk ^ first % 8) * 16;
#pragma unroll
    for (uint32_t i = 0; i < kTimes; ++i) {
      const uint32_t row = first + kRowsAtATime * i;
      // Rows beyond the last are computed and left alone.
      const uint32_t place = tile.begin + min(row, tile.count - 1);
      const uint32_t at = product.gate_up ? prefill.order[place] / args.top_k : place;
      rows[i] = at * product.k + 8 * chunk;
    }
  }
  __device__ __forceinline__ void Issue(uint32_t stage, uint32_t tile) const {
#pragma unroll
    for (uint32_t i = 0; i < kTimes; ++i) {
      if (kRowsAtATime * (i + 1) <= kColumns ||
          threadIdx.x / 8 + kRowsAtATime * i < static_cast<uint32_t>(kColumns))
        ptx::CopyAsync16(stage + to + i * kRowsAtATime * kRowBytes,
                         activations + rows[i] + tile * kTileColumns);
    }
  }
};

template <int kColumns>
__device__ __forceinline__ void MultiplyBlock(uint32_t stage, uint32_t block,
                                              const uint32_t (&a)[2][4],
                                              float (&acc)[kColumns / 2]) {
  ptx::WgmmaFence();
#pragma unroll
  for (uint32_t multiply = 0; multiply < 2; ++multiply)
    ptx::Wgmma<kColumns>::Multiply(acc, a[multiply],
                                   ptx::SwizzledRows(stage + (2 * block + multiply) * 32));
  ptx::WgmmaCommit();
}

// Tiles on their way ahead of the one that is multiplied; a stage is filled anew two tiles after
// it was, when the multiplies that read it are surely done.
constexpr uint32_t kAhead = kPrefillStages - 2;

// Sums of a tile, as of Wgmma.
template <int kColumns, uint32_t kTier>
__device__ __forceinline__ void MultiplyTile(const Gather<kColumns>& gather,
                                             Weights<kTier>* weights, uint32_t tiles, uint8_t* ring,
                                             float (&acc)[kColumns / 2]) {
  const uint32_t shared = ptx::SharedAddress(ring);
  const auto issue = [&](uint32_t tile, uint32_t at) {
    if (tile < tiles) {
      gather.Issue(shared + at, tile);
      weights->Issue(shared + at);
    }
    ptx::CommitCopies();
  };
#pragma unroll 1
  for (uint32_t tile = 0; tile < kAhead; ++tile) issue(tile, tile * kPrefillStageBytes);
  RawTile<kTier> raw;
  uint32_t a[2][2][4];  // [block][multiply][register]
  ptx::WaitForCopies<kAhead - 1>();
  __syncwarp();
#pragma unroll
  for (float& value : acc) value = 0;
  weights->Load(ring, &raw);
  Unpack<0>(raw, a[0]);
  uint32_t stage = 0;
#pragma unroll 1
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    // This tile and the next are there.
    ptx::WaitForCopies<kAhead - 2>();
    ptx::FenceForAsync();
    __syncthreads();
    constexpr uint32_t kRing = kPrefillStages * kPrefillStageBytes;
    constexpr uint32_t kBehind = kRing - kAhead * kPrefillStageBytes;
    issue(tile + kAhead, stage < kBehind ? stage + kRing - kBehind : stage - kBehind);
    MultiplyBlock<kColumns>(shared + stage, 0, a[0], acc);
    // The multiplies before those are done, and their registers free.
    ptx::WgmmaWait<1>();
    Unpack<1>(raw, a[1]);
    const uint32_t now = stage;
    stage = stage + kPrefillStageBytes == kRing ? 0 : stage + kPrefillStageBytes;
    weights->Load(ring + stage, &raw);
    MultiplyBlock<kColumns>(shared + now, 1, a[1], acc);
    ptx::WgmmaWait<1>();
    Unpack<0>(raw, a[0]);
  }
  ptx::WgmmaWait<0>();
  ptx::WaitForCopies<0>();
  // Nobody fills a stage anew while others still read it.
  __syncthreads();
}

// Sums in shared memory: [column][row], gate rows before up rows. Columns apart by this many
// floats, so that a warp's stores meet all banks.
constexpr uint32_t kSumStride = kRowsOfBlock + 4;
static_assert(kPrefillColumns * kSumStride * sizeof(float) <= kPrefillStages * kPrefillStageBytes);

template <int kColumns>
__device__ __forceinline__ void StoreSums(const float (&acc)[kColumns / 2], float* sums) {
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float* const to = sums + 2 * t * kSumStride + threadIdx.x / 32 * kStripRows + g;
#pragma unroll
  for (uint32_t i = 0; i < kColumns / 2; ++i)
    to[(i / 4 * 8 + i % 2) * kSumStride + i / 2 % 2 * 8] = acc[i];
}

// A thread makes two values of act at a time: rows r and r + 16, which are neighbours in memory.
__device__ __forceinline__ void FinishGateUp(const MoeArgs& args, const Product& product,
                                             const Matrix& matrix, const Tile& tile,
                                             const float* sums) {
  constexpr uint32_t kRows = kRowsOfBlock / 2, kWords = kRows / 2;
  const uint32_t word = threadIdx.x % kWords;
  // PrefillColumn of the word.
  const uint32_t multiply = word % 16 / 8, pair = word % 8 / 4, t = word % 4;
  const uint32_t row = word / 16 * kScaleBlock + 4 * t + 2 * multiply + pair;
  const uint32_t n = tile.rows * kRows + row;
  if (n >= product.strips * kStripRows) return;
  float bias[2][2] = {};
  if (matrix.bias != nullptr) {
    for (uint32_t half = 0; half < 2; ++half) {
      bias[half][0] = matrix.bias[n + 16 * half];
      bias[half][1] = matrix.bias[args.intermediate + n + 16 * half];
    }
  }
  for (uint32_t column = threadIdx.x / kWords; column < tile.count;
       column += kPrefillThreads / kWords) {
    const float* const at = sums + column * kSumStride + row;
    const uint16_t low = ToBf16(Act(args, at[0] + bias[0][0], at[kRows] + bias[0][1]));
    const uint16_t high = ToBf16(Act(args, at[16] + bias[1][0], at[kRows + 16] + bias[1][1]));
    uint32_t* const to = reinterpret_cast<uint32_t*>(
        args.inner + uint64_t{tile.begin + column} * args.intermediate + tile.rows * kRows);
    to[word] = low | uint32_t{high} << 16;
  }
}

// A thread writes four rows at a time.
__device__ __forceinline__ void FinishDown(const MoeArgs& args, const PrefillArgs& prefill,
                                           const Product& product, const Matrix& matrix,
                                           const Tile& tile, const float* sums) {
  constexpr uint32_t kQuads = kRowsOfBlock / 4;
  const uint32_t row = threadIdx.x % kQuads * 4;
  const uint32_t n = tile.rows * kRowsOfBlock + row;
  if (n >= product.strips * kStripRows) return;
  float4 bias = {0, 0, 0, 0};
  if (matrix.bias != nullptr) bias = *reinterpret_cast<const float4*>(matrix.bias + n);
  for (uint32_t column = threadIdx.x / kQuads; column < tile.count;
       column += kPrefillThreads / kQuads) {
    const float4 sum = *reinterpret_cast<const float4*>(sums + column * kSumStride + row);
    const uint64_t assignment = prefill.order[tile.begin + column];
    __stcs(reinterpret_cast<float4*>(args.results + assignment * args.hidden + n),
           float4{sum.x + bias.x, sum.y + bias.y, sum.z + bias.z, sum.w + bias.w});
  }
}

template <int kColumns, uint32_t kTier>
__device__ __forceinline__ void RunTile(const MoeArgs& args, const PrefillArgs& prefill,
                                        const Product& product, const Matrix& matrix,
                                        const Tile& tile, uint8_t* ring) {
  const uint32_t tiles = product.k / static_cast<uint32_t>(kTileColumns);
  Weights<kTier> weights(matrix, uint64_t{StripOf(product, tile)} * tiles);
  const Gather<kColumns> gather(args, prefill, product, tile);
  float acc[kColumns / 2];
  MultiplyTile<kColumns, kTier>(gather, &weights, tiles, ring, acc);
  float* const sums = reinterpret_cast<float*>(ring);
  StoreSums<kColumns>(acc, sums);
  __syncthreads();
  if (product.gate_up)
    FinishGateUp(args, product, matrix, tile, sums);
  else
    FinishDown(args, prefill, product, matrix, tile, sums);
}

template <uint32_t kTier>
__device__ __forceinline__ void RunTileOf(const MoeArgs& args, const PrefillArgs& prefill,
                                          const Product& product, const Matrix& matrix,
                                          const Tile& tile, uint8_t* ring) {
  if (tile.count <= 32) return RunTile<32, kTier>(args, prefill, product, matrix, tile, ring);
  if (tile.count <= 64) return RunTile<64, kTier>(args, prefill, product, matrix, tile, ring);
  if (tile.count <= 96) return RunTile<96, kTier>(args, prefill, product, matrix, tile, ring);
  RunTile<kPrefillColumns, kTier>(args, prefill, product, matrix, tile, ring);
}

// What was refused must not look like a result.
__device__ __forceinline__ void StoreMissing(const MoeArgs& args, const PrefillArgs& prefill,
                                             const Tile& tile) {
  for (uint32_t column = 0; column < tile.count; ++column) {
    float* const row = args.results + uint64_t{prefill.order[tile.begin + column]} * args.hidden;
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
                                       const Shared& shared, uint32_t index) {
  const uint32_t run = index / shared.row_tiles;
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
  return {low, first, last - first, index - run * shared.row_tiles};
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
  if (threadIdx.x == 0) {
    const uint32_t strips_of_tile = gate_up ? kStripsOfBlock / 2 : kStripsOfBlock;
    shared.row_tiles = (product.strips + strips_of_tile - 1) / strips_of_tile;
    shared.count = shared.tiles_before[args.experts] * shared.row_tiles;
  }
  __syncthreads();
  uint8_t* const ring = memory + (1024 - ptx::SharedAddress(memory) % 1024) % 1024;
  for (uint32_t index = blockIdx.x; index < shared.count; index += gridDim.x) {
    if (threadIdx.x == 0) {
      shared.tile = TileAt(args, prefill, shared, index);
      shared.matrix = MatrixOf(args, shared.tile.expert, gate_up);
    }
    __syncthreads();
    if (shared.matrix.tier == kTier)
      RunTileOf<kTier>(args, prefill, product, shared.matrix, shared.tile, ring);
    else if (shared.matrix.tier == kTierMissing && !gate_up && shared.tile.rows == 0)
      StoreMissing(args, prefill, shared.tile);
    __syncthreads();
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
