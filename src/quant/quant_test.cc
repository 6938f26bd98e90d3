// The bundled vectors, the laws between planes, and what must be refused.

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "quant/oracle.h"
#include "quant/quantize.h"

namespace hotplane {
namespace {

using oracle::Bytes;

// The same cases in every run; RC_PARAMS of the caller wins.
const int kSeedIsFixed = setenv("RC_PARAMS", "seed=20260101", 0);

Bytes FromHex(const std::string& hex) {
  Bytes bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

oracle::Planes EmptyPlanes(size_t n, size_t k) {
  const std::byte fill{0xA5};
  return {Bytes(CodePlaneBytes(n, k), fill), Bytes(ScalePlaneBytes(n, k), fill),
          Bytes(NibblePlaneBytes(n, k), fill), Bytes(QuintalPlaneBytes(n, k), fill)};
}

PlaneOutputs OutputsOf(oracle::Planes& planes) {
  return {planes.codes.data(), planes.scales.data(), planes.nibbles.data(), planes.quintals.data()};
}

TEST(Golden, EveryVectorByEveryVariant) {
  std::ifstream file(HOTPLANE_SOURCE_DIR "/tests/data/golden_vectors.json");
  const nlohmann::json vectors = nlohmann::json::parse(file);
  ASSERT_EQ(vectors.size(), 3u);
  for (const auto& vector : vectors) {
    const size_t n = vector["N"];
    const size_t k = vector["K"];
    const Bytes nibbles = FromHex(vector["packed_e2m1"]);
    const Bytes scales = FromHex(vector["scales"]);
    const oracle::Planes expected = {FromHex(vector["codes_plane"]), FromHex(vector["scale_plane"]),
                                     FromHex(vector["fp4_plane"]),
                                     FromHex(vector["quintal_plane"])};
    for (const Kernels* kernels : AvailableKernels()) {
      SCOPED_TRACE(std::string(kernels->name) + " " + std::to_string(n) + "x" + std::to_string(k));
      oracle::Planes got = EmptyPlanes(n, k);
      ASSERT_TRUE(kernels->pack_mxfp4(nibbles.data(), scales.data(), n, k, OutputsOf(got)));
      EXPECT_TRUE(got.codes == expected.codes);
      EXPECT_TRUE(got.scales == expected.scales);
      EXPECT_TRUE(got.nibbles == expected.nibbles);
      EXPECT_TRUE(got.quintals == expected.quintals);

      Bytes back(nibbles.size());
      kernels->unpack_nibbles(expected.nibbles.data(), n, k, back.data());
      EXPECT_TRUE(back == nibbles);
      Bytes scales_back(scales.size());
      kernels->unpack_scales(expected.scales.data(), n, k, scales_back.data());
      EXPECT_TRUE(scales_back == scales);
      got = EmptyPlanes(n, k);
      ASSERT_TRUE(kernels->merge(expected.codes.data(), expected.quintals.data(), n, k,
                                 got.nibbles.data()));
      EXPECT_TRUE(got.nibbles == expected.nibbles);
      kernels->derive_codes(expected.nibbles.data(), n, k, got.codes.data());
      EXPECT_TRUE(got.codes == expected.codes);
      kernels->derive_quintals(expected.nibbles.data(), n, k, got.quintals.data());
      EXPECT_TRUE(got.quintals == expected.quintals);
    }
  }
}

TEST(Laws, OfAllNibbles) {
  static constexpr int kMagnitudeTimes2[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  for (unsigned nibble = 0; nibble < 16; ++nibble) {
    const unsigned code = CodeOfNibble(nibble);
    const unsigned digit = DigitOfNibble(nibble);
    EXPECT_EQ(NibbleOf(code, digit), nibble);
    EXPECT_LE(digit, 4u);
    EXPECT_EQ(kE2m1MagnitudeTimes2[nibble & 7], kMagnitudeTimes2[nibble & 7]);
    EXPECT_EQ(kCodeValue[code] < 0, nibble >= 8);
    EXPECT_EQ(std::abs(kCodeValue[code]), (nibble & 7) >= 5 ? 4 : 1);
  }
}

oracle::Matrix RandomMatrix(size_t n, size_t k, uint64_t seed) {
  std::mt19937_64 random(seed);
  oracle::Matrix matrix = {n, k, std::vector<uint8_t>(n * k), std::vector<uint8_t>(n * k / 32)};
  for (uint8_t& nibble : matrix.nibbles) nibble = static_cast<uint8_t>(random() % 16);
  for (uint8_t& scale : matrix.scales) scale = static_cast<uint8_t>(random() % 255);
  return matrix;
}

void CheckLaws(const Kernels& kernels, const oracle::Matrix& matrix) {
  const size_t n = matrix.n;
  const size_t k = matrix.k;
  const Bytes nibbles = oracle::PackedNibbles(matrix);
  const Bytes scales = oracle::ScaleBytes(matrix);
  const oracle::Planes expected = oracle::Pack(matrix);
  oracle::Planes packed = EmptyPlanes(n, k);
  RC_ASSERT(kernels.pack_mxfp4(nibbles.data(), scales.data(), n, k, OutputsOf(packed)));
  RC_ASSERT(packed.codes == expected.codes);
  RC_ASSERT(packed.scales == expected.scales);
  RC_ASSERT(packed.nibbles == expected.nibbles);
  RC_ASSERT(packed.quintals == expected.quintals);

  oracle::Planes derived = EmptyPlanes(n, k);
  kernels.derive_codes(packed.nibbles.data(), n, k, derived.codes.data());
  RC_ASSERT(derived.codes == packed.codes);
  kernels.derive_quintals(packed.nibbles.data(), n, k, derived.quintals.data());
  RC_ASSERT(derived.quintals == packed.quintals);
  RC_ASSERT(
      kernels.merge(packed.codes.data(), packed.quintals.data(), n, k, derived.nibbles.data()));
  RC_ASSERT(derived.nibbles == packed.nibbles);

  Bytes nibbles_back(nibbles.size());
  kernels.unpack_nibbles(packed.nibbles.data(), n, k, nibbles_back.data());
  RC_ASSERT(nibbles_back == nibbles);
  Bytes scales_back(scales.size());
  kernels.unpack_scales(packed.scales.data(), n, k, scales_back.data());
  RC_ASSERT(scales_back == scales);
  Bytes codes(n * k);
  kernels.unpack_codes(packed.codes.data(), n, k, codes.data());
  for (size_t i = 0; i < n * k; ++i) {
    RC_ASSERT(std::to_integer<unsigned>(codes[i]) == CodeOfNibble(matrix.nibbles[i]));
  }
}

TEST(Laws, OfRandomShapes) {
  EXPECT_TRUE(rc::check("pack, derive, merge and unpack agree", [] {
    const size_t n = 16 * *rc::gen::inRange<size_t>(1, 5);
    const size_t k = 64 * *rc::gen::inRange<size_t>(1, 13);
    const oracle::Matrix matrix = RandomMatrix(n, k, *rc::gen::arbitrary<uint64_t>());
    for (const Kernels* kernels : AvailableKernels()) CheckLaws(*kernels, matrix);
  }));
}

// The bytes of an F32 matrix of ordinary weights.
Bytes RandomFloats(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, 0.02f);
  Bytes bytes(count * 4);
  for (size_t i = 0; i < count; ++i) {
    const float value = normal(random);
    std::memcpy(bytes.data() + i * 4, &value, 4);
  }
  return bytes;
}

TEST(Planes, AnySubsetAndNothingBeside) {
  const size_t n = 32;
  const size_t k = 192;
  const oracle::Matrix matrix = RandomMatrix(n, k, 5);
  const Bytes nibbles = oracle::PackedNibbles(matrix);
  const Bytes scales = oracle::ScaleBytes(matrix);
  const oracle::Planes packed = oracle::Pack(matrix);
  const Bytes floats = RandomFloats(n * k, 6);
  const oracle::Planes quantized =
      oracle::Pack(oracle::Requantize(SourceFormat::kF32, floats.data(), n, k, false));
  for (const Kernels* kernels : AvailableKernels()) {
    for (unsigned wanted = 0; wanted < 16; ++wanted) {
      SCOPED_TRACE(std::string(kernels->name) + " " + std::to_string(wanted));
      oracle::Planes got = EmptyPlanes(n, k);
      const oracle::Planes untouched = got;
      PlaneOutputs out = OutputsOf(got);
      if ((wanted & 1) == 0) out.codes = nullptr;
      if ((wanted & 2) == 0) out.scales = nullptr;
      if ((wanted & 4) == 0) out.nibbles = nullptr;
      if ((wanted & 8) == 0) out.quintals = nullptr;
      const auto expect = [&](const oracle::Planes& expected) {
        EXPECT_TRUE(got.codes == (out.codes != nullptr ? expected : untouched).codes);
        EXPECT_TRUE(got.scales == (out.scales != nullptr ? expected : untouched).scales);
        EXPECT_TRUE(got.nibbles == (out.nibbles != nullptr ? expected : untouched).nibbles);
        EXPECT_TRUE(got.quintals == (out.quintals != nullptr ? expected : untouched).quintals);
      };
      EXPECT_TRUE(kernels->pack_mxfp4(nibbles.data(), scales.data(), n, k, out));
      expect(packed);
      kernels->quantize(SourceFormat::kF32, floats.data(), n, k, false, out);
      expect(quantized);
    }
  }
}

TEST(Planes, StripByStripAtOddAddresses) {
  const size_t n = 48;
  const size_t k = 320;
  const Bytes floats = RandomFloats(n * k, 8);
  const oracle::Planes expected =
      oracle::Pack(oracle::Requantize(SourceFormat::kF32, floats.data(), n, k, true));
  Bytes source(floats.size() + 1);
  std::memcpy(source.data() + 1, floats.data(), floats.size());
  for (const Kernels* kernels : AvailableKernels()) {
    SCOPED_TRACE(kernels->name);
    Bytes codes(CodePlaneBytes(n, k) + 1);
    Bytes scales(ScalePlaneBytes(n, k) + 1);
    Bytes nibbles(NibblePlaneBytes(n, k) + 1);
    Bytes quintals(QuintalPlaneBytes(n, k) + 1);
    for (size_t strip = 0; strip < n / 16; ++strip) {
      kernels->quantize(SourceFormat::kF32, source.data() + 1 + strip * 16 * k * 4, 16, k, true,
                        {codes.data() + 1 + strip * CodePlaneBytes(16, k),
                         scales.data() + 1 + strip * ScalePlaneBytes(16, k),
                         nibbles.data() + 1 + strip * NibblePlaneBytes(16, k),
                         quintals.data() + 1 + strip * QuintalPlaneBytes(16, k)});
    }
    EXPECT_EQ(std::memcmp(codes.data() + 1, expected.codes.data(), codes.size() - 1), 0);
    EXPECT_EQ(std::memcmp(scales.data() + 1, expected.scales.data(), scales.size() - 1), 0);
    EXPECT_EQ(std::memcmp(nibbles.data() + 1, expected.nibbles.data(), nibbles.size() - 1), 0);
    EXPECT_EQ(std::memcmp(quintals.data() + 1, expected.quintals.data(), quintals.size() - 1), 0);
  }
}

TEST(PackMxfp4, RefusesScale255Anywhere) {
  for (const size_t k : {64, 192, 512, 576, 1088}) {
    const size_t n = 32;
    oracle::Matrix matrix = RandomMatrix(n, k, k);
    for (uint8_t& scale : matrix.scales) scale = scale % 3 == 0 ? 254 : scale;
    const Bytes nibbles = oracle::PackedNibbles(matrix);
    Bytes scales = oracle::ScaleBytes(matrix);
    Bytes plane(scales.size());
    for (const Kernels* kernels : AvailableKernels()) {
      for (std::byte* wanted : {plane.data(), static_cast<std::byte*>(nullptr)}) {
        const PlaneOutputs out = {nullptr, wanted, nullptr, nullptr};
        EXPECT_TRUE(kernels->pack_mxfp4(nibbles.data(), scales.data(), n, k, out));
        for (std::byte& scale : scales) {
          const std::byte good = std::exchange(scale, std::byte{255});
          EXPECT_FALSE(kernels->pack_mxfp4(nibbles.data(), scales.data(), n, k, out))
              << kernels->name << " k=" << k << " scale " << &scale - scales.data();
          scale = good;
        }
      }
    }
  }
}

// One tile whose planes a test can bend.
struct MergeTile {
  MergeTile() : matrix(RandomMatrix(16, 64, 11)), planes(oracle::Pack(matrix)) {}

  void SetWord(size_t lane, size_t word, unsigned value) {
    for (size_t bit = 0; bit < 10; ++bit) {
      const size_t at = word * 10 + bit;
      const size_t in_block = at < 64 ? lane * 64 + at : 2048 + lane * 16 + at - 64;
      const auto mask = std::byte(1 << (in_block % 8));
      std::byte& byte = planes.quintals[in_block / 8];
      byte = (value >> bit & 1) != 0 ? byte | mask : byte & ~mask;
    }
  }

  bool Merges(const Kernels& kernels) {
    Bytes nibbles(kTileNibbleBytes);
    return kernels.merge(planes.codes.data(), planes.quintals.data(), 16, 64, nibbles.data());
  }

  oracle::Matrix matrix;
  oracle::Planes planes;
};

TEST(Merge, RefusesEveryWordOutOfRange) {
  for (const Kernels* kernels : AvailableKernels()) {
    for (size_t lane = 0; lane < 32; ++lane) {
      for (size_t word = 0; word < 8; ++word) {
        MergeTile tile;
        tile.planes.codes[lane * 8 + word] = std::byte{0x66};  // small codes only
        tile.SetWord(lane, word, 624);
        EXPECT_TRUE(tile.Merges(*kernels)) << kernels->name;
        const bool every = lane == 13 && word == 6;
        for (unsigned value = 625; value < 1024; value += every ? 1 : 57) {
          tile.SetWord(lane, word, value);
          EXPECT_FALSE(tile.Merges(*kernels))
              << kernels->name << " lane " << lane << " word " << word << " value " << value;
        }
      }
    }
  }
}

TEST(Merge, RefusesADigitThatDoesNotFitItsCode) {
  static constexpr unsigned kWeight[4] = {1, 5, 25, 125};
  for (const Kernels* kernels : AvailableKernels()) {
    for (size_t place = 0; place < 1024; ++place) {
      const size_t lane = place / 32;
      const size_t word = place / 4 % 8;
      const size_t j = place % 4;
      MergeTile tile;
      for (const unsigned code : {0u, 3u}) {
        const unsigned others = 0x66 & ~(3u << (2 * j));
        tile.planes.codes[lane * 8 + word] = std::byte(others | code << (2 * j));
        for (unsigned digit = 0; digit < 5; ++digit) {
          tile.SetWord(lane, word, digit * kWeight[j]);
          EXPECT_EQ(tile.Merges(*kernels), digit <= 2)
              << kernels->name << " element " << place << " code " << code << " digit " << digit;
        }
      }
    }
  }
}

TEST(Zeros, TheRuleOfAutoIsStrictlyMoreThan95Percent) {
  const auto alternates = [](uint64_t positive, uint64_t negative) {
    return ZerosAlternate(ZeroMode::kAuto, {positive, negative, true});
  };
  EXPECT_FALSE(alternates(0, 0));
  EXPECT_TRUE(alternates(1, 0));
  EXPECT_TRUE(alternates(0, 1));
  EXPECT_FALSE(alternates(95, 5));
  EXPECT_FALSE(alternates(5, 95));
  EXPECT_TRUE(alternates(96, 5));
  EXPECT_TRUE(alternates(96, 4));
  EXPECT_TRUE(alternates(4, 96));
  EXPECT_FALSE(alternates(19, 1));
  EXPECT_TRUE(alternates(20, 1));
  EXPECT_TRUE(alternates(uint64_t{1} << 63, 1));
  EXPECT_TRUE(ZerosAlternate(ZeroMode::kAlternate, {1, 1, true}));
  EXPECT_FALSE(ZerosAlternate(ZeroMode::kSign, {1, 0, true}));
}

TEST(Variants, AreListedBestFirstAndForcible) {
  const auto available = AvailableKernels();
  ASSERT_FALSE(available.empty());
  EXPECT_EQ(available.back()->isa, Isa::kScalar);
  EXPECT_EQ(*SelectKernels(std::nullopt), available.front());
  for (const Kernels* kernels : available) EXPECT_EQ(*SelectKernels(kernels->name), kernels);
  const auto refused = SelectKernels("neon");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), StatusCode::kUsage);
  EXPECT_NE(refused.error().expected().find("scalar"), std::string::npos);
  EXPECT_NE(refused.error().found().find("neon"), std::string::npos);
  EXPECT_FALSE(SelectKernels(""));
}

TEST(Shapes, AreChecked) {
  EXPECT_TRUE(CheckPlaneShape(16, 64, "w2"));
  EXPECT_TRUE(CheckPlaneShape(2880 * 2, 2880, "w13"));
  for (const auto& [n, k] : {std::pair{0u, 64u}, {16u, 0u}, {8u, 64u}, {16u, 32u}, {17u, 128u}}) {
    const auto refused = CheckPlaneShape(n, k, "layers.0 w2");
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), StatusCode::kData);
    EXPECT_NE(refused.error().what().find("layers.0 w2"), std::string::npos);
  }
  EXPECT_EQ(SourceRowBytes(SourceFormat::kMxfp4, 128), 64u);
  EXPECT_EQ(SourceRowBytes(SourceFormat::kBf16, 128), 256u);
  EXPECT_EQ(SourceRowBytes(SourceFormat::kF16, 128), 256u);
  EXPECT_EQ(SourceRowBytes(SourceFormat::kF32, 128), 512u);
}

}  // namespace
}  // namespace hotplane
