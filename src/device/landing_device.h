// Where landed bytes go: how whoever reads files reaches memory that the host may not write to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace hotplane {

// No staged piece is longer: usually LandingDevice::piece_bytes, more where only then it ends on a
// page.
inline constexpr uint64_t kStagedBytesMax = 16 * 1024 * 1024;

// A run of landed bytes and the XXH3-64 (seed 0) that it must have.
struct LandedCheck {
  uint64_t offset = 0;  // from the destination that is given beside it
  uint64_t checksum = 0;
  uint32_t bytes = 0;
};
struct LandedMismatch {
  size_t check = 0;  // index
  uint64_t found = 0;
};

// Called from several threads at once.
class LandingDevice {
 public:
  virtual ~LandingDevice() = default;
  // Host memory to put `bytes` (at most kStagedBytesMax) for `destination` together in, aligned to
  // 64 bytes, to 4 KiB where the destination is; null while none is free (the caller asks again).
  // Every staged piece is landed, except after a failure.
  virtual std::byte* Stage(std::byte* destination, uint64_t bytes) = 0;
  // Brings staged bytes to their destination. May return before they are there. They are verified,
  // unless the device `verifies`.
  virtual Result<void> Land(std::byte* staged, std::byte* destination, uint64_t bytes) = 0;
  // Returns when everything landed before this call is at its destination.
  virtual Result<void> Wait() = 0;

  // How many bytes LandMapped takes best; 0: it takes none.
  virtual uint64_t mapped_window_bytes() const { return 0; }
  // How many threads should call it.
  virtual size_t mapped_worker_count() const { return 0; }
  // Brings bytes of a populated read-only mapping to their destination without staging them. May
  // return before they are there; the mapping outlives the device. REQUIRES
  // verifies(), as nobody has looked at the bytes. False: not these, stage them.
  virtual Result<bool> LandMapped(std::span<const std::byte> source, std::byte* destination) {
    (void)source;
    (void)destination;
    return false;
  }

  // About how many bytes to land at a time.
  virtual uint64_t piece_bytes() const { return 4 * 1024 * 1024; }
  // True: landed bytes are hashed on the device, by Settle, and nobody needs to before.
  virtual bool verifies() const { return false; }
  // Waits as Wait does, then compares: the checks that do not hold, in order. By one thread at a
  // time. REQUIRES verifies(), or no checks.
  virtual Result<std::vector<LandedMismatch>> Settle(const std::byte* destination,
                                                     std::span<const LandedCheck> checks) {
    (void)destination;
    (void)checks;
    HP_TRY(Wait());
    return std::vector<LandedMismatch>();
  }
};

}  // namespace hotplane
