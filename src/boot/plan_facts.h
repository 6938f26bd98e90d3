// What the boot plan is made from, found out by looking: headers of the files that a boot wants,
// names of the others.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "boot/plan.h"
#include "store/store.h"

namespace hotplane {

struct StoreProbe {
  PlanFacts facts;              // without a checkpoint
  uint64_t bytes_metadata = 0;  // read to find out
  bool complete = true;         // everything wanted is present
};

// Opens the wanted tiers of the wanted layers and nothing else.
StoreProbe ProbeStore(const Generation& generation, const PlanConfig& config);

// Whether layers can be built into the generation's directory; asked by taking a layer's lock.
bool StoreWritable(const Generation& generation, uint32_t layer);

}  // namespace hotplane
