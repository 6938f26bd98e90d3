#include "boot/plan_facts.h"

#include <algorithm>
#include <cerrno>

#include "store/replaceable.h"

namespace hotplane {
namespace {

uint64_t BytesByName(const Generation& generation, uint32_t layer, Encoding encoding) {
  const auto stat = generation.env().Stat(generation.LayerPath(layer, encoding));
  return stat && stat->type == FileType::kRegular ? stat->bytes : 0;
}

// True when the file is present.
bool ProbeFile(const Generation& generation, uint32_t layer, Encoding encoding, StoreProbe& out) {
  const TierProbe probe = generation.Probe(layer, encoding);
  FileFacts& file = FactsOf(out.facts.layers[layer], encoding);
  file.presence = probe.presence;
  out.bytes_metadata += probe.bytes_metadata;
  if (probe.presence == Presence::kPresent) {
    file.file_bytes = probe.layout.file_bytes;
    file.data_bytes = probe.layout.data_bytes;
    return true;
  }
  file.file_bytes = BytesByName(generation, layer, encoding);
  if (probe.presence == Presence::kDamaged) {
    const std::string path = generation.LayerPath(layer, encoding);
    if (const Result<void> free = CheckReplaceable(generation.env(), path, layer); !free)
      file.irreplaceable = free.error();
  }
  if (probe.reason) {
    file.damage = probe.reason;
    file.reason = probe.reason->what();
    if (!probe.reason->found().empty()) file.reason += ": " + probe.reason->found();
  }
  return false;
}

}  // namespace

StoreProbe ProbeStore(const Generation& generation, const PlanConfig& config) {
  StoreProbe out;
  out.facts.directory = generation.directory();
  out.facts.manifest = generation.manifest();
  out.facts.layers.resize(out.facts.manifest.layers.size());
  const auto contains = [](const std::vector<uint32_t>& ordinals, uint32_t ordinal) {
    return std::binary_search(ordinals.begin(), ordinals.end(), ordinal);
  };
  for (uint32_t layer = 0; layer < out.facts.layers.size(); ++layer) {
    if (config.base && contains(config.layers, layer))
      out.complete &= ProbeFile(generation, layer, Encoding::kBase, out);
    if (contains(config.delta_layers, layer)) {
      bool present = false;
      for (const Encoding encoding : config.delta_encodings)
        present = present || ProbeFile(generation, layer, encoding, out);
      out.complete &= present;
    }
    for (const Encoding encoding : kEncodings) {
      FileFacts& file = FactsOf(out.facts.layers[layer], encoding);
      if (file.presence == Presence::kInvalid)
        file.file_bytes = BytesByName(generation, layer, encoding);
    }
  }
  return out;
}

bool StoreWritable(const Generation& generation, uint32_t layer) {
  if (!generation.env().MayCreateIn(generation.directory())) return false;
  const auto lock = generation.LockLayer(layer, LockWait::kTry);
  if (lock) return true;
  switch (lock.error().error_number()) {
    case EROFS:
    case EACCES:
    case EPERM: return false;
    default: return true;
  }
}

}  // namespace hotplane
