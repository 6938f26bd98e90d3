// The operator over a booted layer: which weights a call needs, and where they are.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/worker_pool.h"
#include "boot/boot.h"
#include "engine/device_compute.h"
#include "engine/expert_records.h"
#include "moe/moe.h"

namespace hotplane {

// The base parts and biases of the index-th expert that was booted.
void SetBase(const BootedLayer& layer, size_t index, ExpertWeights* expert);

// One forward of one layer; arrays as in MoeCall.
struct MoeRequest {
  uint32_t layer = 0;  // ordinal
  Arithmetic arithmetic = Arithmetic::kFast;
  Precision precision = Precision::kBase;  // of every expert, unless `precisions`
  std::span<const uint8_t> precisions;     // [E], a Precision each; empty
  size_t token_count = 0;
  size_t top_k = 0;
  const float* x = nullptr;
  const int32_t* ids = nullptr;
  const float* weights = nullptr;
  float* y = nullptr;
};

// Thread-safe: calls from several threads share the cores, or the device, one after another.
// `records` and `device` outlive it.
class ExpertCompute {
 public:
  // `isa`: of SelectMoeKernels; empty: the best one. `device`: where layers may live; null: none.
  ExpertCompute(ExpertRecords& records, size_t worker_count, std::string isa, Device* device)
      : records_(records), worker_count_(worker_count), isa_(std::move(isa)), device_(device) {}

  // `layer` is published. On the host it is computed there, on a device there: in bfloat16,
  // of FP8 activations where the arithmetic is that. Experts of FP4 are taken through the cache of
  // delta records, several at once, and stay pinned until the call ends: those that find no slot
  // there have memory of their own meanwhile. A device gets a copy for the call, but of those that
  // LoadFp4 left there. Errors as CheckMoeCall, MoeForward and ExpertRecords::Get; kData naming an
  // expert that this boot does not have; kSystem and kCapacity of the device. Of a sharded store
  // this rank's part of the sum.
  Result<void> Forward(const BootedLayer& layer, const Activation& activation,
                       const MoeRequest& request);

  // Of layers that live on a device, or will, else kUsage. What they do is said in
  // device_compute.h; the first one makes the layer ready for ForwardOnDevice, and may take a
  // second. A layer without parts is not published yet.
  Result<uint64_t> PrepareOnDevice(const BootedLayer& layer, uint32_t tokens, uint32_t top_k);
  Result<void> ForwardOnDevice(const BootedLayer& layer, const Activation& activation,
                               const DeviceMoeRequest& request);
  // To be called for each layer before anybody uses it: those that were made ready before get their
  // parts.
  Result<void> Publish(const BootedLayer& layer);
  Result<void> TakeRefusal(const BootedLayer& layer);
  // Reads the experts' records, through the cache, and leaves them on the device.
  Result<void> LoadFp4(const BootedLayer& layer, std::span<const uint32_t> experts);

 private:
  struct Chosen {
    std::vector<ExpertWeights> experts;
    std::vector<PinnedRecord> pinned;
    std::vector<HostFp4> fp4;  // in `pinned`
  };
  Result<Chosen> ChooseExperts(const BootedLayer& layer, const MoeRequest& request,
                               uint32_t expert_count);
  Result<void> PinFp4(uint32_t layer, std::span<const uint32_t> experts, Chosen& chosen);
  uint32_t ExpertCount(const BootedLayer& layer) const {
    return records_.reader().geometry(layer.ordinal).experts;
  }
  WorkerPool& pool();
  Result<const MoeKernels*> Kernels();
  Result<DeviceCompute*> OnDevice(const BootedLayer& layer);

  ExpertRecords& records_;
  const size_t worker_count_;
  const std::string isa_;
  Device* const device_;
  std::mutex mutex_;  // guards what is made at the first call
  const MoeKernels* kernels_ = nullptr;
  std::unique_ptr<WorkerPool> pool_;  // its own: a boot holds the engine's until it has landed
  std::unique_ptr<DeviceCompute> on_device_;
  // on_device_, once it is open: for the boot, which may not wait for the mutex, as its holder may
  // wait for streams that wait for the boot.
  std::atomic<DeviceCompute*> opened_ = nullptr;
};

}  // namespace hotplane
