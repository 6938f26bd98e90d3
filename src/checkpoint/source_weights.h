// The weights of one projection of an expert as numbers, whatever format they are stored in. For
// measuring what quantization did to them; the quantizer itself works on the stored bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/moe_source.h"
#include "format/manifest.h"

namespace hotplane {

// Holds the bytes of one projection (of gate and up where their rows alternate) and reuses its
// memory. Not thread-safe: one per worker. What is read stays valid while `checkpoint` and `layer`
// live.
class SourceWeights {
 public:
  // Reads a projection; `digests` takes the digest of each tensor or slice that was read for it
  // (of gate and up once where their rows alternate). kData naming the element for a scale that is
  // NaN, infinite or negative.
  Result<void> Read(const Checkpoint& checkpoint, const MoeLayer& layer, uint32_t expert,
                    Projection projection, std::vector<SourceTensorDigest>* digests);

  size_t rows() const { return rows_; }
  size_t columns() const { return columns_; }
  uint64_t bytes_read() const { return bytes_read_; }  // by all Reads

  // One row of the projection. Exact in float64, but for NVFP4 whose global scale divides: there
  // the nearest float64. kData naming the element for a weight that is not finite. REQUIRES a Read
  // that succeeded, row < rows(), destination.size() == columns().
  Result<void> Row(size_t row, std::span<double> destination) const;

 private:
  // One projection's tensors, as they are stored.
  struct Stored {
    const Tensor* weight = nullptr;
    const Tensor* scale = nullptr;
    std::vector<std::byte> elements;
    std::vector<std::byte> scales;
    double global_factor = 1;   // of kNvfp4
    double global_divisor = 1;  // of kNvfp4
  };

  Result<void> ReadStored(const ExpertTensors& expert, Projection projection, Stored& stored);
  Result<void> ReadTensor(const Tensor& tensor, std::vector<std::byte>& bytes);
  Result<void> CheckScales(const Stored& stored) const;
  void NibbleRow(const Stored& stored, size_t row, std::span<double> destination) const;
  void Fp8Row(const Stored& stored, size_t row, std::span<double> destination) const;
  void FloatRow(const Stored& stored, size_t row, std::span<double> destination) const;

  const Checkpoint* checkpoint_ = nullptr;
  const MoeLayer* layer_ = nullptr;
  std::vector<SourceTensorDigest>* digests_ = nullptr;
  uint32_t expert_ = 0;
  Projection projection_ = Projection::kGate;
  bool pair_read_ = false;  // stored_ holds gate and up of expert_, whose rows alternate
  Stored stored_[2];
  size_t rows_ = 0;
  size_t columns_ = 0;
  uint64_t bytes_read_ = 0;
};

}  // namespace hotplane
