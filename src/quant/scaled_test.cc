// NVFP4 and FP8 by every variant against weights and a requantization in wider arithmetic.

#include <gtest/gtest.h>

#include <bit>
#include <random>
#include <string>

#include "quant/oracle.h"
#include "quant/quantize.h"

namespace hotplane {
namespace {

using oracle::Bytes;
using Random = std::mt19937_64;

// Written from the definitions: sign, 4 exponent bits with bias 7, 3 fraction bits, subnormals.
long double E4m3(std::byte byte) {
  const auto bits = std::to_integer<unsigned>(byte);
  const long double magnitude =
      bits % 128 < 8 ? (bits % 8) / 512.0L
                     : std::ldexp(1 + (bits % 8) / 8.0L, static_cast<int>(bits % 128 / 8) - 7);
  return bits >= 128 ? -magnitude : magnitude;
}

long double E2m1(unsigned nibble) {
  static constexpr long double kValues[8] = {0, .5L, 1, 1.5L, 2, 3, 4, 6};
  return nibble >= 8 ? -kValues[nibble - 8] : kValues[nibble];
}

oracle::Matrix Requantize(const std::vector<long double>& weights, size_t n, size_t k,
                          bool alternate_zeros) {
  oracle::Matrix matrix = {n, k, std::vector<uint8_t>(n * k), std::vector<uint8_t>(n * k / 32)};
  for (size_t first = 0; first < n * k; first += 32) {
    long double amax = 0;
    for (size_t i = first; i < first + 32; ++i) amax = std::fmax(amax, std::fabs(weights[i]));
    const int e = oracle::Exponent(amax);
    matrix.scales[first / 32] = static_cast<uint8_t>(e + 127);
    for (size_t i = first; i < first + 32; ++i) {
      matrix.nibbles[i] = oracle::Nibble(weights[i], e, i % k, alternate_zeros);
    }
  }
  return matrix;
}

// Whether the exact zeros of the weights alternate in mode auto: one sign in more than 95%.
bool Alternates(const std::vector<long double>& weights) {
  uint64_t counts[2] = {0, 0};
  for (const long double weight : weights) {
    if (weight == 0) ++counts[std::signbit(weight) ? 1 : 0];
  }
  return 20 * std::max(counts[0], counts[1]) > 19 * (counts[0] + counts[1]);
}

void ExpectPlanes(const oracle::Planes& got, const oracle::Planes& expected) {
  EXPECT_TRUE(got.scales == expected.scales);
  EXPECT_TRUE(got.nibbles == expected.nibbles);
  EXPECT_TRUE(got.codes == expected.codes);
  EXPECT_TRUE(got.quintals == expected.quintals);
}

oracle::Planes EmptyPlanes(size_t n, size_t k) {
  return {Bytes(n * k / 4), Bytes(n * k / 32), Bytes(n * k / 2), Bytes(n * k * 5 / 16)};
}
PlaneOutputs OutputsOf(oracle::Planes& planes) {
  return {planes.codes.data(), planes.scales.data(), planes.nibbles.data(), planes.quintals.data()};
}

struct Nvfp4Case {
  size_t n, k;
  float global_scale;
  bool divide;
};

// Scales of every size beside each other, zeros among them, blocks of zeros and dead blocks.
struct Nvfp4Data {
  Nvfp4Data(const Nvfp4Case& each, uint64_t seed)
      : nibbles(each.n * each.k / 2), scales(each.n * each.k / 16) {
    Random random(seed);
    for (std::byte& byte : nibbles) byte = static_cast<std::byte>(random());
    for (size_t block = 0; block < scales.size(); ++block) {
      const uint64_t kind = random() % 8;
      scales[block] = static_cast<std::byte>(kind == 0   ? 0
                                             : kind == 1 ? 1 + random() % 8
                                             : kind < 5  ? 0x38 + random() % 16
                                                         : random() % 127);
      if (random() % 6 != 0) continue;
      const auto mask = random() % 2 == 0 ? std::byte{0x88} : std::byte{0x99};  // zeros; 0 and .5
      for (size_t i = 0; i < 8; ++i) nibbles[block * 8 + i] &= mask;
    }
  }
  std::vector<long double> Weights(const Nvfp4Case& each) const {
    std::vector<long double> weights(each.n * each.k);
    for (size_t i = 0; i < weights.size(); ++i) {
      const unsigned byte = std::to_integer<unsigned>(nibbles[i / 2]);
      const long double product = E2m1(i % 2 == 0 ? byte % 16 : byte / 16) * E4m3(scales[i / 16]);
      // Products of 30 bits are exact in long double; so is the sign of a zero.
      weights[i] = each.divide ? product / each.global_scale : product * each.global_scale;
    }
    return weights;
  }
  Bytes nibbles;
  Bytes scales;
};

TEST(Nvfp4, EveryVariantAgreesWithTheOracle) {
  const float odd = std::bit_cast<float>(0x39A7F3D1u);  // 24 significant bits
  uint64_t seed = 1;
  for (const Nvfp4Case& each :
       {Nvfp4Case{16, 64, 1, false}, Nvfp4Case{32, 192, odd, false},
        Nvfp4Case{48, 128, 1 / odd, true}, Nvfp4Case{64, 256, 3.0F, true},
        Nvfp4Case{16, 512, std::ldexp(odd, -100), false},  // where 1e-30 counts
        Nvfp4Case{16, 512, std::ldexp(1.0F, -149), false},
        Nvfp4Case{16, 512, std::bit_cast<float>(0x7F7FFFFFu), false},  // beyond 2^127
        Nvfp4Case{16, 512, std::bit_cast<float>(0x7F7FFFFFu), true}}) {
    for (int round = 0; round < 4; ++round) {
      const Nvfp4Data data(each, ++seed);
      const std::vector<long double> weights = data.Weights(each);
      const Nvfp4Matrix matrix = {data.nibbles.data(), data.scales.data(), each.global_scale,
                                  each.divide};
      for (const Kernels* kernels : AvailableKernels()) {
        SCOPED_TRACE(std::string(kernels->name) + " " + std::to_string(seed));
        const ZeroCount zeros =
            kernels->count_zeros_nvfp4(matrix.nibbles, matrix.scales, each.n * each.k);
        EXPECT_TRUE(zeros.finite);
        EXPECT_EQ(ZerosAlternate(ZeroMode::kAuto, zeros), Alternates(weights));
        uint64_t positive = 0;
        for (const long double w : weights) positive += w == 0 && !std::signbit(w) ? 1 : 0;
        EXPECT_EQ(zeros.positive, positive);
        for (const bool alternate : {false, true}) {
          oracle::Planes got = EmptyPlanes(each.n, each.k);
          kernels->quantize_nvfp4(matrix, each.n, each.k, alternate, OutputsOf(got));
          ExpectPlanes(got, oracle::Pack(Requantize(weights, each.n, each.k, alternate)));
        }
      }
    }
  }
}

// Every scale with every magnitude as the largest of its block, beside a block of any other scale.
TEST(Nvfp4, EveryPairOfScaleAndMagnitude) {
  const Nvfp4Case shape = {127 * 8 / 4 + 2, 128, std::bit_cast<float>(0x3A123457u), false};
  const size_t n = shape.n / 16 * 16;
  Bytes nibbles(n * 64);
  Bytes scales(n * 8);
  Random random(11);
  for (size_t block = 0; block < scales.size(); ++block) {
    const size_t pair = block / 2 % (127 * 8);
    scales[block] = block % 2 == 0 ? std::byte(pair / 8) : std::byte(random() % 127);
    for (size_t i = 0; i < 8; ++i) {
      const unsigned limit = block % 2 == 0 ? pair % 8 + 1 : 8;
      const unsigned low = static_cast<unsigned>(random()) % limit + (random() % 2 != 0 ? 8 : 0);
      const unsigned high = static_cast<unsigned>(random()) % limit + (random() % 2 != 0 ? 8 : 0);
      nibbles[block * 8 + i] = std::byte(low | high << 4);
    }
  }
  Nvfp4Data data({16, 64, 1, false}, 1);
  data.nibbles = nibbles;
  data.scales = scales;
  const Nvfp4Case each = {n, 128, shape.global_scale, false};
  const oracle::Planes expected = oracle::Pack(Requantize(data.Weights(each), n, 128, false));
  for (const Kernels* kernels : AvailableKernels()) {
    SCOPED_TRACE(kernels->name);
    oracle::Planes got = EmptyPlanes(n, 128);
    kernels->quantize_nvfp4({nibbles.data(), scales.data(), each.global_scale, false}, n, 128,
                            false, OutputsOf(got));
    ExpectPlanes(got, expected);
  }
}

TEST(Nvfp4, ScalesThatAreNoPositiveNumbersAreFound) {
  Bytes nibbles(16 * 32, std::byte{0x11});
  for (const unsigned bad : {0x7Fu, 0x80u, 0xC0u, 0xFFu}) {
    for (size_t at = 0; at < 64; ++at) {
      Bytes scales(64, std::byte{0x38});
      scales[at] = std::byte(bad);
      for (const Kernels* kernels : AvailableKernels()) {
        EXPECT_FALSE(kernels->count_zeros_nvfp4(nibbles.data(), scales.data(), 1024).finite);
      }
    }
  }
}

struct Fp8Case {
  size_t n, k, block_rows, block_columns;
};

TEST(Fp8, EveryVariantAgreesWithTheOracle) {
  uint64_t seed = 100;
  for (const Fp8Case& each :
       {Fp8Case{16, 64, 128, 128}, Fp8Case{128, 256, 128, 128}, Fp8Case{144, 192, 128, 128},
        Fp8Case{64, 320, 32, 64}, Fp8Case{48, 192, 1, 128}, Fp8Case{32, 128, 24, 48},
        Fp8Case{32, 128, 16, 32}, Fp8Case{16, 128, 5, 1}}) {
    const size_t row_blocks = (each.k + each.block_columns - 1) / each.block_columns;
    const size_t blocks = (each.n + each.block_rows - 1) / each.block_rows * row_blocks;
    for (int round = 0; round < 6; ++round) {
      Random random(++seed);
      std::vector<double> scales(blocks);
      for (double& scale : scales) {
        const auto mantissa = static_cast<uint32_t>(random() % 0x800000);
        const auto field = static_cast<uint32_t>(round == 0   ? 1 + random() % 254
                                                 : round == 1 ? random() % 30
                                                              : 110 + random() % 8);
        scale = std::bit_cast<float>(field << 23 | mantissa);
        if (random() % 10 == 0) scale = round % 2 == 0 ? 0 : std::ldexp(1.0, -149);
      }
      Bytes elements(each.n * each.k);
      for (size_t i = 0; i < elements.size(); ++i) {
        const uint64_t draw = random();
        // Blocks of small, of all and of no magnitudes.
        const uint64_t limit = i / 32 % 5 == 0 ? 1 : i / 32 % 5 == 1 ? 20 : 127;
        elements[i] = std::byte((draw >> 8) % limit | (draw & 128));
      }
      std::vector<long double> weights(elements.size());
      for (size_t i = 0; i < weights.size(); ++i) {
        const size_t row = i / each.k;
        const size_t column = i % each.k;
        weights[i] = E4m3(elements[i]) *
                     scales[row / each.block_rows * row_blocks + column / each.block_columns];
      }
      const Fp8Matrix matrix = {elements.data(), scales.data(), each.block_rows,
                                each.block_columns};
      for (const Kernels* kernels : AvailableKernels()) {
        SCOPED_TRACE(std::string(kernels->name) + " " + std::to_string(seed));
        const ZeroCount zeros = kernels->count_zeros_fp8(matrix, each.n, each.k);
        EXPECT_TRUE(zeros.finite);
        EXPECT_EQ(ZerosAlternate(ZeroMode::kAuto, zeros), Alternates(weights));
        for (const bool alternate : {false, true}) {
          oracle::Planes got = EmptyPlanes(each.n, each.k);
          kernels->quantize_fp8(matrix, each.n, each.k, alternate, OutputsOf(got));
          ExpectPlanes(got, oracle::Pack(Requantize(weights, each.n, each.k, alternate)));
        }
      }
    }
  }
}

TEST(Fp8, NaNElementsAreFound) {
  const double scale = 1;
  for (const unsigned bad : {0x7Fu, 0xFFu}) {
    for (const size_t at : {size_t{0}, size_t{31}, size_t{500}, size_t{1023}}) {
      Bytes elements(1024, std::byte{0x38});
      elements[at] = std::byte(bad);
      for (const Kernels* kernels : AvailableKernels()) {
        EXPECT_FALSE(kernels->count_zeros_fp8({elements.data(), &scale, 128, 128}, 16, 64).finite);
      }
    }
  }
}

}  // namespace
}  // namespace hotplane
