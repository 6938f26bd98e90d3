// AVX-512 with VBMI and VNNI. A vector lane is a row: the bytes of a tile are transposed so that
// one vector holds the same four columns of all 16 rows, and sums need no reduction across lanes.
//
// The transposition exchanges address bits, a pair of vectors at a time. A tile of codes is 256
// units of a byte, one of nibbles 256 units of two bytes; a unit's place in the plane is, in bits,
//   [g2 g1 g0 | t1 t0 | tile | k32 | half]       (docs/format/planes.md: lane*8 + w)
// Of codes the upper two bits choose the vector, of nibbles the upper three. Wanted are vectors by
// (k32, half) and, of nibbles, t1, whose lanes hold all rows n = [tile g2 g1 g0] of a column group.
#include <immintrin.h>

#include "moe/cpu/kernel_tables.h"

namespace hotplane {
namespace {

constexpr size_t Bit(size_t value, size_t bit) { return value >> bit & 1; }

// Indexes for a permutation of two vectors of 64 bytes: `source` gives, by target lane, the source
// lane and which of the two vectors.
struct alignas(64) ByteIndexes {
  uint8_t index[64];
};
struct alignas(64) WordIndexes {
  uint16_t index[32];
};

// --- codes: lanes [g0 t1 t0 tile k32 half], vectors (g2 g1) ---

// Brings g1 into the lanes, [g1 g0 t1 t0 tile k32], and takes out `half`.
constexpr ByteIndexes CodesFirst(size_t half) {
  ByteIndexes indexes = {};
  for (size_t lane = 0; lane < 64; ++lane) {
    const size_t rest = lane & 31;  // [g0 t1 t0 tile k32]
    indexes.index[lane] = static_cast<uint8_t>(Bit(lane, 5) << 6 | rest << 1 | half);
  }
  return indexes;
}

// Brings in g2 and takes out k32. By qwords of row pairs, lanes [tile g2 g1 | t1 t0 | g0], so that
// 16 bits of each qword are the codes of one t; or lanes [t1 t0 | tile g2 g1 g0].
constexpr ByteIndexes CodesSecond(size_t k32, bool row_pairs) {
  ByteIndexes indexes = {};
  for (size_t lane = 0; lane < 64; ++lane) {
    const size_t n = row_pairs ? (lane >> 3) << 1 | (lane & 1) : lane & 15;
    const size_t t = row_pairs ? lane >> 1 & 3 : lane >> 4;
    const size_t source = Bit(n, 1) << 5 | Bit(n, 0) << 4 | t << 2 | Bit(n, 3) << 1 | k32;
    indexes.index[lane] = static_cast<uint8_t>(Bit(n, 2) << 6 | source);
  }
  return indexes;
}

// --- nibbles: lanes of two bytes [t1 t0 tile k32 half], vectors (g2 g1 g0) ---

// Brings g0 into the lanes, [g0 t1 t0 tile k32], and takes out `half`.
constexpr WordIndexes NibblesFirst(size_t half) {
  WordIndexes indexes = {};
  for (size_t lane = 0; lane < 32; ++lane)
    indexes.index[lane] = static_cast<uint16_t>(Bit(lane, 4) << 5 | (lane & 15) << 1 | half);
  return indexes;
}

// Brings g1 into the lanes, [g1 g0 t1 t0 tile], and takes out k32.
constexpr WordIndexes NibblesSecond(size_t k32) { return NibblesFirst(k32); }

// Brings in g2 and takes out t1. Lanes [tile g2 g1 | t0 | g0], or [t0 | tile g2 g1 g0].
constexpr WordIndexes NibblesThird(size_t t1, bool row_pairs) {
  WordIndexes indexes = {};
  for (size_t lane = 0; lane < 32; ++lane) {
    const size_t n = row_pairs ? (lane >> 2) << 1 | (lane & 1) : lane & 15;
    const size_t t0 = row_pairs ? lane >> 1 & 1 : lane >> 4;
    const size_t source = Bit(n, 1) << 4 | Bit(n, 0) << 3 | t1 << 2 | t0 << 1 | Bit(n, 3);
    indexes.index[lane] = static_cast<uint16_t>(Bit(n, 2) << 5 | source);
  }
  return indexes;
}

constexpr ByteIndexes kCodesFirst[2] = {CodesFirst(0), CodesFirst(1)};
constexpr ByteIndexes kCodesSecond[2][2] = {{CodesSecond(0, false), CodesSecond(1, false)},
                                            {CodesSecond(0, true), CodesSecond(1, true)}};
constexpr WordIndexes kNibblesFirst[2] = {NibblesFirst(0), NibblesFirst(1)};
constexpr WordIndexes kNibblesSecond[2] = {NibblesSecond(0), NibblesSecond(1)};
constexpr WordIndexes kNibblesThird[2][2] = {{NibblesThird(0, false), NibblesThird(1, false)},
                                             {NibblesThird(0, true), NibblesThird(1, true)}};

__m512i Load(const void* from) { return _mm512_loadu_si512(from); }

__m512i PermuteBytes(__m512i low, const ByteIndexes& indexes, __m512i high) {
  return _mm512_permutex2var_epi8(low, Load(&indexes), high);
}
__m512i PermuteWords(__m512i low, const WordIndexes& indexes, __m512i high) {
  return _mm512_permutex2var_epi16(low, Load(&indexes), high);
}

// A tile by (k32, half): all bytes of codes of 4 t and 16 rows.
template <bool kRowPairs>
inline __attribute__((always_inline)) void TransposeCodes(const std::byte* tile,
                                                          __m512i (&out)[2][2]) {
  __m512i in[4];
  for (size_t i = 0; i < 4; ++i) in[i] = Load(tile + i * 64);
  for (size_t half = 0; half < 2; ++half) {
    const __m512i low = PermuteBytes(in[0], kCodesFirst[half], in[1]);
    const __m512i high = PermuteBytes(in[2], kCodesFirst[half], in[3]);
    for (size_t k32 = 0; k32 < 2; ++k32)
      out[k32][half] = PermuteBytes(low, kCodesSecond[kRowPairs][k32], high);
  }
}

// A tile by (k32, half, t1): the byte pairs of nibbles of 2 t and 16 rows.
template <bool kRowPairs>
inline __attribute__((always_inline)) void TransposeNibbles(const std::byte* tile,
                                                            __m512i (&out)[2][2][2]) {
  __m512i first[4][2];
  for (size_t i = 0; i < 4; ++i) {
    const __m512i low = Load(tile + i * 128);
    const __m512i high = Load(tile + i * 128 + 64);
    for (size_t half = 0; half < 2; ++half)
      first[i][half] = PermuteWords(low, kNibblesFirst[half], high);
  }
  for (size_t half = 0; half < 2; ++half) {
    for (size_t k32 = 0; k32 < 2; ++k32) {
      const WordIndexes& indexes = kNibblesSecond[k32];
      const __m512i low = PermuteWords(first[0][half], indexes, first[1][half]);
      const __m512i high = PermuteWords(first[2][half], indexes, first[3][half]);
      for (size_t t1 = 0; t1 < 2; ++t1)
        out[k32][half][t1] = PermuteWords(low, kNibblesThird[kRowPairs][t1], high);
    }
  }
}

// Entry i is the unsigned level of the element in the low bits of i, whatever is above it: a byte
// permutation takes 6 bits of index.
template <StripFormat kFormat>
constexpr ByteIndexes LevelTable() {
  ByteIndexes table = {};
  for (unsigned i = 0; i < 64; ++i) table.index[i] = UnsignedLevel(kFormat, i);
  return table;
}
template <StripFormat kFormat>
constexpr ByteIndexes kLevelTable = LevelTable<kFormat>();

// For each byte of a qword the bit where its element begins: `bits` apart from bit `first`.
constexpr uint64_t BitOffsets(unsigned first, unsigned bits) {
  uint64_t offsets = 0;
  for (unsigned i = 0; i < 8; ++i) offsets |= uint64_t{first + i * bits} << (8 * i);
  return offsets;
}

// Unsigned levels of a tile by block of 32 and group of 4 columns: a lane of 32 bits is a row.
struct TileLevels {
  __m512i of[2][8];
};

template <StripFormat kFormat>
inline __attribute__((always_inline)) void ReadLevels(const std::byte* tile, TileLevels& levels) {
  const __m512i table = Load(&kLevelTable<kFormat>);
  const auto expand = [&](__m512i units, uint64_t offsets) {
    const __m512i elements =
        _mm512_multishift_epi64_epi8(_mm512_set1_epi64(static_cast<int64_t>(offsets)), units);
    return _mm512_permutexvar_epi8(elements, table);
  };
  if constexpr (kFormat == StripFormat::kCodes) {
    __m512i units[2][2];
    TransposeCodes<true>(tile, units);
    for (size_t k32 = 0; k32 < 2; ++k32)
      for (size_t half = 0; half < 2; ++half)
        for (unsigned t = 0; t < 4; ++t)
          levels.of[k32][half * 4 + t] = expand(units[k32][half], BitOffsets(16 * t, 2));
  } else {
    __m512i units[2][2][2];
    TransposeNibbles<true>(tile, units);
    for (size_t k32 = 0; k32 < 2; ++k32)
      for (size_t half = 0; half < 2; ++half)
        for (unsigned t = 0; t < 4; ++t)
          levels.of[k32][half * 4 + t] =
              expand(units[k32][half][t / 2], BitOffsets(32 * (t % 2), 4));
  }
}

template <StripFormat kFormat>
constexpr size_t kTileBytes = kFormat == StripFormat::kCodes ? kTileCodeBytes : kTileNibbleBytes;

// How far ahead of the tile in work the strip is asked for: about what a core reads while the
// memory answers (20 GB/s, 100 ns).
constexpr size_t kPrefetchBytes = 2048;

inline __attribute__((always_inline)) void Prefetch(const std::byte* tile, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64)
    _mm_prefetch(reinterpret_cast<const char*>(tile + kPrefetchBytes + at), _MM_HINT_T0);
}

__m512 ScalesOf(const std::byte* scales) {
  const __m512i bytes =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)));
  return _mm512_castsi512_ps(
      _mm512_max_epu32(_mm512_slli_epi32(bytes, 23), _mm512_set1_epi32(int{kSmallestScaleBits})));
}

__m512i BroadcastWord(const void* from) {
  int32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return _mm512_set1_epi32(word);
}

template <StripFormat kFormat, size_t kRows>
void FastRows(const std::byte* elements, const std::byte* scales, size_t k,
              const QuantizedRow* rows, float* out) {
  constexpr float kUnit = 1.0f / kLevelForms[static_cast<size_t>(kFormat)].multiplier;
  __m512 sums[kRows];
  for (size_t i = 0; i < kRows; ++i) sums[i] = _mm512_setzero_ps();
  for (size_t kb = 0; kb < k / kTileColumns; ++kb) {
    const std::byte* tile = elements + kb * kTileBytes<kFormat>;
    Prefetch(tile, kTileBytes<kFormat>);
    TileLevels levels;
    ReadLevels<kFormat>(tile, levels);
    for (size_t k32 = 0; k32 < 2; ++k32) {
      const size_t block = kb * 2 + k32;
      __m512 scale = ScalesOf(scales + block * kStripRows);
      if constexpr (kUnit != 1.0f) scale = _mm512_mul_ps(scale, _mm512_set1_ps(kUnit));
      for (size_t i = 0; i < kRows; ++i) {
        __m512i products = _mm512_set1_epi32(rows[i].starts[block]);
        const int8_t* values = rows[i].values + block * kScaleBlock;
        for (size_t group = 0; group < 8; ++group)
          products = _mm512_dpbusd_epi32(products, levels.of[k32][group],
                                         BroadcastWord(values + group * 4));
        const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(rows[i].scales[block]));
        sums[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), factor, sums[i]);
      }
    }
  }
  for (size_t i = 0; i < kRows; ++i) _mm512_storeu_ps(out + i * kStripRows, sums[i]);
}

// The levels of one group of 4 columns as floats, a lane a row.
template <StripFormat kFormat>
inline __attribute__((always_inline)) __m512 FloatLevel(__m512i units, int j) {
  if constexpr (kFormat == StripFormat::kCodes) {
    const __m512 table = _mm512_set_ps(4, 1, -1, -4, 4, 1, -1, -4, 4, 1, -1, -4, 4, 1, -1, -4);
    return _mm512_permutexvar_ps(_mm512_srl_epi32(units, _mm_cvtsi32_si128(2 * j)), table);
  } else {
    const __m512 table = _mm512_loadu_ps(kNibbleLevels);
    return _mm512_permutexvar_ps(_mm512_srl_epi32(units, _mm_cvtsi32_si128(4 * j)), table);
  }
}

// A lane of 32 bits is a row: its byte of codes, or two bytes of nibbles, of this group.
template <StripFormat kFormat>
struct TileUnits;
template <>
struct TileUnits<StripFormat::kCodes> {
  inline __attribute__((always_inline)) explicit TileUnits(const std::byte* tile) {
    TransposeCodes<false>(tile, units);
  }
  inline __attribute__((always_inline)) __m512i Group(size_t k32, size_t half, size_t t) const {
    const __m512i of = units[k32][half];
    const __m128i bytes = t == 0   ? _mm512_castsi512_si128(of)
                          : t == 1 ? _mm512_extracti32x4_epi32(of, 1)
                          : t == 2 ? _mm512_extracti32x4_epi32(of, 2)
                                   : _mm512_extracti32x4_epi32(of, 3);
    return _mm512_cvtepu8_epi32(bytes);
  }
  __m512i units[2][2];
};
template <>
struct TileUnits<StripFormat::kNibbles> {
  inline __attribute__((always_inline)) explicit TileUnits(const std::byte* tile) {
    TransposeNibbles<false>(tile, units);
  }
  inline __attribute__((always_inline)) __m512i Group(size_t k32, size_t half, size_t t) const {
    const __m512i of = units[k32][half][t / 2];
    return _mm512_cvtepu16_epi32(t % 2 == 0 ? _mm512_castsi512_si256(of)
                                            : _mm512_extracti64x4_epi64(of, 1));
  }
  __m512i units[2][2][2];
};

template <StripFormat kFormat, size_t kRows>
void ExactRows(const std::byte* elements, const std::byte* scales, size_t k,
               const float* const* rows, float* out) {
  __m512 sums[kRows];
  for (size_t i = 0; i < kRows; ++i) sums[i] = _mm512_setzero_ps();
  for (size_t kb = 0; kb < k / kTileColumns; ++kb) {
    const std::byte* tile = elements + kb * kTileBytes<kFormat>;
    Prefetch(tile, kTileBytes<kFormat>);
    const TileUnits<kFormat> units(tile);
    for (size_t k32 = 0; k32 < 2; ++k32) {
      const size_t block = kb * 2 + k32;
      __m512 halves[kRows][2];
      for (size_t i = 0; i < kRows; ++i) halves[i][0] = halves[i][1] = _mm512_setzero_ps();
      for (size_t t = 0; t < 4; ++t) {
        for (size_t half = 0; half < 2; ++half) {
          const __m512i group = units.Group(k32, half, t);
          for (int j = 0; j < 4; ++j) {
            const __m512 level = FloatLevel<kFormat>(group, j);
            for (size_t i = 0; i < kRows; ++i) {
              const float x = rows[i][block * kScaleBlock + half * 16 + t * 4 + j];
              halves[i][half] = _mm512_fmadd_ps(level, _mm512_set1_ps(x), halves[i][half]);
            }
          }
        }
      }
      const __m512 scale = ScalesOf(scales + block * kStripRows);
      for (size_t i = 0; i < kRows; ++i)
        sums[i] = _mm512_fmadd_ps(_mm512_add_ps(halves[i][0], halves[i][1]), scale, sums[i]);
    }
  }
  for (size_t i = 0; i < kRows; ++i) _mm512_storeu_ps(out + i * kStripRows, sums[i]);
}

// Rows at once: 16 vectors of levels, 8 of sums and the temporaries fill the 32 registers.
constexpr size_t kFastRowsMax = 8;
// 8 chains, each of latency 4, cover two units of multiply-add.
constexpr size_t kExactRowsMax = 4;

template <StripFormat kFormat>
void Fast(const std::byte* elements, const std::byte* scales, size_t k, const QuantizedRow* rows,
          size_t count, float* out) {
  while (count >= kFastRowsMax) {
    FastRows<kFormat, kFastRowsMax>(elements, scales, k, rows, out);
    rows += kFastRowsMax;
    out += kFastRowsMax * kStripRows;
    count -= kFastRowsMax;
  }
  switch (count) {
    case 1: return FastRows<kFormat, 1>(elements, scales, k, rows, out);
    case 2: return FastRows<kFormat, 2>(elements, scales, k, rows, out);
    case 3: return FastRows<kFormat, 3>(elements, scales, k, rows, out);
    case 4: return FastRows<kFormat, 4>(elements, scales, k, rows, out);
    case 5: return FastRows<kFormat, 5>(elements, scales, k, rows, out);
    case 6: return FastRows<kFormat, 6>(elements, scales, k, rows, out);
    case 7: return FastRows<kFormat, 7>(elements, scales, k, rows, out);
    default: return;
  }
}

template <StripFormat kFormat>
void Exact(const std::byte* elements, const std::byte* scales, size_t k, const float* const* rows,
           size_t count, float* out) {
  while (count >= kExactRowsMax) {
    ExactRows<kFormat, kExactRowsMax>(elements, scales, k, rows, out);
    rows += kExactRowsMax;
    out += kExactRowsMax * kStripRows;
    count -= kExactRowsMax;
  }
  switch (count) {
    case 1: return ExactRows<kFormat, 1>(elements, scales, k, rows, out);
    case 2: return ExactRows<kFormat, 2>(elements, scales, k, rows, out);
    case 3: return ExactRows<kFormat, 3>(elements, scales, k, rows, out);
    default: return;
  }
}

}  // namespace

const MoeKernels kAvx512MoeKernels = {
    .isa = Isa::kAvx512,
    .name = "avx512",
    .fast = {Fast<StripFormat::kCodes>, Fast<StripFormat::kNibbles>},
    .exact = {Exact<StripFormat::kCodes>, Exact<StripFormat::kNibbles>},
};

}  // namespace hotplane
