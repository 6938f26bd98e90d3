#include "device/cuda/driver.h"

#include <dlfcn.h>

#include "base/format_text.h"

namespace hotplane {
namespace {

// The interface is that of CUDA 12: all that must be there is in it.
constexpr int kInterfaceVersion = 12000;

#define HP_STRING(name) HP_STRING_OF(name)
#define HP_STRING_OF(name) #name

Status NoDriver(std::string found) {
  return Status::System("the CUDA driver cannot be used")
      .Expected("libcuda.so.1, of CUDA 12 or newer")
      .Found(std::move(found))
      .Advice("install the NVIDIA driver, or take --device cpu");
}

// "cuMemAlloc_v2" is asked for as "cuMemAlloc": the driver picks the version.
std::string PlainName(std::string name) {
  const size_t suffix = name.rfind("_v");
  if (suffix != std::string::npos && suffix + 3 == name.size()) name.resize(suffix);
  return name;
}

using GetProcAddress = decltype(&::cuGetProcAddress);

template <typename Function>
bool Find(GetProcAddress get, const char* name, Function* out, int version = kInterfaceVersion) {
  void* address = nullptr;
  CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SUCCESS;
  const CUresult result =
      get(PlainName(name).c_str(), &address, version, CU_GET_PROC_ADDRESS_DEFAULT, &found);
  if (result != CUDA_SUCCESS || address == nullptr) return false;
  *out = reinterpret_cast<Function>(address);
  return true;
}

Result<const CudaDriver*> Load() {
  static CudaDriver driver;
  // Never unloaded: the driver keeps threads of its own.
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const error = dlerror();
    return Fail(NoDriver(error != nullptr ? error : "no libcuda.so.1"));
  }
  const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, HP_STRING(cuGetProcAddress)));
  if (get == nullptr) return Fail(NoDriver("a driver older than CUDA 12"));
#define HP_CUDA_FIND(name) \
  if (!Find(get, HP_STRING(name), &driver.name)) return Fail(NoDriver("no " HP_STRING(name)));
  HP_CUDA_ENTRY_POINTS(HP_CUDA_FIND)
#undef HP_CUDA_FIND
#define HP_CUDA_FIND(name) (void)Find(get, HP_STRING(name), &driver.name);
  HP_CUDA_OPTIONAL_ENTRY_POINTS(HP_CUDA_FIND)
#undef HP_CUDA_FIND
  (void)Find(get, "cuFuncLoad", &driver.cuFuncLoad, 12040);
  (void)driver.cuDriverGetVersion(&driver.version);
  return &driver;
}

}  // namespace

Result<const CudaDriver*> FindCudaDriver() {
  static const Result<const CudaDriver*> found = Load();
  return found;
}

Result<void> StartCudaDriver(const CudaDriver& driver) {
  static const CUresult result = driver.cuInit(0);
  if (result == CUDA_SUCCESS) return {};
  return Fail(CudaStatus(driver, result, "cannot start the CUDA driver")
                  .Advice("`nvidia-smi` tells whether a GPU is there and healthy; or take "
                          "--device cpu"));
}

Status CudaStatus(const CudaDriver& driver, CUresult result, std::string what) {
  const char* name = nullptr;
  const char* text = nullptr;
  (void)driver.cuGetErrorName(result, &name);
  (void)driver.cuGetErrorString(result, &text);
  std::string found = Text("CUDA error {}: {}, {}", static_cast<int>(result),
                           name != nullptr ? name : "unknown", text != nullptr ? text : "");
  if (result == CUDA_ERROR_OUT_OF_MEMORY)
    return Status::Capacity(std::move(what)).Found(std::move(found));
  return Status::System(std::move(what)).Found(std::move(found));
}

Result<CUstream> NewCudaStream(const CudaDriver& driver) {
  int least = 0;
  int greatest = 0;
  HP_CUDA_TRY(driver, "cannot ask for the priorities of CUDA streams",
              driver.cuCtxGetStreamPriorityRange(&least, &greatest));
  CUstream stream = nullptr;
  HP_CUDA_TRY(driver, "cannot create a CUDA stream",
              driver.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, greatest));
  return stream;
}

Result<void> LoadCudaKernel(const CudaDriver& driver, CUfunction kernel) {
  if (driver.cuFuncLoad == nullptr) return {};
  HP_CUDA_TRY(driver, "cannot load a CUDA kernel", driver.cuFuncLoad(kernel));
  return {};
}

}  // namespace hotplane
