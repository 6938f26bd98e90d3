// Which generation of a store, and which rank of it, a process means.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/launcher.h"
#include "base/status.h"
#include "store/store.h"

namespace hotplane {

struct ShardRequest {
  std::optional<uint32_t> rank;   // as asked for; none: the launcher's where the store is sharded
  std::optional<uint32_t> world;  // as asked for; none: the store's
  // What counts where `rank` is not given; empty: nothing does.
  std::vector<LaunchedRank> launched = {};
};

// The rank of this process in a generation of `world` ranks; 0 where that is 1. kUsage with the
// numbers when another world is asked for, the rank is not below it, or a sharded generation's rank
// is told by nobody, or by a launcher of another world. `directory` is named in errors. One line in
// the log where the environment decided, or was there and was not used.
Result<uint32_t> ChooseRank(const ShardRequest& request, uint32_t world,
                            const std::string& directory);

// The one of `candidates` that fits: with a rank or world asked for those that have it, sharded
// ones before unsharded; else those of the launcher's world; else the unsharded ones. One whose
// manifest cannot be read may be meant. A single candidate needs not fit: ChooseRank says why it
// does not. kUsage with the list when it is not exactly one. REQUIRES candidates.
Result<Digest128> ChooseGeneration(const std::vector<Store::Entry>& candidates,
                                   const ShardRequest& request, const std::string& directory);

// Both: opens the generation whose name begins with `prefix` and that fits, seen by the rank.
Result<Generation> OpenShard(const Store& store, std::string_view prefix,
                             const Store::OpenOptions& options, const ShardRequest& request);

}  // namespace hotplane
