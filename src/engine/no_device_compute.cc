// The operator on devices, of a build without them.
#include "engine/device_compute.h"

namespace hotplane {

Result<std::unique_ptr<DeviceCompute>> NewDeviceCompute(Device&, std::span<const uint32_t>) {
  return Fail(Status::System("this build computes no experts on a device")
                  .Advice("build where `nvcc` is found, with -DHOTPLANE_CUDA=ON"));
}

uint64_t DeviceWorkspaceBytes(const LayerGeometry&, uint32_t, uint32_t) { return 0; }

}  // namespace hotplane
