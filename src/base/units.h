// Byte counts, rates and durations as people write and read them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace hotplane {

inline constexpr uint64_t kKiB = 1024;
inline constexpr uint64_t kMiB = 1024 * kKiB;
inline constexpr uint64_t kGiB = 1024 * kMiB;

inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint64_t kHugePageBytes = 2 * kMiB;  // transparent ones, of memory and of files

// x rounded up to a multiple of `step`; step > 0, no overflow expected.
constexpr uint64_t RoundUp(uint64_t x, uint64_t step) { return (x + step - 1) / step * step; }

// "1.50 GiB", "12.0 MiB", "512 B".
std::string FormatBytes(uint64_t bytes);
// Decimal: "12.3 GB/s"; "-" when seconds is 0.
std::string FormatRate(uint64_t bytes, double seconds);
// "0.012 s", "1.23 s", "2 min 05 s".
std::string FormatSeconds(double seconds);

// "512M", "2G", "1.5GiB", "4096"; suffixes are binary. kUsage otherwise.
Result<uint64_t> ParseSize(std::string_view text);

}  // namespace hotplane
