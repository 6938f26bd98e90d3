#include <immintrin.h>

#include <cstring>

#include "quant/avx512/vector.h"
#include "quant/exponent_rule.h"
#include "quant/kernel_tables.h"

namespace hotplane {
namespace {
#include "quant/simd_kernels.inc"
}  // namespace

const Kernels kAvx512Kernels = {
    .isa = Isa::kAvx512,
    .name = "avx512",
    .pack_mxfp4 = PackMxfp4,
    .quantize = Quantize,
    .count_zeros = CountZeros,
    .unpack_nibbles = UnpackNibbles,
    .unpack_scales = UnpackScales,
    .unpack_codes = UnpackCodes,
    .derive_codes = DeriveCodes,
    .derive_quintals = DeriveQuintals,
    .merge = Merge,
};

}  // namespace hotplane
