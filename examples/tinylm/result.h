// What a call of this program gives: a value, or an error with hotplane's own codes and fields.
#pragma once

#include <hotplane/engine.hpp>
#include <string>
#include <utility>

namespace tinylm {

using hotplane::api::Error;
using hotplane::api::Result;

// Names come from files: what would steer the terminal becomes \xNN.
inline std::string Printable(const std::string& text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string printable;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool c1 = (byte & 0xe0) == 0x80 && i > 0 && text[i - 1] == '\xc2';
    if (byte >= 0x20 && byte != 0x7f && !c1) {
      printable += text[i];
    } else {
      printable += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return printable;
}

// `text` gets a line for each field that is not empty, as hotplane's own errors have.
inline tl::unexpected<Error> Failure(hotplane_code code, std::string what, std::string file = {},
                                     std::string expected = {}, std::string found = {}) {
  Error error{code, Printable(what), what, file, expected, found, {}};
  if (!file.empty()) error.text += "\n  file      " + Printable(file);
  if (!expected.empty()) error.text += "\n  expected  " + Printable(expected);
  if (!found.empty()) error.text += "\n  found     " + Printable(found);
  return tl::unexpected<Error>(std::move(error));
}

inline tl::unexpected<Error> Failure(Error error) {
  return tl::unexpected<Error>(std::move(error));
}

}  // namespace tinylm
