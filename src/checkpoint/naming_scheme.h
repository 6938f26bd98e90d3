// The table of naming schemes: how public checkpoints name, type and shape their routed experts. A
// new scheme is a new entry in naming_scheme.cc and a test.
//
// The name of an expert tensor is read as
//   <head> N <middle> "experts." E "." <role> <suffix>     "layers.3" ".ffn." "experts.7.w1.scale"
// or, where one tensor holds all experts of a layer ("fused"),
//   <head> N <middle> "experts." <role> <suffix>           ".mlp.experts.gate_up_proj_blocks"
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "checkpoint/checkpoint.h"
#include "format/kinds.h"
#include "format/manifest.h"

namespace hotplane {

// Where the layers of a model sit in the names.
struct LayerNaming {
  std::string_view head;    // "model.layers."
  std::string_view middle;  // ".mlp."
  bool mtp;                 // N counts MTP layers, apart from the main ones
};

enum class ExpertPart : uint8_t {
  kWeight = 0,
  kScale,
  kGlobalScale,
  kBias,
  kUnused,  // known, and not needed to know the weights
};

// Shapes are of one projection with `out` rows and `in` columns; a fused tensor has E before that,
// and twice the rows for gate and up together.
enum class ShapeRule : uint8_t {
  kInvalid = 0,
  kRows,        // [out, in / divisor]
  kBlockBytes,  // [out, in / 32, 16]
  kGrid,        // [ceil(out / block rows), ceil(in / block columns)], the block from config.json
  kVector,      // [out]
  kScalar,      // [] or [1]
};

struct PartRule {
  ExpertPart part;
  std::string_view suffix;
  std::array<Dtype, 3> dtypes;  // kInvalid: no more
  ShapeRule shape;
  uint32_t divisor;  // of kRows
};

// How the rows of gate and up lie in one tensor.
enum class Fusion : uint8_t {
  kNone = 0,     // experts and projections have tensors of their own
  kHalves,       // all rows of gate, then all of up
  kInterleaved,  // even rows gate, odd rows up
};

struct NamingScheme {
  std::string_view name;
  std::span<const LayerNaming> layers;
  // By Projection: "w1", "w3", "w2". A fused scheme has gate and up under the name of gate.
  std::array<std::string_view, kProjectionCount> roles;
  Fusion fusion;
  SourceFormat format;  // kInvalid: the weight's dtype says it
  // Every expert and projection has each of these once; those of kUnused may be missing.
  std::span<const PartRule> parts;
  bool divide_by_global_scale;  // the global scale is the reciprocal of a factor
  std::string_view router;      // "gate.weight" after <middle>, [E, hidden]
  // A tensor <head> N <marker> says that main layer N is an MTP layer.
  std::string_view mtp_marker;
  Activation activation;  // unless config.json says otherwise
};

std::span<const NamingScheme> NamingSchemes();

// What a tensor's name and dtype say. Where several schemes know them, they agree on all but the
// scheme; the layer's other tensors decide.
struct ExpertName {
  uint32_t schemes = 0;  // bit i: NamingSchemes()[i]
  const LayerNaming* layer = nullptr;
  uint32_t layer_number = 0;  // N
  uint32_t expert = 0;        // E; 0 in a fused scheme
  Projection projection = Projection::kGate;
  ExpertPart part = ExpertPart::kWeight;
};
// Nothing when no scheme knows the name with this dtype.
std::optional<ExpertName> MatchExpertTensor(const Tensor& tensor);

// N when the name begins with <head> N "."
std::optional<uint32_t> MatchLayerNumber(std::string_view head, std::string_view name);

// Names of routed experts contain this; names of shared experts do not.
inline constexpr std::string_view kExpertsInfix = ".experts.";

// The checkpoint format that a tensor which matches no scheme comes from ("GPTQ or AWQ"); empty
// when it is not a known one. `rank` orders the evidence: the lowest is the surest.
struct UnreadFormat {
  std::string_view name;
  size_t rank = 0;
};
std::optional<UnreadFormat> RecognizeUnreadFormat(const Tensor& tensor);

}  // namespace hotplane
