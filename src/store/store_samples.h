// A small store for tests: a model of two MoE layers, its pieces a function of role, layer and
// expert.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "format/tsym4.h"
#include "store/store.h"

namespace hotplane {

inline constexpr LayerGeometry kSampleGeometry = {.experts = 2, .hidden = 64, .intermediate = 64};

// Models with different names are different generations.
inline Manifest SampleManifest(std::string_view name = "sample",
                               LayerGeometry geometry = kSampleGeometry) {
  Manifest manifest;
  manifest.identity.source_fingerprint = Digest(name);
  manifest.identity.abi = kPlaneAbiName;
  manifest.scheme = "hf-per-expert";
  manifest.top_k = 2;
  manifest.layers = {{0, 1, false, "model.layers.1.mlp.", geometry, SourceFormat::kBf16},
                     {1, 2, false, "model.layers.2.mlp.", geometry, SourceFormat::kBf16}};
  return manifest;
}

inline std::vector<std::byte> SamplePiece(std::string_view role, uint32_t layer, uint32_t expert,
                                          size_t bytes) {
  std::vector<std::byte> piece(bytes);
  uint64_t state = Checksum64(std::as_bytes(std::span(role))) ^ (uint64_t{layer} << 32) ^ expert;
  for (std::byte& byte : piece) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<std::byte>(state >> 56);
  }
  return piece;
}

inline Result<void> WriteSamplePieces(LayerFileWriter& writer) {
  const LayerLayout& layout = writer.layout();
  for (const Section& section : layout.sections) {
    for (uint32_t expert = 0; expert < layout.geometry.experts; ++expert) {
      HP_TRY(
          writer.WritePiece(section.role, expert,
                            SamplePiece(section.role, layout.layer, expert, section.expert_bytes)));
    }
  }
  return {};
}

inline Result<void> BuildSampleLayer(const Generation& generation, uint32_t layer,
                                     Encoding encoding) {
  HP_ASSIGN(const auto lock, generation.LockLayer(layer, LockWait::kBlock));
  HP_ASSIGN(const auto writer, generation.CreateLayer(layer, encoding));
  HP_TRY(WriteSamplePieces(*writer));
  return writer->Publish();
}

inline SourceRecord SampleSourceRecord(const Generation& generation, uint32_t layer) {
  return {generation.id(),
          layer,
          {{"model.layers.1.mlp.experts.0.down_proj.weight", Digest("down")},
           {"model.layers.1.mlp.experts.0.gate_proj.weight", Digest("gate")}}};
}

// Both layers in every encoding, and the source record of layer 0.
inline Result<Generation> BuildSampleStore(Env& env, const std::string& directory,
                                           const Manifest& manifest = SampleManifest()) {
  HP_ASSIGN(Generation generation, Store::OpenOrCreateGeneration(env, directory, manifest));
  for (uint32_t layer = 0; layer < manifest.layers.size(); ++layer) {
    for (const Encoding encoding : kEncodings) {
      HP_TRY(BuildSampleLayer(generation, layer, encoding));
    }
  }
  HP_TRY(generation.PublishSourceRecord(SampleSourceRecord(generation, 0)));
  return generation;
}

inline Result<Generation> OpenOnly(Env& env, const std::string& directory) {
  HP_ASSIGN(const Store store, Store::Open(env, directory));
  return store.OpenGeneration();
}

}  // namespace hotplane
