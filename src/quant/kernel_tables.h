// The variants. Each is a translation unit of its own, compiled with its own instruction set; those
// units keep everything but their table in an anonymous namespace, so that the linker cannot take
// their code for another's.
#pragma once

#include "quant/quantize.h"

namespace hotplane {

extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace hotplane
