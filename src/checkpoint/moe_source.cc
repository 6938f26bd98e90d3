#include "checkpoint/moe_source.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "base/format_text.h"
#include "checkpoint/model_config.h"
#include "checkpoint/naming_scheme.h"
#include "format/tsym4.h"

namespace hotplane {
namespace {

// Planes are tiled in 64 columns, and both hidden and intermediate are columns of one matrix.
constexpr uint64_t kShapeMultiple = kTileColumns;
constexpr uint64_t kDimensionMax = uint64_t{1} << 30;
// Expert numbers in names have at most five digits; a router with more rows is none.
constexpr uint64_t kExpertCountMax = 100'000;

// Collects names for a message: the first ten and how many there are.
class NameList {
 public:
  void Add(std::string name) {
    if (names_.size() < kShownMax) names_.push_back(std::move(name));
    ++count_;
  }
  void Count(uint64_t more) { count_ += more; }
  bool full() const { return names_.size() == kShownMax; }
  uint64_t count() const { return count_; }
  std::string Text() const {
    std::string text;
    for (const std::string& name : names_) text += (text.empty() ? "" : ", ") + name;
    if (count_ > names_.size()) text += hotplane::Text(" and {} more", count_ - names_.size());
    return text + hotplane::Text(" ({} in all)", count_);
  }

 private:
  static constexpr size_t kShownMax = 10;
  std::vector<std::string> names_;
  uint64_t count_ = 0;
};

std::string Describe(const Tensor& tensor) {
  return Text("{} {} {}", tensor.name, DtypeName(tensor.dtype), ShapeText(tensor.shape));
}

// One expert tensor, keyed by its place in the model.
struct Place {
  ExpertName name;
  const Tensor* tensor = nullptr;

  auto LayerKey() const { return std::tuple(name.layer->mtp, name.layer_number); }
  auto Key() const {
    return std::tuple(name.layer->mtp, name.layer_number, name.expert, name.projection, name.scale);
  }
};

// "layers.3" of "layers.3.ffn.experts.7.w1.weight".
std::string LayerBase(const ExpertName& name) {
  return Text("{}{}", name.layer->head, name.layer_number);
}
std::string LayerPrefix(const ExpertName& name) {
  return LayerBase(name) + std::string(name.layer->middle);
}

// Sorts the tensors that are routed experts into their places; refuses what looks like a routed
// expert and has none.
Result<std::vector<Place>> CollectPlaces(const Checkpoint& checkpoint) {
  std::vector<Place> places;
  NameList unmatched;
  std::optional<UnreadFormat> unread;
  const Tensor* first_unmatched = nullptr;
  for (const Tensor& tensor : checkpoint.tensors()) {
    if (tensor.name.find(kExpertsInfix) == std::string::npos) continue;
    if (const std::optional<ExpertName> name = MatchExpertTensor(tensor)) {
      places.push_back({*name, &tensor});
      continue;
    }
    if (first_unmatched == nullptr) first_unmatched = &tensor;
    unmatched.Add(Describe(tensor));
    const std::optional<UnreadFormat> sign = RecognizeUnreadFormat(tensor);
    if (sign && (!unread || sign->rank < unread->rank)) unread = sign;
  }
  if (first_unmatched == nullptr) return places;
  Status status =
      unread
          ? Status::Data(Text("the routed experts look like {}, which this version does not read",
                              unread->name))
          : Status::Data("tensors look like routed experts but fit no known naming scheme");
  return Fail(std::move(status)
                  .File(checkpoint.files()[first_unmatched->file])
                  .At(first_unmatched->offset)
                  .Expected("experts.E.{w1,w2,w3}.weight I8 with .scale F8_E8M0 (MXFP4, DeepSeek "
                            "names), or experts.E.{gate,up,down}_proj.weight or {w1,w2,w3}.weight "
                            "in BF16, F16 or F32")
                  .Found(unmatched.Text()));
}

Status NoExpertsStatus(const Checkpoint& checkpoint) {
  const size_t count = checkpoint.tensors().size();
  return Status::Data("the checkpoint has no routed experts")
      .File(checkpoint.path())
      .Expected(
          "tensors such as layers.N.ffn.experts.E.w1.weight, "
          "model.layers.N.mlp.experts.E.gate_proj.weight or "
          "model.layers.N.block_sparse_moe.experts.E.w1.weight")
      .Found(count == 0
                 ? std::string("no tensors at all")
                 : Text("{} tensors, the first is {}", count, checkpoint.tensors().front().name))
      .Advice("dense models have nothing to tier; name the folder of a Mixture-of-Experts model");
}

// Builds one layer from its places, which are sorted by Key().
class LayerReader {
 public:
  LayerReader(const Checkpoint& checkpoint, std::span<const Place> places)
      : checkpoint_(checkpoint), places_(places), name_(places.front().name) {}

  Result<MoeLayer> Read() {
    prefix_ = LayerPrefix(name_);
    HP_TRY(CheckOneNaming());
    HP_TRY(CheckComplete());
    HP_TRY(CheckDtypes());
    HP_TRY(CheckShapes());
    MoeLayer layer;
    layer.model_index = name_.layer_number;
    layer.mtp = name_.layer->mtp;
    if (!name_.scheme->mtp_marker.empty()) {
      layer.mtp |=
          checkpoint_.Find(LayerBase(name_) + std::string(name_.scheme->mtp_marker)) != nullptr;
    }
    layer.prefix = prefix_;
    layer.format = element_->format;
    layer.geometry = {.experts = expert_count_,
                      .hidden = static_cast<uint32_t>(hidden_),
                      .intermediate = static_cast<uint32_t>(intermediate_)};
    layer.experts.resize(expert_count_);
    for (const Place& place : places_) {
      ExpertTensors& expert = layer.experts[place.name.expert];
      const auto projection = static_cast<size_t>(place.name.projection);
      (place.name.scale ? expert.scale : expert.weight)[projection] = place.tensor;
    }
    return layer;
  }

 private:
  // What an error is about: the file and offset of one of the layer's tensors.
  Status&& Locate(Status&& status, const Tensor& tensor) const {
    return std::move(status).File(checkpoint_.files()[tensor.file]).At(tensor.offset);
  }

  Result<void> CheckOneNaming() const {
    const Place* before = nullptr;
    for (const Place& place : places_) {
      const bool same_naming = place.name.layer == name_.layer;
      const bool twin = before != nullptr && before->Key() == place.Key();
      if (!same_naming || twin) {
        const Tensor& other = twin ? *before->tensor : *places_.front().tensor;
        Status status = Status::Data(twin ? "an expert tensor is there twice"
                                          : "one layer's experts are named in two ways");
        return Fail(Locate(std::move(status), *place.tensor)
                        .Expected(Text("only {}", Describe(other)))
                        .Found(Text("also {}", Describe(*place.tensor))));
      }
      before = &place;
    }
    return {};
  }

  bool has_scales() const { return !name_.scheme->scale_suffix.empty(); }

  std::string ExpectedName(uint64_t expert, size_t projection, bool scale) const {
    const NamingScheme& scheme = *name_.scheme;
    return Text("{}experts.{}.{}{}", prefix_, expert, scheme.roles[projection],
                scale ? scheme.scale_suffix : scheme.weight_suffix);
  }

  // Every expert from 0 to the last one that is named, or that the router can choose, has every
  // tensor. The loop ends once ten names are known: expert numbers come from outside.
  Result<void> CheckComplete() {
    const Tensor* router = checkpoint_.Find(prefix_ + std::string(name_.scheme->router));
    uint64_t expert_count = uint64_t{places_.back().name.expert} + 1;
    const bool router_tells =
        router != nullptr && router->shape.size() == 2 && router->shape[0] <= kExpertCountMax;
    if (router_tells && router->shape[0] < expert_count) {
      Status status =
          Status::Data(Text("there are more experts in {} than its router can choose", prefix_));
      return Fail(Locate(std::move(status), *router)
                      .Expected(Text("{} to have {} rows", router->name, expert_count))
                      .Found(ShapeText(router->shape)));
    }
    if (router_tells) expert_count = router->shape[0];
    const uint64_t slots = kProjectionCount * (has_scales() ? 2 : 1);
    NameList missing;
    auto place = places_.begin();
    for (uint64_t i = 0; i < expert_count * slots && !missing.full(); ++i) {
      const uint64_t expert = i / slots;
      const size_t projection = i % slots / (has_scales() ? 2 : 1);
      const bool scale = has_scales() && i % 2 == 1;
      const bool here = place != places_.end() && place->name.expert == expert &&
                        static_cast<size_t>(place->name.projection) == projection &&
                        place->name.scale == scale;
      if (here) {
        ++place;
      } else {
        missing.Add(ExpectedName(expert, projection, scale));
      }
    }
    if (missing.count() == 0) {
      expert_count_ = static_cast<uint32_t>(expert_count);
      return {};
    }
    missing.Count(expert_count * slots - places_.size() - missing.count());
    Status status =
        Status::Data(Text("expert tensors are missing in {}", prefix_)).File(checkpoint_.path());
    return Fail(std::move(status)
                    .Expected(Text("{} experts of {} tensors each{}", expert_count, slots,
                                   router_tells ? Text(", as {} says", router->name) : ""))
                    .Found(Text("none of {}", missing.Text()))
                    .Advice("fetch the missing shards of the checkpoint"));
  }

  Result<void> CheckDtypes() {
    const Dtype dtype = places_.front().tensor->dtype;
    NameList others;
    const Tensor* first = nullptr;
    for (const Place& place : places_) {
      if (place.name.scale || place.tensor->dtype == dtype) continue;
      if (first == nullptr) first = place.tensor;
      others.Add(Describe(*place.tensor));
    }
    for (const ElementType& element : name_.scheme->elements) {
      if (element.dtype == dtype) element_ = &element;
    }
    if (first == nullptr) return {};
    Status status = Status::Data(Text("expert tensors in {} are of unequal dtype", prefix_));
    return Fail(Locate(std::move(status), *first)
                    .Expected(Text("{}, as {}", DtypeName(dtype), places_.front().tensor->name))
                    .Found(others.Text()));
  }

  std::vector<uint64_t> ExpectedShape(const ExpertName& name) const {
    const bool down = name.projection == Projection::kDown;
    const uint64_t out = down ? hidden_ : intermediate_;
    const uint64_t in = down ? intermediate_ : hidden_;
    const uint64_t values = name.scale ? name_.scheme->scale_block : element_->values_per_element;
    return {out, in / values};
  }

  // Hidden and intermediate come from expert 0's gate matrix; all others must agree.
  Result<void> CheckShapes() {
    const Tensor& gate = *places_.front().tensor;
    if (gate.shape.size() != 2) {
      Status status = Status::Data(Text("expert tensor {} is not a matrix", gate.name));
      return Fail(
          Locate(std::move(status), gate).Expected("[out, in]").Found(ShapeText(gate.shape)));
    }
    const auto fits = [](uint64_t n) {
      return n > 0 && n % kShapeMultiple == 0 && n <= kDimensionMax;
    };
    intermediate_ = gate.shape[0];
    hidden_ = gate.shape[1] <= kDimensionMax ? gate.shape[1] * element_->values_per_element : 0;
    if (!fits(intermediate_) || !fits(hidden_)) {
      Status status = Status::Data(Text("expert shapes in {} are not supported", prefix_));
      return Fail(Locate(std::move(status), gate)
                      .Expected(Text("hidden and intermediate sizes that are multiples of {}",
                                     kShapeMultiple))
                      .Found(Text("hidden {}, intermediate {}, from {}", hidden_, intermediate_,
                                  Describe(gate))));
    }
    NameList unequal;
    const Place* first = nullptr;
    for (const Place& place : places_) {
      if (place.tensor->shape == ExpectedShape(place.name)) continue;
      if (first == nullptr) first = &place;
      unequal.Add(Describe(*place.tensor));
    }
    if (first == nullptr) return {};
    Status status = Status::Data(Text("expert tensors in {} are of unequal shape", prefix_));
    return Fail(Locate(std::move(status), *first->tensor)
                    .Expected(Text("{} for {}, from {} {}", ShapeText(ExpectedShape(first->name)),
                                   first->tensor->name, gate.name, ShapeText(gate.shape)))
                    .Found(unequal.Text()));
  }

  const Checkpoint& checkpoint_;
  const std::span<const Place> places_;
  const ExpertName& name_;
  std::string prefix_;
  uint32_t expert_count_ = 0;
  const ElementType* element_ = nullptr;
  uint64_t hidden_ = 0;
  uint64_t intermediate_ = 0;
};

// The highest N of "<head>N." plus one, over all tensors: dense layers count.
uint32_t CountMainLayers(const Checkpoint& checkpoint, const NamingScheme& scheme) {
  uint32_t count = 0;
  for (const LayerNaming& layer : scheme.layers) {
    if (layer.mtp) continue;
    for (const Tensor& tensor : checkpoint.tensors()) {
      const std::optional<uint32_t> number = MatchLayerNumber(layer.head, tensor.name);
      if (number) count = std::max(count, *number + 1);
    }
  }
  return count;
}

Result<std::vector<MoeLayer>> ReadLayers(const Checkpoint& checkpoint,
                                         std::span<const Place> places, std::string& scheme_names) {
  std::vector<MoeLayer> layers;
  std::map<const NamingScheme*, uint32_t> main_layer_counts;
  for (auto begin = places.begin(); begin != places.end();) {
    const auto end = std::find_if(begin, places.end(), [&](const Place& place) {
      return place.LayerKey() != begin->LayerKey();
    });
    HP_ASSIGN(MoeLayer layer, LayerReader(checkpoint, {begin, end}).Read());
    const NamingScheme* scheme = begin->name.scheme;
    const auto [count, first_use] = main_layer_counts.try_emplace(scheme, 0);
    if (first_use) {
      count->second = CountMainLayers(checkpoint, *scheme);
      scheme_names += (scheme_names.empty() ? "" : "+") + std::string(scheme->name);
    }
    if (begin->name.layer->mtp) layer.model_index += count->second;
    layers.push_back(std::move(layer));
    begin = end;
  }
  std::sort(layers.begin(), layers.end(), [](const MoeLayer& a, const MoeLayer& b) {
    return std::tie(a.mtp, a.model_index) < std::tie(b.mtp, b.model_index);
  });
  for (size_t i = 0; i < layers.size(); ++i) layers[i].ordinal = static_cast<uint32_t>(i);
  return layers;
}

Result<void> ApplyConfig(const Checkpoint& checkpoint, MoeModel& model) {
  const std::string folder =
      checkpoint.files().empty() ? checkpoint.path() : ParentPath(checkpoint.files().front());
  const std::string path = JoinPath(folder, "config.json");
  HP_ASSIGN(const ModelConfig config, ParseModelConfig(checkpoint.config_text(), path));
  model.top_k = config.top_k;
  if (config.swiglu_limit) {
    model.activation = {.kind = ActivationKind::kSiluGatedClamped, .limit = *config.swiglu_limit};
  }
  uint32_t expert_count_max = 0;
  for (const MoeLayer& layer : model.layers) {
    expert_count_max = std::max(expert_count_max, layer.geometry.experts);
  }
  if (model.top_k && *model.top_k > expert_count_max) {
    return Fail(Status::Data("config.json asks for more experts per token than there are")
                    .File(path)
                    .Expected(Text("num_experts_per_tok of at most {}", expert_count_max))
                    .Found(Text("{}", *model.top_k)));
  }
  return {};
}

}  // namespace

Result<MoeModel> DiscoverMoe(const Checkpoint& checkpoint) {
  HP_ASSIGN(std::vector<Place> places, CollectPlaces(checkpoint));
  if (places.empty()) return Fail(NoExpertsStatus(checkpoint));
  std::sort(places.begin(), places.end(),
            [](const Place& a, const Place& b) { return a.Key() < b.Key(); });
  MoeModel model;
  HP_ASSIGN(model.layers, ReadLayers(checkpoint, places, model.scheme));
  HP_TRY(ApplyConfig(checkpoint, model));
  return model;
}

Manifest MakeManifest(const MoeModel& model, const Digest128& fingerprint, ZeroMode zero_mode) {
  Manifest manifest;
  manifest.identity = {.source_fingerprint = fingerprint,
                       .abi = kPlaneAbiName,
                       .zero_mode = zero_mode,
                       .shard_world = 1,
                       .shard_axis = "none"};
  manifest.scheme = model.scheme;
  manifest.activation = model.activation;
  manifest.top_k = model.top_k;
  for (const MoeLayer& layer : model.layers) {
    manifest.layers.push_back({.ordinal = layer.ordinal,
                               .model_index = layer.model_index,
                               .mtp = layer.mtp,
                               .prefix = layer.prefix,
                               .geometry = layer.geometry,
                               .source_format = layer.format});
  }
  return manifest;
}

}  // namespace hotplane
