// A CUDA device, and memory on it, for tests and benchmarks of the operator.
#pragma once

#include <dlfcn.h>

#include <cstring>
#include <span>
#include <vector>

#include "base/check.h"
#include "device/cuda/driver.h"
#include "moe/bfloat16.h"
#include "moe/cuda/cuda_moe.h"
#include "moe/moe_cases.h"

namespace hotplane::moe_cuda_testing {

// The context of device 0, current on this thread while it lives.
class Gpu {
 public:
  // Null, and `why`, where there is none.
  static std::unique_ptr<Gpu> Open(std::string* why) {
    const Result<const CudaDriver*> driver = FindCudaDriver();
    if (!driver) return Because(driver.error(), why);
    if (const Result<void> started = StartCudaDriver(**driver); !started)
      return Because(started.error(), why);
    std::unique_ptr<Gpu> gpu(new Gpu(**driver));
    if (gpu->driver.cuDeviceGet(&gpu->device, 0) != CUDA_SUCCESS ||
        gpu->driver.cuDevicePrimaryCtxRetain(&gpu->context, gpu->device) != CUDA_SUCCESS) {
      *why = "there is no device 0";
      return nullptr;
    }
    HP_CHECK(gpu->driver.cuCtxPushCurrent(gpu->context) == CUDA_SUCCESS);
    HP_CHECK(gpu->driver.cuStreamCreate(&gpu->stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    return gpu;
  }
  ~Gpu() {
    if (stream != nullptr) (void)driver.cuStreamDestroy(stream);
    CUcontext popped = nullptr;
    (void)driver.cuCtxPopCurrent(&popped);
    (void)driver.cuDevicePrimaryCtxRelease(device);
  }
  Gpu(const Gpu&) = delete;

  CUresult Wait() const { return driver.cuStreamSynchronize(stream); }

  const CudaDriver& driver;
  CUdevice device = 0;
  CUcontext context = nullptr;
  CUstream stream = nullptr;

 private:
  explicit Gpu(const CudaDriver& of) : driver(of) {}
  static std::unique_ptr<Gpu> Because(const Status& status, std::string* why) {
    *why = status.ToString();
    return nullptr;
  }
};

// Calls of the driver that only tests and benchmarks need; null where the driver has none.
struct GraphCalls {
#define HP_GRAPH_CALL(name, symbol) \
  decltype(&::name) name = reinterpret_cast<decltype(&::name)>(dlsym(library, symbol));
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  HP_GRAPH_CALL(cuStreamBeginCapture, "cuStreamBeginCapture_v2")
  HP_GRAPH_CALL(cuStreamEndCapture, "cuStreamEndCapture")
  HP_GRAPH_CALL(cuGraphInstantiate, "cuGraphInstantiateWithFlags")
  HP_GRAPH_CALL(cuGraphLaunch, "cuGraphLaunch")
  HP_GRAPH_CALL(cuGraphExecDestroy, "cuGraphExecDestroy")
  HP_GRAPH_CALL(cuGraphDestroy, "cuGraphDestroy")
  HP_GRAPH_CALL(cuEventElapsedTime, "cuEventElapsedTime")
#undef HP_GRAPH_CALL
};

// Device memory. Move-only.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Gpu& gpu, size_t bytes) : gpu_(&gpu), bytes_(bytes) {
    HP_CHECK(gpu.driver.cuMemAlloc(&address_, bytes + 256) == CUDA_SUCCESS);
  }
  template <typename T>
  Buffer(const Gpu& gpu, std::span<const T> values) : Buffer(gpu, values.size_bytes()) {
    HP_CHECK(gpu.driver.cuMemcpyHtoDAsync(address_, values.data(), values.size_bytes(),
                                          gpu.stream) == CUDA_SUCCESS);
    HP_CHECK(gpu.Wait() == CUDA_SUCCESS);
  }
  ~Buffer() {
    if (gpu_ != nullptr) (void)gpu_->driver.cuMemFree(address_);
  }
  Buffer(Buffer&& other) noexcept
      : gpu_(std::exchange(other.gpu_, nullptr)), address_(other.address_), bytes_(other.bytes_) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(gpu_, other.gpu_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(address_);
  }
  CUdeviceptr address() const { return address_; }
  size_t bytes() const { return bytes_; }
  template <typename T>
  std::vector<T> Download() const {
    std::vector<T> values(bytes_ / sizeof(T));
    HP_CHECK(gpu_->driver.cuMemcpyDtoH(values.data(), address_, bytes_) == CUDA_SUCCESS);
    return values;
  }

 private:
  const Gpu* gpu_ = nullptr;
  CUdeviceptr address_ = 0;
  size_t bytes_ = 0;
};

// A problem of the table with its arrays and planes on the device; x is rounded to bfloat16 in
// both places.
struct DeviceProblem {
  moe_cases::Problem host;
  std::vector<Buffer> planes;
  Buffer slots, wanted, x, ids, weights, y, workspace, refusal;
  CudaMoeCall call;

  DeviceProblem(const Gpu& gpu, const moe_cases::Case& c, uint32_t seed) : host(c, seed) {
    Upload(gpu);
  }

  void Upload(const Gpu& gpu) {
    using moe_cuda::ExpertSlot;
    planes.clear();
    host.call.arithmetic = Arithmetic::kBf16;
    std::vector<ExpertSlot> of_experts;
    std::vector<uint8_t> want;
    for (size_t e = 0; e < host.experts.size(); ++e) {
      const TestLayer::Expert& stored = host.layer.experts[e];
      const ExpertWeights& expert = host.experts[e];
      const auto put = [&](const std::byte* at, const std::vector<std::byte>& bytes) {
        if (at == nullptr) return static_cast<uint8_t*>(nullptr);
        planes.emplace_back(gpu, std::span<const std::byte>(bytes));
        return planes.back().as<uint8_t>();
      };
      const bool quintals = expert.fp_encoding == Encoding::kDeltaQuintal;
      ExpertSlot slot = {};
      slot.planes13 = put(expert.planes13, stored.planes13);
      slot.sc13 = put(expert.sc13, stored.sc13);
      slot.planes2 = put(expert.planes2, stored.planes2);
      slot.sc2 = put(expert.sc2, stored.sc2);
      slot.fp13 = put(expert.fp13, quintals ? stored.quintals13 : stored.nibbles13);
      slot.fp2 = put(expert.fp2, quintals ? stored.quintals2 : stored.nibbles2);
      if (host.call.geometry.biases) {
        slot.bias13 = reinterpret_cast<const float*>(put(expert.bias13, stored.bias13));
        slot.bias2 = reinterpret_cast<const float*>(put(expert.bias2, stored.bias2));
      }
      slot.fp_quintals = quintals && expert.fp13 != nullptr ? 1 : 0;
      of_experts.push_back(slot);
      want.push_back(expert.precision == Precision::kFp4 ? moe_cuda::kWantFp4
                                                         : moe_cuda::kWantBase);
    }
    std::vector<uint16_t> rounded;
    for (float& v : host.x) {
      rounded.push_back(ToBf16(v));
      v = FromBf16(rounded.back());
    }
    slots = Buffer(gpu, std::span<const ExpertSlot>(of_experts));
    wanted = Buffer(gpu, std::span<const uint8_t>(want));
    x = Buffer(gpu, std::span<const uint16_t>(rounded));
    ids = Buffer(gpu, std::span<const int32_t>(host.ids));
    weights = Buffer(gpu, std::span<const float>(host.weights));
    y = Buffer(gpu, host.y.size() * sizeof(uint16_t));
    call.geometry = host.call.geometry;
    call.activation = host.call.activation;
    call.token_count = static_cast<uint32_t>(host.call.token_count);
    call.top_k = static_cast<uint32_t>(host.call.top_k);
    workspace = Buffer(gpu, CudaMoe::WorkspaceBytes(call.geometry, call.token_count, call.top_k));
    refusal = Buffer(gpu, std::span<const moe_cuda::Refusal>(std::vector<moe_cuda::Refusal>(1)));
    call.slots = slots.as<ExpertSlot>();
    call.wanted = wanted.as<uint8_t>();
    call.x = x.as<uint16_t>();
    call.ids = ids.as<int32_t>();
    call.weights = weights.as<float>();
    call.y = y.as<uint16_t>();
    call.workspace = workspace.as<std::byte>();
    call.workspace_bytes = workspace.bytes();
    call.refusal = refusal.as<moe_cuda::Refusal>();
    Poison(gpu);
  }

  // Nothing is left of an earlier call; what is not said to be zero is not.
  void Poison(const Gpu& gpu) const {
    const auto fill = [&](CUdeviceptr at, unsigned char byte, size_t bytes) {
      HP_CHECK(bytes == 0 || gpu.driver.cuMemsetD8(at, byte, bytes) == CUDA_SUCCESS);
    };
    const uint64_t zeros = CudaMoe::kWorkspaceZeros;
    fill(workspace.address(), 0, zeros);
    fill(workspace.address() + zeros, 0xFF, workspace.bytes() - zeros);
    fill(y.address(), 0xFF, y.bytes());
    fill(refusal.address(), 0, refusal.bytes());
    HP_CHECK(gpu.driver.cuCtxSynchronize() == CUDA_SUCCESS);
  }
};

}  // namespace hotplane::moe_cuda_testing
