#include "device/cuda/verifier.h"

#include <algorithm>

#include "base/log.h"
#include "device/xxh3.h"

namespace hotplane {

// Made from verify_kernel.cu by the build.
extern const unsigned char kVerifyKernelImage[];

namespace {

// A layer of 4 GiB in one launch.
constexpr size_t kChecksAtATime = 16384;

}  // namespace

CudaVerifier::~CudaVerifier() {
  const CurrentContext current(driver_, context_);
  Drain();
  if (module_ != nullptr) (void)driver_.cuModuleUnload(module_);
  if (done_ != nullptr) (void)driver_.cuEventDestroy(done_);
  if (stream_ != nullptr) (void)driver_.cuStreamDestroy(stream_);
}

Result<void> CudaVerifier::Open() {
  HP_ASSIGN(stream_, NewCudaStream(driver_));
  HP_CUDA_TRY(driver_, "cannot create a CUDA event",
              driver_.cuEventCreate(&done_, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC));
  const CUresult loaded = driver_.cuModuleLoadData(&module_, kVerifyKernelImage);
  if (loaded == CUDA_ERROR_NO_BINARY_FOR_GPU) {
    Log(LogLevel::kWarning,
        "this build has no kernels for this GPU: bytes are verified on the CPU");
    return {};
  }
  HP_CUDA_TRY(driver_, "cannot load the CUDA kernels", loaded);
  HP_TRY(checks_.Allocate(driver_, context_, kChecksAtATime));
  HP_TRY(bad_.Allocate(driver_, context_, 1));
  HP_TRY(bad_at_.Allocate(driver_, context_, kChecksAtATime));
  HP_TRY(found_.Allocate(driver_, context_, kChecksAtATime));
  HP_CUDA_TRY(driver_, "cannot find the verify kernel",
              driver_.cuModuleGetFunction(&kernel_, module_, kVerifyKernelName));
  return LoadCudaKernel(driver_, kernel_);
}

void CudaVerifier::Drain() const {
  if (stream_ != nullptr) (void)driver_.cuStreamSynchronize(stream_);
}

Result<void> CudaVerifier::Wait() {
  HP_CUDA_TRY(driver_, "cannot record a CUDA event", driver_.cuEventRecord(done_, stream_));
  HP_CUDA_TRY(driver_, "the device failed while bytes landed", driver_.cuEventSynchronize(done_));
  return {};
}

Result<void> CudaVerifier::CompareSome(const std::byte* data, std::span<const LandedCheck> checks,
                                       size_t first_index,
                                       std::vector<LandedMismatch>* mismatches) {
  for (size_t i = 0; i < checks.size(); ++i)
    checks_.data()[i] = {checks[i].offset, checks[i].checksum, checks[i].bytes};
  auto address = reinterpret_cast<CUdeviceptr>(data);
  VerifyCheck* table = checks_.data();
  VerifyOutcome outcome = {bad_.data(), bad_at_.data(), found_.data()};
  xxh3::Secret secret = xxh3::kSecret;
  void* arguments[] = {&address, &table, &outcome, &secret};
  HP_CUDA_TRY(driver_, "cannot launch the verify kernel",
              driver_.cuLaunchKernel(kernel_, static_cast<unsigned>(checks.size()), 1, 1,
                                     kVerifyThreads, 1, 1, 0, stream_, arguments, nullptr));
  HP_TRY(Wait());
  if (*bad_.data() == 0) return {};
  *bad_.data() = 0;
  for (size_t i = 0; i < checks.size(); ++i) {
    if (bad_at_.data()[i] == 0) continue;
    bad_at_.data()[i] = 0;
    mismatches->push_back({first_index + i, found_.data()[i]});
  }
  return {};
}

Result<std::vector<LandedMismatch>> CudaVerifier::Compare(const std::byte* data,
                                                          std::span<const LandedCheck> checks) {
  std::vector<LandedMismatch> mismatches;
  if (checks.empty()) HP_TRY(Wait());
  for (size_t first = 0; first < checks.size(); first += kChecksAtATime)
    HP_TRY(CompareSome(data, checks.subspan(first, std::min(kChecksAtATime, checks.size() - first)),
                       first, &mismatches));
  return mismatches;
}

}  // namespace hotplane
