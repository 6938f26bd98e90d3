// AVX2 with FMA. A tile is first transposed into the first-level cache, by groups of four columns
// with all 16 rows side by side; a vector lane is a row.
#include <immintrin.h>

#include "moe/cpu/kernel_tables.h"

namespace hotplane {
namespace {

template <StripFormat kFormat>
constexpr size_t kTileBytes = kFormat == StripFormat::kCodes ? kTileCodeBytes : kTileNibbleBytes;
// A unit is one row's four elements of a group: a byte of codes, two of nibbles.
template <StripFormat kFormat>
constexpr size_t kUnitBytes = kTileBytes<kFormat> / 256;

// unit [k32][half][t][row]
template <StripFormat kFormat>
struct alignas(32) TileUnits {
  std::byte bytes[2][2][4][kStripRows * kUnitBytes<kFormat>];
};

__m256i Load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
void StoreLow(std::byte* to, __m128i from) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), from);
}
void StoreHigh(std::byte* to, __m128i from) {
  _mm_storeh_pd(reinterpret_cast<double*>(to), _mm_castsi128_pd(from));
}

// Rows of 32 bytes, of g = 0..7: per 128-bit half t1, columns [t0 tile k32 half] of a byte. Gives 8
// vectors whose 64-bit pieces are one column's 8 rows: piece p of vector i is column 2i + p.
void TransposeBytes(__m256i (&rows)[8]) {
  __m256i pairs[8];  // columns 0..7 in the even ones, 8..15 in the odd ones; rows (g, g+4)
  for (size_t g = 0; g < 4; ++g) {
    pairs[2 * g] = _mm256_unpacklo_epi8(rows[g], rows[g + 4]);
    pairs[2 * g + 1] = _mm256_unpackhi_epi8(rows[g], rows[g + 4]);
  }
  for (size_t side = 0; side < 2; ++side) {
    const __m256i even_low = _mm256_unpacklo_epi8(pairs[side], pairs[4 + side]);
    const __m256i even_high = _mm256_unpackhi_epi8(pairs[side], pairs[4 + side]);
    const __m256i odd_low = _mm256_unpacklo_epi8(pairs[2 + side], pairs[6 + side]);
    const __m256i odd_high = _mm256_unpackhi_epi8(pairs[2 + side], pairs[6 + side]);
    rows[4 * side] = _mm256_unpacklo_epi8(even_low, odd_low);
    rows[4 * side + 1] = _mm256_unpackhi_epi8(even_low, odd_low);
    rows[4 * side + 2] = _mm256_unpacklo_epi8(even_high, odd_high);
    rows[4 * side + 3] = _mm256_unpackhi_epi8(even_high, odd_high);
  }
}

void Transpose(const std::byte* tile, TileUnits<StripFormat::kCodes>& units) {
  __m256i rows[8];
  for (size_t g = 0; g < 8; ++g) rows[g] = Load(tile + g * 32);
  TransposeBytes(rows);
  for (size_t i = 0; i < 8; ++i) {
    const size_t t0 = i / 4, tile_row = i / 2 % 2 * 8, k32 = i % 2;
    for (size_t t1 = 0; t1 < 2; ++t1) {
      const __m128i columns =
          t1 == 0 ? _mm256_castsi256_si128(rows[i]) : _mm256_extracti128_si256(rows[i], 1);
      const size_t t = t1 * 2 + t0;
      StoreLow(units.bytes[k32][0][t] + tile_row, columns);
      StoreHigh(units.bytes[k32][1][t] + tile_row, columns);
    }
  }
}

// Rows of 16 words, of g = 0..7: per 128-bit half t0, columns [tile k32 half] of two bytes. Gives 8
// vectors, of one column each, whose halves are that column's 8 rows.
void TransposeWords(__m256i (&rows)[8]) {
  __m256i pairs[8];
  for (size_t g = 0; g < 4; ++g) {
    pairs[2 * g] = _mm256_unpacklo_epi16(rows[g], rows[g + 4]);
    pairs[2 * g + 1] = _mm256_unpackhi_epi16(rows[g], rows[g + 4]);
  }
  for (size_t side = 0; side < 2; ++side) {
    const __m256i even_low = _mm256_unpacklo_epi16(pairs[side], pairs[4 + side]);
    const __m256i even_high = _mm256_unpackhi_epi16(pairs[side], pairs[4 + side]);
    const __m256i odd_low = _mm256_unpacklo_epi16(pairs[2 + side], pairs[6 + side]);
    const __m256i odd_high = _mm256_unpackhi_epi16(pairs[2 + side], pairs[6 + side]);
    rows[4 * side] = _mm256_unpacklo_epi16(even_low, odd_low);
    rows[4 * side + 1] = _mm256_unpackhi_epi16(even_low, odd_low);
    rows[4 * side + 2] = _mm256_unpacklo_epi16(even_high, odd_high);
    rows[4 * side + 3] = _mm256_unpackhi_epi16(even_high, odd_high);
  }
}

void Transpose(const std::byte* tile, TileUnits<StripFormat::kNibbles>& units) {
  for (size_t t1 = 0; t1 < 2; ++t1) {
    __m256i rows[8];
    for (size_t g = 0; g < 8; ++g) rows[g] = Load(tile + g * 64 + t1 * 32);
    TransposeWords(rows);
    for (size_t column = 0; column < 8; ++column) {
      const size_t tile_row = column / 4 * 8, k32 = column / 2 % 2, half = column % 2;
      for (size_t t0 = 0; t0 < 2; ++t0) {
        const __m128i words = t0 == 0 ? _mm256_castsi256_si128(rows[column])
                                      : _mm256_extracti128_si256(rows[column], 1);
        _mm_store_si128(reinterpret_cast<__m128i*>(units.bytes[k32][half][t1 * 2 + t0] +
                                                   tile_row * sizeof(uint16_t)),
                        words);
      }
    }
  }
}

// By index bytes that hold one code where their row of the mask has it: (code << 2j & 15) with the
// rest 0, or the same of 4j lower.
struct alignas(16) Levels {
  uint8_t by_index[16];
};
constexpr Levels CodeLevels() {
  Levels levels = {};
  for (unsigned code = 0; code < 4; ++code)
    levels.by_index[code] = levels.by_index[code << 2] = UnsignedLevel(StripFormat::kCodes, code);
  return levels;
}
constexpr Levels NibbleLevels() {
  Levels levels = {};
  for (unsigned i = 0; i < 16; ++i) levels.by_index[i] = UnsignedLevel(StripFormat::kNibbles, i);
  return levels;
}
template <StripFormat kFormat>
constexpr Levels kLevels = kFormat == StripFormat::kCodes ? CodeLevels() : NibbleLevels();

// Unsigned levels of rows 8*upper to 8*upper+7 of one group: a lane of 32 bits is a row.
template <StripFormat kFormat>
inline __attribute__((always_inline)) __m256i ReadLevels(const std::byte* units, size_t upper) {
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_load_si128(reinterpret_cast<const __m128i*>(&kLevels<kFormat>)));
  const __m256i low_nibbles = _mm256_set1_epi8(15);
  if constexpr (kFormat == StripFormat::kCodes) {
    const __m256i rows = _mm256_set1_epi64x(*reinterpret_cast<const int64_t*>(units + 8 * upper));
    const __m256i repeat = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3,  //
                                            4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
    // Byte j keeps code j. Shifting by 4 takes codes 2 and 3 to where 0 and 1 are; what it carries
    // over from the byte above lands in the upper half and is cut off.
    const __m256i one_code = _mm256_and_si256(_mm256_shuffle_epi8(rows, repeat),
                                              _mm256_set1_epi32(static_cast<int>(0xC0300C03u)));
    const __m256i index =
        _mm256_and_si256(_mm256_or_si256(one_code, _mm256_srli_epi16(one_code, 4)), low_nibbles);
    return _mm256_shuffle_epi8(table, index);
  } else {
    const __m256i rows = _mm256_broadcastsi128_si256(
        _mm_load_si128(reinterpret_cast<const __m128i*>(units + 16 * upper)));
    const __m256i repeat =
        _mm256_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7,  //
                         8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
    const __m256i pairs = _mm256_shuffle_epi8(rows, repeat);
    const __m256i odd = _mm256_set1_epi16(static_cast<int16_t>(0xFF00));
    const __m256i index =
        _mm256_and_si256(_mm256_blendv_epi8(pairs, _mm256_srli_epi16(pairs, 4), odd), low_nibbles);
    return _mm256_shuffle_epi8(table, index);
  }
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
    TileUnits<kFormat> units;
    Transpose(elements + kb * kTileBytes<kFormat>, units);
    for (size_t k32 = 0; k32 < 2; ++k32) {
      const size_t block = kb * 2 + k32;
      __m256i products[kRows][2];
      for (size_t i = 0; i < kRows; ++i)
        products[i][0] = products[i][1] = _mm256_set1_epi32(rows[i].starts[block]);
      for (size_t group = 0; group < 8; ++group) {
        const std::byte* of = units.bytes[k32][group / 4][group % 4];
        const __m256i levels[2] = {ReadLevels<kFormat>(of, 0), ReadLevels<kFormat>(of, 1)};
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

// The level of element j of each row's unit.
template <StripFormat kFormat>
inline __attribute__((always_inline)) __m256 FloatLevel(__m256i units, int j) {
  if constexpr (kFormat == StripFormat::kCodes) {
    const __m256 table = _mm256_setr_ps(-4, -1, 1, 4, -4, -1, 1, 4);
    return _mm256_permutevar8x32_ps(table, _mm256_srl_epi32(units, _mm_cvtsi32_si128(2 * j)));
  } else {
    const __m256i elements = _mm256_srl_epi32(units, _mm_cvtsi32_si128(4 * j));
    const __m256 magnitudes = _mm256_permutevar8x32_ps(_mm256_loadu_ps(kNibbleLevels), elements);
    const __m256i signs = _mm256_and_si256(_mm256_slli_epi32(elements, 28),
                                           _mm256_set1_epi32(static_cast<int>(0x80000000u)));
    return _mm256_xor_ps(magnitudes, _mm256_castsi256_ps(signs));
  }
}

template <StripFormat kFormat>
inline __attribute__((always_inline)) __m256i LoadUnits(const std::byte* units, size_t upper) {
  if constexpr (kFormat == StripFormat::kCodes) {
    return _mm256_cvtepu8_epi32(
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(units + 8 * upper)));
  } else {
    return _mm256_cvtepu16_epi32(
        _mm_load_si128(reinterpret_cast<const __m128i*>(units + 16 * upper)));
  }
}

template <StripFormat kFormat, size_t kRows>
void ExactRows(const std::byte* elements, const std::byte* scales, size_t k,
               const float* const* rows, float* out) {
  __m256 sums[kRows][2];
  for (auto& sum : sums) sum[0] = sum[1] = _mm256_setzero_ps();
  for (size_t kb = 0; kb < k / kTileColumns; ++kb) {
    TileUnits<kFormat> units;
    Transpose(elements + kb * kTileBytes<kFormat>, units);
    for (size_t block = kb * 2; block < kb * 2 + 2; ++block) {
      for (size_t upper = 0; upper < 2; ++upper) {
        __m256 halves[kRows][2];
        for (auto& half : halves) half[0] = half[1] = _mm256_setzero_ps();
        for (size_t group = 0; group < 8; ++group) {
          const size_t half = group / 4;
          const __m256i of = LoadUnits<kFormat>(units.bytes[block % 2][half][group % 4], upper);
          for (int j = 0; j < 4; ++j) {
            const __m256 level = FloatLevel<kFormat>(of, j);
            for (size_t i = 0; i < kRows; ++i) {
              const float x = rows[i][block * kScaleBlock + group * 4 + j];
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
void Fast(const std::byte* elements, const std::byte* scales, size_t k, const QuantizedRow* rows,
          size_t count, float* out) {
  for (; count >= kRowsMax; count -= kRowsMax) {
    FastRows<kFormat, kRowsMax>(elements, scales, k, rows, out);
    rows += kRowsMax;
    out += kRowsMax * kStripRows;
  }
  if (count == 1) FastRows<kFormat, 1>(elements, scales, k, rows, out);
}

template <StripFormat kFormat>
void Exact(const std::byte* elements, const std::byte* scales, size_t k, const float* const* rows,
           size_t count, float* out) {
  for (; count >= kRowsMax; count -= kRowsMax) {
    ExactRows<kFormat, kRowsMax>(elements, scales, k, rows, out);
    rows += kRowsMax;
    out += kRowsMax * kStripRows;
  }
  if (count == 1) ExactRows<kFormat, 1>(elements, scales, k, rows, out);
}

}  // namespace

const MoeKernels kAvx2MoeKernels = {
    .isa = Isa::kAvx2,
    .name = "avx2",
    .fast = {Fast<StripFormat::kCodes>, Fast<StripFormat::kNibbles>},
    .exact = {Exact<StripFormat::kCodes>, Exact<StripFormat::kNibbles>},
};

}  // namespace hotplane
