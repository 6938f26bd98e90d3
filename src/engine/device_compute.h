// The operator over layers that live on a device, computed there (moe/cuda/cuda_moe.h): bfloat16
// activations, exact weights, float32 sums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "boot/boot.h"
#include "device/device.h"
#include "moe/moe.h"

namespace hotplane {

// What a call on the device asks for: a Precision, or FP4 where the expert's record is on the
// device and the base tier where it is not.
enum class DevicePrecision : uint8_t { kInvalid = 0, kBase = 1, kFp4 = 2, kFp4OrBase = 3 };

// One forward of one layer. Arrays are memory of the layer's device, row-major, contiguous, 16-byte
// aligned; none overlaps y.
struct DeviceMoeRequest {
  uint32_t layer = 0;                                  // ordinal
  DevicePrecision precision = DevicePrecision::kBase;  // of every expert, unless `precisions`
  const uint8_t* precisions = nullptr;                 // [E], a DevicePrecision each; null
  bool fp8 = false;                                    // activations are rounded to FP8 (moe/fp8.h)
  uint32_t token_count = 0;                            // T; 0: nothing is done
  uint32_t top_k = 0;                                  // k
  const uint16_t* x = nullptr;                         // [T, H] bfloat16
  const int32_t* ids = nullptr;                        // [T, k]
  const float* weights = nullptr;                      // [T, k]
  uint16_t* y = nullptr;                               // [T, H] bfloat16
  // Of WorkspaceBytes; one call at a time uses it. Its first kDeviceWorkspaceZeros bytes are zeros
  // before the first call and belong to the operator from then on.
  std::byte* workspace = nullptr;
  uint64_t workspace_bytes = 0;
  void* stream = nullptr;  // a CUstream of the device's primary context; null: its default stream
};
inline constexpr uint64_t kDeviceWorkspaceZeros = 256;

// An expert whose FP4 is in memory of the host: what a call on host arrays copies to the device.
struct HostFp4 {
  uint32_t expert = 0;
  Encoding encoding = Encoding::kInvalid;
  std::span<const std::byte> fp13, fp2;
};

// Where an expert's FP4 is in device memory.
struct ResidentFp4 {
  Encoding encoding = Encoding::kInvalid;  // kInvalid: not there
  const std::byte* fp13 = nullptr;
  const std::byte* fp2 = nullptr;
};

// Thread-safe, but for what LoadFp4 says. `device` outlives it; its end waits for what was
// enqueued, of graphs that were captured only for what is on its way.
class DeviceCompute {
 public:
  virtual ~DeviceCompute() = default;

  // On arrays of the host: x is rounded to bfloat16, to FP8 too where the arithmetic is that; y
  // comes from bfloat16. REQUIRES CheckMoeCall; the experts' planes and biases are device memory,
  // their FP4 too but for those in `fp4`, which are copied. Calls take turns, and return when y is
  // there. kData for quintals without codes.
  virtual Result<void> Forward(const MoeCall& call, std::span<const HostFp4> fp4) = 0;

  // Makes the layer ready for Enqueue. A published one has parts, and its slots are told to the
  // device; of another the device computes no expert until this is called again with its parts.
  // Allocates nothing, and waits for no stream of a caller. More than once is fine.
  virtual Result<void> Prepare(const BootedLayer& layer) = 0;
  // Enqueues the call on its stream; may be captured in a graph. What it cannot compute becomes
  // NaN and is told by TakeRefusal. REQUIRES Prepare.
  virtual Result<void> Enqueue(const BootedLayer& layer, uint32_t expert_count,
                               const Activation& activation, const DeviceMoeRequest& request) = 0;
  // What the calls of this layer that have ended could not compute since this was last asked: kData
  // naming an expert, kUsage for an id that is none.
  virtual Result<void> TakeRefusal(uint32_t layer) = 0;

  // Copies an expert's FP4 into device memory, where it stays. REQUIRES Prepare with its parts, and
  // that no Enqueue of this layer is on its way or made meanwhile. kCapacity where the memory is
  // not there.
  virtual Result<void> LoadFp4(uint32_t layer, const HostFp4& record) = 0;
  virtual ResidentFp4 Resident(uint32_t layer, uint32_t expert) const = 0;
};

// `expert_counts`: of the model's layers. kSystem where this build has no kernels for the device.
Result<std::unique_ptr<DeviceCompute>> NewDeviceCompute(Device& device,
                                                        std::span<const uint32_t> expert_counts);
uint64_t DeviceWorkspaceBytes(const LayerGeometry& geometry, uint32_t tokens, uint32_t top_k);

}  // namespace hotplane
