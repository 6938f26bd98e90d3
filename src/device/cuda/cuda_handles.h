// What a CUDA Device stands on, for those who enqueue work of their own on it.
#pragma once

#include "device/cuda/driver.h"

namespace hotplane {

// Of the device's primary context, which lives as long as the Device.
struct CudaHandles {
  const CudaDriver* driver = nullptr;
  CUcontext context = nullptr;
  CUdevice device = 0;
};

}  // namespace hotplane
