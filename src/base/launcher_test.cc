#include "base/launcher.h"

#include <gtest/gtest.h>

#include <map>

namespace hotplane {
namespace {

using Environment = std::map<std::string, std::string>;

std::vector<LaunchedRank> In(const Environment& environment) {
  return LaunchedRanks([&](const char* name) -> const char* {
    const auto entry = environment.find(name);
    return entry == environment.end() ? nullptr : entry->second.c_str();
  });
}

TEST(LaunchedRanks, OfEachLauncher) {
  struct Case {
    Environment environment;
    std::vector<std::pair<uint32_t, uint32_t>> ranks;  // rank, world
    std::string launcher;                              // of the first
  };
  const Case cases[] = {
      {{}, {}, ""},
      {{{"RANK", "1"}, {"WORLD_SIZE", "4"}}, {{1, 4}}, "torchrun"},
      {{{"RANK", "9"}, {"WORLD_SIZE", "16"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "8"}},
       {{9, 16}, {1, 8}},
       "torchrun"},
      {{{"LOCAL_RANK", "3"}, {"LOCAL_WORLD_SIZE", "8"}}, {{3, 8}}, "torchrun"},
      {{{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "3"}}, {{2, 3}}, "Open MPI"},
      {{{"OMPI_COMM_WORLD_RANK", "5"},
        {"OMPI_COMM_WORLD_SIZE", "8"},
        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}},
       {{5, 8}, {1, 4}},
       "Open MPI"},
      {{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}, {{0, 2}}, "PMI"},
      {{{"SLURM_PROCID", "7"}, {"SLURM_NTASKS", "8"}}, {{7, 8}}, "Slurm"},
      // The innermost counts, alone.
      {{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"RANK", "3"}, {"WORLD_SIZE", "16"}},
       {{3, 16}},
       "torchrun"},
      // A rank without a world, and what is no number or no rank of its world, is nobody's.
      {{{"RANK", "1"}}, {}, ""},
      {{{"RANK", "1"}, {"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}}, {{1, 2}}, "Slurm"},
      {{{"RANK", "4"}, {"WORLD_SIZE", "4"}}, {}, ""},
      {{{"RANK", "-1"}, {"WORLD_SIZE", "4"}}, {}, ""},
      {{{"RANK", "1x"}, {"WORLD_SIZE", "4"}}, {}, ""},
      {{{"RANK", ""}, {"WORLD_SIZE", "4"}}, {}, ""},
      {{{"RANK", "99999999999"}, {"WORLD_SIZE", "4"}}, {}, ""},
  };
  for (const Case& expected : cases) {
    SCOPED_TRACE(testing::PrintToString(expected.environment));
    const std::vector<LaunchedRank> found = In(expected.environment);
    ASSERT_EQ(found.size(), expected.ranks.size());
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_EQ(std::pair(found[i].rank, found[i].world), expected.ranks[i]);
    if (!found.empty()) {
      EXPECT_NE(found[0].text.find(expected.launcher), std::string::npos);
    }
  }
  EXPECT_EQ(In({{"RANK", "1"}, {"WORLD_SIZE", "2"}})[0].text, "RANK=1, WORLD_SIZE=2 (torchrun)");
}

}  // namespace
}  // namespace hotplane
