// The operator in float64 from the exact weights, element by element: what every backend is held
// to.
#pragma once

#include <vector>

#include "moe/moe.h"

namespace hotplane {

struct MoeReference {
  std::vector<double> y;  // [T, H]
  // How far a backend's y may be from it, per element; see reference.cc for the derivation.
  std::vector<double> bound;
};

// REQUIRES CheckMoeCall, and that the experts have what their precision needs. `arithmetic` of the
// call decides the bound, and whether activations are rounded to FP8; nothing else.
// kBf16 and kBf16Fp8: x is to be bfloat16 already; y is the sum before it is rounded to bfloat16,
// the bound that of the rounded one.
MoeReference ReferenceMoe(const MoeCall& call);

// The weight at row n and column k of a plane [.., columns], as it is stored: code or e2m1 value
// times 2^(scale byte - 127).
double BaseWeight(const std::byte* codes, const std::byte* scales, size_t columns, size_t n,
                  size_t k);
double NibbleWeight(const std::byte* nibbles, const std::byte* scales, size_t columns, size_t n,
                    size_t k);
double QuintalWeight(const std::byte* codes, const std::byte* quintals, const std::byte* scales,
                     size_t columns, size_t n, size_t k);

}  // namespace hotplane
