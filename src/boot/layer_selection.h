// Which layers an operation means: "3-9", "0,4-7", "main", "mtp", or all.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "format/manifest.h"

namespace hotplane {

// Experts [begin, end) of each layer.
struct ExpertRange {
  uint32_t begin = 0;
  uint32_t end = 0;
  bool operator==(const ExpertRange&) const = default;
};

// Ordinals, ascending, without duplicates. An empty text selects every layer. kUsage for a
// malformed text, for an ordinal that the model does not have, and when nothing is selected (naming
// what there is).
Result<std::vector<uint32_t>> SelectLayers(std::string_view text, const Manifest& manifest);

}  // namespace hotplane
