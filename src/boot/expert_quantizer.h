// One expert from source tensors to the pieces of its layer files, in memory that is allocated
// once.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/memory.h"
#include "base/status.h"
#include "checkpoint/moe_source.h"
#include "quant/quantize.h"

namespace hotplane {

// The pieces of one expert; views into the quantizer's memory, valid until its next Run. Empty when
// not asked for.
struct ExpertPieces {
  std::span<const std::byte> planes13, sc13, planes2, sc2;
  std::span<const std::byte> nibbles13, nibbles2;
  std::span<const std::byte> quintals13, quintals2;
};

struct PlanesWanted {
  bool base = false;
  bool nibbles = false;
  bool quintals = false;
};

// Not thread-safe: one per worker.
class ExpertQuantizer {
 public:
  // Bytes that Create allocates for layers of this format and geometry.
  static uint64_t WorkspaceBytes(SourceFormat format, const LayerGeometry& geometry,
                                 PlanesWanted wanted);

  // A workspace for the largest of `layers`.
  static Result<ExpertQuantizer> Create(const Kernels& kernels,
                                        std::span<const MoeLayer* const> layers,
                                        PlanesWanted wanted, ZeroMode zero_mode);

  // Reads and quantizes one expert; `digests` takes the digest of each source tensor, by
  // projection: weight, then scale where there is one. kData for values that are not finite.
  Result<ExpertPieces> Run(const Checkpoint& checkpoint, const MoeLayer& layer, uint32_t expert,
                           PlanesWanted wanted, std::vector<SourceTensorDigest>* digests);

  uint64_t bytes_read() const { return bytes_read_; }  // of the last Run
  uint64_t workspace_bytes() const { return source_.size() + planes_.size(); }

 private:
  Result<void> RunProjection(const Checkpoint& checkpoint, const MoeLayer& layer, uint32_t expert,
                             Projection projection, const PlaneOutputs& out,
                             std::vector<SourceTensorDigest>* digests);
  Result<std::span<std::byte>> ReadTensor(const Checkpoint& checkpoint, const Tensor& tensor,
                                          uint64_t workspace_offset,
                                          std::vector<SourceTensorDigest>* digests);

  const Kernels* kernels_ = nullptr;
  ZeroMode zero_mode_ = ZeroMode::kAuto;
  HugeBuffer source_;
  HugeBuffer planes_;
  uint64_t bytes_read_ = 0;
};

}  // namespace hotplane
