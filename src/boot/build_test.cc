#include <cstring>

#include "base/units.h"
#include "boot/boot_testing.h"
#include "boot/layer_selection.h"
#include "boot/verify_source.h"
#include "io/fault_env.h"

namespace hotplane {
namespace {

StoreContent BuiltFiles(const SynthCheckpointOptions& model, const BuildOptions& options) {
  MemEnv env;
  WriteCheckpoint(env, model);
  const Result<BuildReport> report = BuildStore(env, options);
  EXPECT_TRUE(report.has_value()) << report.error().ToString();
  return StoreFiles(env);
}

std::string FindFile(const MemEnv& env, std::string_view name) {
  for (const auto& [path, content] : env.Files())
    if (path.size() >= name.size() && path.substr(path.size() - name.size()) == name) return path;
  ADD_FAILURE() << "no file " << name;
  return "";
}

TEST(Build, IsTheSameForEveryWorkerCountAndIsa) {
  for (const SourceFormat format :
       {SourceFormat::kMxfp4, SourceFormat::kBf16, SourceFormat::kF16, SourceFormat::kF32}) {
    const StoreContent reference = BuiltFiles(SmallModel(format), BothTiers(1));
    EXPECT_GT(reference.size(), 6u);
    for (const size_t workers : {2, 8})
      EXPECT_EQ(BuiltFiles(SmallModel(format), BothTiers(workers)), reference) << workers;
    for (const Kernels* kernels : AvailableKernels()) {
      BuildOptions options = BothTiers(2);
      options.kernels = kernels;
      EXPECT_EQ(BuiltFiles(SmallModel(format), options), reference) << kernels->name;
    }
  }
}

TEST(Build, ReportsWhatItDidAndLeavesFinishedLayersAlone) {
  MemEnv env;
  WriteCheckpoint(env, SmallModel());
  BuildOptions options = BothTiers();
  options.layers = "1";
  const BuildReport first = BuildStore(env, options).value();
  EXPECT_EQ(first.layers_total, 1u);
  EXPECT_EQ(first.layers_built, 1u);
  // Per expert: three 64 x 64 matrices of nibbles with their scales.
  EXPECT_EQ(first.bytes_read, 3u * 3 * (64 * 32 + 64 * 2));
  EXPECT_EQ(first.bytes_read, first.bytes_needed);
  const StoreContent one = StoreFiles(env);

  const BuildReport rest = BuildStore(env, BothTiers()).value();
  EXPECT_EQ(rest.layers_total, 3u);
  EXPECT_EQ(rest.layers_built, 2u);
  EXPECT_EQ(rest.layers_attached, 1u);
  EXPECT_EQ(rest.bytes_read, rest.bytes_needed);
  EXPECT_EQ(rest.generation, first.generation);
  const StoreContent all = StoreFiles(env);
  for (const auto& [path, content] : one) EXPECT_EQ(all.at(path), content) << path;

  const BuildReport none = BuildStore(env, BothTiers()).value();
  EXPECT_EQ(none.layers_built, 0u);
  EXPECT_EQ(none.layers_attached, 3u);
  EXPECT_EQ(none.bytes_read, 0u);
}

TEST(Build, AddsOnlyTheMissingTier) {
  MemEnv env;
  WriteCheckpoint(env, SmallModel());
  BuildOptions base = BothTiers();
  base.encodings = {Encoding::kBase};
  ASSERT_TRUE(BuildStore(env, base).has_value());
  FaultEnv watched(env);
  const BuildReport report = BuildStore(watched, BothTiers()).value();
  EXPECT_EQ(report.layers_built, 3u);
  for (const Operation& operation : watched.Log())
    EXPECT_FALSE(operation.kind == OperationKind::kRename &&
                 operation.to.find(".base") != std::string::npos)
        << operation.to;
  EXPECT_EQ(StoreFiles(env), BuiltFiles(SmallModel(), BothTiers()));
}

TEST(Build, RefusesADeltaTierFromOtherWeights) {
  MemEnv env;
  WriteCheckpoint(env, SmallModel(SourceFormat::kBf16));
  BuildOptions base = BothTiers();
  base.encodings = {Encoding::kBase};
  ASSERT_TRUE(BuildStore(env, base).has_value());
  const Checkpoint checkpoint = Checkpoint::Open(env, kTestCheckpoint).value();
  const MoeModel model = DiscoverMoe(checkpoint).value();
  const Tensor& tensor = *model.layers[1].experts[2].weight[0];
  env.CorruptByte(checkpoint.files()[tensor.file], tensor.offset + 100, std::byte{1});
  BuildOptions delta = BothTiers();
  delta.encodings = {Encoding::kDeltaQuintal};
  const Result<BuildReport> refused = BuildStore(env, delta);
  // These matrices are small enough that every byte is sampled: the checkpoint is another model,
  // with a generation of its own. Nothing is ever mixed.
  if (refused.has_value()) {
    EXPECT_EQ(Store::Open(env, kTestStore)->ListGenerations()->size(), 2u);
  } else {
    EXPECT_EQ(refused.error().exit_code(), 3);
    EXPECT_NE(refused.error().ToString().find(tensor.name), std::string::npos);
  }
}

TEST(Build, StaysWithinTheStagingLimit) {
  MemEnv env;
  WriteCheckpoint(env, SmallModel());
  BuildOptions options = BothTiers(8);
  options.staging_limit_bytes = 64 * kKiB;
  const BuildReport report = BuildStore(env, options).value();
  EXPECT_LE(report.peak_staging_bytes, options.staging_limit_bytes);
  EXPECT_GE(report.worker_count, 1u);
  EXPECT_LT(report.worker_count, 8u);

  MemEnv other;
  WriteCheckpoint(other, SmallModel());
  options.staging_limit_bytes = 1000;
  const Result<BuildReport> refused = BuildStore(other, options);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().exit_code(), 4);
  EXPECT_NE(refused.error().advice().find("--staging-limit"), std::string::npos);
}

TEST(Build, ChecksTheDiskFirst) {
  MemEnv env;
  WriteCheckpoint(env, SmallModel());
  uint64_t used = 0;
  for (const auto& [path, content] : env.Files()) used += content.size();
  env.set_capacity_bytes(used + 20 * kKiB);
  const Result<BuildReport> refused = BuildStore(env, BothTiers());
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().exit_code(), 4);
  for (const auto& [path, content] : StoreFiles(env))
    EXPECT_EQ(path.find("layer-"), std::string::npos) << path;
}

TEST(Build, DiskFullOnTheWayLeavesNoTemporary) {
  MemEnv env;
  WriteCheckpoint(env, SmallModel());
  FaultEnv faulty(env);
  faulty.Add(Fault{.action = FaultAction::kError,
                   .first = 5,
                   .count = Fault::kForever,
                   .kind = OperationKind::kWrite,
                   .path_contains = "layer-0001",
                   .error = ENOSPC});
  const Result<BuildReport> failed = BuildStore(faulty, BothTiers());
  ASSERT_FALSE(failed.has_value());
  EXPECT_EQ(failed.error().exit_code(), 4);
  for (const auto& [path, content] : StoreFiles(env))
    EXPECT_EQ(path.find(".tmp"), std::string::npos) << path;
  EXPECT_TRUE(BuildStore(env, BothTiers()).has_value());
  EXPECT_EQ(StoreFiles(env), BuiltFiles(SmallModel(), BothTiers()));
}

struct BadValue {
  SourceFormat format;
  uint64_t offset;  // in the tensor
  std::vector<uint8_t> bytes;
  const char* found;
};

TEST(Build, NamesTheElementThatIsNotFinite) {
  const BadValue cases[] = {
      {SourceFormat::kMxfp4, 70, {255}, "255"},
      {SourceFormat::kBf16, 2 * 100, {0xc0, 0x7f}, "NaN"},
      {SourceFormat::kBf16, 2 * 100, {0x80, 0xff}, "NaN or infinity"},
      {SourceFormat::kF16, 2 * 100, {0x00, 0x7c}, "NaN or infinity"},
      {SourceFormat::kF32, 4 * 100, {0x00, 0x00, 0x80, 0x7f}, "NaN or infinity"},
  };
  for (const BadValue& bad : cases) {
    for (const Kernels* kernels : AvailableKernels()) {
      MemEnv env;
      WriteCheckpoint(env, SmallModel(bad.format));
      std::string file;
      uint64_t offset;
      std::string name;
      {
        const Checkpoint checkpoint = Checkpoint::Open(env, kTestCheckpoint).value();
        const MoeModel model = DiscoverMoe(checkpoint).value();
        const ExpertTensors& expert = model.layers[1].experts[2];
        const Tensor& tensor =
            bad.format == SourceFormat::kMxfp4 ? *expert.scale[1] : *expert.weight[1];
        file = checkpoint.files()[tensor.file];
        offset = tensor.offset + bad.offset;
        name = tensor.name;
      }
      std::vector<std::byte> content = env.Files().at(file);
      std::memcpy(content.data() + offset, bad.bytes.data(), bad.bytes.size());
      env.SetFile(file, content);
      BuildOptions options = BothTiers();
      options.kernels = kernels;
      const Result<BuildReport> refused = BuildStore(env, options);
      ASSERT_FALSE(refused.has_value()) << name;
      EXPECT_EQ(refused.error().exit_code(), 3);
      EXPECT_EQ(refused.error().file(), file);
      EXPECT_EQ(refused.error().offset(), offset);
      EXPECT_NE(refused.error().what().find(name), std::string::npos) << refused.error().what();
      EXPECT_NE(refused.error().found().find(bad.found), std::string::npos);
      for (const auto& [path, bytes] : StoreFiles(env)) {
        EXPECT_EQ(path.find("layer-0001."), std::string::npos) << path;
        EXPECT_EQ(path.find(".tmp"), std::string::npos) << path;
      }
    }
  }
}

TEST(Build, CanBeCancelled) {
  MemEnv env;
  WriteCheckpoint(env, SmallModel());
  CancelToken cancel;
  cancel.Cancel(SIGTERM);
  BuildOptions options = BothTiers();
  options.cancel = &cancel;
  const Result<BuildReport> cancelled = BuildStore(env, options);
  ASSERT_FALSE(cancelled.has_value());
  EXPECT_EQ(cancelled.error().exit_code(), 143);
}

TEST(Build, RebuildsALayerWhoseHeaderIsDamaged) {
  MemEnv env;
  WriteCheckpoint(env, SmallModel());
  ASSERT_TRUE(BuildStore(env, BothTiers()).has_value());
  const StoreContent good = StoreFiles(env);
  env.CorruptByte(FindFile(env, "layer-0001.base"), 64, std::byte{4});
  const BuildReport report = BuildStore(env, BothTiers()).value();
  EXPECT_EQ(report.layers_built, 1u);
  ASSERT_EQ(report.warnings.size(), 1u);
  EXPECT_NE(report.warnings[0].find("layer 1"), std::string::npos);
  EXPECT_EQ(StoreFiles(env), good);
}

TEST(VerifySource, FindsAChangedByteAnywhereAndNamesTheTensor) {
  MemEnv env;
  WriteCheckpoint(env, SmallModel(SourceFormat::kBf16));
  ASSERT_TRUE(BuildStore(env, BothTiers()).has_value());
  const auto verify = [&]() -> Result<SourceReport> {
    HP_ASSIGN(const Store store, Store::Open(env, kTestStore));
    HP_ASSIGN(const Generation generation, store.OpenGeneration());
    HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(env, kTestCheckpoint));
    HP_ASSIGN(const MoeModel model, DiscoverMoe(checkpoint));
    WorkerPool pool(2);
    return VerifySource(generation, checkpoint, model, pool, nullptr, nullptr);
  };
  const SourceReport clean = verify().value();
  EXPECT_EQ(clean.layers_checked, 2u);
  EXPECT_EQ(clean.tensors_checked, 2u * 3 * 3);
  EXPECT_EQ(clean.bytes_checked, 2u * 3 * 3 * 64 * 64 * 2);

  std::string file;
  std::vector<std::pair<std::string, uint64_t>> places;
  {
    const Checkpoint checkpoint = Checkpoint::Open(env, kTestCheckpoint).value();
    const MoeModel model = DiscoverMoe(checkpoint).value();
    for (const MoeLayer& layer : model.layers)
      for (const ExpertTensors& expert : layer.experts)
        for (const Tensor* tensor : expert.weight) {
          places.emplace_back(tensor->name, tensor->offset);
          places.emplace_back(tensor->name, tensor->offset + tensor->bytes - 1);
          file = checkpoint.files()[tensor->file];
        }
  }
  for (const auto& [name, offset] : places) {
    env.CorruptByte(file, offset, std::byte{1});
    const Result<SourceReport> found = verify();
    ASSERT_FALSE(found.has_value()) << name << " at " << offset;
    EXPECT_EQ(found.error().exit_code(), 3);
    EXPECT_NE(found.error().ToString().find(name), std::string::npos) << found.error().ToString();
    env.CorruptByte(file, offset, std::byte{1});
  }
  EXPECT_TRUE(verify().has_value());
}

TEST(SelectLayers, TakesRangesListsAndNames) {
  Manifest manifest;
  for (uint32_t i = 0; i < 5; ++i) {
    ManifestLayer& layer = manifest.layers.emplace_back();
    layer.ordinal = i;
    layer.mtp = i == 4;
  }
  using Ordinals = std::vector<uint32_t>;
  EXPECT_EQ(SelectLayers("", manifest).value(), (Ordinals{0, 1, 2, 3, 4}));
  EXPECT_EQ(SelectLayers("main", manifest).value(), (Ordinals{0, 1, 2, 3}));
  EXPECT_EQ(SelectLayers("mtp", manifest).value(), (Ordinals{4}));
  EXPECT_EQ(SelectLayers("1-3", manifest).value(), (Ordinals{1, 2, 3}));
  EXPECT_EQ(SelectLayers("3,0-1,1", manifest).value(), (Ordinals{0, 1, 3}));
  for (const char* bad :
       {"5", "3-5", "2-1", "a", "1-", "-1", "1,", ",1", "1--2", "0x1", " 1", "MTP"}) {
    const auto result = SelectLayers(bad, manifest);
    ASSERT_FALSE(result.has_value()) << bad;
    EXPECT_EQ(result.error().exit_code(), 2);
  }
  manifest.layers.pop_back();
  EXPECT_FALSE(SelectLayers("mtp", manifest).has_value());
}

}  // namespace
}  // namespace hotplane
