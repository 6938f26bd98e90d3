// Owned page-aligned memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"

namespace hotplane {

// Anonymous memory from mmap, zero-filled, aligned to 2 MiB and advised to huge pages. Move-only.
class HugeBuffer {
 public:
  HugeBuffer() = default;
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& other) noexcept { *this = std::move(other); }
  HugeBuffer& operator=(HugeBuffer&& other) noexcept;

  // kCapacity when the address space or memory is refused. `bytes` may be 0.
  static Result<HugeBuffer> Allocate(size_t bytes);

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }
  std::span<std::byte> span() const { return {data_, bytes_}; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
};

// Gives every page that the range touches memory before somebody waits for it, without changing
// what is in it: safe beside those who read or write there. Advice only (MADV_POPULATE_WRITE).
void PopulatePages(std::span<std::byte> range);

// Gives every page of the range memory, in whole calls where the kernel can (MADV_POPULATE_WRITE).
// Overwrites one byte per page where it cannot. REQUIRES page-aligned begin.
void TouchPages(std::span<std::byte> range);

}  // namespace hotplane
