#include "io/path_kind.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <utility>

#include "io/fault_env.h"
#include "io/mem_env.h"

namespace hotplane {
namespace {

constexpr const char* kGeneration = "0123456789abcdef0123456789abcdef";

class PathKindTest : public testing::Test {
 protected:
  void Make(const std::string& path) {
    ASSERT_TRUE(CreateDirectories(env_, ParentPath(path)));
    ASSERT_TRUE(PublishFile(env_, path, {}));
  }
  MemEnv env_;
};

TEST_F(PathKindTest, EachKindIsRecognisedByItsNames) {
  const std::string generation = std::string("/store/") + kGeneration;
  for (const std::string& path :
       {generation + "/manifest", generation + "/layer-0000.base",
        generation + "/layer-0000.delta-quintal", std::string("/moved/manifest"),
        std::string("/moved/layer-0003.base"), std::string("/model/config.json"),
        std::string("/model/model.safetensors.index.json"), std::string("/single/a.safetensors"),
        std::string("/models--org--name/snapshots/abc/model.safetensors"),
        std::string("/planes/v2/key/tp2-rank0/meta.json"), std::string("/other/readme")})
    Make(path);
  const std::pair<std::string, PathKind> cases[] = {
      {"/store", PathKind::kStore},
      {generation, PathKind::kGeneration},
      {"/moved", PathKind::kGeneration},
      {generation + "/layer-0000.base", PathKind::kLayerFile},
      {generation + "/layer-0000.delta-quintal", PathKind::kLayerFile},
      {generation + "/manifest", PathKind::kFile},
      {"/model", PathKind::kCheckpoint},
      {"/single", PathKind::kCheckpoint},
      {"/models--org--name", PathKind::kCheckpoint},
      {"/single/a.safetensors", PathKind::kSafetensors},
      {"/planes", PathKind::kPlanesCache},
      {"/planes/v2", PathKind::kFolder},
      {"/other", PathKind::kFolder},
      {"/none", PathKind::kNothing},
  };
  for (const auto& [path, kind] : cases) {
    EXPECT_EQ(PathKindOf(env_, path), kind) << path;
    if (kind == PathKind::kFolder) continue;
    EXPECT_EQ(DescribePath(env_, path), PathKindText(kind)) << path;
  }
}

TEST_F(PathKindTest, AStoreBesideACheckpointsFilesIsAStore) {
  Make(std::string("/both/") + kGeneration + "/manifest");
  Make("/both/model.safetensors");
  EXPECT_EQ(PathKindOf(env_, "/both"), PathKind::kStore);
  EXPECT_TRUE(HoldsCheckpoint(env_, "/both"));
  Make(std::string("/store/") + kGeneration + "/manifest");
  EXPECT_FALSE(HoldsCheckpoint(env_, "/store"));
}

TEST_F(PathKindTest, SnapshotsOfSomethingElseAreNoCheckpoint) {
  Make("/backup/snapshots/monday/notes.txt");
  Make("/machine/snapshots/disk.img");
  Make("/partial/.model.safetensors");
  for (const char* const path : {"/backup", "/machine", "/partial"})
    EXPECT_EQ(PathKindOf(env_, path), PathKind::kFolder) << path;
  for (const char* const name : {"config.json", "a.safetensors", "model.safetensors.index.json"}) {
    const std::string hub = std::string("/hub-") + name;
    Make(hub + "/snapshots/abc/" + name);
    EXPECT_EQ(PathKindOf(env_, hub), PathKind::kCheckpoint) << hub;
  }
}

TEST_F(PathKindTest, AFolderThatCannotBeListedIsNotCalledEmpty) {
  Make("/secret/file");
  FaultEnv env(env_);
  env.Add({.action = FaultAction::kError,
           .count = Fault::kForever,
           .kind = OperationKind::kList,
           .error = EACCES});
  EXPECT_EQ(DescribePath(env, "/secret"), "a folder that cannot be listed: Permission denied");
}

TEST_F(PathKindTest, AFolderTellsWhatIsInIt) {
  ASSERT_TRUE(CreateDirectories(env_, "/empty"));
  EXPECT_EQ(DescribePath(env_, "/empty"), "an empty folder");
  Make("/other/readme");
  EXPECT_EQ(DescribePath(env_, "/other"), "a folder with other files");
  Make(std::string("/stores/first/") + kGeneration + "/manifest");
  EXPECT_EQ(DescribePath(env_, "/stores"), "a folder, with a store in it: /stores/first");
  Make("/models/first/model.safetensors");
  EXPECT_EQ(DescribePath(env_, "/models"), "a folder, with a checkpoint in it: /models/first");
}

}  // namespace
}  // namespace hotplane
