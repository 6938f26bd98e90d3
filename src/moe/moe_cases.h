// The calls that every backend of the operator is tested with.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <string_view>
#include <vector>

#include "moe/moe_testing.h"

namespace hotplane::moe_cases {

inline constexpr Activation kSilu = {ActivationKind::kSiluGated, 0, 0};
inline constexpr Activation kDeepSeek = {ActivationKind::kSiluGatedClamped, 10, 0};
inline constexpr Activation kGptOss = {ActivationKind::kSwigluOai, 7, 1.702};

enum class Mix { kBase, kNibbles, kQuintals, kMixed };
enum class Ids { kRandom, kOneExpert, kRepeated };

struct Case {
  const char* name;
  uint32_t experts, hidden, intermediate;
  size_t tokens, top_k;
  Activation activation = kSilu;
  bool biases = false;
  Mix mix = Mix::kBase;
  Ids ids = Ids::kRandom;
  float amplitude = 1;  // of x
};

inline const Case kCases[] = {
    {"one token", 8, 128, 64, 1, 2},
    {"one token at FP4", 8, 128, 64, 1, 2, kSilu, false, Mix::kNibbles},
    {"one token at FP4 from quintals", 8, 128, 64, 1, 2, kSilu, false, Mix::kQuintals},
    {"both precisions in one call", 8, 128, 64, 9, 4, kSilu, false, Mix::kMixed},
    {"shapes that are no powers of two", 5, 192, 320, 7, 3, kSilu, false, Mix::kMixed},
    {"smallest shape", 1, 64, 64, 1, 1},
    {"many experts, most without tokens", 512, 64, 64, 3, 2, kSilu, false, Mix::kMixed},
    {"all tokens to one expert", 6, 128, 64, 130, 1, kSilu, false, Mix::kMixed, Ids::kOneExpert},
    {"an expert twice for a token", 6, 128, 64, 5, 4, kSilu, false, Mix::kMixed, Ids::kRepeated},
    {"no expert chosen", 4, 64, 64, 2, 0},
    {"prefill", 8, 128, 128, 100, 3, kSilu, false, Mix::kMixed},
    {"clamped", 6, 128, 64, 6, 3, kDeepSeek, false, Mix::kMixed, Ids::kRandom, 40},
    {"gpt-oss", 6, 128, 192, 6, 3, kGptOss, true, Mix::kMixed},
    {"gpt-oss beyond its clamps", 6, 128, 64, 6, 3, kGptOss, true, Mix::kMixed, Ids::kRandom, 30},
    {"small activations", 4, 64, 64, 3, 2, kSilu, false, Mix::kMixed, Ids::kRandom, 1e-6f},
};

inline const Case& CaseNamed(std::string_view name) {
  for (const Case& c : kCases)
    if (c.name == name) return c;
  ADD_FAILURE() << "no case " << name;
  return kCases[0];
}

// A call with all that it points to.
struct Problem {
  TestLayer layer;
  std::vector<ExpertWeights> experts;
  std::vector<float> x, weights, y;
  std::vector<int32_t> ids;
  MoeCall call;

  Problem(const Case& c, uint32_t seed)
      : layer(TestLayer::Make({c.experts, c.hidden, c.intermediate, c.biases}, seed)) {
    std::mt19937 random(seed);
    for (size_t e = 0; e < c.experts; ++e) {
      const bool fp4 = c.mix == Mix::kMixed ? random() % 2 == 0 : c.mix != Mix::kBase;
      const bool quintals = c.mix == Mix::kMixed ? random() % 2 == 0 : c.mix == Mix::kQuintals;
      experts.push_back(layer.Weights(e, fp4 ? Precision::kFp4 : Precision::kBase,
                                      quintals ? Encoding::kDeltaQuintal : Encoding::kDeltaNibble));
    }
    x.resize(c.tokens * c.hidden);
    for (float& v : x) v = c.amplitude * std::normal_distribution<float>()(random);
    for (size_t i = 0; i < c.tokens * c.top_k; ++i) {
      ids.push_back(c.ids == Ids::kOneExpert  ? static_cast<int32_t>(c.experts / 2)
                    : c.ids == Ids::kRepeated ? static_cast<int32_t>(i / 2 % c.experts)
                                              : static_cast<int32_t>(random() % c.experts));
      weights.push_back(std::uniform_real_distribution<float>(-1, 1)(random));
    }
    // Filled, so that what is not written is seen.
    y.assign(c.tokens * c.hidden, 12345.0f);
    call.geometry = layer.geometry;
    call.activation = c.activation;
    call.arithmetic = Arithmetic::kExact;
    call.token_count = c.tokens;
    call.top_k = c.top_k;
    call.x = x.data();
    call.ids = ids.data();
    call.weights = weights.data();
    call.y = y.data();
    call.experts = experts;
  }
  Problem(const Problem&) = delete;
};

}  // namespace hotplane::moe_cases
