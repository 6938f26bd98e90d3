// Of a store's generations, the one that was built from a checkpoint.
#pragma once

#include <string_view>

#include "base/cancel.h"
#include "base/status.h"
#include "checkpoint/moe_source.h"
#include "store/store.h"

namespace hotplane {

// The name of the generation that begins with `prefix` and whose source has this fingerprint;
// `prefix` itself where none has. kUsage with the list when there are several.
Result<std::string> FindPairedGeneration(const Store& store, std::string_view prefix,
                                         const Digest128& fingerprint);

// Opens the generation whose name begins with `prefix` and whose source is `checkpoint`. kUsage
// with the list when there are several, kData when none was built from it.
Result<Generation> OpenPairedGeneration(const Store& store, std::string_view prefix,
                                        const Checkpoint& checkpoint, const MoeModel& model,
                                        const Store::OpenOptions& options);

}  // namespace hotplane
