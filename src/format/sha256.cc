#include "format/sha256.h"

#include <cpuid.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "format/sha256_isa.h"

namespace hotplane {

const uint32_t kSha256RoundConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

namespace {

uint32_t ReadBigEndian(const std::byte* at) {
  uint32_t word;
  std::memcpy(&word, at, sizeof word);
  return __builtin_bswap32(word);
}

void CompressScalar(uint32_t* state, const std::byte* blocks, size_t count) {
  for (; count > 0; --count, blocks += kSha256BlockBytes) {
    std::array<uint32_t, 64> w;
    for (size_t i = 0; i < 16; ++i) w[i] = ReadBigEndian(blocks + 4 * i);
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t choice = (e & f) ^ (~e & g);
      const uint32_t first = h + sum1 + choice + kSha256RoundConstants[i] + w[i];
      const uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
      h = g;
      g = f;
      f = e;
      e = d + first;
      d = c;
      c = b;
      b = a;
      a = first + sum0 + majority;
    }
    const std::array<uint32_t, 8> worked = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state[i] += worked[i];
  }
}

// SHA is a bit that the compilers' own names of CPU features lack; what it needs beside, AVX2
// brings, without which nothing of ours runs.
bool HasSha() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kLeaf = 7, kShaBit = 1u << 29;
  return __get_cpuid_count(kLeaf, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & kShaBit) != 0 &&
         __builtin_cpu_supports("avx2");
}

constexpr std::array kVariants = {Sha256Variant{"sha", Sha256CompressSha},
                                  Sha256Variant{"scalar", CompressScalar}};

}  // namespace

std::span<const Sha256Variant> Sha256Variants() {
  static const bool has_sha = HasSha();
  return std::span(kVariants).subspan(has_sha ? 0 : 1);
}

void Sha256::Update(std::span<const std::byte> bytes) {
  const size_t begun = bytes_ % kSha256BlockBytes;
  bytes_ += bytes.size();
  if (begun > 0) {
    const size_t taken = std::min(bytes.size(), kSha256BlockBytes - begun);
    std::copy_n(bytes.begin(), taken, rest_.begin() + begun);
    if (begun + taken < kSha256BlockBytes) return;
    variant_.compress(state_.data(), rest_.data(), 1);
    bytes = bytes.subspan(taken);
  }
  const size_t count = bytes.size() / kSha256BlockBytes;
  variant_.compress(state_.data(), bytes.data(), count);
  bytes = bytes.subspan(count * kSha256BlockBytes);
  std::copy(bytes.begin(), bytes.end(), rest_.begin());
}

std::string Sha256::FinishHex() {
  const uint64_t bits = bytes_ * 8;
  std::array<std::byte, kSha256BlockBytes> padding{std::byte{0x80}};
  const size_t begun = bytes_ % kSha256BlockBytes;
  Update(std::span(padding).first((begun < 56 ? 56 : 120) - begun));
  std::array<std::byte, 8> length;
  for (size_t i = 0; i < 8; ++i) length[i] = static_cast<std::byte>(bits >> (56 - 8 * i));
  Update(length);
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (const uint32_t word : state_)
    for (int shift = 28; shift >= 0; shift -= 4) hex += kDigits[word >> shift & 15];
  return hex;
}

std::string Sha256Hex(std::span<const std::byte> bytes) {
  Sha256 sha;
  sha.Update(bytes);
  return sha.FinishHex();
}

}  // namespace hotplane
