#include "boot/describe.h"

#include <algorithm>
#include <set>

#include "base/format_text.h"
#include "base/number_text.h"

namespace hotplane {
namespace {

template <typename Get>
std::string Range(const Manifest& manifest, Get get) {
  uint32_t low = UINT32_MAX;
  uint32_t high = 0;
  for (const ManifestLayer& layer : manifest.layers) {
    low = std::min(low, get(layer.geometry));
    high = std::max(high, get(layer.geometry));
  }
  return low == high ? Text("{}", low) : Text("{}-{}", low, high);
}

// The first tensor of the layers' source records that the checkpoint holds with other bytes.
Result<std::string> FirstDifference(const Generation& generation, const Checkpoint& checkpoint,
                                    const MoeModel& model) {
  for (const MoeLayer& layer : model.layers) {
    HP_ASSIGN(const std::optional<SourceRecord> record, generation.ReadSourceRecord(layer.ordinal));
    if (!record) continue;
    const auto tensors = SourceTensorsByName(layer);
    for (const SourceTensorDigest& entry : record->tensors) {
      const auto found_tensor = tensors.find(entry.name);
      const Tensor* const tensor = found_tensor == tensors.end() ? nullptr : found_tensor->second;
      if (tensor == nullptr) return Text("no tensor {}", entry.name);
      std::vector<std::byte> bytes(tensor->bytes);
      HP_TRY(checkpoint.Read(*tensor, 0, bytes));
      const Digest128 found = Digest(std::span<const std::byte>(bytes));
      if (found != entry.digest)
        return Text("{}: digest {}, the store was built from {}", entry.name, ToHex(found),
                    ToHex(entry.digest));
    }
  }
  return std::string("tensors that are not built yet");
}

}  // namespace

std::string DescribeModel(const Manifest& manifest) {
  std::set<std::string> formats;
  for (const ManifestLayer& layer : manifest.layers)
    formats.emplace(SourceFormatName(layer.source_format));
  std::string text;
  for (const std::string& format : formats) text += (text.empty() ? "" : "+") + format;
  return Text("{}, {}, E={} H={} I={}", text, Counted(manifest.layers.size(), "MoE layers"),
              Range(manifest, [](const LayerGeometry& g) { return g.experts; }),
              Range(manifest, [](const LayerGeometry& g) { return g.hidden; }),
              Range(manifest, [](const LayerGeometry& g) { return g.intermediate; }));
}

Result<void> CheckSamePair(const Generation& generation, const Checkpoint& checkpoint,
                           const MoeModel& model, const Digest128& fingerprint) {
  const Manifest& store = generation.manifest();
  if (store.identity.source_fingerprint == fingerprint) return {};
  const Manifest other =
      MakeManifest(model, fingerprint, store.identity.zero_mode, store.identity.shard_world);
  std::string found = DescribeModel(other);
  if (store.layers == other.layers) {
    HP_ASSIGN(found, FirstDifference(generation, checkpoint, model));
  }
  return Fail(
      Status::Data(Text("{} was not built from {}", generation.directory(), checkpoint.path()))
          .Expected(Text("{}, generation {}, fingerprint {}", DescribeModel(store),
                         ToHex(generation.id()), ToHex(store.identity.source_fingerprint)))
          .Found(std::move(found))
          .Advice(Text("nothing was loaded or changed; name the store's own checkpoint, or "
                       "`hotplane build {}` into a store",
                       checkpoint.path())));
}

}  // namespace hotplane
