// Small layers with random planes, for tests and benchmarks of the operator.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "moe/moe.h"
#include "quant/quantize.h"

namespace hotplane {

// All E experts of a layer: random nibbles with scales around 2^-6, and what follows from them.
struct TestLayer {
  LayerGeometry geometry;
  struct Expert {
    std::vector<std::byte> planes13, sc13, planes2, sc2, nibbles13, nibbles2, quintals13, quintals2,
        bias13, bias2;
  };
  std::vector<Expert> experts;

  static TestLayer Make(const LayerGeometry& geometry, uint32_t seed) {
    TestLayer layer = {geometry, std::vector<Expert>(geometry.experts)};
    std::mt19937 random(seed);
    for (Expert& expert : layer.experts) {
      Fill(random, geometry.n13(), geometry.k13(), expert.planes13, expert.sc13, expert.nibbles13,
           expert.quintals13);
      Fill(random, geometry.n2(), geometry.k2(), expert.planes2, expert.sc2, expert.nibbles2,
           expert.quintals2);
      if (!geometry.biases) continue;
      expert.bias13 = Floats(random, geometry.n13());
      expert.bias2 = Floats(random, geometry.n2());
    }
    return layer;
  }

  ExpertWeights Weights(size_t e, Precision precision, Encoding encoding) const {
    const Expert& of = experts[e];
    const bool quintals = encoding == Encoding::kDeltaQuintal;
    ExpertWeights weights;
    weights.precision = precision;
    weights.sc13 = of.sc13.data();
    weights.sc2 = of.sc2.data();
    if (precision == Precision::kFp4) {
      weights.fp_encoding = encoding;
      weights.fp13 = quintals ? of.quintals13.data() : of.nibbles13.data();
      weights.fp2 = quintals ? of.quintals2.data() : of.nibbles2.data();
    }
    if (precision == Precision::kBase || quintals) {
      weights.planes13 = of.planes13.data();
      weights.planes2 = of.planes2.data();
    }
    weights.bias13 = of.bias13.data();
    weights.bias2 = of.bias2.data();
    return weights;
  }

 private:
  static void Fill(std::mt19937& random, size_t n, size_t k, std::vector<std::byte>& codes,
                   std::vector<std::byte>& scales, std::vector<std::byte>& nibbles,
                   std::vector<std::byte>& quintals) {
    nibbles.resize(NibblePlaneBytes(n, k));
    for (std::byte& byte : nibbles) byte = std::byte(random() & 255);
    scales.resize(ScalePlaneBytes(n, k));
    for (std::byte& byte : scales) byte = std::byte(118 + random() % 6);
    codes.resize(CodePlaneBytes(n, k));
    quintals.resize(QuintalPlaneBytes(n, k));
    const Kernels& kernels = *AvailableKernels().front();
    kernels.derive_codes(nibbles.data(), n, k, codes.data());
    kernels.derive_quintals(nibbles.data(), n, k, quintals.data());
  }
  static std::vector<std::byte> Floats(std::mt19937& random, size_t count) {
    std::vector<std::byte> bytes(count * sizeof(float));
    for (size_t i = 0; i < count; ++i) {
      const float value = std::uniform_real_distribution<float>(-1, 1)(random);
      std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
    }
    return bytes;
  }
};

}  // namespace hotplane
