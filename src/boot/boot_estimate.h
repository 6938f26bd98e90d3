// What a boot will take, from measured rates: which source it chooses, and what it waits for most.
#pragma once

#include <cstdint>
#include <string>

namespace hotplane {

// Whether `--cache auto` reads past the page cache: the files, and unless they go to a device the
// landed bytes beside them, would not fit in the memory that is available.
bool PassesByCache(uint64_t bytes, bool on_device, uint64_t available_bytes);

// Rates in bytes per second; 0: not measured.
struct BootFacts {
  uint64_t bytes = 0;         // that are landed
  uint64_t bytes_cached = 0;  // of them in the page cache
  bool on_device = false;
  uint64_t available_bytes = 0;  // of memory of the host
  double copy_rate = 0;          // of the page cache, by all threads
  double direct_rate = 0;        // of the disk
  double buffered_rate = 0;
  double link_rate = 0;      // of a device
  double verify_rate = 0;    // of a device
  double register_rate = 0;  // of the page cache with a device, and
  double release_rate = 0;
};

struct BootEstimate {
  double seconds = 0;  // 0: not known
  std::string source;  // "page cache", "disk, buffered", "disk, direct", "both"
  std::string limit;   // "the link", "copying the page cache", "the disk", "verifying"
  std::string why;     // of the source
};
BootEstimate EstimateBoot(const BootFacts& facts);

}  // namespace hotplane
