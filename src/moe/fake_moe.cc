// Stands in for the kernels of prefill that need Hopper's own instructions, on the fake CUDA
// driver: what they compute, what they refuse and how they round are the kernels'; sums are
// float64, so that the bound of reference.cc holds.

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include "device/fake/fake_kernel.h"
#include "format/manifest.h"
#include "moe/bfloat16.h"
#include "moe/cuda/moe_args.h"
#include "moe/reference.h"

namespace hotplane {
namespace {

using namespace moe_cuda;

enum class Tier { kMissing, kBase, kNibbles, kQuintals };

// As TierOf of expert_matrix.h.
Tier TierOf(const ExpertSlot& slot, uint32_t wanted, bool biases) {
  if (wanted < kWantBase || wanted > kWantFp4OrBase) return Tier::kMissing;
  if (biases && (slot.bias13 == nullptr || slot.bias2 == nullptr)) return Tier::kMissing;
  if (slot.sc13 == nullptr || slot.sc2 == nullptr) return Tier::kMissing;
  const bool base = slot.planes13 != nullptr && slot.planes2 != nullptr;
  const bool fp4 = slot.fp13 != nullptr && slot.fp2 != nullptr && (slot.fp_quintals == 0 || base);
  if (wanted != kWantBase && fp4) return slot.fp_quintals != 0 ? Tier::kQuintals : Tier::kNibbles;
  if (wanted != kWantFp4 && base) return Tier::kBase;
  return Tier::kMissing;
}

void Refuse(Refusal* refusal, RefusalKind kind, uint32_t expert) {
  if (refusal->kind == 0) *refusal = {kind, expert};
}

// One of the matrices of an expert, row-major.
std::vector<double> Decode(Tier tier, const uint8_t* planes, const uint8_t* scales,
                           const uint8_t* fp, size_t rows, size_t columns) {
  const auto* const codes = reinterpret_cast<const std::byte*>(planes);
  const auto* const sc = reinterpret_cast<const std::byte*>(scales);
  const auto* const fine = reinterpret_cast<const std::byte*>(fp);
  std::vector<double> weights;
  weights.reserve(rows * columns);
  for (size_t n = 0; n < rows; ++n)
    for (size_t k = 0; k < columns; ++k)
      weights.push_back(tier == Tier::kBase      ? BaseWeight(codes, sc, columns, n, k)
                        : tier == Tier::kNibbles ? NibbleWeight(fine, sc, columns, n, k)
                                                 : QuintalWeight(codes, fine, sc, columns, n, k));
  return weights;
}

std::vector<double> Multiply(const std::vector<double>& weights, const float* bias,
                             const std::vector<double>& in) {
  std::vector<double> out(weights.size() / in.size());
  for (size_t n = 0; n < out.size(); ++n) {
    const double* const row = weights.data() + n * in.size();
    double sum = bias != nullptr ? double{bias[n]} : 0;
    for (size_t k = 0; k < in.size(); ++k) sum += row[k] * in[k];
    out[n] = sum;
  }
  return out;
}

double Act(const MoeArgs& args, double gate, double up) {
  const auto kind = static_cast<ActivationKind>(args.activation);
  const double limit = double{args.limit};
  if (kind != ActivationKind::kSiluGated) {
    gate = std::min(gate, limit);
    up = std::clamp(up, -limit, limit);
  }
  if (kind == ActivationKind::kSwigluOai)
    return gate / (1 + std::exp(-double{args.alpha} * gate)) * (up + 1);
  return gate / (1 + std::exp(-gate)) * up;
}

// A token's row of x, from the order of PrefillColumn.
std::vector<double> RowOf(const MoeArgs& args, const PrefillArgs& prefill, uint32_t token) {
  std::vector<double> x(args.hidden);
  const uint16_t* const row = prefill.x + uint64_t{token} * args.hidden;
  for (uint32_t i = 0; i < args.hidden; ++i) {
    const uint32_t column = PrefillColumn(i % 32 / 2) + i % 2 * 16;
    x[i / 32 * 32 + column] = double{FromBf16(row[i])};
  }
  return x;
}

void GateUp(const MoeArgs& args, const PrefillArgs& prefill, const ExpertSlot& slot, Tier tier,
            const std::vector<uint32_t>& assignments) {
  const std::vector<double> w13 =
      Decode(tier, slot.planes13, slot.sc13, slot.fp13, 2 * args.intermediate, args.hidden);
  const float* const bias = args.biases != 0 ? slot.bias13 : nullptr;
  for (const uint32_t assignment : assignments) {
    const std::vector<double> sums =
        Multiply(w13, bias, RowOf(args, prefill, assignment / args.top_k));
    uint16_t* const inner = args.inner + uint64_t{assignment} * args.intermediate;
    for (size_t i = 0; i < args.intermediate; ++i)
      inner[i] = ToBf16(static_cast<float>(Act(args, sums[i], sums[args.intermediate + i])));
  }
}

void Down(const MoeArgs& args, const ExpertSlot& slot, Tier tier,
          const std::vector<uint32_t>& assignments) {
  const std::vector<double> w2 =
      Decode(tier, slot.planes2, slot.sc2, slot.fp2, args.hidden, args.intermediate);
  const float* const bias = args.biases != 0 ? slot.bias2 : nullptr;
  for (const uint32_t assignment : assignments) {
    std::vector<double> act(args.intermediate);
    const uint16_t* const inner = args.inner + uint64_t{assignment} * args.intermediate;
    std::transform(inner, inner + args.intermediate, act.begin(), FromBf16);
    const std::vector<double> result = Multiply(w2, bias, act);
    std::transform(result.begin(), result.end(), args.results + uint64_t{assignment} * args.hidden,
                   [](double value) { return static_cast<float>(value); });
  }
}

// Of experts of `only`, and of missing ones.
void Multiply(const MoeArgs& args, const PrefillArgs& prefill, bool gate_up, Tier only) {
  std::map<uint32_t, std::vector<uint32_t>> assignments_of;
  for (uint32_t i = 0; i < args.tokens * args.top_k; ++i)
    if (static_cast<uint32_t>(args.ids[i]) < args.experts)
      assignments_of[static_cast<uint32_t>(args.ids[i])].push_back(i);
  for (const auto& [id, assignments] : assignments_of) {
    const ExpertSlot& slot = args.slots[id];
    const uint32_t wanted = args.wanted != nullptr ? args.wanted[id] : args.wanted_of_all;
    const Tier tier = TierOf(slot, wanted, args.biases != 0);
    if (tier == Tier::kMissing) {
      Refuse(args.refusal, kRefusedExpert, id);
      for (const uint32_t assignment : assignments)
        std::fill_n(args.results + uint64_t{assignment} * args.hidden, args.hidden,
                    std::numeric_limits<float>::quiet_NaN());
    } else if (tier == only && gate_up) {
      GateUp(args, prefill, slot, tier, assignments);
    } else if (tier == only) {
      Down(args, slot, tier, assignments);
    }
  }
}

template <Tier kTier>
std::function<void()> PrefillWork(const FakeLaunch& launch) {
  const auto args = *static_cast<const MoeArgs*>(launch.arguments[0]);
  const auto prefill = *static_cast<const PrefillArgs*>(launch.arguments[1]);
  const bool gate_up = *static_cast<const uint32_t*>(launch.arguments[2]) != 0;
  return [=] { Multiply(args, prefill, gate_up, kTier); };
}

constexpr FakeKernel kPrefill[] = {
    {"hotplane_moe_prefill_base", PrefillWork<Tier::kBase>},
    {"hotplane_moe_prefill_nibbles", PrefillWork<Tier::kNibbles>},
    {"hotplane_moe_prefill_quintals", PrefillWork<Tier::kQuintals>},
};
const FakeKernelAdded kPrefillAdded[] = {FakeKernelAdded(kPrefill[0]), FakeKernelAdded(kPrefill[1]),
                                         FakeKernelAdded(kPrefill[2])};

}  // namespace
}  // namespace hotplane
