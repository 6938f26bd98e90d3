// The routed experts of one layer in every checkpoint format, with their exact weights, and the
// store built from them. For tests, which sit in the same namespace.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/format_text.h"
#include "boot/boot_testing.h"
#include "checkpoint/checkpoint_testing.h"
#include "quant/oracle.h"

namespace hotplane::formats_testing {

using oracle::Bytes;
using Random = std::mt19937_64;

inline constexpr size_t kExperts = 3, kHidden = 192, kIntermediate = 128;

struct Shape {
  size_t n, k;
};
constexpr Shape ShapeOf(size_t projection) {
  return projection == 2 ? Shape{kHidden, kIntermediate} : Shape{kIntermediate, kHidden};
}

template <typename T>
inline void Put(Model& model, const std::string& name, Dtype dtype, std::vector<uint64_t> shape,
                const std::vector<T>& values) {
  model.Add(name, dtype, std::move(shape));
  std::vector<std::byte>& data = model.tensors.at(name).data;
  ASSERT_EQ(data.size(), values.size() * sizeof(T)) << name;
  std::memcpy(data.data(), values.data(), data.size());
}

// One matrix in the terms of its format; `weights` are its exact values.
struct Matrix {
  std::vector<uint8_t> elements;  // packed nibbles or e4m3
  std::vector<uint16_t> bf16;
  std::vector<uint8_t> scales;  // e8m0 or e4m3
  float global_scale = 1;
  std::vector<float> grid;
  std::vector<long double> weights;
};
using Layer = std::vector<std::array<Matrix, 3>>;  // by expert and projection

inline Layer MakeLayer(uint64_t seed,
                       const std::function<void(Random&, Shape, size_t, Matrix&)>& fill) {
  Random random(seed);
  Layer layer(kExperts);
  for (auto& expert : layer) {
    for (size_t p = 0; p < 3; ++p) fill(random, ShapeOf(p), p, expert[p]);
  }
  return layer;
}

inline void FillNibbles(Random& random, Shape shape, Matrix& matrix) {
  matrix.elements.resize(shape.n * shape.k / 2);
  for (uint8_t& byte : matrix.elements) byte = static_cast<uint8_t>(random());
}
inline unsigned NibbleAt(const Matrix& matrix, size_t i) {
  return i % 2 == 0 ? matrix.elements[i / 2] & 15u : matrix.elements[i / 2] >> 4;
}
inline long double E2m1(unsigned nibble) {
  static constexpr long double kValues[8] = {0, .5L, 1, 1.5L, 2, 3, 4, 6};
  return nibble >= 8 ? -kValues[nibble - 8] : kValues[nibble];
}
inline long double E4m3(uint8_t bits) {
  const long double magnitude =
      bits % 128 < 8 ? (bits % 8) / 512.0L
                     : std::ldexp(1 + (bits % 8) / 8.0L, static_cast<int>(bits % 128 / 8) - 7);
  return bits >= 128 ? -magnitude : magnitude;
}

inline Layer Mxfp4Layer(uint64_t seed) {
  return MakeLayer(seed, [](Random& random, Shape shape, size_t, Matrix& matrix) {
    FillNibbles(random, shape, matrix);
    matrix.scales.resize(shape.n * shape.k / 32);
    for (uint8_t& scale : matrix.scales) scale = static_cast<uint8_t>(random() % 255);
  });
}
inline Layer Nvfp4Layer(uint64_t seed) {
  return MakeLayer(seed, [](Random& random, Shape shape, size_t p, Matrix& matrix) {
    FillNibbles(random, shape, matrix);
    matrix.scales.resize(shape.n * shape.k / 16);
    for (uint8_t& scale : matrix.scales) {
      scale = static_cast<uint8_t>(random() % 20 == 0 ? 0 : random() % 127);
    }
    // Gate and up differ, and all are powers of two, so that their reciprocals are exact.
    matrix.global_scale = std::ldexp(1.0F, -5 - static_cast<int>(p) * 3);
    matrix.weights.resize(shape.n * shape.k);
    for (size_t i = 0; i < matrix.weights.size(); ++i) {
      matrix.weights[i] =
          E2m1(NibbleAt(matrix, i)) * E4m3(matrix.scales[i / 16]) * matrix.global_scale;
    }
  });
}
inline Layer Bf16Layer(uint64_t seed) {
  return MakeLayer(seed, [](Random& random, Shape shape, size_t, Matrix& matrix) {
    matrix.bf16.resize(shape.n * shape.k);
    for (uint16_t& bits : matrix.bf16) {
      bits = static_cast<uint16_t>((0x3C00 + random() % 0x200) | (random() & 0x8000));
      matrix.weights.push_back(std::bit_cast<float>(uint32_t{bits} << 16));
    }
  });
}
inline Layer Fp8Layer(uint64_t seed, size_t block_rows, size_t block_columns) {
  return MakeLayer(seed, [=](Random& random, Shape shape, size_t, Matrix& matrix) {
    const size_t columns = (shape.k + block_columns - 1) / block_columns;
    matrix.grid.resize((shape.n + block_rows - 1) / block_rows * columns);
    for (float& scale : matrix.grid) {
      scale = std::bit_cast<float>(static_cast<uint32_t>(0x3A00 + random() % 0x100) << 16);
    }
    matrix.elements.resize(shape.n * shape.k);
    for (size_t i = 0; i < matrix.elements.size(); ++i) {
      matrix.elements[i] = static_cast<uint8_t>(random() % 127 | (random() & 128));
      matrix.weights.push_back(
          E4m3(matrix.elements[i]) *
          matrix.grid[i / shape.k / block_rows * columns + i % shape.k / block_columns]);
    }
  });
}

inline constexpr const char* kNamed[3] = {"gate_proj", "up_proj", "down_proj"};
inline constexpr const char* kNumbered[3] = {"w1", "w3", "w2"};

inline void ForEachMatrix(const Layer& layer,
                          const std::function<void(size_t, size_t, Shape, const Matrix&)>& visit) {
  for (size_t e = 0; e < layer.size(); ++e) {
    for (size_t p = 0; p < 3; ++p) visit(e, p, ShapeOf(p), layer[e][p]);
  }
}
inline std::string Hf(size_t layer, size_t expert, size_t p) {
  return Text("model.layers.{}.mlp.experts.{}.{}", layer, expert, kNamed[p]);
}

inline void AddDeepSeek(Model& model, const Layer& layer) {
  ForEachMatrix(layer, [&](size_t e, size_t p, Shape s, const Matrix& m) {
    const std::string name = Text("layers.0.ffn.experts.{}.{}", e, kNumbered[p]);
    Put(model, name + ".weight", Dtype::kI8, {s.n, s.k / 2}, m.elements);
    Put(model, name + ".scale", Dtype::kF8E8m0, {s.n, s.k / 32}, m.scales);
  });
}
inline void AddPackedMxfp4(Model& model, const Layer& layer) {
  ForEachMatrix(layer, [&](size_t e, size_t p, Shape s, const Matrix& m) {
    Put(model, Hf(0, e, p) + ".weight_packed", Dtype::kU8, {s.n, s.k / 2}, m.elements);
    Put(model, Hf(0, e, p) + ".weight_scale", Dtype::kU8, {s.n, s.k / 32}, m.scales);
  });
}

// Rows of gate and of up in turn, or one matrix after the other; down as it is. All experts.
template <typename T>
std::vector<T> Fuse(const Layer& layer, bool down, bool interleaved,
                    std::vector<T> Matrix::*member) {
  std::vector<T> all;
  for (const auto& expert : layer) {
    const std::vector<T>& gate = expert[0].*member;
    const std::vector<T>& up = expert[1].*member;
    if (down) {
      all.insert(all.end(), (expert[2].*member).begin(), (expert[2].*member).end());
    } else if (!interleaved) {
      all.insert(all.end(), gate.begin(), gate.end());
      all.insert(all.end(), up.begin(), up.end());
    } else {
      const auto row = static_cast<ptrdiff_t>(gate.size() / kIntermediate);
      for (ptrdiff_t r = 0; r < static_cast<ptrdiff_t>(kIntermediate); ++r) {
        all.insert(all.end(), gate.begin() + r * row, gate.begin() + (r + 1) * row);
        all.insert(all.end(), up.begin() + r * row, up.begin() + (r + 1) * row);
      }
    }
  }
  return all;
}

// Bias of fused row r of expert e: tells where it came from, exactly in BF16.
inline float Bias(size_t expert, size_t row) {
  return std::bit_cast<float>(static_cast<uint32_t>(0x3c00 + expert * 512 + row) << 16);
}

inline void AddGptOss(Model& model, const Layer& layer) {
  const std::string base = "model.layers.0.mlp.experts.";
  const uint64_t two = 2 * kIntermediate;
  for (const bool down : {false, true}) {
    const std::string name = base + (down ? "down_proj" : "gate_up_proj");
    const uint64_t rows = down ? kHidden : two;
    const uint64_t blocks = (down ? kIntermediate : kHidden) / 32;
    Put(model, name + "_blocks", Dtype::kU8, {kExperts, rows, blocks, 16},
        Fuse(layer, down, true, &Matrix::elements));
    Put(model, name + "_scales", Dtype::kU8, {kExperts, rows, blocks},
        Fuse(layer, down, true, &Matrix::scales));
    std::vector<uint16_t> biases;
    for (size_t e = 0; e < kExperts; ++e) {
      for (size_t r = 0; r < rows; ++r) {
        biases.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(Bias(e, r)) >> 16));
      }
    }
    Put(model, name + "_bias", Dtype::kBf16, {kExperts, rows}, biases);
  }
}

inline void AddBf16(Model& model, const Layer& layer, const std::string& block,
                    const char* const* roles) {
  ForEachMatrix(layer, [&](size_t e, size_t p, Shape s, const Matrix& m) {
    Put(model, Text("model.layers.0.{}.experts.{}.{}.weight", block, e, roles[p]), Dtype::kBf16,
        {s.n, s.k}, m.bf16);
  });
}
inline void AddFused(Model& model, const Layer& layer, const std::string& prefix = "model.") {
  const std::string base = prefix + "layers.0.mlp.experts.";
  Put(model, base + "gate_up_proj", Dtype::kBf16, {kExperts, 2 * kIntermediate, kHidden},
      Fuse(layer, false, false, &Matrix::bf16));
  Put(model, base + "down_proj", Dtype::kBf16, {kExperts, kHidden, kIntermediate},
      Fuse(layer, true, false, &Matrix::bf16));
}

inline void AddModelopt(Model& model, const Layer& layer, bool input_scales = true,
                        std::vector<uint64_t> scalar = {}) {
  ForEachMatrix(layer, [&](size_t e, size_t p, Shape s, const Matrix& m) {
    Put(model, Hf(0, e, p) + ".weight", Dtype::kU8, {s.n, s.k / 2}, m.elements);
    Put(model, Hf(0, e, p) + ".weight_scale", Dtype::kF8E4m3, {s.n, s.k / 16}, m.scales);
    Put(model, Hf(0, e, p) + ".weight_scale_2", Dtype::kF32, scalar, std::vector{m.global_scale});
    const float garbage = std::numeric_limits<float>::quiet_NaN();
    if (input_scales) {
      Put(model, Hf(0, e, p) + ".input_scale", Dtype::kF32, scalar, std::vector{garbage});
    }
  });
}
inline void AddCompressedNvfp4(Model& model, const Layer& layer) {
  ForEachMatrix(layer, [&](size_t e, size_t p, Shape s, const Matrix& m) {
    Put(model, Hf(0, e, p) + ".weight_packed", Dtype::kU8, {s.n, s.k / 2}, m.elements);
    Put(model, Hf(0, e, p) + ".weight_scale", Dtype::kF8E4m3, {s.n, s.k / 16}, m.scales);
    Put(model, Hf(0, e, p) + ".weight_global_scale", Dtype::kF32, {1},
        std::vector{1 / m.global_scale});
    Put(model, Hf(0, e, p) + ".input_global_scale", Dtype::kF32, {1}, std::vector{0.0F});
  });
}
inline void AddFp8(Model& model, const Layer& layer, size_t rows, size_t columns,
                   Dtype scale_dtype) {
  ForEachMatrix(layer, [&](size_t e, size_t p, Shape s, const Matrix& m) {
    Put(model, Hf(0, e, p) + ".weight", Dtype::kF8E4m3, {s.n, s.k}, m.elements);
    const std::vector<uint64_t> shape = {(s.n + rows - 1) / rows, (s.k + columns - 1) / columns};
    const std::string name = Hf(0, e, p) + ".weight_scale_inv";
    if (scale_dtype == Dtype::kF32) return Put(model, name, scale_dtype, shape, m.grid);
    std::vector<uint16_t> bf16;
    for (const float scale : m.grid) {
      bf16.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(scale) >> 16));
    }
    Put(model, name, scale_dtype, shape, bf16);
  });
  model.config_text =
      Text(R"({{"quantization_config": {{"weight_block_size": [{}, {}]}}}})", rows, columns);
}

// A matrix as the store has it by the oracle: from exact weights, or verbatim where it has none.
inline oracle::Matrix Quantized(const Matrix& m, Shape shape) {
  const auto [n, k] = shape;
  oracle::Matrix matrix = {n, k, std::vector<uint8_t>(n * k), m.scales};
  uint64_t zeros[2] = {0, 0};
  for (const long double w : m.weights) zeros[std::signbit(w) ? 1 : 0] += w == 0 ? 1 : 0;
  const bool alternate = 20 * std::max(zeros[0], zeros[1]) > 19 * (zeros[0] + zeros[1]);
  if (!m.weights.empty()) matrix.scales.resize(n * k / 32);
  for (size_t i = 0; i < n * k; ++i) {
    if (m.weights.empty()) {
      matrix.nibbles[i] = static_cast<uint8_t>(NibbleAt(m, i));
      continue;
    }
    long double amax = 0;
    for (size_t j = i / 32 * 32; j < i / 32 * 32 + 32; ++j) {
      amax = std::fmax(amax, std::fabs(m.weights[j]));
    }
    const int e = oracle::Exponent(amax);
    matrix.scales[i / 32] = static_cast<uint8_t>(e + 127);
    matrix.nibbles[i] = oracle::Nibble(m.weights[i], e, i % k, alternate);
  }
  return matrix;
}

struct Built {
  std::unique_ptr<MemEnv> env = std::make_unique<MemEnv>();
  std::optional<Generation> generation;
  BuildReport report;
};
inline Result<Built> BuildModel(const Model& model, uint64_t shard_bytes = 0, bool reverse = false,
                                std::string_view isa = "scalar") {
  Built built;
  WriteModel(*built.env, kTestCheckpoint, model, shard_bytes, reverse);
  BuildOptions options = BothTiers();
  HP_ASSIGN(options.kernels, SelectKernels(isa));
  HP_ASSIGN(built.report, BuildStore(*built.env, options));
  HP_ASSIGN(const Store store, Store::Open(*built.env, kTestStore));
  HP_ASSIGN(built.generation, store.OpenGeneration());
  return built;
}

inline Model With(const std::function<void(Model&)>& add) {
  Model model;
  add(model);
  return model;
}

}  // namespace hotplane::formats_testing
