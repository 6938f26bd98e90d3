// y = x W in float32, each element a sum in the order of the input index, without fused operations:
// so the result for a token does not depend on the tokens beside it, nor on the instruction set.
#pragma once

#include <cstddef>
#include <vector>

namespace tinylm {

// Outputs of one panel: a vector register of AVX-512, two of AVX2.
constexpr size_t kPanel = 16;
// Columns with their padding. Memory of this size per row holds what MatMul writes.
constexpr size_t Padded(size_t columns) { return (columns + kPanel - 1) / kPanel * kPanel; }

// W [in, out] by panels of 16 outputs: element (i, o) is at data[o/16 * stride + i*16 + o%16].
struct Panels {
  const float* data;
  size_t in;
  size_t out;
  size_t stride;  // floats from one panel to the next
};

// y[t, 0..Padded(out)) for t below tokens; rows of x and y lie x_stride and y_stride floats apart.
void MatMul(size_t tokens, const float* x, size_t x_stride, const Panels& w, float* y,
            size_t y_stride);

// Owns the panels of a matrix that is given as checkpoints have it.
class Matrix {
 public:
  Matrix() = default;
  // `rows` is [out, in].
  Matrix(const std::vector<float>& rows, size_t out, size_t in);

  Panels View() const { return {data_.data(), in_, out_, in_ * kPanel}; }

 private:
  size_t in_ = 0;
  size_t out_ = 0;
  std::vector<float> data_;
};

}  // namespace tinylm
