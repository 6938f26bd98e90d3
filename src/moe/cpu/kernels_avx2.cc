// AVX2 with FMA. A tile is first transposed into the first-level cache, so that a lane of 32 bits
// is a row, with one byte of each t; shifting a lane brings another j to the low bits of its bytes.
#include <immintrin.h>

#include "moe/cpu/kernel_tables.h"

namespace hotplane {
namespace {

template <StripFormat kFormat>
constexpr size_t kTileBytes = kFormat == StripFormat::kCodes ? kTileCodeBytes : kTileNibbleBytes;
// By k32, half and j1 (of nibbles; 0 of codes): for each row n one byte of each t, side by side.
template <StripFormat kFormat>
struct alignas(32) TileBytes {
  static constexpr size_t kParts = kTileBytes<kFormat> / kTileCodeBytes;
  uint32_t of[2][2][kParts][kStripRows];
};

inline __m256i Load(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
inline __m128i LoadHalf(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}

// Eight rows of eight lanes become eight columns.
inline __attribute__((always_inline)) void TransposeLanes(__m256i (&rows)[8]) {
  __m256i pairs[8], fours[8];
  for (size_t i = 0; i < 4; ++i) {
    pairs[2 * i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    pairs[2 * i + 1] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  for (size_t side = 0; side < 2; ++side) {
    for (size_t i = 0; i < 2; ++i) {
      const __m256i low = pairs[4 * side + i];
      const __m256i high = pairs[4 * side + 2 + i];
      fours[4 * side + 2 * i] = _mm256_unpacklo_epi64(low, high);
      fours[4 * side + 2 * i + 1] = _mm256_unpackhi_epi64(low, high);
    }
  }
  for (size_t i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2x128_si256(fours[i], fours[4 + i], 0x20);
    rows[4 + i] = _mm256_permute2x128_si256(fours[i], fours[4 + i], 0x31);
  }
}

// Bytes side by side of four vectors, of the places 0-7 or 8-15.
inline __m256i Interleave(const __m128i (&of_t)[4], bool upper) {
  const __m128i low =
      upper ? _mm_unpackhi_epi8(of_t[0], of_t[1]) : _mm_unpacklo_epi8(of_t[0], of_t[1]);
  const __m128i high =
      upper ? _mm_unpackhi_epi8(of_t[2], of_t[3]) : _mm_unpacklo_epi8(of_t[2], of_t[3]);
  return _mm256_set_m128i(_mm_unpackhi_epi16(low, high), _mm_unpacklo_epi16(low, high));
}

// A row's bytes are [t][tile k32 half] of codes, [t][tile k32 half j1] of nibbles.
inline __attribute__((always_inline)) void Transpose(const std::byte* tile,
                                                     TileBytes<StripFormat::kCodes>& bytes) {
  __m256i rows[8];
  for (size_t g = 0; g < 8; ++g) {
    const __m128i low = LoadHalf(tile + g * 32);
    const __m128i high = LoadHalf(tile + g * 32 + 16);
    const __m128i of_t[4] = {low, _mm_srli_si128(low, 8), high, _mm_srli_si128(high, 8)};
    rows[g] = Interleave(of_t, false);
  }
  TransposeLanes(rows);
  for (size_t c = 0; c < 8; ++c)
    _mm256_store_si256(reinterpret_cast<__m256i*>(&bytes.of[c / 2 % 2][c % 2][0][c / 4 * 8]),
                       rows[c]);
}

inline __attribute__((always_inline)) void Transpose(const std::byte* tile,
                                                     TileBytes<StripFormat::kNibbles>& bytes) {
  for (size_t of_tile = 0; of_tile < 2; ++of_tile) {
    __m256i rows[8];
    for (size_t g = 0; g < 8; ++g) {
      const std::byte* row = tile + g * 64;
      const __m128i of_t[4] = {LoadHalf(row), LoadHalf(row + 16), LoadHalf(row + 32),
                               LoadHalf(row + 48)};
      rows[g] = Interleave(of_t, of_tile == 1);
    }
    TransposeLanes(rows);
    for (size_t c = 0; c < 8; ++c)
      _mm256_store_si256(
          reinterpret_cast<__m256i*>(&bytes.of[c / 4][c / 2 % 2][c % 2][of_tile * 8]), rows[c]);
  }
}

// Entry i is the unsigned level of the element in the low bits of i, whatever is above it.
struct alignas(16) Levels {
  uint8_t by_index[16];
};
template <StripFormat kFormat>
constexpr Levels MakeLevels() {
  Levels levels = {};
  for (unsigned i = 0; i < 16; ++i) levels.by_index[i] = UnsignedLevel(kFormat, i);
  return levels;
}
template <StripFormat kFormat>
constexpr Levels kLevels = MakeLevels<kFormat>();

// Column 4t + j of a half block, in the low bits of byte t of each row's lane.
template <StripFormat kFormat>
inline __attribute__((always_inline)) __m256i Columns(const TileBytes<kFormat>& bytes, size_t k32,
                                                      size_t half, unsigned j, size_t upper) {
  constexpr unsigned kPerByte = kFormat == StripFormat::kCodes ? 4 : 2;
  const __m256i of = Load(&bytes.of[k32][half][j / kPerByte][upper * 8]);
  return _mm256_srli_epi32(of, static_cast<int>(j % kPerByte * (8 / kPerByte)));
}

template <StripFormat kFormat>
inline __attribute__((always_inline)) __m256i ByteLevels(__m256i columns) {
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_load_si128(reinterpret_cast<const __m128i*>(&kLevels<kFormat>)));
  return _mm256_shuffle_epi8(table, _mm256_and_si256(columns, _mm256_set1_epi8(15)));
}

// Adds the four products of each lane. Levels are at most 24: pairs stay inside int16.
static_assert(2 * 24 * 127 < 32768);
__m256i AddProducts(__m256i sums, __m256i levels, __m256i values) {
  const __m256i pairs = _mm256_maddubs_epi16(levels, values);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

__m256i BroadcastWord(const void* from) {
  int32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return _mm256_set1_epi32(word);
}

__m256 ScalesOf(const std::byte* scales) {
  const __m256i bytes =
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales)));
  return _mm256_castsi256_ps(
      _mm256_max_epu32(_mm256_slli_epi32(bytes, 23), _mm256_set1_epi32(int{kSmallestScaleBits})));
}

template <StripFormat kFormat, size_t kRows>
void FastRows(const std::byte* elements, const std::byte* scales, size_t k,
              const QuantizedRow* rows, float* out) {
  constexpr float kUnit = 1.0f / kLevelForms[static_cast<size_t>(kFormat)].multiplier;
  __m256 sums[kRows][2];
  for (auto& sum : sums) sum[0] = sum[1] = _mm256_setzero_ps();
  for (size_t kb = 0; kb < k / kTileColumns; ++kb) {
    TileBytes<kFormat> bytes;
    Transpose(elements + kb * kTileBytes<kFormat>, bytes);
    for (size_t k32 = 0; k32 < 2; ++k32) {
      const size_t block = kb * 2 + k32;
      __m256i products[kRows][2];
      for (size_t i = 0; i < kRows; ++i)
        products[i][0] = products[i][1] = _mm256_set1_epi32(rows[i].starts[block]);
      for (unsigned group = 0; group < 8; ++group) {
        const unsigned j = group % 4;
        const __m256i levels[2] = {ByteLevels<kFormat>(Columns(bytes, k32, group / 4, j, 0)),
                                   ByteLevels<kFormat>(Columns(bytes, k32, group / 4, j, 1))};
        for (size_t i = 0; i < kRows; ++i) {
          const __m256i values = BroadcastWord(rows[i].values + block * kScaleBlock + group * 4);
          products[i][0] = AddProducts(products[i][0], levels[0], values);
          products[i][1] = AddProducts(products[i][1], levels[1], values);
        }
      }
      for (size_t upper = 0; upper < 2; ++upper) {
        __m256 scale = ScalesOf(scales + block * kStripRows + upper * 8);
        if constexpr (kUnit != 1.0f) scale = _mm256_mul_ps(scale, _mm256_set1_ps(kUnit));
        for (size_t i = 0; i < kRows; ++i) {
          const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(rows[i].scales[block]));
          sums[i][upper] =
              _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[i][upper]), factor, sums[i][upper]);
        }
      }
    }
  }
  for (size_t i = 0; i < kRows; ++i) {
    _mm256_storeu_ps(out + i * kStripRows, sums[i][0]);
    _mm256_storeu_ps(out + i * kStripRows + 8, sums[i][1]);
  }
}

// The value of the element in the low bits of each lane; what is above them does not count.
template <StripFormat kFormat>
inline __attribute__((always_inline)) __m256 FloatLevel(__m256i elements) {
  if constexpr (kFormat == StripFormat::kCodes) {
    const __m256 table = _mm256_setr_ps(-4, -1, 1, 4, -4, -1, 1, 4);
    return _mm256_permutevar8x32_ps(table, elements);
  } else {
    const __m256 magnitudes = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kNibbleLevels), elements);
    const __m256i signs = _mm256_and_si256(_mm256_slli_epi32(elements, 28),
                                           _mm256_set1_epi32(static_cast<int>(0x80000000u)));
    return _mm256_xor_ps(magnitudes, _mm256_castsi256_ps(signs));
  }
}

template <StripFormat kFormat, size_t kRows>
void ExactRows(const std::byte* elements, const std::byte* scales, size_t k,
               const float* const* rows, float* out) {
  __m256 sums[kRows][2];
  for (auto& sum : sums) sum[0] = sum[1] = _mm256_setzero_ps();
  for (size_t kb = 0; kb < k / kTileColumns; ++kb) {
    TileBytes<kFormat> bytes;
    Transpose(elements + kb * kTileBytes<kFormat>, bytes);
    for (size_t block = kb * 2; block < kb * 2 + 2; ++block) {
      for (size_t upper = 0; upper < 2; ++upper) {
        __m256 halves[kRows][2];
        for (auto& half : halves) half[0] = half[1] = _mm256_setzero_ps();
#pragma GCC unroll 2
        for (unsigned half = 0; half < 2; ++half) {
#pragma GCC unroll 16
          for (unsigned c = 0; c < 16; ++c) {
            const __m256i columns = Columns(bytes, block % 2, half, c % 4, upper);
            const __m256 level =
                FloatLevel<kFormat>(_mm256_srli_epi32(columns, static_cast<int>(c / 4 * 8)));
#pragma GCC unroll 2
            for (size_t i = 0; i < kRows; ++i) {
              const float x = rows[i][block * kScaleBlock + half * 16 + c];
              halves[i][half] = _mm256_fmadd_ps(level, _mm256_set1_ps(x), halves[i][half]);
            }
          }
        }
        const __m256 scale = ScalesOf(scales + block * kStripRows + upper * 8);
        for (size_t i = 0; i < kRows; ++i)
          sums[i][upper] =
              _mm256_fmadd_ps(_mm256_add_ps(halves[i][0], halves[i][1]), scale, sums[i][upper]);
      }
    }
  }
  for (size_t i = 0; i < kRows; ++i) {
    _mm256_storeu_ps(out + i * kStripRows, sums[i][0]);
    _mm256_storeu_ps(out + i * kStripRows + 8, sums[i][1]);
  }
}

// More tokens at once do not fit in 16 registers.
constexpr size_t kRowsMax = 2;

template <StripFormat kFormat>
void Fast(const std::byte* elements, const std::byte* scales, size_t k, size_t strips,
          const QuantizedRow* rows, size_t count, float* out) {
  for (size_t s = 0; s < strips; ++s) {
    size_t row = 0;
    for (; count - row >= kRowsMax; row += kRowsMax)
      FastRows<kFormat, kRowsMax>(elements, scales, k, rows + row, out + row * kStripRows);
    if (row < count) FastRows<kFormat, 1>(elements, scales, k, rows + row, out + row * kStripRows);
    elements += k / kTileColumns * kTileBytes<kFormat>;
    scales += ScalePlaneBytes(kStripRows, k);
    out += count * kStripRows;
  }
}

template <StripFormat kFormat>
void Exact(const std::byte* elements, const std::byte* scales, size_t k, size_t strips,
           const float* const* rows, size_t count, float* out) {
  for (size_t s = 0; s < strips; ++s) {
    size_t row = 0;
    for (; count - row >= kRowsMax; row += kRowsMax)
      ExactRows<kFormat, kRowsMax>(elements, scales, k, rows + row, out + row * kStripRows);
    if (row < count) ExactRows<kFormat, 1>(elements, scales, k, rows + row, out + row * kStripRows);
    elements += k / kTileColumns * kTileBytes<kFormat>;
    scales += ScalePlaneBytes(kStripRows, k);
    out += count * kStripRows;
  }
}

}  // namespace

const MoeKernels kAvx2MoeKernels = {
    .isa = Isa::kAvx2,
    .name = "avx2",
    .fast = {Fast<StripFormat::kCodes>, Fast<StripFormat::kNibbles>},
    .exact = {Exact<StripFormat::kCodes>, Exact<StripFormat::kNibbles>},
};

}  // namespace hotplane
