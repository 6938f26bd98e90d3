// One line about a model, and the error of a store and a checkpoint that do not belong together.
#pragma once

#include <string>

#include "base/status.h"
#include "checkpoint/moe_source.h"
#include "store/coverage.h"
#include "store/store.h"

namespace hotplane {

// "base 4 of 4, no delta"; "base 4 of 4; delta 2 of 4: layers 2-3 missing". Of a sharded generation
// these are files.
std::string DescribeCoverage(const Coverage& coverage, const Manifest& manifest);

// kData unless the generation was built from a checkpoint with this fingerprint. Tells shape from
// shape; where the shapes agree it names the first source tensor that the layers' records know
// differently.
Result<void> CheckSamePair(const Generation& generation, const Checkpoint& checkpoint,
                           const MoeModel& model, const Digest128& fingerprint);

}  // namespace hotplane
