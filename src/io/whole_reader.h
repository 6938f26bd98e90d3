// Whole reads over an AsyncReader: what a request leaves undone is asked for again, so that each
// one ends with all its bytes or with the reason why not.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "io/env.h"
#include "io/reader.h"

namespace hotplane {

// What a disk is asked for at a time. Smaller requests cost more of them per byte, larger ones are
// cut by the block layer anyway.
inline constexpr uint64_t kReadRequestBytes = 1024 * 1024;

struct WholeRead {
  File* file = nullptr;    // REQUIRED: opened with kRead, of the reader's Env
  File* direct = nullptr;  // the same with kReadDirect; null: through the page cache
  uint64_t offset = 0;
  // Read directly only where its address, its size and the offset are multiples of 4 KiB. Not
  // touched by anybody else until the read has ended.
  std::span<std::byte> destination;
  // So much of it must come; what is rounded up beyond may lie behind the end of the file.
  size_t needed_bytes = 0;
  uint64_t tag = 0;  // the caller's, handed back
};

struct WholeReadEnd {
  uint64_t tag = 0;
  uint64_t bytes = 0;  // that came
  // kSystem with the errno, kData where the file ends early; both with file and offset.
  Result<void> result;
};

// Used by one thread at a time. Its destruction returns after the last request has ended.
class WholeReader {
 public:
  explicit WholeReader(std::unique_ptr<AsyncReader> reader);

  const AsyncReader& reader() const { return *reader_; }
  size_t in_flight() const { return running_.size() - free_.size(); }
  bool full() const { return free_.empty(); }

  // REQUIRES !full().
  void Start(const WholeRead& read);
  // As AsyncReader::Collect, of whole reads: none within `wait` says little.
  Result<void> Collect(std::chrono::milliseconds wait, std::vector<WholeReadEnd>* ended);

 private:
  struct Running {
    WholeRead read;
    size_t done_bytes = 0;
    int retries = 0;
  };
  void StartRest(uint64_t slot);
  // None: the rest is on its way again.
  bool Ended(uint64_t slot, IoCount count, Result<void>* result);

  const std::unique_ptr<AsyncReader> reader_;
  std::vector<Running> running_;  // by the reader's tag
  std::vector<uint64_t> free_;    // of them
  std::vector<ReadEnd> ends_;     // of one Collect
};

}  // namespace hotplane
