// How fast this machine brings a store's files to where boots take them from, measured on the files
// themselves: they are in the page cache afterwards as far as they were before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/cancel.h"
#include "base/status.h"
#include "io/env.h"

namespace hotplane {

struct CopyRate {
  size_t threads = 0;
  double bytes_per_second = 0;
};
// Of 1, 2, 4, ... threads, and of `threads_max`: copies `pages` piece by piece to touched memory of
// at most 128 MiB, as boots onto a device copy the page cache. Best of a few passes. kSystem naming
// `path` when mapped pages go away meanwhile; kInterrupted.
Result<std::vector<CopyRate>> MeasureCopyRates(std::span<const std::byte> pages, size_t threads_max,
                                               const std::string& path, const CancelToken* cancel);

// A part of a file.
struct FilePart {
  std::string path;
  uint64_t offset = 0;  // a multiple of 4 KiB
  uint64_t bytes = 0;
};

struct DiskRates {
  double direct = 0;    // bytes per second past the page cache; 0: the file system refuses
  double buffered = 0;  // through it; 0: these files do not leave memory
};
// Reads at most 1 GiB of the parts, for a second or so each way, with as many requests in flight as
// boots have. kSystem with the file; kInterrupted.
Result<DiskRates> MeasureDiskRates(Env& env, std::span<const FilePart> parts,
                                   const CancelToken* cancel);

}  // namespace hotplane
