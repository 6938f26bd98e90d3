// Device memory by the virtual memory calls: addresses are reserved once, memory comes in granules.
#pragma once

#include <memory>
#include <span>

#include "device/cuda/driver.h"
#include "device/device.h"

namespace hotplane {

// The context is current and outlives the arena.
Result<std::unique_ptr<DeviceArena>> AllocateCudaArena(const CudaDriver& driver, CUcontext context,
                                                       CUdevice device, uint64_t bytes,
                                                       std::span<const ByteRange> wanted);

}  // namespace hotplane
