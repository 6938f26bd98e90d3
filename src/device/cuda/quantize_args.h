// What the quantization kernels are launched with; one source for kernel and host.
#pragma once

#include "device/quantize_tile.h"

namespace hotplane {

// A warp takes a tile.
inline constexpr unsigned kQuantizeThreads = 128;
inline constexpr unsigned kQuantizeWarps = kQuantizeThreads / tile::kThreads;
// Thread blocks of a launch at most: more warps than any GPU holds at once.
inline constexpr unsigned kQuantizeBlocksMax = 2048;

// (tile::Source, tile::Counts*): one of the counts, in pinned host memory, by each thread block.
inline constexpr char kCountKernelName[] = "hotplane_count";
// (tile::Source, tile::Planes, const double* thresholds, uint32_t alternate_zeros).
inline constexpr char kQuantizeKernelName[] = "hotplane_quantize";

}  // namespace hotplane
