// The table of naming schemes: how public checkpoints name, type and shape their routed experts. A
// new scheme is a new entry in naming_scheme.cc and a test.
//
// The name of an expert tensor is read as
//   <head> N <middle> "experts." E "." <role> <suffix>       "layers.3" ".ffn." "experts.7.w1"
//   ".scale"
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "checkpoint/checkpoint.h"
#include "format/kinds.h"

namespace hotplane {

// Where the layers of a model sit in the names.
struct LayerNaming {
  std::string_view head;    // "model.layers."
  std::string_view middle;  // ".mlp."
  bool mtp;                 // N counts MTP layers, apart from the main ones
};

struct ElementType {
  Dtype dtype;
  SourceFormat format;
  uint32_t values_per_element;  // along the row: 2 for nibbles in bytes
};

struct NamingScheme {
  std::string_view name;
  std::span<const LayerNaming> layers;
  std::array<std::string_view, kProjectionCount> roles;  // by Projection: "w1", "w3", "w2"
  std::string_view weight_suffix;                        // ".weight": [out, in/values_per_element]
  std::span<const ElementType> elements;                 // what a weight may be made of
  std::string_view scale_suffix;                         // ".scale"; empty when there is none
  Dtype scale_dtype;
  uint32_t scale_block;     // a scale is [out, in/scale_block]
  std::string_view router;  // "gate.weight" after <middle>, [E, hidden]
  // A tensor <head> N <marker> says that main layer N is an MTP layer.
  std::string_view mtp_marker;
};

std::span<const NamingScheme> NamingSchemes();

// What a tensor's name and dtype say in a scheme.
struct ExpertName {
  const NamingScheme* scheme = nullptr;
  const LayerNaming* layer = nullptr;
  uint32_t layer_number = 0;  // N
  uint32_t expert = 0;        // E
  Projection projection = Projection::kGate;
  bool scale = false;
};
// Nothing when no scheme knows the name with this dtype.
std::optional<ExpertName> MatchExpertTensor(const Tensor& tensor);

// N when the name begins with <head> N "."
std::optional<uint32_t> MatchLayerNumber(std::string_view head, std::string_view name);

// Names of routed experts contain this; names of shared experts do not.
inline constexpr std::string_view kExpertsInfix = ".experts.";

// The checkpoint format that a tensor which matches no scheme comes from ("modelopt NVFP4"); empty
// when it is not a known one. `rank` orders the evidence: the lowest is the surest.
struct UnreadFormat {
  std::string_view name;
  size_t rank = 0;
};
std::optional<UnreadFormat> RecognizeUnreadFormat(const Tensor& tensor);

}  // namespace hotplane
