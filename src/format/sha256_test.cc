#include "format/sha256.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace hotplane {
namespace {

std::span<const std::byte> Bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

// The examples that the standard's publisher gives.
TEST(Sha256, KnownValues) {
  EXPECT_EQ(Sha256Hex({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Hex(Bytes("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256Hex(Bytes("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Sha256Hex(Bytes(std::string(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

std::string DigestBy(const Sha256Variant& variant, std::span<const std::byte> bytes) {
  Sha256 sha(variant);
  sha.Update(bytes);
  return sha.FinishHex();
}

TEST(Sha256, EveryVariantGivesTheSameDigest) {
  ASSERT_STREQ(Sha256Variants().back().name, "scalar");
  std::string text;
  for (uint32_t i = 0; i < 3000; ++i) {
    const std::string expected = DigestBy(Sha256Variants().back(), Bytes(text));
    for (const Sha256Variant& variant : Sha256Variants())
      ASSERT_EQ(DigestBy(variant, Bytes(text)), expected) << variant.name << ", " << i;
    text += static_cast<char>(i * 2654435761u >> 24);
  }
  for (const Sha256Variant& variant : Sha256Variants())
    EXPECT_EQ(DigestBy(variant, Bytes(std::string(1000000, 'a'))),
              "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// Every length around the block and padding boundaries, cut at every place.
TEST(Sha256, PiecesGiveTheDigestOfTheWhole) {
  std::string text;
  for (size_t length = 0; length <= 200; ++length) {
    const std::string whole = Sha256Hex(Bytes(text));
    for (size_t cut = 0; cut <= length; ++cut) {
      Sha256 sha;
      sha.Update(Bytes(text).first(cut));
      sha.Update(Bytes(text).subspan(cut));
      ASSERT_EQ(sha.FinishHex(), whole) << length << " cut at " << cut;
    }
    text += static_cast<char>('a' + length % 26);
  }
}

}  // namespace
}  // namespace hotplane
