// Which files of a generation's layers are there, and which are not. A manifest lists every layer
// of the model, not what was asked to be built: whether something that is missing was lost is for
// whoever knows what was asked for to say.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "store/store.h"

namespace hotplane {

// One file that should be used and is not there, or must not be used.
struct CoverageGap {
  uint32_t layer = 0;
  std::optional<uint32_t> rank;            // none: unsharded
  Presence presence = Presence::kInvalid;  // kAbsent, kDamaged or kUnreadable
  std::string file;  // of an absent delta tier in the encoding that other layers have
};

// A tier of so many layers: a delta tier is there in either encoding.
struct TierCoverage {
  Tier tier = Tier::kBase;
  uint32_t file_count = 0;  // layers times ranks
  uint32_t file_count_present = 0;
  std::vector<CoverageGap> gaps;  // by layer, then rank

  bool complete() const { return gaps.empty(); }
  std::vector<uint32_t> Layers(Presence presence) const;  // that have such a gap, ascending
};

struct Coverage {
  uint32_t world = 1;
  TierCoverage base;
  TierCoverage delta;
  // Layers with layer files and without a source record, of a generation that was built from a
  // checkpoint. A build writes the record before the files, so it was lost.
  std::vector<uint32_t> layers_without_record;

  const TierCoverage& Of(Tier tier) const { return tier == Tier::kBase ? base : delta; }
  // What it tells of these layers. REQUIRES layers that it covers, ascending.
  Coverage OfLayers(const std::vector<uint32_t>& layers) const;
};

// Of all layers and ranks. Reads headers only.
Coverage ProbeCoverage(const Generation& generation);

}  // namespace hotplane
