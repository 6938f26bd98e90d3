#include "format/manifest.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/format_text.h"
#include "base/number_text.h"
#include "format/layer_file.h"
#include "format/tsym4.h"

namespace hotplane {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kManifestKind = "hotplane-manifest";
constexpr std::string_view kSourceKind = "hotplane-source";
constexpr int kTextFormatVersion = 1;

constexpr std::array kActivationNames = {
    std::pair{ActivationKind::kSiluGated, std::string_view("silu-gated")},
    std::pair{ActivationKind::kSiluGatedClamped, std::string_view("silu-gated-clamped")},
    std::pair{ActivationKind::kSwigluOai, std::string_view("swiglu-oai")}};

std::string_view ActivationName(ActivationKind kind) {
  for (const auto& [known, name] : kActivationNames) {
    if (known == kind) return name;
  }
  return "invalid";
}

ActivationKind ParseActivation(std::string_view name) {
  for (const auto& [kind, known] : kActivationNames) {
    if (known == name) return kind;
  }
  return ActivationKind::kInvalid;
}

// One line of JSON. Bytes that are not UTF-8 become U+FFFD rather than an exception.
std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string Seal(std::string_view kind, const std::string& body) {
  return Text("{} {} xxh3-128={} bytes={}\n{}", kind, kTextFormatVersion, ToHex(Digest(body)),
              body.size(), body);
}

Status Refused(const std::string& file, std::string_view kind, std::string what) {
  return Status::Data(Text("{} refused: {}", kind, what)).File(file);
}

// The body of a sealed text whose first line is right.
Result<std::string_view> Unseal(std::string_view kind, std::string_view bytes,
                                const std::string& file) {
  const size_t line_bytes = bytes.find('\n');
  const std::string_view line = bytes.substr(0, std::min<size_t>(line_bytes, 256));
  if (line_bytes == std::string_view::npos || !line.starts_with(Text("{} ", kind))) {
    return Fail(Refused(file, kind, "its first line is not a seal")
                    .At(0)
                    .Expected(Text("{} {} xxh3-128=DIGEST bytes=COUNT", kind, kTextFormatVersion))
                    .Found(bytes.empty() ? "an empty file" : "something else"));
  }
  const std::string_view version = line.substr(kind.size() + 1);
  if (!version.starts_with(Text("{} ", kTextFormatVersion))) {
    return Fail(Refused(file, kind,
                        Text("it has format version {}, this build reads version {}",
                             version.substr(0, version.find(' ')), kTextFormatVersion))
                    .At(kind.size() + 1)
                    .Expected(Text("version {}", kTextFormatVersion))
                    .Found(Text("version {}", version.substr(0, version.find(' '))))
                    .Advice("use the release that wrote it"));
  }
  const std::string_view body = bytes.substr(line_bytes + 1);
  const std::string seal = Seal(kind, std::string(body)).substr(0, line_bytes + 1);
  if (bytes.substr(0, line_bytes + 1) != seal) {
    return Fail(Refused(file, kind, "its content does not match its seal")
                    .At(0)
                    .Expected(std::string(line))
                    .Found(seal.substr(0, seal.find('\n'))));
  }
  return body;
}

// Reads typed members of one JSON object and remembers the first thing that is wrong, so that a
// decoder reads as a list of fields.
class ObjectReader {
 public:
  // Refuses members that are not in `known`.
  ObjectReader(const Json& json, std::string where, std::initializer_list<std::string_view> known)
      : json_(json), where_(std::move(where)) {
    if (!json.is_object()) {
      Complain("is not an object");
      return;
    }
    for (const auto& [name, value] : json.items()) {
      if (std::ranges::find(known, std::string_view(name)) == known.end()) {
        Complain(Text("has the unknown field \"{}\"", name));
      }
    }
  }

  bool Has(const char* name) const { return json_.is_object() && json_.contains(name); }

  const Json* Member(const char* name) {
    if (Has(name)) return &json_.at(name);
    Complain(Text("has no field \"{}\"", name));
    return nullptr;
  }
  std::string String(const char* name) {
    const Json* member = Member(name);
    if (member != nullptr && member->is_string()) return *member->get_ptr<const std::string*>();
    Complain(Text("field \"{}\" is not a string", name));
    return {};
  }
  uint32_t Count(const char* name) {
    const Json* member = Member(name);
    if (member != nullptr && member->is_number_unsigned()) {
      const uint64_t value = *member->get_ptr<const Json::number_unsigned_t*>();
      if (value <= UINT32_MAX) return static_cast<uint32_t>(value);
    }
    Complain(Text("field \"{}\" is not a count below 2^32", name));
    return 0;
  }
  double Number(const char* name) {
    const Json* member = Member(name);
    if (member != nullptr && member->is_number_float()) {
      return *member->get_ptr<const Json::number_float_t*>();
    }
    Complain(Text("field \"{}\" is not a number with a point", name));
    return 0;
  }
  bool Bool(const char* name) {
    const Json* member = Member(name);
    if (member != nullptr && member->is_boolean()) {
      return *member->get_ptr<const Json::boolean_t*>();
    }
    Complain(Text("field \"{}\" is not true or false", name));
    return false;
  }
  Digest128 HexDigest(const char* name) {
    const Result<Digest128> digest = ParseDigest(String(name));
    if (digest) return *digest;
    Complain(Text("field \"{}\" is not 32 hexadecimal digits", name));
    return {};
  }

  void Complain(std::string what) {
    if (complaint_.empty()) complaint_ = Text("{} {}", where_, what);
  }
  const std::string& complaint() const { return complaint_; }

 private:
  const Json& json_;
  std::string where_;
  std::string complaint_;
};

Json IdentityJson(const Identity& identity) {
  return {{"source_fingerprint", ToHex(identity.source_fingerprint)},
          {"abi", identity.abi},
          {"zero_mode", ZeroModeName(identity.zero_mode)},
          {"shard_world", identity.shard_world},
          {"shard_axis", identity.shard_axis}};
}

std::string ReadIdentity(const Json& json, Identity& identity) {
  ObjectReader reader(json, "identity",
                      {"source_fingerprint", "abi", "zero_mode", "shard_world", "shard_axis"});
  identity.source_fingerprint = reader.HexDigest("source_fingerprint");
  identity.abi = reader.String("abi");
  if (identity.abi != kPlaneAbiName) {
    reader.Complain(
        Text("names the plane order \"{}\", this build reads \"{}\"", identity.abi, kPlaneAbiName));
  }
  const auto zero_mode = ParseZeroMode(reader.String("zero_mode"));
  if (!zero_mode) reader.Complain("has an unknown zero_mode");
  identity.zero_mode = zero_mode.value_or(ZeroMode::kInvalid);
  identity.shard_world = reader.Count("shard_world");
  identity.shard_axis = reader.String("shard_axis");
  if (identity.shard_world == 0) reader.Complain("has a shard_world of 0");
  if (identity.shard_axis != (identity.shard_world == 1 ? "none" : "intermediate")) {
    reader.Complain("has a shard_axis that does not fit its shard_world");
  }
  return reader.complaint();
}

Json LayerJson(const ManifestLayer& layer) {
  Json json{{"ordinal", layer.ordinal},
            {"model_index", layer.model_index},
            {"mtp", layer.mtp},
            {"prefix", layer.prefix},
            {"experts", layer.geometry.experts},
            {"hidden", layer.geometry.hidden},
            {"intermediate", layer.geometry.intermediate},
            {"source_format", SourceFormatName(layer.source_format)}};
  if (layer.geometry.biases) json["biases"] = true;
  return json;
}

std::string ReadLayer(const Json& json, size_t ordinal, uint32_t shard_world,
                      ManifestLayer& layer) {
  ObjectReader reader(json, Text("layers[{}]", ordinal),
                      {"ordinal", "model_index", "mtp", "prefix", "experts", "hidden",
                       "intermediate", "source_format", "biases"});
  layer.ordinal = reader.Count("ordinal");
  layer.model_index = reader.Count("model_index");
  layer.mtp = reader.Bool("mtp");
  layer.prefix = reader.String("prefix");
  layer.geometry.experts = reader.Count("experts");
  layer.geometry.hidden = reader.Count("hidden");
  layer.geometry.intermediate = reader.Count("intermediate");
  const auto format = ParseSourceFormat(reader.String("source_format"));
  if (!format) reader.Complain("has an unknown source_format");
  layer.source_format = format.value_or(SourceFormat::kInvalid);
  if (reader.Has("biases")) layer.geometry.biases = reader.Bool("biases");
  if (layer.ordinal != ordinal) reader.Complain(Text("has the ordinal {}", layer.ordinal));
  if (layer.geometry.intermediate % (uint64_t{shard_world} * kDimensionMultiple) != 0) {
    reader.Complain(Text("has an intermediate size of {}, not a multiple of {} per shard",
                         layer.geometry.intermediate, kDimensionMultiple));
  }
  if (reader.complaint().empty()) {
    LayerGeometry shard = layer.geometry;
    shard.intermediate /= shard_world;
    for (const Encoding encoding : kEncodings) {
      const Result<void> geometry = CheckLayerGeometry(encoding, shard);
      if (!geometry) reader.Complain(Text("has a geometry where {}", geometry.error().what()));
    }
  }
  return reader.complaint();
}

std::string ReadActivation(const Json& json, Activation& activation) {
  ObjectReader reader(json, "activation", {"kind", "limit", "alpha"});
  activation.kind = ParseActivation(reader.String("kind"));
  if (activation.kind == ActivationKind::kInvalid) reader.Complain("has an unknown kind");
  const auto positive = [&reader](const char* name) {
    const double value = reader.Number(name);
    if (!(value > 0) || !std::isfinite(value)) {
      reader.Complain(Text("has {} {} that is not positive", name[0] == 'a' ? "an" : "a", name));
    }
    return value;
  };
  if (activation.kind == ActivationKind::kSwigluOai) activation.alpha = positive("alpha");
  if (activation.kind == ActivationKind::kSiluGated) {
    if (reader.Has("limit")) reader.Complain("has a limit but its kind takes none");
  } else {
    activation.limit = positive("limit");
  }
  if (reader.Has("alpha") && activation.kind != ActivationKind::kSwigluOai) {
    reader.Complain("has an alpha but its kind takes none");
  }
  return reader.complaint();
}

std::string ReadLayers(const Json& json, Manifest& manifest) {
  if (!json.is_array()) return "layers is not a list";
  bool mtp_seen = false;
  for (size_t i = 0; i < json.size(); ++i) {
    ManifestLayer layer;
    std::string complaint = ReadLayer(json[i], i, manifest.identity.shard_world, layer);
    if (!complaint.empty()) return complaint;
    if (mtp_seen && !layer.mtp) return Text("layers[{}] is a main layer after an MTP layer", i);
    mtp_seen = layer.mtp;
    manifest.layers.push_back(std::move(layer));
  }
  return manifest.layers.empty() ? "layers is empty" : "";
}

// The empty string, or what is wrong.
std::string ReadManifest(const Json& json, Manifest& manifest) {
  ObjectReader reader(
      json, "the manifest",
      {"generation", "identity", "scheme", "checkpoint_id", "activation", "top_k", "layers"});
  const Digest128 generation = reader.HexDigest("generation");
  const Json* identity = reader.Member("identity");
  manifest.scheme = reader.String("scheme");
  if (reader.Has("checkpoint_id")) manifest.checkpoint_id = reader.String("checkpoint_id");
  const Json* activation = reader.Member("activation");
  if (reader.Has("top_k")) {
    manifest.top_k = reader.Count("top_k");
    if (*manifest.top_k == 0) reader.Complain("has a top_k of 0");
  }
  const Json* layers = reader.Member("layers");
  if (!reader.complaint().empty()) return reader.complaint();

  std::string complaint = ReadIdentity(*identity, manifest.identity);
  if (complaint.empty() && GenerationOf(manifest.identity) != generation) {
    complaint = Text("its identity has the digest {}, but its generation is {}",
                     ToHex(GenerationOf(manifest.identity)), ToHex(generation));
  }
  if (complaint.empty()) complaint = ReadActivation(*activation, manifest.activation);
  if (complaint.empty()) complaint = ReadLayers(*layers, manifest);
  return complaint;
}

std::string ReadSource(const Json& json, SourceRecord& record) {
  ObjectReader reader(json, "the source record", {"generation", "layer", "tensors"});
  record.generation = reader.HexDigest("generation");
  record.layer = reader.Count("layer");
  const Json* tensors = reader.Member("tensors");
  if (!reader.complaint().empty()) return reader.complaint();
  if (!tensors->is_array()) return "tensors is not a list";
  for (size_t i = 0; i < tensors->size(); ++i) {
    ObjectReader tensor((*tensors)[i], Text("tensors[{}]", i), {"name", "xxh3_128"});
    SourceTensorDigest entry{tensor.String("name"), tensor.HexDigest("xxh3_128")};
    if (!record.tensors.empty() && record.tensors.back().name >= entry.name) {
      tensor.Complain("is not sorted by name, or its name occurs twice");
    }
    if (!tensor.complaint().empty()) return tensor.complaint();
    record.tensors.push_back(std::move(entry));
  }
  return {};
}

// Parses a sealed text and insists that encoding the value again gives the same bytes, which
// refuses duplicate keys and any other spelling.
template <typename Value>
Result<Value> DecodeSealed(std::string_view kind, std::string_view bytes, const std::string& file,
                           std::string (*read)(const Json&, Value&),
                           std::string (*encode)(const Value&)) {
  HP_ASSIGN(const std::string_view body, Unseal(kind, bytes, file));
  const size_t body_offset = bytes.size() - body.size();
  const Json json = Json::parse(body, nullptr, false);
  if (json.is_discarded()) {
    return Fail(Refused(file, kind, "it is not well-formed JSON").At(body_offset));
  }
  Value value;
  if (const std::string complaint = read(json, value); !complaint.empty()) {
    return Fail(Refused(file, kind, complaint).At(body_offset));
  }
  const std::string again = encode(value);
  if (again != bytes) {
    const auto differs = std::ranges::mismatch(again, bytes).in2;
    return Fail(Refused(file, kind, "it is not in canonical form")
                    .At(static_cast<size_t>(differs - bytes.begin())));
  }
  return value;
}

// `values` one per line, as the elements of a JSON list.
std::string DumpLines(const std::vector<Json>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    text += i == 0 ? "\n    " : ",\n    ";
    text += Dump(values[i]);
  }
  return text + "\n  ]";
}

template <typename Get>
std::string Range(const Manifest& manifest, Get get) {
  uint32_t low = UINT32_MAX;
  uint32_t high = 0;
  for (const ManifestLayer& layer : manifest.layers) {
    low = std::min(low, get(layer.geometry));
    high = std::max(high, get(layer.geometry));
  }
  return low == high ? Text("{}", low) : Text("{}-{}", low, high);
}

}  // namespace

std::string IdentityPreimage(const Identity& identity) {
  return Text("hotplane-identity {} {}\n", kTextFormatVersion, Dump(IdentityJson(identity)));
}

Digest128 GenerationOf(const Identity& identity) { return Digest(IdentityPreimage(identity)); }

std::string DescribeModel(const Manifest& manifest) {
  std::set<std::string> formats;
  for (const ManifestLayer& layer : manifest.layers)
    formats.emplace(SourceFormatName(layer.source_format));
  std::string text;
  for (const std::string& format : formats) text += (text.empty() ? "" : "+") + format;
  return Text("{}, {}, E={} H={} I={}", text, Counted(manifest.layers.size(), "MoE layers"),
              Range(manifest, [](const LayerGeometry& g) { return g.experts; }),
              Range(manifest, [](const LayerGeometry& g) { return g.hidden; }),
              Range(manifest, [](const LayerGeometry& g) { return g.intermediate; }));
}

bool BuiltFromCheckpoint(const Manifest& manifest) {
  return manifest.scheme != kPlanesCacheScheme && manifest.scheme != kSyntheticScheme;
}

std::string EncodeManifest(const Manifest& manifest) {
  Json activation = {{"kind", ActivationName(manifest.activation.kind)}};
  if (manifest.activation.kind != ActivationKind::kSiluGated) {
    activation["limit"] = manifest.activation.limit;
  }
  if (manifest.activation.kind == ActivationKind::kSwigluOai) {
    activation["alpha"] = manifest.activation.alpha;
  }
  std::vector<Json> layers;
  for (const ManifestLayer& layer : manifest.layers) layers.push_back(LayerJson(layer));
  std::string body = "{\n";
  body += Text("  \"generation\": \"{}\",\n", ToHex(GenerationOf(manifest.identity)));
  body += Text("  \"identity\": {},\n", Dump(IdentityJson(manifest.identity)));
  body += Text("  \"scheme\": {},\n", Dump(manifest.scheme));
  if (!manifest.checkpoint_id.empty())
    body += Text("  \"checkpoint_id\": {},\n", Dump(manifest.checkpoint_id));
  body += Text("  \"activation\": {},\n", Dump(activation));
  if (manifest.top_k) body += Text("  \"top_k\": {},\n", *manifest.top_k);
  body += Text("  \"layers\": {}\n}}\n", DumpLines(layers));
  return Seal(kManifestKind, body);
}

Result<Manifest> DecodeManifest(std::string_view bytes, const std::string& file) {
  return DecodeSealed<Manifest>(kManifestKind, bytes, file, ReadManifest, EncodeManifest);
}

std::string EncodeSourceRecord(const SourceRecord& record) {
  std::vector<Json> tensors;
  for (const SourceTensorDigest& tensor : record.tensors) {
    tensors.push_back({{"name", tensor.name}, {"xxh3_128", ToHex(tensor.digest)}});
  }
  std::string body = "{\n";
  body += Text("  \"generation\": \"{}\",\n", ToHex(record.generation));
  body += Text("  \"layer\": {},\n", record.layer);
  body += Text("  \"tensors\": {}\n}}\n", DumpLines(tensors));
  return Seal(kSourceKind, body);
}

Result<SourceRecord> DecodeSourceRecord(std::string_view bytes, const std::string& file) {
  return DecodeSealed<SourceRecord>(kSourceKind, bytes, file, ReadSource, EncodeSourceRecord);
}

}  // namespace hotplane
