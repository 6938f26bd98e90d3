// The reference: one element at a time, straight from the definitions.

#include <bit>
#include <cmath>
#include <cstring>

#include "format/number_values.h"
#include "quant/exponent_rule.h"
#include "quant/kernel_tables.h"
#include "quant/scaled_rules.h"

namespace hotplane {
namespace {

// The nibbles of 16 rows by 64 columns, one per byte.
struct Tile {
  uint8_t nibbles[kStripRows][kTileColumns];
};

// Where an element of a tile lies in the tile's piece of each plane.
struct Place {
  Place(size_t row, size_t column)
      : lane(row % 8 * 4 + column % 16 / 4),
        word(row / 8 * 4 + column / 32 * 2 + column % 32 / 16),
        j(column % 4) {}
  size_t code_byte() const { return lane * 8 + word; }
  size_t nibble_byte() const { return lane * 16 + word * 2 + j / 2; }

  size_t lane;  // 0..31
  size_t word;  // of the lane, 0..7
  size_t j;     // of the word, 0..3
};

unsigned ReadNibble(const std::byte* bytes, size_t index) {
  const auto byte = std::to_integer<unsigned>(bytes[index / 2]);
  return index % 2 != 0 ? byte >> 4 : byte & 15;
}

void OrInto(std::byte& byte, unsigned bits) { byte |= std::byte(bits); }

template <typename Visit>
void ForEachElement(Visit visit) {
  for (size_t row = 0; row < kStripRows; ++row) {
    for (size_t column = 0; column < kTileColumns; ++column) visit(row, column);
  }
}

void WriteCodes(const Tile& tile, std::byte* codes) {
  std::memset(codes, 0, kTileCodeBytes);
  ForEachElement([&](size_t row, size_t column) {
    const Place place(row, column);
    OrInto(codes[place.code_byte()], CodeOfNibble(tile.nibbles[row][column]) << (2 * place.j));
  });
}

void WriteNibbles(const Tile& tile, std::byte* nibbles) {
  std::memset(nibbles, 0, kTileNibbleBytes);
  ForEachElement([&](size_t row, size_t column) {
    const Place place(row, column);
    OrInto(nibbles[place.nibble_byte()],
           unsigned{tile.nibbles[row][column]} << (4 * (place.j % 2)));
  });
}

Tile ReadNibbles(const std::byte* nibbles) {
  Tile tile;
  ForEachElement([&](size_t row, size_t column) {
    const Place place(row, column);
    const unsigned nibble = ReadNibble(nibbles, place.nibble_byte() * 2 + place.j % 2);
    tile.nibbles[row][column] = static_cast<uint8_t>(nibble);
  });
  return tile;
}

// The quintal words of a tile: [lane][word], 10 bits each.
struct QuintalWords {
  unsigned words[32][8];
};

constexpr unsigned kPowerOf5[4] = {1, 5, 25, 125};
constexpr unsigned kQuintalWordMax = 624;  // all four digits 4
static_assert(kQuintalWordMax == 4 * (1 + 5 + 25 + 125));

// Bit `bit` of a lane's record lies in this bit of the tile's block.
size_t RecordBit(size_t lane, size_t bit) {
  return bit < 64 ? lane * 64 + bit : 256 * 8 + lane * 16 + (bit - 64);
}

void WriteQuintals(const Tile& tile, std::byte* quintals) {
  QuintalWords quintal = {};
  ForEachElement([&](size_t row, size_t column) {
    const Place place(row, column);
    quintal.words[place.lane][place.word] +=
        kPowerOf5[place.j] * DigitOfNibble(tile.nibbles[row][column]);
  });
  std::memset(quintals, 0, kTileQuintalBytes);
  for (size_t lane = 0; lane < 32; ++lane) {
    for (size_t bit = 0; bit < 80; ++bit) {
      const size_t at = RecordBit(lane, bit);
      OrInto(quintals[at / 8], (quintal.words[lane][bit / 10] >> (bit % 10) & 1) << (at % 8));
    }
  }
}

QuintalWords ReadQuintals(const std::byte* quintals) {
  QuintalWords quintal = {};
  for (size_t lane = 0; lane < 32; ++lane) {
    for (size_t bit = 0; bit < 80; ++bit) {
      const size_t at = RecordBit(lane, bit);
      const unsigned value = std::to_integer<unsigned>(quintals[at / 8]) >> (at % 8) & 1;
      quintal.words[lane][bit / 10] |= value << (bit % 10);
    }
  }
  return quintal;
}

void WriteTile(const Tile& tile, size_t index, const PlaneOutputs& out) {
  if (out.codes != nullptr) WriteCodes(tile, out.codes + index * kTileCodeBytes);
  if (out.nibbles != nullptr) WriteNibbles(tile, out.nibbles + index * kTileNibbleBytes);
  if (out.quintals != nullptr) WriteQuintals(tile, out.quintals + index * kTileQuintalBytes);
}

// Byte of the scale plane for row n and block `block` of [n, k].
size_t ScalePlace(size_t row, size_t block, size_t k) {
  return (row / kStripRows * (k / kScaleBlock) + block) * kStripRows + row % kStripRows;
}

bool PackMxfp4(const std::byte* nibbles, const std::byte* scales, size_t n, size_t k,
               const PlaneOutputs& out) {
  const size_t blocks = k / kScaleBlock;
  for (size_t row = 0; row < n; ++row) {
    for (size_t block = 0; block < blocks; ++block) {
      const std::byte scale = scales[row * blocks + block];
      if (scale == std::byte{kE8m0NaN}) return false;
      if (out.scales != nullptr) out.scales[ScalePlace(row, block, k)] = scale;
    }
  }
  const size_t tiles_per_strip = k / kTileColumns;
  for (size_t index = 0; index < n * k / kTileElements; ++index) {
    const size_t first_row = index / tiles_per_strip * kStripRows;
    const size_t first_column = index % tiles_per_strip * kTileColumns;
    Tile tile;
    ForEachElement([&](size_t row, size_t column) {
      const size_t element = (first_row + row) * k + first_column + column;
      tile.nibbles[row][column] = static_cast<uint8_t>(ReadNibble(nibbles, element));
    });
    WriteTile(tile, index, out);
  }
  return true;
}

double ReadBf16(const std::byte* element) {
  uint16_t bits;
  std::memcpy(&bits, element, sizeof bits);
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

double ReadF32(const std::byte* element) {
  float value;
  std::memcpy(&value, element, sizeof value);
  return value;
}

double ReadF16(const std::byte* element) {
  uint16_t bits;
  std::memcpy(&bits, element, sizeof bits);
  return F16Value(bits);
}

double ReadElement(SourceFormat format, const std::byte* elements, size_t index) {
  switch (format) {
    case SourceFormat::kBf16: return ReadBf16(elements + index * 2);
    case SourceFormat::kF16: return ReadF16(elements + index * 2);
    default: return ReadF32(elements + index * 4);
  }
}

constexpr double kMidpoints[7] = {.25, .75, 1.25, 1.75, 2.5, 3.5, 5};

unsigned QuantizeElement(double weight, int exponent, bool odd_column, bool alternate_zeros) {
  const bool negative = weight == 0 && alternate_zeros ? odd_column : std::signbit(weight);
  const double magnitude = std::fabs(std::ldexp(weight, -exponent));
  unsigned index = 0;
  for (const double midpoint : kMidpoints) index += midpoint < magnitude ? 1 : 0;
  return (negative ? 8u : 0u) | index;
}

// `value(row, column)` gives the weight in float64, exactly.
template <typename Value>
void QuantizeValues(size_t n, size_t k, bool alternate_zeros, const PlaneOutputs& out,
                    Value value) {
  const size_t tiles_per_strip = k / kTileColumns;
  for (size_t index = 0; index < n * k / kTileElements; ++index) {
    Tile tile;
    for (size_t row = 0; row < kStripRows; ++row) {
      const size_t matrix_row = index / tiles_per_strip * kStripRows + row;
      for (size_t half = 0; half < kTileColumns / kScaleBlock; ++half) {
        const size_t block = index % tiles_per_strip * 2 + half;
        double weights[kScaleBlock];
        double amax = 0;
        for (size_t i = 0; i < kScaleBlock; ++i) {
          weights[i] = value(matrix_row, block * kScaleBlock + i);
          amax = std::fmax(amax, std::fabs(weights[i]));
        }
        const uint8_t scale = ScaleByteOf(amax);
        if (out.scales != nullptr) out.scales[ScalePlace(matrix_row, block, k)] = std::byte{scale};
        for (size_t i = 0; i < kScaleBlock; ++i) {
          tile.nibbles[row][half * kScaleBlock + i] = static_cast<uint8_t>(
              QuantizeElement(weights[i], scale - kE8m0Bias, i % 2 != 0, alternate_zeros));
        }
      }
    }
    WriteTile(tile, index, out);
  }
}

void Quantize(SourceFormat format, const std::byte* elements, size_t n, size_t k,
              bool alternate_zeros, const PlaneOutputs& out) {
  QuantizeValues(n, k, alternate_zeros, out, [=](size_t row, size_t column) {
    return ReadElement(format, elements, row * k + column);
  });
}

void QuantizeNvfp4(const Nvfp4Matrix& matrix, size_t n, size_t k, bool alternate_zeros,
                   const PlaneOutputs& out) {
  QuantizeValues(n, k, alternate_zeros, out, [&](size_t row, size_t column) {
    const size_t index = row * k + column;
    const double scale = E4m3Value(std::to_integer<uint8_t>(matrix.scales[index / kNvfp4Block]));
    return Nvfp4Value(E2m1Value(ReadNibble(matrix.nibbles, index)) * scale, matrix);
  });
}

double Fp8Value(const Fp8Matrix& matrix, size_t k, size_t row, size_t column) {
  const size_t row_blocks = (k + matrix.block_columns - 1) / matrix.block_columns;
  return E4m3Value(std::to_integer<uint8_t>(matrix.elements[row * k + column])) *
         matrix.scales[row / matrix.block_rows * row_blocks + column / matrix.block_columns];
}

void QuantizeFp8(const Fp8Matrix& matrix, size_t n, size_t k, bool alternate_zeros,
                 const PlaneOutputs& out) {
  QuantizeValues(n, k, alternate_zeros, out,
                 [&](size_t row, size_t column) { return Fp8Value(matrix, k, row, column); });
}

void CountZero(double weight, ZeroCount& zeros) {
  if (weight == 0) ++(std::signbit(weight) ? zeros.negative : zeros.positive);
}

ZeroCount CountZerosNvfp4(const std::byte* nibbles, const std::byte* scales, size_t count) {
  ZeroCount zeros;
  for (size_t i = 0; i < count; ++i) {
    const std::byte scale = scales[i / kNvfp4Block];
    const double magnitude = E2m1Value(ReadNibble(nibbles, i));
    CountZero(scale == std::byte{0} ? magnitude * 0.0 : magnitude, zeros);
    zeros.finite = zeros.finite && scale < std::byte{kE4m3Magnitudes};
  }
  return zeros;
}

ZeroCount CountZerosFp8(const Fp8Matrix& matrix, size_t n, size_t k) {
  ZeroCount zeros;
  for (size_t i = 0; i < n * k; ++i) {
    const bool nan = (matrix.elements[i] & std::byte{0x7f}) == std::byte{0x7f};
    zeros.finite = zeros.finite && !nan;
    if (!nan) CountZero(Fp8Value(matrix, k, i / k, i % k), zeros);
  }
  return zeros;
}

ZeroCount CountZeros(SourceFormat format, const std::byte* elements, size_t count) {
  ZeroCount zeros;
  for (size_t i = 0; i < count; ++i) {
    const double weight = ReadElement(format, elements, i);
    if (!std::isfinite(weight)) zeros.finite = false;
    if (weight == 0) ++(std::signbit(weight) ? zeros.negative : zeros.positive);
  }
  return zeros;
}

void UnpackNibbles(const std::byte* nibble_plane, size_t n, size_t k, std::byte* nibbles) {
  std::memset(nibbles, 0, n * k / 2);
  const size_t tiles_per_strip = k / kTileColumns;
  for (size_t index = 0; index < n * k / kTileElements; ++index) {
    const Tile tile = ReadNibbles(nibble_plane + index * kTileNibbleBytes);
    const size_t first =
        index / tiles_per_strip * kStripRows * k + index % tiles_per_strip * kTileColumns;
    ForEachElement([&](size_t row, size_t column) {
      const size_t element = first + row * k + column;
      OrInto(nibbles[element / 2], unsigned{tile.nibbles[row][column]} << (4 * (element % 2)));
    });
  }
}

void UnpackScales(const std::byte* scale_plane, size_t n, size_t k, std::byte* scales) {
  const size_t blocks = k / kScaleBlock;
  for (size_t row = 0; row < n; ++row) {
    for (size_t block = 0; block < blocks; ++block) {
      scales[row * blocks + block] = scale_plane[ScalePlace(row, block, k)];
    }
  }
}

void UnpackCodes(const std::byte* code_plane, size_t n, size_t k, std::byte* codes) {
  const size_t tiles_per_strip = k / kTileColumns;
  for (size_t index = 0; index < n * k / kTileElements; ++index) {
    const size_t first =
        index / tiles_per_strip * kStripRows * k + index % tiles_per_strip * kTileColumns;
    ForEachElement([&](size_t row, size_t column) {
      const Place place(row, column);
      const std::byte byte = code_plane[index * kTileCodeBytes + place.code_byte()];
      codes[first + row * k + column] = byte >> (2 * place.j) & std::byte{3};
    });
  }
}

void DeriveCodes(const std::byte* nibble_plane, size_t n, size_t k, std::byte* code_plane) {
  for (size_t index = 0; index < n * k / kTileElements; ++index) {
    WriteCodes(ReadNibbles(nibble_plane + index * kTileNibbleBytes),
               code_plane + index * kTileCodeBytes);
  }
}

void DeriveQuintals(const std::byte* nibble_plane, size_t n, size_t k, std::byte* quintal_plane) {
  for (size_t index = 0; index < n * k / kTileElements; ++index) {
    WriteQuintals(ReadNibbles(nibble_plane + index * kTileNibbleBytes),
                  quintal_plane + index * kTileQuintalBytes);
  }
}

bool Merge(const std::byte* code_plane, const std::byte* quintal_plane, size_t n, size_t k,
           std::byte* nibble_plane) {
  bool valid = true;
  for (size_t index = 0; index < n * k / kTileElements; ++index) {
    const QuintalWords quintal = ReadQuintals(quintal_plane + index * kTileQuintalBytes);
    Tile tile;
    ForEachElement([&](size_t row, size_t column) {
      const Place place(row, column);
      const std::byte byte = code_plane[index * kTileCodeBytes + place.code_byte()];
      const unsigned code = std::to_integer<unsigned>(byte) >> (2 * place.j) & 3;
      const unsigned word = quintal.words[place.lane][place.word];
      const unsigned digit = word / kPowerOf5[place.j] % 5;
      const bool large = code == 0 || code == 3;
      if (word > kQuintalWordMax || (large && digit > 2)) valid = false;
      tile.nibbles[row][column] = static_cast<uint8_t>(NibbleOf(code, digit) & 15);
    });
    WriteNibbles(tile, nibble_plane + index * kTileNibbleBytes);
  }
  return valid;
}

}  // namespace

const Kernels kScalarKernels = {
    .isa = Isa::kScalar,
    .name = "scalar",
    .pack_mxfp4 = PackMxfp4,
    .quantize = Quantize,
    .count_zeros = CountZeros,
    .quantize_nvfp4 = QuantizeNvfp4,
    .quantize_fp8 = QuantizeFp8,
    .count_zeros_nvfp4 = CountZerosNvfp4,
    .count_zeros_fp8 = CountZerosFp8,
    .unpack_nibbles = UnpackNibbles,
    .unpack_scales = UnpackScales,
    .unpack_codes = UnpackCodes,
    .derive_codes = DeriveCodes,
    .derive_quintals = DeriveQuintals,
    .merge = Merge,
};

}  // namespace hotplane
