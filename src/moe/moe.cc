#include "moe/moe.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/fault_guard.h"
#include "base/format_text.h"
#include "moe/activation.h"
#include "moe/fp8.h"
#include "moe/routing.h"

namespace hotplane {
namespace {

// Columns of the intermediate, or rows of the output, of one piece of work: a multiple of the scale
// block, and a divisor of H and I.
constexpr size_t kPieceRows = 64;
static_assert(kPieceRows % kScaleBlock == 0 && kPieceRows % kStripRows == 0);
constexpr size_t kPieceStrips = kPieceRows / kStripRows;
// Tokens of one expert that a piece takes at once: what bounds its memory on the stack.
constexpr size_t kTokensMax = 64;

bool IsFinite(float value) { return (std::bit_cast<uint32_t>(value) & 0x7F800000u) != 0x7F800000u; }

Result<void> CheckFinite(const MoeCall& call, const char* what, const float* values, size_t width) {
  const size_t count = call.token_count * width;
  bool finite = true;
  for (size_t i = 0; i < count; ++i) finite &= IsFinite(values[i]);
  if (finite) return {};
  const size_t i = static_cast<size_t>(
      std::find_if(values, values + count, [](float v) { return !IsFinite(v); }) - values);
  return Fail(Status::Usage(Text("layer {}: {} [{}, {}] is not finite", call.layer, what, i / width,
                                 i % width))
                  .Expected("finite numbers")
                  .Found(Text("{}", values[i]))
                  .Advice("an earlier layer of the model has overflowed, or its input is wrong"));
}

// One matrix of one expert as strips.
struct Matrix {
  StripFormat format = StripFormat::kCodes;
  size_t k = 0;
  const std::byte* codes = nullptr;
  const std::byte* scales = nullptr;
  const std::byte* nibbles = nullptr;
  const std::byte* quintals = nullptr;  // with codes, instead of nibbles
};

Matrix MatrixOf(const ExpertWeights& expert, bool w13, const LayerGeometry& geometry) {
  Matrix matrix;
  matrix.k = w13 ? geometry.k13() : geometry.k2();
  matrix.codes = w13 ? expert.planes13 : expert.planes2;
  matrix.scales = w13 ? expert.sc13 : expert.sc2;
  if (expert.precision == Precision::kFp4) {
    matrix.format = StripFormat::kNibbles;
    const std::byte* fp = w13 ? expert.fp13 : expert.fp2;
    (expert.fp_encoding == Encoding::kDeltaQuintal ? matrix.quintals : matrix.nibbles) = fp;
  }
  return matrix;
}

// Activations of many rows, [count, k], in the form that the arithmetic takes.
class Rows {
 public:
  Rows(Arithmetic arithmetic, size_t count, size_t k)
      : fast_(arithmetic == Arithmetic::kFast), k_(k) {
    if (fast_) {
      values_.resize(count * k);
      scales_.resize(count * k / kScaleBlock);
      for (auto& starts : starts_) starts.resize(count * k / kScaleBlock);
    } else {
      floats_.resize(count * k);
    }
  }

  // Columns [column, column + count) of one row; whole blocks of 32.
  void Set(size_t row, size_t column, const float* from, size_t count) {
    const size_t at = row * k_ + column;
    if (!fast_) {
      std::memcpy(floats_.data() + at, from, count * sizeof(float));
      return;
    }
    const size_t block = at / kScaleBlock;
    int32_t* const starts[kStripFormats] = {starts_[0].data() + block, starts_[1].data() + block};
    QuantizeActivations(from, count, values_.data() + at, scales_.data() + block, starts);
  }

  // A row that is whole. REQUIRES not fast.
  void RoundToFp8(size_t row) { fp8::RoundRow(floats_.data() + row * k_, k_); }

  const float* Floats(size_t row) const { return floats_.data() + row * k_; }
  QuantizedRow Quantized(size_t row, StripFormat format) const {
    const size_t block = row * k_ / kScaleBlock;
    return {values_.data() + row * k_, scales_.data() + block,
            starts_[static_cast<size_t>(format)].data() + block};
  }

 private:
  bool fast_;
  size_t k_;
  std::vector<float> floats_;
  std::vector<int8_t> values_;
  std::vector<float> scales_;
  std::array<std::vector<int32_t>, kStripFormats> starts_;
};

class Forward {
 public:
  Forward(const MoeCall& call, const MoeKernels& kernels, WorkerPool& pool)
      : call_(call),
        kernels_(kernels),
        pool_(pool),
        routing_(RouteByExpert({call.ids, call.token_count * call.top_k}, call.geometry.experts)),
        merged_(pool.worker_count()),
        x_(call.arithmetic, call.token_count, call.geometry.k13()),
        hidden_(call.arithmetic, call.token_count * call.top_k, call.geometry.k2()),
        results_(call.token_count * call.top_k * call.geometry.n2()) {}

  Result<void> Run() {
    HP_TRY(CheckWeights());
    HP_TRY(SetX());
    const size_t pieces13 = call_.geometry.k2() / kPieceRows;
    HP_TRY(pool_.ParallelFor(routing_.groups.size() * pieces13, [&](size_t index, size_t worker) {
      return GateUp(routing_.groups[index / pieces13], index % pieces13, worker);
    }));
    if (call_.arithmetic == Arithmetic::kFp8) HP_TRY(RoundHidden());
    const size_t pieces2 = call_.geometry.n2() / kPieceRows;
    HP_TRY(pool_.ParallelFor(routing_.groups.size() * pieces2, [&](size_t index, size_t worker) {
      return Down(routing_.groups[index / pieces2], index % pieces2, worker);
    }));
    return Combine();
  }

 private:
  Result<void> CheckWeights() const;
  Result<void> SetX();
  Result<void> GateUp(const Routing::Group& group, size_t piece, size_t worker);
  Result<void> RoundHidden();
  Result<void> Down(const Routing::Group& group, size_t piece, size_t worker);
  Result<void> Combine();

  // One piece, rows [64 * piece, 64 * piece + 64) of the matrix: out[(s*rows.size() + i)*16 + row]
  // of strip s, for the given rows of `from`.
  Result<void> Multiply(const Matrix& matrix, size_t piece, const Rows& from,
                        std::span<const uint32_t> rows, uint32_t expert, size_t worker, float* out);
  // Nibbles of `strips` strips, in memory of the worker.
  Result<const std::byte*> Merge(const Matrix& matrix, size_t strip, size_t strips, uint32_t expert,
                                 size_t worker);

  Result<void> AddBias(const std::byte* bias, size_t piece, uint32_t expert, size_t count,
                       float* out) const;

  // From here on other threads are woken for what is done once per element: 64 Ki elements take
  // about as long (20 us) as waking them.
  static constexpr size_t kParallelElements = size_t{64} << 10;

  const MoeCall& call_;
  const MoeKernels& kernels_;
  WorkerPool& pool_;
  Routing routing_;
  std::vector<std::vector<std::byte>> merged_;  // by worker: nibbles of two strips
  Rows x_;
  Rows hidden_;                 // by assignment
  std::vector<float> results_;  // [assignment, H]
};

Result<void> Forward::CheckWeights() const {
  for (const Routing::Group& group : routing_.groups) {
    const ExpertWeights& expert = call_.experts[group.expert];
    const auto missing = [&](const char* part) {
      return Fail(Status::Data(Text("layer {}, expert {}: {} is not at hand", call_.layer,
                                    group.expert, part))
                      .Expected(expert.precision == Precision::kFp4 ? "the expert's FP4 weights"
                                                                    : "the expert's base weights")
                      .Advice("boot the layer with this expert, or ask for another precision"));
    };
    if (expert.precision == Precision::kInvalid) return missing("every part");
    const bool fp4 = expert.precision == Precision::kFp4;
    const bool codes = !fp4 || expert.fp_encoding == Encoding::kDeltaQuintal;
    if (codes && expert.planes13 == nullptr) return missing("planes13");
    if (codes && expert.planes2 == nullptr) return missing("planes2");
    if (expert.sc13 == nullptr) return missing("sc13");
    if (expert.sc2 == nullptr) return missing("sc2");
    if (fp4 && expert.fp13 == nullptr) return missing("fp13");
    if (fp4 && expert.fp2 == nullptr) return missing("fp2");
    if (call_.geometry.biases && expert.bias13 == nullptr) return missing("bias13");
    if (call_.geometry.biases && expert.bias2 == nullptr) return missing("bias2");
  }
  return {};
}

Result<void> Forward::SetX() {
  const size_t k = call_.geometry.k13();
  const auto set = [&](size_t token, size_t) -> Result<void> {
    x_.Set(token, 0, call_.x + token * k, k);
    if (call_.arithmetic == Arithmetic::kFp8) x_.RoundToFp8(token);
    return {};
  };
  if (call_.token_count * k >= kParallelElements) return pool_.ParallelFor(call_.token_count, set);
  for (size_t token = 0; token < call_.token_count; ++token) HP_TRY(set(token, 0));
  return {};
}

// Runs `body`, which owns nothing, over weights that may be mapped files.
template <typename Body>
bool ReadWeights(bool mapped, Body body) {
  if (!mapped || !FaultGuardInstalled()) {
    body();
    return true;
  }
  // The weights lie in several files: any address.
  const std::span<const std::byte> all(static_cast<const std::byte*>(nullptr), SIZE_MAX);
  return CallGuarded(
      all, [](void* context) { (*static_cast<Body*>(context))(); }, &body);
}

Status CutShort(const MoeCall& call, uint32_t expert) {
  return Status::Data(Text("layer {}, expert {}: its file was cut short while it was read",
                           call.layer, expert))
      .Advice("close the engine, run `hotplane verify` on the store, then boot again");
}

Result<const std::byte*> Forward::Merge(const Matrix& matrix, size_t strip, size_t strips,
                                        uint32_t expert, size_t worker) {
  std::vector<std::byte>& nibbles = merged_[worker];
  const size_t rows = strips * kStripRows;
  nibbles.resize(NibblePlaneBytes(rows, matrix.k));
  static const Kernels& quant = *AvailableKernels().front();
  const std::byte* codes = matrix.codes + strip * CodePlaneBytes(kStripRows, matrix.k);
  const std::byte* quintals = matrix.quintals + strip * QuintalPlaneBytes(kStripRows, matrix.k);
  bool valid = false;
  const bool read = ReadWeights(
      call_.mapped, [&] { valid = quant.merge(codes, quintals, rows, matrix.k, nibbles.data()); });
  if (!read) return Fail(CutShort(call_, expert));
  if (!valid)
    return Fail(Status::Data(Text("layer {}, expert {}: quintals do not belong to the base codes",
                                  call_.layer, expert))
                    .Expected("both tiers built from the same weights")
                    .Advice("run `hotplane verify` on the store, then build the delta tier again"));
  return nibbles.data();
}

Result<void> Forward::Multiply(const Matrix& matrix, size_t piece, const Rows& from,
                               std::span<const uint32_t> rows, uint32_t expert, size_t worker,
                               float* out) {
  const auto format = static_cast<size_t>(matrix.format);
  std::array<QuantizedRow, kTokensMax> quantized;
  std::array<const float*, kTokensMax> floats;
  const bool fast = call_.arithmetic == Arithmetic::kFast;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (fast) quantized[i] = from.Quantized(rows[i], matrix.format);
    if (!fast) floats[i] = from.Floats(rows[i]);
  }
  // Merged nibbles are to stay in the second-level cache.
  const size_t step = matrix.quintals != nullptr ? 2 : kPieceStrips;
  for (size_t s = 0; s < kPieceStrips; s += step) {
    const size_t strip = piece * kPieceStrips + s;
    const std::byte* elements = nullptr;
    if (matrix.quintals != nullptr) {
      HP_ASSIGN(elements, Merge(matrix, strip, step, expert, worker));
    } else if (matrix.format == StripFormat::kNibbles) {
      elements = matrix.nibbles + strip * NibblePlaneBytes(kStripRows, matrix.k);
    } else {
      elements = matrix.codes + strip * CodePlaneBytes(kStripRows, matrix.k);
    }
    const std::byte* scales = matrix.scales + strip * ScalePlaneBytes(kStripRows, matrix.k);
    float* to = out + s * rows.size() * kStripRows;
    const bool read = ReadWeights(call_.mapped, [&] {
      if (fast)
        kernels_.fast[format](elements, scales, matrix.k, step, quantized.data(), rows.size(), to);
      else
        kernels_.exact[format](elements, scales, matrix.k, step, floats.data(), rows.size(), to);
    });
    if (!read) return Fail(CutShort(call_, expert));
  }
  return {};
}

// Adds the biases of a piece to each token's outputs.
Result<void> Forward::AddBias(const std::byte* bias, size_t piece, uint32_t expert, size_t count,
                              float* out) const {
  if (bias == nullptr) return {};
  std::array<float, kPieceRows> of_piece;
  const std::byte* from = bias + piece * sizeof of_piece;
  const bool read =
      ReadWeights(call_.mapped, [&] { std::memcpy(of_piece.data(), from, sizeof of_piece); });
  if (!read) return Fail(CutShort(call_, expert));
  for (size_t s = 0; s < kPieceStrips; ++s)
    for (size_t i = 0; i < count; ++i)
      for (size_t row = 0; row < kStripRows; ++row)
        out[(s * count + i) * kStripRows + row] += of_piece[s * kStripRows + row];
  return {};
}

// One token's outputs of a piece, by row.
void Gather(const float* outputs, size_t count, size_t i, float* to) {
  for (size_t s = 0; s < kPieceStrips; ++s)
    std::copy_n(outputs + (s * count + i) * kStripRows, kStripRows, to + s * kStripRows);
}

Result<void> Forward::GateUp(const Routing::Group& group, size_t piece, size_t worker) {
  const ExpertWeights& expert = call_.experts[group.expert];
  const Matrix w13 = MatrixOf(expert, true, call_.geometry);
  const std::byte* bias = call_.geometry.biases ? expert.bias13 : nullptr;
  const size_t up_piece = call_.geometry.k2() / kPieceRows + piece;
  for (size_t begin = group.begin; begin < group.end; begin += kTokensMax) {
    const size_t count = std::min(kTokensMax, group.end - begin);
    std::array<uint32_t, kTokensMax> tokens;
    for (size_t i = 0; i < count; ++i)
      tokens[i] = static_cast<uint32_t>(routing_.order[begin + i] / call_.top_k);
    std::array<float, kTokensMax * kPieceRows> gate, up;
    const std::span<const uint32_t> rows(tokens.data(), count);
    HP_TRY(Multiply(w13, piece, x_, rows, group.expert, worker, gate.data()));
    HP_TRY(Multiply(w13, up_piece, x_, rows, group.expert, worker, up.data()));
    HP_TRY(AddBias(bias, piece, group.expert, count, gate.data()));
    HP_TRY(AddBias(bias, up_piece, group.expert, count, up.data()));
    Activate(call_.activation, gate.data(), up.data(), count * kPieceRows, gate.data());
    for (size_t i = 0; i < count; ++i) {
      std::array<float, kPieceRows> hidden;
      Gather(gate.data(), count, i, hidden.data());
      hidden_.Set(routing_.order[begin + i], piece * kPieceRows, hidden.data(), kPieceRows);
    }
  }
  return {};
}

// Groups of columns are wider than pieces.
Result<void> Forward::RoundHidden() {
  return pool_.ParallelFor(routing_.order.size(), [&](size_t assignment, size_t) -> Result<void> {
    hidden_.RoundToFp8(assignment);
    return {};
  });
}

Result<void> Forward::Down(const Routing::Group& group, size_t piece, size_t worker) {
  const ExpertWeights& expert = call_.experts[group.expert];
  const Matrix w2 = MatrixOf(expert, false, call_.geometry);
  const std::byte* bias = call_.geometry.biases ? expert.bias2 : nullptr;
  for (size_t begin = group.begin; begin < group.end; begin += kTokensMax) {
    const size_t count = std::min(kTokensMax, group.end - begin);
    const std::span<const uint32_t> assignments(routing_.order.data() + begin, count);
    std::array<float, kTokensMax * kPieceRows> out;
    HP_TRY(Multiply(w2, piece, hidden_, assignments, group.expert, worker, out.data()));
    HP_TRY(AddBias(bias, piece, group.expert, count, out.data()));
    for (size_t i = 0; i < count; ++i)
      Gather(out.data(), count, i,
             results_.data() + assignments[i] * call_.geometry.n2() + piece * kPieceRows);
  }
  return {};
}

// Slots in their own order, whatever order the experts were computed in.
Result<void> Forward::Combine() {
  const size_t width = call_.geometry.n2();
  const auto combine = [&](size_t token, size_t) -> Result<void> {
    float* y = call_.y + token * width;
    std::fill_n(y, width, 0.0f);
    for (size_t slot = 0; slot < call_.top_k; ++slot) {
      const size_t assignment = token * call_.top_k + slot;
      const float weight = call_.weights[assignment];
      const float* result = results_.data() + assignment * width;
      for (size_t i = 0; i < width; ++i) y[i] += weight * result[i];
    }
    return {};
  };
  if (results_.size() >= kParallelElements) return pool_.ParallelFor(call_.token_count, combine);
  for (size_t token = 0; token < call_.token_count; ++token) HP_TRY(combine(token, 0));
  return {};
}

}  // namespace

Result<void> CheckMoeCall(const MoeCall& call) {
  if (call.token_count == 0) return {};
  const auto null = [&](const char* what) {
    return Fail(Status::Usage(Text("layer {}: {} is null", call.layer, what)));
  };
  if (call.arithmetic < Arithmetic::kFast || call.arithmetic > Arithmetic::kFp8)
    return Fail(Status::Usage("no such arithmetic").Expected("fast, exact or FP8"));
  if (call.x == nullptr) return null("x");
  if (call.y == nullptr) return null("y");
  if (call.top_k > 0 && call.ids == nullptr) return null("ids");
  if (call.top_k > 0 && call.weights == nullptr) return null("weights");
  // Tokens and assignments are counted in 32 bits.
  if (call.token_count > UINT32_MAX / std::max<size_t>(call.top_k, 1))
    return Fail(Status::Usage(Text("layer {}: too many tokens in one call", call.layer))
                    .Expected(Text("tokens * experts per token at most {}", UINT32_MAX))
                    .Found(Text("{} * {}", call.token_count, call.top_k)));
  for (size_t i = 0; i < call.token_count * call.top_k; ++i) {
    if (call.ids[i] >= 0 && static_cast<uint32_t>(call.ids[i]) < call.geometry.experts) continue;
    return Fail(Status::Usage(Text("layer {}: ids [{}, {}] is no expert of it", call.layer,
                                   i / call.top_k, i % call.top_k))
                    .Expected(Text("0 to {}", call.geometry.experts - 1))
                    .Found(Text("{}", call.ids[i])));
  }
  HP_TRY(CheckFinite(call, "x", call.x, call.geometry.hidden));
  return CheckFinite(call, "weights", call.weights, call.top_k);
}

Result<void> MoeForward(const MoeCall& call, const MoeKernels& kernels, WorkerPool& pool) {
  if (call.token_count == 0) return {};
  HP_CHECK(call.experts.size() == call.geometry.experts);
  return Forward(call, kernels, pool).Run();
}

}  // namespace hotplane
