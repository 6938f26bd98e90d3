// Quantization of one tile (16 rows by 64 columns) in the pieces that a GPU's threads compute side
// by side; one source for kernel and host. docs/format/planes.md has the rules and the orders.
//
// Thread t of 32 first makes the nibbles of one block of 32 columns (row t / 2, half t % 2), then,
// once all have, lane t of the tile's planes. Everything is compared in float64, where midpoints
// times powers of two, and all values but quotients, are exact.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "device/host_device.h"
#include "format/kinds.h"
#include "format/tsym4.h"

namespace hotplane::tile {

inline constexpr unsigned kThreads = 32;
static_assert(kThreads == kStripRows * (kTileColumns / kScaleBlock));
static_assert(kThreads * kScaleBlock == kTileElements);

// As many as there are scale bytes; entry b is the smallest float64 whose byte is at least b.
inline constexpr unsigned kThresholdCount = 255;

// A matrix [n, k], row-major, in memory that whoever computes can read; n % 16 == 0, k % 64 == 0.
// `elements` is aligned to 16 bytes.
struct Source {
  const uint8_t* elements;
  const uint8_t* scales;       // e8m0 [n, k/32] of kMxfp4, e4m3 [n, k/16] of kNvfp4
  const double* block_scales;  // of kFp8: [ceil(n/block_rows), ceil(k/block_columns)]
  double global_scale;         // of kNvfp4
  uint64_t n;
  uint64_t k;
  uint32_t block_rows;
  uint32_t block_columns;
  SourceFormat format;
  bool divide;  // of kNvfp4: by the global scale
};

// Null: not wanted. Each is aligned to 16 bytes.
struct Planes {
  uint8_t* codes;
  uint8_t* scales;
  uint8_t* nibbles;
  uint8_t* quintals;
};

struct Counts {
  uint64_t positive_zeros;
  uint64_t negative_zeros;
  uint64_t unusable;  // NaN and infinite values; scales that are NaN or have a sign
};

struct Place {
  uint64_t row;
  uint64_t block;  // of 32 columns
};
HP_HOST_DEVICE Place PlaceOf(const Source& source, uint64_t tile, unsigned thread) {
  const uint64_t tiles_per_strip = source.k / kTileColumns;
  return {tile / tiles_per_strip * kStripRows + thread / 2,
          tile % tiles_per_strip * 2 + thread % 2};
}

HP_HOST_DEVICE uint64_t TileCount(const Source& source) {
  return source.n * source.k / kTileElements;
}

struct alignas(16) Words {
  uint32_t word[4];
};
HP_HOST_DEVICE Words ReadWords(const uint8_t* at) {
  Words words;
#if defined(__CUDA_ARCH__)
  const uint4 read = *reinterpret_cast<const uint4*>(at);
  words = {{read.x, read.y, read.z, read.w}};
#else
  std::memcpy(&words, at, sizeof(words));
#endif
  return words;
}

template <typename To, typename From>
HP_HOST_DEVICE To BitsAs(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// 2^exponent, which is a normal float64.
HP_HOST_DEVICE double PowerOf2(int exponent) {
  return BitsAs<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// Of bytes without their sign, and not NaN.
HP_HOST_DEVICE double E4m3Magnitude(unsigned byte) {
  const unsigned field = byte >> 3;
  const unsigned fraction = byte & 7;
  return field == 0 ? fraction * PowerOf2(-9)
                    : (8 + fraction) * PowerOf2(static_cast<int>(field) - 10);
}
HP_HOST_DEVICE double E2m1Magnitude(unsigned index) {
  const unsigned times2 = index < 4 ? index : (2 + index % 2) << (index / 2 - 1);
  return times2 * .5;
}
HP_HOST_DEVICE double F16Magnitude(unsigned bits) {
  const unsigned field = bits >> 10;
  const unsigned fraction = bits & 1023;
  return field == 0 ? fraction * PowerOf2(-24)
                    : (1024 + fraction) * PowerOf2(static_cast<int>(field) - 25);
}

// 32 consecutive elements of a row that are not kMxfp4.
struct Block {
  double magnitude[kScaleBlock];
  uint32_t signs;  // bit i
  bool unusable;
};

template <unsigned kBytes>
HP_HOST_DEVICE unsigned ElementOf(const Words& words, unsigned index) {
  constexpr unsigned kPerWord = 4 / kBytes;
  return words.word[index / kPerWord] >> (index % kPerWord * kBytes * 8) &
         (kBytes == 1 ? 0xFFu : 0xFFFFu);
}

HP_HOST_DEVICE void ReadF32(const uint8_t* at, Block* block) {
  HP_UNROLL
  for (unsigned i = 0; i < kScaleBlock; i += 4) {
    const Words words = ReadWords(at + i * 4);
    HP_UNROLL
    for (unsigned j = 0; j < 4; ++j) {
      const uint32_t bits = words.word[j];
      block->signs |= bits >> 31 << (i + j);
      block->unusable = block->unusable || (bits & 0x7F800000u) == 0x7F800000u;
      block->magnitude[i + j] = double{BitsAs<float>(bits & 0x7FFFFFFFu)};
    }
  }
}

HP_HOST_DEVICE void ReadHalves(const uint8_t* at, bool bf16, Block* block) {
  const unsigned infinity = bf16 ? 0x7F80 : 0x7C00;
  HP_UNROLL
  for (unsigned i = 0; i < kScaleBlock; i += 8) {
    const Words words = ReadWords(at + i * 2);
    HP_UNROLL
    for (unsigned j = 0; j < 8; ++j) {
      const unsigned bits = ElementOf<2>(words, j);
      block->signs |= bits >> 15 << (i + j);
      block->unusable = block->unusable || (bits & infinity) == infinity;
      block->magnitude[i + j] =
          bf16 ? double{BitsAs<float>((bits & 0x7FFFu) << 16)} : F16Magnitude(bits & 0x7FFFu);
    }
  }
}

HP_HOST_DEVICE double BlockScale(const Source& source, uint64_t row, uint64_t column) {
  const uint64_t columns = (source.k + source.block_columns - 1) / source.block_columns;
  return source.block_scales[row / source.block_rows * columns + column / source.block_columns];
}

HP_HOST_DEVICE void ReadFp8(const Source& source, const Place& place, Block* block) {
  const uint64_t first = place.block * kScaleBlock;
  const bool one_scale = source.block_columns % kScaleBlock == 0;
  const double block_scale = BlockScale(source, place.row, first);
  HP_UNROLL
  for (unsigned i = 0; i < kScaleBlock; i += 16) {
    const Words words = ReadWords(source.elements + place.row * source.k + first + i);
    HP_UNROLL
    for (unsigned j = 0; j < 16; ++j) {
      const unsigned byte = ElementOf<1>(words, j);
      const double scale = one_scale ? block_scale : BlockScale(source, place.row, first + i + j);
      block->signs |= byte >> 7 << (i + j);
      block->unusable = block->unusable || (byte & 0x7F) == 0x7F;
      block->magnitude[i + j] = E4m3Magnitude(byte & 0x7F) * scale;
    }
  }
}

HP_HOST_DEVICE void ReadNvfp4(const Source& source, const Place& place, Block* block) {
  const uint64_t first = place.row * source.k + place.block * kScaleBlock;
  const Words words = ReadWords(source.elements + first / 2);
  const uint8_t* const scales = source.scales + first / 16;
  HP_UNROLL
  for (unsigned i = 0; i < kScaleBlock; ++i) {
    const unsigned byte = scales[i / 16];
    const unsigned nibble = words.word[i / 8] >> (i % 8 * 4) & 15;
    const double product = E2m1Magnitude(nibble & 7) * E4m3Magnitude(byte & 0x7F);
    block->signs |= nibble >> 3 << i;
    block->unusable = block->unusable || byte > 0x7E;
    block->magnitude[i] =
        source.divide ? product / source.global_scale : product * source.global_scale;
  }
}

HP_HOST_DEVICE void ReadBlock(const Source& source, const Place& place, Block* block) {
  block->signs = 0;
  block->unusable = false;
  const uint64_t first = place.row * source.k + place.block * kScaleBlock;
  switch (source.format) {
    case SourceFormat::kNvfp4: return ReadNvfp4(source, place, block);
    case SourceFormat::kFp8: return ReadFp8(source, place, block);
    case SourceFormat::kF32: return ReadF32(source.elements + first * 4, block);
    default:
      return ReadHalves(source.elements + first * 2, source.format == SourceFormat::kBf16, block);
  }
}

// Adds what is in the thread's block of the tile.
HP_HOST_DEVICE void CountBlock(const Source& source, uint64_t tile, unsigned thread,
                               Counts* counts) {
  const Place place = PlaceOf(source, tile, thread);
  if (source.format == SourceFormat::kMxfp4) {
    const uint8_t scale = source.scales[place.row * (source.k / kScaleBlock) + place.block];
    counts->unusable += scale == kE8m0NaN ? 1 : 0;
    return;
  }
  Block block;
  ReadBlock(source, place, &block);
  unsigned zeros = 0;
  unsigned negative = 0;
  HP_UNROLL
  for (unsigned i = 0; i < kScaleBlock; ++i) {
    const unsigned zero = block.magnitude[i] == 0 ? 1 : 0;
    zeros += zero;
    negative += zero & block.signs >> i;
  }
  counts->positive_zeros += zeros - negative;
  counts->negative_zeros += negative;
  counts->unusable += block.unusable ? 1 : 0;
}

// The largest b with thresholds[b] <= amax; thresholds[0] is 0.
HP_HOST_DEVICE unsigned ScaleByte(const double* thresholds, double amax) {
  unsigned low = 0;
  unsigned high = kThresholdCount;
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    if (thresholds[middle] <= amax) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

HP_HOST_DEVICE unsigned MagnitudeIndex(double magnitude, double unit) {
  return (.25 * unit < magnitude) + (.75 * unit < magnitude) + (1.25 * unit < magnitude) +
         (1.75 * unit < magnitude) + (2.5 * unit < magnitude) + (3.5 * unit < magnitude) +
         (5 * unit < magnitude);
}

// A block's nibbles, in the order of its columns, and its scale byte.
struct BlockNibbles {
  Words words;
  uint8_t scale;
};
HP_HOST_DEVICE BlockNibbles QuantizeBlock(const Source& source, const Place& place,
                                          const double* thresholds, bool alternate_zeros) {
  const uint64_t block_index = place.row * (source.k / kScaleBlock) + place.block;
  if (source.format == SourceFormat::kMxfp4)
    return {ReadWords(source.elements + block_index * 16), source.scales[block_index]};
  Block block;
  ReadBlock(source, place, &block);
  double amax = 0;
  HP_UNROLL
  for (unsigned i = 0; i < kScaleBlock; ++i)
    amax = block.magnitude[i] > amax ? block.magnitude[i] : amax;
  const unsigned scale = ScaleByte(thresholds, amax);
  const double unit = PowerOf2(static_cast<int>(scale) - kE8m0Bias);
  BlockNibbles nibbles = {{{0, 0, 0, 0}}, static_cast<uint8_t>(scale)};
  HP_UNROLL
  for (unsigned i = 0; i < kScaleBlock; ++i) {
    const unsigned own = block.signs >> i & 1;
    const unsigned sign = alternate_zeros && block.magnitude[i] == 0 ? i % 2 : own;
    const unsigned nibble = MagnitudeIndex(block.magnitude[i], unit) | sign << 3;
    nibbles.words.word[i / 8] |= nibble << (i % 8 * 4);
  }
  return nibbles;
}

// The nibbles of a tile as its threads left them; row r, half h at thread 2r + h.
struct Nibbles {
  Words block[kThreads];
};

// A thread's first part.
HP_HOST_DEVICE void QuantizePart(const Source& source, const Planes& planes,
                                 const double* thresholds, bool alternate_zeros, uint64_t tile,
                                 unsigned thread, Nibbles* nibbles) {
  const BlockNibbles made =
      QuantizeBlock(source, PlaceOf(source, tile, thread), thresholds, alternate_zeros);
  nibbles->block[thread] = made.words;
  if (planes.scales != nullptr)
    planes.scales[tile * kTileScaleBytes + thread % 2 * kStripRows + thread / 2] = made.scale;
}

// The eight words of four nibbles of one lane.
struct Lane {
  unsigned word[8];
};
HP_HOST_DEVICE Lane LaneOf(const Nibbles& nibbles, unsigned lane) {
  const unsigned g = lane / 4;
  const unsigned t = lane % 4;
  Lane words;
  HP_UNROLL
  for (unsigned w = 0; w < 8; ++w) {
    const unsigned row = w / 4 * 8 + g;
    const Words& block = nibbles.block[row * 2 + w / 2 % 2];
    // 16 bits of the half's two words of 32.
    const unsigned at = w % 2 * 4 + t;
    words.word[w] = block.word[at / 2] >> (at % 2 * 16) & 0xFFFFu;
  }
  return words;
}

HP_HOST_DEVICE unsigned CodeByte(unsigned word) {
  unsigned byte = 0;
  HP_UNROLL
  for (unsigned j = 0; j < 4; ++j) byte |= CodeOfNibble(word >> (4 * j) & 15) << (2 * j);
  return byte;
}

HP_HOST_DEVICE unsigned QuintalWord(unsigned word) {
  return DigitOfNibble(word & 15) + 5 * DigitOfNibble(word >> 4 & 15) +
         25 * DigitOfNibble(word >> 8 & 15) + 125 * DigitOfNibble(word >> 12 & 15);
}

template <typename T>
HP_HOST_DEVICE void Store(uint8_t* at, T value) {
#if defined(__CUDA_ARCH__)
  *reinterpret_cast<T*>(at) = value;
#else
  std::memcpy(at, &value, sizeof(value));
#endif
}

// A thread's second part, after the first of all threads of the tile.
HP_HOST_DEVICE void WriteLane(const Planes& planes, const Nibbles& nibbles, uint64_t tile,
                              unsigned lane) {
  const Lane words = LaneOf(nibbles, lane);
  uint64_t codes = 0;
  uint64_t low_nibbles = 0;
  uint64_t high_nibbles = 0;
  uint64_t quintals = 0;
  HP_UNROLL
  for (unsigned w = 0; w < 8; ++w) {
    codes |= static_cast<uint64_t>(CodeByte(words.word[w])) << (8 * w);
    const uint64_t four = words.word[w];
    if (w < 4) low_nibbles |= four << (16 * w);
    if (w >= 4) high_nibbles |= four << (16 * (w - 4));
    if (w < 7) quintals |= static_cast<uint64_t>(QuintalWord(words.word[w])) << (10 * w);
  }
  if (planes.codes != nullptr) Store(planes.codes + tile * kTileCodeBytes + lane * 8, codes);
  if (planes.nibbles != nullptr) {
    uint8_t* const at = planes.nibbles + tile * kTileNibbleBytes + lane * 16;
    Store(at, low_nibbles);
    Store(at + 8, high_nibbles);
  }
  if (planes.quintals != nullptr) {
    uint8_t* const at = planes.quintals + tile * kTileQuintalBytes;
    Store(at + lane * 8, quintals);
    const unsigned top = QuintalWord(words.word[6]) >> 4 | QuintalWord(words.word[7]) << 6;
    Store(at + 256 + lane * 2, static_cast<uint16_t>(top));
  }
}

}  // namespace hotplane::tile
