// Matrices of every source format with all that makes quantization hard: zeros of both signs, ties,
// blocks of zeros, exponents at both ends, values beside the places where a scale byte steps. For
// tests of those who must agree on them.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/format_text.h"
#include "boot/cpu_quantizer.h"
#include "device/matrix_quantizer.h"
#include "format/tsym4.h"
#include "quant/exponent_rule.h"

namespace hotplane::matrix_cases {

using Random = std::mt19937_64;

struct MatrixCase {
  std::string name;
  std::vector<std::byte> elements = {};
  std::vector<std::byte> scales = {};
  std::vector<double> block_scales = {};
  MatrixSource source = {};  // without its spans
  MatrixSource Source() const {
    MatrixSource whole = source;
    whole.elements = elements;
    whole.scales = scales;
    whole.block_scales = block_scales;
    return whole;
  }
};

struct PlaneBytes {
  std::vector<std::byte> codes, scales, nibbles, quintals;
  PlaneBytes(size_t n, size_t k)
      : codes(CodePlaneBytes(n, k), std::byte{0xEE}),
        scales(ScalePlaneBytes(n, k), std::byte{0xEE}),
        nibbles(NibblePlaneBytes(n, k), std::byte{0xEE}),
        quintals(QuintalPlaneBytes(n, k), std::byte{0xEE}) {}
  MatrixPlanes Planes() { return {codes.data(), scales.data(), nibbles.data(), quintals.data()}; }
  bool operator==(const PlaneBytes&) const = default;
};

inline float Signed(Random& random, double magnitude) {
  return static_cast<float>(random() % 2 == 0 ? magnitude : -magnitude);
}

// One block of 32 columns, as float32.
inline void FillBlock(Random& random, uint64_t kind, bool one_sign, float* to) {
  static constexpr double kMidpoints[] = {.25, .75, 1.25, 1.75, 2.5, 3.5, 5};
  const int exponent = static_cast<int>(random() % 250) - 125;
  const double threshold = ScaleThresholds()[1 + random() % 254];
  for (size_t i = 0; i < kScaleBlock; ++i) {
    double value = std::ldexp(static_cast<double>(random() % 4096), exponent - 10);
    if (kind == 1) value = 0;
    if (kind == 2) value = std::ldexp(i == 0 ? 6.0 : kMidpoints[random() % 7], exponent);
    if (kind == 3) value = i == 0 ? threshold : threshold * .1 * static_cast<double>(random() % 9);
    if (kind == 4) value = std::ldexp(static_cast<double>(random() % 8), -149);
    if (kind == 5) value = 0x1.fffffep127 / static_cast<double>(1 + random() % 3);
    if (kind == 6) value = static_cast<double>(random() % 1000) * 1e-3;
    if (random() % 5 == 0) value = 0;
    to[i] = Signed(random, value);
    // A step of the float32 to either side.
    if ((kind == 2 || kind == 3) && to[i] != 0 && random() % 2 == 0)
      to[i] = std::nextafter(to[i], random() % 2 == 0 ? 0.0F : to[i] * 2);
    if (!std::isfinite(to[i])) to[i] = Signed(random, 0x1.fffffep127);
    if (to[i] == 0 && one_sign) to[i] = random() % 64 == 0 ? -0.0F : 0.0F;
  }
}

// Toward zero, and finite.
inline uint16_t HalfOf(float value) {
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const double magnitude = std::fabs(double{value});
  if (magnitude >= 65504) return sign | 0x7BFF;
  const int exponent = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
  const auto significand = static_cast<unsigned>(std::ldexp(magnitude, 10 - exponent));
  const unsigned field = significand < 1024 ? 0 : static_cast<unsigned>(exponent + 15);
  return static_cast<uint16_t>(sign | (field << 10) | (significand & 1023));
}

inline MatrixCase FloatCase(SourceFormat format, size_t n, size_t k, uint64_t seed) {
  Random random(seed);
  MatrixCase each{.name = Text("{} [{}, {}], seed {}", SourceFormatName(format), n, k, seed)};
  each.source = {.format = format, .n = n, .k = k};
  std::vector<float> values(n * k);
  const bool one_sign = seed % 2 == 0;
  for (size_t i = 0; i < values.size(); i += kScaleBlock)
    FillBlock(random, random() % 8, one_sign, &values[i]);
  const size_t step = format == SourceFormat::kF32 ? 4 : 2;
  each.elements.resize(values.size() * step);
  for (size_t i = 0; i < values.size(); ++i) {
    // The numbers of F16 are where its exponents are.
    const auto half = HalfOf(std::fmod(values[i], 65504.0F));
    const auto brain = static_cast<uint16_t>(std::bit_cast<uint32_t>(values[i]) >> 16);
    const uint16_t two = format == SourceFormat::kF16 ? half : brain;
    std::memcpy(&each.elements[i * step], step == 4 ? static_cast<const void*>(&values[i]) : &two,
                step);
  }
  return each;
}

inline std::vector<std::byte> RandomNibbles(Random& random, size_t count, bool one_sign) {
  std::vector<std::byte> bytes(count / 2);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(random());
    // Blocks of zeros, and of zeros beside .5.
    if (i / 8 % 7 == 0) bytes[i] &= i / 8 % 2 == 0 ? std::byte{0x88} : std::byte{0x99};
    for (const unsigned shift : {0u, 4u})
      if (one_sign && (std::to_integer<unsigned>(bytes[i]) >> shift & 7) == 0)
        bytes[i] &= ~(std::byte{8} << shift);
  }
  return bytes;
}

inline MatrixCase Mxfp4Case(size_t n, size_t k, uint64_t seed) {
  Random random(seed);
  MatrixCase each{.name = Text("mxfp4 [{}, {}], seed {}", n, k, seed)};
  each.source = {.format = SourceFormat::kMxfp4, .n = n, .k = k};
  each.elements = RandomNibbles(random, n * k, false);
  each.scales.resize(n * k / kScaleBlock);
  for (std::byte& scale : each.scales) scale = static_cast<std::byte>(random() % 255);
  return each;
}

inline MatrixCase Nvfp4Case(size_t n, size_t k, uint64_t seed) {
  Random random(seed);
  MatrixCase each{.name = Text("nvfp4 [{}, {}], seed {}", n, k, seed)};
  each.source = {.format = SourceFormat::kNvfp4, .n = n, .k = k};
  each.elements = RandomNibbles(random, n * k, seed % 2 == 0);
  each.scales.resize(n * k / 16);
  for (std::byte& scale : each.scales) {
    const uint64_t kind = random() % 8;
    scale = static_cast<std::byte>(kind == 0   ? 0
                                   : kind == 1 ? 1 + random() % 8
                                   : kind < 5  ? 0x38 + random() % 16
                                               : random() % 127);
  }
  const float odd = std::bit_cast<float>(0x39A7F3D1u);  // 24 significant bits
  const float globals[] = {
      1, odd, std::ldexp(odd, -100), std::ldexp(1.0F, -149), 0x1.fffffep127F, 3, 1 / odd};
  each.source.global_scale = globals[seed % 7];
  each.source.divide = seed / 7 % 2 != 0;
  return each;
}

inline MatrixCase Fp8Case(size_t n, size_t k, uint64_t seed) {
  static constexpr size_t kBlocks[][2] = {{128, 128}, {64, 64}, {1, 128}, {48, 80}, {500, 500}};
  Random random(seed);
  MatrixCase each{.name = Text("fp8 [{}, {}], seed {}", n, k, seed)};
  const auto& block = kBlocks[seed % 5];
  each.source = {.format = SourceFormat::kFp8,
                 .n = n,
                 .k = k,
                 .block_rows = block[0],
                 .block_columns = block[1]};
  each.block_scales.resize((n + block[0] - 1) / block[0] * ((k + block[1] - 1) / block[1]));
  for (double& scale : each.block_scales) {
    const float scales[] = {0.0F, 0x1p-149F, 0x1.fffffep127F, 1.0F};
    const uint64_t kind = random() % 8;
    const auto bits = static_cast<uint32_t>(random() % 0x7F800000u);
    scale = kind < 4 && seed % 3 != 0 ? scales[kind] : std::bit_cast<float>(bits);
  }
  each.elements.resize(n * k);
  for (size_t i = 0; i < each.elements.size(); ++i) {
    auto byte = static_cast<unsigned>(random() % 127 | (random() & 128));
    if (i / kScaleBlock % 9 == 0 || random() % 5 == 0) byte &= seed % 2 == 0 ? 0u : 128u;
    each.elements[i] = static_cast<std::byte>(byte);
  }
  return each;
}

inline std::vector<MatrixCase> AllCases(size_t rounds) {
  static constexpr size_t kShapes[][2] = {{16, 64}, {48, 192}, {32, 256}, {64, 128}, {160, 704}};
  std::vector<MatrixCase> cases;
  for (uint64_t seed = 0; seed < rounds * 14; ++seed) {
    const auto& [n, k] = kShapes[seed % 5];
    cases.push_back(Mxfp4Case(n, k, seed));
    cases.push_back(Nvfp4Case(n, k, seed));
    cases.push_back(Fp8Case(n, k, seed));
    for (const SourceFormat format : {SourceFormat::kBf16, SourceFormat::kF16, SourceFormat::kF32})
      cases.push_back(FloatCase(format, n, k, seed));
  }
  return cases;
}

// The same matrix with one value or scale that nobody can use, at a random place.
inline MatrixCase Spoiled(MatrixCase each, Random& random) {
  const auto put = [&random](std::vector<std::byte>& bytes, uint64_t value, size_t step) {
    const size_t at = random() % (bytes.size() / step) * step;
    std::memcpy(&bytes[at], &value, step);
  };
  const uint64_t sign = random() % 2;
  switch (each.source.format) {
    case SourceFormat::kMxfp4: put(each.scales, 255, 1); break;
    case SourceFormat::kNvfp4: put(each.scales, sign != 0 ? 0x80 + random() % 128 : 0x7F, 1); break;
    case SourceFormat::kFp8: put(each.elements, 0x7F | sign << 7, 1); break;
    case SourceFormat::kBf16: put(each.elements, (0x7F80 + random() % 128) | sign << 15, 2); break;
    case SourceFormat::kF16: put(each.elements, (0x7C00 + random() % 1024) | sign << 15, 2); break;
    default: put(each.elements, (0x7F800000 + random() % 0x800000) | sign << 31, 4);
  }
  each.name += ", spoiled";
  return each;
}

}  // namespace hotplane::matrix_cases
