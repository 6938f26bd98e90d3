#include "matmul.h"

#include <algorithm>

namespace tinylm {
namespace {

// The compiler makes of it what the function's instruction set has. Memory of floats need not be
// aligned to it.
typedef float Vector
    __attribute__((vector_size(kPanel * sizeof(float)), aligned(sizeof(float)), may_alias));

// Tokens of one tile: with AVX2, 6 tokens are 12 registers of sums, and 4 are left for the rest.
constexpr size_t kTileTokens = 6;
// Panels of a tile of one token: the sums are a chain of additions each, of 4 cycles.
constexpr size_t kTilePanels = 4;

template <size_t kTokens, size_t kPanels>
[[gnu::always_inline]] inline void Tile(const float* x, size_t x_stride, const Panels& w,
                                        size_t panel, float* y, size_t y_stride) {
  const float* weights = w.data + panel * w.stride;
  Vector sums[kTokens][kPanels] = {};
  for (size_t i = 0; i < w.in; ++i) {
    // Unrolled, or the sums would not stay in registers.
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; ++p) {
      const Vector row = *reinterpret_cast<const Vector*>(weights + p * w.stride + i * kPanel);
#pragma GCC unroll 8
      for (size_t t = 0; t < kTokens; ++t) sums[t][p] += x[t * x_stride + i] * row;
    }
  }
#pragma GCC unroll 8
  for (size_t t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (size_t p = 0; p < kPanels; ++p) {
      *reinterpret_cast<Vector*>(y + t * y_stride + (panel + p) * kPanel) = sums[t][p];
    }
  }
}

[[gnu::always_inline]] inline void Multiply(size_t tokens, const float* x, size_t x_stride,
                                            const Panels& w, float* y, size_t y_stride) {
  const size_t panels = Padded(w.out) / kPanel;
  const size_t tiled = tokens / kTileTokens * kTileTokens;
  for (size_t panel = 0; panel < panels; ++panel) {
    for (size_t t = 0; t < tiled; t += kTileTokens) {
      Tile<kTileTokens, 1>(x + t * x_stride, x_stride, w, panel, y + t * y_stride, y_stride);
    }
  }
  for (size_t t = tiled; t < tokens; ++t) {
    size_t panel = 0;
    for (; panel + kTilePanels <= panels; panel += kTilePanels) {
      Tile<1, kTilePanels>(x + t * x_stride, x_stride, w, panel, y + t * y_stride, y_stride);
    }
    for (; panel < panels; ++panel) {
      Tile<1, 1>(x + t * x_stride, x_stride, w, panel, y + t * y_stride, y_stride);
    }
  }
}

using Variant = void (*)(size_t, const float*, size_t, const Panels&, float*, size_t);

void MultiplyBaseline(size_t tokens, const float* x, size_t x_stride, const Panels& w, float* y,
                      size_t y_stride) {
  Multiply(tokens, x, x_stride, w, y, y_stride);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] void MultiplyAvx2(size_t tokens, const float* x, size_t x_stride,
                                          const Panels& w, float* y, size_t y_stride) {
  Multiply(tokens, x, x_stride, w, y, y_stride);
}
[[gnu::target("avx512f")]] void MultiplyAvx512(size_t tokens, const float* x, size_t x_stride,
                                               const Panels& w, float* y, size_t y_stride) {
  Multiply(tokens, x, x_stride, w, y, y_stride);
}
#endif

Variant Best() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return MultiplyAvx512;
  if (__builtin_cpu_supports("avx2")) return MultiplyAvx2;
#endif
  return MultiplyBaseline;
}

}  // namespace

void MatMul(size_t tokens, const float* x, size_t x_stride, const Panels& w, float* y,
            size_t y_stride) {
  static const Variant best = Best();
  best(tokens, x, x_stride, w, y, y_stride);
}

Matrix::Matrix(const std::vector<float>& rows, size_t out, size_t in)
    : in_(in), out_(out), data_(Padded(out) * in) {
  for (size_t o = 0; o < out; ++o) {
    for (size_t i = 0; i < in; ++i) {
      data_[o / kPanel * in * kPanel + i * kPanel + o % kPanel] = rows[o * in + i];
    }
  }
}

}  // namespace tinylm
