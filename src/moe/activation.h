// Activations of a MoE layer, and their int8 form for the fast arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/manifest.h"
#include "moe/kernels.h"

namespace hotplane {

// out[i] = act(gate[i], up[i]) in float32 (ActivationKind has the formulas), each operation rounded
// once; exp with a relative error below 2^-22. The same to the bit on every CPU. `out` may be
// `gate`.
void Activate(const Activation& activation, const float* gate, const float* up, size_t count,
              float* out);

// values[ValuePlace(i)] = round-half-even(x[i] / scale) with scale = amax/127 for each block of 32;
// a block whose amax is below 2^-100 is zeros, the scale of one with infinity or NaN is that.
// starts[f] are those of QuantizedRow for both strip formats. `count` is a multiple of 32.
void QuantizeActivations(const float* x, size_t count, int8_t* values, float* scales,
                         int32_t* const starts[kStripFormats]);

}  // namespace hotplane
