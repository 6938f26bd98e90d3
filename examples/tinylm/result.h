// What a call of this program gives: a value, or an error with hotplane's own codes and fields.
#pragma once

#include <hotplane/engine.hpp>
#include <string>
#include <utility>

namespace tinylm {

using hotplane::api::Error;
using hotplane::api::Result;

// `text` gets a line for each field that is not empty, as hotplane's own errors have.
inline tl::unexpected<Error> Failure(hotplane_code code, std::string what, std::string file = {},
                                     std::string expected = {}, std::string found = {}) {
  Error error{code, what, what, file, expected, found, {}};
  if (!file.empty()) error.text += "\n  file      " + file;
  if (!expected.empty()) error.text += "\n  expected  " + expected;
  if (!found.empty()) error.text += "\n  found     " + found;
  return tl::unexpected<Error>(std::move(error));
}

inline tl::unexpected<Error> Failure(Error error) {
  return tl::unexpected<Error>(std::move(error));
}

}  // namespace tinylm
