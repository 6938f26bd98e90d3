// Reads in flight: many requests to the disk at once, answered in any order. What Env::NewReader
// hands out: io_uring where the system allows it, else a few threads that call ReadSome.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "io/env.h"

namespace hotplane {

struct ReadRequest {
  File* file = nullptr;  // of the reader's Env; outlives the request
  uint64_t offset = 0;
  std::span<std::byte> destination;  // not touched by anybody else until the request has ended
  uint64_t tag = 0;                  // the caller's, handed back
};

// One attempt that has ended, by the rules of IoCount: short counts, EINTR and EAGAIN included.
struct ReadEnd {
  uint64_t tag = 0;
  IoCount count{0, 0};
};

// Used by one thread at a time. Its destruction returns after the last request has ended, so that
// no destination is written to afterwards; requests that had not begun are dropped.
class AsyncReader {
 public:
  virtual ~AsyncReader() = default;

  virtual const char* name() const = 0;    // "io_uring", "pread threads"
  virtual std::string reason() const = 0;  // why not io_uring; empty for io_uring
  virtual size_t depth() const = 0;        // requests that may be in flight

  // REQUIRES fewer than depth() in flight. May wait for the next Collect before it begins.
  virtual void Start(const ReadRequest& request) = 0;
  // Waits until a request has ended, at most `wait`, and appends all that have. None: the time is
  // over, or a signal came. kSystem when the reader itself is broken.
  virtual Result<void> Collect(std::chrono::milliseconds wait, std::vector<ReadEnd>* ended) = 0;
};

// On threads, over any Env's files. `reason`: why not io_uring.
std::unique_ptr<AsyncReader> NewPreadReader(const ReaderOptions& options, std::string reason);

// Over files that have a descriptor. kSystem with the kernel's errno where io_uring is refused
// (seccomp, sysctl, memlock, an old kernel), or not in this build.
Result<std::unique_ptr<AsyncReader>> NewUringReader(const ReaderOptions& options);

}  // namespace hotplane
