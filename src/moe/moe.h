// The operator of a MoE layer on the host, straight from the stored planes:
//
//   y[t] = sum over slots s of weights[t,s] * (w2[e] act(w13[e] x[t] + bias13[e]) + bias2[e])
//   with e = ids[t,s]; w13 [2I,H] is gate (rows 0..I-1) over up, w2 [H,I] is down.
//
// Each expert is computed at the base tier (2-bit codes) or at FP4 (whole nibbles, or base codes
// and quintals), as the call says; both with the same e8m0 block scales. No unpacked copy of the
// weights is ever made: a strip of 16 rows is decoded as it is multiplied; quintals are merged with
// their codes two strips at a time, in the second-level cache.
//
// Three arithmetics:
//   kExact  activations stay float32, sums are fused multiply-adds, scales are powers of two. Per
//           output of a matrix product: |error| <= gamma(17 + K/32) * sum|w||x|, gamma(n) =
//           n*2^-24/(1-n*2^-24); reference.cc derives it.
//   kFast   activations become int8 with one float32 scale per token and 32 consecutive k, once per
//           layer (x) and once per expert (act): an error of up to scale/2 = amax/254 per
//           activation. Integer sums inside a block are exact.
//   kFp8    activations become FP8 as fp8.h says, x and act; the rest is kExact's. What models give
//           that are served with FP8 activations of such scales.
// Overflow of float32 gives infinity, as in any float32 arithmetic.
//
// Results depend on the token, its experts and the arithmetic alone: they are the same to the bit
// for every number of threads, every run, every instruction set, and whatever other tokens are in
// the call. FP4 is the same to the bit from nibbles and from quintals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "base/status.h"
#include "base/worker_pool.h"
#include "format/kinds.h"
#include "format/manifest.h"
#include "moe/kernels.h"

namespace hotplane {

// kBf16 and kBf16Fp8 are the arithmetics of GPUs (moe/cuda/cuda_moe.h): MoeForward does not have
// them.
enum class Arithmetic : uint8_t {
  kInvalid = 0,
  kFast = 1,
  kExact = 2,
  kFp8 = 3,
  kBf16 = 4,
  kBf16Fp8 = 5
};

// Where one expert's parts are: each a plane of the whole matrix (docs/format/planes.md), 64-byte
// aligned or not. What its precision does not need may be null.
struct ExpertWeights {
  Precision precision = Precision::kInvalid;
  Encoding fp_encoding = Encoding::kInvalid;  // of fp13 and fp2: kDeltaNibble or kDeltaQuintal
  const std::byte* planes13 = nullptr;        // needed but by FP4 from nibbles
  const std::byte* sc13 = nullptr;
  const std::byte* planes2 = nullptr;
  const std::byte* sc2 = nullptr;
  const std::byte* fp13 = nullptr;  // FP4 only
  const std::byte* fp2 = nullptr;
  const std::byte* bias13 = nullptr;  // float32 [2I], of layers with biases
  const std::byte* bias2 = nullptr;   // float32 [H]
};

// One call. Arrays are row-major and contiguous; y may not overlap x.
struct MoeCall {
  uint32_t layer = 0;      // for messages
  LayerGeometry geometry;  // E, H, I, biases
  Activation activation;
  Arithmetic arithmetic = Arithmetic::kInvalid;
  size_t token_count = 0;                  // T; 0: nothing is done
  size_t top_k = 0;                        // k; an expert may come twice in a row of ids
  const float* x = nullptr;                // [T, H], finite
  const int32_t* ids = nullptr;            // [T, k], each in [0, E)
  const float* weights = nullptr;          // [T, k], finite
  float* y = nullptr;                      // [T, H]
  std::span<const ExpertWeights> experts;  // [E]; those that no token chose may be empty
  // The weights are mapped files: one that is cut short is kData, not a SIGBUS, where
  // FaultGuardInstalled().
  bool mapped = false;
};

// What the arrays say, before any weight is looked at: kUsage for a null pointer, an id out of
// range, an activation or a weight that is not finite, naming token and place.
Result<void> CheckMoeCall(const MoeCall& call);

// The operator. REQUIRES CheckMoeCall. Memory: T*k*(I+H) floats. kData naming the expert when a
// part that its precision needs is missing, or when its quintals do not belong to its codes.
Result<void> MoeForward(const MoeCall& call, const MoeKernels& kernels, WorkerPool& pool);

}  // namespace hotplane
