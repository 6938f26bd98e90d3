#include "device/cuda/cuda_quantizer.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/units.h"
#include "device/cuda/pinned_memory.h"
#include "device/cuda/quantize_args.h"

namespace hotplane {

// Made from quantize_kernel.cu by the build.
extern const unsigned char kQuantizeKernelImage[];

namespace {

// Device memory at one address. In every call the context is current.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(const CudaDriver& driver) : driver_(driver) {}
  ~DeviceBuffer() { HP_CHECK(address_ == 0); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  Result<void> Allocate(uint64_t bytes) {
    HP_CUDA_TRY(driver_, Text("cannot allocate {} of device memory", FormatBytes(bytes)),
                driver_.cuMemAlloc(&address_, bytes));
    return {};
  }
  void Free() {
    if (address_ != 0) (void)driver_.cuMemFree(address_);
    address_ = 0;
  }
  CUdeviceptr At(uint64_t offset) const { return address_ + offset; }
  uint8_t* Pointer(uint64_t offset) const { return reinterpret_cast<uint8_t*>(address_ + offset); }

 private:
  const CudaDriver& driver_;
  CUdeviceptr address_ = 0;
};

class CudaQuantizer final : public MatrixQuantizer {
 public:
  CudaQuantizer(const CudaDriver& driver, CUcontext context, const QuantizeKernels& kernels)
      : driver_(driver), context_(context), kernels_(kernels), memory_(driver) {}

  ~CudaQuantizer() override {
    const CurrentContext current(driver_, context_);
    // After a failure copies may still be on their way to and from the host's memory.
    if (stream_ != nullptr) (void)driver_.cuStreamSynchronize(stream_);
    for (std::byte* memory : registered_)
      if (memory != nullptr) (void)driver_.cuMemHostUnregister(memory);
    memory_.Free();
    if (done_ != nullptr) (void)driver_.cuEventDestroy(done_);
    if (stream_ != nullptr) (void)driver_.cuStreamDestroy(stream_);
  }

  Result<void> Open(const QuantizerOptions& options);
  // What is given back by calls that wait for all streams of the context.
  bool holds_memory() const { return memory_.At(0) != 0 || counts_.data() != nullptr; }
  Result<MatrixCounts> Load(const MatrixSource& source) override;
  Result<void> Quantize(bool alternate_zeros, const MatrixPlanes& planes) override;

 private:
  // A plane, where it is wanted, and where it is made.
  struct Part {
    std::byte* host;
    uint64_t bytes;
    std::byte* device;
  };
  using Parts = std::array<Part, 4>;  // codes, scales, nibbles, quintals

  Result<void> Register(std::span<std::byte> memory, std::byte** registered);
  Result<void> Upload(CUdeviceptr to, std::span<const std::byte> from);
  Result<void> Wait();
  Parts PlaceParts(const MatrixPlanes& planes) const;
  unsigned BlockCount() const {
    const uint64_t blocks = (tile::TileCount(loaded_) + kQuantizeWarps - 1) / kQuantizeWarps;
    return static_cast<unsigned>(std::min<uint64_t>(blocks, kQuantizeBlocksMax));
  }
  Result<void> Launch(CUfunction kernel, void** arguments) {
    HP_CUDA_TRY(driver_, "cannot launch a quantization kernel",
                driver_.cuLaunchKernel(kernel, BlockCount(), 1, 1, kQuantizeThreads, 1, 1, 0,
                                       stream_, arguments, nullptr));
    return {};
  }

  const CudaDriver& driver_;
  const CUcontext context_;
  const QuantizeKernels& kernels_;
  CUstream stream_ = nullptr;
  CUevent done_ = nullptr;
  DeviceBuffer memory_;  // of the sources, then the planes, then the thresholds
  uint64_t planes_at_ = 0;
  uint64_t thresholds_at_ = 0;
  SharedArray<tile::Counts> counts_;
  std::array<std::byte*, 2> registered_ = {};
  tile::Source loaded_ = {};
};

Result<void> CudaQuantizer::Register(std::span<std::byte> memory, std::byte** registered) {
  if (memory.empty()) return {};
  HP_CUDA_TRY(driver_, Text("cannot register {} of host memory", FormatBytes(memory.size())),
              driver_.cuMemHostRegister(memory.data(), memory.size(), CU_MEMHOSTREGISTER_PORTABLE));
  *registered = memory.data();
  return {};
}

Result<void> CudaQuantizer::Open(const QuantizerOptions& options) {
  HP_ASSIGN(stream_, NewCudaStream(driver_));
  HP_CUDA_TRY(driver_, "cannot create a CUDA event",
              driver_.cuEventCreate(&done_, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC));
  HP_CHECK(options.thresholds.size() == tile::kThresholdCount);
  planes_at_ = RoundUp(options.source_bytes, kQuantizerAlignBytes);
  thresholds_at_ = planes_at_ + RoundUp(options.plane_bytes, kQuantizerAlignBytes);
  // At once: where the device has no room, there is nothing to give back.
  HP_TRY(memory_.Allocate(thresholds_at_ + options.thresholds.size_bytes()));
  HP_TRY(counts_.Allocate(driver_, context_, kQuantizeBlocksMax));
  HP_TRY(Upload(memory_.At(thresholds_at_), std::as_bytes(options.thresholds)));
  HP_TRY(Wait());
  // Last: what fails keeps no memory of the caller's.
  HP_TRY(Register(options.host_planes, &registered_[1]));
  Result<void> sources = Register(options.host_sources, &registered_[0]);
  if (!sources && registered_[1] != nullptr)
    (void)driver_.cuMemHostUnregister(std::exchange(registered_[1], nullptr));
  return sources;
}

Result<void> CudaQuantizer::Upload(CUdeviceptr to, std::span<const std::byte> from) {
  if (from.empty()) return {};
  HP_CUDA_TRY(driver_, "cannot copy a matrix to the device",
              driver_.cuMemcpyHtoDAsync(to, from.data(), from.size(), stream_));
  return {};
}

Result<void> CudaQuantizer::Wait() {
  HP_CUDA_TRY(driver_, "cannot record a CUDA event", driver_.cuEventRecord(done_, stream_));
  HP_CUDA_TRY(driver_, "the device failed while it quantized", driver_.cuEventSynchronize(done_));
  return {};
}

Result<MatrixCounts> CudaQuantizer::Load(const MatrixSource& source) {
  const CurrentContext current(driver_, context_);
  const uint64_t scales = RoundUp(source.elements.size(), kQuantizerAlignBytes);
  const std::span<const std::byte> block_scales = std::as_bytes(source.block_scales);
  HP_CHECK(source.scales.empty() || block_scales.empty());
  HP_CHECK(scales + source.scales.size() + block_scales.size() <= planes_at_);
  HP_TRY(Upload(memory_.At(0), source.elements));
  HP_TRY(Upload(memory_.At(scales), source.scales));
  HP_TRY(Upload(memory_.At(scales), block_scales));
  loaded_ = {.elements = memory_.Pointer(0),
             .scales = memory_.Pointer(scales),
             .block_scales = reinterpret_cast<const double*>(memory_.Pointer(scales)),
             .global_scale = source.global_scale,
             .n = source.n,
             .k = source.k,
             .block_rows = static_cast<uint32_t>(source.block_rows),
             .block_columns = static_cast<uint32_t>(source.block_columns),
             .format = source.format,
             .divide = source.divide};
  tile::Counts* counts = counts_.data();
  void* arguments[] = {&loaded_, &counts};
  HP_TRY(Launch(kernels_.count(), arguments));
  HP_TRY(Wait());
  MatrixCounts sum;
  for (const tile::Counts& of_block : std::span(counts, BlockCount())) {
    sum.positive_zeros += of_block.positive_zeros;
    sum.negative_zeros += of_block.negative_zeros;
    sum.usable = sum.usable && of_block.unusable == 0;
  }
  return sum;
}

CudaQuantizer::Parts CudaQuantizer::PlaceParts(const MatrixPlanes& planes) const {
  const size_t n = loaded_.n;
  const size_t k = loaded_.k;
  Parts parts = {{{planes.codes, CodePlaneBytes(n, k), planes.device_codes},
                  {planes.scales, ScalePlaneBytes(n, k), planes.device_scales},
                  {planes.nibbles, NibblePlaneBytes(n, k), nullptr},
                  {planes.quintals, QuintalPlaneBytes(n, k), nullptr}}};
  uint64_t offset = planes_at_;
  for (Part& part : parts) {
    if (part.host == nullptr || part.device != nullptr) continue;
    part.device = reinterpret_cast<std::byte*>(memory_.At(offset));
    offset += RoundUp(part.bytes, kQuantizerAlignBytes);
  }
  HP_CHECK(offset <= thresholds_at_);
  return parts;
}

Result<void> CudaQuantizer::Quantize(bool alternate_zeros, const MatrixPlanes& planes) {
  const CurrentContext current(driver_, context_);
  const Parts parts = PlaceParts(planes);
  const auto pointer = [](const Part& part) {
    return part.host != nullptr ? reinterpret_cast<uint8_t*>(part.device) : nullptr;
  };
  tile::Planes made = {pointer(parts[0]), pointer(parts[1]), pointer(parts[2]), pointer(parts[3])};
  const uint8_t* thresholds = memory_.Pointer(thresholds_at_);
  uint32_t alternate = alternate_zeros ? 1 : 0;
  void* arguments[] = {&loaded_, &made, &thresholds, &alternate};
  HP_TRY(Launch(kernels_.quantize(), arguments));
  for (const Part& part : parts)
    if (part.host != nullptr)
      HP_CUDA_TRY(driver_, "cannot copy planes from the device",
                  driver_.cuMemcpyDtoHAsync(part.host, reinterpret_cast<CUdeviceptr>(part.device),
                                            part.bytes, stream_));
  return Wait();
}

}  // namespace

QuantizeKernels::~QuantizeKernels() {
  const CurrentContext current(driver_, context_);
  if (module_ != nullptr) (void)driver_.cuModuleUnload(module_);
}

Result<bool> QuantizeKernels::Load() {
  const std::lock_guard lock(mutex_);
  if (count_ != nullptr && quantize_ != nullptr) return true;
  if (module_ == nullptr) {
    const CUresult loaded = driver_.cuModuleLoadData(&module_, kQuantizeKernelImage);
    if (loaded == CUDA_ERROR_NO_BINARY_FOR_GPU) {
      module_ = nullptr;
      return false;
    }
    HP_CUDA_TRY(driver_, "cannot load the CUDA kernels", loaded);
  }
  HP_CUDA_TRY(driver_, "cannot find a quantization kernel",
              driver_.cuModuleGetFunction(&count_, module_, kCountKernelName));
  HP_CUDA_TRY(driver_, "cannot find a quantization kernel",
              driver_.cuModuleGetFunction(&quantize_, module_, kQuantizeKernelName));
  HP_TRY(LoadCudaKernel(driver_, count_));
  HP_TRY(LoadCudaKernel(driver_, quantize_));
  return true;
}

Result<std::unique_ptr<MatrixQuantizer>> NewCudaQuantizer(const CudaDriver& driver,
                                                          CUcontext context,
                                                          const QuantizeKernels& kernels,
                                                          const QuantizerOptions& options,
                                                          KeptQuantizers& kept) {
  auto quantizer = std::make_unique<CudaQuantizer>(driver, context, kernels);
  if (Result<void> opened = quantizer->Open(options); !opened) {
    if (quantizer->holds_memory()) kept.Keep(std::move(quantizer));
    return Fail(std::move(opened).error());
  }
  return std::unique_ptr<MatrixQuantizer>(std::move(quantizer));
}

}  // namespace hotplane
