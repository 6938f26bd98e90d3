// Tensor-parallel slices of planes: what one of W ranks holds of an expert.
//
// With I the intermediate and H the hidden size, I / W a multiple of 64, rank r keeps
//   w13 [2I, H]   rows r*I/W to (r+1)*I/W of gate, then the same rows of up:  [2I/W, H]
//   w2  [H, I]    columns r*I/W to (r+1)*I/W:                                 [H, I/W]
// In plane order a matrix is cut into tiles of 16 rows by 64 columns that run along the columns
// first, and every plane (codes 256 bytes, nibbles 512, quintals 320, scales 32 to a tile) is the
// sequence of its tiles. So a slice of rows is one run of bytes, a slice of columns one run of each
// strip of 16 rows, and slices of any plane are planes of the slice: nothing inside a tile moves.
// bias13 [2I], float32, is cut like rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace hotplane {

struct Shard {
  uint32_t rank = 0;
  uint32_t world = 1;
};

// One rank's slice of a plane of w13, or of bias13. `slice` has whole.size() / world bytes.
void SliceGateUp(std::span<const std::byte> whole, Shard shard, std::span<std::byte> slice);

// One rank's slice of a plane of w2, whose rows are `hidden`. `slice` has whole.size() / world
// bytes.
void SliceDown(std::span<const std::byte> whole, size_t hidden, Shard shard,
               std::span<std::byte> slice);

}  // namespace hotplane
