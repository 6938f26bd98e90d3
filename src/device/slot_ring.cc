#include "device/slot_ring.h"

#include <algorithm>

#include "base/check.h"

namespace hotplane {
namespace {

size_t GranuleCount(uint64_t bytes) {
  return static_cast<size_t>((bytes + SlotRing::kGranuleBytes - 1) / SlotRing::kGranuleBytes);
}

}  // namespace

std::optional<size_t> SlotRing::FindRun(size_t begin, size_t end, size_t count) const {
  size_t run = 0;
  for (size_t i = begin; i < taken_.size(); ++i) {
    if (run == 0 && i >= end) break;
    run = taken_[i] ? 0 : run + 1;
    if (run == count) return i + 1 - count;
  }
  return std::nullopt;
}

std::optional<uint64_t> SlotRing::Take(uint64_t bytes) {
  const size_t count = std::max<size_t>(1, GranuleCount(bytes));
  if (count > taken_.size() - taken_count_) return std::nullopt;
  std::optional<size_t> first = FindRun(next_, taken_.size(), count);
  if (!first) first = FindRun(0, next_, count);
  if (!first) return std::nullopt;
  std::fill_n(taken_.begin() + static_cast<ptrdiff_t>(*first), count, true);
  next_ = *first + count;
  taken_count_ += count;
  taken_count_max_ = std::max(taken_count_max_, taken_count_);
  return *first * kGranuleBytes;
}

void SlotRing::Give(uint64_t offset, uint64_t bytes) {
  const size_t first = static_cast<size_t>(offset / kGranuleBytes);
  const size_t count = std::max<size_t>(1, GranuleCount(bytes));
  HP_CHECK(offset % kGranuleBytes == 0 && first + count <= taken_.size());
  for (size_t i = first; i < first + count; ++i) {
    HP_CHECK(taken_[i]);
    taken_[i] = false;
  }
  taken_count_ -= count;
}

}  // namespace hotplane
