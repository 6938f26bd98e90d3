// From tensor names to MoE layers: which tensors are the routed experts, in what format and shape.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "format/kinds.h"
#include "format/manifest.h"

namespace hotplane {

// Indexed by Projection; null where the format has none. Pointers into Checkpoint::tensors(), valid
// while the Checkpoint lives, or, where one tensor holds several experts, to the expert's slice of
// it: a Tensor with the slice's shape, place and bytes, named "tensor[expert]" or, for one half of
// the rows of gate and up, "tensor[expert, first:end]".
struct ExpertTensors {
  std::array<const Tensor*, kProjectionCount> weight{};
  std::array<const Tensor*, kProjectionCount> scale{};
  std::array<const Tensor*, kProjectionCount> global_scale{};
  std::array<const Tensor*, kProjectionCount> bias{};

  // All that are there, by kind, then by projection.
  std::vector<const Tensor*> All() const;
};

// Of FP8 scales.
struct BlockShape {
  uint32_t rows = 0;
  uint32_t columns = 0;
};

struct MoeLayer {
  uint32_t ordinal = 0;  // over MoE layers, MTP layers last
  uint32_t model_index =
      0;  // the model's own number: N of "layers.N."; for "mtp.N." the count of main layers + N
  bool mtp = false;
  std::string prefix;  // "layers.3.ffn."
  std::string scheme;  // of NamingSchemes()
  SourceFormat format = SourceFormat::kInvalid;
  LayerGeometry geometry;
  BlockShape fp8_block;                 // of kFp8
  bool divide_by_global_scale = false;  // of kNvfp4: else a factor
  // The rows of the tensors of gate and up, one after the other, alternate: even ones are gate's.
  bool interleaved_rows = false;
  std::vector<ExpertTensors> experts;
  std::shared_ptr<const std::vector<Tensor>> slices;  // what `experts` points to, if anything
};

struct MoeModel {
  std::string scheme;  // "deepseek-mxfp4", "hf-per-expert"; of several, joined by "+"
  // The config fields that decide how tensors are decoded, " key=value" each; part of the
  // fingerprint.
  std::string decoding;
  Activation activation;
  std::optional<uint32_t> top_k;
  std::vector<MoeLayer> layers;  // by ordinal
};

// Recognises the routed experts from names, dtypes and shapes. kData, naming the tensors (the first
// ten and a count), when experts are missing, of unequal shape, of an unknown dtype, or look like
// routed experts but match no scheme; also when there are no routed experts at all, when a shape is
// not a multiple of 64 (hidden and intermediate), and when FP8 scales come without a
// quantization_config.weight_block_size.
Result<MoeModel> DiscoverMoe(const Checkpoint& checkpoint);

// What there is of one layer, good or not.
struct MoeLayerSurvey {
  std::string prefix;
  std::string scheme;  // empty when no scheme fits
  uint64_t tensor_count = 0;
  uint64_t tensor_bytes = 0;
  std::string dtypes;      // "F32+F8_E4M3+U8"
  std::string missing;     // names, the first ten and a count; empty when none
  std::string unexpected;  // tensors that look like routed experts and fit no scheme
  std::optional<Status> problem;
};
// Every layer that names routed experts, in the order of the model. Never fails: it is to say what
// is wrong with a checkpoint that DiscoverMoe refuses.
std::vector<MoeLayerSurvey> SurveyMoe(const Checkpoint& checkpoint);

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

// The tensors and slices of a layer by name: what a source record's entries stand for.
std::map<std::string_view, const Tensor*> SourceTensorsByName(const MoeLayer& layer);

// The manifest of this model's generation with so many shards; 1: unsharded.
Manifest MakeManifest(const MoeModel& model, const Digest128& fingerprint, ZeroMode zero_mode,
                      uint32_t shard_world = 1);

}  // namespace hotplane
