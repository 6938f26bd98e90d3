// Checksums: XXH3 from libxxhash, inlined once per instruction set because the packaged archive is
// baseline x86-64. All variants give the same digest.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace hotplane {

// XXH3-64, seed 0: chunk, header and table checksums.
uint64_t Checksum64(std::span<const std::byte> bytes);

// XXH3-128, seed 0, canonical (big-endian) byte order: identities, fingerprints, digests of
// sources. It guards against accidents, not against a forger.
using Digest128 = std::array<uint8_t, 16>;
Digest128 Digest(std::span<const std::byte> bytes);
Digest128 Digest(std::string_view text);
std::string ToHex(const Digest128& digest);  // 32 lower-case digits
Result<Digest128> ParseDigest(std::string_view hex);

// Incremental XXH3-128. Move-only.
class DigestStream {
 public:
  DigestStream();
  ~DigestStream();
  DigestStream(DigestStream&&) noexcept;
  DigestStream& operator=(DigestStream&&) noexcept;
  void Update(std::span<const std::byte> bytes);
  Digest128 Finish() const;

 private:
  void* state_;
};

// Copies `bytes` from source to destination and returns the Checksum64 of exactly the bytes that
// were stored: each 4 KiB passes once through a buffer in the L1 cache, is hashed there and stored
// from there with non-temporal stores. destination is 64-byte aligned or the plain path is taken.
uint64_t CopyWithChecksum64(std::byte* destination, const std::byte* source, size_t bytes);

// The instruction set in use: "avx512", "avx2", "sse2". HOTPLANE_ISA forces, as for the quantizer.
const char* ChecksumIsaName();
// Forces a variant by name; kUsage when unknown or not runnable here. For tests and HOTPLANE_ISA;
// call it before threads start. "scalar" stands for the baseline ("sse2") variant.
Result<void> ForceChecksumIsa(std::string_view name);

}  // namespace hotplane
