// src/moe/cuda/barrier_sm90.h as functions of the host.
#pragma once

#include "moe/cuda/ptx.h"

namespace hotplane::ptx {

struct BarrierOnHost {
  uint16_t count, missing;
  uint32_t times;  // that all have come
};
static_assert(sizeof(BarrierOnHost) == sizeof(uint64_t));
inline BarrierOnHost BarrierAt(const uint64_t* barrier) {
  const auto at = std::bit_cast<BarrierOnHost>(*barrier);
  if (at.count == 0) on_host::Die("a barrier that is none");
  return at;
}

inline void InitBarrier(uint64_t* barrier, uint32_t count) {
  *barrier = std::bit_cast<uint64_t>(
      BarrierOnHost{static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0});
}
inline void EndBarrier(uint64_t* barrier) {
  if (BarrierAt(barrier).missing != BarrierAt(barrier).count)
    on_host::Die("a barrier ends that is waited for");
  *barrier = 0;
}
inline void ArriveAt(uint64_t* barrier) {
  BarrierOnHost at = BarrierAt(barrier);
  if (--at.missing == 0) {
    at.missing = at.count;
    ++at.times;
  }
  *barrier = std::bit_cast<uint64_t>(at);
}
inline void WaitFor(const uint64_t* barrier, uint32_t parity) {
  while (BarrierAt(barrier).times % 2 == parity) on_host::WaitForOtherWarps();
}

}  // namespace hotplane::ptx
