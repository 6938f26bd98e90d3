// From tensor names to MoE layers: which tensors are the routed experts, in what format and shape.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "format/kinds.h"
#include "format/manifest.h"

namespace hotplane {

// Indexed by Projection. Pointers into Checkpoint::tensors(), valid while the Checkpoint lives.
struct ExpertTensors {
  std::array<const Tensor*, kProjectionCount> weight{};
  std::array<const Tensor*, kProjectionCount> scale{};  // null where the format has none
};

struct MoeLayer {
  uint32_t ordinal = 0;  // over MoE layers, MTP layers last
  uint32_t model_index =
      0;  // the model's own number: N of "layers.N."; for "mtp.N." the count of main layers + N
  bool mtp = false;
  std::string prefix;  // "layers.3.ffn."
  SourceFormat format = SourceFormat::kInvalid;
  LayerGeometry geometry;
  std::vector<ExpertTensors> experts;
};

struct MoeModel {
  std::string scheme;  // "deepseek-mxfp4", "hf-per-expert"
  Activation activation;
  std::optional<uint32_t> top_k;
  std::vector<MoeLayer> layers;  // by ordinal
};

// Recognises the routed experts from names, dtypes and shapes. kData, naming the tensors (the first
// ten and a count), when experts are missing, of unequal shape, of an unknown dtype, or look like
// routed experts but match no scheme; also when there are no routed experts at all, and when a
// shape is not a multiple of 64 (hidden and intermediate).
Result<MoeModel> DiscoverMoe(const Checkpoint& checkpoint);

// Source fingerprint: header entries of the expert tensors (name, dtype, shape), sampled 4 KiB
// pages of expert data at positions derived from the digest of those, and the config fields that
// decide decoding. Independent of file names, sharding, times and of every other tensor and config
// field.
Result<Digest128> Fingerprint(const Checkpoint& checkpoint, const MoeModel& model);

// One page that Fingerprint samples.
struct SampledPage {
  const Tensor* tensor;
  uint64_t offset;  // in the tensor's data
  uint32_t bytes;   // at most 4096
};
std::vector<SampledPage> ListSampledPages(const MoeModel& model);

// The manifest of the unsharded generation of this model.
Manifest MakeManifest(const MoeModel& model, const Digest128& fingerprint, ZeroMode zero_mode);

}  // namespace hotplane
