#include "engine/synth.h"

#include <gtest/gtest.h>

#include "io/mem_env.h"
#include "store/store.h"

namespace hotplane {
namespace {

constexpr const char* kStore = "/disk/new/store";

SynthStoreOptions SmallStore(uint32_t layers) {
  SynthStoreOptions options;
  options.geometry = {4, 128, 64};
  options.layers = layers;
  options.worker_count = 1;
  return options;
}

TEST(Synth, WhatDoesNotFitIsRefusedBeforeAnythingIsWritten) {
  MemEnv env;
  env.SetFile("/disk/other", {});
  env.set_capacity_bytes(100'000);
  const auto refused = SynthStore(env, kStore, SmallStore(5));
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().exit_code(), 4);
  EXPECT_EQ(refused.error().file(), kStore);
  EXPECT_EQ(env.Stat("/disk/new")->type, FileType::kInvalid);
  // What is there already is not counted.
  env.set_capacity_bytes(1 << 30);
  ASSERT_TRUE(SynthStore(env, kStore, SmallStore(5)).has_value());
  env.set_capacity_bytes(0);
  EXPECT_EQ(SynthStore(env, kStore, SmallStore(5))->bytes_written, 0u);
}

TEST(Synth, ADirectoryInALayersPlaceIsFoundBeforeAnythingIsWritten) {
  MemEnv env;
  ASSERT_TRUE(SynthStore(env, kStore, SmallStore(2)).has_value());
  const std::string path = Store::Open(env, kStore)
                               ->OpenGeneration("", {.read_only = true})
                               ->LayerPath(1, Encoding::kBase);
  ASSERT_TRUE(env.Remove(path).has_value());
  ASSERT_TRUE(CreateDirectories(env, path).has_value());
  SynthStoreOptions options = SmallStore(2);
  options.encodings = {Encoding::kBase, Encoding::kDeltaQuintal};
  const MemEnv::Snapshot before = env.Files();
  const auto refused = SynthStore(env, kStore, options);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().exit_code(), 3);
  EXPECT_EQ(refused.error().file(), path);
  EXPECT_EQ(env.Files(), before);
}

}  // namespace
}  // namespace hotplane
