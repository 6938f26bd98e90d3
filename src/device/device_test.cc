#include "device/device.h"

#define XXH_INLINE_ALL
#include <gtest/gtest.h>
#include <xxhash.h>

#include <map>
#include <random>

#include "device/slot_ring.h"
#include "device/xxh3.h"

namespace hotplane {
namespace {

std::vector<uint8_t> RandomBytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

TEST(Xxh3, IsTheLibrarysAtEveryLengthClass) {
  const std::vector<uint8_t> bytes = RandomBytes(5000, 1);
  for (size_t count = 0; count <= 4200; ++count)
    ASSERT_EQ(xxh3::Hash(xxh3::kSecret, bytes.data() + 3, count),
              XXH3_64bits(bytes.data() + 3, count))
        << count;
}

TEST(Xxh3, IsTheLibrarysForChunksAndAroundThem) {
  const std::vector<uint8_t> bytes = RandomBytes(600'000, 2);
  std::vector<size_t> counts = {262'143, 262'144, 262'145, 2048, 131'072, 262'144 - 64, 524'289};
  std::mt19937_64 random(3);
  for (int i = 0; i < 50; ++i) counts.push_back(random() % 600'000);
  for (const size_t count : counts)
    ASSERT_EQ(xxh3::Hash(xxh3::kSecret, bytes.data(), count), XXH3_64bits(bytes.data(), count))
        << count;
}

// As the kernel does it: sums of blocks in any order, then one run through them.
TEST(Xxh3, BlocksMayBeSummedInAnyOrder) {
  for (const size_t count : {241u, 1023u, 1024u, 1025u, 2048u, 2049u, 65'600u, 262'144u}) {
    const std::vector<uint8_t> bytes = RandomBytes(count, count);
    const uint64_t blocks = xxh3::BlockCount(count);
    std::vector<std::array<uint64_t, xxh3::kLaneCount>> sums(blocks + 1);
    for (uint64_t reverse = 0; reverse <= blocks; ++reverse) {
      const uint64_t block = blocks - reverse;
      const uint64_t stripes =
          block < blocks ? xxh3::kStripesPerBlock : xxh3::TailStripeCount(count);
      for (uint64_t stripe = stripes; stripe-- > 0;)
        xxh3::AddStripe(xxh3::kSecret, bytes.data() + block * xxh3::kBlockBytes + stripe * 64,
                        8 * stripe, sums[block].data());
    }
    uint64_t lanes[xxh3::kLaneCount];
    for (int lane = 0; lane < xxh3::kLaneCount; ++lane) {
      lanes[lane] = xxh3::FirstLane(lane);
      for (uint64_t block = 0; block <= blocks; ++block) {
        lanes[lane] += sums[block][static_cast<size_t>(lane)];
        if (block < blocks)
          lanes[lane] = xxh3::Scramble(
              lanes[lane],
              xxh3::Key(xxh3::kSecret, xxh3::kScrambleKeys + 8 * static_cast<size_t>(lane)));
      }
    }
    xxh3::AddStripe(xxh3::kSecret, bytes.data() + count - 64, xxh3::kLastStripeKeys, lanes);
    EXPECT_EQ(xxh3::Merge(xxh3::kSecret, lanes, count), XXH3_64bits(bytes.data(), count)) << count;
  }
}

TEST(SlotRing, PiecesNeverOverlapAndAllOfTheRingComesBack) {
  constexpr uint64_t kMiB = SlotRing::kGranuleBytes;
  std::mt19937_64 random(4);
  SlotRing ring(64 * kMiB + 5);
  EXPECT_EQ(ring.bytes(), 64 * kMiB);
  std::map<uint64_t, uint64_t> taken;
  size_t refused = 0;
  for (int step = 0; step < 20'000; ++step) {
    if (random() % 5 < 3) {
      const uint64_t bytes = 1 + random() % (16 * kMiB);
      const std::optional<uint64_t> offset = ring.Take(bytes);
      if (!offset) {
        ++refused;
        continue;
      }
      ASSERT_EQ(offset.value() % kMiB, 0u);
      ASSERT_LE(*offset + bytes, ring.bytes());
      const auto after = taken.lower_bound(*offset);
      if (after != taken.end()) {
        ASSERT_LE(*offset + bytes, after->first);
      }
      if (after != taken.begin()) {
        ASSERT_LE(std::prev(after)->first + std::prev(after)->second, *offset);
      }
      taken[*offset] = bytes;
    } else if (!taken.empty()) {
      auto piece = taken.begin();
      std::advance(piece, random() % taken.size());
      ring.Give(piece->first, piece->second);
      taken.erase(piece);
    }
  }
  EXPECT_GT(refused, 0u);
  for (const auto& [offset, bytes] : taken) ring.Give(offset, bytes);
  EXPECT_EQ(ring.taken_bytes(), 0u);
  EXPECT_LE(ring.taken_bytes_max(), ring.bytes());
  EXPECT_EQ(ring.Take(65 * kMiB), std::nullopt);
  const std::optional<uint64_t> all = ring.Take(64 * kMiB);
  ASSERT_TRUE(all.has_value());
  EXPECT_EQ(*all, 0u);
  EXPECT_EQ(ring.Take(1), std::nullopt);
}

TEST(DeviceName, NamesAndRefusals) {
  EXPECT_FALSE(ParseDeviceName("cpu")->cuda);
  EXPECT_TRUE(ParseDeviceName("cuda")->cuda);
  EXPECT_EQ(ParseDeviceName("cuda")->ordinal, 0);
  EXPECT_EQ(ParseDeviceName("cuda:7")->ordinal, 7);
  for (const char* wrong :
       {"", "gpu", "cuda:", "cuda:x", "cuda:1x", "cuda:-1", "CUDA", "cuda:0 "}) {
    const auto refused = ParseDeviceName(wrong);
    ASSERT_FALSE(refused.has_value()) << wrong;
    EXPECT_EQ(refused.error().code(), StatusCode::kUsage);
    EXPECT_NE(refused.error().expected().find("cuda:N"), std::string::npos);
  }
}

TEST(CudaDevice, WhereThereIsNoneItSaysSoAndWhatToDo) {
  const int count = CudaDeviceCount();
  const auto opened = OpenCudaDevice(count, {});
  ASSERT_FALSE(opened.has_value());
  EXPECT_EQ(opened.error().code(), StatusCode::kSystem) << opened.error().ToString();
  EXPECT_FALSE(opened.error().advice().empty());
  if (count > 0) {
    EXPECT_NE(opened.error().what().find("no device cuda:"), std::string::npos);
  }
}

TEST(CudaDevice, AnImpossibleRingIsRefused) {
  for (const DeviceOptions& options :
       {DeviceOptions{.ring_bytes = 2048ull * 1024 * 1024}, DeviceOptions{.ring_bytes = 1024},
        DeviceOptions{.piece_bytes = 0}, DeviceOptions{.piece_bytes = kStagedBytesMax + 1}}) {
    const auto opened = OpenCudaDevice(0, options);
    ASSERT_FALSE(opened.has_value());
    EXPECT_TRUE(opened.error().code() == StatusCode::kUsage ||
                opened.error().what() == "this build has no CUDA");
  }
}

}  // namespace
}  // namespace hotplane
