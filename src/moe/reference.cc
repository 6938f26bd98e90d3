// The bound, with u = 2^-24 and gamma(n) = n*u/(1 - n*u) (Higham, Accuracy and Stability of
// Numerical Algorithms, section 3.1):
//
//  * A product of a row with activations a [K], exact arithmetic: every term passes at most 16
//    multiply-adds of its half block, one addition, and K/32 multiply-adds with scales, which are
//    powers of two:  gamma(17 + K/32) * sum|w||a|.
//  * The same, fast: a is replaced by q*s with |a - q*s| <= s/2 * (1 + 2^-12), s = amax/127 of its
//    block of 32; integer sums, below 2^24, are exact; the sum passes K/32 multiply-adds and s one
//    rounding:  sum|w|*s/2*(1+2^-12) + gamma(2 + K/32) * sum|w|(|a| + s).
//  * The same, bf16. Many tokens: tensor cores add 16 exact products and the sum so far by aligning
//    them to the largest and cutting off what is 2^-23 of it or less: at most 17 * 2^-23 of
//    sum|w||a| for each multiply, K/16 multiplies. Few tokens:
//    activations become 16-bit integers, a step is 1/32512 of the block's largest, and none where
//    that is below 2^-100 (weights are up to 6 times a scale); then as fast. act is rounded to
//    bfloat16, y too: 2^-8 each.
//  * With FP8 activations x and act are rounded here too, so what is rounded alike costs nothing.
//    An act that is off by d, or by the rounding to bfloat16, may be rounded to another number: d
//    and twice half a step away, half a step being 2^-4 of the magnitude or 2^-10 of the scale.
//  * An error d of the input passes on as sum|w|*d. A bias is one more rounding.
//  * act(g, u): silu and g*sigmoid(alpha*g) have slopes of at most 1.1, clamps of at most 1, so
//    |d act| <= 1.1*dg*(|u| + du) + |silu(g)|*du, with u + 1 for u in swiglu of gpt-oss. Computing
//    it costs 192 roundings at most: exp to 2^-22, and an argument of
//    magnitude 88 that is rounded with alpha and with the product, 88 each.
//  * The sum over k slots: gamma(k + 1) * sum|weight||result| beside the weighted errors.
//  * Where float32 underflows, an operation loses up to 2^-149, times an integer sum below 2^16. A
//    block whose amax is below 2^-100 is taken for zeros: its step counts as 2^-99.
#include "moe/reference.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "base/check.h"
#include "moe/bfloat16.h"
#include "moe/routing.h"

namespace hotplane {
namespace {

constexpr double kU = 0x1p-24;
constexpr double kUnderflow = 0x1p-133;
double Gamma(double n) { return n * kU / (1 - n * kU); }

// docs/format/planes.md: lane and word of an element, j within the word.
struct Address {
  Address(size_t columns, size_t n, size_t k)
      : tile(n / 16 * (columns / 64) + k / 64),
        lane(n % 8 * 4 + k % 16 / 4),
        word(n % 16 / 8 * 4 + k % 64 / 32 * 2 + k % 32 / 16),
        j(k % 4) {}
  size_t tile, lane, word, j;
};

double Scale(const std::byte* scales, size_t columns, size_t n, size_t k) {
  const size_t at = (n / 16 * (columns / 32) + k / 32) * 16 + n % 16;
  return std::ldexp(1.0, std::to_integer<int>(scales[at]) - 127);
}

unsigned Code(const std::byte* codes, const Address& a) {
  return std::to_integer<unsigned>(codes[(a.tile * 32 + a.lane) * 8 + a.word]) >> (2 * a.j) & 3;
}

double NibbleValue(unsigned nibble) {
  static constexpr double kMagnitudes[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  return (nibble & 8) != 0 ? -kMagnitudes[nibble & 7] : kMagnitudes[nibble & 7];
}

// What rounding to bfloat16 changes at most.
double Bf16Error(double magnitude) { return 0x1p-8 * magnitude + 0x1p-134; }

// All magnitudes of e4m3, ascending: even ones at even places.
std::vector<double> E4m3Magnitudes() {
  std::vector<double> magnitudes;
  for (int exponent = 0; exponent < 16; ++exponent)
    for (int mantissa = 0; mantissa < 8; ++mantissa)
      magnitudes.push_back(exponent == 0 ? std::ldexp(mantissa, -9)
                                         : std::ldexp(8 + mantissa, exponent - 10));
  magnitudes.pop_back();  // NaN
  return magnitudes;
}

double NearestE4m3(double value) {
  static const std::vector<double> magnitudes = E4m3Magnitudes();
  const double magnitude = std::fabs(value);
  const auto above = std::lower_bound(magnitudes.begin(), magnitudes.end(), magnitude);
  if (above == magnitudes.begin()) return 0;
  if (above == magnitudes.end()) return std::copysign(magnitudes.back(), value);
  const auto below = above - 1;
  const bool upper =
      *above - magnitude < magnitude - *below ||
      (*above - magnitude == magnitude - *below && (above - magnitudes.begin()) % 2 == 0);
  return std::copysign(upper ? *above : *below, value);
}

double Fp8Scale(double largest) {
  double scale = 0x1p-117;
  while (largest > 448 * scale) scale *= 2;
  return scale;
}

struct Value {
  double value = 0;
  double error = 0;
};

class Expert {
 public:
  Expert(const MoeCall& call, const ExpertWeights& weights)
      : call_(call),
        weights_(weights),
        fast_(call.arithmetic == Arithmetic::kFast),
        bf16_(call.arithmetic == Arithmetic::kBf16 || call.arithmetic == Arithmetic::kBf16Fp8),
        fp8_(call.arithmetic == Arithmetic::kFp8 || call.arithmetic == Arithmetic::kBf16Fp8),
        w13_(Decode(true)),
        w2_(Decode(false)) {}

  std::vector<Value> Multiply(bool w13, const std::vector<Value>& in) const {
    const std::vector<double> steps = Steps(in);
    const Matrix& matrix = w13 ? w13_ : w2_;
    const size_t rows = w13 ? call_.geometry.n13() : call_.geometry.n2();
    const std::byte* bias = !call_.geometry.biases ? nullptr
                            : w13                  ? weights_.bias13
                                                   : weights_.bias2;
    std::vector<Value> out(rows);
    for (size_t n = 0; n < rows; ++n) {
      double magnitude = 0, passed = 0, quantized = 0, stepped = 0, scaled = 0;
      for (size_t k = 0; k < in.size(); ++k) {
        const double w = matrix.weights[n * in.size() + k];
        out[n].value += w * in[k].value;
        magnitude += std::fabs(w) * (std::fabs(in[k].value) + in[k].error);
        passed += std::fabs(w) * in[k].error;
        quantized += std::fabs(w) * steps[k / 32] / 2 * (1 + 0x1p-12);
        stepped += std::fabs(w) * steps[k / 32];
        if (!bf16_) continue;
        scaled += matrix.scales[(n * in.size() + k) / 32];
        // Prefill takes them for zero.
        if (std::fabs(w) <= 0x1p-127)
          passed += std::fabs(w) * (std::fabs(in[k].value) + in[k].error);
      }
      const double blocks = static_cast<double>(in.size()) / 32;
      const double rounded = fast_   ? quantized + Gamma(2 + blocks) * (magnitude + stepped)
                             : bf16_ ? (34 * blocks * 0x1p-23 + Gamma(3 + blocks)) * magnitude +
                                           quantized / 256 + scaled * 6 * 0x1p-100
                                     : Gamma(17 + blocks) * magnitude;
      out[n].error = passed + rounded + static_cast<double>(in.size()) * kUnderflow;
      if (bias == nullptr) continue;
      float b;
      std::copy_n(bias + n * sizeof b, sizeof b, reinterpret_cast<std::byte*>(&b));
      out[n].value += b;
      out[n].error += kU * (std::fabs(out[n].value) + out[n].error);
    }
    return out;
  }

  std::vector<Value> Activate(const std::vector<Value>& gate_up) const {
    const size_t count = call_.geometry.intermediate;
    std::vector<Value> out(count);
    for (size_t i = 0; i < count; ++i) {
      out[i] = Activate(gate_up[i], gate_up[count + i]);
      if (bf16_ || fp8_) out[i].error += Bf16Error(std::fabs(out[i].value) + out[i].error);
    }
    return Rounded(std::move(out));
  }

  // Activations as the arithmetic takes them: in FP8 or as they are.
  // Where two of them are rounded apart, they were within an error of each other: less than a step
  // of e4m3, and they are neighbours, a step apart; more, and it is the error and half a step each.
  std::vector<Value> Rounded(std::vector<Value> of) const {
    if (!fp8_) return of;
    for (size_t first = 0; first < of.size(); first += 128) {
      const size_t end = std::min(of.size(), first + 128);
      double largest = 0, largest_possible = 0;
      for (size_t i = first; i < end; ++i) {
        of[i].value = double{FromBf16(ToBf16(static_cast<float>(of[i].value)))};
        if (of[i].error > 0) of[i].error += Bf16Error(std::fabs(of[i].value));
        largest = std::max(largest, std::fabs(of[i].value));
        largest_possible = std::max(largest_possible, std::fabs(of[i].value) + of[i].error);
      }
      if (largest >= 0x1.Fp127) continue;  // would become infinite: stays as it is
      const double scale = Fp8Scale(largest), scale_possible = Fp8Scale(largest_possible);
      for (size_t i = first; i < end; ++i) {
        Value& v = of[i];
        if (v.error > 0)
          v.error +=
              2 * std::max(0x1p-4 * (std::fabs(v.value) + v.error), 0x1p-10 * scale_possible);
        v.value = NearestE4m3(v.value / scale) * scale;
      }
    }
    return of;
  }

 private:
  // Row by row.
  struct Matrix {
    std::vector<double> weights;
    std::vector<double> scales;  // of blocks of 32
  };
  Matrix Decode(bool w13) const {
    const size_t rows = w13 ? call_.geometry.n13() : call_.geometry.n2();
    const size_t columns = w13 ? call_.geometry.k13() : call_.geometry.k2();
    const std::byte* codes = w13 ? weights_.planes13 : weights_.planes2;
    const std::byte* scales = w13 ? weights_.sc13 : weights_.sc2;
    const std::byte* fp = w13 ? weights_.fp13 : weights_.fp2;
    const bool base = weights_.precision == Precision::kBase;
    const bool nibbles = weights_.fp_encoding == Encoding::kDeltaNibble;
    Matrix matrix;
    for (size_t n = 0; n < rows; ++n) {
      for (size_t k = 0; k < columns; ++k) {
        matrix.weights.push_back(base      ? BaseWeight(codes, scales, columns, n, k)
                                 : nibbles ? NibbleWeight(fp, scales, columns, n, k)
                                           : QuintalWeight(codes, fp, scales, columns, n, k));
        if (k % 32 == 0) matrix.scales.push_back(Scale(scales, columns, n, k));
      }
    }
    return matrix;
  }

  // By block of 32 the step of the int8 form: amax/127 of what is quantized, whose error counts.
  std::vector<double> Steps(const std::vector<Value>& in) const {
    std::vector<double> steps(in.size() / 32);
    for (size_t k = 0; k < in.size(); ++k)
      steps[k / 32] =
          std::max(steps[k / 32], std::max((std::fabs(in[k].value) + in[k].error) / 127, 0x1p-99));
    return steps;
  }

  Value Activate(Value gate, Value up) const {
    const Activation& activation = call_.activation;
    const double limit = activation.limit;
    const bool clamps = activation.kind != ActivationKind::kSiluGated;
    const bool oai = activation.kind == ActivationKind::kSwigluOai;
    const double g = clamps ? std::min(gate.value, limit) : gate.value;
    const double u = (clamps ? std::clamp(up.value, -limit, limit) : up.value) + (oai ? 1 : 0);
    const double gated = g / (1 + std::exp(-(oai ? activation.alpha : 1) * g));
    Value out;
    out.value = gated * u;
    out.error = 1.1 * gate.error * (std::fabs(u) + up.error) + std::fabs(gated) * up.error +
                192 * kU * (std::fabs(out.value) + std::fabs(gated)) +
                // Beyond its range exp stays at e^88.
                0x1p-126 * std::fabs(g) * std::fabs(u) + kUnderflow;
    return out;
  }

  const MoeCall& call_;
  const ExpertWeights& weights_;
  bool fast_;
  bool bf16_;
  bool fp8_;
  Matrix w13_, w2_;
};

}  // namespace

double BaseWeight(const std::byte* codes, const std::byte* scales, size_t columns, size_t n,
                  size_t k) {
  static constexpr double kValues[4] = {-4, -1, 1, 4};
  return kValues[Code(codes, Address(columns, n, k))] * Scale(scales, columns, n, k);
}

double NibbleWeight(const std::byte* nibbles, const std::byte* scales, size_t columns, size_t n,
                    size_t k) {
  const Address a(columns, n, k);
  const auto byte =
      std::to_integer<unsigned>(nibbles[(a.tile * 32 + a.lane) * 16 + a.word * 2 + a.j / 2]);
  return NibbleValue(byte >> (4 * (a.j % 2)) & 15) * Scale(scales, columns, n, k);
}

double QuintalWeight(const std::byte* codes, const std::byte* quintals, const std::byte* scales,
                     size_t columns, size_t n, size_t k) {
  const Address a(columns, n, k);
  const std::byte* block = quintals + a.tile * 320;
  const auto bit = [&](size_t i) {
    const std::byte byte =
        i < 64 ? block[a.lane * 8 + i / 8] : block[256 + a.lane * 2 + (i - 64) / 8];
    return std::to_integer<unsigned>(byte) >> (i % 8) & 1;
  };
  unsigned word = 0;
  for (size_t i = 0; i < 10; ++i) word |= bit(a.word * 10 + i) << i;
  for (size_t i = 0; i < a.j; ++i) word /= 5;
  const unsigned code = Code(codes, a);
  const bool large = code == 0 || code == 3;
  const unsigned magnitude = word % 5 + (large ? 5 : 0);
  return NibbleValue((code < 2 ? 8u : 0u) | magnitude) * Scale(scales, columns, n, k);
}

MoeReference ReferenceMoe(const MoeCall& call) {
  const size_t width = call.geometry.hidden;
  // By expert, so that each is decoded once and no two are at a time.
  std::map<int32_t, std::vector<size_t>> assignments_of;
  for (size_t i = 0; i < call.token_count * call.top_k; ++i)
    assignments_of[call.ids[i]].push_back(i);
  std::vector<std::vector<Value>> results(call.token_count * call.top_k);
  for (const auto& [id, assignments] : assignments_of) {
    const Expert expert(call, call.experts[static_cast<size_t>(id)]);
    for (const size_t assignment : assignments) {
      std::vector<Value> x(width);
      for (size_t k = 0; k < width; ++k) x[k].value = call.x[assignment / call.top_k * width + k];
      results[assignment] = expert.Multiply(
          false, expert.Activate(expert.Multiply(true, expert.Rounded(std::move(x)))));
    }
  }
  const bool bf16 = call.arithmetic == Arithmetic::kBf16 || call.arithmetic == Arithmetic::kBf16Fp8;
  MoeReference reference;
  reference.y.resize(call.token_count * width);
  reference.bound.resize(call.token_count * width);
  for (size_t token = 0; token < call.token_count; ++token) {
    std::vector<double> magnitudes(width);
    double* y = reference.y.data() + token * width;
    double* bound = reference.bound.data() + token * width;
    for (size_t slot = 0; slot < call.top_k; ++slot) {
      const size_t assignment = token * call.top_k + slot;
      const std::vector<Value>& result = results[assignment];
      const double weight = call.weights[assignment];
      for (size_t n = 0; n < width; ++n) {
        y[n] += weight * result[n].value;
        bound[n] += std::fabs(weight) * result[n].error;
        magnitudes[n] += std::fabs(weight) * (std::fabs(result[n].value) + result[n].error);
      }
    }
    const auto slots = static_cast<double>(call.top_k);
    for (size_t n = 0; n < width; ++n) {
      bound[n] += Gamma(slots + 1) * magnitudes[n] + (slots + 1) * kUnderflow;
      if (bf16) bound[n] += Bf16Error(std::fabs(y[n]) + bound[n]);
    }
  }
  return reference;
}

}  // namespace hotplane
