// First boots, warm boots and boots of damaged stores, whole: plan, build queue, landing, report.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "base/format_text.h"
#include "boot/boot_testing.h"
#include "io/fault_env.h"
#include "quant/slice.h"

namespace hotplane {
namespace {

using Json = nlohmann::json;

EngineOptions WithCheckpoint(bool delta = true) {
  EngineOptions options;
  options.store_directory = kTestStore;
  options.checkpoint = kTestCheckpoint;
  options.delta = delta;
  options.worker_count = 2;
  options.build.worker_count = 2;
  return options;
}

EngineOptions StoreOnly(bool delta = false) {
  EngineOptions options = WithCheckpoint(delta);
  options.checkpoint.clear();
  return options;
}

struct Outcome {
  std::unique_ptr<Engine> engine;
  std::vector<uint32_t> order;
  std::vector<Digest128> layers;  // of all parts, by publication
  Json json;
};

Digest128 LayerDigest(const BootedLayer& layer) {
  DigestStream stream;
  for (const auto& part : {layer.planes13, layer.sc13, layer.planes2, layer.sc2})
    stream.Update(part);
  return stream.Finish();
}

Result<Outcome> BootEngine(Env& env, const EngineOptions& options) {
  Outcome outcome;
  HP_ASSIGN(outcome.engine, Engine::Open(env, options));
  HP_TRY(outcome.engine->Boot([&](const BootedLayer& layer) {
    outcome.order.push_back(layer.ordinal);
    outcome.layers.push_back(LayerDigest(layer));
  }));
  outcome.json = Json::parse(outcome.engine->ReportJson());
  return outcome;
}

std::vector<std::string> LayerFiles(const MemEnv& env, std::string_view suffix) {
  std::vector<std::string> paths;
  for (const auto& [path, content] : env.Files())
    if (path.rfind(kTestStore, 0) == 0 && path.ends_with(suffix)) paths.push_back(path);
  return paths;
}

uint64_t TotalBytes(MemEnv& env, const std::vector<std::string>& paths) {
  uint64_t bytes = 0;
  for (const std::string& path : paths) bytes += env.Stat(path)->bytes;
  return bytes;
}

std::map<std::string, int64_t> ModifiedTimes(MemEnv& env) {
  std::map<std::string, int64_t> times;
  for (const auto& [path, content] : env.Files())
    if (path.rfind(kTestStore, 0) == 0 && path.find("/locks/") == std::string::npos)
      times[path] = env.Stat(path)->modified_ns;
  return times;
}

bool Touches(const Operation& operation, std::string_view text) {
  return operation.path.find(text) != std::string::npos;
}

// Opens and reads of what bears this text in its name.
uint64_t CountOpens(const FaultEnv& env, std::string_view text) {
  uint64_t count = 0;
  for (const Operation& operation : env.Log())
    count += Touches(operation, text) && operation.kind == OperationKind::kOpen;
  return count;
}
uint64_t ReadBytes(const FaultEnv& env, std::string_view text) {
  uint64_t bytes = 0;
  for (const Operation& operation : env.Log())
    if (Touches(operation, text) && operation.kind == OperationKind::kRead)
      bytes += operation.done_bytes;
  return bytes;
}

std::vector<uint32_t> FirstOrdinals(uint32_t count) {
  std::vector<uint32_t> ordinals(count);
  for (uint32_t i = 0; i < count; ++i) ordinals[i] = i;
  return ordinals;
}

// DeepSeek-V4-Flash's layers and experts with small matrices.
SynthCheckpointOptions ScenarioModel() {
  SynthCheckpointOptions model = SmallModel();
  model.geometry = {256, 64, 64};
  model.main_layers = 43;
  model.mtp_layers = 1;
  model.shard_bytes_max = 16u << 20;
  return model;
}

// Quintals and nibbles of the same layers, one of them bad: what the plan chose is what is pinned.
TEST(Engine, PinsTheEncodingThatWasPlanned) {
  MemEnv env;
  WriteCheckpoint(env, SmallModel());
  for (const Encoding encoding : {Encoding::kDeltaQuintal, Encoding::kDeltaNibble}) {
    EngineOptions options = WithCheckpoint(/*delta=*/true);
    options.delta_encodings = {encoding};
    (void)BootEngine(env, options).value();
  }
  for (const Encoding encoding : {Encoding::kDeltaQuintal, Encoding::kDeltaNibble}) {
    const char* const other =
        encoding == Encoding::kDeltaQuintal ? ".delta-nibble" : ".delta-quintal";
    FaultEnv watched(env);
    EngineOptions options = StoreOnly(/*delta=*/true);
    options.delta_encodings = {encoding};
    options.pin_delta_bytes = 1u << 30;
    const Outcome boot = BootEngine(watched, options).value();
    EXPECT_EQ(boot.json["bytes_read"], boot.json["bytes_needed"]);
    EXPECT_TRUE(boot.json["warnings"].empty());
    EXPECT_EQ(ReadBytes(watched, other), 0u);
  }
  // A bad header: the nibbles are planned, and there is room for them.
  env.CorruptByte(LayerFiles(env, ".delta-quintal").front(), 100, std::byte{1});
  EngineOptions options = StoreOnly(/*delta=*/true);
  options.pin_delta_bytes = 1u << 30;
  const Outcome boot = BootEngine(env, options).value();
  EXPECT_EQ(boot.json["bytes_read"], boot.json["bytes_needed"]);
  EXPECT_TRUE(boot.json["warnings"].empty());
}

TEST(Engine, ABadDeltaRecordIsAWarningAndTheOthersArePinned) {
  MemEnv env;
  WriteCheckpoint(env, SmallModel());
  (void)BootEngine(env, WithCheckpoint(/*delta=*/true)).value();
  const std::string file = LayerFiles(env, ".delta-quintal").front();
  env.CorruptByte(file, env.Files().at(file).size() - 5000, std::byte{1});
  EngineOptions options = StoreOnly(/*delta=*/true);
  options.pin_delta_bytes = 1u << 30;
  const Outcome boot = BootEngine(env, options).value();
  ASSERT_EQ(boot.json["warnings"].size(), 1u);
  const uint64_t pinned = boot.engine->records().cache_stats(RecordKind::kDelta).bytes_used;
  EXPECT_EQ(boot.json["bytes_read_delta"], pinned);
  EXPECT_LT(boot.json["bytes_read"], boot.json["bytes_needed"]);
}

TEST(Engine, PinsDeltaRecordsAndCountsThem) {
  MemEnv env;
  WriteCheckpoint(env, SmallModel());
  (void)BootEngine(env, WithCheckpoint(/*delta=*/true)).value();
  FaultEnv watched(env);
  EngineOptions options = StoreOnly(/*delta=*/true);
  const uint32_t experts = SmallModel().geometry.experts;
  uint64_t record_bytes = 0;
  for (const Section& section :
       PlanLayerLayout(Encoding::kDeltaQuintal, SmallModel().geometry).sections)
    record_bytes += section.expert_bytes;
  options.pin_delta_bytes = (experts + 1) * ((record_bytes + 4095) / 4096 * 4096);
  const Outcome boot = BootEngine(watched, options).value();
  EXPECT_EQ(boot.json["bytes_read_delta"], (experts + 1) * record_bytes);
  EXPECT_EQ(boot.json["bytes_read"], boot.json["bytes_needed"]);
  EXPECT_EQ(boot.json["bytes_verified"], boot.json["bytes_read"]);
  EXPECT_EQ(boot.json["peak_pinned_bytes"], options.pin_delta_bytes);
  const uint64_t read_before = ReadBytes(watched, ".delta");
  ExpertRecords& records = boot.engine->records();
  for (const ExpertKey key : {ExpertKey{0, 0}, ExpertKey{0, experts - 1}, ExpertKey{1, 0}}) {
    const PinnedRecord record = records.Get(RecordKind::kDelta, key, RecordAccess::kDemand).value();
    std::vector<std::byte> read(record_bytes);
    EXPECT_EQ(record.parts[0].size() + record.parts[1].size(), record_bytes);
    ASSERT_TRUE(boot.engine->ReadDelta(key.layer, key.expert, read).has_value());
    EXPECT_TRUE(std::equal(record.parts[0].begin(), record.parts[0].end(), read.begin()));
  }
  EXPECT_EQ(records.cache_stats(RecordKind::kDelta).hits, 3u);
  EXPECT_GT(ReadBytes(watched, ".delta"), read_before) << "ReadDelta itself reads";
}

TEST(Scenario, FortyFourLayersFirstAndWarm) {
  constexpr uint32_t kLayers = 44;
  MemEnv env;
  WriteCheckpoint(env, ScenarioModel());
  Outcome first;
  {
    FaultEnv watched(env);
    Result<Outcome> booted = BootEngine(watched, WithCheckpoint());
    ASSERT_TRUE(booted.has_value()) << booted.error().ToString();
    first = *std::move(booted);
    const BuildReport build = first.engine->build_report();
    EXPECT_EQ(build.layers_built, kLayers);
    EXPECT_EQ(build.bytes_read, first.engine->plan().bytes_checkpoint);
    // Per expert three 64 x 64 matrices of nibbles with their scales, each byte once.
    EXPECT_EQ(build.bytes_read, uint64_t{kLayers} * 256 * 3 * (64 * 32 + 64 * 2));
    EXPECT_EQ(first.json["bytes_read"], first.json["bytes_needed"]);
    EXPECT_EQ(first.json["layers_built"], kLayers);
    EXPECT_EQ(first.json["bytes_read_delta"], 0);
    first.engine.reset();
  }
  EXPECT_EQ(first.order, FirstOrdinals(kLayers));
  const std::vector<std::string> bases = LayerFiles(env, ".base");
  const std::vector<std::string> deltas = LayerFiles(env, ".delta-quintal");
  ASSERT_EQ(bases.size(), kLayers);
  ASSERT_EQ(deltas.size(), kLayers);

  const StoreContent content = StoreFiles(env);
  const std::map<std::string, int64_t> times = ModifiedTimes(env);
  for (const bool delta_wanted : {false, true}) {
    FaultEnv watched(env);
    const Outcome warm = BootEngine(watched, StoreOnly(delta_wanted)).value();
    EXPECT_EQ(warm.order, FirstOrdinals(kLayers));
    EXPECT_EQ(warm.layers, first.layers);
    uint64_t base_data = 0;
    for (const PlanEntry& entry : warm.engine->plan().entries) base_data += entry.bytes_store;
    EXPECT_EQ(warm.json["bytes_needed"], base_data);
    EXPECT_EQ(warm.json["bytes_read"], base_data);
    EXPECT_EQ(warm.json["bytes_read_base"], base_data);
    EXPECT_EQ(warm.json["bytes_read_delta"], 0);
    EXPECT_EQ(warm.json["bytes_reread"], 0);
    EXPECT_EQ(warm.json["bytes_skipped"], TotalBytes(env, deltas));
    EXPECT_EQ(warm.json["layers_read"], kLayers);
    EXPECT_EQ(warm.json["layers_built"], 0);
    EXPECT_EQ(warm.json["layers_attached"], delta_wanted ? kLayers : 0);
    // Counted underneath: every file once, and of the delta tier nothing but, if wanted, headers.
    const uint64_t metadata = warm.json["bytes_metadata"];
    EXPECT_EQ(ReadBytes(watched, ".delta"), delta_wanted ? kLayers * kHeaderBytes : 0);
    EXPECT_EQ(CountOpens(watched, ".delta"), delta_wanted ? kLayers : 0);
    EXPECT_EQ(ReadBytes(watched, ".base") + ReadBytes(watched, ".delta"), base_data + metadata);
    for (const Operation& operation : watched.Log()) {
      if (Touches(operation, ".delta") && operation.kind == OperationKind::kRead) {
        EXPECT_LT(operation.offset, kHeaderBytes) << operation.path;
      }
    }
    EXPECT_EQ(StoreFiles(env), content);
    EXPECT_EQ(ModifiedTimes(env), times);
  }
}

// A store for two ranks, from a checkpoint that is wide enough.
class ShardTest : public testing::Test {
 protected:
  void SetUp() override {
    SynthCheckpointOptions model = SmallModel();
    model.geometry = {3, 64, 128};
    WriteCheckpoint(env_, model);
  }
  static EngineOptions OfRank(uint32_t rank, bool with_checkpoint) {
    EngineOptions options = with_checkpoint ? WithCheckpoint() : StoreOnly();
    options.shard = {rank, 2};
    return options;
  }
  MemEnv env_;
};

TEST_F(ShardTest, ABootMakesAndReadsTheFilesOfItsOwnRank) {
  const Result<Outcome> first = BootEngine(env_, OfRank(1, true));
  ASSERT_TRUE(first.has_value()) << first.error().ToString();
  EXPECT_EQ(first->json["rank"], 1);
  EXPECT_EQ(first->json["world"], 2);
  EXPECT_EQ(first->json["layers_built"], 3);
  EXPECT_EQ(first->engine->layers()[0].geometry, (LayerGeometry{3, 64, 64}));
  EXPECT_EQ(LayerFiles(env_, ".rank1.base").size(), 3u);
  EXPECT_EQ(LayerFiles(env_, ".base").size(), 3u);
  const Result<Outcome> lacking = BootEngine(env_, OfRank(0, false));
  ASSERT_FALSE(lacking.has_value());
  EXPECT_EQ(lacking.error().exit_code(), 3);
  EXPECT_NE(lacking.error().found().find("layers 0-1, 2 (MTP)"), std::string::npos);

  ASSERT_TRUE(BootEngine(env_, OfRank(0, true)).has_value());
  FaultEnv watched(env_);
  const Outcome warm = BootEngine(watched, OfRank(1, false)).value();
  EXPECT_EQ(warm.layers, first->layers);
  EXPECT_EQ(CountOpens(watched, ".rank0."), 0u);
  EXPECT_EQ(warm.json["bytes_read"], warm.json["bytes_needed"]);
  EXPECT_EQ(Json::parse(warm.engine->PlanJson())["world"], 2);
}

TEST_F(ShardTest, ABadFileIsBuiltAgainForItsRankAlone) {
  for (const uint32_t rank : {0u, 1u})
    ASSERT_TRUE(BootEngine(env_, OfRank(rank, true)).has_value());
  const StoreContent good = StoreFiles(env_);
  const std::map<std::string, int64_t> times = ModifiedTimes(env_);
  const std::string bad = LayerFiles(env_, "layer-0001.rank1.base").at(0);
  env_.CorruptByte(bad, env_.Files().at(bad).size() - 4096, std::byte{1});
  const Result<Outcome> refused = BootEngine(env_, OfRank(1, false));
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().what().find("layer 1, rank 1"), std::string::npos);
  ASSERT_TRUE(BootEngine(env_, OfRank(0, false)).has_value());
  const Outcome repaired = BootEngine(env_, OfRank(1, true)).value();
  EXPECT_EQ(repaired.json["layers_built"], 1);
  EXPECT_EQ(StoreFiles(env_), good);
  for (const auto& [path, time] : ModifiedTimes(env_))
    EXPECT_EQ(time == times.at(path), path != bad) << path;
}

TEST_F(ShardTest, RecordsAreThoseOfTheRank) {
  ASSERT_TRUE(BootEngine(env_, WithCheckpoint()).has_value());
  BuildOptions build = BothTiers();
  build.shard_world = 2;
  ASSERT_TRUE(BuildStore(env_, build).has_value());
  const auto read_fp4 = [this](const EngineOptions& options) {
    const auto engine = Engine::Open(env_, options).value();
    std::vector<std::byte> record(
        engine->records().reader().Shape(RecordKind::kFp4, 2).value().bytes);
    EXPECT_TRUE(engine->ReadFp4(2, 1, record).has_value());
    return record;
  };
  const std::vector<std::byte> whole = read_fp4(StoreOnly());
  const size_t whole13 = NibblePlaneBytes(256, 64);
  ASSERT_EQ(whole.size(), whole13 + NibblePlaneBytes(64, 128));
  for (const uint32_t rank : {0u, 1u}) {
    std::vector<std::byte> expected(whole.size() / 2);
    SliceGateUp(std::span(whole).first(whole13), {rank, 2}, std::span(expected).first(whole13 / 2));
    SliceDown(std::span(whole).subspan(whole13), 64, {rank, 2},
              std::span(expected).subspan(whole13 / 2));
    EXPECT_TRUE(read_fp4(OfRank(rank, false)) == expected) << rank;
  }
}

TEST_F(ShardTest, TheLauncherCountsOnlyWhereTheStoreIsSharded) {
  EngineOptions options = WithCheckpoint();
  options.shard.launched = {{1, 2, "RANK=1, WORLD_SIZE=2 (torchrun)"}};
  // On an empty store it does not: nobody asked for shards.
  EXPECT_EQ(BootEngine(env_, options)->json["world"], 1);
  ASSERT_TRUE(BootEngine(env_, options)->json["layers_built"] == 0);
  BuildOptions build = BothTiers();
  build.shard_world = 2;
  ASSERT_TRUE(BuildStore(env_, build).has_value());
  EXPECT_EQ(BootEngine(env_, options)->json["rank"], 1);
  EXPECT_EQ(BootEngine(env_, options)->json["world"], 2);
}

TEST_F(ShardTest, AWorldThatTheCheckpointCannotHaveMakesNothing) {
  EngineOptions options = OfRank(0, true);
  options.shard.world = 4;
  const Result<Outcome> refused = BootEngine(env_, options);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().exit_code(), 2);
  options.shard = {2, 2};
  EXPECT_EQ(BootEngine(env_, options).error().exit_code(), 2);
  EXPECT_TRUE(StoreFiles(env_).empty());
  // A dry run plans for the rank and makes nothing either.
  options.shard = {1, 2};
  options.dry_run = true;
  const auto engine = Engine::Open(env_, options).value();
  ASSERT_TRUE(engine->Plan().has_value());
  EXPECT_EQ(Json::parse(engine->PlanJson())["rank"], 1);
  EXPECT_TRUE(StoreFiles(env_).empty());
}

class EngineTest : public testing::Test {
 protected:
  void SetUp() override {
    WriteCheckpoint(env_, Model());
    const Outcome booted = MustBoot(env_, WithCheckpoint());
    good_ = booted.layers;
    ASSERT_EQ(good_.size(), 6u);
  }

  static SynthCheckpointOptions Model() {
    SynthCheckpointOptions model = SmallModel();
    model.main_layers = 5;
    return model;
  }
  static Outcome MustBoot(Env& env, const EngineOptions& options) {
    Result<Outcome> booted = BootEngine(env, options);
    EXPECT_TRUE(booted.has_value()) << booted.error().ToString();
    return booted ? *std::move(booted) : Outcome{};
  }
  static Status Refusal(Env& env, const EngineOptions& options) {
    const Result<Outcome> booted = BootEngine(env, options);
    if (!booted) return booted.error();
    ADD_FAILURE() << "it booted";
    return Status::System("it booted");
  }
  std::string LayerFile(uint32_t layer, std::string_view suffix) {
    return LayerFiles(env_, Text("layer-{:04}{}", layer, suffix)).at(0);
  }
  void Remove(uint32_t layer, std::string_view suffix) {
    ASSERT_TRUE(env_.Remove(LayerFile(layer, suffix)).has_value());
  }
  void CorruptData(uint32_t layer) {
    const std::string file = LayerFile(layer, ".base");
    env_.CorruptByte(file, env_.Files().at(file).size() - 4096, std::byte{1});
  }

  MemEnv env_;
  std::vector<Digest128> good_;
};

TEST_F(EngineTest, ACompleteStoreOpensNoShardOfTheCheckpoint) {
  FaultEnv unreadable(env_);
  unreadable.Add(Fault{.action = FaultAction::kError,
                       .count = Fault::kForever,
                       .kind = OperationKind::kOpen,
                       .path_contains = "/model-0",
                       .error = EACCES});
  const Outcome booted = MustBoot(unreadable, WithCheckpoint());
  EXPECT_EQ(booted.layers, good_);
  uint64_t shard_opens = 0;
  for (const Operation& operation : unreadable.Log())
    shard_opens +=
        operation.kind == OperationKind::kOpen && operation.path.ends_with(".safetensors");
  EXPECT_EQ(shard_opens, 0u);
  EXPECT_FALSE(Checkpoint::Open(unreadable, kTestCheckpoint).has_value()) << "they are unreadable";
  EXPECT_TRUE(booted.json["warnings"].empty()) << booted.json["warnings"];
}

TEST_F(EngineTest, ACompleteStoreBootsWhenTheCheckpointIsGone) {
  EngineOptions options = WithCheckpoint();
  options.checkpoint = "/gone";
  const Outcome booted = MustBoot(env_, options);
  EXPECT_EQ(booted.layers, good_);
  ASSERT_EQ(booted.json["warnings"].size(), 1u);
}

TEST_F(EngineTest, AShardReplacedInPlaceIsNoticedThoughTheStoreIsComplete) {
  const Checkpoint checkpoint = Checkpoint::Open(env_, kTestCheckpoint).value();
  const MoeModel model = DiscoverMoe(checkpoint).value();
  const Tensor& weight = *model.layers[1].experts[2].weight[0];
  std::vector<std::byte> content = env_.Files().at(checkpoint.files()[weight.file]);
  content[weight.offset + 100] ^= std::byte{1};
  env_.SetFile(checkpoint.files()[weight.file], content);
  const Status refusal = Refusal(env_, WithCheckpoint());
  EXPECT_EQ(refusal.exit_code(), 3);
  EXPECT_NE(refusal.what().find("was not built from"), std::string::npos) << refusal.ToString();
}

TEST_F(EngineTest, AnotherModelsCheckpointIsRefusedAndNothingChanges) {
  SynthCheckpointOptions other = Model();
  other.main_layers = 2;
  WorkerPool pool(1);
  ASSERT_TRUE(WriteSynthCheckpoint(env_, "/other", other, pool).has_value());
  EngineOptions options = WithCheckpoint();
  options.checkpoint = "/other";
  const StoreContent before = StoreFiles(env_);
  for (const bool complete : {true, false}) {
    if (!complete) Remove(1, ".base");
    const Status refusal = Refusal(env_, options);
    EXPECT_EQ(refusal.exit_code(), 3);
    EXPECT_NE(refusal.expected().find("6 MoE layers"), std::string::npos) << refusal.ToString();
    EXPECT_NE(refusal.found().find("3 MoE layers"), std::string::npos) << refusal.ToString();
    if (complete) {
      EXPECT_EQ(StoreFiles(env_), before);
    }
  }
}

TEST_F(EngineTest, AMissingDeltaIsBuiltAloneAndTheBaseIsNotTouched) {
  const StoreContent whole = StoreFiles(env_);
  std::map<std::string, int64_t> times = ModifiedTimes(env_);
  const std::string delta = LayerFile(3, ".delta-quintal");
  Remove(3, ".delta-quintal");
  FaultEnv watched(env_);
  const Outcome booted = MustBoot(watched, WithCheckpoint());
  EXPECT_EQ(booted.layers, good_);
  EXPECT_EQ(booted.json["layers_built"], 1);
  for (const Operation& operation : watched.Log())
    EXPECT_FALSE(operation.kind == OperationKind::kRename && operation.to.ends_with(".base"));
  EXPECT_EQ(StoreFiles(env_), whole);
  std::map<std::string, int64_t> after = ModifiedTimes(env_);
  times.erase(delta);
  after.erase(delta);
  EXPECT_EQ(after, times);
}

TEST_F(EngineTest, PresentLayersAreHandedOutWhileLaterOnesAreBuilt) {
  Remove(2, ".base");
  const Generation other = Store::Open(env_, kTestStore)->OpenGeneration().value();
  // Another process holds layer 2: it cannot be built before layer 0 was handed out.
  std::unique_ptr<FileLock> held = other.LockLayer(2, LockWait::kTry).value();
  ASSERT_NE(held, nullptr);
  const auto engine = Engine::Open(env_, WithCheckpoint()).value();
  std::vector<uint32_t> order;
  Result<const BootedLayer*> waited = Fail(Status::System("not waited"));
  std::thread waiter([&] { waited = engine->WaitLayer(4); });
  const Result<void> booted = engine->Boot([&](const BootedLayer& layer) {
    order.push_back(layer.ordinal);
    if (layer.ordinal == 1) held.reset();
  });
  waiter.join();
  ASSERT_TRUE(booted.has_value()) << booted.error().ToString();
  EXPECT_EQ(order, FirstOrdinals(6));
  ASSERT_TRUE(waited.has_value());
  EXPECT_EQ((*waited)->ordinal, 4u);
  EXPECT_FALSE(engine->WaitLayer(17).has_value());
}

TEST_F(EngineTest, ADamagedHeaderIsBuiltAgainWithAWarning) {
  const StoreContent whole = StoreFiles(env_);
  env_.CorruptByte(LayerFile(1, ".base"), 100, std::byte{4});
  EXPECT_EQ(Refusal(env_, StoreOnly()).exit_code(), 3);
  const Outcome booted = MustBoot(env_, WithCheckpoint());
  EXPECT_EQ(booted.layers, good_);
  ASSERT_EQ(booted.json["warnings"].size(), 1u);
  EXPECT_EQ(StoreFiles(env_), whole);
}

TEST_F(EngineTest, ABadChunkOrTableIsBuiltAgainMidBootOrNamed) {
  const StoreContent whole = StoreFiles(env_);
  for (const bool table : {false, true}) {
    for (const uint32_t layer : {0u, 3u, 5u}) {
      SCOPED_TRACE(layer);
      if (table) {
        env_.CorruptByte(LayerFile(layer, ".base"), kHeaderBytes + 3, std::byte{1});
      } else {
        CorruptData(layer);
      }
      const Status refusal = Refusal(env_, StoreOnly());
      EXPECT_EQ(refusal.exit_code(), 3);
      EXPECT_EQ(refusal.file(), LayerFile(layer, ".base"));
      EngineOptions no_build = WithCheckpoint();
      no_build.no_build = true;
      EXPECT_EQ(Refusal(env_, no_build).exit_code(), 3);
      const Outcome booted = MustBoot(env_, WithCheckpoint());
      EXPECT_EQ(booted.order, FirstOrdinals(6));
      EXPECT_EQ(booted.layers, good_);
      EXPECT_EQ(booted.json["layers_built"], 1);
      EXPECT_EQ(booted.json["bytes_read"], booted.json["bytes_needed"]);
      EXPECT_NE(booted.json["warnings"].dump().find(Text("layer {} is built again", layer)),
                std::string::npos);
      EXPECT_EQ(StoreFiles(env_), whole);
    }
  }
}

TEST_F(EngineTest, SeveralBadLayersAreBuiltAgain) {
  const StoreContent whole = StoreFiles(env_);
  for (const uint32_t layer : {0u, 1u, 4u}) CorruptData(layer);
  const Outcome booted = MustBoot(env_, WithCheckpoint());
  EXPECT_EQ(booted.layers, good_);
  EXPECT_EQ(booted.json["layers_built"], 3);
  EXPECT_EQ(StoreFiles(env_), whole);
}

// A file that cannot be opened, or its header not read, may well be right: a boot with the
// checkpoint at hand names it and builds nothing in its place, and so does a build.
TEST_F(EngineTest, WhatCannotBeReadIsNeitherDamagedNorBuiltAgain) {
  const StoreContent whole = StoreFiles(env_);
  for (const OperationKind kind : {OperationKind::kOpen, OperationKind::kRead}) {
    for (const int error : {EACCES, EIO, EMFILE}) {
      FaultEnv faulty(env_);
      faulty.Add(Fault{.action = FaultAction::kError,
                       .count = Fault::kForever,
                       .kind = kind,
                       .path_contains = "layer-0002.base",
                       .error = error});
      const auto engine = Engine::Open(faulty, WithCheckpoint()).value();
      const Result<void> planned = engine->Plan();
      ASSERT_FALSE(planned.has_value());
      EXPECT_EQ(planned.error().code(), StatusCode::kSystem);
      EXPECT_EQ(planned.error().file(), LayerFile(2, ".base"));
      EXPECT_EQ(planned.error().error_number(), error);
      EXPECT_NE(planned.error().what().find("unreadable"), std::string::npos);
      EXPECT_EQ(planned.error().ToString().find("damaged"), std::string::npos);
      EXPECT_EQ(engine->generation().Probe(2, Encoding::kBase).presence, Presence::kUnreadable);
      const Checkpoint checkpoint = Checkpoint::Open(faulty, "/model").value();
      const MoeModel model = DiscoverMoe(checkpoint).value();
      const Result<BuildReport> built = Build(faulty, checkpoint, model, "/store", BuildOptions{});
      ASSERT_FALSE(built.has_value());
      EXPECT_EQ(built.error().code(), StatusCode::kSystem);
      EXPECT_EQ(built.error().file(), LayerFile(2, ".base"));
      EXPECT_NE(built.error().what().find("unreadable"), std::string::npos);
      EXPECT_EQ(StoreFiles(env_), whole);
    }
  }
}

TEST_F(EngineTest, ReadErrorsMidBootEndByTheTableOrInARebuild) {
  struct Case {
    Fault fault;
    int exit_code;
  };
  const Case cases[] = {
      {Fault{.action = FaultAction::kError, .first = 4, .error = EIO}, 1},
      {Fault{.action = FaultAction::kEndOfFile, .first = 4}, 3},
  };
  for (const Case& c : cases) {
    // The reads of layer 2: probe, header, table, and the fourth is of its data. It fails for good
    // without a checkpoint; with one, the layer is built again and read.
    Fault fault = c.fault;
    fault.kind = OperationKind::kRead;
    fault.path_contains = "layer-0002.base";
    {
      fault.count = Fault::kForever;
      FaultEnv faulty(env_);
      faulty.Add(fault);
      std::vector<uint32_t> order;
      const auto engine = Engine::Open(faulty, StoreOnly()).value();
      const Result<void> booted =
          engine->Boot([&](const BootedLayer& layer) { order.push_back(layer.ordinal); });
      ASSERT_FALSE(booted.has_value());
      EXPECT_EQ(booted.error().exit_code(), c.exit_code) << booted.error().ToString();
      EXPECT_EQ(booted.error().file(), LayerFile(2, ".base"));
      EXPECT_LE(order.size(), 2u);
      EXPECT_EQ(engine->layers().size(), order.size());
      for (size_t i = 0; i < order.size(); ++i)
        EXPECT_EQ(LayerDigest(engine->layers()[i]), good_[i]);
      EXPECT_FALSE(engine->WaitLayer(2).has_value());
    }
    fault.count = 1;
    FaultEnv faulty(env_);
    faulty.Add(fault);
    const Outcome booted = MustBoot(faulty, WithCheckpoint());
    EXPECT_EQ(booted.layers, good_);
    EXPECT_EQ(booted.json["warnings"].size(), 1u) << booted.json["warnings"];
  }
}

TEST_F(EngineTest, SeveralGenerationsAreToldApartByTheCheckpoint) {
  SynthCheckpointOptions other = Model();
  other.seed = 99;
  WorkerPool pool(1);
  ASSERT_TRUE(WriteSynthCheckpoint(env_, "/other", other, pool).has_value());
  const Checkpoint checkpoint = Checkpoint::Open(env_, "/other").value();
  const MoeModel model = DiscoverMoe(checkpoint).value();
  ASSERT_TRUE(Build(env_, checkpoint, model, kTestStore, BothTiers()).has_value());
  EXPECT_EQ(Refusal(env_, StoreOnly()).exit_code(), 2);
  EXPECT_EQ(MustBoot(env_, WithCheckpoint()).layers, good_);
  EngineOptions options = WithCheckpoint();
  options.checkpoint = "/other";
  EXPECT_NE(MustBoot(env_, options).layers, good_);
}

TEST_F(EngineTest, DryRunPlansAndChangesNothing) {
  Remove(4, ".base");
  EngineOptions options = WithCheckpoint();
  options.dry_run = true;
  FaultEnv watched(env_);
  const auto before = env_.Files();
  const auto engine = Engine::Open(watched, options).value();
  ASSERT_TRUE(engine->Plan().has_value());
  EXPECT_EQ(engine->plan().Of(4, Tier::kBase).action, PlanAction::kBuild);
  const Json plan = Json::parse(engine->PlanJson());
  EXPECT_EQ(plan["actions"].size(), 12u);
  EXPECT_EQ(plan["actions"][8]["action"], "build");
  EXPECT_EQ(plan["actions"][9]["action"], "attach");
  EXPECT_EQ(env_.Files(), before);
  options.store_directory = "/nothing/yet";
  const auto empty = Engine::Open(watched, options).value();
  ASSERT_TRUE(empty->Plan().has_value());
  EXPECT_EQ(empty->plan().Of(0, Tier::kDelta).action, PlanAction::kBuild);
  EXPECT_EQ(env_.Files(), before);
}

TEST_F(EngineTest, WhatDoesNotFitIsServedFromTheHost) {
  EngineOptions options = StoreOnly();
  const uint64_t layer_bytes = MustBoot(env_, options).engine->plan().bytes_store / 6;
  options.boot.memory_limit_bytes = 2 * layer_bytes + 10;
  options.reserve_bytes = 10;
  const Outcome booted = MustBoot(env_, options);
  EXPECT_EQ(booted.layers, good_);
  EXPECT_EQ(booted.json["source_by_layer"][1]["source"] == "mapped", false);
  EXPECT_EQ(booted.json["source_by_layer"][2]["source"], "mapped");
  options.base_residency = Residency::kDevice;
  FaultEnv watched(env_);
  EXPECT_EQ(Refusal(watched, options).exit_code(), 4);
  EXPECT_EQ(ReadBytes(watched, ".base"), 6 * kHeaderBytes);
}

TEST_F(EngineTest, SelectsLayersOfTheDeltaTier) {
  EngineOptions options = StoreOnly(true);
  options.delta_layers = "0-4";
  options.no_delta_layers = "1";
  Remove(1, ".delta-quintal");
  Remove(5, ".delta-quintal");
  FaultEnv watched(env_);
  const Outcome booted = MustBoot(watched, options);
  EXPECT_EQ(booted.json["layers_attached"], 4);
  options.no_delta_layers.clear();
  EXPECT_NE(Refusal(env_, options).found().find("delta tier of layer 1"), std::string::npos);
}

TEST_F(EngineTest, BootsARangeOfExpertsAndReadsNothingElse) {
  const Outcome all = MustBoot(env_, StoreOnly());
  for (const bool map : {false, true}) {
    EngineOptions options = StoreOnly();
    options.experts = {1, 3};
    options.boot.map = map;
    FaultEnv watched(env_);
    const Outcome some = MustBoot(watched, options);
    ASSERT_EQ(some.engine->layers().size(), 6u);
    const BootedLayer& layer = some.engine->layers()[4];
    const BootedLayer& whole = all.engine->layers()[4];
    EXPECT_EQ(layer.first_expert, 1u);
    EXPECT_EQ(layer.geometry.experts, 2u);
    const size_t expert_bytes = whole.planes2.size() / 3;
    EXPECT_EQ(std::vector<std::byte>(layer.planes2.begin(), layer.planes2.end()),
              std::vector<std::byte>(whole.planes2.begin() + static_cast<ptrdiff_t>(expert_bytes),
                                     whole.planes2.end()));
    EXPECT_EQ(some.json["bytes_read"], some.json["bytes_needed"]);
    EXPECT_EQ(some.json["bytes_verified"], some.json["bytes_needed"]);
    uint64_t data_bytes = 0;
    for (const Operation& operation : watched.Log())
      if (Touches(operation, ".base") &&
          (operation.kind == OperationKind::kRead || operation.kind == OperationKind::kPopulate))
        data_bytes += operation.bytes;
    EXPECT_EQ(data_bytes, some.json["bytes_needed"].get<uint64_t>() +
                              some.json["bytes_metadata"].get<uint64_t>());
  }
  EngineOptions options = StoreOnly();
  options.experts = {1, 4};
  EXPECT_EQ(Refusal(env_, options).exit_code(), 2);
}

TEST_F(EngineTest, AReadOnlyStoreBootsAndDoesNotBuild) {
  FaultEnv read_only(env_);
  for (const OperationKind kind : {OperationKind::kCreate, OperationKind::kRename,
                                   OperationKind::kCreateDirectory, OperationKind::kLock})
    read_only.Add(Fault{.action = FaultAction::kError,
                        .count = Fault::kForever,
                        .kind = kind,
                        .path_contains = kTestStore,
                        .error = EROFS});
  EXPECT_EQ(MustBoot(read_only, StoreOnly()).layers, good_);
  EXPECT_EQ(MustBoot(read_only, WithCheckpoint()).layers, good_);
  Remove(1, ".base");
  const Status refusal = Refusal(read_only, WithCheckpoint());
  EXPECT_EQ(refusal.exit_code(), 1) << refusal.ToString();
  EXPECT_NE(refusal.found().find("layer 1"), std::string::npos) << refusal.ToString();
}

TEST_F(EngineTest, ChangedSourceWeightsPublishNothing) {
  Remove(3, ".base");
  const Checkpoint checkpoint = Checkpoint::Open(env_, kTestCheckpoint).value();
  const MoeModel model = DiscoverMoe(checkpoint).value();
  const Tensor& scale = *model.layers[3].experts[1].scale[0];
  FaultEnv faulty(env_);
  faulty.Add(BitFlip{.path_contains = checkpoint.files()[scale.file],
                     .offset = scale.offset,
                     .flipped_bits = std::byte{1}});
  const Status refusal = Refusal(faulty, WithCheckpoint());
  EXPECT_EQ(refusal.exit_code(), 3) << refusal.ToString();
  EXPECT_TRUE(LayerFiles(env_, "layer-0003.base").empty());
}

}  // namespace
}  // namespace hotplane
