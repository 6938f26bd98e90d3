// The kernels' way from stored planes to operands, instruction by instruction, against the format.
#include "device/fake/cuda_on_host.h"

// In place of the one beside the kernels.
#include <gtest/gtest.h>

#include "format/tsym4.h"
#include "moe/cuda/fragments.h"
#include "moe/on_host/moe/cuda/ptx.h"

namespace hotplane::moe_cuda {
alignas(16) thread_local uint8_t memory[kSharedOnHost + on_host::kGuardBytes];
namespace {

// What is stored of four columns of half a block.
struct Four {
  uint32_t nibbles, codes, word;
};
// Of the pair of a column: `of` in the low 16 bits or the high ones.
uint32_t HalfOfPair(const Four& of, uint32_t column) {
  const uint32_t nibble = of.nibbles >> (4 * column) & 15;
  const float value = kE2m1MagnitudeTimes2[nibble & 7] / 2.0F * kNibbleUnit;
  return ToBf16((nibble & 8) != 0 ? -value : value);
}
Four FourOf(uint32_t nibbles) {
  Four four = {nibbles, 0, 0};
  for (uint32_t column = 4; column-- > 0;) {
    const uint32_t nibble = nibbles >> (4 * column) & 15;
    four.codes = four.codes << 2 | CodeOfNibble(nibble);
    four.word = four.word * 5 + DigitOfNibble(nibble);
  }
  return four;
}

// Every word of four nibbles in either half of a block, beside another one in the other.
template <typename Check>
void ForEachPairOfFours(const Check& check) {
  for (uint32_t nibbles = 0; nibbles < 0x10000; ++nibbles) {
    const Four first = FourOf(nibbles), second = FourOf((nibbles * 40503 + 12345) & 0xFFFF);
    check(first, second);
  }
}

TEST(Fragments, PairsOfNibbles) {
  ForEachPairOfFours([](const Four& first, const Four& second) {
    uint32_t pairs[4];
    NibblePairs(first.nibbles | second.nibbles << 16, pairs);
    for (uint32_t column = 0; column < 4; ++column)
      ASSERT_EQ(pairs[column], HalfOfPair(first, column) | HalfOfPair(second, column) << 16)
          << std::hex << first.nibbles << ' ' << second.nibbles << " column " << column;
  });
}

TEST(Fragments, PairsOfQuintals) {
  ForEachPairOfFours([](const Four& first, const Four& second) {
    // Neighbours that are not theirs.
    const uint32_t words = first.word | second.word << 10 | first.nibbles << 20;
    const CodeSelectors selectors =
        SelectorsOf(first.codes | second.codes << 8 | first.nibbles << 16);
    uint32_t pairs[4];
    QuintalPairs(words, selectors.even, selectors.odd, kQuintalConstants, pairs);
    for (uint32_t column = 0; column < 4; ++column)
      ASSERT_EQ(pairs[column], HalfOfPair(first, column) | HalfOfPair(second, column) << 16)
          << std::hex << first.nibbles << ' ' << second.nibbles << " column " << column;
  });
}

}  // namespace
}  // namespace hotplane::moe_cuda
