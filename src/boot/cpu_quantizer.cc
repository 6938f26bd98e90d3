#include "boot/cpu_quantizer.h"

#include <algorithm>

#include "base/check.h"

namespace hotplane {
namespace {

MatrixCounts CountsOf(const ZeroCount& zeros) {
  return {zeros.positive, zeros.negative, zeros.finite};
}

class CpuQuantizer final : public MatrixQuantizer {
 public:
  explicit CpuQuantizer(const Kernels& kernels) : kernels_(kernels) {}

  Result<MatrixCounts> Load(const MatrixSource& source) override {
    source_ = source;
    const std::byte* const elements = source.elements.data();
    switch (source.format) {
      case SourceFormat::kMxfp4: {
        const auto nan = std::find(source.scales.begin(), source.scales.end(), std::byte{kE8m0NaN});
        return MatrixCounts{.usable = nan == source.scales.end()};
      }
      case SourceFormat::kNvfp4:
        return CountsOf(
            kernels_.count_zeros_nvfp4(elements, source.scales.data(), source.n * source.k));
      case SourceFormat::kFp8: return CountsOf(kernels_.count_zeros_fp8(Fp8(), source.n, source.k));
      default: return CountsOf(kernels_.count_zeros(source.format, elements, source.n * source.k));
    }
  }

  Result<void> Quantize(bool alternate_zeros, const MatrixPlanes& planes) override {
    const std::byte* const elements = source_.elements.data();
    const size_t n = source_.n;
    const size_t k = source_.k;
    const PlaneOutputs out = {planes.codes, planes.scales, planes.nibbles, planes.quintals};
    switch (source_.format) {
      case SourceFormat::kMxfp4:
        HP_CHECK(kernels_.pack_mxfp4(elements, source_.scales.data(), n, k, out));
        break;
      case SourceFormat::kNvfp4:
        kernels_.quantize_nvfp4(
            {elements, source_.scales.data(), source_.global_scale, source_.divide}, n, k,
            alternate_zeros, out);
        break;
      case SourceFormat::kFp8: kernels_.quantize_fp8(Fp8(), n, k, alternate_zeros, out); break;
      default: kernels_.quantize(source_.format, elements, n, k, alternate_zeros, out);
    }
    return {};
  }

 private:
  Fp8Matrix Fp8() const {
    return {source_.elements.data(), source_.block_scales.data(), source_.block_rows,
            source_.block_columns};
  }

  const Kernels& kernels_;
  MatrixSource source_;
};

}  // namespace

std::unique_ptr<MatrixQuantizer> NewCpuQuantizer(const Kernels& kernels) {
  return std::make_unique<CpuQuantizer>(kernels);
}

}  // namespace hotplane
