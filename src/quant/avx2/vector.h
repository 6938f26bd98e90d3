// One instruction, one thin function: what simd_kernels.inc is written in, for 256-bit vectors.
// Needs AVX2, F16C and POPCNT. The same names as in avx512/vector.h, which says what they do.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "quant/plane_tables.h"

namespace hotplane {
namespace {

using V = __m256i;

inline V Load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void Store(void* to, V v) { _mm256_storeu_si256(static_cast<__m256i*>(to), v); }
inline __m128i LoadHalf(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}
inline V LoadLane(const void* from) { return _mm256_broadcastsi128_si256(LoadHalf(from)); }
inline V Zero() { return _mm256_setzero_si256(); }
inline V Set8(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
inline V Set16(int x) { return _mm256_set1_epi16(static_cast<short>(x)); }
inline V Set32(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline V Set64(uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
inline V And(V a, V b) { return _mm256_and_si256(a, b); }
inline V AndNot(V not_a, V b) { return _mm256_andnot_si256(not_a, b); }
inline V Or(V a, V b) { return _mm256_or_si256(a, b); }
inline V Xor(V a, V b) { return _mm256_xor_si256(a, b); }
inline V Add8(V a, V b) { return _mm256_add_epi8(a, b); }
inline V Add16(V a, V b) { return _mm256_add_epi16(a, b); }
inline V Sub16(V a, V b) { return _mm256_sub_epi16(a, b); }
inline V Sub32(V a, V b) { return _mm256_sub_epi32(a, b); }
inline V SubSaturated16(V a, V b) { return _mm256_subs_epu16(a, b); }
inline V Max16(V a, V b) { return _mm256_max_epu16(a, b); }
inline V Max32(V a, V b) { return _mm256_max_epu32(a, b); }
inline V Multiply16(V a, V b) { return _mm256_mullo_epi16(a, b); }
inline V MultiplyHigh16(V a, V b) { return _mm256_mulhi_epu16(a, b); }
inline V MultiplyAdd8(V a, V b) { return _mm256_maddubs_epi16(a, b); }
inline V MultiplyAdd16(V a, V b) { return _mm256_madd_epi16(a, b); }
template <int n>
V ShiftRight16(V a) {
  return _mm256_srli_epi16(a, n);
}
template <int n>
V ShiftLeft16(V a) {
  return _mm256_slli_epi16(a, n);
}
template <int n>
V ShiftRight32(V a) {
  return _mm256_srli_epi32(a, n);
}
template <int n>
V ShiftLeft32(V a) {
  return _mm256_slli_epi32(a, n);
}
template <int n>
V ShiftRight64(V a) {
  return _mm256_srli_epi64(a, n);
}
template <int n>
V ShiftLeft64(V a) {
  return _mm256_slli_epi64(a, n);
}
inline V ShiftEvenDwordsLeft12(V a) {
  return _mm256_sllv_epi32(a, _mm256_setr_epi32(12, 0, 12, 0, 12, 0, 12, 0));
}
inline V Shuffle8(V table, V index) { return _mm256_shuffle_epi8(table, index); }
inline V SwapQwords(V a) { return _mm256_shuffle_epi32(a, 0x4E); }
inline V SwapDwords(V a) { return _mm256_shuffle_epi32(a, 0xB1); }
inline V SwapWords(V a) { return Or(ShiftLeft32<16>(a), ShiftRight32<16>(a)); }
inline V PackUnsigned16(V a, V b) { return _mm256_packus_epi16(a, b); }
inline V PackSigned16(V a, V b) { return _mm256_packs_epi16(a, b); }
inline unsigned CountBytes(V mask) {
  return static_cast<unsigned>(_mm_popcnt_u32(static_cast<unsigned>(_mm256_movemask_epi8(mask))));
}
inline unsigned CountEqual16(V a, V b) { return CountBytes(_mm256_cmpeq_epi16(a, b)) / 2; }
inline unsigned CountEqual32(V a, V b) { return CountBytes(_mm256_cmpeq_epi32(a, b)) / 4; }
inline bool AnyBit(V a) { return _mm256_testz_si256(a, a) == 0; }
inline bool AnyLess16(V a, V b) { return AnyBit(_mm256_cmpgt_epi16(b, a)); }
inline V ReplaceWhereZero16(V a, V test, V b) {
  return _mm256_blendv_epi8(a, b, _mm256_cmpeq_epi16(test, Zero()));
}
inline V ReplaceWhereZero32(V a, V test, V b) {
  return _mm256_blendv_epi8(a, b, _mm256_cmpeq_epi32(test, Zero()));
}
inline uint32_t LargestOf32(V a) {
  a = Max32(a, SwapQwords(a));
  a = Max32(a, SwapDwords(a));
  const __m128i half = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(half));
}

inline V Narrow32(V a, V b) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8); }
inline V WidenF16(const void* from) { return _mm256_castps_si256(_mm256_cvtph_ps(LoadHalf(from))); }

inline constexpr size_t kVectors = 2;
struct Quad {
  V v[kVectors];
};

struct RowPair {
  __m256i row;
  __m256i row8;
};

// The qwords of two rows interleaved, lane by lane: those at 0 and 2, those at 1 and 3.
inline Quad InterleaveRows(V row, V row8) {
  return {{_mm256_unpacklo_epi64(row, row8), _mm256_unpackhi_epi64(row, row8)}};
}
// In a lane, words [2][4] to [4][2] and back.
inline V PairWords(V a) {
  return Shuffle8(a, _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0, 1, 8,
                                      9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
}
inline V SplitWords(V a) {
  return Shuffle8(a, _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4,
                                      5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
}

inline Quad PlaneOrder(const void* row, const void* row8) {
  // Lane 0 has q = 0, 1 and lane 1 has q = 2, 3 of every t: dwords [lane][t] to qwords [t][lane].
  const __m256i order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
  return InterleaveRows(_mm256_permutevar8x32_epi32(PairWords(Load(row)), order),
                        _mm256_permutevar8x32_epi32(PairWords(Load(row8)), order));
}

inline RowPair RowOrder(const Quad& quad) {
  const __m256i order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
  const V row = _mm256_unpacklo_epi64(quad.v[0], quad.v[1]);
  const V row8 = _mm256_unpackhi_epi64(quad.v[0], quad.v[1]);
  return {SplitWords(_mm256_permutevar8x32_epi32(row, order)),
          SplitWords(_mm256_permutevar8x32_epi32(row8, order))};
}

inline void StoreLowBytes(const Quad& words, void* to) {
  Store(to, _mm256_permute4x64_epi64(PackUnsigned16(words.v[0], words.v[1]), 0xD8));
}
inline Quad WidenBytes(const void* from) {
  const V bytes = Load(from);
  return {{_mm256_cvtepu8_epi16(_mm256_castsi256_si128(bytes)),
           _mm256_cvtepu8_epi16(_mm256_extracti128_si256(bytes, 1))}};
}

inline void StoreRecords(const Quad& low, const Quad& top, void* to_low, void* to_top) {
  Store(to_low, _mm256_permute4x64_epi64(_mm256_unpacklo_epi64(low.v[0], low.v[1]), 0xD8));
  // Lanes [t0, t2 | t1, t3] of qwords whose low words count.
  const V tops = SplitWords(_mm256_unpackhi_epi64(top.v[0], top.v[1]));
  const __m128i even = _mm_shufflelo_epi16(_mm256_castsi256_si128(tops), 0x08);
  const __m128i odd = _mm_shufflelo_epi16(_mm256_extracti128_si256(tops, 1), 0x08);
  _mm_storel_epi64(static_cast<__m128i*>(to_top), _mm_unpacklo_epi16(even, odd));
}
inline Quad LoadRecords(const void* from_low, const void* from_top) {
  const V low = Load(from_low);
  const V top = _mm256_slli_epi64(
      _mm256_cvtepu16_epi64(_mm_loadl_epi64(static_cast<const __m128i*>(from_top))), 24);
  const V shift = _mm256_setr_epi64x(0, 40, 0, 40);
  const V low01 = _mm256_srlv_epi64(_mm256_permute4x64_epi64(low, 0x50), shift);
  const V low23 = _mm256_srlv_epi64(_mm256_permute4x64_epi64(low, 0xFA), shift);
  // The tops belong to the odd qwords; the even ones keep 40 bits of their own.
  const V odd = _mm256_setr_epi64x(0, -1, 0, -1);
  return {{Or(low01, And(odd, _mm256_permute4x64_epi64(top, 0x50))),
           Or(low23, And(odd, _mm256_permute4x64_epi64(top, 0xFA)))}};
}

inline Quad LaneMaxima(const Quad block[4]) {
  Quad maxima;
  for (size_t i = 0; i < 2; ++i) {
    const V a = Max16(block[2 * i].v[0], block[2 * i].v[1]);
    const V b = Max16(block[2 * i + 1].v[0], block[2 * i + 1].v[1]);
    maxima.v[i] =
        Max16(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
  }
  return maxima;
}
template <int lane>
V BroadcastLane(const Quad& quad) {
  return _mm256_permute4x64_epi64(quad.v[lane / 2], lane % 2 == 0 ? 0x44 : 0xEE);
}

inline void StoreTileScales(const Quad& words, void* to) {
  Store(to, PackUnsigned16(words.v[0], words.v[1]));
}

inline V NibbleBytes(V step0, V weight0, V step1, V weight1) {
  // A shuffle gives 0 for an index with bit 7 set: below 16 the first one answers, else the second.
  const V step = PackUnsigned16(step0, step1);
  const V low = Shuffle8(LoadLane(kMagnitudeOfStep.index), Add8(step, Set8(0x70)));
  const V high = Shuffle8(LoadLane(kMagnitudeOfStep.index + 16), Add8(step, Set8(-16)));
  const V sign = And(ShiftRight16<4>(PackSigned16(weight0, weight1)), Set8(8));
  return Or(Or(low, high), sign);
}

// One row: lane = t/2, in it [q][t%2], to qwords t in order.
inline V JoinRow(const Quad& steps0, const Quad& weights0, const Quad& steps1,
                 const Quad& weights1) {
  const V pairs = Set16(0x1001);
  const V block0 =
      MultiplyAdd8(NibbleBytes(steps0.v[0], weights0.v[0], steps0.v[1], weights0.v[1]), pairs);
  const V block1 =
      MultiplyAdd8(NibbleBytes(steps1.v[0], weights1.v[0], steps1.v[1], weights1.v[1]), pairs);
  return SplitWords(PackUnsigned16(block0, block1));
}

inline Quad JoinBlocks(const Quad steps[4], const Quad weights[4]) {
  const Quad both = InterleaveRows(JoinRow(steps[0], weights[0], steps[1], weights[1]),
                                   JoinRow(steps[2], weights[2], steps[3], weights[3]));
  return {{_mm256_permute2x128_si256(both.v[0], both.v[1], 0x20),
           _mm256_permute2x128_si256(both.v[0], both.v[1], 0x31)}};
}

}  // namespace
}  // namespace hotplane
