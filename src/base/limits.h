// What this machine's memory can do, measured, so that every rate can be printed beside its limit.
#pragma once

#include <cstddef>
#include <span>

#include "base/status.h"
#include "base/worker_pool.h"

namespace hotplane {

// Bytes per second at which the pool's workers together read `bytes` (plain vector sums, best of a
// few passes).
double MeasureReadRate(WorkerPool& pool, std::span<const std::byte> bytes);

// Bytes per second at which the pool's workers together memcpy `bytes` into touched memory: per
// worker a window of 24 MiB that is written again and again. Where the caches are larger than all
// windows the figure is too high, never too low. kCapacity when the windows cannot be had.
Result<double> MeasureCopyRate(WorkerPool& pool, std::span<const std::byte> bytes);

// For benchmarks. A virtual machine may have given its free memory back to the host, and getting it
// again costs more than reading a disk: 0.5 to 2 GB/s were seen. After this, `bytes` of the free
// memory (less, where there is less) are the machine's again, for a few seconds at least.
Result<void> BackFreeMemory(uint64_t bytes);

}  // namespace hotplane
