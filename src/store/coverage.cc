#include "store/coverage.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

namespace hotplane {
namespace {

class Prober {
 public:
  explicit Prober(const Generation& generation) : generation_(generation) {
    coverage_.world = generation.world();
    coverage_.base.tier = Tier::kBase;
    coverage_.delta.tier = Tier::kDelta;
  }

  Coverage Run() {
    for (uint32_t layer = 0; layer < generation_.manifest().layers.size(); ++layer) {
      bool any_file = false;
      for (uint32_t rank = 0; rank < generation_.world(); ++rank) {
        const bool base = Probe(layer, rank, coverage_.base);
        const bool delta = Probe(layer, rank, coverage_.delta);
        any_file = any_file || base || delta;
      }
      if (any_file && LacksRecord(layer)) coverage_.layers_without_record.push_back(layer);
    }
    NameAbsentDeltas();
    return std::move(coverage_);
  }

 private:
  bool LacksRecord(uint32_t layer) const {
    if (!BuiltFromCheckpoint(generation_.manifest())) return false;
    const Result<FileStat> stat = generation_.env().Stat(generation_.SourceRecordPath(layer));
    return stat && stat->type == FileType::kInvalid;
  }

  // True where any file is there, in whatever state.
  bool Probe(uint32_t layer, uint32_t rank, TierCoverage& tier) {
    const Generation of_rank = generation_.ForRank(rank);
    CoverageGap gap;
    gap.layer = layer;
    if (generation_.world() > 1) gap.rank = rank;
    gap.presence = Presence::kAbsent;
    ++tier.file_count;
    for (size_t place = 0; place < kEncodings.size(); ++place) {
      const Encoding encoding = kEncodings[place];
      if (TierOf(encoding) != tier.tier) continue;
      if (gap.file.empty()) gap.file = of_rank.LayerPath(layer, encoding);
      const Presence presence = of_rank.Probe(layer, encoding).presence;
      if (presence == Presence::kAbsent) continue;
      ++files_of_encoding_[place];
      if (presence == Presence::kPresent) {
        ++tier.file_count_present;
        return true;
      }
      gap.presence = presence;
      gap.file = of_rank.LayerPath(layer, encoding);
    }
    const bool any_file = gap.presence != Presence::kAbsent;
    tier.gaps.push_back(std::move(gap));
    return any_file;
  }

  void NameAbsentDeltas() {
    const auto most =
        std::ranges::max_element(files_of_encoding_.begin() + 1, files_of_encoding_.end());
    const Encoding usual = kEncodings[static_cast<size_t>(most - files_of_encoding_.begin())];
    for (CoverageGap& gap : coverage_.delta.gaps)
      if (gap.presence == Presence::kAbsent)
        gap.file = generation_.ForRank(gap.rank.value_or(0)).LayerPath(gap.layer, usual);
  }

  const Generation& generation_;
  Coverage coverage_;
  // By place in kEncodings.
  std::array<uint32_t, kEncodings.size()> files_of_encoding_{};
  static_assert(kEncodings.front() == Encoding::kBase);
};

}  // namespace

std::vector<uint32_t> TierCoverage::Layers(Presence presence) const {
  std::vector<uint32_t> layers;
  for (const CoverageGap& gap : gaps)
    if (gap.presence == presence && (layers.empty() || layers.back() != gap.layer))
      layers.push_back(gap.layer);
  return layers;
}

Coverage Coverage::OfLayers(const std::vector<uint32_t>& layers) const {
  const auto among = [&layers](uint32_t layer) {
    return std::ranges::binary_search(layers, layer);
  };
  Coverage part;
  part.world = world;
  for (TierCoverage Coverage::*const tier : {&Coverage::base, &Coverage::delta}) {
    TierCoverage& of = part.*tier;
    of.tier = (this->*tier).tier;
    std::ranges::copy_if((this->*tier).gaps, std::back_inserter(of.gaps), among,
                         &CoverageGap::layer);
    of.file_count = static_cast<uint32_t>(layers.size()) * world;
    of.file_count_present = of.file_count - static_cast<uint32_t>(of.gaps.size());
  }
  std::ranges::copy_if(layers_without_record, std::back_inserter(part.layers_without_record),
                       among);
  return part;
}

Coverage ProbeCoverage(const Generation& generation) { return Prober(generation).Run(); }

}  // namespace hotplane
