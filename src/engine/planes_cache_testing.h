// A planes cache in memory of a small store that was built. For tests.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "base/format_text.h"
#include "boot/boot_testing.h"
#include "engine/import_planes_cache.h"
#include "engine/record_reader.h"

namespace hotplane {

inline constexpr char kTestCache[] = "/cache";
inline constexpr char kImportedStore[] = "/imported";

inline PlanesCacheMeta TestMeta(uint32_t world, uint32_t rank, Encoding fp4) {
  PlanesCacheMeta meta;
  meta.version = 3;
  meta.checkpoint_id = "a model of tests";
  meta.world = world;
  meta.rank = rank;
  meta.fp4 = fp4;
  return meta;
}

// All experts of one part of a layer file, one after the other.
inline std::vector<std::byte> ReadPart(const Generation& of_rank, uint32_t layer, Encoding encoding,
                                       std::string_view part) {
  const LayerFile file = of_rank.OpenLayer(layer, encoding).value();
  const size_t bytes = file.layout().Find(part)->expert_bytes;
  std::vector<std::byte> all(bytes * file.layout().geometry.experts);
  uint64_t reread_bytes = 0;
  for (uint32_t expert = 0; expert < file.layout().geometry.experts; ++expert) {
    const auto piece = std::span(all).subspan(expert * bytes, bytes);
    EXPECT_TRUE(ReadPiece(of_rank.env(), file, part, expert, piece, reread_bytes).has_value());
  }
  return all;
}

// The parts of every rank and layer, by "rank layer part".
using PartBytesMap = std::map<std::string, std::vector<std::byte>>;
inline PartBytesMap AllParts(Env& env, const std::string& store_directory, Encoding fp4) {
  const Store store = Store::Open(env, store_directory).value();
  const Generation generation = store.OpenGeneration().value();
  PartBytesMap parts;
  for (uint32_t rank = 0; rank < generation.world(); ++rank)
    for (const ManifestLayer& layer : generation.manifest().layers)
      for (const std::string_view part : kPlanesCacheParts)
        parts[Text("{} {} {}", rank, layer.ordinal, part)] =
            ReadPart(generation.ForRank(rank), layer.ordinal,
                     part.starts_with("fp") ? fp4 : Encoding::kBase, part);
  return parts;
}

// Builds the small model's store and writes its parts as the program would, file by file.
inline void WriteCache(MemEnv& env, uint32_t world, Encoding fp4) {
  SynthCheckpointOptions model = SmallModel();
  model.geometry = {2, 64, 64 * world};
  model.main_layers = 1;
  WriteCheckpoint(env, model);
  BuildOptions build = BothTiers();
  build.encodings = {Encoding::kBase, fp4};
  build.shard_world = world;
  ASSERT_TRUE(BuildStore(env, build).has_value());
  const PartBytesMap parts = AllParts(env, kTestStore, fp4);
  for (uint32_t rank = 0; rank < world; ++rank) {
    const PlanesCacheMeta meta = TestMeta(world, rank, fp4);
    const std::string folder = PlanesCacheRankPath(kTestCache, meta);
    const std::string text = EncodePlanesCacheMeta(meta);
    env.SetFile(JoinPath(folder, kPlanesCacheMetaName), std::as_bytes(std::span(text)));
    for (uint32_t layer = 0; layer < 2; ++layer)
      for (const std::string_view part : kPlanesCacheParts)
        env.SetFile(JoinPath(folder, PlanesCacheFileName(layer, part)),
                    parts.at(Text("{} {} {}", rank, layer, part)));
  }
}

inline PlanesCacheImportOptions TestImport(uint32_t world, bool move) {
  PlanesCacheImportOptions options;
  options.geometry.all = LayerGeometry{2, 64, 64 * world};
  options.mtp_layers = {1};
  options.move = move;
  return options;
}

inline Result<PlanesCacheImportReport> Import(Env& env, const PlanesCacheImportOptions& options,
                                              size_t worker_count = 1) {
  WorkerPool pool(worker_count);
  return ImportPlanesCache(env, kTestCache, kImportedStore, pool, options);
}

}  // namespace hotplane
