// Reading JSON that anybody may have edited: whatever is missing or of another type is left out,
// never trusted.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace hotplane {

// kData with the file and what a report needs instead.
Status NotOurs(std::string_view path, std::string_view expected);

// A JSON object of bounded depth. `on_value` (may be null) may drop a value that is complete, by
// returning false.
Result<nlohmann::ordered_json> ParseReportJson(
    std::string_view text, std::string_view path, std::string_view expected,
    const nlohmann::ordered_json::parser_callback_t& on_value);

// Within what a figure of ours can be: from 0 to 1e18.
double Bounded(double number);
double NumberAt(const nlohmann::ordered_json& object, const char* key, double otherwise = -1);
// Of either sign; nothing when it is no finite number.
std::optional<double> FigureAt(const nlohmann::ordered_json& object, const char* key);
std::string TextAt(const nlohmann::ordered_json& object, const char* key);
const nlohmann::ordered_json& ArrayAt(const nlohmann::ordered_json& object, const char* key);

// `command` of the object; empty when there is none, or no object.
std::string ReportCommand(std::string_view text);

}  // namespace hotplane
