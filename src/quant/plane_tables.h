// Constant tables of the vector variants. Everything is constexpr data: nothing here becomes code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/tsym4.h"

namespace hotplane {
namespace {

// The 2-byte units of one row pair (g, g + 8) of a tile: q = k32*2 + half and t as in tsym4.h,
// row = 0 for g and 1 for g + 8. In the planes they come as [t][row][q].
struct UnitOrder {
  alignas(64) uint16_t unit[32];
};
constexpr size_t PlaneUnit(size_t row, size_t q, size_t t) { return t * 8 + row * 4 + q; }

template <typename Source>
constexpr UnitOrder PlaneFrom(Source source) {
  UnitOrder order = {};
  for (size_t row = 0; row < 2; ++row) {
    for (size_t q = 0; q < 4; ++q) {
      for (size_t t = 0; t < 4; ++t) {
        order.unit[PlaneUnit(row, q, t)] = static_cast<uint16_t>(source(row, q, t));
      }
    }
  }
  return order;
}
constexpr UnitOrder Inverse(const UnitOrder& order) {
  UnitOrder inverse = {};
  for (size_t i = 0; i < 32; ++i) inverse.unit[order.unit[i]] = static_cast<uint16_t>(i);
  return inverse;
}

// From row-major nibbles [row][q][t].
inline constexpr UnitOrder kPlaneFromRows =
    PlaneFrom([](size_t row, size_t q, size_t t) { return row * 16 + q * 4 + t; });
inline constexpr UnitOrder kRowsFromPlane = Inverse(kPlaneFromRows);

// From what two rounds of 512-bit packing leave: lane = half*2 + t/2, and in it [row][k32][t%2].
inline constexpr UnitOrder kPlaneFromBlocks512 = PlaneFrom([](size_t row, size_t q, size_t t) {
  return (q % 2 * 2 + t / 2) * 8 + row * 4 + q / 2 * 2 + t % 2;
});

struct NibbleTable {
  alignas(16) uint8_t of[16];
};
template <typename Function>
constexpr NibbleTable TableOf(Function function) {
  NibbleTable table = {};
  for (unsigned nibble = 0; nibble < 16; ++nibble) {
    table.of[nibble] = static_cast<uint8_t>(function(nibble));
  }
  return table;
}
// Of a byte's low nibble and of its high nibble, to be added: two codes, two digits.
inline constexpr NibbleTable kLowCode = TableOf([](unsigned x) { return CodeOfNibble(x); });
inline constexpr NibbleTable kHighCode = TableOf([](unsigned x) { return CodeOfNibble(x) << 2; });
inline constexpr NibbleTable kLowDigit = TableOf([](unsigned x) { return DigitOfNibble(x); });
inline constexpr NibbleTable kHighDigit = TableOf([](unsigned x) { return DigitOfNibble(x) * 5; });

// The magnitude index by step. The midpoints {.25,.75,1.25,1.75,2.5,3.5,5} * 2^e have at most three
// significant bits, so in a floating-point bit pattern they differ from each other by multiples of
// a quarter of the exponent's unit; that quarter is a step. Step 0 begins at the pattern of
// 2^(e-3). A weight's step is (its pattern - 1) less that base, in quarters: the -1 makes "strictly
// above the midpoint" into "at or above it". amax < 9 * 2^e keeps steps below 28.
struct MagnitudeTable {
  alignas(32) uint8_t index[32];
};
constexpr MagnitudeTable MakeMagnitudeTable() {
  constexpr unsigned kMidpointSteps[7] = {4, 10, 13, 15, 17, 19, 21};
  MagnitudeTable table = {};
  for (unsigned step = 0; step < 32; ++step) {
    unsigned index = 0;
    for (const unsigned midpoint : kMidpointSteps) index += step >= midpoint ? 1 : 0;
    table.index[step] = static_cast<uint8_t>(index);
  }
  return table;
}
inline constexpr MagnitudeTable kMagnitudeOfStep = MakeMagnitudeTable();

// Word g of a lane set.
struct LaneMasks {
  alignas(16) uint16_t word[8][8];
};
constexpr LaneMasks MakeLaneMasks() {
  LaneMasks masks = {};
  for (size_t g = 0; g < 8; ++g) masks.word[g][g] = 0xFFFF;
  return masks;
}
inline constexpr LaneMasks kOnlyWord = MakeLaneMasks();

}  // namespace
}  // namespace hotplane
