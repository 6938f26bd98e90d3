// Who turns one matrix of a checkpoint into planes: the CPU, or a device with memory of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "format/kinds.h"

namespace hotplane {

// A matrix [n, k] in host memory, row-major, as docs/format/planes.md names its formats; n % 16 ==
// 0, k % 64 == 0.
struct MatrixSource {
  SourceFormat format = SourceFormat::kInvalid;
  size_t n = 0;
  size_t k = 0;
  std::span<const std::byte> elements = {};
  std::span<const std::byte> scales = {};     // of kMxfp4 and kNvfp4
  std::span<const double> block_scales = {};  // of kFp8: finite, not negative
  size_t block_rows = 0;                      // of kFp8
  size_t block_columns = 0;
  double global_scale = 1;  // of kNvfp4: positive, finite
  bool divide = false;      // of kNvfp4: by the global scale
};

// Host memory for the planes (sizes of format/tsym4.h); null: not wanted.
struct MatrixPlanes {
  std::byte* codes = nullptr;
  std::byte* scales = nullptr;
  std::byte* nibbles = nullptr;
  std::byte* quintals = nullptr;
  // Memory of the quantizer's own device, aligned to 16 bytes, where it leaves codes and scales as
  // well; null: nowhere. Of the CPU's quantizer always null.
  std::byte* device_codes = nullptr;
  std::byte* device_scales = nullptr;
};

// Values that equal 0, by sign (not counted of kMxfp4, whose nibbles stay as they are); `usable`:
// no value and no scale is NaN or infinite, and no scale has a sign.
struct MatrixCounts {
  uint64_t positive_zeros = 0;
  uint64_t negative_zeros = 0;
  bool usable = true;
};

// One matrix after the other: Load, then Quantize. Not thread-safe.
class MatrixQuantizer {
 public:
  virtual ~MatrixQuantizer() = default;
  // The source's memory stays as it is until Quantize returned.
  virtual Result<MatrixCounts> Load(const MatrixSource& source) = 0;
  // The loaded matrix, as the scalar kernels of src/quant make it, to the byte. REQUIRES a usable
  // one.
  virtual Result<void> Quantize(bool alternate_zeros, const MatrixPlanes& planes) = 0;
};

}  // namespace hotplane
