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
  bool builds = false;  // what is missing will be built
};

// kUsage: the store has `world` ranks and `wanted` are, by --world or by whatever `told_by` names.
Status OtherWorld(uint32_t world, uint32_t wanted, const std::string& told_by,
                  const std::string& directory);

// The rank of this process in a generation of `world` ranks; 0 where that is 1. kUsage with the
// numbers when another world is asked for, the rank is not below it, or a sharded generation's rank
// is told by nobody, or by a launcher of another world. `directory` is named in errors. One line in
// the log where the environment decided, or was there and was not used.
Result<uint32_t> ChooseRank(const ShardRequest& request, uint32_t world,
                            const std::string& directory);

struct GenerationChoice {
  Digest128 id{};
  std::vector<std::string> warnings;  // of those that were passed over; logged, too
};

// The one of `candidates` that is meant:
// * Those that never held a layer are passed over, with a warning, where another one did. With a
//   rank or world asked for, or where what is missing will be built, only of those that fit.
// * Of several the one that fits: with a rank or world asked for one that has it, sharded ones
//   before unsharded; else of the launcher's world; else an unsharded one. One whose manifest
//   cannot be read fits. One that has lost files, or is damaged, may be meant like any other.
// kUsage with the list when that leaves not exactly one. A single candidate needs not fit:
// ChooseRank says why it does not. A line in the log says which of several was taken.
// REQUIRES candidates.
Result<GenerationChoice> ChooseGeneration(const std::vector<Store::Entry>& candidates,
                                          const ShardRequest& request,
                                          const std::string& directory);

// The same where all ranks are meant: whatever their number.
Result<GenerationChoice> ChooseGeneration(const std::vector<Store::Entry>& candidates,
                                          const std::string& directory);

struct MeantGeneration {
  Generation generation;
  std::vector<std::string> warnings;  // of the choice
};

// Opens the generation whose name begins with `prefix` and that is meant, for all ranks.
Result<MeantGeneration> OpenMeant(const Store& store, std::string_view prefix,
                                  const Store::OpenOptions& options);

// Both: opens the generation whose name begins with `prefix` and that fits, seen by the rank.
Result<MeantGeneration> OpenShard(const Store& store, std::string_view prefix,
                                  const Store::OpenOptions& options, const ShardRequest& request);

}  // namespace hotplane
