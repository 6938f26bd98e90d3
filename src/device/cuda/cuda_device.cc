#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <mutex>

#include "base/check.h"
#include "base/log.h"
#include "base/topology.h"
#include "base/units.h"
#include "device/cuda/copy_lane.h"
#include "device/cuda/cuda_arena.h"
#include "device/cuda/cuda_handles.h"
#include "device/cuda/cuda_quantizer.h"
#include "device/cuda/mapped_windows.h"
#include "device/cuda/rates.h"
#include "device/cuda/stream_gates.h"
#include "device/cuda/verifier.h"
#include "device/device.h"
#include "device/slot_ring.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Where one stream is between two copies, the other copies.
constexpr size_t kLaneCount = 2;
constexpr uint64_t kRingBytesMax = kGiB;

class CudaLanding final : public LandingDevice {
 public:
  CudaLanding(const CudaDriver& driver, CUcontext context, PinnedRing& ring, CudaVerifier& verifier,
              bool verifies, const DeviceOptions& options, std::atomic<bool>& landing)
      : driver_(driver),
        context_(context),
        memory_(ring),
        verifier_(verifier),
        piece_bytes_(options.piece_bytes),
        verifies_(verifies),
        landing_(landing),
        lanes_{CopyLane(driver), CopyLane(driver)},
        windows_(driver, options),
        ring_(ring.bytes()) {}

  ~CudaLanding() override {
    {
      const CurrentContext current(driver_, context_);
      for (CopyLane& lane : lanes_) lane.Close();
      windows_.Close();
      // After a failure a launch may still read what landed, which is about to be given back.
      verifier_.Drain();
    }
    landing_ = false;
  }

  Result<void> Open() {
    const CurrentContext current(driver_, context_);
    for (CopyLane& lane : lanes_) HP_TRY(lane.Open());
    return windows_.Open();
  }

  std::byte* Stage(std::byte*, uint64_t bytes) override {
    const std::lock_guard lock(mutex_);
    std::optional<uint64_t> offset = ring_.Take(bytes);
    if (!offset) {
      Reclaim();
      offset = ring_.Take(bytes);
    }
    return offset ? memory_.data() + *offset : nullptr;
  }

  Result<void> Land(std::byte* staged, std::byte* destination, uint64_t bytes) override {
    const CurrentContext current(driver_, context_);
    const auto offset = static_cast<uint64_t>(staged - memory_.data());
    return lanes_[next_lane_++ % kLaneCount].Copy(destination, staged, {offset, bytes});
  }

  Result<void> Wait() override {
    return Settle(nullptr, {}).map([](const std::vector<LandedMismatch>&) {});
  }

  uint64_t mapped_window_bytes() const override { return verifies_ ? windows_.window_bytes() : 0; }
  size_t mapped_worker_count() const override { return windows_.worker_count(); }
  Result<bool> LandMapped(std::span<const std::byte> source, std::byte* destination) override {
    const CurrentContext current(driver_, context_);
    return windows_.Land(source, destination);
  }

  uint64_t piece_bytes() const override { return piece_bytes_; }
  bool verifies() const override { return verifies_; }

  Result<std::vector<LandedMismatch>> Settle(const std::byte* destination,
                                             std::span<const LandedCheck> checks) override {
    const std::lock_guard lock(settle_mutex_);
    const CurrentContext current(driver_, context_);
    for (CopyLane& lane : lanes_) HP_TRY(lane.Order(verifier_.stream()));
    HP_TRY(windows_.lane().Order(verifier_.stream()));
    return verifier_.Compare(destination, checks);
  }

 private:
  // REQUIRES mutex_.
  void Reclaim() {
    const CurrentContext current(driver_, context_);
    done_.clear();
    for (CopyLane& lane : lanes_) lane.TakeDone(&done_);
    for (const CopyLane::Slot& slot : done_) ring_.Give(slot.offset, slot.bytes);
  }

  const CudaDriver& driver_;
  const CUcontext context_;
  PinnedRing& memory_;
  CudaVerifier& verifier_;
  const uint64_t piece_bytes_;
  const bool verifies_;
  std::atomic<bool>& landing_;
  std::array<CopyLane, kLaneCount> lanes_;
  MappedWindows windows_;
  std::atomic<size_t> next_lane_{0};
  std::mutex settle_mutex_;
  std::mutex mutex_;  // guards what follows
  SlotRing ring_;
  std::vector<CopyLane::Slot> done_;
};

class CudaHostRegistration final : public HostRegistration {
 public:
  CudaHostRegistration(const CudaDriver& driver, CUcontext context, std::byte* memory)
      : driver_(driver), context_(context), memory_(memory) {}
  ~CudaHostRegistration() override {
    const CurrentContext current(driver_, context_);
    (void)driver_.cuMemHostUnregister(memory_);
  }

 private:
  const CudaDriver& driver_;
  const CUcontext context_;
  std::byte* const memory_;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(const CudaDriver& driver, int ordinal, const DeviceOptions& options)
      : driver_(driver), ordinal_(ordinal), options_(options) {}

  ~CudaDevice() override {
    if (upload_stream_ != nullptr) {
      const CurrentContext current(driver_, context_);
      (void)driver_.cuStreamDestroy(upload_stream_);
    }
    kept_quantizers_.reset();
    quantize_kernels_.reset();
    verifier_.reset();
    ring_.reset();
    if (context_ != nullptr) (void)driver_.cuDevicePrimaryCtxRelease(device_);
  }

  Result<void> Open();

  std::string name() const override { return Text("cuda:{}, {}", ordinal_, model_); }
  int ordinal() const override { return ordinal_; }
  uint64_t pinned_bytes() const override { return ring_->bytes(); }
  DeviceTimes times() const override { return times_; }
  DeviceMemory memory_at_open() const override { return memory_at_open_; }
  const CudaHandles& cuda() const override { return handles_; }

  Result<DeviceMemory> Memory() const override {
    const CurrentContext current(driver_, context_);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    HP_CUDA_TRY(driver_, "cannot ask for the free device memory",
                driver_.cuMemGetInfo(&free_bytes, &total_bytes));
    return DeviceMemory{free_bytes, total_bytes};
  }

  Result<std::unique_ptr<DeviceArena>> Allocate(uint64_t bytes,
                                                std::span<const ByteRange> wanted) override {
    const CurrentContext current(driver_, context_);
    Result<std::unique_ptr<DeviceArena>> arena =
        AllocateCudaArena(driver_, context_, device_, bytes, wanted);
    if (arena || arena.error().code() != StatusCode::kCapacity) return arena;
    uint64_t wanted_bytes = 0;
    for (const ByteRange& range : wanted) wanted_bytes += range.bytes;
    const Result<DeviceMemory> memory = Memory();
    return Fail(
        Status::Capacity("the planes do not fit in device memory")
            .Expected(FormatBytes(wanted_bytes))
            .Found(Text("{} free of {} ({})", FormatBytes(memory ? memory->free_bytes : 0),
                        FormatBytes(memory ? memory->total_bytes : 0), arena.error().what()))
            .Advice("end what else uses the GPU, boot fewer --layers, or --base auto"));
  }

  Result<std::unique_ptr<LandingDevice>> BeginLanding() override {
    HP_CHECK(!landing_.exchange(true));
    auto landing = std::make_unique<CudaLanding>(driver_, context_, *ring_, *verifier_, verifies(),
                                                 options_, landing_);
    HP_TRY(landing->Open());
    return std::unique_ptr<LandingDevice>(std::move(landing));
  }

  Result<void> LoadQuantizer() override {
    const CurrentContext current(driver_, context_);
    return quantize_kernels_->Load().map([](bool) {});
  }

  Result<std::unique_ptr<MatrixQuantizer>> NewQuantizer(const QuantizerOptions& options) override {
    const CurrentContext current(driver_, context_);
    HP_ASSIGN(const bool has_kernels, quantize_kernels_->Load());
    if (!has_kernels) return std::unique_ptr<MatrixQuantizer>();
    return NewCudaQuantizer(driver_, context_, *quantize_kernels_, options, *kept_quantizers_);
  }

  Result<std::unique_ptr<StreamGates>> NewGates(size_t count) override {
    return NewCudaStreamGates(driver_, context_, count);
  }

  Result<std::unique_ptr<HostRegistration>> Register(std::span<std::byte> memory) override {
    const CurrentContext current(driver_, context_);
    HP_CUDA_TRY(
        driver_, Text("cannot register {} of host memory", FormatBytes(memory.size())),
        driver_.cuMemHostRegister(memory.data(), memory.size(), CU_MEMHOSTREGISTER_PORTABLE));
    return std::make_unique<CudaHostRegistration>(driver_, context_, memory.data());
  }

  bool verifies() const override { return options_.verify_on_device && verifier_->has_kernel(); }

  Result<void> Upload(std::span<const std::byte> from, std::byte* to) override {
    const std::lock_guard lock(upload_mutex_);
    const CurrentContext current(driver_, context_);
    if (upload_stream_ == nullptr) {
      HP_ASSIGN(upload_stream_, NewCudaStream(driver_));
    }
    HP_CUDA_TRY(driver_, "cannot copy to the device",
                driver_.cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to), from.data(),
                                          from.size(), upload_stream_));
    const CUresult waited = driver_.cuStreamSynchronize(upload_stream_);
    // A wait that fails does not say that the copy has ended.
    if (waited != CUDA_SUCCESS) (void)driver_.cuStreamSynchronize(upload_stream_);
    HP_CUDA_TRY(driver_, "cannot copy to the device", waited);
    return {};
  }

  Result<void> Download(const std::byte* from, std::span<std::byte> to) const override {
    const CurrentContext current(driver_, context_);
    HP_CUDA_TRY(driver_, "cannot copy from the device",
                driver_.cuMemcpyDtoH(to.data(), reinterpret_cast<CUdeviceptr>(from), to.size()));
    return {};
  }

  Result<DeviceRates> MeasureRates() override {
    HP_CHECK(!landing_);
    const CurrentContext current(driver_, context_);
    return MeasureCudaRates(driver_, *ring_, *verifier_, options_.piece_bytes);
  }

  Result<RegistrationRates> MeasureRegistration(std::span<const std::byte> pages) override {
    const CurrentContext current(driver_, context_);
    return MeasureCudaRegistration(driver_, pages, options_.mapped_window_bytes);
  }

 private:
  Result<void> OpenContext();

  const CudaDriver& driver_;
  const int ordinal_;
  const DeviceOptions options_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CudaHandles handles_;
  std::string model_;
  DeviceTimes times_;
  DeviceMemory memory_at_open_;
  std::atomic<bool> landing_{false};
  std::unique_ptr<PinnedRing> ring_;
  std::unique_ptr<CudaVerifier> verifier_;
  std::unique_ptr<QuantizeKernels> quantize_kernels_;
  std::unique_ptr<KeptQuantizers> kept_quantizers_ = std::make_unique<KeptQuantizers>();
  std::mutex upload_mutex_;
  CUstream upload_stream_ = nullptr;  // guarded by it; made by the first upload
};

Result<void> CudaDevice::OpenContext() {
  HP_TRY(StartCudaDriver(driver_));
  int count = 0;
  HP_CUDA_TRY(driver_, "cannot list the CUDA devices", driver_.cuDeviceGetCount(&count));
  if (ordinal_ >= count)
    return Fail(Status::System(Text("there is no device cuda:{}", ordinal_))
                    .Expected(count == 0 ? std::string("a GPU that this process may see")
                                         : Text("cuda:0 to cuda:{}", count - 1))
                    .Advice("`nvidia-smi` lists them; CUDA_VISIBLE_DEVICES may hide some; or take "
                            "--device cpu"));
  HP_CUDA_TRY(driver_, "cannot open the CUDA device", driver_.cuDeviceGet(&device_, ordinal_));
  char text[256] = "";
  (void)driver_.cuDeviceGetName(text, sizeof(text) - 1, device_);
  model_ = text;
  HP_CUDA_TRY(driver_, "cannot create a CUDA context",
              driver_.cuDevicePrimaryCtxRetain(&context_, device_));
  handles_ = {&driver_, context_, device_};
  HP_ASSIGN(memory_at_open_, Memory());
  return {};
}

Result<void> CudaDevice::Open() {
  const auto start = Clock::now();
  ring_ = std::make_unique<PinnedRing>();
  const size_t threads = options_.thread_count != 0 ? options_.thread_count : UsableCpuCount();
  HP_TRY(ring_->Begin(options_.ring_bytes, threads));
  HP_TRY(OpenContext());
  times_.context = SecondsSince(start);
  const auto ring_start = Clock::now();
  const CurrentContext current(driver_, context_);
  HP_TRY(ring_->Register(driver_, context_));
  times_.ring = SecondsSince(ring_start);
  verifier_ = std::make_unique<CudaVerifier>(driver_, context_);
  HP_TRY(verifier_->Open());
  quantize_kernels_ = std::make_unique<QuantizeKernels>(driver_, context_);
  times_.all = SecondsSince(start);
  Log(LogLevel::kInfo, "{}: context {}, ring of {} {}, all {}", name(),
      FormatSeconds(times_.context), FormatBytes(ring_->bytes()), FormatSeconds(times_.ring),
      FormatSeconds(times_.all));
  return {};
}

}  // namespace

Result<std::unique_ptr<Device>> OpenCudaDevice(int ordinal, const DeviceOptions& options) {
  if (options.ring_bytes > kRingBytesMax || options.piece_bytes > kStagedBytesMax ||
      options.piece_bytes == 0 || options.ring_bytes < kStagedBytesMax)
    return Fail(
        Status::Usage("the pinned ring has an impossible size")
            .Expected(Text("{} to {}", FormatBytes(kStagedBytesMax), FormatBytes(kRingBytesMax)))
            .Found(FormatBytes(options.ring_bytes)));
  HP_ASSIGN(const CudaDriver* const driver, FindCudaDriver());
  auto device = std::make_unique<CudaDevice>(*driver, ordinal, options);
  HP_TRY(device->Open());
  return std::unique_ptr<Device>(std::move(device));
}

int CudaDeviceCount() {
  const Result<const CudaDriver*> driver = FindCudaDriver();
  int count = 0;
  if (!driver || !StartCudaDriver(**driver)) return 0;
  if ((*driver)->cuDeviceGetCount(&count) != CUDA_SUCCESS) return 0;
  return count;
}

}  // namespace hotplane
