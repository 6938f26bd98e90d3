// What the verify kernel is launched with; one source for kernel and host.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotplane {

// As LandedCheck, which the kernel reads in pinned host memory.
struct VerifyCheck {
  uint64_t offset;
  uint64_t checksum;
  uint64_t bytes;
};
static_assert(sizeof(VerifyCheck) == 24);

// Written by the kernel in pinned host memory, and only where something does not match: `bad` once
// per launch, the other two per check.
struct VerifyOutcome {
  uint32_t* bad;    // 1: some check does not hold
  uint8_t* bad_at;  // by check
  uint64_t* found;  // by check
};

inline constexpr unsigned kVerifyThreads = 256;
inline constexpr char kVerifyKernelName[] = "hotplane_verify";

}  // namespace hotplane
