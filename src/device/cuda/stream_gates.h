// Gates for streams of a CUDA device: device/device.h.
#pragma once

#include <memory>

#include "device/cuda/driver.h"
#include "device/device.h"

namespace hotplane {

// `context` outlives them.
Result<std::unique_ptr<StreamGates>> NewCudaStreamGates(const CudaDriver& driver, CUcontext context,
                                                        size_t count);

}  // namespace hotplane
