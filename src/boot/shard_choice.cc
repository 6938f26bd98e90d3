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

// Those with layers, or all where none has one.
std::vector<Store::Entry> Holding(const std::vector<Store::Entry>& candidates) {
  std::vector<Store::Entry> holding;
  std::ranges::copy_if(candidates, std::back_inserter(holding), [](const Store::Entry& entry) {
    return entry.holds_layers || !entry.identity;
  });
  return holding.empty() ? candidates : holding;
}

constexpr char kOthersEmpty[] = "no other one has a layer";

Digest128 Taken(const Store::Entry& entry, const std::vector<Store::Entry>& candidates,
                const char* reason) {
  if (candidates.size() > 1)
    Log(LogLevel::kInfo, "of {} generations {} is used: {}", candidates.size(),
        Store::ListText({entry}), reason);
  return entry.id;
}

// What cannot be read may be complete, too.
Result<Digest128> TakeFullest(const std::vector<Store::Entry>& fitting,
                              const std::vector<Store::Entry>& candidates,
                              const std::string& directory) {
  const std::vector<Store::Entry> holding = Holding(fitting);
  if (holding.size() == 1) return Taken(holding.front(), candidates, kOthersEmpty);
  const auto complete = [](const Store::Entry& entry) {
    return entry.complete() || !entry.identity;
  };
  const auto first = std::ranges::find_if(holding, complete);
  if (std::ranges::count_if(holding, complete) == 1 && first->identity)
    return Taken(*first, candidates, "no other one has all its layers");
  return Fail(
      Store::Ambiguous(Text("the store holds {} generations that could be meant", holding.size()),
                       holding, directory));
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
              Text("--rank 0 to {}, or a process started by torchrun, MPI or Slurm", world - 1))
          .Found(request.launched.empty() ? "neither" : LaunchedText(request.launched)));
}

Result<Digest128> ChooseGeneration(const std::vector<Store::Entry>& candidates,
                                   const ShardRequest& request, const std::string& directory) {
  HP_CHECK(!candidates.empty());
  // Who names ranks, or builds what is missing, may mean one that is still empty.
  const bool any = request.builds || request.rank || request.world ||
                   LaunchedWorld(candidates, request).has_value();
  const std::vector<Store::Entry> meant = any ? candidates : Holding(candidates);
  if (meant.size() == 1) return Taken(meant.front(), candidates, kOthersEmpty);
  const std::vector<Store::Entry> fitting = Fitting(meant, request);
  if (fitting.size() == 1) return Taken(fitting.front(), candidates, "it fits");
  if (!fitting.empty()) return TakeFullest(fitting, candidates, directory);
  return Fail(Store::Ambiguous(Text("none of the store's {} generations fits", meant.size()), meant,
                               directory)
                  .Expected(request.rank || request.world
                                ? "one that has the --rank and --world that were given"
                                : "an unsharded one, or a rank: --rank R")
                  .Advice("choose one with --generation PREFIX, and its rank with --rank"));
}

Result<Digest128> ChooseGeneration(const std::vector<Store::Entry>& candidates,
                                   const std::string& directory) {
  HP_CHECK(!candidates.empty());
  return TakeFullest(candidates, candidates, directory);
}

Result<Generation> OpenMeant(const Store& store, std::string_view prefix,
                             const Store::OpenOptions& options) {
  HP_ASSIGN(const std::vector<Store::Entry> candidates, store.FindGenerations(prefix));
  if (candidates.empty()) return store.OpenGeneration(prefix, options);
  HP_ASSIGN(const Digest128 id, ChooseGeneration(candidates, store.directory()));
  return store.OpenGeneration(ToHex(id), options);
}

Result<Generation> OpenShard(const Store& store, std::string_view prefix,
                             const Store::OpenOptions& options, const ShardRequest& request) {
  HP_ASSIGN(const std::vector<Store::Entry> candidates, store.FindGenerations(prefix));
  std::string chosen(prefix);
  if (!candidates.empty()) {
    HP_ASSIGN(const Digest128 id, ChooseGeneration(candidates, request, store.directory()));
    chosen = ToHex(id);
  }
  HP_ASSIGN(const Generation generation, store.OpenGeneration(chosen, options));
  HP_ASSIGN(const uint32_t rank, ChooseRank(request, generation.world(), generation.directory()));
  return generation.ForRank(rank);
}

}  // namespace hotplane
