// One instruction, one thin function: what simd_kernels.inc is written in, for 512-bit vectors.
// Needs AVX-512 F, BW, VL, DQ and POPCNT.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "quant/plane_tables.h"

namespace hotplane {
namespace {

using V = __m512i;

inline V Load(const void* from) { return _mm512_loadu_si512(from); }
inline void Store(void* to, V v) { _mm512_storeu_si512(to, v); }
// 16 bytes repeated in every 128-bit lane.
inline V LoadLane(const void* from) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
inline V Zero() { return _mm512_setzero_si512(); }
inline V Set8(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
inline V Set16(int x) { return _mm512_set1_epi16(static_cast<short>(x)); }
inline V Set32(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline V Set64(uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
inline V And(V a, V b) { return _mm512_and_si512(a, b); }
inline V AndNot(V not_a, V b) { return _mm512_andnot_si512(not_a, b); }
inline V Or(V a, V b) { return _mm512_or_si512(a, b); }
inline V Xor(V a, V b) { return _mm512_xor_si512(a, b); }
inline V Add8(V a, V b) { return _mm512_add_epi8(a, b); }
inline V Add16(V a, V b) { return _mm512_add_epi16(a, b); }
inline V Sub16(V a, V b) { return _mm512_sub_epi16(a, b); }
inline V Sub32(V a, V b) { return _mm512_sub_epi32(a, b); }
inline V SubSaturated16(V a, V b) { return _mm512_subs_epu16(a, b); }
inline V Max16(V a, V b) { return _mm512_max_epu16(a, b); }
inline V Max32(V a, V b) { return _mm512_max_epu32(a, b); }
inline V Multiply16(V a, V b) { return _mm512_mullo_epi16(a, b); }
inline V MultiplyHigh16(V a, V b) { return _mm512_mulhi_epu16(a, b); }
inline V MultiplyAdd8(V a, V b) { return _mm512_maddubs_epi16(a, b); }  // a unsigned, b signed
inline V MultiplyAdd16(V a, V b) { return _mm512_madd_epi16(a, b); }
template <int n>
V ShiftRight16(V a) {
  return _mm512_srli_epi16(a, n);
}
template <int n>
V ShiftLeft16(V a) {
  return _mm512_slli_epi16(a, n);
}
template <int n>
V ShiftRight32(V a) {
  return _mm512_srli_epi32(a, n);
}
template <int n>
V ShiftLeft32(V a) {
  return _mm512_slli_epi32(a, n);
}
template <int n>
V ShiftRight64(V a) {
  return _mm512_srli_epi64(a, n);
}
template <int n>
V ShiftLeft64(V a) {
  return _mm512_slli_epi64(a, n);
}
inline V ShiftEvenDwordsLeft12(V a) { return _mm512_sllv_epi32(a, _mm512_set1_epi64(12)); }
inline V Shuffle8(V table, V index) { return _mm512_shuffle_epi8(table, index); }
inline V SwapQwords(V a) { return _mm512_shuffle_epi32(a, _MM_PERM_BADC); }
inline V SwapDwords(V a) { return _mm512_shuffle_epi32(a, _MM_PERM_CDAB); }
inline V SwapWords(V a) { return _mm512_rol_epi32(a, 16); }
inline V PackUnsigned16(V a, V b) { return _mm512_packus_epi16(a, b); }
inline V PackSigned16(V a, V b) { return _mm512_packs_epi16(a, b); }
inline unsigned CountEqual16(V a, V b) {
  return static_cast<unsigned>(_mm_popcnt_u32(_mm512_cmpeq_epi16_mask(a, b)));
}
inline unsigned CountEqual32(V a, V b) {
  return static_cast<unsigned>(_mm_popcnt_u32(_mm512_cmpeq_epi32_mask(a, b)));
}
// Whether a < b in any word; both below 2^15.
inline bool AnyLess16(V a, V b) { return _mm512_cmplt_epi16_mask(a, b) != 0; }
inline bool AnyBit(V a) { return _mm512_test_epi32_mask(a, a) != 0; }
// a, with b where `test` is 0.
inline V ReplaceWhereZero16(V a, V test, V b) {
  return _mm512_mask_mov_epi16(a, _mm512_testn_epi16_mask(test, test), b);
}
inline V ReplaceWhereZero32(V a, V test, V b) {
  return _mm512_mask_mov_epi32(a, _mm512_testn_epi32_mask(test, test), b);
}
inline uint32_t LargestOf32(V a) { return _mm512_reduce_max_epu32(a); }

// 32-bit elements a, b in order, their low 16 bits (saturated, signed) as 16-bit elements.
inline V Narrow32(V a, V b) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7),
                                  _mm512_packs_epi32(a, b));
}
// F16 elements as F32. Exact, whatever the rounding and denormal modes.
inline V WidenF16(const void* from) {
  return _mm512_castps_si512(
      _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from))));
}

// 64 bytes: the four lanes (g, t=0..3) of a nibble plane, or 32 words of one scale block.
inline constexpr size_t kVectors = 1;
struct Quad {
  V v[kVectors];
};

// The nibbles of 64 columns of row g and of row g + 8, in plane order.
inline Quad PlaneOrder(const void* row, const void* row8) {
  const __m512i rows = _mm512_inserti64x4(
      _mm512_castsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(row))),
      _mm256_loadu_si256(static_cast<const __m256i*>(row8)), 1);
  return {{_mm512_permutexvar_epi16(Load(kPlaneFromRows.unit), rows)}};
}

struct RowPair {
  __m256i row;
  __m256i row8;
};
// Inverse of PlaneOrder.
inline RowPair RowOrder(const Quad& quad) {
  const __m512i rows = _mm512_permutexvar_epi16(Load(kRowsFromPlane.unit), quad.v[0]);
  return {_mm512_castsi512_si256(rows), _mm512_extracti64x4_epi64(rows, 1)};
}

// The low bytes of the 32 words.
inline void StoreLowBytes(const Quad& words, void* to) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi16_epi8(words.v[0]));
}
// 32 bytes as words.
inline Quad WidenBytes(const void* from) {
  return {{_mm512_cvtepu8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(from)))}};
}

// Of four lanes of two qwords: `low` counts in the first qword, `top` (16 bits) in the second.
inline void StoreRecords(const Quad& low, const Quad& top, void* to_low, void* to_top) {
  _mm256_storeu_si256(static_cast<__m256i*>(to_low),
                      _mm512_castsi512_si256(_mm512_maskz_compress_epi64(0x55, low.v[0])));
  const __m512i order = _mm512_castsi128_si512(_mm_setr_epi16(4, 12, 20, 28, 4, 4, 4, 4));
  _mm_storel_epi64(static_cast<__m128i*>(to_top),
                   _mm512_castsi512_si128(_mm512_permutexvar_epi16(order, top.v[0])));
}
// Four records as lanes of two qwords of 40 bits (higher bits are left over).
inline Quad LoadRecords(const void* from_low, const void* from_top) {
  const __m512i low = _mm512_permutexvar_epi64(
      _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3),
      _mm512_castsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(from_low))));
  const __m512i top = _mm512_maskz_permutexvar_epi64(
      0xAA, _mm512_setr_epi64(0, 0, 0, 1, 0, 2, 0, 3),
      _mm512_castsi256_si512(
          _mm256_cvtepu16_epi64(_mm_loadl_epi64(static_cast<const __m128i*>(from_top)))));
  const __m512i shifted = _mm512_srlv_epi64(low, _mm512_setr_epi64(0, 40, 0, 40, 0, 40, 0, 40));
  return {{_mm512_or_si512(shifted, _mm512_slli_epi64(top, 24))}};
}

// The largest words of four blocks, each in a lane of its own, not yet folded within the lane.
inline Quad LaneMaxima(const Quad block[4]) {
  const V a = Max16(_mm512_shuffle_i64x2(block[0].v[0], block[1].v[0], 0x44),
                    _mm512_shuffle_i64x2(block[0].v[0], block[1].v[0], 0xEE));
  const V b = Max16(_mm512_shuffle_i64x2(block[2].v[0], block[3].v[0], 0x44),
                    _mm512_shuffle_i64x2(block[2].v[0], block[3].v[0], 0xEE));
  return {{Max16(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD))}};
}
template <int lane>
V BroadcastLane(const Quad& quad) {
  return _mm512_shuffle_i64x2(quad.v[0], quad.v[0], lane * 0x55);
}

// Words of four lanes [block 0 of rows g | block 1 | block 0 of rows g + 8 | block 1], g ascending
// within the lane, to the 32 bytes of a tile in the scale plane.
inline void StoreTileScales(const Quad& words, void* to) {
  _mm256_storeu_si256(static_cast<__m256i*>(to),
                      _mm256_permute4x64_epi64(_mm512_cvtepi16_epi8(words.v[0]), 0xD8));
}

// The magnitude index of each step (see simd_kernels.inc) with the weight's sign as its bit 3, in
// bytes: those of the first vector and of the second alternate by 8.
inline V NibbleBytes(V step0, V weight0, V step1, V weight1) {
  const V table = _mm512_cvtepu8_epi16(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kMagnitudeOfStep.index)));
  const V magnitude = PackUnsigned16(_mm512_permutexvar_epi16(step0, table),
                                     _mm512_permutexvar_epi16(step1, table));
  return Or(magnitude, And(ShiftRight16<4>(PackSigned16(weight0, weight1)), Set8(8)));
}

// Blocks: row g columns 0-31, 32-63, row g + 8 the same, as steps and weights, in plane order.
inline Quad JoinBlocks(const Quad steps[4], const Quad weights[4]) {
  const V pairs = Set16(0x1001);  // even k + 16 * odd k
  const V row = MultiplyAdd8(
      NibbleBytes(steps[0].v[0], weights[0].v[0], steps[1].v[0], weights[1].v[0]), pairs);
  const V row8 = MultiplyAdd8(
      NibbleBytes(steps[2].v[0], weights[2].v[0], steps[3].v[0], weights[3].v[0]), pairs);
  return {{_mm512_permutexvar_epi16(Load(kPlaneFromBlocks512.unit), PackUnsigned16(row, row8))}};
}

}  // namespace
}  // namespace hotplane
