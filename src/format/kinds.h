// The kinds that the store, the manifest and the kernels agree on. The numbers are on disk: never
// reuse one.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace hotplane {

enum class Tier : uint32_t { kInvalid = 0, kBase = 1, kDelta = 2 };

// How a tier's bytes are written; one layer file per layer and encoding.
enum class Encoding : uint32_t { kInvalid = 0, kBase = 1, kDeltaQuintal = 2, kDeltaNibble = 3 };
inline constexpr std::array kEncodings = {Encoding::kBase, Encoding::kDeltaQuintal,
                                          Encoding::kDeltaNibble};

constexpr Tier TierOf(Encoding encoding) {
  return encoding == Encoding::kBase ? Tier::kBase : Tier::kDelta;
}
std::string_view TierName(Tier tier);  // "base", "delta"
std::string_view EncodingName(
    Encoding encoding);  // "base", "delta-quintal", "delta-nibble": file suffixes

// The three matrices of a SwiGLU expert: gate [I,H] (w1), up [I,H] (w3), down [H,I] (w2).
enum class Projection : uint8_t { kGate = 0, kUp = 1, kDown = 2 };
inline constexpr size_t kProjectionCount = 3;
std::string_view ProjectionName(Projection projection);  // "gate", "up", "down"

// What the source weights are.
enum class SourceFormat : uint8_t {
  kInvalid = 0,
  kMxfp4,  // e2m1 nibbles, low nibble = even k, with e8m0 scales per 32 k, both row-major; kept
           // verbatim
  kBf16,   // row-major elements; requantized
  kF16,
  kF32,
  kNvfp4,   // e2m1 nibbles with e4m3 scales per 16 k and one float32 per matrix; requantized
  kFp8,     // e4m3 with one float scale per two-dimensional block; requantized
  kPlanes,  // not known: another program quantized them, and its planes were imported
};
std::string_view SourceFormatName(SourceFormat format);  // "mxfp4", "bf16", ..., "planes"
std::optional<SourceFormat> ParseSourceFormat(std::string_view name);

// How exact zeros of a requantized matrix are signed.
enum class ZeroMode : uint8_t { kInvalid = 0, kAuto, kSign, kAlternate };
std::string_view ZeroModeName(ZeroMode mode);  // "auto", "sign", "alt"
std::optional<ZeroMode> ParseZeroMode(std::string_view name);

// Which of its tiers an expert's weights are taken from.
enum class Precision : uint8_t {
  kInvalid = 0,
  kBase = 1,  // the 2-bit code's value
  kFp4 = 2,   // the nibble's value
};
std::string_view PrecisionName(Precision precision);  // "base", "fp4"
std::optional<Precision> ParsePrecision(std::string_view name);

// What stands between the two products of an expert.
enum class ActivationKind : uint8_t {
  kInvalid = 0,
  kSiluGated,         // silu(gate) * up
  kSiluGatedClamped,  // silu(min(gate, limit)) * clamp(up, -limit, limit)
  // With g = min(gate, limit): (clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)
  kSwigluOai,
};

struct Activation {
  ActivationKind kind = ActivationKind::kSiluGated;
  double limit = 0;  // of kSiluGatedClamped and kSwigluOai
  double alpha = 0;  // of kSwigluOai
  bool operator==(const Activation&) const = default;
};

// The shape of one MoE layer (of one shard of it).
struct LayerGeometry {
  uint32_t experts = 0;       // E
  uint32_t hidden = 0;        // H, a multiple of 64
  uint32_t intermediate = 0;  // I, a multiple of 64
  bool biases = false;        // of w13 [2I] and w2 [H]: float32 sections of the base file
  bool operator==(const LayerGeometry&) const = default;

  // w13 is [n13, k13] = [2I, H], w2 is [n2, k2] = [H, I].
  size_t n13() const { return size_t{2} * intermediate; }
  size_t k13() const { return hidden; }
  size_t n2() const { return hidden; }
  size_t k2() const { return intermediate; }
  // Of one of `world` shards: rows of gate and up, columns of down. REQUIRES an intermediate that
  // is a multiple of 64 * world.
  LayerGeometry OfShard(uint32_t world) const {
    LayerGeometry shard = *this;
    shard.intermediate /= world;
    return shard;
  }
};

}  // namespace hotplane
