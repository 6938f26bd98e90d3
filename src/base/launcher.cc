#include "base/launcher.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "base/format_text.h"
#include "base/log.h"

namespace hotplane {
namespace {

struct Variables {
  const char* launcher;
  const char* rank;
  const char* world;
};

// Innermost first: torchrun inside a Slurm job is what started this process. The rows of one
// launcher stand together, the one over all nodes first.
constexpr Variables kVariables[] = {
    {"torchrun", "RANK", "WORLD_SIZE"},
    {"torchrun", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {"Open MPI", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI", "PMI_RANK", "PMI_SIZE"},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS"},
};

std::optional<uint32_t> ParseCount(const char* text) {
  uint32_t value = 0;
  const char* const end = text + std::strlen(text);
  const auto parsed = std::from_chars(text, end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  return value;
}

}  // namespace

std::vector<LaunchedRank> LaunchedRanks(
    const std::function<const char*(const char* name)>& get_variable) {
  std::vector<LaunchedRank> ranks;
  const char* launcher = nullptr;
  for (const Variables& row : kVariables) {
    if (launcher != nullptr && std::strcmp(launcher, row.launcher) != 0) break;
    const char* const rank_text = get_variable(row.rank);
    const char* const world_text = get_variable(row.world);
    // RANK alone is a name that many programs use for something else.
    if (rank_text == nullptr || world_text == nullptr) continue;
    const std::string text =
        Text("{}={}, {}={} ({})", row.rank, rank_text, row.world, world_text, row.launcher);
    const std::optional<uint32_t> rank = ParseCount(rank_text);
    const std::optional<uint32_t> world = ParseCount(world_text);
    if (!rank || !world || *rank >= *world) {
      Log(LogLevel::kWarning, "{} are no rank and world: passed over", text);
      continue;
    }
    launcher = row.launcher;
    ranks.push_back({*rank, *world, text});
  }
  return ranks;
}

std::vector<LaunchedRank> LaunchedRanks() {
  return LaunchedRanks([](const char* name) -> const char* { return std::getenv(name); });
}

}  // namespace hotplane
