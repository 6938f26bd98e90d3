// SHA-256 (FIPS 180-4), for digests that other programs write beside their files. What hotplane
// itself writes has the faster checksums of checksum.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace hotplane {

inline constexpr size_t kSha256BlockBytes = 64;

// One instruction set's way; all give the same digest.
struct Sha256Variant {
  const char* name;  // "sha", "scalar"
  // Takes `count` blocks of kSha256BlockBytes into the eight words of the state.
  void (*compress)(uint32_t* state, const std::byte* blocks, size_t count);
};
// Those that this CPU can run, best first; the scalar one is always there.
std::span<const Sha256Variant> Sha256Variants();

class Sha256 {
 public:
  explicit Sha256(const Sha256Variant& variant = Sha256Variants().front()) : variant_(variant) {}

  void Update(std::span<const std::byte> bytes);
  // 64 lower-case hexadecimal digits. Once, after the last Update.
  std::string FinishHex();

 private:
  const Sha256Variant& variant_;
  // The fractional parts of the square roots of the first eight primes.
  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, kSha256BlockBytes> rest_{};  // not compressed yet
  uint64_t bytes_ = 0;
};

std::string Sha256Hex(std::span<const std::byte> bytes);

}  // namespace hotplane
