// The CUDA device of a build without CUDA.
#include "device/device.h"

namespace hotplane {

Result<std::unique_ptr<Device>> OpenCudaDevice(int, const DeviceOptions&) {
  return Fail(Status::System("this build has no CUDA")
                  .Advice("build where `nvcc` is found, with -DHOTPLANE_CUDA=ON; or take "
                          "--device cpu"));
}

int CudaDeviceCount() { return 0; }

}  // namespace hotplane
