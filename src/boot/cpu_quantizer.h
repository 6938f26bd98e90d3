// Matrices quantized by the CPU's kernels.
#pragma once

#include <memory>

#include "device/matrix_quantizer.h"
#include "quant/quantize.h"

namespace hotplane {

// Its calls never fail.
std::unique_ptr<MatrixQuantizer> NewCpuQuantizer(const Kernels& kernels);

}  // namespace hotplane
