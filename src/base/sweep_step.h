// For tests that try every byte, bit or operation: the plain build tries all, a sanitized one, in
// which each try takes ten times as long and learns nothing of its own, some of them.
#pragma once

#include <cstdint>

namespace hotplane {

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#elif __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
inline constexpr uint64_t kSweepStep = 61;  // prime, so that no pattern of the format is kept to
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr uint64_t kSweepStep = 11;
#else
inline constexpr uint64_t kSweepStep = 1;
#endif

}  // namespace hotplane
