// XXH3-64 with seed 0, in the pieces that a GPU computes side by side; one source for kernel and
// host. The algorithm and its constants are those of the XXH3 specification (xxHash,
// doc/xxhash_spec.md).
//
// Over 240 bytes, XXH3 is a sum in eight lanes over stripes of 64 bytes. Every 16 stripes (a block
// of 1024 bytes) the lanes are scrambled, which is all that has to happen in order: the sums of the
// blocks are independent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "device/host_device.h"

namespace hotplane::xxh3 {

inline constexpr uint64_t kPrime32_1 = 0x9E3779B1u;
inline constexpr uint64_t kPrime32_2 = 0x85EBCA77u;
inline constexpr uint64_t kPrime32_3 = 0xC2B2AE3Du;
inline constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u;
inline constexpr uint64_t kPrime64_2 = 0xC2B2AE3D27D4EB4Fu;
inline constexpr uint64_t kPrime64_3 = 0x165667B19E3779F9u;
inline constexpr uint64_t kPrime64_4 = 0x85EBCA77C2B2AE63u;
inline constexpr uint64_t kPrime64_5 = 0x27D4EB2F165667C5u;

inline constexpr int kLaneCount = 8;
inline constexpr uint64_t kStripeBytes = 64;
inline constexpr uint64_t kStripesPerBlock = 16;
inline constexpr uint64_t kBlockBytes = kStripeBytes * kStripesPerBlock;
inline constexpr uint64_t kShortBytesMax = 240;
inline constexpr size_t kSecretBytes = 192;
// A stripe's keys begin 8 bytes after those of the one before it.
static_assert(kSecretBytes - kStripeBytes == 8 * kStripesPerBlock);

// Offsets into the secret.
inline constexpr size_t kScrambleKeys = kSecretBytes - kStripeBytes;
inline constexpr size_t kLastStripeKeys = kSecretBytes - kStripeBytes - 7;
inline constexpr size_t kMergeKeys = 11;

// The default secret of the specification, as little-endian words.
struct Secret {
  uint64_t words[kSecretBytes / 8];
};
inline constexpr Secret kSecret = {{
    0xBE4BA423396CFEB8u, 0x1CAD21F72C81017Cu, 0xDB979083E96DD4DEu, 0x1F67B3B7A4A44072u,
    0x78E5C0CC4EE679CBu, 0x2172FFCC7DD05A82u, 0x8E2443F7744608B8u, 0x4C263A81E69035E0u,
    0xCB00C391BB52283Cu, 0xA32E531B8B65D088u, 0x4EF90DA297486471u, 0xD8ACDEA946EF1938u,
    0x3F349CE33F76FAA8u, 0x1D4F0BC7C7BBDCF9u, 0x3159B4CD4BE0518Au, 0x647378D9C97E9FC8u,
    0xC3EBD33483ACC5EAu, 0xEB6313FAFFA081C5u, 0x49DAF0B751DD0D17u, 0x9E68D429265516D3u,
    0xFCA1477D58BE162Bu, 0xCE31D07AD1B8F88Fu, 0x280416958F3ACB45u, 0x7E404BBBCAFBD7AFu,
}};

HP_HOST_DEVICE uint32_t Read32(const uint8_t* at) {
  return static_cast<uint32_t>(at[0]) | static_cast<uint32_t>(at[1]) << 8 |
         static_cast<uint32_t>(at[2]) << 16 | static_cast<uint32_t>(at[3]) << 24;
}
HP_HOST_DEVICE uint64_t Read64(const uint8_t* at) {
#if defined(__CUDA_ARCH__)
  return Read32(at) | static_cast<uint64_t>(Read32(at + 4)) << 32;
#else
  uint64_t word;  // little-endian hosts only
  std::memcpy(&word, at, sizeof word);
  return word;
#endif
}
// Of the secret, at any byte.
HP_HOST_DEVICE uint64_t Key(const Secret& secret, size_t offset) {
  const size_t word = offset / 8;
  const unsigned shift = static_cast<unsigned>(offset % 8) * 8;
  if (shift == 0) return secret.words[word];
  return secret.words[word] >> shift | secret.words[word + 1] << (64 - shift);
}

HP_HOST_DEVICE uint64_t RotateLeft(uint64_t x, unsigned by) { return x << by | x >> (64 - by); }
HP_HOST_DEVICE uint64_t SwapBytes(uint64_t x) {
  x = (x & 0x00FF00FF00FF00FFu) << 8 | (x >> 8 & 0x00FF00FF00FF00FFu);
  x = (x & 0x0000FFFF0000FFFFu) << 16 | (x >> 16 & 0x0000FFFF0000FFFFu);
  return x << 32 | x >> 32;
}
HP_HOST_DEVICE uint64_t MultiplyFold(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return (a * b) ^ __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
#endif
}
HP_HOST_DEVICE uint64_t Avalanche(uint64_t h) {
  h ^= h >> 37;
  h *= 0x165667919E3779F9u;
  return h ^ h >> 32;
}
HP_HOST_DEVICE uint64_t Avalanche64(uint64_t h) {  // XXH64's
  h ^= h >> 33;
  h *= kPrime64_2;
  h ^= h >> 29;
  h *= kPrime64_3;
  return h ^ h >> 32;
}
HP_HOST_DEVICE uint64_t Mix16(const Secret& secret, const uint8_t* at, size_t key) {
  return MultiplyFold(Read64(at) ^ Key(secret, key), Read64(at + 8) ^ Key(secret, key + 8));
}

HP_HOST_DEVICE uint64_t HashTo16(const Secret& secret, const uint8_t* at, uint64_t bytes) {
  if (bytes > 8) {
    const uint64_t low = Read64(at) ^ Key(secret, 24) ^ Key(secret, 32);
    const uint64_t high = Read64(at + bytes - 8) ^ Key(secret, 40) ^ Key(secret, 48);
    return Avalanche(bytes + SwapBytes(low) + high + MultiplyFold(low, high));
  }
  if (bytes >= 4) {
    const uint64_t joined = Read32(at + bytes - 4) + (static_cast<uint64_t>(Read32(at)) << 32);
    uint64_t h = joined ^ Key(secret, 8) ^ Key(secret, 16);
    h ^= RotateLeft(h, 49) ^ RotateLeft(h, 24);
    h *= 0x9FB21C651E98DF25u;
    h ^= (h >> 35) + bytes;
    h *= 0x9FB21C651E98DF25u;
    return h ^ h >> 28;
  }
  if (bytes == 0) return Avalanche64(Key(secret, 56) ^ Key(secret, 64));
  const uint32_t joined = static_cast<uint32_t>(at[0]) << 16 |
                          static_cast<uint32_t>(at[bytes / 2]) << 24 | at[bytes - 1] |
                          static_cast<uint32_t>(bytes) << 8;
  const uint64_t keys = secret.words[0];
  return Avalanche64(joined ^ static_cast<uint32_t>(keys ^ keys >> 32));
}

HP_HOST_DEVICE uint64_t HashTo128(const Secret& secret, const uint8_t* at, uint64_t bytes) {
  uint64_t sum = bytes * kPrime64_1;
  const uint64_t pairs = (bytes - 1) / 32;
  for (uint64_t pair = 0; pair <= pairs; ++pair) {
    sum += Mix16(secret, at + 16 * pair, 32 * pair);
    sum += Mix16(secret, at + bytes - 16 * (pair + 1), 32 * pair + 16);
  }
  return Avalanche(sum);
}

HP_HOST_DEVICE uint64_t HashTo240(const Secret& secret, const uint8_t* at, uint64_t bytes) {
  uint64_t sum = bytes * kPrime64_1;
  const uint64_t rounds = bytes / 16;
  for (uint64_t i = 0; i < 8; ++i) sum += Mix16(secret, at + 16 * i, 16 * i);
  sum = Avalanche(sum);
  for (uint64_t i = 8; i < rounds; ++i) sum += Mix16(secret, at + 16 * i, 16 * (i - 8) + 3);
  return Avalanche(sum + Mix16(secret, at + bytes - 16, 136 - 17));
}

// REQUIRES bytes <= kShortBytesMax.
HP_HOST_DEVICE uint64_t HashShort(const Secret& secret, const uint8_t* at, uint64_t bytes) {
  return bytes <= 16    ? HashTo16(secret, at, bytes)
         : bytes <= 128 ? HashTo128(secret, at, bytes)
                        : HashTo240(secret, at, bytes);
}

// The pieces of a hash of more than kShortBytesMax bytes. Whole blocks, each followed by a
// scramble; the stripes after them; then the last 64 bytes once more under keys of their own.
HP_HOST_DEVICE uint64_t BlockCount(uint64_t bytes) { return (bytes - 1) / kBlockBytes; }
HP_HOST_DEVICE uint64_t TailStripeCount(uint64_t bytes) {
  return (bytes - 1 - BlockCount(bytes) * kBlockBytes) / kStripeBytes;
}

// What a word of a stripe adds to its own lane; the plain word goes to the lane's neighbour.
HP_HOST_DEVICE uint64_t LaneTerm(uint64_t word, uint64_t key) {
  const uint64_t keyed = word ^ key;
  return (keyed & 0xFFFFFFFFu) * (keyed >> 32);
}

HP_HOST_DEVICE uint64_t FirstLane(int lane) {
  switch (lane) {
    case 0: return kPrime32_3;
    case 1: return kPrime64_1;
    case 2: return kPrime64_2;
    case 3: return kPrime64_3;
    case 4: return kPrime64_4;
    case 5: return kPrime32_2;
    case 6: return kPrime64_5;
    default: return kPrime32_1;
  }
}

HP_HOST_DEVICE uint64_t Scramble(uint64_t sum, uint64_t key) {
  return (sum ^ sum >> 47 ^ key) * kPrime32_1;
}

HP_HOST_DEVICE uint64_t MergeTerm(const Secret& secret, uint64_t even, uint64_t odd, int pair) {
  const size_t key = kMergeKeys + 16 * static_cast<size_t>(pair);
  return MultiplyFold(even ^ Key(secret, key), odd ^ Key(secret, key + 8));
}

HP_HOST_DEVICE uint64_t Merge(const Secret& secret, const uint64_t* lanes, uint64_t bytes) {
  uint64_t sum = bytes * kPrime64_1;
  for (int pair = 0; pair < 4; ++pair)
    sum += MergeTerm(secret, lanes[2 * pair], lanes[2 * pair + 1], pair);
  return Avalanche(sum);
}

// One stripe into eight lanes, under the keys at `key`.
HP_HOST_DEVICE void AddStripe(const Secret& secret, const uint8_t* at, size_t key,
                              uint64_t* lanes) {
  for (int lane = 0; lane < kLaneCount; ++lane) {
    const uint64_t word = Read64(at + 8 * lane);
    lanes[lane] += LaneTerm(word, Key(secret, key + 8 * static_cast<size_t>(lane)));
    lanes[lane ^ 1] += word;
  }
}

// The whole hash by one thread, through the same pieces.
HP_HOST_DEVICE uint64_t Hash(const Secret& secret, const uint8_t* at, uint64_t bytes) {
  if (bytes <= kShortBytesMax) return HashShort(secret, at, bytes);
  uint64_t lanes[kLaneCount];
  for (int lane = 0; lane < kLaneCount; ++lane) lanes[lane] = FirstLane(lane);
  const uint64_t blocks = BlockCount(bytes);
  for (uint64_t block = 0; block <= blocks; ++block) {
    const uint64_t stripes = block < blocks ? kStripesPerBlock : TailStripeCount(bytes);
    for (uint64_t stripe = 0; stripe < stripes; ++stripe)
      AddStripe(secret, at + block * kBlockBytes + stripe * kStripeBytes, 8 * stripe, lanes);
    if (block == blocks) break;
    for (int lane = 0; lane < kLaneCount; ++lane)
      lanes[lane] =
          Scramble(lanes[lane], Key(secret, kScrambleKeys + 8 * static_cast<size_t>(lane)));
  }
  AddStripe(secret, at + bytes - kStripeBytes, kLastStripeKeys, lanes);
  return Merge(secret, lanes, bytes);
}

}  // namespace hotplane::xxh3
