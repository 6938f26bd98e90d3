// What a build may put a layer file in the place of.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "io/env.h"

namespace hotplane {

// Of the path of a layer's file, whatever is there now, or nothing. kData, with what to do, for
// what is not ours to replace: a directory, and a file that a later release wrote, however little
// we can read of it.
Result<void> CheckReplaceable(Env& env, const std::string& path, uint32_t layer);

}  // namespace hotplane
