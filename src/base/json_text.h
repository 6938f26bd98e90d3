// JSON as it is printed and written.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/format_text.h"

namespace hotplane {

// `json` with what terminals take for orders beside those that JSON escapes itself, DEL and U+0080
// to U+009F, as \u00XX.
inline std::string EscapeControls(std::string_view json) {
  std::string escaped;
  const auto byte = [json](size_t i) {
    return i < json.size() ? static_cast<unsigned char>(json[i]) : 0u;
  };
  for (size_t i = 0; i < json.size(); ++i) {
    if (byte(i) == 0x7f) {
      escaped += "\\u007f";
    } else if (byte(i) == 0xc2 && byte(i + 1) >= 0x80 && byte(i + 1) < 0xa0) {
      escaped += Text("\\u{:04x}", byte(++i));
    } else {
      escaped += json[i];
    }
  }
  return escaped;
}

// Indented by two. Paths and messages may hold bytes that are not UTF-8: those are replaced, never
// thrown on; and control characters, which are escaped.
inline std::string JsonText(const nlohmann::ordered_json& json) {
  return EscapeControls(json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

}  // namespace hotplane
