#include <immintrin.h>

#include <cstring>

#include "quant/avx2/vector.h"
#include "quant/exponent_rule.h"
#include "quant/kernel_tables.h"
#include "quant/scaled_rules.h"

namespace hotplane {
namespace {
#include "quant/simd_kernels.inc"
#include "quant/simd_scaled.inc"
}  // namespace

const Kernels kAvx2Kernels = {
    .isa = Isa::kAvx2,
    .name = "avx2",
    .pack_mxfp4 = PackMxfp4,
    .quantize = Quantize,
    .count_zeros = CountZeros,
    .quantize_nvfp4 = QuantizeNvfp4,
    .quantize_fp8 = QuantizeFp8,
    .count_zeros_nvfp4 = CountZerosNvfp4,
    .count_zeros_fp8 = CountZerosFp8,
    .unpack_nibbles = UnpackNibbles,
    .unpack_scales = UnpackScales,
    .unpack_codes = UnpackCodes,
    .derive_codes = DeriveCodes,
    .derive_quintals = DeriveQuintals,
    .merge = Merge,
};

}  // namespace hotplane
