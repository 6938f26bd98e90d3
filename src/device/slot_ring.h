// Which granules of a ring of memory are taken. Bookkeeping only: the memory is somebody else's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace hotplane {

// Not thread-safe.
class SlotRing {
 public:
  // A piece takes whole granules. Small enough that little is left over of a piece.
  static constexpr uint64_t kGranuleBytes = 1024 * 1024;

  explicit SlotRing(uint64_t bytes) : taken_(bytes / kGranuleBytes) {}

  // Offset of `bytes` free bytes in a row, taken; none while there are none. The search goes on
  // where the last one ended, so that pieces come back in about the order in which they went.
  std::optional<uint64_t> Take(uint64_t bytes);
  // REQUIRES an offset that was taken, and the bytes it was taken with.
  void Give(uint64_t offset, uint64_t bytes);

  uint64_t bytes() const { return taken_.size() * kGranuleBytes; }
  uint64_t taken_bytes() const { return taken_count_ * kGranuleBytes; }
  uint64_t taken_bytes_max() const { return taken_count_max_ * kGranuleBytes; }

 private:
  // The first granule of a free run of `count` that begins in [begin, end).
  std::optional<size_t> FindRun(size_t begin, size_t end, size_t count) const;

  std::vector<bool> taken_;
  size_t next_ = 0;
  size_t taken_count_ = 0;
  size_t taken_count_max_ = 0;
};

}  // namespace hotplane
