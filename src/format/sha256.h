// SHA-256 (FIPS 180-4), for digests that other programs write beside their files. What hotplane
// itself writes has the faster checksums of checksum.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace hotplane {

class Sha256 {
 public:
  void Update(std::span<const std::byte> bytes);
  // 64 lower-case hexadecimal digits. Once, after the last Update.
  std::string FinishHex();

 private:
  static constexpr size_t kBlockBytes = 64;
  void Compress(const std::byte* block);

  // The fractional parts of the square roots of the first eight primes.
  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, kBlockBytes> rest_{};  // not compressed yet
  uint64_t bytes_ = 0;
};

std::string Sha256Hex(std::span<const std::byte> bytes);

}  // namespace hotplane
