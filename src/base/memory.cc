#include "base/memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "base/format_text.h"
#include "base/units.h"

namespace hotplane {
HugeBuffer::~HugeBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

HugeBuffer& HugeBuffer::operator=(HugeBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  return *this;
}

Result<HugeBuffer> HugeBuffer::Allocate(size_t bytes) {
  HugeBuffer buffer;
  if (bytes == 0) return buffer;
  const size_t mapping_bytes = RoundUp(bytes, kHugePageBytes) + kHugePageBytes;
  void* mapping = mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED)
    return Fail(Status::FromErrno(errno, Text("cannot allocate {}", FormatBytes(bytes))));
  buffer.mapping_ = mapping;
  buffer.mapping_bytes_ = mapping_bytes;
  buffer.data_ =
      reinterpret_cast<std::byte*>(RoundUp(reinterpret_cast<uintptr_t>(mapping), kHugePageBytes));
  buffer.bytes_ = bytes;
  // Advice only: without transparent huge pages the buffer is slower, not wrong.
  (void)madvise(buffer.data_, RoundUp(bytes, kHugePageBytes), MADV_HUGEPAGE);
  return buffer;
}

namespace {

bool PopulateWrite(std::byte* page, size_t bytes) {
  // Linux 5.14; the C library's headers may be older than the kernel.
  constexpr int kMadvPopulateWrite = 23;
  return madvise(page, bytes, kMadvPopulateWrite) == 0;
}

}  // namespace

void PopulatePages(std::span<std::byte> range) {
  if (range.empty()) return;
  const size_t lead = reinterpret_cast<uintptr_t>(range.data()) % kPageBytes;
  (void)PopulateWrite(range.data() - lead, lead + range.size());
}

void TouchPages(std::span<std::byte> range) {
  if (range.empty() || PopulateWrite(range.data(), range.size())) return;
  for (size_t byte = 0; byte < range.size(); byte += kPageBytes) {
    volatile std::byte* const page = range.data() + byte;
    *page = std::byte{0};
  }
}

}  // namespace hotplane
