// What one rank keeps of a matrix, by the definition and element by element: a second opinion on
// slices of planes. Not for use outside tests.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "quant/oracle.h"
#include "quant/slice.h"

namespace hotplane::oracle {

// Rows and columns of a rank's slice, as indexes into the whole matrix.
struct Kept {
  std::vector<size_t> rows, columns;
};

inline std::vector<size_t> Range(size_t begin, size_t end) {
  std::vector<size_t> range;
  for (size_t i = begin; i < end; ++i) range.push_back(i);
  return range;
}

// By the definition: rows r*I/W.. of gate, the same of up; all columns.
inline Kept KeptOfW13(size_t intermediate, size_t hidden, Shard shard) {
  const size_t share = intermediate / shard.world;
  Kept kept = {Range(shard.rank * share, (shard.rank + 1) * share), Range(0, hidden)};
  for (const size_t row : Range(shard.rank * share, (shard.rank + 1) * share))
    kept.rows.push_back(intermediate + row);
  return kept;
}

inline Kept KeptOfW2(size_t intermediate, size_t hidden, Shard shard) {
  const size_t share = intermediate / shard.world;
  return {Range(0, hidden), Range(shard.rank * share, (shard.rank + 1) * share)};
}

// Of each element its code, its nibble (of the nibble plane, and merged from code and quintal) and
// its scale: one byte for each, row-major.
struct Elements {
  Bytes codes, nibbles, merged, scales;
};

inline Elements Unpack(const Planes& planes, size_t n, size_t k) {
  const Kernels& kernels = *AvailableKernels().back();
  const auto expand = [&](const Bytes& plane) {
    Bytes packed(n * k / 2), nibbles(n * k);
    kernels.unpack_nibbles(plane.data(), n, k, packed.data());
    for (size_t i = 0; i < n * k; ++i) nibbles[i] = packed[i / 2] >> (4 * (i % 2)) & std::byte{15};
    return nibbles;
  };
  Elements elements;
  elements.codes.resize(n * k);
  kernels.unpack_codes(planes.codes.data(), n, k, elements.codes.data());
  elements.nibbles = expand(planes.nibbles);
  Bytes merged(n * k / 2);
  EXPECT_TRUE(kernels.merge(planes.codes.data(), planes.quintals.data(), n, k, merged.data()));
  elements.merged = expand(merged);
  Bytes scales(n * k / 32);
  kernels.unpack_scales(planes.scales.data(), n, k, scales.data());
  for (size_t i = 0; i < n * k; ++i) elements.scales.push_back(scales[i / 32]);
  return elements;
}

inline Bytes Take(const Bytes& elements, size_t k, const Kept& kept) {
  Bytes taken;
  for (const size_t row : kept.rows)
    for (const size_t column : kept.columns) taken.push_back(elements[row * k + column]);
  return taken;
}

// `whole` has k columns.
inline void ExpectSlice(const Elements& whole, size_t k, const Kept& kept, const Elements& slice) {
  EXPECT_TRUE(slice.codes == Take(whole.codes, k, kept));
  EXPECT_TRUE(slice.nibbles == Take(whole.nibbles, k, kept));
  EXPECT_TRUE(slice.merged == Take(whole.merged, k, kept));
  EXPECT_TRUE(slice.scales == Take(whole.scales, k, kept));
}

}  // namespace hotplane::oracle
