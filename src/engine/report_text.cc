#include "engine/report_text.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/format_text.h"

namespace hotplane {
namespace {

using Json = nlohmann::ordered_json;

// Deeper nesting than any report has; the parser itself does not recurse.
constexpr int kDepthMax = 32;
// Objects keep their order, so a key is found by going through them.
constexpr size_t kKeysMax = 4096;
// Larger than any figure of ours, and still short when it is printed.
constexpr double kNumberMax = 1e18;

}  // namespace

Status NotOurs(std::string_view path, std::string_view expected) {
  return Status::Data("this file is not what the report needs")
      .File(std::string(path))
      .Expected(std::string(expected));
}

Result<Json> ParseReportJson(std::string_view text, std::string_view path,
                             std::string_view expected, const Json::parser_callback_t& on_value) {
  bool too_deep = false;
  bool too_wide = false;
  std::array<size_t, kDepthMax + 2> keys{};  // of the objects that are open, by depth
  const Json::parser_callback_t callback = [&](int depth, Json::parse_event_t event, Json& value) {
    too_deep = too_deep || depth > kDepthMax;
    if (too_deep || too_wide) return false;
    const auto level = static_cast<size_t>(depth);
    if (event == Json::parse_event_t::object_start) keys[level + 1] = 0;
    if (event == Json::parse_event_t::key) too_wide = ++keys[level] > kKeysMax;
    return !too_wide && (on_value == nullptr || on_value(depth, event, value));
  };
  try {
    Json json = Json::parse(text.begin(), text.end(), callback);
    if (too_deep)
      return Fail(NotOurs(path, expected).Found(Text("more than {} levels of nesting", kDepthMax)));
    if (too_wide)
      return Fail(NotOurs(path, expected).Found(Text("an object of more than {} keys", kKeysMax)));
    if (!json.is_object()) return Fail(NotOurs(path, expected).Found("JSON, but no object"));
    return json;
  } catch (const Json::parse_error& error) {
    return Fail(NotOurs(path, expected).At(error.byte).Found("no JSON from here on"));
  } catch (const Json::exception& error) {
    return Fail(NotOurs(path, expected).Found(error.what()));
  }
}

double Bounded(double number) { return std::clamp(number, 0.0, kNumberMax); }

double NumberAt(const Json& object, const char* key, double otherwise) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number()) return otherwise;
  return Bounded(found->get<double>());
}

std::string TextAt(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

const Json& ArrayAt(const Json& object, const char* key) {
  static const Json kNone = Json::array();
  const auto found = object.find(key);
  return found != object.end() && found->is_array() ? *found : kNone;
}

std::optional<double> FigureAt(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number()) return std::nullopt;
  const double number = found->get<double>();
  if (!std::isfinite(number)) return std::nullopt;
  return std::clamp(number, -kNumberMax, kNumberMax);
}

std::string ReportCommand(std::string_view text) {
  const Result<Json> json = ParseReportJson(text, "", "", nullptr);
  return json ? TextAt(*json, "command") : std::string();
}

}  // namespace hotplane
