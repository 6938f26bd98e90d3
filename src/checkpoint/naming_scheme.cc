#include "checkpoint/naming_scheme.h"

#include <algorithm>
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

// Shorthands of the tables below.
using enum ExpertPart;
using enum ShapeRule;
constexpr std::array<Dtype, 3> One(Dtype dtype) {
  return {dtype, Dtype::kInvalid, Dtype::kInvalid};
}
constexpr std::array kFloats = {Dtype::kBf16, Dtype::kF16, Dtype::kF32};

constexpr std::array kDeepSeekMxfp4Parts = {
    PartRule{kWeight, ".weight", One(Dtype::kI8), kRows, 2},
    PartRule{kScale, ".scale", One(Dtype::kF8E8m0), kRows, 32},
};
constexpr std::array kFloatParts = {PartRule{kWeight, ".weight", kFloats, kRows, 1}};
constexpr std::array kModeloptNvfp4Parts = {
    PartRule{kWeight, ".weight", One(Dtype::kU8), kRows, 2},
    PartRule{kScale, ".weight_scale", One(Dtype::kF8E4m3), kRows, 16},
    PartRule{kGlobalScale, ".weight_scale_2", One(Dtype::kF32), kScalar, 0},
    PartRule{kUnused, ".input_scale", One(Dtype::kF32), kScalar, 0},
};
constexpr std::array kCompressedNvfp4Parts = {
    PartRule{kWeight, ".weight_packed", One(Dtype::kU8), kRows, 2},
    PartRule{kScale, ".weight_scale", One(Dtype::kF8E4m3), kRows, 16},
    PartRule{kGlobalScale, ".weight_global_scale", One(Dtype::kF32), kScalar, 0},
    PartRule{kUnused, ".input_global_scale", One(Dtype::kF32), kScalar, 0},
};
constexpr std::array kCompressedMxfp4Parts = {
    PartRule{kWeight, ".weight_packed", One(Dtype::kU8), kRows, 2},
    PartRule{kScale, ".weight_scale", One(Dtype::kU8), kRows, 32},
};
constexpr std::array kFp8BlockParts = {
    PartRule{kWeight, ".weight", One(Dtype::kF8E4m3), kRows, 1},
    PartRule{kScale, ".weight_scale_inv", {Dtype::kF32, Dtype::kBf16, Dtype::kInvalid}, kGrid, 0},
};
constexpr std::array kGptOssParts = {
    PartRule{kWeight, "_blocks", One(Dtype::kU8), kBlockBytes, 0},
    PartRule{kScale, "_scales", One(Dtype::kU8), kRows, 32},
    PartRule{kBias, "_bias", kFloats, kVector, 0},
};
constexpr std::array kFusedParts = {PartRule{kWeight, "", kFloats, kRows, 1}};

constexpr std::array<std::string_view, kProjectionCount> kNumberedRoles = {"w1", "w3", "w2"};
constexpr std::array<std::string_view, kProjectionCount> kNamedRoles = {"gate_proj", "up_proj",
                                                                        "down_proj"};
constexpr std::array<std::string_view, kProjectionCount> kFusedRoles = {"gate_up_proj", "",
                                                                        "down_proj"};

// gpt-oss has its factor in the code of the model; the limit is in config.json too.
constexpr Activation kGptOssActivation = {
    .kind = ActivationKind::kSwigluOai, .limit = 7.0, .alpha = 1.702};

constexpr NamingScheme HfScheme(std::string_view name, SourceFormat format,
                                std::span<const PartRule> parts) {
  return {.name = name,
          .layers = kHfLayers,
          .roles = kNamedRoles,
          .fusion = Fusion::kNone,
          .format = format,
          .parts = parts,
          .divide_by_global_scale = false,
          .router = "gate.weight",
          .mtp_marker = ".enorm.weight",
          .activation = {}};
}
constexpr NamingScheme With(NamingScheme scheme, auto change) {
  change(scheme);
  return scheme;
}

constexpr std::array kSchemes = {
    With(HfScheme("deepseek-mxfp4", SourceFormat::kMxfp4, kDeepSeekMxfp4Parts),
         [](NamingScheme& scheme) {
           scheme.layers = kDeepSeekLayers;
           scheme.roles = kNumberedRoles;
           scheme.mtp_marker = "";
         }),
    // As the models are published when their experts are not packed, and as `export --hf` writes
    // them.
    With(HfScheme("deepseek-per-expert", SourceFormat::kInvalid, kFloatParts),
         [](NamingScheme& scheme) {
           scheme.layers = kDeepSeekLayers;
           scheme.roles = kNumberedRoles;
           scheme.mtp_marker = "";
         }),
    HfScheme("hf-per-expert", SourceFormat::kInvalid, kFloatParts),
    With(HfScheme("mixtral-per-expert", SourceFormat::kInvalid, kFloatParts),
         [](NamingScheme& scheme) {
           scheme.layers = kMixtralLayers;
           scheme.roles = kNumberedRoles;
           scheme.mtp_marker = "";
         }),
    HfScheme("modelopt-nvfp4", SourceFormat::kNvfp4, kModeloptNvfp4Parts),
    With(HfScheme("compressed-tensors-nvfp4", SourceFormat::kNvfp4, kCompressedNvfp4Parts),
         [](NamingScheme& scheme) { scheme.divide_by_global_scale = true; }),
    HfScheme("compressed-tensors-mxfp4", SourceFormat::kMxfp4, kCompressedMxfp4Parts),
    HfScheme("hf-fp8-block", SourceFormat::kFp8, kFp8BlockParts),
    With(HfScheme("gpt-oss-mxfp4", SourceFormat::kMxfp4, kGptOssParts),
         [](NamingScheme& scheme) {
           scheme.roles = kFusedRoles;
           scheme.fusion = Fusion::kInterleaved;
           scheme.router = "router.weight";
           scheme.activation = kGptOssActivation;
         }),
    With(HfScheme("hf-fused", SourceFormat::kInvalid, kFusedParts),
         [](NamingScheme& scheme) {
           scheme.roles = kFusedRoles;
           scheme.fusion = Fusion::kHalves;
         }),
};
static_assert(kSchemes.size() <= 32, "ExpertName::schemes has a bit for each");

// Formats that are known, and not read. The first entry that a tensor fits names it; entries are
// ordered from the surest sign to the weakest.
struct UnreadSign {
  std::string_view name_end;
  Dtype dtype;  // kInvalid: any
  std::string_view format;
};
constexpr std::array kUnreadSigns = {
    UnreadSign{".qweight", Dtype::kI32, "GPTQ or AWQ"},
    UnreadSign{".weight_packed", Dtype::kI32, "compressed-tensors packed integers"},
    UnreadSign{".weight_scale", Dtype::kF32, "FP8 with one scale per tensor or row"},
    UnreadSign{".weight_scale", Dtype::kBf16, "FP8 or INT8 with one scale per row"},
    UnreadSign{"_proj_bias", Dtype::kInvalid, "fused experts with biases that are not MXFP4"},
    UnreadSign{".weight", Dtype::kI8, "INT8"},
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

bool MatchPart(const NamingScheme& scheme, std::string_view suffix, Dtype dtype,
               ExpertName& match) {
  for (const PartRule& rule : scheme.parts) {
    if (suffix != rule.suffix) continue;
    match.part = rule.part;
    return std::find(rule.dtypes.begin(), rule.dtypes.end(), dtype) != rule.dtypes.end();
  }
  return false;
}

// `rest` is what follows "experts.": "7.w1.scale", "gate_up_proj_blocks".
bool MatchRole(const NamingScheme& scheme, std::string_view rest, Dtype dtype, ExpertName& match) {
  match.expert = 0;
  if (scheme.fusion == Fusion::kNone) {
    const std::optional<uint32_t> expert = TakeNumber(rest);
    if (!expert || !TakePrefix(rest, ".")) return false;
    match.expert = *expert;
  }
  for (size_t role = 0; role < kProjectionCount; ++role) {
    std::string_view suffix = rest;
    if (scheme.roles[role].empty() || !TakePrefix(suffix, scheme.roles[role])) continue;
    match.projection = static_cast<Projection>(role);
    if (MatchPart(scheme, suffix, dtype, match)) return true;
  }
  return false;
}

// One scheme's reading of a name, in a match without schemes.
std::optional<ExpertName> MatchScheme(const NamingScheme& scheme, const Tensor& tensor) {
  for (const LayerNaming& layer : scheme.layers) {
    std::string_view rest = tensor.name;
    if (!TakePrefix(rest, layer.head)) continue;
    const std::optional<uint32_t> number = TakeNumber(rest);
    if (!number || !TakePrefix(rest, layer.middle) || !TakePrefix(rest, "experts.")) continue;
    ExpertName match = {.layer = &layer, .layer_number = *number};
    if (MatchRole(scheme, rest, tensor.dtype, match)) return match;
  }
  return std::nullopt;
}

}  // namespace

std::span<const NamingScheme> NamingSchemes() { return kSchemes; }

std::optional<ExpertName> MatchExpertTensor(const Tensor& tensor) {
  std::optional<ExpertName> found;
  uint32_t schemes = 0;
  for (size_t i = 0; i < kSchemes.size(); ++i) {
    const std::optional<ExpertName> match = MatchScheme(kSchemes[i], tensor);
    if (!match) continue;
    if (!found) found = match;
    schemes |= uint32_t{1} << i;
  }
  if (found) found->schemes = schemes;
  return found;
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
