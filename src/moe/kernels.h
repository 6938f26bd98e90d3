// The inner loops of the operator, one table per instruction set: variants are values, listable and
// forcible, and agree to the bit. A kernel multiplies one strip, 16 rows of a matrix [n, k], with
// the activations of some tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "base/status.h"
#include "format/tsym4.h"
#include "quant/quantize.h"

namespace hotplane {

// How a strip's elements are written.
enum class StripFormat : uint8_t { kCodes = 0, kNibbles = 1 };
inline constexpr size_t kStripFormats = 2;

// Levels are integers in the fast arithmetic: the value times `multiplier` plus `offset` is not
// negative, so that unsigned-by-signed products can be used; offset * sum(activations) is taken off
// again in the integer sum of the block.
struct LevelForm {
  int multiplier;
  int offset;
};
inline constexpr LevelForm kLevelForms[kStripFormats] = {{1, 4}, {2, 12}};
// 32 products of a level of at most 24 and an activation of at most 127, and the correction, stay
// far inside int32.
static_assert(32 * 24 * 127 + 32 * 12 * 127 < (1 << 30));

// One token's activations in int8: x[i] ~ values[ValuePlace(i)] * scales[i/32]. The bytes of a
// strip hold columns 4t to 4t+3 of 16; the same bits of four bytes are columns 4 apart. So every 16
// values are a transposed square, column 4t + j at place 4j + t.
constexpr size_t ValuePlace(size_t column) {
  return column / 16 * 16 + column % 4 * 4 + column % 16 / 4;
}
struct QuantizedRow {
  const int8_t* values = nullptr;  // [k], -127..127
  const float* scales = nullptr;   // [k/32]
  const int32_t* starts =
      nullptr;  // [k/32]: -offset * sum of the block's values, of the strip's form
};

struct MoeKernels {
  Isa isa;
  const char* name;  // "scalar", "avx2", "avx512"

  // `elements` and `scales` of `strips` strips, one after the other, in plane order;
  // out[(strip*count + i)*16 + row] is row's product with rows[i], i < count. Per row, in this
  // order: block sums are exact integers s; then acc = fma(float(s), scale * rows[i].scales[block],
  // acc), block by block from 0.
  using Fast = void (*)(const std::byte* elements, const std::byte* scales, size_t k, size_t strips,
                        const QuantizedRow* rows, size_t count, float* out);
  // The same with float32 rows [k]. Per row and block of 32: two chains of fma over its halves of
  // 16, k ascending from 0; their sum s; then acc = fma(s, scale, acc).
  using Exact = void (*)(const std::byte* elements, const std::byte* scales, size_t k,
                         size_t strips, const float* const* rows, size_t count, float* out);
  Fast fast[kStripFormats];
  Exact exact[kStripFormats];
};

// The variants that this build has and this CPU can run, best first; the scalar one is always
// there.
std::span<const MoeKernels* const> AvailableMoeKernels();
// The best one, or the one that `forced_name` names; kUsage when that is unknown or cannot run
// here.
Result<const MoeKernels*> SelectMoeKernels(std::optional<std::string_view> forced_name);

}  // namespace hotplane
