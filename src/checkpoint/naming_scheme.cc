#include "checkpoint/naming_scheme.h"

#include <charconv>

namespace hotplane {
namespace {

constexpr std::array kDeepSeekLayers = {
    LayerNaming{"layers.", ".ffn.", false},
    LayerNaming{"mtp.", ".ffn.", true},
};
constexpr std::array kHfLayers = {
    LayerNaming{"model.layers.", ".mlp.", false},
    LayerNaming{"model.language_model.layers.", ".mlp.", false},
    LayerNaming{"language_model.model.layers.", ".mlp.", false},
    LayerNaming{"layers.", ".mlp.", false},
    LayerNaming{"mtp.layers.", ".mlp.", true},
};
constexpr std::array kMixtralLayers = {
    LayerNaming{"model.layers.", ".block_sparse_moe.", false},
    LayerNaming{"layers.", ".block_sparse_moe.", false},
};

constexpr std::array kMxfp4Elements = {ElementType{Dtype::kI8, SourceFormat::kMxfp4, 2}};
constexpr std::array kFloatElements = {
    ElementType{Dtype::kBf16, SourceFormat::kBf16, 1},
    ElementType{Dtype::kF16, SourceFormat::kF16, 1},
    ElementType{Dtype::kF32, SourceFormat::kF32, 1},
};

constexpr std::array kSchemes = {
    NamingScheme{.name = "deepseek-mxfp4",
                 .layers = kDeepSeekLayers,
                 .roles = {"w1", "w3", "w2"},
                 .weight_suffix = ".weight",
                 .elements = kMxfp4Elements,
                 .scale_suffix = ".scale",
                 .scale_dtype = Dtype::kF8E8m0,
                 .scale_block = 32,
                 .router = "gate.weight",
                 .mtp_marker = ""},
    NamingScheme{.name = "hf-per-expert",
                 .layers = kHfLayers,
                 .roles = {"gate_proj", "up_proj", "down_proj"},
                 .weight_suffix = ".weight",
                 .elements = kFloatElements,
                 .scale_suffix = "",
                 .scale_dtype = Dtype::kInvalid,
                 .scale_block = 0,
                 .router = "gate.weight",
                 .mtp_marker = ".enorm.weight"},
    NamingScheme{.name = "mixtral-per-expert",
                 .layers = kMixtralLayers,
                 .roles = {"w1", "w3", "w2"},
                 .weight_suffix = ".weight",
                 .elements = kFloatElements,
                 .scale_suffix = "",
                 .scale_dtype = Dtype::kInvalid,
                 .scale_block = 0,
                 .router = "gate.weight",
                 .mtp_marker = ""},
};

// Formats that are known, and not read. The first entry that a tensor fits names it; entries are
// ordered from the surest sign to the weakest.
struct UnreadSign {
  std::string_view name_end;
  Dtype dtype;  // kInvalid: any
  std::string_view format;
};
constexpr std::array kUnreadSigns = {
    UnreadSign{".weight_scale_2", Dtype::kInvalid, "modelopt NVFP4"},
    UnreadSign{".weight_global_scale", Dtype::kInvalid, "compressed-tensors NVFP4"},
    UnreadSign{".weight_packed", Dtype::kInvalid, "a compressed-tensors packed format"},
    UnreadSign{"_proj_blocks", Dtype::kU8, "gpt-oss MXFP4"},
    UnreadSign{".qweight", Dtype::kI32, "GPTQ or AWQ"},
    UnreadSign{".experts.gate_up_proj", Dtype::kInvalid, "experts fused into 3-D tensors"},
    UnreadSign{".experts.down_proj", Dtype::kInvalid, "experts fused into 3-D tensors"},
    UnreadSign{".weight_scale_inv", Dtype::kInvalid, "block-scaled FP8"},
    UnreadSign{".weight", Dtype::kF8E4m3, "FP8"},
};

bool TakePrefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// A decimal number of at most five digits without leading zeros: more layers or experts do not
// exist, and "01" beside "1" would be two names for one thing.
std::optional<uint32_t> TakeNumber(std::string_view& text) {
  constexpr size_t kDigitsMax = 5;
  size_t digits = 0;
  while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
  if (digits == 0 || digits > kDigitsMax || (digits > 1 && text[0] == '0')) return std::nullopt;
  uint32_t number = 0;
  std::from_chars(text.data(), text.data() + digits, number);
  text.remove_prefix(digits);
  return number;
}

const ElementType* FindElement(const NamingScheme& scheme, Dtype dtype) {
  for (const ElementType& element : scheme.elements) {
    if (element.dtype == dtype) return &element;
  }
  return nullptr;
}

// `rest` is what follows "experts.": "7.w1.scale".
bool MatchRole(const NamingScheme& scheme, std::string_view rest, Dtype dtype, ExpertName& match) {
  const std::optional<uint32_t> expert = TakeNumber(rest);
  if (!expert || !TakePrefix(rest, ".")) return false;
  match.expert = *expert;
  for (size_t role = 0; role < kProjectionCount; ++role) {
    std::string_view suffix = rest;
    if (!TakePrefix(suffix, scheme.roles[role])) continue;
    match.projection = static_cast<Projection>(role);
    match.scale = !scheme.scale_suffix.empty() && suffix == scheme.scale_suffix;
    if (match.scale) return dtype == scheme.scale_dtype;
    return suffix == scheme.weight_suffix && FindElement(scheme, dtype) != nullptr;
  }
  return false;
}

}  // namespace

std::span<const NamingScheme> NamingSchemes() { return kSchemes; }

std::optional<ExpertName> MatchExpertTensor(const Tensor& tensor) {
  for (const NamingScheme& scheme : kSchemes) {
    for (const LayerNaming& layer : scheme.layers) {
      std::string_view rest = tensor.name;
      if (!TakePrefix(rest, layer.head)) continue;
      const std::optional<uint32_t> number = TakeNumber(rest);
      if (!number || !TakePrefix(rest, layer.middle) || !TakePrefix(rest, "experts.")) continue;
      ExpertName match = {.scheme = &scheme, .layer = &layer, .layer_number = *number};
      if (MatchRole(scheme, rest, tensor.dtype, match)) return match;
    }
  }
  return std::nullopt;
}

std::optional<uint32_t> MatchLayerNumber(std::string_view head, std::string_view name) {
  if (!TakePrefix(name, head)) return std::nullopt;
  const std::optional<uint32_t> number = TakeNumber(name);
  return number && name.starts_with('.') ? number : std::nullopt;
}

std::optional<UnreadFormat> RecognizeUnreadFormat(const Tensor& tensor) {
  for (size_t rank = 0; rank < kUnreadSigns.size(); ++rank) {
    const UnreadSign& sign = kUnreadSigns[rank];
    const bool dtype_fits = sign.dtype == Dtype::kInvalid || sign.dtype == tensor.dtype;
    if (dtype_fits && tensor.name.ends_with(sign.name_end)) {
      return UnreadFormat{sign.format, rank};
    }
  }
  return std::nullopt;
}

}  // namespace hotplane
