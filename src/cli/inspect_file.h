// What a single file of a store is, whether its checksums are right and whether it is where it
// belongs. Known by what it begins with, and in a generation's folder by its name.
#pragma once

#include <nlohmann/json.hpp>

#include "base/status.h"
#include "cli/commands.h"
#include "format/kinds.h"

namespace hotplane::cli {

nlohmann::ordered_json GeometryJson(const LayerGeometry& geometry);

// Prints it. False, and nothing printed, where the file at the context's path is none of a store's.
// kData for one that is bad or belongs elsewhere.
Result<bool> InspectStoreFile(const Context& context);

}  // namespace hotplane::cli
