// A small checkpoint in memory, a store built from it, and what its booted bytes must be. For
// tests.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "boot/boot.h"
#include "boot/build.h"
#include "checkpoint/synth_checkpoint.h"
#include "io/mem_env.h"

namespace hotplane {

inline constexpr char kTestCheckpoint[] = "/model";
inline constexpr char kTestStore[] = "/store";

inline SynthCheckpointOptions SmallModel(SourceFormat format = SourceFormat::kMxfp4) {
  SynthCheckpointOptions options;
  options.format = format;
  options.geometry = {3, 64, 64};
  options.main_layers = 2;
  options.mtp_layers = format == SourceFormat::kMxfp4 ? 1 : 0;
  options.seed = 7;
  return options;
}

inline void WriteCheckpoint(Env& env, const SynthCheckpointOptions& options) {
  WorkerPool pool(1);
  const auto written = WriteSynthCheckpoint(env, kTestCheckpoint, options, pool);
  ASSERT_TRUE(written.has_value()) << written.error().ToString();
}

inline BuildOptions BothTiers(size_t worker_count = 1) {
  BuildOptions options;
  options.encodings = {Encoding::kBase, Encoding::kDeltaQuintal};
  options.worker_count = worker_count;
  return options;
}

inline Result<BuildReport> BuildStore(Env& env, const BuildOptions& options) {
  HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(env, kTestCheckpoint));
  HP_ASSIGN(const MoeModel model, DiscoverMoe(checkpoint));
  return Build(env, checkpoint, model, kTestStore, options);
}

// The published layers' bytes by ordinal, all parts joined, or the failure.
struct Booted {
  std::vector<std::vector<std::byte>> layers;
  std::vector<uint32_t> order;
  BootReport report;
};
inline Result<Booted> BootStore(Env& env, BootOptions options = {}, size_t worker_count = 2) {
  HP_ASSIGN(const Store store, Store::Open(env, kTestStore));
  HP_ASSIGN(const Generation generation, store.OpenGeneration());
  WorkerPool pool(worker_count);
  options.pool = &pool;
  HP_ASSIGN(const std::unique_ptr<BootSession> session, BootSession::Open(generation, options));
  Booted booted;
  HP_TRY(session->Run([&](const BootedLayer& layer) { booted.order.push_back(layer.ordinal); }));
  for (const BootedLayer& layer : session->layers()) {
    std::vector<std::byte> bytes;
    for (const auto& part : {layer.planes13, layer.sc13, layer.planes2, layer.sc2})
      bytes.insert(bytes.end(), part.begin(), part.end());
    booted.layers.push_back(std::move(bytes));
  }
  booted.report = session->report();
  return booted;
}

// Path and digest of every file of the store, without the lock files: those stand for builders that
// were there, not for content.
using StoreContent = std::map<std::string, std::string>;
inline StoreContent StoreFiles(const MemEnv& env) {
  StoreContent files;
  for (const auto& [path, content] : env.Files())
    if (path.rfind(kTestStore, 0) == 0 && path.find("/locks/") == std::string::npos &&
        path.find("source-stamp") == std::string::npos)
      files.emplace(path, ToHex(Digest(std::span<const std::byte>(content))));
  return files;
}

}  // namespace hotplane
