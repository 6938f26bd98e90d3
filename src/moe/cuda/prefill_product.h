// The products of a prefill, grouped by expert, whatever multiplies: which tiles there are, how
// activations come into shared memory and how sums leave it.
//
// A block's tile is Block::kRows weight rows (half of them of gate and the other their rows of up,
// or all of down) by up to Block::kColumns assignments of an expert.
#pragma once

#include "format/tsym4.h"
#include "moe/cuda/expert_matrix.h"
#include "moe/cuda/finish.h"
#include "moe/cuda/fragments.h"
#include "moe/cuda/ptx.h"

namespace hotplane::moe_cuda {

// The shape of a kernel's blocks.
template <uint32_t kThreadsOfBlock, uint32_t kStripsOfBlock, uint32_t kColumnsOfBlock>
struct PrefillBlock {
  static constexpr uint32_t kThreads = kThreadsOfBlock;
  static constexpr uint32_t kStrips = kStripsOfBlock;
  static constexpr uint32_t kRows = kStrips * kStripRows;
  static constexpr uint32_t kColumns = kColumnsOfBlock;
  // Sums in shared memory: [column][row], gate rows before up rows. Columns apart by this many
  // floats, so that a warp's stores meet all banks.
  static constexpr uint32_t kSumStride = kRows + 4;
};

constexpr uint32_t kRowBytes = 128;  // 64 of k in bfloat16

// A tile of a product.
struct Tile {
  uint32_t expert;
  uint32_t begin;  // in `order`
  uint32_t count;  // of assignments, 1 to Block::kColumns
  uint32_t rows;   // which run of weight rows
};

// A product of the call.
struct Product {
  bool gate_up;
  uint32_t k;
  uint32_t strips;  // of gate, or of down
};

// Behind the ring, where its address is at hand.
struct BehindRing {
  QuintalConstants constants;
  uint64_t barrier;  // the kernel's
};
static_assert(sizeof(BehindRing) <= kPrefillBehindRingBytes);

// What all threads know, and no register should hold.
template <typename Block>
struct ProductShared {
  Product product;
  Tile tile;
  Matrix matrix;
  uint32_t row_tiles;
  uint32_t count;  // of tiles
  uint16_t tiles_before[kDecodeExpertsMax + 1];
  uint32_t sums[Block::kThreads / 32];
};

// Where a strip of the block is in the matrix. Beyond the last one: that, whose rows are computed
// again.
template <typename Block>
__device__ __forceinline__ uint32_t StripOf(const Product& product, const Tile& tile,
                                            uint32_t of_block) {
  if (!product.gate_up) return min(tile.rows * Block::kStrips + of_block, product.strips - 1);
  constexpr uint32_t kHalf = Block::kStrips / 2;
  const uint32_t strip = min(tile.rows * kHalf + of_block % kHalf, product.strips - 1);
  return strip + of_block / kHalf * product.strips;
}

// Copies activations of a tile into a stage, up to kColumns rows of 128 bytes, chunk c of row n at
// c ^ (n % 8): thread i has chunk i % 8 of rows i/8, i/8 + kRowsAtATime, ...
template <typename Block, int kColumns>
struct Gather {
  static constexpr uint32_t kRowsAtATime = Block::kThreads / 8;
  static constexpr uint32_t kTimes = (kColumns + kRowsAtATime - 1) / kRowsAtATime;
  const uint16_t* activations;  // of the next tile
  uint32_t rows[kTimes];
  uint32_t to;  // of the first row; the next are whole groups of eight further on

  __device__ __forceinline__ Gather(const MoeArgs& args, const PrefillArgs& prefill,
                                    const Product& product, const Tile& tile)
      : activations(product.gate_up ? prefill.x : args.inner) {
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
  // The next tile.
  __device__ __forceinline__ void Issue(uint32_t stage) {
#pragma unroll
    for (uint32_t i = 0; i < kTimes; ++i) {
      if (kRowsAtATime * (i + 1) <= kColumns ||
          threadIdx.x / 8 + kRowsAtATime * i < static_cast<uint32_t>(kColumns))
        ptx::CopyAsync16(stage + to + i * kRowsAtATime * kRowBytes, activations + rows[i]);
    }
    activations += kTileColumns;
  }
};

// A thread makes two values of act at a time: rows r and r + 16, which are neighbours in memory.
template <typename Block>
__device__ __forceinline__ void FinishGateUp(const MoeArgs& args, const Product& product,
                                             const Matrix& matrix, const Tile& tile,
                                             const float* sums) {
  constexpr uint32_t kRows = Block::kRows / 2, kWords = kRows / 2;
  const uint32_t word = threadIdx.x % kWords;
  const uint32_t row = word / 16 * kScaleBlock + PrefillColumn(word % 16);
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
       column += Block::kThreads / kWords) {
    const float* const at = sums + column * Block::kSumStride + row;
    const uint16_t low = ToBf16(Act(args, at[0] + bias[0][0], at[kRows] + bias[0][1]));
    const uint16_t high = ToBf16(Act(args, at[16] + bias[1][0], at[kRows + 16] + bias[1][1]));
    uint32_t* const to = reinterpret_cast<uint32_t*>(
        args.inner + uint64_t{tile.begin + column} * args.intermediate + tile.rows * kRows);
    to[word] = low | uint32_t{high} << 16;
  }
}

// A thread writes four rows at a time.
template <typename Block>
__device__ __forceinline__ void FinishDown(const MoeArgs& args, const PrefillArgs& prefill,
                                           const Product& product, const Matrix& matrix,
                                           const Tile& tile, const float* sums) {
  constexpr uint32_t kQuads = Block::kRows / 4;
  const uint32_t row = threadIdx.x % kQuads * 4;
  const uint32_t n = tile.rows * Block::kRows + row;
  if (n >= product.strips * kStripRows) return;
  float4 bias = {0, 0, 0, 0};
  if (matrix.bias != nullptr) bias = *reinterpret_cast<const float4*>(matrix.bias + n);
  for (uint32_t column = threadIdx.x / kQuads; column < tile.count;
       column += Block::kThreads / kQuads) {
    const float4 sum = *reinterpret_cast<const float4*>(sums + column * Block::kSumStride + row);
    const uint64_t assignment = prefill.order[tile.begin + column];
    __stcs(reinterpret_cast<float4*>(args.results + assignment * args.hidden + n),
           float4{sum.x + bias.x, sum.y + bias.y, sum.z + bias.z, sum.w + bias.w});
  }
}

__device__ __forceinline__ void StoreMissing(const MoeArgs& args, const PrefillArgs& prefill,
                                             const Tile& tile) {
  for (uint32_t column = 0; column < tile.count; ++column) {
    float* const row = args.results + uint64_t{prefill.order[tile.begin + column]} * args.hidden;
    for (uint32_t n = threadIdx.x; n < args.hidden; n += blockDim.x) row[n] = NotComputed();
  }
}

template <typename Block>
__device__ __forceinline__ uint32_t TilesOf(uint32_t assignments) {
  return (assignments + Block::kColumns - 1) / Block::kColumns;
}

// Runs of columns before each expert's, all of them last. By all threads.
template <typename Block>
__device__ __forceinline__ void CountTiles(const MoeArgs& args, const PrefillArgs& prefill,
                                           ProductShared<Block>* shared) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t before = 0;
  for (uint32_t first = 0; first < args.experts; first += blockDim.x) {
    const uint32_t expert = first + threadIdx.x;
    const uint32_t own = expert < args.experts
                             ? TilesOf<Block>(prefill.begin[expert + 1] - prefill.begin[expert])
                             : 0;
    uint32_t sum = SumUpTo(own, lane);
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

template <typename Block>
__device__ __forceinline__ Tile TileAt(const MoeArgs& args, const PrefillArgs& prefill,
                                       const ProductShared<Block>& shared, uint32_t index) {
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
  const uint32_t runs = TilesOf<Block>(end - begin), at = run - shared.tiles_before[low];
  // As even as they can be.
  const uint64_t count = end - begin;
  const auto first = static_cast<uint32_t>(begin + count * at / runs);
  const auto last = static_cast<uint32_t>(begin + count * (at + 1) / runs);
  return {low, first, last - first, index - run * shared.row_tiles};
}

// The tiles of experts of one tier; the others are another launch's. Kernel has
//   Block          its shape
//   kAlign         of its shared memory
//   kRingBytes     of that
//   RunTile<tier>  what a block does for a tile
template <typename Kernel, uint32_t kTier>
__device__ __forceinline__ void RunProduct(const MoeArgs& args, const PrefillArgs& prefill,
                                           bool gate_up) {
  using Block = typename Kernel::Block;
  extern __shared__ uint8_t memory[];
  __shared__ ProductShared<Block> shared;
  constexpr uint32_t kAlign = Kernel::kAlign;
  uint8_t* const ring = memory + (kAlign - ptx::SharedAddress(memory) % kAlign) % kAlign;
  CountTiles<Block>(args, prefill, &shared);
  if (threadIdx.x == 0) {
    constexpr uint32_t kRows = kStripRows;
    const uint32_t strips = (gate_up ? args.intermediate : args.hidden) / kRows;
    reinterpret_cast<BehindRing*>(ring + Kernel::kRingBytes)->constants = kQuintalConstants;
    shared.product = {gate_up, gate_up ? args.hidden : args.intermediate, strips};
    const uint32_t strips_of_tile = gate_up ? Block::kStrips / 2 : Block::kStrips;
    shared.row_tiles = (strips + strips_of_tile - 1) / strips_of_tile;
    shared.count = shared.tiles_before[args.experts] * shared.row_tiles;
  }
  __syncthreads();
  for (uint32_t index = blockIdx.x; index < shared.count; index += gridDim.x) {
    if (threadIdx.x == 0) {
      shared.tile = TileAt<Block>(args, prefill, shared, index);
      shared.matrix = MatrixOf(args, shared.tile.expert, gate_up);
    }
    __syncthreads();
    if (shared.matrix.tier == kTier)
      Kernel::template RunTile<kTier>(args, prefill, shared.product, shared.matrix, shared.tile,
                                      ring);
    else if (shared.matrix.tier == kTierMissing && !gate_up && shared.tile.rows == 0)
      StoreMissing(args, prefill, shared.tile);
    __syncthreads();
  }
}

}  // namespace hotplane::moe_cuda
