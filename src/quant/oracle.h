// A slow second opinion for the tests: the definitions of docs/format/planes.md again, written
// independently of the scalar kernels and in exact or wider arithmetic. Not for use outside tests.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "quant/quantize.h"

namespace hotplane::oracle {

using Bytes = std::vector<std::byte>;

// Row-major nibbles, one per byte, and scales of an [n, k] matrix.
struct Matrix {
  size_t n = 0;
  size_t k = 0;
  std::vector<uint8_t> nibbles;
  std::vector<uint8_t> scales;
};

struct Planes {
  Bytes codes, scales, nibbles, quintals;
};

inline long double Value(SourceFormat format, const std::byte* elements, size_t index) {
  if (format == SourceFormat::kF32) {
    float value;
    std::memcpy(&value, elements + index * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, elements + index * 2, 2);
  const int fraction_bits = format == SourceFormat::kBf16 ? 7 : 10;
  const int bias = format == SourceFormat::kBf16 ? 127 : 15;
  const int field = (bits & 0x7FFF) >> fraction_bits;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int significand = field == 0 ? fraction : fraction | 1 << fraction_bits;
  const int exponent = (field == 0 ? 1 : field) - bias - fraction_bits;
  const long double magnitude = std::ldexp(static_cast<long double>(significand), exponent);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// e is the integer with 2^(e-1/2) < amax/6 + 1e-30 < 2^(e+1/2): compared as squares, which needs no
// logarithm. No value of a 24-bit amax is a tie.
inline int Exponent(long double amax) {
  if (amax == 0) return -127;
  const long double scaled = amax / 6 + 1e-30L;
  // A power of two above scaled / 4 is far enough below to count up from.
  int e = std::ilogb(scaled) - 1;
  while (scaled * scaled > std::ldexp(1.0L, 2 * e + 1)) ++e;
  return e < -127 ? -127 : e > 127 ? 127 : e;
}

inline uint8_t Nibble(long double weight, int e, size_t column, bool alternate_zeros) {
  static constexpr long double kQuarters[7] = {1, 3, 5, 7, 10, 14, 20};
  unsigned nibble = 0;
  for (const long double midpoint : kQuarters) {
    if (std::ldexp(midpoint, e - 2) < std::fabs(weight)) ++nibble;
  }
  const bool negative = weight == 0 && alternate_zeros ? column % 2 == 1 : std::signbit(weight);
  return static_cast<uint8_t>(nibble + (negative ? 8 : 0));
}

inline Matrix Requantize(SourceFormat format, const std::byte* elements, size_t n, size_t k,
                         bool alternate_zeros) {
  Matrix matrix = {n, k, std::vector<uint8_t>(n * k), std::vector<uint8_t>(n * k / 32)};
  for (size_t first = 0; first < n * k; first += 32) {
    long double amax = 0;
    for (size_t i = first; i < first + 32; ++i) {
      amax = std::fmax(amax, std::fabs(Value(format, elements, i)));
    }
    const int e = Exponent(amax);
    matrix.scales[first / 32] = static_cast<uint8_t>(e + 127);
    for (size_t i = first; i < first + 32; ++i) {
      matrix.nibbles[i] = Nibble(Value(format, elements, i), e, i % k, alternate_zeros);
    }
  }
  return matrix;
}

inline void AddBits(Bytes& bytes, size_t at, unsigned bits) { bytes.at(at) |= std::byte(bits); }

inline Planes Pack(const Matrix& matrix) {
  static constexpr unsigned kCode[16] = {2, 2, 2, 2, 2, 3, 3, 3, 1, 1, 1, 1, 1, 0, 0, 0};
  static constexpr unsigned kDigit[16] = {0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2};
  static constexpr unsigned kWeight[4] = {1, 5, 25, 125};
  const size_t count = matrix.n * matrix.k;
  Planes planes = {Bytes(count / 4), Bytes(count / 32), Bytes(count / 2), Bytes(count * 5 / 16)};
  std::vector<unsigned> words(count / 4);
  for (size_t n = 0; n < matrix.n; ++n) {
    for (size_t k = 0; k < matrix.k; ++k) {
      const unsigned nibble = matrix.nibbles[n * matrix.k + k];
      const size_t nb = n / 16, tile = n % 16 / 8, g = n % 8;
      const size_t kb = k / 64, k32 = k % 64 / 32, half = k % 32 / 16, t = k % 16 / 4, j = k % 4;
      const size_t lane = ((nb * (matrix.k / 64) + kb) * 8 + g) * 4 + t;
      const size_t w = tile * 4 + k32 * 2 + half;
      AddBits(planes.codes, lane * 8 + w, kCode[nibble] << (2 * j));
      AddBits(planes.nibbles, lane * 16 + w * 2 + j / 2, nibble << (4 * (j % 2)));
      words[lane * 8 + w] += kWeight[j] * kDigit[nibble];
      planes.scales[(nb * (matrix.k / 32) + k / 32) * 16 + n % 16] =
          std::byte{matrix.scales[(n * matrix.k + k) / 32]};
    }
  }
  for (size_t lane = 0; lane < count / 32; ++lane) {
    uint64_t low = 0;
    for (size_t w = 0; w < 7; ++w) low |= uint64_t{words[lane * 8 + w]} << (10 * w);
    const auto top = static_cast<uint16_t>(words[lane * 8 + 6] >> 4 | words[lane * 8 + 7] << 6);
    std::byte* block = planes.quintals.data() + lane / 32 * 320;
    std::memcpy(block + lane % 32 * 8, &low, 8);
    std::memcpy(block + 256 + lane % 32 * 2, &top, 2);
  }
  return planes;
}

inline Bytes PackedNibbles(const Matrix& matrix) {
  Bytes packed(matrix.nibbles.size() / 2);
  for (size_t i = 0; i < matrix.nibbles.size(); ++i) {
    AddBits(packed, i / 2, unsigned{matrix.nibbles[i]} << (4 * (i % 2)));
  }
  return packed;
}

inline Bytes ScaleBytes(const Matrix& matrix) {
  Bytes scales(matrix.scales.size());
  std::memcpy(scales.data(), matrix.scales.data(), scales.size());
  return scales;
}

}  // namespace hotplane::oracle
