// Rounding to FP8: every number against the list of all that there are.
#include "moe/fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace hotplane::fp8 {
namespace {

float PowerOf(uint32_t scale) { return std::ldexp(1.0f, static_cast<int>(scale) - 127); }

// The largest e4m3 number is 448; the next smaller scale's 448-fold is too little.
TEST(Fp8, ScalesAreTheLeastThatDo) {
  for (uint32_t bits = 0; bits <= kLargest; ++bits) {
    const float largest = FromBf16(static_cast<uint16_t>(bits));
    const uint32_t scale = ScaleFor(bits);
    ASSERT_LE(largest, 448 * PowerOf(scale)) << bits;
    ASSERT_GE(scale, kLeastScale) << bits;
    if (scale > kLeastScale) {
      ASSERT_GT(largest, 448 * PowerOf(scale - 1)) << bits;
    }
  }
  for (uint32_t bits = kLargest + 1; bits < 0x8000; ++bits)
    EXPECT_EQ(ScaleFor(bits), kNoScale) << bits;
}

std::vector<double> Magnitudes() {
  std::vector<double> all;
  for (int bits = 0; bits < 127; ++bits)
    all.push_back(bits < 8 ? bits / 512.0 : std::ldexp(8 + bits % 8, bits / 8 - 10));
  return all;
}

// All bfloat16 numbers up to the largest, at every scale that differs.
TEST(Fp8, EveryNumberBecomesTheNearest) {
  const std::vector<double> magnitudes = Magnitudes();
  EXPECT_EQ(magnitudes.back(), 448);
  for (const uint32_t scale : {kLeastScale, 11u, 100u, 127u, 200u, 246u, 247u}) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const float value = FromBf16(static_cast<uint16_t>(bits));
      const double scaled = std::fabs(double{value}) / double{PowerOf(scale)};
      if (!(scaled <= 448) || (bits & 0x7FFF) > kLargest) continue;
      double nearest = 0;
      bool tie_is_even = false;
      for (size_t i = 0; i < magnitudes.size(); ++i) {
        const double distance = std::fabs(magnitudes[i] - scaled);
        const double best = std::fabs(nearest - scaled);
        if (distance < best || (distance == best && i % 2 == 0 && !tie_is_even)) {
          nearest = magnitudes[i];
          tie_is_even = i % 2 == 0;
        }
      }
      const float rounded = Rounded(value, scale);
      ASSERT_EQ(std::fabs(double{rounded}), nearest * double{PowerOf(scale)}) << value;
      if (nearest != 0) {
        ASSERT_EQ(std::signbit(rounded), std::signbit(value)) << value;
      }
      // It is a bfloat16 number.
      ASSERT_TRUE(std::isfinite(rounded)) << value;
      ASSERT_EQ(FromBf16(ToBf16(rounded)), rounded) << value;
    }
  }
}

TEST(Fp8, RowsAreRoundedGroupByGroup) {
  std::vector<float> row(192, 1.0f);
  row[3] = 448;
  row[4] = 0.0009f;  // below half the smallest of the first group
  row[130] = 0.0009f;
  row[131] = 3.3f;
  RoundRow(row.data(), row.size());
  EXPECT_EQ(row[0], 1.0f);
  EXPECT_EQ(row[3], 448.0f);
  EXPECT_EQ(row[4], 0.0f);
  // The second group's scale is 2^-7: 0.0009 in bfloat16 is 0.1152 of it, between numbers 2^-7
  // apart.
  EXPECT_EQ(row[130], 15.0f / 16384);
  EXPECT_EQ(row[131], 3.25f);
}

TEST(Fp8, WhatIsNoNumberOrTooLargeStays) {
  std::vector<float> row(256, 1.001f);
  row[7] = std::numeric_limits<float>::infinity();
  row[200] = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> large(128, 1.001f);
  large[5] = FromBf16(kLargest + 1);
  RoundRow(large.data(), large.size());
  EXPECT_EQ(large[5], FromBf16(kLargest + 1));
  EXPECT_EQ(large[0], 1.0f);
  large[5] = FromBf16(kLargest);
  RoundRow(large.data(), large.size());
  EXPECT_EQ(large[5], 1.875f * 0x1p127f);
  EXPECT_EQ(large[0], 0.0f);
  RoundRow(row.data(), row.size());
  EXPECT_TRUE(std::isinf(row[7]));
  EXPECT_TRUE(std::isnan(row[200]));
  EXPECT_EQ(row[0], 1.0f);
}

}  // namespace
}  // namespace hotplane::fp8
