#include "boot/describe.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/format_text.h"
#include "boot/plan.h"

namespace hotplane {
namespace {

// "base 3 of 4: layer 1 unusable, layer 2 missing"
std::string TierText(const TierCoverage& tier, const Manifest& manifest) {
  std::string text = Text("{} {} of {}{}", TierName(tier.tier), tier.file_count_present,
                          tier.file_count, manifest.identity.shard_world > 1 ? " files" : "");
  const char* before = ": ";
  for (const auto& [presence, word] :
       {std::pair(Presence::kAbsent, "missing"), std::pair(Presence::kDamaged, "unusable"),
        std::pair(Presence::kUnreadable, "unreadable")}) {
    const std::vector<uint32_t> layers = tier.Layers(presence);
    if (layers.empty()) continue;
    text += Text("{}layer{} {} {}", std::exchange(before, ", "), layers.size() == 1 ? "" : "s",
                 LayerListText(layers, manifest), word);
  }
  return text;
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

std::string DescribeCoverage(const Coverage& coverage, const Manifest& manifest) {
  const std::string base = TierText(coverage.base, manifest);
  const bool plain = coverage.base.complete() && coverage.delta.complete();
  const bool no_delta = std::ranges::all_of(coverage.delta.gaps,
                                            [](const CoverageGap& gap) {
                                              return gap.presence == Presence::kAbsent;
                                            }) &&
                        coverage.delta.file_count_present == 0;
  if (no_delta) return base + (coverage.base.complete() ? ", no delta" : "; no delta");
  return base + (plain ? ", " : "; ") + TierText(coverage.delta, manifest);
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
