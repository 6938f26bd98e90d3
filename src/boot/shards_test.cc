// Sharded generations: what each rank's files hold, how they are built, found and told apart.

#include <gtest/gtest.h>

#include <thread>

#include "base/format_text.h"
#include "base/sweep_step.h"
#include "boot/boot_testing.h"
#include "boot/shard_choice.h"
#include "io/fault_env.h"
#include "quant/slice_oracle.h"

namespace hotplane {
namespace {

using oracle::Bytes;
using oracle::Elements;

constexpr uint32_t kExperts = 3, kHidden = 128, kIntermediate = 256;

SynthCheckpointOptions WideModel(SourceFormat format = SourceFormat::kMxfp4) {
  SynthCheckpointOptions model = SmallModel(format);
  model.geometry = {kExperts, kHidden, kIntermediate};
  return model;
}

BuildOptions Sharded(uint32_t world, size_t worker_count = 1) {
  BuildOptions options = BothTiers(worker_count);
  options.shard_world = world;
  return options;
}

Generation OpenRanks(Env& env, uint32_t world) {
  const Store store = Store::Open(env, kTestStore).value();
  const std::vector<Store::Entry> there = store.FindGenerations({}).value();
  for (const Store::Entry& entry : there)
    if (entry.identity->shard_world == world) return store.OpenGeneration(ToHex(entry.id)).value();
  ADD_FAILURE() << "no generation of " << world << " ranks";
  return store.OpenGeneration().value();
}

Bytes ReadOne(const Generation& generation, uint32_t layer, Encoding encoding,
              const std::string& role, uint32_t expert) {
  const LayerFile file = generation.OpenLayer(layer, encoding).value();
  EXPECT_EQ(file.layout().shard_rank, generation.rank());
  EXPECT_EQ(file.layout().shard_world, generation.world());
  const Section& section = *file.layout().Find(role);
  Bytes piece(section.expert_bytes);
  EXPECT_TRUE(ReadFully(file.file(), file.layout().PieceOffset(section, expert), piece));
  return piece;
}

// All elements of one matrix of one expert, from a generation's files of every encoding.
Elements ReadMatrix(const Generation& generation, uint32_t layer, uint32_t expert, bool w13) {
  const auto read = [&](Encoding encoding, const std::string& role) {
    return ReadOne(generation, layer, encoding, role, expert);
  };
  const oracle::Planes planes = {read(Encoding::kBase, w13 ? "planes13" : "planes2"),
                                 read(Encoding::kBase, w13 ? "sc13" : "sc2"),
                                 read(Encoding::kDeltaNibble, w13 ? "fp13" : "fp2"),
                                 read(Encoding::kDeltaQuintal, w13 ? "fp13" : "fp2")};
  const LayerGeometry g = generation.geometry(layer);
  return oracle::Unpack(planes, w13 ? g.n13() : g.n2(), w13 ? g.k13() : g.k2());
}

TEST(Shards, EveryRankHoldsItsSliceOfTheUnshardedPlanes) {
  for (const SourceFormat format : {SourceFormat::kMxfp4, SourceFormat::kBf16}) {
    MemEnv env;
    WriteCheckpoint(env, WideModel(format));
    for (const uint32_t world : {1u, 2u, 4u}) {
      BuildOptions options = Sharded(world, 2);
      options.encodings.assign(kEncodings.begin(), kEncodings.end());
      const Result<BuildReport> built = BuildStore(env, options);
      ASSERT_TRUE(built.has_value()) << built.error().ToString();
      // Once, whatever the number of ranks.
      EXPECT_EQ(built->bytes_read, built->bytes_needed);
    }
    const Generation whole = OpenRanks(env, 1);
    for (const uint32_t world : {2u, 4u}) {
      const Generation ranks = OpenRanks(env, world);
      for (uint32_t rank = 0; rank < world; ++rank) {
        SCOPED_TRACE(Text("{}, rank {} of {}", SourceFormatName(format), rank, world));
        const Shard shard = {rank, world};
        for (const uint32_t expert : {0u, kExperts - 1}) {
          oracle::ExpectSlice(ReadMatrix(whole, 1, expert, true), kHidden,
                              oracle::KeptOfW13(kIntermediate, kHidden, shard),
                              ReadMatrix(ranks.ForRank(rank), 1, expert, true));
          oracle::ExpectSlice(ReadMatrix(whole, 1, expert, false), kIntermediate,
                              oracle::KeptOfW2(kIntermediate, kHidden, shard),
                              ReadMatrix(ranks.ForRank(rank), 1, expert, false));
        }
      }
    }
  }
}

TEST(Shards, AreTheSameForEveryWorkerCount) {
  StoreContent reference;
  for (const size_t workers : {1, 2, 8}) {
    MemEnv env;
    WriteCheckpoint(env, WideModel());
    ASSERT_TRUE(BuildStore(env, Sharded(4, workers)).has_value());
    const StoreContent files = StoreFiles(env);
    // Manifest; per layer a source record and four ranks of two tiers.
    EXPECT_EQ(files.size(), 1u + 3 * (1 + 4 * 2));
    if (reference.empty()) reference = files;
    EXPECT_EQ(files, reference) << workers;
  }
}

TEST(Shards, OnlyWhatIsMissingIsBuiltAndItsLayerReadOnce) {
  MemEnv env;
  WriteCheckpoint(env, WideModel());
  ASSERT_TRUE(BuildStore(env, Sharded(4)).has_value());
  const StoreContent whole = StoreFiles(env);
  const Generation ranks = OpenRanks(env, 4);
  for (const uint32_t rank : {1u, 2u})
    ASSERT_TRUE(env.Remove(ranks.ForRank(rank).LayerPath(1, Encoding::kBase)).has_value());
  FaultEnv watched(env);
  const BuildReport report = BuildStore(watched, Sharded(4)).value();
  EXPECT_EQ(report.layers_built, 1u);
  EXPECT_EQ(report.layers_attached, 2u);
  EXPECT_EQ(report.bytes_read, report.bytes_needed);
  EXPECT_EQ(report.bytes_read, uint64_t{kExperts} * 3 * kHidden * kIntermediate / 32 * 17);
  std::set<std::string> published;
  for (const Operation& operation : watched.Log())
    if (operation.kind == OperationKind::kRename)
      published.insert(operation.to.substr(operation.to.rfind('/') + 1));
  EXPECT_EQ(published, (std::set<std::string>{"layer-0001.rank1.base", "layer-0001.rank2.base"}));
  EXPECT_EQ(StoreFiles(env), whole);
}

// Each rank on its own, as on several nodes: together they make what one build makes.
TEST(Shards, RanksBuiltAtOnceMakeOneStore) {
  StoreContent whole;
  {
    MemEnv env;
    WriteCheckpoint(env, WideModel());
    ASSERT_TRUE(BuildStore(env, Sharded(4)).has_value());
    whole = StoreFiles(env);
  }
  MemEnv env;
  WriteCheckpoint(env, WideModel());
  std::vector<Result<BuildReport>> reports(5, Fail(Status::System("not run")));
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 5; ++i)
    threads.emplace_back([&, i] {
      BuildOptions options = Sharded(4, 2);
      if (i < 4) options.rank = i;  // the fifth builds all that the others do not get to
      reports[i] = BuildStore(env, options);
    });
  for (std::thread& thread : threads) thread.join();
  for (const Result<BuildReport>& report : reports)
    EXPECT_TRUE(report.has_value()) << report.error().ToString();
  EXPECT_EQ(StoreFiles(env), whole);
}

TEST(Shards, OneRankAloneLeavesTheOthersForLater) {
  MemEnv env;
  WriteCheckpoint(env, WideModel());
  BuildOptions options = Sharded(2);
  options.rank = 1;
  ASSERT_TRUE(BuildStore(env, options).has_value());
  const Generation ranks = OpenRanks(env, 2);
  EXPECT_EQ(ranks.Probe(0, Encoding::kBase).presence, Presence::kAbsent);
  EXPECT_EQ(ranks.ForRank(1).Probe(0, Encoding::kBase).presence, Presence::kPresent);
  // The record of the layer binds rank 0 to the same source bytes.
  SourceRecord record = ranks.ReadSourceRecord(0).value().value();
  record.tensors[0].digest = Digest("other");
  const Result<void> refused = ranks.PublishSourceRecord(record);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().exit_code(), 3);
}

TEST(Shards, ACrashOfOneRankFileAnywhereIsFinishedByTheNextBuild) {
  SynthCheckpointOptions model = WideModel();
  model.geometry = {1, 64, 128};
  model.main_layers = 1;
  model.mtp_layers = 0;
  MemEnv whole;
  WriteCheckpoint(whole, model);
  FaultEnv counted(whole);
  ASSERT_TRUE(BuildStore(counted, Sharded(2)).has_value());
  for (const CrashMode mode : {CrashMode::kDropUnsynced, CrashMode::kKeepUnsynced}) {
    for (uint64_t n = 1; n <= counted.operation_count(); n += kSweepStep) {
      SCOPED_TRACE(Text("crash at operation {} of {}", n, counted.operation_count()));
      MemEnv env;
      WriteCheckpoint(env, model);
      FaultEnv faulty(env);
      faulty.Add(Fault{.action = FaultAction::kCrash, .first = n});
      EXPECT_FALSE(BuildStore(faulty, Sharded(2)).has_value());
      env.Crash(mode);
      ASSERT_TRUE(BuildStore(env, Sharded(2)).has_value());
      ASSERT_TRUE(Store::CollectGarbage(env, kTestStore, {}, false).has_value());
      ASSERT_EQ(StoreFiles(env), StoreFiles(whole));
    }
  }
}

TEST(Shards, AFileOfAnotherRankIsNotBelieved) {
  MemEnv env;
  WriteCheckpoint(env, WideModel());
  ASSERT_TRUE(BuildStore(env, Sharded(2)).has_value());
  const Generation ranks = OpenRanks(env, 2);
  const std::string zero = ranks.LayerPath(0, Encoding::kBase);
  const std::string one = ranks.ForRank(1).LayerPath(0, Encoding::kBase);
  EXPECT_TRUE(zero.ends_with("/layer-0000.rank0.base")) << zero;
  EXPECT_TRUE(one.ends_with("/layer-0000.rank1.base")) << one;
  env.SetFile(one, env.Files().at(zero));
  const TierProbe probe = ranks.ForRank(1).Probe(0, Encoding::kBase);
  ASSERT_EQ(probe.presence, Presence::kDamaged);
  EXPECT_NE(probe.reason->what().find("rank"), std::string::npos);
  EXPECT_EQ(probe.reason->expected(), "1");
  EXPECT_EQ(probe.reason->found(), "0");
  // Names that only another generation's files have.
  env.SetFile(ranks.directory() + "/layer-0000.rank2.base", env.Files().at(zero));
  env.SetFile(ranks.directory() + "/layer-0000.base", env.Files().at(zero));
  WorkerPool pool(2);
  const VerifyReport report = ranks.Verify(pool, nullptr, {}).value();
  std::map<std::string, std::optional<uint32_t>> bad;
  for (const VerifyFinding& finding : report.findings)
    bad[finding.file.substr(finding.file.rfind('/') + 1)] = finding.rank;
  EXPECT_EQ(bad, (std::map<std::string, std::optional<uint32_t>>{{"layer-0000.base", std::nullopt},
                                                                 {"layer-0000.rank1.base", 1},
                                                                 {"layer-0000.rank2.base", 2}}));
}

TEST(Shards, ABadChunkNamesItsRank) {
  MemEnv env;
  WriteCheckpoint(env, WideModel());
  ASSERT_TRUE(BuildStore(env, Sharded(2)).has_value());
  const Generation one = OpenRanks(env, 2).ForRank(1);
  env.CorruptByte(one.LayerPath(2, Encoding::kDeltaQuintal), 3 * 4096, std::byte{1});
  WorkerPool pool(2);
  const VerifyReport report = one.Verify(pool, nullptr, {}).value();
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_EQ(report.findings[0].layer, 2u);
  EXPECT_EQ(report.findings[0].rank, 1u);
  EXPECT_NE(report.findings[0].status.what().find("layer 2, rank 1, section fp13"),
            std::string::npos)
      << report.findings[0].status.what();
}

TEST(Shards, TemporariesAreGuardedByTheLockOfTheirRank) {
  MemEnv env;
  WriteCheckpoint(env, WideModel());
  ASSERT_TRUE(BuildStore(env, Sharded(2)).has_value());
  const Generation ranks = OpenRanks(env, 2);
  const std::string of_zero = ranks.directory() + "/.tmp-layer-0000.rank0.base-1-2";
  const std::string of_one = ranks.directory() + "/.tmp-layer-0000.rank1.base-1-2";
  const std::string of_record = ranks.directory() + "/.tmp-layer-0000.source-1-2";
  const auto exists = [&](const std::string& path) { return env.Files().contains(path); };
  for (const std::string& path : {of_zero, of_one, of_record}) env.SetFile(path, Bytes(10));
  {
    // Whoever builds rank 1 removes what a dead builder of rank 1 left, and nothing else.
    const auto lock = ranks.ForRank(1).LockLayer(0, LockWait::kTry).value();
    ASSERT_NE(lock, nullptr);
    EXPECT_FALSE(exists(of_one));
    EXPECT_TRUE(exists(of_zero));
    // Ranks do not wait for each other.
    EXPECT_NE(ranks.LockLayer(0, LockWait::kTry).value(), nullptr);
    EXPECT_EQ(ranks.ForRank(1).LockLayer(0, LockWait::kTry).value(), nullptr);
    env.SetFile(of_one, Bytes(10));
    env.SetFile(of_zero, Bytes(10));
    const GcReport report = Store::CollectGarbage(env, kTestStore, {}, false).value();
    EXPECT_EQ(report.kept_in_use, std::vector{of_one});
    EXPECT_FALSE(exists(of_zero));
    EXPECT_FALSE(exists(of_record));
  }
  EXPECT_EQ(Store::CollectGarbage(env, kTestStore, {}, false).value().removed, std::vector{of_one});
}

TEST(Shards, AWholeGenerationIsCollectedWithAllItsRanks) {
  MemEnv env;
  WriteCheckpoint(env, WideModel());
  ASSERT_TRUE(BuildStore(env, Sharded(2)).has_value());
  const std::string directory = OpenRanks(env, 2).directory();
  const std::string name = directory.substr(directory.rfind('/') + 1);
  EXPECT_EQ(Store::CollectGarbage(env, kTestStore, name, false).value().removed,
            std::vector{directory});
  EXPECT_TRUE(StoreFiles(env).empty());
}

TEST(Shards, AWorldThatDoesNotFitIsRefusedWithTheNumbers) {
  struct Case {
    uint32_t world;
    const char* expected;
  };
  for (const Case& bad : {Case{3, "--tp 2, 4"}, Case{8, "--tp 2, 4"}, Case{0, "--tp 2, 4"}}) {
    MemEnv env;
    WriteCheckpoint(env, WideModel());
    const Result<BuildReport> refused = BuildStore(env, Sharded(bad.world));
    ASSERT_FALSE(refused.has_value()) << bad.world;
    EXPECT_EQ(refused.error().exit_code(), 2);
    EXPECT_EQ(refused.error().expected(), bad.expected);
    EXPECT_NE(refused.error().found().find("intermediate size of 256"), std::string::npos);
    EXPECT_TRUE(StoreFiles(env).empty());
  }
  MemEnv env;
  WriteCheckpoint(env, SmallModel());
  EXPECT_NE(BuildStore(env, Sharded(2)).error().expected().find("too narrow"), std::string::npos);
}

TEST(ShardChoice, ARankIsAskedForOrTheLaunchersOrUnneeded) {
  const LaunchedRank of_four = {2, 4, "RANK=2, WORLD_SIZE=4 (torchrun)"};
  const LaunchedRank of_two = {1, 2, "LOCAL_RANK=1, LOCAL_WORLD_SIZE=2 (torchrun)"};
  const LaunchedRank alone = {0, 1, "SLURM_PROCID=0, SLURM_NTASKS=1 (Slurm)"};
  struct Case {
    ShardRequest request;
    uint32_t world;
    std::optional<uint32_t> rank;  // none: refused
    const char* said;              // of the refusal
  };
  const Case cases[] = {
      {{}, 1, 0, ""},
      {{0, {}}, 1, 0, ""},
      {{1, {}}, 1, std::nullopt, "not sharded"},
      {{{}, 2},
       1,
       std::nullopt,
       "the store is not sharded; --world 2 asks for a store for 2 ranks"},
      {{{}, {}, {of_four}}, 1, 0, ""},
      {{}, 2, std::nullopt, "nothing says which"},
      {{1, {}}, 2, 1, ""},
      {{1, 2}, 2, 1, ""},
      {{2, {}}, 2, std::nullopt, "no rank 2"},
      {{1, 4}, 2, std::nullopt, "the store is cut for 2 ranks; --world 4 asks for a store for 4"},
      {{{}, {}, {of_four}}, 4, 2, ""},
      {{{}, 4, {of_four}}, 4, 2, ""},
      {{{}, {}, {of_four, of_two}}, 2, 1, ""},
      {{{}, {}, {of_four}}, 2, std::nullopt, "the launcher's processes need a store for 4"},
      {{{}, {}, {alone}}, 2, std::nullopt, "nothing says which"},
      {{{}, {}, {alone}}, 1, 0, ""},
      // What was asked for wins over the environment, whatever that says.
      {{0, {}, {of_four}}, 2, 0, ""},
      {{0, {}, {of_two}}, 2, 0, ""},
  };
  for (size_t i = 0; i < std::size(cases); ++i) {
    SCOPED_TRACE(i);
    const Result<uint32_t> rank = ChooseRank(cases[i].request, cases[i].world, "/store");
    EXPECT_EQ(rank ? std::optional(*rank) : std::nullopt, cases[i].rank);
    if (rank) continue;
    EXPECT_EQ(rank.error().exit_code(), 2);
    EXPECT_NE(rank.error().what().find(cases[i].said), std::string::npos) << rank.error().what();
  }
  const Status other = ChooseRank({{}, {}, {of_four}}, 2, "/store").error();
  EXPECT_NE(other.expected().find("WORLD_SIZE=4"), std::string::npos);
  EXPECT_NE(other.advice().find("--tp 4"), std::string::npos);
  EXPECT_EQ(other.found(), "a store for 2 ranks");
  const Status one = ChooseRank({{}, 1}, 2, "/store").error();
  EXPECT_EQ(one.expected(), "a store that is not sharded");
  EXPECT_NE(one.advice().find("--world 2"), std::string::npos);
}

TEST(ShardChoice, OfSeveralGenerationsTheOneThatFits) {
  const auto entry = [](std::string_view name, uint32_t world) {
    Identity identity;
    identity.shard_world = world;
    Store::Entry of{Digest(name), identity};
    of.layer_count = 4;
    of.holds_layers = true;
    return of;
  };
  const Store::Entry whole = entry("whole", 1), two = entry("two", 2), four = entry("four", 4);
  const Store::Entry again = entry("again", 2);
  const Store::Entry unreadable = {Digest("unreadable"), std::nullopt};
  const LaunchedRank of_four = {2, 4, "RANK=2, WORLD_SIZE=4 (torchrun)"};
  const LaunchedRank of_three = {2, 3, "RANK=2, WORLD_SIZE=3 (torchrun)"};
  struct Case {
    std::vector<Store::Entry> there;
    ShardRequest request;
    const Store::Entry* chosen;  // null: refused
  };
  const Case cases[] = {
      {{two}, {}, &two},  // the only one: ChooseRank says what is missing
      {{whole, two}, {}, &whole},
      {{whole, two}, {0, {}}, &two},
      {{whole, two}, {1, {}}, &two},
      {{whole, two}, {2, {}}, nullptr},
      {{whole, two, four}, {2, {}}, &four},
      {{whole, two, four}, {1, {}}, nullptr},
      {{whole, two, four}, {1, 2}, &two},
      {{whole, two, four}, {{}, 1}, &whole},
      {{whole, two, four}, {{}, {}, {of_four}}, &four},
      {{whole, two, four}, {1, 2, {of_four}}, &two},
      {{whole, two}, {{}, {}, {of_four}}, &whole},
      {{two, four}, {{}, {}, {of_three}}, nullptr},
      {{two, four}, {}, nullptr},
      {{two, again}, {1, {}}, nullptr},
      {{whole, unreadable}, {}, nullptr},
      {{two, unreadable}, {1, {}}, nullptr},
  };
  for (size_t i = 0; i < std::size(cases); ++i) {
    SCOPED_TRACE(i);
    const auto chosen = ChooseGeneration(cases[i].there, cases[i].request, "/store");
    ASSERT_EQ(chosen.has_value(), cases[i].chosen != nullptr);
    if (chosen) {
      EXPECT_EQ(chosen->id, cases[i].chosen->id);
      EXPECT_TRUE(chosen->warnings.empty());
    } else {
      EXPECT_EQ(chosen.error().exit_code(), 2);
      EXPECT_NE(chosen.error().found().find(ToHex(cases[i].there.back().id)), std::string::npos);
    }
  }
}

TEST(ShardChoice, OnlyAGenerationThatNeverHeldALayerIsPassedOver) {
  const auto entry = [](std::string_view name, uint32_t world, uint32_t layers) {
    Identity identity;
    identity.shard_world = world;
    Store::Entry of{Digest(name), identity};
    of.layer_count = 4;
    of.layers_with_base = layers;
    of.holds_layers = layers > 0;
    return of;
  };
  const Store::Entry full = entry("full", 1, 4), part = entry("part", 1, 1);
  const Store::Entry empty = entry("empty", 1, 0), other = entry("other", 1, 4);
  const Store::Entry none = entry("none", 1, 0), two = entry("two", 2, 4);
  const Store::Entry empty_two = entry("empty two", 2, 0);
  Store::Entry emptied = entry("emptied", 1, 0), begun = entry("begun", 1, 0);
  emptied.layers_with_record = 4;
  begun.layers_with_record = 3;
  const Store::Entry unreadable = {Digest("unreadable"), std::nullopt};
  const LaunchedRank of_two = {1, 2, "RANK=1, WORLD_SIZE=2 (torchrun)"};
  const ShardRequest builds = {.rank = {}, .world = {}, .builds = true};
  struct Case {
    std::vector<Store::Entry> there;
    ShardRequest request;
    const Store::Entry* chosen;  // null: refused
    size_t passed_over = 0;      // with a warning
  };
  const Case cases[] = {
      {{full, empty}, {}, &full, 1},
      {{empty, part}, {}, &part, 1},
      {{full, begun}, {}, &full, 1},
      {{full, emptied}, {}, nullptr},
      {{part, full}, {}, nullptr},
      {{part, full, empty}, {}, nullptr},
      {{none, full, empty}, {}, &full, 2},
      {{full, other}, {}, nullptr},
      {{full, other, part}, {}, nullptr},
      {{empty, none}, {}, nullptr},
      {{full, part, unreadable}, {}, nullptr},
      {{empty, unreadable}, {}, &unreadable, 1},
      {{empty, two}, {}, &two, 1},
      {{empty, two}, builds, &empty},
      {{part, full}, builds, nullptr},
      {{part, empty}, builds, &part, 1},
      {{full, empty_two}, {0, {}}, &empty_two},
      {{full, empty_two}, {{}, {}, {of_two}}, &empty_two},
      {{full, empty_two}, {}, &full, 1},
      {{empty}, {}, &empty},
  };
  for (size_t i = 0; i < std::size(cases); ++i) {
    SCOPED_TRACE(i);
    const auto chosen = ChooseGeneration(cases[i].there, cases[i].request, "/store");
    ASSERT_EQ(chosen.has_value(), cases[i].chosen != nullptr);
    if (!chosen) {
      EXPECT_EQ(chosen.error().exit_code(), 2);
      continue;
    }
    EXPECT_EQ(chosen->id, cases[i].chosen->id);
    ASSERT_EQ(chosen->warnings.size(), cases[i].passed_over);
    for (const std::string& warning : chosen->warnings)
      EXPECT_NE(warning.find(ToHex(chosen->id) + " is used"), std::string::npos);
  }
  // For all ranks their number does not matter.
  EXPECT_EQ(ChooseGeneration({empty, two}, "/store")->id, two.id);
  EXPECT_FALSE(ChooseGeneration({part, two}, "/store"));
  const auto both = ChooseGeneration({full, two}, "/store");
  ASSERT_FALSE(both);
  ASSERT_EQ(both.error().choices().size(), 2u);
  EXPECT_EQ(both.error().choices()[1].rfind("--generation " + ToHex(two.id).substr(0, 8), 0), 0u);
  EXPECT_NE(both.error().ToString().find("4 of 4 layers there"), std::string::npos);
}

}  // namespace
}  // namespace hotplane
