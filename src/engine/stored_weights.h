// An expert's weights as the store has them: codes, nibbles and block exponents by row and column,
// of all ranks together. Every byte is verified by the read that brings it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/record_reader.h"
#include "format/kinds.h"
#include "quant/quantize.h"
#include "store/store.h"

namespace hotplane {

// One projection [n, k], row-major, one element per byte. A base weight is the code's value, an FP4
// weight the nibble's, both times 2^(scale - 127).
struct StoredMatrix {
  size_t n = 0;
  size_t k = 0;
  std::vector<uint8_t> codes;    // [n, k], 0..3
  std::vector<uint8_t> nibbles;  // [n, k], 0..15; empty when not asked for
  std::vector<uint8_t> scales;   // [n, k / 32], e8m0
};

// By Projection. Reused from read to read.
struct StoredExpert {
  std::array<StoredMatrix, kProjectionCount> projections;

 private:
  friend class StoredWeights;
  std::vector<std::byte> record_;
  std::vector<std::byte> strip_;
};

// Thread-safe, with one StoredExpert per thread. `generation` outlives it.
class StoredWeights {
 public:
  StoredWeights(const Generation& generation, const Kernels& kernels);

  // Nothing when the layer's base (`fp4`: and an encoding of its delta) is there for every rank;
  // else what is missing: "no base tier of rank 1". kData, kSystem for a file that is there and
  // must not be used. Both need the base: it holds the block exponents.
  Result<std::optional<std::string>> FindMissing(uint32_t layer, bool fp4) const;

  // Codes and scales, with `fp4` nibbles too, whatever encoding they are stored in. Errors as
  // RecordReader::Read.
  Result<void> Read(ExpertKey key, bool fp4, StoredExpert& expert) const;

  LayerGeometry geometry(uint32_t layer) const;  // of the whole layer
  uint64_t bytes_read() const;                   // from layer files

 private:
  struct Place;
  void TakeBase(const Place& place, StoredExpert& expert) const;
  void TakeNibbles(const Place& place, StoredExpert& expert) const;

  const Generation& generation_;
  const Kernels& kernels_;
  std::vector<std::unique_ptr<const Generation>> ranks_;
  std::vector<std::unique_ptr<RecordReader>> readers_;  // by rank
};

}  // namespace hotplane
