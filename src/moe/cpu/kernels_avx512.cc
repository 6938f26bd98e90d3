// AVX-512 with VBMI and VNNI. A lane of 32 bits is a row: the bytes of a tile are transposed so
// that a vector holds the same columns of all 16 rows, and sums need no reduction across lanes.
//
// The transposition exchanges address bits, a pair of vectors at a time. The place of a byte in a
// tile is, in bits,
//   codes    [g2 g1 | g0 t1 t0 tile k32 half]         (docs/format/planes.md: lane*8 + w)
//   nibbles  [g2 g1 g0 | t1 t0 tile k32 half j1]      (lane*16 + w*2 + j/2)
// where the bits before the bar choose the vector. Wanted are vectors by (k32, half), of nibbles by
// j1 too, with lanes [tile g2 g1 g0 | t1 t0]: row n, and for it one byte of each t. Shifting a lane
// then brings another j of all four t to the low bits of its bytes.
#include <immintrin.h>

#include "moe/cpu/kernel_tables.h"

namespace hotplane {
namespace {

constexpr size_t Bit(size_t value, size_t bit) { return value >> bit & 1; }

// Of a permutation of two vectors: by target byte the source byte, and which of the two in bit 6.
struct alignas(64) Indexes {
  uint8_t index[64];
};

// Brings the bit that distinguishes the two vectors to the top of the lanes' bits, [x b5 b4 .. b1],
// and takes out b0, which is `low`.
constexpr Indexes Exchange(size_t low) {
  Indexes indexes = {};
  for (size_t lane = 0; lane < 64; ++lane)
    indexes.index[lane] = static_cast<uint8_t>(Bit(lane, 5) << 6 | (lane & 31) << 1 | low);
  return indexes;
}

// The same, from [g1 g0 t1 t0 tile b0] with g2 between the two, and puts the lanes in their order,
// [tile g2 g1 g0 t1 t0].
constexpr Indexes Last(size_t low) {
  Indexes indexes = {};
  for (size_t lane = 0; lane < 64; ++lane) {
    const size_t n = lane >> 2, t = lane & 3;
    const size_t source = Bit(n, 1) << 5 | Bit(n, 0) << 4 | t << 2 | Bit(n, 3) << 1 | low;
    indexes.index[lane] = static_cast<uint8_t>(Bit(n, 2) << 6 | source);
  }
  return indexes;
}

constexpr Indexes kExchange[2] = {Exchange(0), Exchange(1)};
constexpr Indexes kLast[2] = {Last(0), Last(1)};

inline __m512i Load(const void* from) { return _mm512_loadu_si512(from); }
inline __m512i Permute(__m512i low, const Indexes& indexes, __m512i high) {
  return _mm512_permutex2var_epi8(low, Load(&indexes), high);
}

template <StripFormat kFormat>
constexpr size_t kTileBytes = kFormat == StripFormat::kCodes ? kTileCodeBytes : kTileNibbleBytes;

// The transposed bytes of a tile.
template <StripFormat kFormat>
struct TileBytes;

template <>
struct TileBytes<StripFormat::kCodes> {
  __m512i of[2][2];  // k32, half

  inline __attribute__((always_inline)) explicit TileBytes(const std::byte* tile) {
    const __m512i in[4] = {Load(tile), Load(tile + 64), Load(tile + 128), Load(tile + 192)};
    for (size_t half = 0; half < 2; ++half) {
      const __m512i low = Permute(in[0], kExchange[half], in[1]);   // g2 = 0
      const __m512i high = Permute(in[2], kExchange[half], in[3]);  // g2 = 1
      for (size_t k32 = 0; k32 < 2; ++k32) of[k32][half] = Permute(low, kLast[k32], high);
    }
  }
  // Lanes whose bytes have, in their low bits, column 4t + j of this half block for each t.
  inline __attribute__((always_inline)) __m512i Columns(size_t k32, size_t half, unsigned j) const {
    return j == 0 ? of[k32][half] : _mm512_srli_epi32(of[k32][half], 2 * j);
  }
};

template <>
struct TileBytes<StripFormat::kNibbles> {
  __m512i of[2][2][2];  // k32, half, j1

  inline __attribute__((always_inline)) explicit TileBytes(const std::byte* tile) {
    for (size_t j1 = 0; j1 < 2; ++j1) {
      __m512i by_g0[4];  // g2 g1; lanes [g0 t1 t0 tile k32 half]
      for (size_t i = 0; i < 4; ++i)
        by_g0[i] = Permute(Load(tile + i * 128), kExchange[j1], Load(tile + i * 128 + 64));
      for (size_t half = 0; half < 2; ++half) {
        const __m512i low = Permute(by_g0[0], kExchange[half], by_g0[1]);
        const __m512i high = Permute(by_g0[2], kExchange[half], by_g0[3]);
        for (size_t k32 = 0; k32 < 2; ++k32) of[k32][half][j1] = Permute(low, kLast[k32], high);
      }
    }
  }
  inline __attribute__((always_inline)) __m512i Columns(size_t k32, size_t half, unsigned j) const {
    const __m512i bytes = of[k32][half][j / 2];
    return j % 2 == 0 ? bytes : _mm512_srli_epi32(bytes, 4);
  }
};

// Entry i is the unsigned level of the element in the low bits of i, whatever is above it: a byte
// permutation takes 6 bits of index.
template <StripFormat kFormat>
constexpr Indexes LevelTable() {
  Indexes table = {};
  for (unsigned i = 0; i < 64; ++i) table.index[i] = UnsignedLevel(kFormat, i);
  return table;
}
template <StripFormat kFormat>
constexpr Indexes kLevelTable = LevelTable<kFormat>();

// How far ahead of the tile in work a strip is asked for: twice what a core reads while the memory
// answers (20 GB/s, 100 ns), and the next page, where the hardware stops to prefetch.
constexpr size_t kPrefetchBytes = 4096;

inline __attribute__((always_inline)) void Prefetch(const std::byte* tile, size_t bytes) {
  // Past the end of the planes too, where there is no object to point into.
  const uintptr_t from = reinterpret_cast<uintptr_t>(tile) + kPrefetchBytes;
  for (size_t at = 0; at < bytes; at += 64)
    _mm_prefetch(reinterpret_cast<const char*>(from + at), _MM_HINT_T0);
}

inline __m512 ScalesOf(const std::byte* scales) {
  const __m512i bytes =
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales)));
  return _mm512_castsi512_ps(
      _mm512_max_epu32(_mm512_slli_epi32(bytes, 23), _mm512_set1_epi32(int{kSmallestScaleBits})));
}

inline __m512i BroadcastWord(const void* from) {
  int32_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return _mm512_set1_epi32(word);
}

// Where strips, their scales and their outputs are.
template <StripFormat kFormat>
struct Strips {
  Strips(const std::byte* elements_, const std::byte* scales_, size_t k_, size_t count, float* out_)
      : elements(elements_), scales(scales_), k(k_), out_floats(count * kStripRows), out(out_) {}
  const std::byte* Tile(size_t strip, size_t kb) const {
    return elements + (strip * (k / kTileColumns) + kb) * kTileBytes<kFormat>;
  }
  const std::byte* Scales(size_t strip, size_t block) const {
    return scales + (strip * (k / kScaleBlock) + block) * kStripRows;
  }
  float* Out(size_t strip, size_t row) const { return out + strip * out_floats + row * kStripRows; }

  const std::byte* elements;
  const std::byte* scales;
  size_t k;
  size_t out_floats;
  float* out;
};

template <StripFormat kFormat, size_t kStrips, size_t kRows>
void FastRows(const Strips<kFormat>& strips, size_t first_strip, const QuantizedRow* rows,
              size_t first_row) {
  constexpr float kUnit = 1.0f / kLevelForms[static_cast<size_t>(kFormat)].multiplier;
  const __m512i table = Load(&kLevelTable<kFormat>);
  __m512 sums[kRows][kStrips];
  for (auto& of_row : sums)
    for (__m512& sum : of_row) sum = _mm512_setzero_ps();
  for (size_t block = 0; block < strips.k / kScaleBlock; block += 2) {
    __m512i bytes[kStrips][2][8 / (kFormat == StripFormat::kCodes ? 4 : 2)];
    for (size_t s = 0; s < kStrips; ++s) {
      const std::byte* tile = strips.Tile(first_strip + s, block / 2);
      Prefetch(tile, kTileBytes<kFormat>);
      const TileBytes<kFormat> transposed(tile);
      __builtin_memcpy(bytes[s], &transposed, sizeof bytes[s]);
    }
    for (size_t k32 = 0; k32 < 2; ++k32) {
      __m512i levels[kStrips][8];
      __m512 scales[kStrips];
      for (size_t s = 0; s < kStrips; ++s) {
        for (unsigned group = 0; group < 8; ++group) {
          constexpr unsigned kPerVector = kFormat == StripFormat::kCodes ? 4 : 2;
          constexpr unsigned kBits = 8 / kPerVector;
          const __m512i of = bytes[s][k32][group / kPerVector];
          const unsigned shift = group % kPerVector * kBits;
          levels[s][group] =
              _mm512_permutexvar_epi8(shift == 0 ? of : _mm512_srli_epi32(of, shift), table);
        }
        scales[s] = ScalesOf(strips.Scales(first_strip + s, block + k32));
        if constexpr (kUnit != 1.0f) scales[s] = _mm512_mul_ps(scales[s], _mm512_set1_ps(kUnit));
      }
      for (size_t i = 0; i < kRows; ++i) {
        const QuantizedRow& row = rows[first_row + i];
        const int8_t* values = row.values + (block + k32) * kScaleBlock;
        __m512i products[kStrips];
        for (__m512i& product : products) product = _mm512_set1_epi32(row.starts[block + k32]);
        for (size_t group = 0; group < 8; ++group) {
          const __m512i four = BroadcastWord(values + group * 4);
          for (size_t s = 0; s < kStrips; ++s)
            products[s] = _mm512_dpbusd_epi32(products[s], levels[s][group], four);
        }
        const __m512 row_scale = _mm512_set1_ps(row.scales[block + k32]);
        for (size_t s = 0; s < kStrips; ++s)
          sums[i][s] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products[s]),
                                       _mm512_mul_ps(scales[s], row_scale), sums[i][s]);
      }
    }
  }
  for (size_t i = 0; i < kRows; ++i)
    for (size_t s = 0; s < kStrips; ++s)
      _mm512_storeu_ps(strips.Out(first_strip + s, first_row + i), sums[i][s]);
}

// The value of the element in the low bits of each lane; what is above them does not count.
template <StripFormat kFormat>
inline __attribute__((always_inline)) __m512 FloatLevel(__m512i lanes) {
  const __m512 table = kFormat == StripFormat::kCodes
                           ? _mm512_broadcast_f32x4(_mm_loadu_ps(kCodeLevels))
                           : _mm512_loadu_ps(kNibbleLevels);
  return _mm512_permutexvar_ps(lanes, table);
}

template <StripFormat kFormat, size_t kRows>
void ExactRows(const Strips<kFormat>& strips, size_t strip, const float* const* rows,
               size_t first_row) {
  __m512 sums[kRows];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  for (size_t block = 0; block < strips.k / kScaleBlock; block += 2) {
    const std::byte* tile = strips.Tile(strip, block / 2);
    Prefetch(tile, kTileBytes<kFormat>);
    const TileBytes<kFormat> bytes(tile);
    for (size_t k32 = 0; k32 < 2; ++k32) {
      __m512 halves[kRows][2];
      for (size_t i = 0; i < kRows; ++i) halves[i][0] = halves[i][1] = _mm512_setzero_ps();
#pragma GCC unroll 16
      for (unsigned c = 0; c < 16; ++c) {
#pragma GCC unroll 2
        for (size_t half = 0; half < 2; ++half) {
          const __m512i columns = bytes.Columns(k32, half, c % 4);
          const __m512 level = FloatLevel<kFormat>(
              c < 4 ? columns : _mm512_srli_epi32(columns, static_cast<unsigned>(c / 4 * 8)));
#pragma GCC unroll 4
          for (size_t i = 0; i < kRows; ++i) {
            const float x = rows[first_row + i][(block + k32) * kScaleBlock + half * 16 + c];
            halves[i][half] = _mm512_fmadd_ps(level, _mm512_set1_ps(x), halves[i][half]);
          }
        }
      }
      const __m512 scale = ScalesOf(strips.Scales(strip, block + k32));
      for (size_t i = 0; i < kRows; ++i)
        sums[i] = _mm512_fmadd_ps(_mm512_add_ps(halves[i][0], halves[i][1]), scale, sums[i]);
    }
  }
  for (size_t i = 0; i < kRows; ++i) _mm512_storeu_ps(strips.Out(strip, first_row + i), sums[i]);
}

// Tokens at once, of two strips. 16 vectors of levels and as many of sums are more than the 32
// registers hold beside the temporaries; the sums, used once per block of 32, go to the first-level
// cache. Measured, 8 are 6% faster than 4, whose sums would fit.
constexpr size_t kFastRowsMax = 8;
// 8 chains, each of latency 4, cover two units of multiply-add.
constexpr size_t kExactRowsMax = 4;

template <StripFormat kFormat, size_t kStrips>
void FastStrips(const Strips<kFormat>& strips, size_t strip, const QuantizedRow* rows,
                size_t count) {
  size_t row = 0;
  for (; count - row >= kFastRowsMax; row += kFastRowsMax)
    FastRows<kFormat, kStrips, kFastRowsMax>(strips, strip, rows, row);
  switch (count - row) {
    case 1: return FastRows<kFormat, kStrips, 1>(strips, strip, rows, row);
    case 2: return FastRows<kFormat, kStrips, 2>(strips, strip, rows, row);
    case 3: return FastRows<kFormat, kStrips, 3>(strips, strip, rows, row);
    case 4: return FastRows<kFormat, kStrips, 4>(strips, strip, rows, row);
    case 5: return FastRows<kFormat, kStrips, 5>(strips, strip, rows, row);
    case 6: return FastRows<kFormat, kStrips, 6>(strips, strip, rows, row);
    case 7: return FastRows<kFormat, kStrips, 7>(strips, strip, rows, row);
    default: return;
  }
}

template <StripFormat kFormat>
void Fast(const std::byte* elements, const std::byte* scales, size_t k, size_t strip_count,
          const QuantizedRow* rows, size_t count, float* out) {
  const Strips<kFormat> strips(elements, scales, k, count, out);
  size_t strip = 0;
  // Two strips share what is loaded of the tokens. One token waits for memory instead, which is
  // faster in one stream.
  if (count > 1)
    for (; strip + 2 <= strip_count; strip += 2) FastStrips<kFormat, 2>(strips, strip, rows, count);
  for (; strip < strip_count; ++strip) FastStrips<kFormat, 1>(strips, strip, rows, count);
}

template <StripFormat kFormat>
void Exact(const std::byte* elements, const std::byte* scales, size_t k, size_t strip_count,
           const float* const* rows, size_t count, float* out) {
  const Strips<kFormat> strips(elements, scales, k, count, out);
  for (size_t strip = 0; strip < strip_count; ++strip) {
    size_t row = 0;
    for (; count - row >= kExactRowsMax; row += kExactRowsMax)
      ExactRows<kFormat, kExactRowsMax>(strips, strip, rows, row);
    switch (count - row) {
      case 1: ExactRows<kFormat, 1>(strips, strip, rows, row); break;
      case 2: ExactRows<kFormat, 2>(strips, strip, rows, row); break;
      case 3: ExactRows<kFormat, 3>(strips, strip, rows, row); break;
      default: break;
    }
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
