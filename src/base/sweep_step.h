// For tests that try every byte, bit or operation: the plain build tries all, a sanitized one, in
// which each try takes ten times as long and learns nothing of its own, some of them.
#pragma once

#include <cstdint>

#include "base/sanitizers.h"

namespace hotplane {

#if defined(__SANITIZE_THREAD__)
inline constexpr uint64_t kSweepStep = 61;  // prime, so that no pattern of the format is kept to
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr uint64_t kSweepStep = 11;
#else
inline constexpr uint64_t kSweepStep = 1;
#endif

}  // namespace hotplane
