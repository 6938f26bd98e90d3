#include "engine/precision_map.h"

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <set>

#include "base/format_text.h"

namespace hotplane {
namespace {

using Json = nlohmann::json;

// The map itself has three levels.
constexpr int kDepthMax = 8;

Status BadMap(const std::string& file, std::string what) {
  return Status::Data(std::move(what))
      .File(file)
      .Expected(R"({"default": "base", "layers": {"3": "fp4", "4": {"default": "base", )"
                R"("17": "fp4"}}})");
}

// Text of others in a message: what cannot be printed is left out, and not too much of it.
std::string Shown(const Json& value) {
  constexpr size_t kShownMax = 64;
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kShownMax) text = text.substr(0, kShownMax) + "...";
  return text;
}

Result<Json> ParseStrictly(std::string_view text, const std::string& file) {
  std::vector<std::set<std::string>> keys(kDepthMax + 2);
  std::optional<Status> problem;
  const Json::parser_callback_t watch = [&](int depth, Json::parse_event_t event, Json& value) {
    if (problem) return false;
    if (depth > kDepthMax) {
      problem = BadMap(file, "the precision map nests too deeply");
      return false;
    }
    const auto level = static_cast<size_t>(depth);
    if (event == Json::parse_event_t::object_start) keys[level + 1].clear();
    if (event == Json::parse_event_t::key && !keys[level].insert(value.get<std::string>()).second)
      problem = BadMap(file, Text("the precision map has the key {} twice", Shown(value)));
    return !problem;
  };
  try {
    Json json = Json::parse(text.begin(), text.end(), watch);
    if (problem) return Fail(*std::move(problem));
    return json;
  } catch (const Json::parse_error& error) {
    if (problem) return Fail(*std::move(problem));
    return Fail(BadMap(file, "the precision map is no JSON").At(error.byte));
  } catch (const Json::exception& error) {
    return Fail(BadMap(file, "the precision map is no JSON").Found(error.what()));
  }
}

// Reads the values of one map; `where` in messages is "of layer 3".
class Reader {
 public:
  Reader(const std::string& file, const Manifest& manifest) : file_(file), manifest_(manifest) {}

  Result<void> Read(const Json& json, std::vector<std::vector<Precision>>& experts) const {
    if (!json.is_object()) return Fail(BadMap(file_, "the precision map is no JSON object"));
    for (const auto& [key, value] : json.items())
      if (key != "default" && key != "layers")
        return Fail(BadMap(file_, Text("the precision map has an unknown key {}", Shown(key))));
    HP_ASSIGN(const Precision usual, Default(json, ""));
    for (const ManifestLayer& layer : manifest_.layers)
      experts.emplace_back(layer.geometry.experts, usual);
    const auto layers = json.find("layers");
    if (layers == json.end()) return {};
    if (!layers->is_object())
      return Fail(
          BadMap(file_, "`layers` of the precision map is no object").Found(Shown(*layers)));
    for (const auto& [key, value] : layers->items()) {
      HP_ASSIGN(const uint32_t layer, Number(key, "a layer", manifest_.layers.size()));
      HP_TRY(ReadLayer(value, layer, experts[layer]));
    }
    return {};
  }

 private:
  Result<void> ReadLayer(const Json& value, uint32_t layer, std::vector<Precision>& experts) const {
    const std::string where = Text(" of layer {}", layer);
    if (!value.is_object()) {
      HP_ASSIGN(const Precision all, One(value, where));
      std::fill(experts.begin(), experts.end(), all);
      return {};
    }
    if (value.contains("default")) {
      HP_ASSIGN(const Precision usual, Default(value, where));
      std::fill(experts.begin(), experts.end(), usual);
    }
    for (const auto& [key, entry] : value.items()) {
      if (key == "default") continue;
      HP_ASSIGN(const uint32_t expert, Number(key, "an expert" + where, experts.size()));
      HP_ASSIGN(experts[expert], One(entry, Text(" of layer {}, expert {}", layer, expert)));
    }
    return {};
  }

  Result<Precision> Default(const Json& object, const std::string& where) const {
    const auto found = object.find("default");
    if (found == object.end())
      return Fail(BadMap(file_, "the precision map has no `default`")
                      .Advice("say what the experts get that are not named"));
    return One(*found, " `default`" + where);
  }

  Result<Precision> One(const Json& value, const std::string& where) const {
    std::optional<Precision> precision;
    if (value.is_string()) precision = ParsePrecision(value.get_ref<const std::string&>());
    if (precision) return *precision;
    return Fail(BadMap(file_, Text("the precision{} is neither \"base\" nor \"fp4\"", where))
                    .Found(Shown(value)));
  }

  // Plain decimal numbers below `count`.
  Result<uint32_t> Number(const std::string& key, const std::string& what, size_t count) const {
    uint32_t number = 0;
    const char* const end = key.data() + key.size();
    const auto [stopped, error] = std::from_chars(key.data(), end, number);
    const bool plain = error == std::errc() && stopped == end && (key == "0" || key[0] != '0');
    if (plain && number < count) return number;
    return Fail(BadMap(file_, Text("the precision map names {} that is not there", what))
                    .Found(Text("{}, of 0 to {}", Shown(key), count - 1)));
  }

  const std::string& file_;
  const Manifest& manifest_;
};

}  // namespace

PrecisionMap PrecisionMap::Uniform(Precision precision, const Manifest& manifest) {
  PrecisionMap map;
  for (const ManifestLayer& layer : manifest.layers)
    map.experts_.emplace_back(layer.geometry.experts, precision);
  return map;
}

Result<PrecisionMap> PrecisionMap::Parse(std::string_view json, const std::string& file,
                                         const Manifest& manifest) {
  HP_ASSIGN(const Json parsed, ParseStrictly(json, file));
  PrecisionMap map;
  HP_TRY(Reader(file, manifest).Read(parsed, map.experts_));
  return map;
}

bool PrecisionMap::Uses(uint32_t layer, Precision precision) const {
  const std::vector<Precision>& experts = experts_[layer];
  return std::find(experts.begin(), experts.end(), precision) != experts.end();
}

}  // namespace hotplane
