// The number formats: e2m1 nibbles, e8m0 block scales, the symmetric 2-bit code and the plane
// orders. ABI name tsym4-e8m0-fragmajor-a32-v2. Kernels and the file format both cite this header;
// docs/format/planes.md is its prose.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotplane {

inline constexpr char kPlaneAbiName[] = "tsym4-e8m0-fragmajor-a32-v2";

// Scale blocks run along k: one e8m0 byte for 32 consecutive elements of a row. Byte b is
// 2^(b-127).
inline constexpr size_t kScaleBlock = 32;
inline constexpr uint8_t kE8m0NaN = 255;  // refused on input, never written
inline constexpr int kE8m0Bias = 127;

// Planes tile the matrix into strips of 16 rows by 64 columns: what one warp's fragment pair
// covers.
inline constexpr size_t kStripRows = 16;
inline constexpr size_t kTileColumns = 64;
inline constexpr size_t kTileElements = kStripRows * kTileColumns;      // 1024
inline constexpr size_t kTileCodeBytes = kTileElements / 4;             // 256
inline constexpr size_t kTileNibbleBytes = kTileElements / 2;           // 512
inline constexpr size_t kTileQuintalBytes = kTileElements * 5 / 16;     // 320
inline constexpr size_t kTileScaleBytes = kTileElements / kScaleBlock;  // 32
static_assert(kTileCodeBytes + kTileScaleBytes == 288);

// Magnitudes of e2m1, doubled so that they are integers: {0, .5, 1, 1.5, 2, 3, 4, 6} * 2.
inline constexpr uint8_t kE2m1MagnitudeTimes2[8] = {0, 1, 2, 3, 4, 6, 8, 12};

// The first magnitude index whose code is +-4; below it the code is +-1.
inline constexpr unsigned kLargeMagnitudeIndex = 5;

// Value of a 2-bit code.
inline constexpr int kCodeValue[4] = {-4, -1, 1, 4};

// The code of a nibble: sign kept (of zero too), magnitude index 0-4 -> 1, 5-7 -> 4.
constexpr unsigned CodeOfNibble(unsigned nibble) {
  const bool negative = (nibble & 8) != 0;
  const bool large = (nibble & 7) >= kLargeMagnitudeIndex;
  return negative ? (large ? 0u : 1u) : (large ? 3u : 2u);
}

// The quintal digit of a nibble: magnitude index, minus 5 when the code is +-4. In 0..4.
constexpr unsigned DigitOfNibble(unsigned nibble) {
  const unsigned magnitude = nibble & 7;
  return magnitude >= kLargeMagnitudeIndex ? magnitude - kLargeMagnitudeIndex : magnitude;
}

// The nibble with this code and digit; inverse of the two above. Large codes use digits 0..2 only.
constexpr unsigned NibbleOf(unsigned code, unsigned digit) {
  const bool large = code == 0 || code == 3;
  return (code < 2 ? 8u : 0u) | (digit + (large ? kLargeMagnitudeIndex : 0));
}

// Bytes of an [n, k] matrix in each plane; n % 16 == 0, k % 64 == 0.
constexpr size_t CodePlaneBytes(size_t n, size_t k) { return n * k / 4; }
constexpr size_t NibblePlaneBytes(size_t n, size_t k) { return n * k / 2; }
constexpr size_t QuintalPlaneBytes(size_t n, size_t k) { return n * k / 16 * 5; }
constexpr size_t ScalePlaneBytes(size_t n, size_t k) { return n * k / kScaleBlock; }

}  // namespace hotplane
