// What is done to sums: the activation between the two products, the weighted sum of a token's
// slots.
#pragma once

#include <cuda_bf16.h>

#include "format/kinds.h"
#include "moe/cuda/expert_matrix.h"

namespace hotplane::moe_cuda {

__device__ __forceinline__ float Act(const MoeArgs& args, float gate, float up) {
  const auto kind = static_cast<ActivationKind>(args.activation);
  if (kind != ActivationKind::kSiluGated) {
    // Not fminf and fmaxf, which make numbers of NaN.
    gate = gate > args.limit ? args.limit : gate;
    up = up > args.limit ? args.limit : up < -args.limit ? -args.limit : up;
  }
  if (kind == ActivationKind::kSwigluOai)
    return gate / (1.0f + expf(-args.alpha * gate)) * (up + 1.0f);
  return gate / (1.0f + expf(-gate)) * up;
}

__device__ __forceinline__ uint16_t ToBf16(float value) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

// In place of what was refused: it must not look like a result.
__device__ __forceinline__ float NotComputed() { return __uint_as_float(0x7FC00000u); }

// Four columns of a token at a time, slots in order.
__device__ __forceinline__ void Combine(const MoeArgs& args) {
  const uint32_t quads = args.hidden / 4;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < quads * args.tokens;
       i += gridDim.x * blockDim.x) {
    const uint32_t token = i / quads;
    const uint32_t column = (i - token * quads) * 4;
    float4 sum = {0, 0, 0, 0};
    for (uint32_t slot = 0; slot < args.top_k; ++slot) {
      const uint32_t assignment = token * args.top_k + slot;
      float weight = args.weights[assignment];
      float4 of = {0, 0, 0, 0};
      if (static_cast<uint32_t>(args.ids[assignment]) < args.experts) {
        of = __ldcg(reinterpret_cast<const float4*>(args.results +
                                                    uint64_t{assignment} * args.hidden + column));
      } else {
        weight = NotComputed();
        Refuse(args.refusal, kRefusedId, assignment);
      }
      sum = {fmaf(weight, of.x, sum.x), fmaf(weight, of.y, sum.y), fmaf(weight, of.z, sum.z),
             fmaf(weight, of.w, sum.w)};
    }
    const ushort4 rounded = {ToBf16(sum.x), ToBf16(sum.y), ToBf16(sum.z), ToBf16(sum.w)};
    *reinterpret_cast<ushort4*>(args.y + uint64_t{token} * args.hidden + column) = rounded;
  }
}

}  // namespace hotplane::moe_cuda
