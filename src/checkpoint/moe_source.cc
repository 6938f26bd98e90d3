#include "checkpoint/moe_source.h"

#include <algorithm>
#include <bit>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "base/format_text.h"
#include "base/number_text.h"
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
  // Of the first ten.
  bool Shows(const std::string& name) const {
    return std::find(names_.begin(), names_.end(), name) != names_.end();
  }
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
    return std::tuple(name.layer->mtp, name.layer_number, name.expert, name.projection, name.part);
  }
};

// "layers.3" of "layers.3.ffn.experts.7.w1.weight".
std::string LayerBase(const ExpertName& name) {
  return Text("{}{}", name.layer->head, name.layer_number);
}
std::string LayerPrefix(const ExpertName& name) {
  return LayerBase(name) + std::string(name.layer->middle);
}

// The tensors that are routed experts, sorted by Key(), and those that only look like it.
struct Places {
  std::vector<Place> known;
  std::vector<const Tensor*> unmatched;
};
Places CollectPlaces(const Checkpoint& checkpoint) {
  Places places;
  for (const Tensor& tensor : checkpoint.tensors()) {
    if (tensor.name.find(kExpertsInfix) == std::string::npos) continue;
    if (const std::optional<ExpertName> name = MatchExpertTensor(tensor)) {
      places.known.push_back({*name, &tensor});
    } else {
      places.unmatched.push_back(&tensor);
    }
  }
  std::sort(places.known.begin(), places.known.end(),
            [](const Place& a, const Place& b) { return a.Key() < b.Key(); });
  return places;
}

Status UnmatchedStatus(const Checkpoint& checkpoint, std::span<const Tensor* const> unmatched) {
  NameList names;
  std::optional<UnreadFormat> unread;
  for (const Tensor* tensor : unmatched) {
    names.Add(Describe(*tensor));
    const std::optional<UnreadFormat> sign = RecognizeUnreadFormat(*tensor);
    if (sign && (!unread || sign->rank < unread->rank)) unread = sign;
  }
  Status status =
      unread
          ? Status::Data(Text("the routed experts look like {}, which this version does not read",
                              unread->name))
          : Status::Data("tensors look like routed experts but fit no known naming scheme");
  return std::move(status)
      .File(checkpoint.files()[unmatched.front()->file])
      .At(unmatched.front()->offset)
      .Expected(
          "per expert: .weight in BF16, F16 or F32, I8 with .scale F8_E8M0 (MXFP4), U8 with "
          ".weight_scale and .weight_scale_2 (NVFP4), .weight_packed U8 with .weight_scale, "
          "F8_E4M3 with .weight_scale_inv; per layer: gate_up_proj_blocks (gpt-oss) or "
          "gate_up_proj in BF16, F16 or F32; docs/checkpoints.md has the table")
      .Found(names.Text());
}

Status NoExpertsStatus(const Checkpoint& checkpoint) {
  const size_t count = checkpoint.tensors().size();
  return Status::Data("the checkpoint has no routed experts")
      .File(checkpoint.path())
      .Expected(
          "tensors such as layers.N.ffn.experts.E.w1.weight, "
          "model.layers.N.mlp.experts.E.gate_proj.weight, "
          "model.layers.N.mlp.experts.gate_up_proj or "
          "model.layers.N.block_sparse_moe.experts.E.w1.weight")
      .Found(count == 0
                 ? std::string("no tensors at all")
                 : Text("{} tensors, the first is {}", count, checkpoint.tensors().front().name))
      .Advice("dense models have nothing to tier; name the folder of a Mixture-of-Experts model");
}

SourceFormat FormatOf(const NamingScheme& scheme, Dtype weight) {
  if (scheme.format != SourceFormat::kInvalid) return scheme.format;
  switch (weight) {
    case Dtype::kF16: return SourceFormat::kF16;
    case Dtype::kF32: return SourceFormat::kF32;
    default: return SourceFormat::kBf16;
  }
}

uint64_t CeilDivide(uint64_t a, uint64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// Builds one layer from its places, which are sorted by Key().
class LayerReader {
 public:
  LayerReader(const Checkpoint& checkpoint, const ModelConfig& config,
              std::span<const Place> places)
      : checkpoint_(checkpoint),
        config_(config),
        all_(places),
        name_(places.front().name),
        prefix_(LayerPrefix(name_)) {}

  Result<MoeLayer> Read() {
    HP_TRY(CheckOneNaming());
    HP_TRY(ChooseScheme());
    HP_TRY(CheckComplete());
    HP_TRY(CheckDtypes());
    HP_TRY(ReadGeometry());
    HP_TRY(CheckShapes());
    MoeLayer layer;
    layer.model_index = name_.layer_number;
    layer.mtp = name_.layer->mtp;
    if (!scheme_->mtp_marker.empty()) {
      layer.mtp |= checkpoint_.Find(LayerBase(name_) + std::string(scheme_->mtp_marker)) != nullptr;
    }
    layer.prefix = prefix_;
    layer.scheme = scheme_->name;
    layer.format = format_;
    layer.geometry = {.experts = expert_count_,
                      .hidden = static_cast<uint32_t>(hidden_),
                      .intermediate = static_cast<uint32_t>(intermediate_),
                      .biases = RuleOf(ExpertPart::kBias) != nullptr};
    if (format_ == SourceFormat::kFp8) layer.fp8_block = *block_;
    layer.divide_by_global_scale = scheme_->divide_by_global_scale;
    layer.interleaved_rows = scheme_->fusion == Fusion::kInterleaved;
    layer.experts.resize(expert_count_);
    if (fused()) {
      SliceExperts(layer);
    } else {
      for (const Place& place : places_) {
        *SlotOf(layer.experts[place.name.expert], place.name.part, place.name.projection) =
            place.tensor;
      }
    }
    return layer;
  }

  const NamingScheme* scheme() const { return scheme_; }
  const NameList& missing() const { return missing_; }
  // Of what is missing, other experts of the layer have all: their names are known, and the format.
  bool some_experts_lack_tensors() const {
    return missing_.count() > 0 &&
           std::all_of(slots_.begin(), slots_.end(), [this](const Slot& slot) {
             return std::any_of(places_.begin(), places_.end(), [&slot](const Place& place) {
               return place.name.projection == slot.projection &&
                      place.name.part == slot.rule->part;
             });
           });
  }

 private:
  struct Slot {
    Projection projection;
    const PartRule* rule;
  };

  bool fused() const { return scheme_->fusion != Fusion::kNone; }

  // What an error is about: the file and offset of one of the layer's tensors.
  Status&& Locate(Status&& status, const Tensor& tensor) const {
    return std::move(status).File(checkpoint_.files()[tensor.file]).At(tensor.offset);
  }

  const PartRule* RuleOf(ExpertPart part) const {
    for (const PartRule& rule : scheme_->parts) {
      if (rule.part == part) return &rule;
    }
    return nullptr;
  }

  Result<void> CheckOneNaming() const {
    const Place* before = nullptr;
    for (const Place& place : all_) {
      const bool same_naming = place.name.layer == name_.layer;
      const bool twin = before != nullptr && before->Key() == place.Key() && !same_naming;
      if (!same_naming || twin) {
        const Tensor& other = twin ? *before->tensor : *all_.front().tensor;
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

  // The first scheme that knows all tensors of the layer.
  Result<void> ChooseScheme() {
    uint32_t schemes = UINT32_MAX;
    for (const Place& place : all_) {
      if ((schemes & place.name.schemes) == 0) {
        scheme_ = &NamingSchemes()[static_cast<size_t>(std::countr_zero(schemes))];
        Status status = Status::Data(Text("the experts in {} are in two formats", prefix_));
        return Fail(
            Locate(std::move(status), *place.tensor)
                .Expected(Text("only {}, as {}", scheme_->name, Describe(*all_.front().tensor)))
                .Found(Text("also {}", Describe(*place.tensor)))
                .Advice("the files are of different exports: fetch the checkpoint again"));
      }
      schemes &= place.name.schemes;
    }
    scheme_ = &NamingSchemes()[static_cast<size_t>(std::countr_zero(schemes))];
    for (const Place& place : all_) {
      if (place.name.part != ExpertPart::kUnused) places_.push_back(place);
    }
    for (const PartRule& rule : scheme_->parts) {
      for (size_t p = 0; p < kProjectionCount; ++p) {
        if (rule.part == ExpertPart::kUnused || scheme_->roles[p].empty()) continue;
        slots_.push_back({static_cast<Projection>(p), &rule});
      }
    }
    std::sort(slots_.begin(), slots_.end(), [](const Slot& a, const Slot& b) {
      return std::pair(a.projection, a.rule->part) < std::pair(b.projection, b.rule->part);
    });
    return {};
  }

  std::string ExpectedName(uint64_t expert, const Slot& slot) const;

  // The rows of the router: how many experts it can choose from.
  const Tensor* FindRouter() const {
    const Tensor* router = checkpoint_.Find(prefix_ + std::string(scheme_->router));
    const bool tells =
        router != nullptr && router->shape.size() == 2 && router->shape[0] <= kExpertCountMax;
    return tells ? router : nullptr;
  }

  Status RouterStatus(const Tensor& router, uint64_t expert_count) const {
    Status status = Status::Data(Text("there are {} experts in {} than its router can choose",
                                      router.shape[0] < expert_count ? "more" : "fewer", prefix_));
    return Locate(std::move(status), router)
        .Expected(Text("{} to have {} rows", router.name, expert_count))
        .Found(ShapeText(router.shape));
  }

  // Every expert from 0 to the last one that is named, or that the router can choose, has every
  // tensor. The loop ends once ten names are known: expert numbers come from outside.
  Result<void> CheckComplete() {
    const Tensor* router = FindRouter();
    uint64_t expert_count = all_.back().name.expert + uint64_t{1};
    if (!fused() && router != nullptr) {
      if (router->shape[0] < expert_count) return Fail(RouterStatus(*router, expert_count));
      expert_count = router->shape[0];
    }
    auto place = places_.begin();
    for (uint64_t i = 0; i < expert_count * slots_.size() && !missing_.full(); ++i) {
      const uint64_t expert = i / slots_.size();
      const Slot& slot = slots_[i % slots_.size()];
      const bool here = place != places_.end() && place->name.expert == expert &&
                        place->name.projection == slot.projection &&
                        place->name.part == slot.rule->part;
      if (here) {
        ++place;
      } else {
        missing_.Add(ExpectedName(expert, slot));
      }
    }
    if (missing_.count() == 0) {
      expert_count_ = static_cast<uint32_t>(expert_count);
      return {};
    }
    missing_.Count(expert_count * slots_.size() - places_.size() - missing_.count());
    Status status =
        Status::Data(Text("expert tensors are missing in {}", prefix_)).File(checkpoint_.path());
    return Fail(
        std::move(status)
            .Expected(fused() ? Text("{}, as {} has them", Counted(slots_.size(), "tensors"),
                                     scheme_->name)
                              : Text("{} of {} each{}", Counted(expert_count, "experts"),
                                     Counted(slots_.size(), "tensors"),
                                     router != nullptr ? Text(", as {} says", router->name) : ""))
            .Found(Text("none of {}", missing_.Text()))
            .Advice("fetch the missing shards of the checkpoint"));
  }

  Result<void> CheckDtypes() {
    const Dtype dtype = places_.front().tensor->dtype;
    NameList others;
    const Tensor* first = nullptr;
    for (const Place& place : places_) {
      if (place.name.part != ExpertPart::kWeight || place.tensor->dtype == dtype) continue;
      if (first == nullptr) first = place.tensor;
      others.Add(Describe(*place.tensor));
    }
    format_ = FormatOf(*scheme_, dtype);
    if (first == nullptr) return {};
    Status status = Status::Data(Text("expert tensors in {} are of unequal dtype", prefix_));
    return Fail(Locate(std::move(status), *first)
                    .Expected(Text("{}, as {}", DtypeName(dtype), places_.front().tensor->name))
                    .Found(others.Text()));
  }

  // Hidden and intermediate come from expert 0's gate matrix, for fused tensors from gate and up;
  // CheckShapes holds all others to them.
  Result<void> ReadGeometry();
  Result<void> CheckFusedOrder() const;
  Result<void> CheckShapes();
  std::vector<uint64_t> ExpectedShape(const ExpertName& name) const;
  bool FitsShape(const Place& place) const {
    const std::vector<uint64_t> expected = ExpectedShape(place.name);
    const bool one = expected.empty() && place.tensor->shape.size() == 1 &&
                     place.tensor->shape[0] == 1;  // a scalar may be [1]
    return one || place.tensor->shape == expected;
  }

  static const Tensor** SlotOf(ExpertTensors& expert, ExpertPart part, Projection projection) {
    auto& tensors = part == ExpertPart::kWeight  ? expert.weight
                    : part == ExpertPart::kScale ? expert.scale
                    : part == ExpertPart::kBias  ? expert.bias
                                                 : expert.global_scale;
    return &tensors[static_cast<size_t>(projection)];
  }
  void SliceExperts(MoeLayer& layer) const;

  const Checkpoint& checkpoint_;
  const ModelConfig& config_;
  const std::span<const Place> all_;
  const ExpertName& name_;
  const std::string prefix_;
  const NamingScheme* scheme_ = nullptr;
  std::vector<Place> places_;  // those that are used
  std::vector<Slot> slots_;    // what every expert (of a fused scheme: the layer) must have
  NameList missing_;
  SourceFormat format_ = SourceFormat::kInvalid;
  std::optional<BlockShape> block_;
  uint32_t expert_count_ = 0;
  uint64_t hidden_ = 0;
  uint64_t intermediate_ = 0;
};

std::string LayerReader::ExpectedName(uint64_t expert, const Slot& slot) const {
  const std::string_view role = scheme_->roles[static_cast<size_t>(slot.projection)];
  if (fused()) return Text("{}experts.{}{}", prefix_, role, slot.rule->suffix);
  return Text("{}experts.{}.{}{}", prefix_, expert, role, slot.rule->suffix);
}

Result<void> LayerReader::ReadGeometry() {
  const Tensor& gate = *places_.front().tensor;
  const PartRule& rule = *RuleOf(ExpertPart::kWeight);
  const bool block_bytes = rule.shape == ShapeRule::kBlockBytes;
  const size_t rank = (fused() ? 3 : 2) + (block_bytes ? 1 : 0);
  if (gate.shape.size() != rank) {
    Status status = Status::Data(Text("expert tensor {} is not {}", gate.name,
                                      fused() ? "a stack of matrices" : "a matrix"));
    return Fail(Locate(std::move(status), gate)
                    .Expected(fused() ? (block_bytes ? "[experts, 2 * out, in / 32, 16]"
                                                     : "[experts, 2 * out, in]")
                                      : "[out, in]")
                    .Found(ShapeText(gate.shape)));
  }
  HP_TRY(CheckFusedOrder());
  const uint64_t rows = gate.shape[fused() ? 1 : 0];
  const uint64_t columns = gate.shape[fused() ? 2 : 1];
  intermediate_ = fused() ? rows / 2 : rows;
  const uint64_t factor = block_bytes ? kScaleBlock : rule.divisor;
  hidden_ = columns <= kDimensionMax ? columns * factor : 0;
  const auto fits = [](uint64_t n) {
    return n > 0 && n % kShapeMultiple == 0 && n <= kDimensionMax;
  };
  if (!fits(intermediate_) || !fits(hidden_) || (fused() && rows % 2 != 0)) {
    Status status = Status::Data(Text("expert shapes in {} are not supported", prefix_));
    return Fail(Locate(std::move(status), gate)
                    .Expected(Text("hidden and intermediate sizes that are multiples of {}",
                                   kShapeMultiple))
                    .Found(Text("hidden {}, intermediate {}, from {}", hidden_, intermediate_,
                                Describe(gate))));
  }
  if (!fused()) return {};
  if (gate.shape[0] == 0 || gate.shape[0] > kExpertCountMax) {
    Status status = Status::Data(Text("the number of experts in {} is impossible", prefix_));
    return Fail(Locate(std::move(status), gate)
                    .Expected(Text("1 to {}", kExpertCountMax))
                    .Found(Describe(gate)));
  }
  expert_count_ = static_cast<uint32_t>(gate.shape[0]);
  const Tensor* router = FindRouter();
  if (router != nullptr && router->shape[0] != expert_count_) {
    return Fail(RouterStatus(*router, expert_count_));
  }
  return {};
}

// [E, in, out] instead of [E, out, in]: gate and up then have the rows that down has columns.
Result<void> LayerReader::CheckFusedOrder() const {
  if (scheme_->fusion != Fusion::kHalves) return {};
  const Tensor& gate_up = *places_.front().tensor;
  const Tensor& down = *places_.back().tensor;
  const bool transposed = down.shape.size() == 3 && gate_up.shape[1] == down.shape[2] &&
                          down.shape[1] <= kDimensionMax && gate_up.shape[2] == 2 * down.shape[1];
  if (!transposed) return {};
  Status status = Status::Data(Text("the fused experts in {} are stored transposed", prefix_));
  return Fail(Locate(std::move(status), gate_up)
                  .Expected("gate_up_proj [E, 2I, H] and down_proj [E, H, I]")
                  .Found(Text("{} and {}", Describe(gate_up), Describe(down)))
                  .Advice("this version does not read that order: convert the checkpoint"));
}

std::vector<uint64_t> LayerReader::ExpectedShape(const ExpertName& name) const {
  const PartRule& rule = *RuleOf(name.part);
  const bool down = name.projection == Projection::kDown;
  const uint64_t out = down ? hidden_ : fused() ? 2 * intermediate_ : intermediate_;
  const uint64_t in = down ? intermediate_ : hidden_;
  std::vector<uint64_t> shape;
  if (fused()) shape.push_back(expert_count_);
  switch (rule.shape) {
    case ShapeRule::kRows: shape.insert(shape.end(), {out, in / rule.divisor}); break;
    case ShapeRule::kBlockBytes:
      shape.insert(shape.end(), {out, in / kScaleBlock, kScaleBlock / 2});
      break;
    case ShapeRule::kGrid:
      shape.insert(shape.end(), {CeilDivide(out, block_->rows), CeilDivide(in, block_->columns)});
      break;
    case ShapeRule::kVector: shape.push_back(out); break;
    case ShapeRule::kScalar:
    case ShapeRule::kInvalid: break;
  }
  return shape;
}

Result<void> LayerReader::CheckShapes() {
  const Tensor& gate = *places_.front().tensor;
  if (format_ == SourceFormat::kFp8) {
    if (!config_.weight_block_size) {
      Status status =
          Status::Data(Text("the block shape of the FP8 scales in {} is not known", prefix_));
      return Fail(Locate(std::move(status), gate)
                      .Expected("quantization_config.weight_block_size in config.json")
                      .Found("none")
                      .Advice("fetch the config.json that belongs to the checkpoint"));
    }
    block_ = {.rows = config_.weight_block_size->first,
              .columns = config_.weight_block_size->second};
  }
  NameList unequal;
  const Place* first = nullptr;
  for (const Place& place : places_) {
    if (FitsShape(place)) continue;
    if (first == nullptr) first = &place;
    unequal.Add(Describe(*place.tensor));
  }
  if (first == nullptr) return {};
  Status status = Status::Data(Text("expert tensors in {} are of unequal shape", prefix_));
  return Fail(
      Locate(std::move(status), *first->tensor)
          .Expected(Text("{} for {}, from {} {}{}", ShapeText(ExpectedShape(first->name)),
                         first->tensor->name, gate.name, ShapeText(gate.shape),
                         block_ ? Text(" and blocks of {}x{}", block_->rows, block_->columns) : ""))
          .Found(unequal.Text()));
}

// Every expert's bytes of each tensor, for gate and up one half of its rows each.
void LayerReader::SliceExperts(MoeLayer& layer) const {
  auto slices = std::make_shared<std::vector<Tensor>>();
  slices->reserve(places_.size() * expert_count_ * 2);
  const auto add = [&](const Tensor& whole, uint32_t expert, uint32_t part, uint32_t parts) {
    Tensor slice = whole;
    slice.shape.erase(slice.shape.begin());
    slice.shape[0] /= parts;
    slice.bytes = whole.bytes / expert_count_ / parts;
    slice.offset = whole.offset + (uint64_t{expert} * parts + part) * slice.bytes;
    slice.name = parts == 1 ? Text("{}[{}]", whole.name, expert)
                            : Text("{}[{}, {}:{}]", whole.name, expert, part * slice.shape[0],
                                   (part + 1) * slice.shape[0]);
    slices->push_back(std::move(slice));
    return &slices->back();
  };
  for (const Place& place : places_) {
    for (uint32_t e = 0; e < expert_count_; ++e) {
      ExpertTensors& expert = layer.experts[e];
      if (place.name.projection == Projection::kDown) {
        *SlotOf(expert, place.name.part, Projection::kDown) = add(*place.tensor, e, 0, 1);
      } else {
        *SlotOf(expert, place.name.part, Projection::kGate) = add(*place.tensor, e, 0, 2);
        *SlotOf(expert, place.name.part, Projection::kUp) = add(*place.tensor, e, 1, 2);
      }
    }
  }
  layer.slices = std::move(slices);
}

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

// The places of the layer that begins at `begin`.
std::span<const Place> LayerPlaces(std::span<const Place> places, size_t begin) {
  size_t end = begin;
  while (end < places.size() && places[end].LayerKey() == places[begin].LayerKey()) ++end;
  return places.subspan(begin, end - begin);
}

Result<std::vector<MoeLayer>> ReadLayers(const Checkpoint& checkpoint, const ModelConfig& config,
                                         std::span<const Place> places, MoeModel& model) {
  std::vector<MoeLayer> layers;
  std::map<const NamingScheme*, uint32_t> main_layer_counts;
  for (size_t begin = 0; begin < places.size();) {
    const std::span<const Place> of_layer = LayerPlaces(places, begin);
    begin += of_layer.size();
    LayerReader reader(checkpoint, config, of_layer);
    HP_ASSIGN(MoeLayer layer, reader.Read());
    const NamingScheme* scheme = reader.scheme();
    const auto [count, first_use] = main_layer_counts.try_emplace(scheme, 0);
    if (first_use) {
      count->second = CountMainLayers(checkpoint, *scheme);
      model.scheme += (model.scheme.empty() ? "" : "+") + std::string(scheme->name);
      if (scheme->activation.kind != ActivationKind::kSiluGated) {
        model.activation = scheme->activation;
      }
    }
    if (of_layer.front().name.layer->mtp) layer.model_index += count->second;
    layers.push_back(std::move(layer));
  }
  std::sort(layers.begin(), layers.end(), [](const MoeLayer& a, const MoeLayer& b) {
    return std::tie(a.mtp, a.model_index) < std::tie(b.mtp, b.model_index);
  });
  for (size_t i = 0; i < layers.size(); ++i) layers[i].ordinal = static_cast<uint32_t>(i);
  return layers;
}

std::string ConfigPath(const Checkpoint& checkpoint) {
  const std::string folder =
      checkpoint.files().empty() ? checkpoint.path() : ParentPath(checkpoint.files().front());
  return JoinPath(folder, "config.json");
}

Result<void> ApplyConfig(const Checkpoint& checkpoint, const ModelConfig& config, MoeModel& model) {
  model.top_k = config.top_k;
  if (config.swiglu_limit) {
    model.activation.limit = *config.swiglu_limit;
    if (model.activation.kind == ActivationKind::kSiluGated) {
      model.activation.kind = ActivationKind::kSiluGatedClamped;
    }
  }
  uint32_t expert_count_max = 0;
  bool fp8 = false;
  for (const MoeLayer& layer : model.layers) {
    expert_count_max = std::max(expert_count_max, layer.geometry.experts);
    fp8 |= layer.format == SourceFormat::kFp8;
  }
  if (fp8) {
    model.decoding = Text(" weight_block_size={}x{}", config.weight_block_size->first,
                          config.weight_block_size->second);
  }
  if (model.top_k && *model.top_k > expert_count_max) {
    return Fail(Status::Data("config.json asks for more experts per token than there are")
                    .File(ConfigPath(checkpoint))
                    .Expected(Text("num_experts_per_tok of at most {}", expert_count_max))
                    .Found(Text("{}", *model.top_k)));
  }
  return {};
}

std::string JoinDtypes(std::span<const Place> places) {
  std::set<std::string_view> names;
  for (const Place& place : places) names.insert(DtypeName(place.tensor->dtype));
  std::string text;
  for (const std::string_view name : names) {
    text += text.empty() ? "" : "+";
    text += name;
  }
  return text;
}

// "model.layers.3.mlp." of "model.layers.3.mlp.experts.7.what"
std::string PrefixOf(const Tensor& tensor) {
  return tensor.name.substr(0, tensor.name.find(kExpertsInfix) + 1);
}

// Of a layer that has tensors nobody knows where some of its experts lack theirs: what is lacking
// says more than what the strangers look like.
std::optional<Status> MisnamedStatus(const Checkpoint& checkpoint, const Places& places) {
  const ModelConfig config =
      ParseModelConfig(checkpoint.config_text(), ConfigPath(checkpoint)).value_or(ModelConfig{});
  for (size_t begin = 0; begin < places.known.size();) {
    const std::span<const Place> of_layer =
        LayerPlaces(std::span<const Place>(places.known), begin);
    begin += of_layer.size();
    const std::string prefix = LayerPrefix(of_layer.front().name);
    LayerReader reader(checkpoint, config, of_layer);
    const Result<MoeLayer> read = reader.Read();
    if (read || !reader.some_experts_lack_tensors()) continue;
    NameList strangers;
    bool misnamed = true;  // and not of another dtype under the right name
    for (const Tensor* tensor : places.unmatched) {
      if (PrefixOf(*tensor) != prefix) continue;
      strangers.Add(Describe(*tensor));
      misnamed &= !reader.missing().Shows(tensor->name);
    }
    if (strangers.count() == 0 || !misnamed) continue;
    return Status(read.error())
        .Found(Text("none of {}; beside them {}", reader.missing().Text(), strangers.Text()))
        .Advice(
            "a tensor under another name is not read: docs/checkpoints.md has the names that "
            "are; or fetch the missing shards of the checkpoint");
  }
  return std::nullopt;
}

}  // namespace

std::vector<const Tensor*> ExpertTensors::All() const {
  std::vector<const Tensor*> all;
  for (const auto* tensors : {&weight, &scale, &global_scale, &bias}) {
    for (const Tensor* tensor : *tensors) {
      if (tensor != nullptr) all.push_back(tensor);
    }
  }
  return all;
}

Result<MoeModel> DiscoverMoe(const Checkpoint& checkpoint) {
  const Places places = CollectPlaces(checkpoint);
  if (!places.unmatched.empty()) {
    const std::optional<Status> misnamed = MisnamedStatus(checkpoint, places);
    return Fail(misnamed ? *misnamed : UnmatchedStatus(checkpoint, places.unmatched));
  }
  if (places.known.empty()) return Fail(NoExpertsStatus(checkpoint));
  HP_ASSIGN(const ModelConfig config,
            ParseModelConfig(checkpoint.config_text(), ConfigPath(checkpoint)));
  MoeModel model;
  HP_ASSIGN(model.layers, ReadLayers(checkpoint, config, places.known, model));
  HP_TRY(ApplyConfig(checkpoint, config, model));
  return model;
}

std::vector<MoeLayerSurvey> SurveyMoe(const Checkpoint& checkpoint) {
  const Places places = CollectPlaces(checkpoint);
  const ModelConfig config =
      ParseModelConfig(checkpoint.config_text(), ConfigPath(checkpoint)).value_or(ModelConfig{});
  std::map<std::string, NameList> unexpected;
  for (const Tensor* tensor : places.unmatched)
    unexpected[PrefixOf(*tensor)].Add(Describe(*tensor));
  std::vector<MoeLayerSurvey> layers;
  for (size_t begin = 0; begin < places.known.size();) {
    const std::span<const Place> of_layer = LayerPlaces(places.known, begin);
    begin += of_layer.size();
    LayerReader reader(checkpoint, config, of_layer);
    const Result<MoeLayer> read = reader.Read();
    MoeLayerSurvey layer;
    layer.prefix = LayerPrefix(of_layer.front().name);
    if (reader.scheme() != nullptr) layer.scheme = reader.scheme()->name;
    layer.tensor_count = of_layer.size();
    for (const Place& place : of_layer) layer.tensor_bytes += place.tensor->bytes;
    layer.dtypes = JoinDtypes(of_layer);
    if (reader.missing().count() > 0) layer.missing = reader.missing().Text();
    if (!read) layer.problem = read.error();
    if (const auto extra = unexpected.extract(layer.prefix))
      layer.unexpected = extra.mapped().Text();
    layers.push_back(std::move(layer));
  }
  for (const auto& [prefix, names] : unexpected) {
    MoeLayerSurvey layer;
    layer.prefix = prefix;
    layer.tensor_count = names.count();
    layer.unexpected = names.Text();
    layers.push_back(std::move(layer));
  }
  return layers;
}

std::map<std::string_view, const Tensor*> SourceTensorsByName(const MoeLayer& layer) {
  std::map<std::string_view, const Tensor*> tensors;
  for (const ExpertTensors& expert : layer.experts) {
    for (const Tensor* tensor : expert.All()) tensors.emplace(tensor->name, tensor);
  }
  return tensors;
}

Manifest MakeManifest(const MoeModel& model, const Digest128& fingerprint, ZeroMode zero_mode,
                      uint32_t shard_world) {
  Manifest manifest;
  manifest.identity = {.source_fingerprint = fingerprint,
                       .abi = kPlaneAbiName,
                       .zero_mode = zero_mode,
                       .shard_world = shard_world,
                       .shard_axis = shard_world > 1 ? "intermediate" : "none"};
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
