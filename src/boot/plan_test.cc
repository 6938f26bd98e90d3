#include "boot/plan.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "base/format_text.h"

namespace hotplane {
namespace {

constexpr uint32_t kDenseLayers = 3;
constexpr uint32_t kMainLayers = 43;  // with experts
constexpr uint32_t kAllLayers = kMainLayers + 1;
constexpr uint32_t kMtpLayer = kMainLayers;
constexpr LayerGeometry kGeometry = {.experts = 8, .hidden = 64, .intermediate = 256};
constexpr uint64_t kSourceBytes = 1'000'000;

std::vector<uint32_t> Layers(uint32_t begin, uint32_t end) {
  std::vector<uint32_t> layers(end - begin);
  std::iota(layers.begin(), layers.end(), begin);
  return layers;
}

LayerLayout LayoutOf(Encoding encoding, uint32_t world = 1) {
  LayerGeometry geometry = kGeometry;
  geometry.intermediate /= world;
  return PlanLayerLayout(encoding, geometry);
}

// A store of a model with three dense layers, 43 MoE layers and one MTP layer, and what a boot
// wants of it. Everything is there, both tiers, and no checkpoint.
struct Case {
  PlanFacts facts;
  PlanConfig config;

  explicit Case(uint32_t world = 1) {
    facts.directory = "/store/generation";
    facts.manifest.identity.shard_world = world;
    for (uint32_t i = 0; i < kAllLayers; ++i)
      facts.manifest.layers.push_back({i, i + kDenseLayers, i == kMtpLayer, Text("layers.{}.", i),
                                       kGeometry, SourceFormat::kMxfp4});
    facts.layers.resize(kAllLayers);
    for (uint32_t i = 0; i < kAllLayers; ++i) {
      Present(i, Encoding::kBase, world);
      Present(i, Encoding::kDeltaQuintal, world);
    }
    config.layers = Layers(0, kAllLayers);
    config.delta_layers = config.layers;
    config.device_bytes = UINT64_MAX;
    config.shard_world = world;
  }

  void Present(uint32_t layer, Encoding encoding, uint32_t world = 1) {
    const LayerLayout layout = LayoutOf(encoding, world);
    FactsOf(facts.layers[layer], encoding) = {Presence::kPresent, layout.file_bytes,
                                              layout.data_bytes, ""};
  }
  void Absent(uint32_t layer, Encoding encoding) {
    FactsOf(facts.layers[layer], encoding) = {Presence::kAbsent, 0, 0, ""};
  }
  void Damaged(uint32_t layer, Encoding encoding, std::string reason) {
    FactsOf(facts.layers[layer], encoding) = {Presence::kDamaged, 1234, 0, std::move(reason)};
  }
  void Unreadable(uint32_t layer, Encoding encoding) {
    FileFacts& file = FactsOf(facts.layers[layer], encoding);
    file.presence = Presence::kUnreadable;
    file.damage = Status::FromErrno(EACCES, "cannot open the file")
                      .File(Text("layer-{:04}.{}", layer, EncodingName(encoding)));
  }
  void WithCheckpoint() {
    facts.checkpoint = {"/model", std::vector<uint64_t>(kAllLayers, kSourceBytes)};
  }
  BootPlan Plan() const {
    const Result<BootPlan> plan = PlanBoot(facts, config);
    EXPECT_TRUE(plan.has_value()) << plan.error().ToString();
    return plan.value_or(BootPlan{});
  }
  Status Refusal() const {
    const Result<BootPlan> plan = PlanBoot(facts, config);
    if (!plan) return plan.error();
    ADD_FAILURE() << PlanTable(*plan);
    return Status::System("it was not refused");
  }
};

const uint64_t kBaseData = LayoutOf(Encoding::kBase).data_bytes;
const uint64_t kBaseFile = LayoutOf(Encoding::kBase).file_bytes;
const uint64_t kDeltaFile = LayoutOf(Encoding::kDeltaQuintal).file_bytes;

// What one layer of a case comes to.
struct Expected {
  PlanAction base;
  PlanAction delta;
  uint64_t store;
  uint64_t checkpoint;
  uint64_t built;
  uint64_t skipped;
};

struct TableEntry {
  const char* name;
  std::function<void(Case&)> arrange;  // what differs at layer 7
  Expected layer7;
};

// Nothing is built over what may well be right, and nothing that was not seen is called damaged.
TEST(Plan, WhatCannotBeReadIsRefusedByName) {
  for (const bool with_checkpoint : {false, true}) {
    for (const bool no_build : {false, true}) {
      Case c;
      if (with_checkpoint) c.WithCheckpoint();
      c.config.no_build = no_build;
      c.Absent(2, Encoding::kBase);
      c.Damaged(3, Encoding::kBase, "its checksum");
      c.Unreadable(5, Encoding::kBase);
      c.Unreadable(6, Encoding::kBase);
      c.Unreadable(9, Encoding::kDeltaQuintal);
      const Status refused = c.Refusal();
      EXPECT_EQ(refused.code(), StatusCode::kSystem);
      EXPECT_EQ(refused.file(), "layer-0005.base");
      EXPECT_NE(refused.what().find("unreadable: the base tier of layers 5-6; the delta tier of "
                                    "layer 9"),
                std::string::npos)
          << refused.what();
      EXPECT_EQ(refused.ToString().find("damaged"), std::string::npos) << refused.ToString();
    }
  }
}

TEST(Plan, AnUnreadableFileThatIsNotNeededIsNoFault) {
  Case c;
  c.Unreadable(5, Encoding::kDeltaQuintal);
  c.Present(5, Encoding::kDeltaNibble);
  EXPECT_EQ(c.Plan().Of(5, Tier::kDelta).action, PlanAction::kAttach);
  c.Absent(5, Encoding::kDeltaNibble);
  c.config.delta_layers = {0, 1};
  EXPECT_EQ(c.Plan().Of(5, Tier::kDelta).action, PlanAction::kSkip);
}

TEST(Plan, TableOfOneLayer) {
  using A = PlanAction;
  const TableEntry table[] = {
      {"base and delta present", [](Case&) {}, {A::kRead, A::kAttach, kBaseData, 0, 0, kDeltaFile}},
      {"base present, delta absent and wanted",
       [](Case& c) { c.Absent(7, Encoding::kDeltaQuintal); },
       {A::kRead, A::kBuild, kBaseData, kSourceBytes, kDeltaFile, 0}},
      {"delta present, base absent",
       [](Case& c) { c.Absent(7, Encoding::kBase); },
       {A::kBuild, A::kAttach, kBaseData, kSourceBytes, kBaseFile, kDeltaFile}},
      {"both absent: the source is read once",
       [](Case& c) {
         c.Absent(7, Encoding::kBase);
         c.Absent(7, Encoding::kDeltaQuintal);
       },
       {A::kBuild, A::kBuild, kBaseData, kSourceBytes, kBaseFile + kDeltaFile, 0}},
      {"delta not wanted",
       [](Case& c) { c.config.delta_layers.clear(); },
       {A::kRead, A::kSkip, kBaseData, 0, 0, kDeltaFile}},
      {"delta not wanted and absent",
       [](Case& c) {
         c.config.delta_layers.clear();
         c.Absent(7, Encoding::kDeltaQuintal);
       },
       {A::kRead, A::kSkip, kBaseData, 0, 0, 0}},
      {"base not wanted",
       [](Case& c) { c.config.base = false; },
       {A::kSkip, A::kAttach, 0, 0, 0, kBaseFile + kDeltaFile}},
      {"delta not wanted at this layer",
       [](Case& c) { std::erase(c.config.delta_layers, 7u); },
       {A::kRead, A::kSkip, kBaseData, 0, 0, kDeltaFile}},
      {"layer not wanted",
       [](Case& c) {
         std::erase(c.config.layers, 7u);
         std::erase(c.config.delta_layers, 7u);
       },
       {A::kSkip, A::kSkip, 0, 0, 0, kBaseFile + kDeltaFile}},
      {"the base is damaged",
       [](Case& c) { c.Damaged(7, Encoding::kBase, "cut short"); },
       {A::kBuild, A::kAttach, kBaseData, kSourceBytes, kBaseFile, kDeltaFile}},
      {"the base is of another generation",
       [](Case& c) { c.Damaged(7, Encoding::kBase, "its generation differs"); },
       {A::kBuild, A::kAttach, kBaseData, kSourceBytes, kBaseFile, kDeltaFile}},
      {"the delta tier is there in the other encoding",
       [](Case& c) {
         c.Absent(7, Encoding::kDeltaQuintal);
         c.Present(7, Encoding::kDeltaNibble);
       },
       {A::kRead, A::kAttach, kBaseData, 0, 0, LayoutOf(Encoding::kDeltaNibble).file_bytes}},
      {"the encoding that was asked for is not there",
       [](Case& c) { c.config.delta_encodings = {Encoding::kDeltaNibble}; },
       {A::kRead, A::kBuild, kBaseData, kSourceBytes, LayoutOf(Encoding::kDeltaNibble).file_bytes,
        kDeltaFile}},
      {"the base stays on the host",
       [](Case& c) { c.config.base_residency_of[7] = Residency::kHost; },
       {A::kMap, A::kAttach, kBaseData, 0, 0, kDeltaFile}},
  };
  for (const TableEntry& entry : table) {
    SCOPED_TRACE(entry.name);
    Case c;
    c.WithCheckpoint();
    entry.arrange(c);
    const BootPlan plan = c.Plan();
    ASSERT_EQ(plan.entries.size(), 2u * kAllLayers);
    const PlanEntry& base = plan.Of(7, Tier::kBase);
    const PlanEntry& delta = plan.Of(7, Tier::kDelta);
    EXPECT_EQ(base.action, entry.layer7.base) << base.reason;
    EXPECT_EQ(delta.action, entry.layer7.delta) << delta.reason;
    EXPECT_EQ(base.bytes_store + delta.bytes_store, entry.layer7.store);
    EXPECT_EQ(base.bytes_checkpoint + delta.bytes_checkpoint, entry.layer7.checkpoint);
    EXPECT_EQ(base.bytes_built + delta.bytes_built, entry.layer7.built);
    EXPECT_EQ(base.bytes_skipped + delta.bytes_skipped, entry.layer7.skipped);
    EXPECT_FALSE(base.reason.empty() || delta.reason.empty());
    for (const PlanEntry& other : plan.entries) {
      if (other.layer == 7 || !c.config.base || c.config.delta_layers.empty() ||
          c.config.delta_encodings.size() == 1)
        continue;
      EXPECT_EQ(other.action, other.encoding == Encoding::kBase ? A::kRead : A::kAttach)
          << other.layer;
    }
  }
}

TEST(Plan, WarmBootReadsTheBasesAndSkipsTheDeltas) {
  Case c;
  const BootPlan plan = c.Plan();
  EXPECT_EQ(plan.layers_total, kAllLayers);
  EXPECT_EQ(plan.bytes_store, kAllLayers * kBaseData);
  EXPECT_EQ(plan.bytes_skipped, kAllLayers * kDeltaFile);
  EXPECT_EQ(plan.bytes_checkpoint, 0u);
  EXPECT_EQ(plan.bytes_built, 0u);
  EXPECT_FALSE(plan.builds());
  EXPECT_TRUE(plan.warnings.empty());
}

TEST(Plan, NamesMtpAndDenseLayersRight) {
  Case c;
  const BootPlan plan = c.Plan();
  EXPECT_EQ(plan.Of(0, Tier::kBase).model_index, 3u);
  EXPECT_FALSE(plan.Of(42, Tier::kBase).mtp);
  EXPECT_TRUE(plan.Of(43, Tier::kBase).mtp);
  EXPECT_EQ(plan.Of(43, Tier::kDelta).model_index, 46u);
  const std::string table = PlanTable(plan);
  EXPECT_NE(table.find("0-42 "), std::string::npos) << table;
  EXPECT_NE(table.find("43 (MTP)"), std::string::npos) << table;
  EXPECT_EQ(LayerListText({0, 1, 2, 7, 42, 43}, c.facts.manifest), "0-2, 7, 42, 43 (MTP)");
}

TEST(Plan, RefusesWhatIsMissingByName) {
  struct Refused {
    const char* name;
    std::function<void(Case&)> arrange;
    int exit_code;
    const char* found;
    const char* advice;
  };
  const Refused table[] = {
      {"absent, no checkpoint",
       [](Case& c) {
         for (const uint32_t layer : {3u, 4u, 5u, 43u}) c.Absent(layer, Encoding::kBase);
       },
       3, "no usable base tier of layers 3-5, 43 (MTP)", "--checkpoint"},
      {"one layer", [](Case& c) { c.Absent(9, Encoding::kDeltaQuintal); }, 3,
       "no usable delta tier of layer 9", "--checkpoint"},
      {"in the other encoding",
       [](Case& c) {
         c.config.delta_encodings = {Encoding::kDeltaNibble};
         for (const uint32_t layer : {0u, 9u, 10u}) c.Present(layer, Encoding::kDeltaNibble);
       },
       3, "the delta tier as quintals, not as nibbles, of layers 1-8, 11-42, 43 (MTP)",
       "leave out --delta: quintals will do"},
      {"in the other encoding, or not at all",
       [](Case& c) {
         c.config.delta_encodings = {Encoding::kDeltaNibble};
         for (uint32_t layer = 2; layer < kAllLayers; ++layer)
           c.Present(layer, Encoding::kDeltaNibble);
         c.Absent(1, Encoding::kDeltaQuintal);
       },
       3, "no usable delta tier of layer 1; the delta tier as quintals, not as nibbles, of layer 0",
       "--checkpoint"},
      {"--no-build",
       [](Case& c) {
         c.Absent(9, Encoding::kBase);
         c.WithCheckpoint();
         c.config.no_build = true;
       },
       3, "layer 9", "without --no-build"},
      {"read-only store",
       [](Case& c) {
         c.Absent(9, Encoding::kBase);
         c.WithCheckpoint();
         c.facts.store_writable = false;
       },
       1, "layer 9", "can be written"},
      {"damaged, no checkpoint", [](Case& c) { c.Damaged(2, Encoding::kBase, "empty file"); }, 3,
       "layer 2; damaged: empty file", "--checkpoint"},
  };
  for (const Refused& entry : table) {
    SCOPED_TRACE(entry.name);
    Case c;
    entry.arrange(c);
    const Status refusal = c.Refusal();
    EXPECT_EQ(refusal.exit_code(), entry.exit_code);
    EXPECT_NE(refusal.found().find(entry.found), std::string::npos) << refusal.found();
    EXPECT_NE(refusal.advice().find(entry.advice), std::string::npos) << refusal.advice();
    EXPECT_EQ(refusal.file(), c.facts.directory);
  }
}

// What would not help is not advised.
TEST(Plan, TheOtherEncodingWillDoOnlyWhereNothingElseIsMissing) {
  const auto advice = [](const std::function<void(Case&)>& arrange) {
    Case c;
    c.config.delta_encodings = {Encoding::kDeltaNibble};
    arrange(c);
    return c.Refusal().advice();
  };
  EXPECT_NE(advice([](Case&) {}).find("leave out --delta"), std::string::npos);
  for (const Encoding encoding : {Encoding::kBase, Encoding::kDeltaQuintal}) {
    const std::string told = advice([encoding](Case& c) { c.Absent(1, encoding); });
    EXPECT_EQ(told.find("leave out"), std::string::npos) << told;
    EXPECT_NE(told.find("--checkpoint"), std::string::npos) << told;
  }
}

TEST(Plan, ADamagedFileIsToldInFull) {
  Case c;
  c.Absent(3, Encoding::kBase);
  c.Damaged(2, Encoding::kBase, "cut short");
  FactsOf(c.facts.layers[2], Encoding::kBase).damage =
      Status::Data("cut short").File("/store/generation/layer-0002.base").Expected("9").Found("8");
  const Status refusal = c.Refusal();
  EXPECT_EQ(refusal.exit_code(), 3);
  EXPECT_EQ(refusal.file(), "/store/generation/layer-0002.base");
  EXPECT_EQ(refusal.found(), "8");
  EXPECT_EQ(refusal.what(), "no usable base tier of layers 2-3; the first damaged file: cut short");
}

TEST(Plan, AReadOnlyStoreThatIsCompleteBoots) {
  Case c;
  c.facts.store_writable = false;
  c.config.no_build = true;
  EXPECT_EQ(c.Plan().bytes_store, kAllLayers * kBaseData);
}

TEST(Plan, WarnsOfDamagedFilesThatItBuildsAgain) {
  Case c;
  c.WithCheckpoint();
  c.Damaged(2, Encoding::kBase, "cut short");
  const BootPlan plan = c.Plan();
  ASSERT_EQ(plan.warnings.size(), 1u);
  EXPECT_NE(plan.warnings[0].find("layer 2 (base)"), std::string::npos);
  EXPECT_NE(plan.Of(2, Tier::kBase).reason.find("cut short"), std::string::npos);
}

TEST(Plan, WhatIsNotToBeReplacedIsNotPlannedToBeBuilt) {
  for (const bool checkpoint : {false, true}) {
    SCOPED_TRACE(checkpoint);
    Case c;
    if (checkpoint) c.WithCheckpoint();
    c.Damaged(2, Encoding::kBase, "cut short");
    c.Damaged(5, Encoding::kDeltaQuintal, "a directory is in the place of layer 5's file");
    FileFacts& file = FactsOf(c.facts.layers[5], Encoding::kDeltaQuintal);
    file.damage = Status::Data(file.reason).File("/store/5").Advice("move it away");
    file.irreplaceable = file.damage;
    const Status refusal = c.Refusal();
    EXPECT_EQ(refusal.exit_code(), 3);
    if (!checkpoint) continue;
    EXPECT_EQ(refusal.file(), "/store/5");
    EXPECT_EQ(refusal.advice(), "move it away");
    // Of a layer that this boot does not want it is nobody's business.
    std::erase(c.config.delta_layers, 5u);
    EXPECT_EQ(c.Plan().Of(2, Tier::kBase).action, PlanAction::kBuild);
  }
}

TEST(Plan, SaysThatASecondDeltaTierIsBuiltAndWhichIsThere) {
  Case c;
  c.WithCheckpoint();
  c.config.delta_encodings = {Encoding::kDeltaNibble};
  c.Absent(1, Encoding::kDeltaQuintal);
  const BootPlan plan = c.Plan();
  EXPECT_EQ(plan.Of(0, Tier::kDelta).reason, "absent; there are quintals, not nibbles");
  EXPECT_EQ(plan.Of(0, Tier::kDelta).bytes_skipped, kDeltaFile);
  EXPECT_EQ(plan.Of(1, Tier::kDelta).reason, "absent");
  EXPECT_EQ(plan.Of(1, Tier::kDelta).bytes_skipped, 0u);
}

TEST(Plan, AutoKeepsOnTheHostWhatDoesNotFit) {
  Case c;
  c.config.reserve_bytes = 1000;
  c.config.device_bytes = 10 * kBaseData + 1000;
  const BootPlan plan = c.Plan();
  EXPECT_EQ(plan.bytes_device, 10 * kBaseData);
  EXPECT_EQ(plan.bytes_host, (kAllLayers - 10) * kBaseData);
  for (uint32_t layer = 0; layer < kAllLayers; ++layer) {
    const PlanEntry& base = plan.Of(layer, Tier::kBase);
    EXPECT_EQ(base.residency, layer < 10 ? Residency::kDevice : Residency::kHost) << layer;
    EXPECT_EQ(base.action, layer < 10 ? PlanAction::kRead : PlanAction::kMap) << layer;
  }
  // One byte less, and the tenth layer stays on the host too.
  --c.config.device_bytes;
  EXPECT_EQ(c.Plan().bytes_device, 9 * kBaseData);
  // A layer that must be on the device takes its room before those that may.
  c.config.base_residency_of[43] = Residency::kDevice;
  const BootPlan pinned = c.Plan();
  EXPECT_EQ(pinned.Of(43, Tier::kBase).residency, Residency::kDevice);
  EXPECT_EQ(pinned.Of(8, Tier::kBase).residency, Residency::kHost);
}

TEST(Plan, DeviceRefusesWithTheNumbers) {
  Case c;
  c.config.base_residency = Residency::kDevice;
  c.config.reserve_bytes = 1;
  c.config.device_bytes = kAllLayers * kBaseData;
  const Status refusal = c.Refusal();
  EXPECT_EQ(refusal.exit_code(), 4);
  EXPECT_NE(refusal.expected().find(Text("{} bytes", kAllLayers * kBaseData)), std::string::npos);
  EXPECT_NE(refusal.advice().find("--base auto"), std::string::npos);
  ++c.config.device_bytes;
  EXPECT_EQ(c.Plan().bytes_host, 0u);
  // A reserve larger than the device leaves nothing.
  c.config.reserve_bytes = UINT64_MAX;
  EXPECT_EQ(c.Refusal().exit_code(), 4);
}

TEST(Plan, PinsDeltaRecordsInOrderAsFarAsTheyFit) {
  Case c;
  const LayerLayout layout = LayoutOf(Encoding::kDeltaQuintal);
  uint64_t record_bytes = 0;
  for (const Section& section : layout.sections) record_bytes += section.expert_bytes;
  const uint64_t slot_bytes = (record_bytes + 4095) / 4096 * 4096;
  const uint32_t experts = kGeometry.experts;
  c.Absent(1, Encoding::kDeltaQuintal);
  c.WithCheckpoint();
  std::erase(c.config.delta_layers, 0u);
  c.config.delta_pinned_bytes = (2 * experts + 1) * slot_bytes + slot_bytes - 1;
  const BootPlan plan = c.Plan();
  const uint32_t pinned[] = {0, experts, experts, 1, 0};
  for (uint32_t layer = 0; layer < 5; ++layer) {
    const PlanEntry& delta = plan.Of(layer, Tier::kDelta);
    EXPECT_EQ(delta.pinned_experts, pinned[layer]) << layer;
    EXPECT_EQ(delta.bytes_store, pinned[layer] * record_bytes) << layer;
    EXPECT_EQ(delta.residency, pinned[layer] > 0 ? Residency::kHost : Residency::kInvalid) << layer;
  }
  EXPECT_EQ(plan.Of(0, Tier::kDelta).action, PlanAction::kSkip);
  EXPECT_EQ(plan.Of(1, Tier::kDelta).action, PlanAction::kBuild);
  EXPECT_EQ(plan.Of(2, Tier::kDelta).action, PlanAction::kRead);
  EXPECT_EQ(plan.Of(2, Tier::kDelta).bytes_skipped, kDeltaFile - experts * record_bytes);
  EXPECT_EQ(plan.Of(4, Tier::kDelta).action, PlanAction::kAttach);
  EXPECT_EQ(plan.bytes_pinned, (2 * experts + 1) * record_bytes);
  EXPECT_EQ(plan.bytes_store, kAllLayers * kBaseData + plan.bytes_pinned);

  c.config.delta_pinned_bytes = slot_bytes - 1;
  EXPECT_EQ(c.Refusal().exit_code(), 2);
  c.config.delta_layers.clear();
  EXPECT_EQ(c.Plan().bytes_pinned, 0u) << "no delta tier is wanted";
  c.config.delta_layers = {5};
  c.config.experts = ExpertRange{1, 2};
  c.config.delta_pinned_bytes = UINT64_MAX;
  EXPECT_EQ(c.Plan().Of(5, Tier::kDelta).pinned_experts, 1u);
}

TEST(Plan, RanksAndWorlds) {
  Case c(4);
  c.config.shard_rank = 3;
  const BootPlan plan = c.Plan();
  EXPECT_EQ(plan.bytes_store, kAllLayers * LayoutOf(Encoding::kBase, 4).data_bytes);
  EXPECT_EQ(plan.bytes_skipped, kAllLayers * LayoutOf(Encoding::kDeltaQuintal, 4).file_bytes);
  EXPECT_EQ(plan.shard_rank, 3u);
  EXPECT_EQ(plan.shard_world, 4u);
  EXPECT_TRUE(PlanTable(plan).starts_with("rank 3 of 4\n"));
  EXPECT_FALSE(PlanTable(Case().Plan()).starts_with("rank"));
  // What is missing is built for this rank alone.
  c.WithCheckpoint();
  c.Absent(7, Encoding::kBase);
  EXPECT_EQ(c.Plan().bytes_built, LayoutOf(Encoding::kBase, 4).file_bytes);
  EXPECT_EQ(c.Plan().bytes_checkpoint, kSourceBytes);
  c.config.shard_rank = 4;
  EXPECT_EQ(c.Refusal().exit_code(), 2);
  c.config.shard_rank = 0;
  c.config.shard_world = 2;
  const Status refusal = c.Refusal();
  EXPECT_EQ(refusal.exit_code(), 2);
  EXPECT_NE(refusal.advice().find("--tp 2"), std::string::npos);
}

TEST(Plan, ARangeOfExpertsReadsTheirPiecesOnly) {
  Case c;
  c.config.experts = {2, 5};
  uint64_t pieces = 0;
  for (const Section& section : LayoutOf(Encoding::kBase).sections)
    pieces += 3 * section.expert_bytes;
  const BootPlan plan = c.Plan();
  EXPECT_EQ(plan.bytes_store, kAllLayers * pieces);
  EXPECT_EQ(plan.bytes_skipped, kAllLayers * (kBaseData - pieces + kDeltaFile));
  EXPECT_NE(plan.Of(0, Tier::kBase).reason.find("experts 2-4 of 8"), std::string::npos);
  c.config.experts = {0, 8};
  EXPECT_EQ(c.Plan().bytes_store, kAllLayers * kBaseData);
  for (const ExpertRange bad : {ExpertRange{0, 9}, ExpertRange{3, 3}, ExpertRange{5, 2}}) {
    c.config.experts = bad;
    EXPECT_EQ(c.Refusal().exit_code(), 2);
  }
}

TEST(Plan, SumsAreTheEntries) {
  Case c;
  c.WithCheckpoint();
  c.Absent(1, Encoding::kBase);
  c.Damaged(1, Encoding::kDeltaQuintal, "x");
  c.Absent(5, Encoding::kDeltaQuintal);
  c.config.layers = Layers(0, 20);
  c.config.delta_layers = Layers(0, 10);
  const BootPlan plan = c.Plan();
  uint64_t store = 0;
  uint64_t skipped = 0;
  for (const PlanEntry& entry : plan.entries) {
    store += entry.bytes_store;
    skipped += entry.bytes_skipped;
  }
  EXPECT_EQ(plan.bytes_store, store);
  EXPECT_EQ(plan.bytes_skipped, skipped);
  EXPECT_EQ(plan.bytes_checkpoint, 2 * kSourceBytes);
  EXPECT_EQ(plan.bytes_built, kBaseFile + 2 * kDeltaFile);
  EXPECT_EQ(plan.bytes_device, plan.bytes_store);
  EXPECT_EQ(plan.layers_total, 20u);
}

}  // namespace
}  // namespace hotplane
