// What a GPU's threads compute, on the host, against the kernels of the CPU.
#include "device/quantize_tile.h"

#include <gtest/gtest.h>

#include "boot/matrix_cases.h"

namespace hotplane {
namespace {

using namespace matrix_cases;

// The threads of every tile in turn, in copies that are aligned as device memory is.
class TileQuantizer final : public MatrixQuantizer {
 public:
  Result<MatrixCounts> Load(const MatrixSource& source) override {
    elements_.assign((source.elements.size() + 15) / 16, {});
    std::memcpy(elements_.data(), source.elements.data(), source.elements.size());
    source_ = {.elements = reinterpret_cast<const uint8_t*>(elements_.data()),
               .scales = reinterpret_cast<const uint8_t*>(source.scales.data()),
               .block_scales = source.block_scales.data(),
               .global_scale = source.global_scale,
               .n = source.n,
               .k = source.k,
               .block_rows = static_cast<uint32_t>(source.block_rows),
               .block_columns = static_cast<uint32_t>(source.block_columns),
               .format = source.format,
               .divide = source.divide};
    tile::Counts counts = {0, 0, 0};
    for (uint64_t tile = 0; tile < tile::TileCount(source_); ++tile)
      for (unsigned thread = 0; thread < tile::kThreads; ++thread)
        tile::CountBlock(source_, tile, thread, &counts);
    return MatrixCounts{counts.positive_zeros, counts.negative_zeros, counts.unusable == 0};
  }
  Result<void> Quantize(bool alternate_zeros, const MatrixPlanes& planes) override {
    const auto at = [](std::byte* plane) { return reinterpret_cast<uint8_t*>(plane); };
    const tile::Planes out = {at(planes.codes), at(planes.scales), at(planes.nibbles),
                              at(planes.quintals)};
    tile::Nibbles nibbles;
    for (uint64_t tile = 0; tile < tile::TileCount(source_); ++tile) {
      for (unsigned thread = 0; thread < tile::kThreads; ++thread)
        tile::QuantizePart(source_, out, ScaleThresholds().data(), alternate_zeros, tile, thread,
                           &nibbles);
      for (unsigned lane = 0; lane < tile::kThreads; ++lane)
        tile::WriteLane(out, nibbles, tile, lane);
    }
    return {};
  }

 private:
  std::vector<tile::Words> elements_;
  tile::Source source_ = {};
};

TEST(QuantizeTile, AllFormatsAsByTheScalarKernels) {
  const auto cpu = NewCpuQuantizer(*SelectKernels("scalar").value());
  TileQuantizer tiles;
  size_t alternating = 0;
  for (const MatrixCase& each : AllCases(3)) {
    const MatrixCounts expected = cpu->Load(each.Source()).value();
    const MatrixCounts counts = tiles.Load(each.Source()).value();
    ASSERT_TRUE(expected.usable) << each.name;
    EXPECT_TRUE(counts.usable) << each.name;
    EXPECT_EQ(counts.positive_zeros, expected.positive_zeros) << each.name;
    EXPECT_EQ(counts.negative_zeros, expected.negative_zeros) << each.name;
    alternating +=
        ZerosAlternate(ZeroMode::kAuto, {counts.positive_zeros, counts.negative_zeros}) ? 1 : 0;
    for (const bool alternate : {false, true}) {
      PlaneBytes wanted(each.source.n, each.source.k);
      PlaneBytes made = wanted;
      ASSERT_TRUE(cpu->Quantize(alternate, wanted.Planes()));
      ASSERT_TRUE(tiles.Quantize(alternate, made.Planes()));
      EXPECT_TRUE(made.scales == wanted.scales) << each.name;
      EXPECT_TRUE(made.nibbles == wanted.nibbles) << each.name;
      EXPECT_TRUE(made.codes == wanted.codes) << each.name;
      EXPECT_TRUE(made.quintals == wanted.quintals) << each.name;
    }
  }
  EXPECT_GT(alternating, 20u);  // the samples have both kinds
}

TEST(QuantizeTile, WhatIsNotUsableIsSeenInAnyPlace) {
  const auto cpu = NewCpuQuantizer(*SelectKernels("scalar").value());
  TileQuantizer tiles;
  Random random(9);
  for (const MatrixCase& each : AllCases(3)) {
    const MatrixCase spoiled = Spoiled(each, random);
    EXPECT_FALSE(cpu->Load(spoiled.Source()).value().usable) << spoiled.name;
    EXPECT_FALSE(tiles.Load(spoiled.Source()).value().usable) << spoiled.name;
  }
}

TEST(ScaleThresholds, AreWhereTheRuleSteps) {
  const std::span<const double, 255> thresholds = ScaleThresholds();
  EXPECT_EQ(thresholds[0], 0);
  for (unsigned byte = 1; byte < thresholds.size(); ++byte) {
    // Some bytes are nobody's: where 1e-30 counts, the rule leaps.
    EXPECT_GE(ScaleByteOf(thresholds[byte]), byte);
    EXPECT_LT(ScaleByteOf(std::nextafter(thresholds[byte], 0)), byte);
    if (byte > 27) {
      EXPECT_EQ(ScaleByteOf(thresholds[byte]), byte);
    }
  }
  Random random(3);
  for (int i = 0; i < 100'000; ++i) {
    const double amax = std::ldexp(1 + static_cast<double>(random() >> 11) * 0x1p-53,
                                   static_cast<int>(random() % 300) - 150);
    EXPECT_EQ(tile::ScaleByte(thresholds.data(), amax), ScaleByteOf(amax)) << amax;
  }
}

TEST(QuantizeTile, ValuesAreThoseOfTheTables) {
  for (unsigned index = 0; index < 8; ++index)
    EXPECT_EQ(tile::E2m1Magnitude(index) * 2, kE2m1MagnitudeTimes2[index]);
  for (unsigned byte = 0; byte < 127; ++byte)
    EXPECT_EQ(tile::E4m3Magnitude(byte),
              byte < 8 ? std::ldexp(byte, -9)
                       : std::ldexp(8 + byte % 8, static_cast<int>(byte / 8) - 10));
}

}  // namespace
}  // namespace hotplane
