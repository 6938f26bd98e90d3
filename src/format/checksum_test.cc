#include "format/checksum.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace hotplane {
namespace {

std::vector<std::byte> RandomBytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::vector<std::string> RunnableIsas() {
  std::vector<std::string> names;
  for (const char* name : {"avx512", "avx2", "sse2"}) {
    if (ForceChecksumIsa(name)) names.emplace_back(name);
  }
  return names;
}

// Each test leaves the best variant in force.
class ChecksumTest : public testing::Test {
 protected:
  void TearDown() override { (void)ForceChecksumIsa(isas_.front()); }
  const std::vector<std::string> isas_ = RunnableIsas();
};

TEST_F(ChecksumTest, KnownValues) {
  for (const std::string& isa : isas_) {
    ASSERT_TRUE(ForceChecksumIsa(isa));
    EXPECT_EQ(ChecksumIsaName(), isa);
    // The digests that the XXH3 specification gives for no input.
    EXPECT_EQ(Checksum64({}), 0x2D06800538D394C2u) << isa;
    EXPECT_EQ(ToHex(Digest(std::string_view())), "99aa06d3014798d86001c324468d497f") << isa;
  }
}

TEST_F(ChecksumTest, VariantsAgreeOnEveryLength) {
  const std::vector<std::byte> bytes = RandomBytes(9000, 1);
  for (size_t count = 0; count < bytes.size(); count += count < 600 ? 1 : 97) {
    const std::span<const std::byte> piece = std::span(bytes).first(count);
    ASSERT_TRUE(ForceChecksumIsa("scalar"));
    const uint64_t expected = Checksum64(piece);
    const Digest128 digest = Digest(piece);
    for (const std::string& isa : isas_) {
      ASSERT_TRUE(ForceChecksumIsa(isa));
      EXPECT_EQ(Checksum64(piece), expected) << isa << " " << count;
      EXPECT_EQ(Digest(piece), digest) << isa << " " << count;
    }
  }
}

TEST_F(ChecksumTest, EveryBitCounts) {
  std::vector<std::byte> bytes = RandomBytes(4096, 2);
  const uint64_t whole = Checksum64(bytes);
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    const auto mask = static_cast<std::byte>(1 << (bit % 8));
    bytes[bit / 8] ^= mask;
    EXPECT_NE(Checksum64(bytes), whole) << bit;
    bytes[bit / 8] ^= mask;
  }
}

TEST_F(ChecksumTest, CopyStoresWhatItHashes) {
  const std::vector<std::byte> source = RandomBytes(300'000, 3);
  for (const std::string& isa : isas_) {
    ASSERT_TRUE(ForceChecksumIsa(isa));
    for (const size_t count : {0, 1, 63, 64, 4095, 4096, 4097, 8192, 262'144, 262'145, 299'000}) {
      for (const size_t shift : {0, 1, 32}) {
        // Room before and after shows that nothing else is written.
        std::vector<std::byte> room(count + 256, std::byte{0x5A});
        const size_t aligned = 64 - reinterpret_cast<uintptr_t>(room.data()) % 64;
        const size_t at = aligned + shift;
        const uint64_t sum = CopyWithChecksum64(room.data() + at, source.data() + 1, count);
        EXPECT_EQ(sum, Checksum64({source.data() + 1, count})) << isa << " " << count;
        EXPECT_EQ(std::memcmp(room.data() + at, source.data() + 1, count), 0);
        for (size_t i = 0; i < room.size(); ++i) {
          if (i < at || i >= at + count) {
            ASSERT_EQ(room[i], std::byte{0x5A}) << isa << " " << i;
          }
        }
      }
    }
  }
}

TEST_F(ChecksumTest, StreamsGiveTheDigestOfTheWhole) {
  const std::vector<std::byte> bytes = RandomBytes(70'000, 4);
  const Digest128 whole = Digest(bytes);
  for (const std::string& isa : isas_) {
    ASSERT_TRUE(ForceChecksumIsa(isa));
    std::mt19937_64 random(5);
    DigestStream stream;
    std::span<const std::byte> rest = bytes;
    while (!rest.empty()) {
      const size_t step = std::min<size_t>(rest.size(), random() % 3000);
      stream.Update(rest.first(step));
      rest = rest.subspan(step);
    }
    EXPECT_EQ(stream.Finish(), whole) << isa;
    EXPECT_EQ(stream.Finish(), whole) << "finishing does not consume";
    // A stream keeps its variant when another is forced in between.
    DigestStream moved = std::move(stream);
    ASSERT_TRUE(ForceChecksumIsa("sse2"));
    EXPECT_EQ(moved.Finish(), whole);
    moved = DigestStream();
    EXPECT_EQ(moved.Finish(), Digest(std::string_view()));
  }
}

TEST_F(ChecksumTest, HexRoundTripAndRefusals) {
  const Digest128 digest = Digest("hotplane");
  const std::string hex = ToHex(digest);
  ASSERT_EQ(hex.size(), 32u);
  EXPECT_EQ(*ParseDigest(hex), digest);
  std::string upper = hex;
  upper[5] = 'A';
  for (const std::string& wrong : {std::string(), hex.substr(1), hex + "0", upper,
                                   std::string(32, 'g'), hex.substr(0, 31) + " "}) {
    const auto refused = ParseDigest(wrong);
    ASSERT_FALSE(refused) << wrong;
    EXPECT_EQ(refused.error().code(), StatusCode::kData);
  }
}

TEST_F(ChecksumTest, UnknownVariantsAreRefusedWithTheList) {
  ASSERT_TRUE(ForceChecksumIsa("scalar"));
  EXPECT_STREQ(ChecksumIsaName(), "sse2");
  const auto refused = ForceChecksumIsa("neon");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), StatusCode::kUsage);
  EXPECT_NE(refused.error().expected().find("sse2"), std::string::npos);
  EXPECT_STREQ(ChecksumIsaName(), "sse2") << "a refusal changes nothing";
}

}  // namespace
}  // namespace hotplane
