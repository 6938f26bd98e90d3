// Quantization and its inverses on memory. Every function works on whole strips of 16 rows of one
// [n, k] matrix (n % 16 == 0, k % 64 == 0: REQUIRES, checked by the caller against outside data
// with CheckPlaneShape), so that a caller can stream a matrix strip by strip.
//
// Hardware variants are values: one Kernels table per instruction set, all giving the same bytes.
// Thread-safe: the tables are immutable and the functions have no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "base/status.h"
#include "format/kinds.h"
#include "format/tsym4.h"

namespace hotplane {

// Bytes of one element row of k elements, scales not included.
size_t SourceRowBytes(SourceFormat format, size_t k);

// What quantized strips are written to. A null pointer means that plane is not wanted. Sizes are
// those of tsym4.h for the [n, k] given; strip s of 16 rows starts at s/strip_count of each plane.
struct PlaneOutputs {
  std::byte* codes = nullptr;
  std::byte* scales = nullptr;
  std::byte* nibbles = nullptr;
  std::byte* quintals = nullptr;
};

// The scales of NVFP4 are one e4m3 byte for 16 consecutive elements of a row.
inline constexpr size_t kNvfp4Block = 16;

// An NVFP4 matrix [n, k], row-major: e2m1 nibbles [n, k/2] (low nibble = even k), e4m3 scales
// [n, k/16]. A weight is nibble * scale * global_scale, or, with `divide`, nibble * scale /
// global_scale. The values are taken exactly.
struct Nvfp4Matrix {
  const std::byte* nibbles = nullptr;
  const std::byte* scales = nullptr;
  double global_scale = 1;  // a float32, positive and finite
  bool divide = false;
};

// An FP8 matrix [n, k], row-major: e4m3 elements and one scale per block of block_rows x
// block_columns, [ceil(n/block_rows), ceil(k/block_columns)]. A weight is element * scale, taken
// exactly.
struct Fp8Matrix {
  const std::byte* elements = nullptr;
  const double* scales = nullptr;  // float32 values, finite, not negative
  size_t block_rows = 128;
  size_t block_columns = 128;
};

// Signs of the source values of a matrix that are equal to zero, and whether all values are finite.
struct ZeroCount {
  uint64_t positive = 0;
  uint64_t negative = 0;
  bool finite = true;
};
// The rule of `auto`: alternate when more than 95% of the exact zeros have one sign.
bool ZerosAlternate(ZeroMode mode, const ZeroCount& count);

enum class Isa : uint8_t { kInvalid = 0, kScalar, kAvx2, kAvx512 };

struct Kernels {
  Isa isa;
  const char* name;  // "scalar", "avx2", "avx512"

  // MXFP4 strips: nibbles [n, k/2] and e8m0 scales [n, k/32], row-major, to planes, verbatim. False
  // when a scale is 255 (the planes' content is then unspecified).
  bool (*pack_mxfp4)(const std::byte* nibbles, const std::byte* scales, size_t n, size_t k,
                     const PlaneOutputs& out);

  // BF16, F16 or F32 elements [n, k], row-major, requantized by the float64 rule of
  // docs/format/planes.md (bit-exact whatever arithmetic gets there). Exact zeros get sign (k odd)
  // when `alternate_zeros`, else keep theirs. REQUIRES: all values finite (count_zeros tells).
  void (*quantize)(SourceFormat format, const std::byte* elements, size_t n, size_t k,
                   bool alternate_zeros, const PlaneOutputs& out);

  // Zeros and finiteness of `count` elements of kBf16, kF16 or kF32.
  ZeroCount (*count_zeros)(SourceFormat format, const std::byte* elements, size_t count);

  // NVFP4 and FP8 matrices, requantized by the same rule. REQUIRES what count_zeros_nvfp4 and
  // count_zeros_fp8 call finite.
  void (*quantize_nvfp4)(const Nvfp4Matrix& matrix, size_t n, size_t k, bool alternate_zeros,
                         const PlaneOutputs& out);
  void (*quantize_fp8)(const Fp8Matrix& matrix, size_t n, size_t k, bool alternate_zeros,
                       const PlaneOutputs& out);
  // Elements of a block whose scale is 0 are zeros with the element's sign. Finite: no scale of an
  // NVFP4 block is NaN or has a sign bit; no element of an FP8 matrix is NaN. `count` is a multiple
  // of 16.
  ZeroCount (*count_zeros_nvfp4)(const std::byte* nibbles, const std::byte* scales, size_t count);
  ZeroCount (*count_zeros_fp8)(const Fp8Matrix& matrix, size_t n, size_t k);

  // Inverses. `n`, `k` as above; planes of whole strips.
  void (*unpack_nibbles)(const std::byte* nibble_plane, size_t n, size_t k, std::byte* nibbles);
  void (*unpack_scales)(const std::byte* scale_plane, size_t n, size_t k, std::byte* scales);
  // codes[n*k]: one code 0..3 per byte, row-major.
  void (*unpack_codes)(const std::byte* code_plane, size_t n, size_t k, std::byte* codes);
  // The code plane that belongs to a nibble plane.
  void (*derive_codes)(const std::byte* nibble_plane, size_t n, size_t k, std::byte* code_plane);
  // The quintal plane that belongs to a nibble plane.
  void (*derive_quintals)(const std::byte* nibble_plane, size_t n, size_t k,
                          std::byte* quintal_plane);
  // Base codes and quintals give the exact nibble plane. False when a quintal word is out of range
  // or does not fit its code (digit above 2 beside a code of +-4): data that no packer writes.
  bool (*merge)(const std::byte* code_plane, const std::byte* quintal_plane, size_t n, size_t k,
                std::byte* nibble_plane);
};

// The variants this build has and this CPU can run, best first; the scalar one is always there.
std::span<const Kernels* const> AvailableKernels();
// The best one, or the one that `forced_name` names (the CLI passes HOTPLANE_ISA). kUsage when that
// is unknown or cannot run here.
Result<const Kernels*> SelectKernels(std::optional<std::string_view> forced_name);

// kData when n % 16 or k % 64 is not 0 or either is 0; `what` names the matrix.
Result<void> CheckPlaneShape(uint64_t n, uint64_t k, std::string_view what);

}  // namespace hotplane
