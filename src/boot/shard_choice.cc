#include "boot/shard_choice.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "base/format_text.h"
#include "base/log.h"

namespace hotplane {
namespace {

std::string LaunchedText(const std::vector<LaunchedRank>& launched) {
  std::string text;
  for (const LaunchedRank& rank : launched) text += (text.empty() ? "" : "; ") + rank.text;
  return text;
}

const LaunchedRank* LaunchedWithWorld(const ShardRequest& request, uint32_t world) {
  for (const LaunchedRank& launched : request.launched)
    if (launched.world == world) return &launched;
  return nullptr;
}

// The number of ranks that this request means among the sharded generations there are; none: an
// unsharded one is meant.
std::optional<uint32_t> LaunchedWorld(const std::vector<Store::Entry>& candidates,
                                      const ShardRequest& request) {
  for (const LaunchedRank& launched : request.launched)
    for (const Store::Entry& entry : candidates)
      if (entry.identity && entry.identity->shard_world > 1 &&
          entry.identity->shard_world == launched.world)
        return launched.world;
  return std::nullopt;
}

std::vector<Store::Entry> Fitting(const std::vector<Store::Entry>& candidates,
                                  const ShardRequest& request) {
  const auto keep = [&candidates](const auto& fits) {
    std::vector<Store::Entry> kept;
    for (const Store::Entry& entry : candidates)
      if (!entry.identity || fits(entry.identity->shard_world)) kept.push_back(entry);
    return kept;
  };
  const auto has = [&](uint32_t world) {
    return (!request.world || *request.world == world) && (!request.rank || *request.rank < world);
  };
  if (request.rank || request.world) {
    const bool any_sharded = std::ranges::any_of(candidates, [&](const Store::Entry& entry) {
      return entry.identity && entry.identity->shard_world > 1 && has(entry.identity->shard_world);
    });
    return keep([&](uint32_t world) { return has(world) && (world > 1 || !any_sharded); });
  }
  const uint32_t meant = LaunchedWorld(candidates, request).value_or(1);
  return keep([meant](uint32_t world) { return world == meant; });
}

// Without those that never held a layer; all, where there is no other.
std::vector<Store::Entry> Holding(const std::vector<Store::Entry>& candidates) {
  std::vector<Store::Entry> holding;
  std::ranges::copy_if(candidates, std::back_inserter(holding),
                       [](const Store::Entry& entry) { return !entry.never_held_layers(); });
  return holding.empty() ? candidates : holding;
}

// Of `among` all others than `kept`.
std::vector<Store::Entry> Without(const std::vector<Store::Entry>& among,
                                  const std::vector<Store::Entry>& kept) {
  std::vector<Store::Entry> others;
  std::ranges::copy_if(among, std::back_inserter(others), [&kept](const Store::Entry& entry) {
    return std::ranges::none_of(kept, [&](const Store::Entry& of) { return of.id == entry.id; });
  });
  return others;
}

// Of `fitting` the only one that may have held layers. `empty` were passed over before.
Result<GenerationChoice> TakeOnly(const std::vector<Store::Entry>& fitting,
                                  std::vector<Store::Entry> empty,
                                  const std::vector<Store::Entry>& candidates,
                                  const std::string& directory) {
  const std::vector<Store::Entry> holding = fitting.size() > 1 ? Holding(fitting) : fitting;
  if (holding.size() > 1)
    return Fail(
        Store::Ambiguous(Text("the store holds {} generations that could be meant", holding.size()),
                         holding, directory));
  GenerationChoice choice{.id = holding.front().id, .warnings = {}};
  std::ranges::copy(Without(fitting, holding), std::back_inserter(empty));
  if (empty.empty()) {
    if (candidates.size() > 1)
      Log(LogLevel::kInfo, "of {} generations {} is used: it fits", candidates.size(),
          ToHex(choice.id));
    return choice;
  }
  for (const Store::Entry& entry : empty) {
    choice.warnings.push_back(Text("of {} generations {} is used: {} ({}) holds no layer file",
                                   candidates.size(), ToHex(choice.id), ToHex(entry.id),
                                   entry.model));
    Log(LogLevel::kWarning, "{}", choice.warnings.back());
  }
  return choice;
}

std::string StoreText(uint32_t world) {
  return world == 1 ? "a store that is not sharded" : Text("a store for {} ranks", world);
}

}  // namespace

Status OtherWorld(uint32_t world, uint32_t wanted, const std::string& told_by,
                  const std::string& directory) {
  const std::string is = world == 1 ? "not sharded" : Text("cut for {} ranks", world);
  const std::string asked = told_by.empty() ? Text("--world {} asks for", wanted)
                                            : std::string("the launcher's processes need");
  const std::string build =
      wanted == 1 ? std::string("`hotplane build` without --tp makes such a store")
                  : Text("`hotplane build --tp {}` makes a store for {} ranks", wanted, wanted);
  const std::string use = world == 1 ? std::string("leave --world out to boot it whole")
                          : told_by.empty()
                              ? Text("say --world {}, and --rank 0 to {}", world, world - 1)
                              : Text("start {} processes, or give --rank", world);
  return Status::Usage(Text("the store is {}; {} {}", is, asked, StoreText(wanted)))
      .File(directory)
      .Expected(told_by.empty() ? StoreText(wanted) : Text("{}: {}", StoreText(wanted), told_by))
      .Found(StoreText(world))
      .Advice(Text("{}; {}", use, build));
}

Result<uint32_t> ChooseRank(const ShardRequest& request, uint32_t world,
                            const std::string& directory) {
  if (request.world && *request.world != world)
    return Fail(OtherWorld(world, *request.world, "", directory));
  if (request.rank) {
    if (*request.rank < world) return *request.rank;
    if (world == 1)
      return Fail(
          Status::Usage(Text("there is no rank {}: the store is not sharded", *request.rank))
              .File(directory)
              .Expected("no --rank")
              .Advice("`hotplane build --tp W` makes a store for W ranks"));
    return Fail(Status::Usage(Text("there is no rank {}", *request.rank))
                    .File(directory)
                    .Expected(Text("--rank 0 to {}", world - 1)));
  }
  if (world == 1) {
    if (!request.launched.empty() && request.launched.front().world > 1)
      Log(LogLevel::kInfo, "the store is not sharded: {} is not used",
          LaunchedText(request.launched));
    return 0;
  }
  if (const LaunchedRank* const launched = LaunchedWithWorld(request, world)) {
    Log(LogLevel::kInfo, "rank {} of {}, by {}", launched->rank, world, launched->text);
    return launched->rank;
  }
  // One process in an allocation of its own is not launched as a rank.
  const bool told = std::ranges::any_of(
      request.launched, [](const LaunchedRank& launched) { return launched.world > 1; });
  if (told)
    return Fail(OtherWorld(world, request.launched.front().world, LaunchedText(request.launched),
                           directory));
  return Fail(
      Status::Usage(Text("the store is cut into {} shards, and nothing says which is meant", world))
          .File(directory)
          .Expected(
              Text("--rank 0 to {}, or a rank below its world in the environment, as torchrun, "
                   "MPI and Slurm leave it (RANK, WORLD_SIZE, ...)",
                   world - 1))
          .Found(request.launched.empty() ? "no --rank, and no such pair"
                                          : LaunchedText(request.launched)));
}

Result<GenerationChoice> ChooseGeneration(const std::vector<Store::Entry>& candidates,
                                          const ShardRequest& request,
                                          const std::string& directory) {
  HP_CHECK(!candidates.empty());
  // Who names ranks, or builds what is missing, may mean one that is still empty.
  const bool any = request.builds || request.rank || request.world ||
                   LaunchedWorld(candidates, request).has_value();
  const std::vector<Store::Entry> meant = any ? candidates : Holding(candidates);
  const std::vector<Store::Entry> fitting = meant.size() > 1 ? Fitting(meant, request) : meant;
  if (!fitting.empty()) return TakeOnly(fitting, Without(candidates, meant), candidates, directory);
  return Fail(Store::Ambiguous(Text("none of the store's {} generations fits", meant.size()), meant,
                               directory)
                  .Expected(request.rank || request.world
                                ? "one that has the --rank and --world that were given"
                                : "an unsharded one, or a rank: --rank R")
                  .Advice("choose one with --generation PREFIX, and its rank with --rank"));
}

Result<GenerationChoice> ChooseGeneration(const std::vector<Store::Entry>& candidates,
                                          const std::string& directory) {
  HP_CHECK(!candidates.empty());
  return TakeOnly(candidates, {}, candidates, directory);
}

Result<MeantGeneration> OpenMeant(const Store& store, std::string_view prefix,
                                  const Store::OpenOptions& options) {
  HP_ASSIGN(const std::vector<Store::Entry> candidates, store.FindGenerations(prefix));
  GenerationChoice choice;
  std::string name(prefix);
  if (!candidates.empty()) {
    HP_ASSIGN(choice, ChooseGeneration(candidates, store.directory()));
    name = ToHex(choice.id);
  }
  HP_ASSIGN(Generation generation, store.OpenGeneration(name, options));
  return MeantGeneration{std::move(generation), std::move(choice.warnings)};
}

Result<MeantGeneration> OpenShard(const Store& store, std::string_view prefix,
                                  const Store::OpenOptions& options, const ShardRequest& request) {
  HP_ASSIGN(const std::vector<Store::Entry> candidates, store.FindGenerations(prefix));
  GenerationChoice choice;
  std::string name(prefix);
  if (!candidates.empty()) {
    HP_ASSIGN(choice, ChooseGeneration(candidates, request, store.directory()));
    name = ToHex(choice.id);
  }
  HP_ASSIGN(const Generation generation, store.OpenGeneration(name, options));
  HP_ASSIGN(const uint32_t rank, ChooseRank(request, generation.world(), generation.directory()));
  return MeantGeneration{generation.ForRank(rank), std::move(choice.warnings)};
}

}  // namespace hotplane
