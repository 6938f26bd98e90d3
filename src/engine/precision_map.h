// Which routed experts are taken at which precision: all alike, or a map from a JSON file,
//   {"default": "base", "layers": {"3": "fp4", "4": {"default": "base", "17": "fp4"}}}
// with layers by ordinal and experts by number. docs/cli.md is the prose.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "format/kinds.h"
#include "format/manifest.h"

namespace hotplane {

// Immutable; thread-safe.
class PrecisionMap {
 public:
  static PrecisionMap Uniform(Precision precision, const Manifest& manifest);
  // kData naming `file` and the place for anything but such a map of this model: a layer or expert
  // that it does not have, a key that is no number of one, a key twice, another value.
  static Result<PrecisionMap> Parse(std::string_view json, const std::string& file,
                                    const Manifest& manifest);

  // REQUIRES a layer and expert of the model.
  Precision Of(uint32_t layer, uint32_t expert) const { return experts_[layer][expert]; }
  bool Uses(uint32_t layer, Precision precision) const;

 private:
  std::vector<std::vector<Precision>> experts_;  // by layer
};

// A map is a few bytes per expert; models have at most some ten thousand experts.
inline constexpr uint64_t kPrecisionMapBytesMax = 16 << 20;

}  // namespace hotplane
