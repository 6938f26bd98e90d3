// The definition, element by element.
#include <bit>
#include <cmath>

#include "moe/cpu/kernel_tables.h"

namespace hotplane {
namespace {

// The element of a tile at row n (0..15) and column k (0..63); docs/format/planes.md.
template <StripFormat kFormat>
unsigned Element(const std::byte* tile, size_t n, size_t k) {
  const size_t lane = n % 8 * 4 + k % 16 / 4;
  const size_t word = n / 8 * 4 + k / 16;  // tile*4 + k32*2 + half
  const size_t j = k % 4;
  if constexpr (kFormat == StripFormat::kCodes) {
    return std::to_integer<unsigned>(tile[lane * 8 + word]) >> (2 * j) & 3;
  } else {
    return std::to_integer<unsigned>(tile[lane * 16 + word * 2 + j / 2]) >> (4 * (j % 2)) & 15;
  }
}

template <StripFormat kFormat>
constexpr size_t kTileBytes = kFormat == StripFormat::kCodes ? kTileCodeBytes : kTileNibbleBytes;

template <StripFormat kFormat>
float Level(unsigned element) {
  return kFormat == StripFormat::kCodes ? kCodeLevels[element] : kNibbleLevels[element];
}

float Scale(std::byte byte) {
  const uint32_t bits = std::to_integer<uint32_t>(byte) << 23;
  return std::bit_cast<float>(bits < kSmallestScaleBits ? kSmallestScaleBits : bits);
}

template <StripFormat kFormat>
void FastStrip(const std::byte* elements, const std::byte* scales, size_t k,
               const QuantizedRow* rows, size_t count, float* out) {
  constexpr float kUnit = 1.0f / kLevelForms[static_cast<size_t>(kFormat)].multiplier;
  for (size_t i = 0; i < count; ++i) {
    for (size_t n = 0; n < kStripRows; ++n) {
      float sum = 0;
      for (size_t block = 0; block < k / kScaleBlock; ++block) {
        const std::byte* tile = elements + block / 2 * kTileBytes<kFormat>;
        int32_t products = rows[i].starts[block];
        for (size_t c = 0; c < kScaleBlock; ++c) {
          const unsigned element = Element<kFormat>(tile, n, block % 2 * kScaleBlock + c);
          products +=
              UnsignedLevel(kFormat, element) * rows[i].values[ValuePlace(block * kScaleBlock + c)];
        }
        const float scale = Scale(scales[block * kStripRows + n]) * kUnit;
        sum = std::fma(static_cast<float>(products), scale * rows[i].scales[block], sum);
      }
      out[i * kStripRows + n] = sum;
    }
  }
}

template <StripFormat kFormat>
void ExactStrip(const std::byte* elements, const std::byte* scales, size_t k,
                const float* const* rows, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) {
    for (size_t n = 0; n < kStripRows; ++n) {
      float sum = 0;
      for (size_t block = 0; block < k / kScaleBlock; ++block) {
        const std::byte* tile = elements + block / 2 * kTileBytes<kFormat>;
        float halves[2] = {0, 0};
        for (size_t c = 0; c < kScaleBlock; ++c) {
          const unsigned element = Element<kFormat>(tile, n, block % 2 * kScaleBlock + c);
          float& half = halves[c / 16];
          half = std::fma(Level<kFormat>(element), rows[i][block * kScaleBlock + c], half);
        }
        sum = std::fma(halves[0] + halves[1], Scale(scales[block * kStripRows + n]), sum);
      }
      out[i * kStripRows + n] = sum;
    }
  }
}

template <StripFormat kFormat>
void Fast(const std::byte* elements, const std::byte* scales, size_t k, size_t strips,
          const QuantizedRow* rows, size_t count, float* out) {
  for (size_t s = 0; s < strips; ++s)
    FastStrip<kFormat>(elements + s * (k / kTileColumns) * kTileBytes<kFormat>,
                       scales + s * ScalePlaneBytes(kStripRows, k), k, rows, count,
                       out + s * count * kStripRows);
}

template <StripFormat kFormat>
void Exact(const std::byte* elements, const std::byte* scales, size_t k, size_t strips,
           const float* const* rows, size_t count, float* out) {
  for (size_t s = 0; s < strips; ++s)
    ExactStrip<kFormat>(elements + s * (k / kTileColumns) * kTileBytes<kFormat>,
                        scales + s * ScalePlaneBytes(kStripRows, k), k, rows, count,
                        out + s * count * kStripRows);
}

}  // namespace

const MoeKernels kScalarMoeKernels = {
    .isa = Isa::kScalar,
    .name = "scalar",
    .fast = {Fast<StripFormat::kCodes>, Fast<StripFormat::kNibbles>},
    .exact = {Exact<StripFormat::kCodes>, Exact<StripFormat::kNibbles>},
};

}  // namespace hotplane
