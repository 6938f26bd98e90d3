// JSON as it is printed and written.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace hotplane {

// Indented by two. Paths and messages may hold bytes that are not UTF-8: those are replaced, never
// thrown on.
inline std::string JsonText(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace hotplane
