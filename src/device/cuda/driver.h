// The CUDA driver, found at run time: this library never links it, so one binary runs with a driver
// and without.
#pragma once

#include <cuda.h>

#include <string>
#include <utility>

#include "base/status.h"

namespace hotplane {

// Each name is the driver's own; its type comes from cuda.h.
#define HP_CUDA_ENTRY_POINTS(X)    \
  X(cuInit)                        \
  X(cuDriverGetVersion)            \
  X(cuGetErrorName)                \
  X(cuGetErrorString)              \
  X(cuDeviceGetCount)              \
  X(cuDeviceGet)                   \
  X(cuDeviceGetName)               \
  X(cuDeviceGetAttribute)          \
  X(cuDevicePrimaryCtxRetain)      \
  X(cuDevicePrimaryCtxRelease)     \
  X(cuCtxPushCurrent)              \
  X(cuCtxPopCurrent)               \
  X(cuCtxSynchronize)              \
  X(cuCtxGetStreamPriorityRange)   \
  X(cuMemGetInfo)                  \
  X(cuMemAlloc)                    \
  X(cuMemFree)                     \
  X(cuMemHostAlloc)                \
  X(cuMemFreeHost)                 \
  X(cuMemHostRegister)             \
  X(cuMemHostUnregister)           \
  X(cuMemAddressReserve)           \
  X(cuMemAddressFree)              \
  X(cuMemCreate)                   \
  X(cuMemRelease)                  \
  X(cuMemMap)                      \
  X(cuMemUnmap)                    \
  X(cuMemSetAccess)                \
  X(cuMemGetAllocationGranularity) \
  X(cuMemcpyHtoDAsync)             \
  X(cuMemcpyDtoH)                  \
  X(cuMemcpyDtoHAsync)             \
  X(cuMemsetD8)                    \
  X(cuStreamCreate)                \
  X(cuStreamCreateWithPriority)    \
  X(cuStreamDestroy)               \
  X(cuStreamSynchronize)           \
  X(cuStreamWaitEvent)             \
  X(cuEventCreate)                 \
  X(cuEventDestroy)                \
  X(cuEventRecord)                 \
  X(cuEventQuery)                  \
  X(cuEventSynchronize)            \
  X(cuModuleLoadData)              \
  X(cuModuleUnload)                \
  X(cuModuleGetFunction)           \
  X(cuFuncSetAttribute)            \
  X(cuLaunchKernel)                \
  X(cuLaunchKernelEx)

// Null where the driver has none.
#define HP_CUDA_OPTIONAL_ENTRY_POINTS(X) \
  X(cuLaunchHostFunc)                    \
  X(cuStreamIsCapturing)                 \
  X(cuStreamWaitValue32)

struct CudaDriver {
#define HP_CUDA_FIELD(name) decltype(&::name) name = nullptr;
  // The macros of cuda.h turn some of these names into those of their current versions, here and
  // where they are used alike.
  HP_CUDA_ENTRY_POINTS(HP_CUDA_FIELD)
  HP_CUDA_OPTIONAL_ENTRY_POINTS(HP_CUDA_FIELD)
#undef HP_CUDA_FIELD
  CUresult (*cuFuncLoad)(CUfunction) = nullptr;  // of CUDA 12.4; null before
  int version = 0;                               // 13000: CUDA 13.0
};

// Each once; the same answer at every call. kSystem with what to do. Finding takes milliseconds,
// starting some hundred.
Result<const CudaDriver*> FindCudaDriver();
Result<void> StartCudaDriver(const CudaDriver& driver);

// For failures of `what`: the driver's own words. Out of memory is kCapacity.
Status CudaStatus(const CudaDriver& driver, CUresult result, std::string what);

// A stream for the library's own work, of the context that is current. Of the highest priority: a
// stream of a caller that waits for a layer must not be before it in a queue of the hardware, which
// streams of one priority share.
Result<CUstream> NewCudaStream(const CudaDriver& driver);

// Loads the kernel now. Launched for the first time it might wait for all streams, also for those
// that wait for what it computes.
Result<void> LoadCudaKernel(const CudaDriver& driver, CUfunction kernel);

// The context is current on this thread while it lives; whatever was before is again afterwards.
class CurrentContext {
 public:
  CurrentContext(const CudaDriver& driver, CUcontext context) : driver_(driver) {
    (void)driver_.cuCtxPushCurrent(context);
  }
  ~CurrentContext() {
    CUcontext popped = nullptr;
    (void)driver_.cuCtxPopCurrent(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const CudaDriver& driver_;
};

}  // namespace hotplane

// Ends the function with a Status unless the driver's call succeeds.
#define HP_CUDA_TRY(driver, what, call)                                         \
  do {                                                                          \
    if (const CUresult hp_cuda_result = (call); hp_cuda_result != CUDA_SUCCESS) \
      return ::hotplane::Fail(CudaStatus((driver), hp_cuda_result, (what)));    \
  } while (false)
