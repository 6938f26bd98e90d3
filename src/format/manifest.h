// The manifest of a generation and the source record of a layer: sealed text files, one line of
// seal and a JSON body. docs/format/manifest.md is the prose.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "format/checksum.h"
#include "format/kinds.h"

namespace hotplane {

// What a generation's name is the digest of.
struct Identity {
  Digest128 source_fingerprint{};
  std::string abi;  // kPlaneAbiName
  ZeroMode zero_mode = ZeroMode::kAuto;
  uint32_t shard_world = 1;
  std::string shard_axis = "none";  // "none" when unsharded, else "intermediate"
  bool operator==(const Identity&) const = default;
};
// The preimage: one line of canonical JSON. The generation is its Digest.
std::string IdentityPreimage(const Identity& identity);
Digest128 GenerationOf(const Identity& identity);

struct ManifestLayer {
  uint32_t ordinal = 0;
  uint32_t model_index = 0;
  bool mtp = false;
  std::string prefix;      // of the tensor names, up to "experts."
  LayerGeometry geometry;  // of the whole layer, unsharded
  SourceFormat source_format = SourceFormat::kInvalid;
  bool operator==(const ManifestLayer&) const = default;
};

struct Manifest {
  Identity identity;
  std::string scheme;  // naming scheme of the source, e.g. "deepseek-mxfp4"
  // Of planes that were imported: what the program that made them calls its checkpoint. Empty: it
  // does not tell, or the generation was built from a checkpoint.
  std::string checkpoint_id;
  Activation activation;
  std::optional<uint32_t> top_k;
  std::vector<ManifestLayer> layers;  // every MoE layer of the model, by ordinal
  bool operator==(const Manifest&) const = default;
};

// "mxfp4, 44 MoE layers, E=256 H=4096 I=2048"; ranges where layers differ.
std::string DescribeModel(const Manifest& manifest);

// Schemes of generations that no checkpoint was read for: planes that were imported, and random
// ones.
inline constexpr char kPlanesCacheScheme[] = "moe-w2-planes-cache";
inline constexpr char kSyntheticScheme[] = "synthetic";
// False for these: their layers have no source records.
bool BuiltFromCheckpoint(const Manifest& manifest);

// The bytes of the published file. Canonical: equal manifests give equal bytes.
std::string EncodeManifest(const Manifest& manifest);
// kData naming `file` when the seal, the JSON, a field or the identity's own digest is wrong.
Result<Manifest> DecodeManifest(std::string_view bytes, const std::string& file);

// Digests of every source tensor a layer was built from, so that a delta tier built later is proved
// to come from the same bytes, and `verify --source` can prove the pairing.
struct SourceTensorDigest {
  std::string name;
  Digest128 digest{};
  bool operator==(const SourceTensorDigest&) const = default;
};
struct SourceRecord {
  Digest128 generation{};
  uint32_t layer = 0;
  std::vector<SourceTensorDigest> tensors;  // sorted by name
  bool operator==(const SourceRecord&) const = default;
};
std::string EncodeSourceRecord(const SourceRecord& record);
Result<SourceRecord> DecodeSourceRecord(std::string_view bytes, const std::string& file);

}  // namespace hotplane
