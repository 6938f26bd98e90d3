// What the kernels know of an expert: where its weights are, and what it is computed from.
#pragma once

#include "moe/cuda/moe_args.h"

namespace hotplane::moe_cuda {

inline constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// The sum of `value` over this lane and those before it.
__device__ __forceinline__ uint32_t SumUpTo(uint32_t value, uint32_t lane) {
#pragma unroll
  for (uint32_t by = 1; by < 32; by *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, value, by);
    if (lane >= by) value += other;
  }
  return value;
}

// One of the two matrices of an expert.
struct Matrix {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* fine;  // nibbles or quintals
  const float* bias;    // null: none
  uint32_t tier;
};

enum Tier : uint32_t { kTierMissing = 0, kTierBase = 1, kTierNibbles = 2, kTierQuintals = 3 };
// Of code for any tier, which asks each time; no matrix has it.
inline constexpr uint32_t kTierAny = 4;

__device__ __forceinline__ uint32_t TierOf(const ExpertSlot& slot, uint32_t wanted, bool biases,
                                           uint32_t tiers) {
  if (wanted < kWantBase || wanted > kWantFp4OrBase) return kTierMissing;
  if (biases && (slot.bias13 == nullptr || slot.bias2 == nullptr)) return kTierMissing;
  if (slot.sc13 == nullptr || slot.sc2 == nullptr) return kTierMissing;
  const bool planes = slot.planes13 != nullptr && slot.planes2 != nullptr;
  const bool base = planes && (tiers & kFromBase) != 0;
  const bool fp4 = slot.fp13 != nullptr && slot.fp2 != nullptr &&
                   (slot.fp_quintals == 0 ? (tiers & kFromNibbles) != 0
                                          : planes && (tiers & kFromQuintals) != 0);
  if (wanted != kWantBase && fp4) return slot.fp_quintals != 0 ? kTierQuintals : kTierNibbles;
  if (wanted != kWantFp4 && base) return kTierBase;
  return kTierMissing;
}

__device__ __forceinline__ void Refuse(Refusal* refusal, RefusalKind kind, uint32_t expert) {
  if (atomicCAS(&refusal->kind, 0u, static_cast<uint32_t>(kind)) == 0) refusal->expert = expert;
}

// Both matrices of an expert; what they are computed from is the same.
struct Matrices {
  Matrix gate_up, down;
};
__device__ __forceinline__ Matrices MatricesOf(const MoeArgs& args, uint32_t expert) {
  const ExpertSlot slot = args.slots[expert];
  const uint32_t wanted = args.wanted != nullptr ? args.wanted[expert] : args.wanted_of_all;
  const bool biases = args.biases != 0;
  const uint32_t tier = TierOf(slot, wanted, biases, args.tiers);
  if (tier == kTierMissing) Refuse(args.refusal, kRefusedExpert, expert);
  return {{slot.planes13, slot.sc13, slot.fp13, biases ? slot.bias13 : nullptr, tier},
          {slot.planes2, slot.sc2, slot.fp2, biases ? slot.bias2 : nullptr, tier}};
}
__device__ __forceinline__ Matrix MatrixOf(const MoeArgs& args, uint32_t expert, bool gate_up) {
  const Matrices matrices = MatricesOf(args, expert);
  return gate_up ? matrices.gate_up : matrices.down;
}

}  // namespace hotplane::moe_cuda
