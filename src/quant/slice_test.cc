// Slices against the unpacked matrices: every element of a rank's planes is the element of the
// whole matrix that the rank keeps.
#include "quant/slice.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstdlib>
#include <random>

#include "format/layer_file.h"
#include "quant/slice_oracle.h"

namespace hotplane {
namespace {

using namespace oracle;

const int kSeedIsFixed = setenv("RC_PARAMS", "seed=20260101", 0);

Planes RandomPlanes(size_t n, size_t k, std::mt19937_64& random) {
  Bytes nibbles(n * k / 2), scales(n * k / 32);
  for (std::byte& byte : nibbles) byte = static_cast<std::byte>(random());
  for (std::byte& byte : scales) byte = static_cast<std::byte>(random() % 255);
  Planes planes = {Bytes(CodePlaneBytes(n, k)), Bytes(ScalePlaneBytes(n, k)),
                   Bytes(NibblePlaneBytes(n, k)), Bytes(QuintalPlaneBytes(n, k))};
  EXPECT_TRUE(AvailableKernels().back()->pack_mxfp4(
      nibbles.data(), scales.data(), n, k,
      {planes.codes.data(), planes.scales.data(), planes.nibbles.data(), planes.quintals.data()}));
  return planes;
}

template <typename Slice>
Planes SliceAll(const Planes& whole, uint32_t world, const Slice& slice) {
  const auto one = [&](const Bytes& plane) {
    Bytes part(plane.size() / world, std::byte{0xA5});
    slice(plane, part);
    return part;
  };
  return {one(whole.codes), one(whole.scales), one(whole.nibbles), one(whole.quintals)};
}

void CheckShape(size_t intermediate, size_t hidden, uint32_t world, uint64_t seed) {
  std::mt19937_64 random(seed);
  const Planes w13 = RandomPlanes(2 * intermediate, hidden, random);
  const Planes w2 = RandomPlanes(hidden, intermediate, random);
  const Elements elements13 = Unpack(w13, 2 * intermediate, hidden);
  const Elements elements2 = Unpack(w2, hidden, intermediate);
  EXPECT_TRUE(elements13.merged == elements13.nibbles);
  for (uint32_t rank = 0; rank < world; ++rank) {
    const Shard shard = {rank, world};
    SCOPED_TRACE(testing::Message()
                 << "I=" << intermediate << " H=" << hidden << " rank " << rank << " of " << world);
    const size_t share = intermediate / world;
    const Planes slice13 = SliceAll(
        w13, world, [&](const Bytes& plane, Bytes& part) { SliceGateUp(plane, shard, part); });
    ExpectSlice(elements13, hidden, KeptOfW13(intermediate, hidden, shard),
                Unpack(slice13, 2 * share, hidden));
    const Planes slice2 = SliceAll(
        w2, world, [&](const Bytes& plane, Bytes& part) { SliceDown(plane, hidden, shard, part); });
    ExpectSlice(elements2, intermediate, KeptOfW2(intermediate, hidden, shard),
                Unpack(slice2, hidden, share));
  }
}

TEST(Slice, OfEveryPlaneIsThePlaneOfTheSlice) {
  EXPECT_TRUE(rc::check("random shapes and worlds", [] {
    const auto world = *rc::gen::inRange<uint32_t>(1, 9);
    const size_t intermediate = size_t{64} * world * *rc::gen::inRange<size_t>(1, 4);
    const size_t hidden = size_t{64} * *rc::gen::inRange<size_t>(1, 6);
    CheckShape(intermediate, hidden, world, *rc::gen::arbitrary<uint64_t>());
    RC_ASSERT(!testing::Test::HasFailure());
  }));
}

TEST(Slice, OfBiasesAreRows) {
  constexpr size_t kIntermediate = 192;
  std::vector<float> bias(2 * kIntermediate);
  for (size_t row = 0; row < bias.size(); ++row) bias[row] = static_cast<float>(row) + 0.5f;
  for (uint32_t rank = 0; rank < 3; ++rank) {
    std::vector<float> slice(bias.size() / 3);
    SliceGateUp(std::as_bytes(std::span(bias)), {rank, 3},
                std::as_writable_bytes(std::span(slice)));
    std::vector<float> expected;
    for (const size_t row : KeptOfW13(kIntermediate, 64, {rank, 3}).rows)
      expected.push_back(bias[row]);
    EXPECT_EQ(slice, expected) << rank;
  }
}

// Real geometry: one expert's bytes by rank, and its planes cut.
TEST(Slice, AtTheGeometryOfRealModels) {
  struct Case {
    const char* model;
    uint32_t hidden, intermediate;
    uint64_t base_bytes, quintal_bytes, nibble_bytes;  // of one whole expert
  };
  constexpr Case kCases[] = {
      {"DeepSeek-V4-Flash", 4096, 2048, 7077888, 7864320, 12582912},
      {"GLM-5.2", 6144, 2048, 10616832, 11796480, 18874368},
  };
  for (const Case& model : kCases) {
    for (const uint32_t world : {2u, 4u, 8u}) {
      SCOPED_TRACE(testing::Message() << model.model << " over " << world << " ranks");
      const LayerGeometry whole = {2, model.hidden, model.intermediate};
      const LayerGeometry shard = whole.OfShard(world);
      EXPECT_EQ(shard.intermediate, 2048u / world);
      const auto expert_bytes = [&](Encoding encoding) {
        EXPECT_TRUE(CheckLayerGeometry(encoding, shard).has_value());
        const LayerLayout layout = PlanLayerLayout(encoding, shard);
        uint64_t bytes = 0;
        for (const Section& section : layout.sections) bytes += section.expert_bytes;
        // These sizes leave no gaps: a rank's file is its share of the whole one's data.
        EXPECT_EQ(layout.data_bytes, 2 * bytes);
        return bytes;
      };
      EXPECT_EQ(expert_bytes(Encoding::kBase), model.base_bytes / world);
      EXPECT_EQ(expert_bytes(Encoding::kDeltaQuintal), model.quintal_bytes / world);
      EXPECT_EQ(expert_bytes(Encoding::kDeltaNibble), model.nibble_bytes / world);
    }
  }
}

TEST(Slice, OfOneExpertOfRealGeometry) {
  std::mt19937_64 random(1);
  const Kernels& kernels = *AvailableKernels().front();
  for (const size_t hidden : {size_t{4096}, size_t{6144}}) {
    constexpr size_t kIntermediate = 2048;
    Bytes plane(NibblePlaneBytes(hidden, kIntermediate));
    for (std::byte& byte : plane) byte = static_cast<std::byte>(random());
    Bytes whole(plane.size());
    kernels.unpack_nibbles(plane.data(), hidden, kIntermediate, whole.data());
    for (const uint32_t world : {2u, 4u, 8u}) {
      const uint32_t rank = static_cast<uint32_t>(random() % world);
      Bytes slice(plane.size() / world), rows(plane.size() / world);
      SliceDown(plane, hidden, {rank, world}, slice);
      kernels.unpack_nibbles(slice.data(), hidden, kIntermediate / world, rows.data());
      const size_t row_bytes = kIntermediate / 2;
      const size_t share_bytes = row_bytes / world;
      for (size_t row = 0; row < hidden; ++row) {
        const auto expected =
            std::span(whole).subspan(row * row_bytes + rank * share_bytes, share_bytes);
        const auto found = std::span(rows).subspan(row * share_bytes, share_bytes);
        ASSERT_TRUE(std::ranges::equal(expected, found)) << row;
      }
    }
  }
}

}  // namespace
}  // namespace hotplane
