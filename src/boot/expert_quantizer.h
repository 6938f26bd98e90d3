// One expert from source tensors to the pieces of its layer files, in memory that is allocated
// once.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/memory.h"
#include "base/status.h"
#include "boot/read_ahead.h"
#include "checkpoint/moe_source.h"
#include "device/device.h"
#include "quant/quantize.h"

namespace hotplane {

// The pieces of one expert; views into the quantizer's memory, valid until its next Run. Empty when
// not asked for.
struct ExpertPieces {
  std::span<const std::byte> planes13, sc13, planes2, sc2;
  std::span<const std::byte> nibbles13, nibbles2;
  std::span<const std::byte> quintals13, quintals2;
  std::span<const std::byte> bias13, bias2;  // float32, gate's rows first; only with the base
  // These planes and scales are also where BasePlaces says; else nothing is there.
  bool w13_in_place = false;
  bool w2_in_place = false;
};

// Device memory for the base of one expert, aligned to 16 bytes; null: none.
struct BasePlaces {
  std::byte* planes13 = nullptr;
  std::byte* sc13 = nullptr;
  std::byte* planes2 = nullptr;
  std::byte* sc2 = nullptr;
};

struct PlanesWanted {
  bool base = false;
  bool nibbles = false;
  bool quintals = false;
};

// Not thread-safe: one per worker.
class ExpertQuantizer {
 public:
  // What Run takes of an expert, in this order; of all experts of a layer as many.
  static std::vector<SourcePiece> SourcePieces(const MoeLayer& layer, uint32_t expert);

  // Bytes that Create allocates for this layer alone.
  static uint64_t WorkspaceBytes(const MoeLayer& layer, PlanesWanted wanted);

  // Memory of a device that a workspace for the largest of `layers` takes there.
  static uint64_t DeviceBytes(std::span<const MoeLayer* const> layers, PlanesWanted wanted);

  // A workspace for the largest of `layers`. With a `device`, which outlives it, matrices are
  // quantized there, the two whose rows alternate excepted; by the CPU where it has no kernels.
  static Result<ExpertQuantizer> Create(const Kernels& kernels,
                                        std::span<const MoeLayer* const> layers,
                                        PlanesWanted wanted, ZeroMode zero_mode,
                                        Device* device = nullptr);

  // Quantizes one expert from its pieces, which are `reads`; `digests` takes the digest of each
  // source tensor or slice. kData naming the element for values that are not finite and for scales
  // that are NaN, infinite or negative (a scale of 0 makes a block of zeros; a global scale must be
  // positive).
  // What is quantized on the device is left in `places` too.
  Result<ExpertPieces> Run(const Checkpoint& checkpoint, const MoeLayer& layer, uint32_t expert,
                           PlanesWanted wanted, const BasePlaces& places, TakenPieces& reads,
                           std::vector<SourceTensorDigest>* digests);

  uint64_t bytes_read() const { return bytes_read_; }            // of the last Run
  uint64_t bytes_on_device() const { return bytes_on_device_; }  // of them, quantized there
  uint64_t workspace_bytes() const { return planes_.size(); }
  uint64_t device_bytes() const { return device_bytes_; }  // of the device's memory

 private:
  // One projection's source in memory, and where it came from.
  struct Source {
    const Tensor* weight = nullptr;
    const Tensor* scale = nullptr;
    const Tensor* global_scale = nullptr;
    std::span<std::byte> elements = {}, scales = {}, global_scales = {};
  };
  struct Shape {
    size_t n, k;
  };

  Result<void> RunProjection(const MoeLayer& layer, uint32_t expert, Projection projection,
                             const PlaneOutputs& out, const PlaneOutputs& on_device);
  // What the quantizer is given of a source; checks those scales that are not in the matrix.
  Result<MatrixSource> Describe(const MoeLayer& layer, const Source& source, Shape shape);
  Status Unusable(const MoeLayer& layer, const Source& source) const;
  // Gate and up of MXFP4 whose rows alternate.
  Result<void> RunInterleaved(const MoeLayer& layer, uint32_t expert, const PlaneOutputs& gate,
                              const PlaneOutputs& up);
  Result<void> RunBiases(const MoeLayer& layer, uint32_t expert, float* bias13, float* bias2);
  Source TakeSource(const ExpertTensors& expert, Projection projection);
  Result<void> NextPiece();
  // The next tensor of the piece.
  std::span<std::byte> TakeTensor(const Tensor& tensor);

  const Kernels* kernels_ = nullptr;
  ZeroMode zero_mode_ = ZeroMode::kAuto;
  HugeBuffer planes_;
  std::vector<std::byte> strip_;  // of one of two matrices whose rows alternate
  std::vector<double> fp8_scales_;
  std::unique_ptr<MatrixQuantizer> matrices_;  // after the memory that it may have registered
  uint64_t device_bytes_ = 0;
  // Of the Run in progress.
  const Checkpoint* checkpoint_ = nullptr;
  std::vector<SourceTensorDigest>* digests_ = nullptr;
  TakenPieces* reads_ = nullptr;
  std::vector<std::span<std::byte>> piece_;  // by tensor
  size_t piece_used_ = 0;                    // of them
  uint64_t bytes_read_ = 0;
  uint64_t bytes_on_device_ = 0;
};

}  // namespace hotplane
