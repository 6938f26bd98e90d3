// Which rank this process is, as the environment says that its launcher left.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace hotplane {

struct LaunchedRank {
  uint32_t rank = 0;
  uint32_t world = 1;
  std::string text;  // "RANK=1, WORLD_SIZE=2 (torchrun)"
};

// Of the innermost launcher that left its variables (torchrun, Open MPI, PMI, Slurm, in this
// order): the rank among all its processes, then the one among those of this node where it tells.
// Empty when there is none. Variables that are no rank and world are passed over with a warning in
// the log. `get_variable` is getenv, or a twin of it.
std::vector<LaunchedRank> LaunchedRanks(
    const std::function<const char*(const char* name)>& get_variable);
// Of this process's environment.
std::vector<LaunchedRank> LaunchedRanks();

}  // namespace hotplane
