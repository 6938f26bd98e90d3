// Every variant against the oracle on inputs made to be awkward.

#include <gtest/gtest.h>

#include <bit>
#include <random>
#include <string>

#include "quant/exponent_rule.h"
#include "quant/oracle.h"
#include "quant/quantize.h"

namespace hotplane {
namespace {

using oracle::Bytes;
using Random = std::mt19937_64;

constexpr SourceFormat kFormats[] = {SourceFormat::kBf16, SourceFormat::kF16, SourceFormat::kF32};

struct FormatTraits {
  size_t bytes;
  int fraction_bits;
  uint32_t infinity;  // the pattern from which a magnitude is not finite
  int exponent_min;   // of blocks whose midpoints the format can hold exactly
  int exponent_max;
};
FormatTraits TraitsOf(SourceFormat format) {
  switch (format) {
    case SourceFormat::kBf16: return {2, 7, 0x7F80, -100, 125};
    case SourceFormat::kF16: return {2, 10, 0x7C00, -20, 12};
    default: return {4, 23, 0x7F800000, -100, 125};
  }
}

// The bit pattern of a magnitude that the format can hold (rounded toward 0 otherwise).
uint32_t PatternOf(SourceFormat format, double magnitude) {
  const auto f32 = std::bit_cast<uint32_t>(static_cast<float>(magnitude));
  if (format == SourceFormat::kF32) return f32;
  if (format == SourceFormat::kBf16) return f32 >> 16;
  const int exponent = std::ilogb(magnitude);
  if (exponent < -14) return static_cast<uint32_t>(std::ldexp(magnitude, 24));
  if (exponent > 15) return 0x7BFF;
  return static_cast<uint32_t>((exponent + 15) << 10) |
         (static_cast<uint32_t>(std::ldexp(magnitude, 10 - exponent)) & 0x3FF);
}

class BlockMaker {
 public:
  BlockMaker(SourceFormat format, uint64_t seed) : format_(format), random_(seed) {}

  Bytes Matrix(size_t count) {
    Bytes elements(count * traits_.bytes);
    for (size_t first = 0; first < count; first += 32) Block(elements.data(), first);
    return elements;
  }

 private:
  uint64_t Below(uint64_t limit) { return random_() % limit; }

  void Put(std::byte* elements, size_t index, uint32_t magnitude, bool negative) {
    const uint32_t largest = traits_.infinity - 1;
    magnitude = magnitude > largest ? largest : magnitude;
    if (traits_.bytes == 4) {
      const uint32_t bits = magnitude | (negative ? 1u << 31 : 0);
      std::memcpy(elements + index * 4, &bits, 4);
    } else {
      const auto bits = static_cast<uint16_t>(magnitude | (negative ? 1u << 15 : 0));
      std::memcpy(elements + index * 2, &bits, 2);
    }
  }

  uint32_t Nudge(uint32_t pattern) {
    const auto step = static_cast<uint32_t>(Below(3));
    return pattern + step > 0 ? pattern + step - 1 : 0;
  }

  // amax 6 * 2^e (one that belongs to exponent e), the others at or beside a midpoint.
  uint32_t MidpointPattern(int e, size_t i) {
    static constexpr double kValues[8] = {6, .25, .75, 1.25, 1.75, 2.5, 3.5, 5};
    const uint32_t pattern = PatternOf(format_, std::ldexp(kValues[i == 0 ? 0 : Below(8)], e));
    return i == 0 ? pattern : Nudge(pattern);
  }

  void Block(std::byte* elements, size_t first) {
    const uint64_t kind = Below(9);
    const int span = traits_.exponent_max - traits_.exponent_min + 1;
    const int e = traits_.exponent_min + static_cast<int>(Below(static_cast<uint64_t>(span)));
    const uint32_t near_step = Nudge(PatternOf(format_, std::ldexp(6 * std::sqrt(.5), e)) +
                                     static_cast<uint32_t>(Below(2)));
    for (size_t i = 0; i < 32; ++i) {
      uint32_t magnitude = 0;
      bool negative = Below(2) != 0;
      switch (kind) {
        case 0: magnitude = 0; break;
        case 1: magnitude = 0, negative = first / 32 % 2 != 0; break;
        case 2: magnitude = static_cast<uint32_t>(Below(4)); break;
        case 3: magnitude = static_cast<uint32_t>(Below(1u << traits_.fraction_bits)); break;
        case 4: magnitude = MidpointPattern(e, i); break;
        case 5: magnitude = i == 7 ? near_step : static_cast<uint32_t>(Below(near_step + 1)); break;
        case 6: magnitude = traits_.infinity - 1 - static_cast<uint32_t>(Below(3)); break;
        case 7: magnitude = Nudge(PatternOf(format_, 1e-29 / double(1 + Below(100)))); break;
        default: magnitude = static_cast<uint32_t>(Below(traits_.infinity)); break;
      }
      Put(elements, first + i, magnitude, negative);
    }
  }

  SourceFormat format_;
  FormatTraits traits_ = TraitsOf(format_);
  Random random_;
};

void ExpectPlanes(const Kernels& kernels, SourceFormat format, const Bytes& elements, size_t n,
                  size_t k, bool alternate_zeros) {
  const auto label = std::string(kernels.name) + " " + std::string(SourceFormatName(format)) + " " +
                     std::to_string(n) + "x" + std::to_string(k);
  SCOPED_TRACE(label);
  const oracle::Planes expected =
      oracle::Pack(oracle::Requantize(format, elements.data(), n, k, alternate_zeros));
  oracle::Planes got = {Bytes(n * k / 4), Bytes(n * k / 32), Bytes(n * k / 2),
                        Bytes(n * k * 5 / 16)};
  kernels.quantize(format, elements.data(), n, k, alternate_zeros,
                   {got.codes.data(), got.scales.data(), got.nibbles.data(), got.quintals.data()});
  EXPECT_TRUE(got.scales == expected.scales);
  EXPECT_TRUE(got.nibbles == expected.nibbles);
  EXPECT_TRUE(got.codes == expected.codes);
  EXPECT_TRUE(got.quintals == expected.quintals);
}

TEST(Differential, AwkwardBlocks) {
  struct Shape {
    size_t n, k;
  };
  uint64_t seed = 1;
  for (const SourceFormat format : kFormats) {
    for (const Shape shape : {Shape{16, 64}, Shape{16, 128}, Shape{32, 192}, Shape{48, 576},
                              Shape{16, 1024}, Shape{64, 640}}) {
      for (const bool alternate : {false, true}) {
        const Bytes elements = BlockMaker(format, ++seed).Matrix(shape.n * shape.k);
        for (const Kernels* kernels : AvailableKernels()) {
          ExpectPlanes(*kernels, format, elements, shape.n, shape.k, alternate);
        }
      }
    }
  }
}

// Every finite magnitude of a 16-bit format as the largest of a block; the others below it.
void ExpectEveryAmax(SourceFormat format) {
  const uint32_t patterns = TraitsOf(format).infinity;
  const size_t blocks = (patterns + 31) / 32 * 32;
  Bytes elements(blocks * 32 * 2);
  Random random(7);
  for (size_t block = 0; block < blocks; ++block) {
    const auto amax = static_cast<uint32_t>(block % patterns);
    for (size_t i = 0; i < 32; ++i) {
      const uint64_t bits = random();
      // Half of them within four binades of amax, where the midpoints lie.
      const uint64_t reach = (bits & 1) != 0 ? amax : std::min<uint64_t>(amax, 4 * 1024);
      const auto magnitude =
          static_cast<uint16_t>(i == block % 32 ? amax : amax - (bits >> 2) % (reach + 1));
      const auto element = static_cast<uint16_t>(magnitude | ((bits & 2) != 0 ? 0x8000 : 0));
      std::memcpy(elements.data() + (block * 32 + i) * 2, &element, 2);
    }
  }
  for (const Kernels* kernels : AvailableKernels()) {
    ExpectPlanes(*kernels, format, elements, blocks / 2, 64, false);
  }
}
TEST(Differential, EveryBf16Amax) { ExpectEveryAmax(SourceFormat::kBf16); }
TEST(Differential, EveryF16Amax) { ExpectEveryAmax(SourceFormat::kF16); }

float FloatOf(uint32_t bits) { return std::bit_cast<float>(bits); }

TEST(ExponentRule, StepsAreWhereTheFormulaSteps) {
  const ExponentSteps& steps = GetExponentSteps();
  const auto expect = [&](uint32_t bits) {
    const int scale = oracle::Exponent(FloatOf(bits)) + 127;
    const ExponentStep& step = steps.binades[bits >> 23];
    EXPECT_EQ(ScaleByteOf(double{FloatOf(bits)}), scale) << std::hex << bits;
    EXPECT_EQ(bits >= step.threshold ? step.at_threshold : step.below, scale) << std::hex << bits;
    if (bits >= steps.regular_from) {
      EXPECT_EQ(((bits + steps.regular_carry) >> 23) - 3, scale) << std::hex << bits;
    }
  };
  Random random(3);
  for (uint32_t field = 0; field < 255; ++field) {
    const uint32_t first = field << 23;
    const uint32_t last = first | 0x7FFFFF;
    for (const uint32_t bits : {first, first + 1, last - 1, last}) expect(bits);
    const uint32_t threshold = steps.binades[field].threshold;
    for (uint32_t back = 0; back < 3 && back <= threshold - first; ++back) expect(threshold - back);
    expect(threshold + 1);
    for (int i = 0; i < 100; ++i) expect(first + static_cast<uint32_t>(random() % 0x800000));
  }
  // Nothing but zero goes below 2^-100, thanks to the 1e-30.
  EXPECT_EQ(ScaleByteOf(0), 0);
  EXPECT_EQ(ScaleByteOf(double{FloatOf(1)}), 27);
}

TEST(ExponentRule, BytesNeverFall) {
  const ExponentSteps& steps = GetExponentSteps();
  for (uint32_t field = 0; field < 255; ++field) {
    EXPECT_LE(steps.binades[field].below, steps.binades[field].at_threshold);
    if (field > 0) {
      EXPECT_LE(steps.binades[field - 1].at_threshold, steps.binades[field].below);
    }
  }
  EXPECT_EQ(steps.binades[254].at_threshold, 252);
}

TEST(CountZeros, AgreesOnEveryLengthAndFindsEveryNonFinite) {
  for (const SourceFormat format : kFormats) {
    const FormatTraits traits = TraitsOf(format);
    for (size_t count = 0; count < 150; ++count) {
      const Bytes whole = BlockMaker(format, count).Matrix(160);
      // Allocated to the byte, at an odd address.
      Bytes storage(count * traits.bytes + 1);
      std::memcpy(storage.data() + 1, whole.data(), count * traits.bytes);
      uint64_t positive = 0;
      uint64_t negative = 0;
      for (size_t i = 0; i < count; ++i) {
        const long double value = oracle::Value(format, whole.data(), i);
        if (value == 0) ++(std::signbit(value) ? negative : positive);
      }
      for (const Kernels* kernels : AvailableKernels()) {
        const ZeroCount zeros = kernels->count_zeros(format, storage.data() + 1, count);
        EXPECT_EQ(zeros.positive, positive) << kernels->name;
        EXPECT_EQ(zeros.negative, negative) << kernels->name;
        EXPECT_TRUE(zeros.finite) << kernels->name;
      }
    }
    for (size_t at = 0; at < 150; ++at) {
      for (const uint32_t magnitude : {traits.infinity, traits.infinity + 1}) {
        for (const bool negative : {false, true}) {
          Bytes elements(150 * traits.bytes);
          const uint32_t sign = negative ? 1u << (traits.bytes * 8 - 1) : 0;
          const uint32_t bits = magnitude | sign;
          std::memcpy(elements.data() + at * traits.bytes, &bits, traits.bytes);
          for (const Kernels* kernels : AvailableKernels()) {
            const ZeroCount zeros = kernels->count_zeros(format, elements.data(), 150);
            EXPECT_FALSE(zeros.finite) << kernels->name << " at " << at;
            EXPECT_EQ(zeros.positive, 149u);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace hotplane
