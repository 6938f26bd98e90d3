#include "format/checksum.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <new>
#include <utility>

#include "base/format_text.h"
#include "format/checksum_isa.h"

namespace hotplane {
namespace {

struct Variant {
  const ChecksumIsa* isa;
  bool runs_here;
};

// Best first.
std::array<Variant, 3> Variants() {
  return {Variant{&kChecksumAvx512, __builtin_cpu_supports("avx512f") != 0},
          Variant{&kChecksumAvx2, __builtin_cpu_supports("avx2") != 0},
          Variant{&kChecksumSse2, true}};
}

const ChecksumIsa* Best() {
  for (const Variant& variant : Variants()) {
    if (variant.runs_here) return variant.isa;
  }
  return &kChecksumSse2;
}

std::atomic<const ChecksumIsa*>& Current() {
  static std::atomic<const ChecksumIsa*> current = Best();
  return current;
}

const ChecksumIsa& Isa() { return *Current().load(std::memory_order_relaxed); }

int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

// What a DigestStream points to: the table is kept so that forcing another variant does not mix.
struct StreamState {
  const ChecksumIsa* isa;
  void* hash;
};

void DestroyStream(void* state) {
  auto* stream = static_cast<StreamState*>(state);
  if (stream == nullptr) return;
  stream->isa->stream_destroy(stream->hash);
  delete stream;
}

}  // namespace

uint64_t Checksum64(std::span<const std::byte> bytes) {
  return Isa().hash64(bytes.data(), bytes.size());
}

Digest128 Digest(std::span<const std::byte> bytes) {
  Digest128 digest;
  Isa().hash128(bytes.data(), bytes.size(), digest.data());
  return digest;
}

Digest128 Digest(std::string_view text) {
  Digest128 digest;
  Isa().hash128(text.data(), text.size(), digest.data());
  return digest;
}

std::string ToHex(const Digest128& digest) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (uint8_t byte : digest) {
    hex += kDigits[byte >> 4];
    hex += kDigits[byte & 15];
  }
  return hex;
}

Result<Digest128> ParseDigest(std::string_view hex) {
  Digest128 digest;
  bool valid = hex.size() == 2 * digest.size();
  for (size_t i = 0; valid && i < digest.size(); ++i) {
    const int high = HexValue(hex[2 * i]);
    const int low = HexValue(hex[2 * i + 1]);
    valid = high >= 0 && low >= 0;
    if (valid) digest[i] = static_cast<uint8_t>(high * 16 + low);
  }
  if (!valid) {
    return Fail(Status::Data("a digest is malformed")
                    .Expected("32 lower-case hexadecimal digits")
                    .Found(Text("\"{}\"", hex.substr(0, 64))));
  }
  return digest;
}

DigestStream::DigestStream() {
  const ChecksumIsa& isa = Isa();
  void* hash = isa.stream_create();
  if (hash == nullptr) throw std::bad_alloc();
  state_ = new StreamState{&isa, hash};
}

DigestStream::~DigestStream() { DestroyStream(state_); }

DigestStream::DigestStream(DigestStream&& other) noexcept
    : state_(std::exchange(other.state_, nullptr)) {}

DigestStream& DigestStream::operator=(DigestStream&& other) noexcept {
  if (this != &other) {
    DestroyStream(state_);
    state_ = std::exchange(other.state_, nullptr);
  }
  return *this;
}

void DigestStream::Update(std::span<const std::byte> bytes) {
  auto* stream = static_cast<StreamState*>(state_);
  stream->isa->stream_update(stream->hash, bytes.data(), bytes.size());
}

Digest128 DigestStream::Finish() const {
  const auto* stream = static_cast<const StreamState*>(state_);
  Digest128 digest;
  stream->isa->stream_finish(stream->hash, digest.data());
  return digest;
}

uint64_t CopyWithChecksum64(std::byte* destination, const std::byte* source, size_t bytes) {
  return Isa().copy_hash64(destination, source, bytes);
}

const char* ChecksumIsaName() { return Isa().name; }

Result<void> ForceChecksumIsa(std::string_view name) {
  const std::string_view wanted = name == "scalar" ? std::string_view("sse2") : name;
  std::string available;
  for (const Variant& variant : Variants()) {
    if (!variant.runs_here) continue;
    if (variant.isa->name == wanted) {
      Current().store(variant.isa, std::memory_order_relaxed);
      return {};
    }
    available += available.empty() ? "" : ", ";
    available += variant.isa->name;
  }
  return Fail(Status::Usage("this instruction set is unknown or cannot run on this CPU")
                  .Expected(Text("one of {}, or scalar for sse2", available))
                  .Found(Text("\"{}\"", name)));
}

}  // namespace hotplane
