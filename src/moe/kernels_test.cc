// A few strips, all variants, against the weights as they are defined.
#include "moe/kernels.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "moe/activation.h"
#include "moe/reference.h"

namespace hotplane {
namespace {

// Three of them: variants take two at once, and one is left.
constexpr size_t kStrips = 3;
constexpr size_t kRows = kStrips * kStripRows;

struct Strips {
  size_t k = 0;
  StripFormat format = StripFormat::kCodes;
  std::vector<std::byte> elements, scales;

  double Weight(size_t n, size_t column) const {
    return format == StripFormat::kCodes
               ? BaseWeight(elements.data(), scales.data(), k, n, column)
               : NibbleWeight(elements.data(), scales.data(), k, n, column);
  }
};

Strips RandomStrips(std::mt19937& random, StripFormat format, size_t k, uint8_t scale_min,
                    uint8_t scale_max) {
  Strips strips = {k, format, {}, {}};
  strips.elements.resize(format == StripFormat::kCodes ? CodePlaneBytes(kRows, k)
                                                       : NibblePlaneBytes(kRows, k));
  for (std::byte& byte : strips.elements) byte = std::byte(random() & 255);
  strips.scales.resize(ScalePlaneBytes(kRows, k));
  for (std::byte& byte : strips.scales)
    byte = std::byte(scale_min + random() % (scale_max - scale_min + 1u));
  return strips;
}

struct Inputs {
  std::vector<std::vector<float>> rows;
  std::vector<std::vector<int8_t>> values;
  std::vector<std::vector<float>> scales;
  std::vector<std::vector<int32_t>> starts[kStripFormats];

  Inputs(std::mt19937& random, size_t count, size_t k) : values(count), scales(count) {
    for (auto& of_format : starts) of_format.resize(count);
    for (size_t i = 0; i < count; ++i) {
      std::vector<float>& row = rows.emplace_back(k);
      for (float& x : row) x = std::normal_distribution<float>()(random);
      values[i].resize(k);
      scales[i].resize(k / 32);
      for (auto& of_format : starts) of_format[i].resize(k / 32);
      int32_t* const to[kStripFormats] = {starts[0][i].data(), starts[1][i].data()};
      QuantizeActivations(row.data(), k, values[i].data(), scales[i].data(), to);
    }
  }
  std::vector<QuantizedRow> Quantized(StripFormat format) const {
    std::vector<QuantizedRow> quantized;
    for (size_t i = 0; i < rows.size(); ++i)
      quantized.push_back(
          {values[i].data(), scales[i].data(), starts[static_cast<size_t>(format)][i].data()});
    return quantized;
  }
  std::vector<const float*> Floats() const {
    std::vector<const float*> floats;
    for (const auto& row : rows) floats.push_back(row.data());
    return floats;
  }
};

std::vector<float> Product(const MoeKernels& kernels, const Strips& strips, const Inputs& inputs,
                           bool fast) {
  // Filled, so that an output that is not written is seen.
  std::vector<float> out(inputs.rows.size() * kRows, 12345.0f);
  const auto f = static_cast<size_t>(strips.format);
  if (fast) {
    const auto rows = inputs.Quantized(strips.format);
    kernels.fast[f](strips.elements.data(), strips.scales.data(), strips.k, kStrips, rows.data(),
                    rows.size(), out.data());
  } else {
    const auto rows = inputs.Floats();
    kernels.exact[f](strips.elements.data(), strips.scales.data(), strips.k, kStrips, rows.data(),
                     rows.size(), out.data());
  }
  return out;
}

// The int8 activations are the input here: only what the integer path rounds may differ.
void ExpectNear(const Strips& strips, const Inputs& inputs, bool fast,
                const std::vector<float>& out) {
  for (size_t i = 0; i < inputs.rows.size(); ++i) {
    for (size_t n = 0; n < kRows; ++n) {
      double sum = 0, magnitude = 0;
      for (size_t k = 0; k < strips.k; ++k) {
        const double x = fast ? double{inputs.scales[i][k / 32]} * inputs.values[i][ValuePlace(k)]
                              : double{inputs.rows[i][k]};
        sum += strips.Weight(n, k) * x;
        magnitude += std::fabs(strips.Weight(n, k) * x);
      }
      // As reference.cc: of the exact arithmetic, and of the fast one with its inputs taken as they
      // are.
      const double steps = (fast ? 2 : 17) + static_cast<double>(strips.k) / 32;
      const double bound = steps * 0x1p-24 / (1 - steps * 0x1p-24) * magnitude +
                           static_cast<double>(strips.k) * 0x1p-133;
      ASSERT_LE(std::fabs(double{out[(n / 16 * inputs.rows.size() + i) * 16 + n % 16]} - sum),
                bound)
          << "row " << n << ", token " << i << ", k " << strips.k << ", fast " << fast;
    }
  }
}

TEST(MoeKernels, EveryVariantIsTheDefinitionAndAgreesToTheBit) {
  std::mt19937 random(20);
  for (const size_t k : {64, 128, 192, 640, 1024}) {
    for (const size_t count : {1, 2, 3, 4, 5, 7, 8, 9, 17}) {
      for (const StripFormat format : {StripFormat::kCodes, StripFormat::kNibbles}) {
        const Strips strips = RandomStrips(random, format, k, 110, 130);
        const Inputs inputs(random, count, k);
        for (const bool fast : {false, true}) {
          const std::vector<float> scalar =
              Product(*AvailableMoeKernels().back(), strips, inputs, fast);
          ExpectNear(strips, inputs, fast, scalar);
          for (const MoeKernels* kernels : AvailableMoeKernels())
            ASSERT_EQ(Product(*kernels, strips, inputs, fast), scalar)
                << kernels->name << ", k " << k << ", count " << count << ", fast " << fast;
        }
      }
    }
  }
}

TEST(MoeKernels, ScalesOfTheWholeRangeAreExactPowersOfTwo) {
  std::mt19937 random(21);
  for (const StripFormat format : {StripFormat::kCodes, StripFormat::kNibbles}) {
    for (const int byte : {0, 1, 2, 126, 127, 128, 200, 240}) {
      const auto scale = static_cast<uint8_t>(byte);
      const Strips strips = RandomStrips(random, format, 64, scale, scale);
      const Inputs inputs(random, 3, 64);
      for (const MoeKernels* kernels : AvailableMoeKernels())
        for (const bool fast : {false, true})
          ExpectNear(strips, inputs, fast, Product(*kernels, strips, inputs, fast));
    }
  }
}

RC_GTEST_PROP(MoeKernels, VariantsAgreeToTheBitOnAnyStrip, ()) {
  std::mt19937 random(*rc::gen::arbitrary<uint32_t>());
  const auto k = 64 * *rc::gen::inRange<size_t>(1, 12);
  const auto count = *rc::gen::inRange<size_t>(1, 20);
  const auto format = *rc::gen::element(StripFormat::kCodes, StripFormat::kNibbles);
  const Strips strips = RandomStrips(random, format, k, 0, 254);
  const Inputs inputs(random, count, k);
  for (const bool fast : {false, true}) {
    const std::vector<float> scalar = Product(*AvailableMoeKernels().back(), strips, inputs, fast);
    for (const MoeKernels* kernels : AvailableMoeKernels()) {
      const std::vector<float> out = Product(*kernels, strips, inputs, fast);
      // Bit for bit, and NaN (infinity less infinity) where the scalar one has it.
      for (size_t i = 0; i < out.size(); ++i)
        RC_ASSERT(out[i] == scalar[i] || (std::isnan(out[i]) && std::isnan(scalar[i])));
    }
  }
}

TEST(MoeKernels, AreChosenByName) {
  EXPECT_EQ((*SelectMoeKernels("scalar"))->isa, Isa::kScalar);
  EXPECT_EQ(*SelectMoeKernels(std::nullopt), AvailableMoeKernels().front());
  const auto unknown = SelectMoeKernels("mmx");
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code(), StatusCode::kUsage);
}

TEST(QuantizeActivations, RoundsHalfToEvenAndKeepsTheLargest) {
  std::vector<float> x(64);
  x[0] = 127;
  x[1] = 2.5f;
  x[2] = 3.5f;
  x[3] = -2.5f;
  x[4] = -127;
  x[32] = 0x1p-101f;  // its block is zeros
  std::vector<int8_t> values(64);
  std::vector<float> scales(2);
  std::vector<int32_t> codes(2), nibbles(2);
  int32_t* const starts[kStripFormats] = {codes.data(), nibbles.data()};
  QuantizeActivations(x.data(), 64, values.data(), scales.data(), starts);
  // Columns 0 to 3 are four places apart, column 4 is next to column 0.
  EXPECT_EQ((std::vector<int>{values[0], values[4], values[8], values[12], values[1]}),
            (std::vector<int>{127, 2, 4, -2, -127}));
  EXPECT_EQ(scales, (std::vector<float>{1, 0}));
  EXPECT_EQ(codes, (std::vector<int32_t>{-4 * 4, 0}));
  EXPECT_EQ(nibbles, (std::vector<int32_t>{-12 * 4, 0}));
  EXPECT_EQ(values[32], 0);
}

TEST(QuantizeActivations, WhatIsNotFiniteStaysSo) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    for (const size_t place : {size_t{0}, size_t{17}, size_t{31}}) {
      std::vector<float> x(32, 1.0f);
      x[place] = bad;
      std::vector<int8_t> values(32);
      float scale = 0;
      int32_t codes = 0, nibbles = 0;
      int32_t* const starts[kStripFormats] = {&codes, &nibbles};
      QuantizeActivations(x.data(), 32, values.data(), &scale, starts);
      EXPECT_FALSE(std::isfinite(scale)) << bad << " at " << place;
    }
  }
}

double Silu(double g, double alpha) { return g / (1 + std::exp(-alpha * g)); }

// Written from the models' own definitions, in float64.
double Expected(const Activation& activation, double gate, double up) {
  switch (activation.kind) {
    case ActivationKind::kSiluGated: return Silu(gate, 1) * up;
    case ActivationKind::kSiluGatedClamped:
      if (gate > 10) gate = 10;
      if (up > 10) up = 10;
      if (up < -10) up = -10;
      return Silu(gate, 1) * up;
    case ActivationKind::kSwigluOai:
      if (gate > 7) gate = 7;
      if (up > 7) up = 7;
      if (up < -7) up = -7;
      return (up + 1) * Silu(gate, 1.702);
    case ActivationKind::kInvalid: break;
  }
  return NAN;
}

TEST(Activate, IsTheModelsOwnFormulaAlsoBeyondTheClamps) {
  const Activation activations[] = {{ActivationKind::kSiluGated, 0, 0},
                                    {ActivationKind::kSiluGatedClamped, 10, 0},
                                    {ActivationKind::kSwigluOai, 7, 1.702}};
  std::vector<float> values;
  for (float v = -140; v <= 140; v += 0.37f) values.push_back(v);
  for (const float v : {0.f, -0.f, 1e-30f, -1e-30f, 7.f, 10.f, -7.f, -10.f, 3e4f, -3e4f})
    values.push_back(v);
  for (const Activation& activation : activations) {
    for (const float up : values) {
      const std::vector<float> ups(values.size(), up);
      std::vector<float> out(values.size());
      Activate(activation, values.data(), ups.data(), values.size(), out.data());
      for (size_t i = 0; i < values.size(); ++i) {
        const double expected = Expected(activation, values[i], up);
        // reference.cc: 192 roundings, of (up + 1) before it may cancel too; exp ends at e^88.
        const double least = 0x1p-126 * std::fabs(double{values[i]}) * (std::fabs(double{up}) + 1);
        const double scale = std::fabs(expected) + std::fabs(Silu(values[i], 1));
        ASSERT_NEAR(out[i], expected, 192 * 0x1p-24 * scale + least)
            << "gate " << values[i] << ", up " << up;
      }
    }
  }
}

}  // namespace
}  // namespace hotplane
