#include <cmath>
#include <nlohmann/json.hpp>

#include "base/json_text.h"
#include "engine/fidelity.h"

namespace hotplane {
namespace {

using Json = nlohmann::ordered_json;

Json OrNull(const std::optional<double>& figure) { return figure ? Json(*figure) : Json(); }

Json Share(uint64_t part, uint64_t whole) {
  if (whole == 0) return nullptr;
  return static_cast<double>(part) / static_cast<double>(whole);
}

Json SourceJson(const FidelitySums& sums) {
  const bool scaled = sums.exponent_min <= sums.exponent_max;
  const double mean_square =
      sums.weights == 0 ? 0 : sums.squares / static_cast<double>(sums.weights);
  return {{"weights", sums.weights},
          {"rms", std::sqrt(mean_square)},
          {"zero_share", Share(sums.zeros, sums.weights)},
          {"negative_zero_share", Share(sums.negative_zeros, sums.zeros)},
          {"zero_block_share", Share(sums.zero_blocks, sums.blocks)},
          {"exponent_min", scaled ? Json(sums.exponent_min) : Json()},
          {"exponent_max", scaled ? Json(sums.exponent_max) : Json()}};
}

Json TierJson(const FidelitySums& sums, bool fp4) {
  const TierSums& tier = fp4 ? sums.fp4 : sums.base;
  Json json = {{"relative_rms", OrNull(RelativeRms(sums, tier))},
               {"signed_bias", OrNull(SignedBias(sums, tier))},
               {"magnitude_bias", OrNull(MagnitudeBias(sums, tier))},
               {"largest_share", Share(tier.largest, sums.weights)},
               {"clipped_share", Share(tier.clipped, sums.weights)}};
  if (fp4) {
    json["zero_share"] = Share(sums.zero_nibbles, sums.weights);
    json["negative_zero_share"] = Share(sums.negative_zero_nibbles, sums.zero_nibbles);
  }
  return json;
}

// `figures` of all projections together, then of each.
template <typename Figures>
Json ByProjection(const FidelityLayer& layer, const Figures& figures) {
  Json json = {{"total", figures(layer.Total())}};
  for (size_t p = 0; p < kProjectionCount; ++p)
    json[std::string(ProjectionName(static_cast<Projection>(p)))] = figures(layer.projections[p]);
  return json;
}

Json TierOfLayer(const FidelityLayer& layer, bool fp4) {
  const std::string& missing = fp4 ? layer.fp4_missing : layer.base_missing;
  if (!missing.empty()) return {{"missing", missing}};
  return ByProjection(layer, [fp4](const FidelitySums& sums) { return TierJson(sums, fp4); });
}

Json TotalJson(const FidelityReport& report, bool fp4) {
  const FidelitySums total = report.Total(fp4);
  return total.weights == 0 ? Json() : TierJson(total, fp4);
}

}  // namespace

std::string FidelityJson(const FidelityReport& report) {
  Json json = {{"command", "fidelity"},
               {"generation", ToHex(report.generation)},
               {"model", report.model},
               {"source", SourceJson(report.Total(false))},
               {"base", TotalJson(report, false)},
               {"fp4", TotalJson(report, true)},
               {"layers", Json::array()},
               {"bytes_read_checkpoint", report.bytes_read_checkpoint},
               {"bytes_read_store", report.bytes_read_store},
               {"seconds", report.seconds}};
  for (const FidelityLayer& layer : report.layers) {
    Json entry = {{"layer", layer.layer.ordinal},
                  {"model_index", layer.layer.model_index},
                  {"mtp", layer.layer.mtp},
                  {"source_format", SourceFormatName(layer.layer.source_format)}};
    entry["source"] = layer.base_missing.empty() ? ByProjection(layer, SourceJson) : Json();
    entry["base"] = TierOfLayer(layer, false);
    entry["fp4"] = TierOfLayer(layer, true);
    json["layers"].push_back(std::move(entry));
  }
  return JsonText(json);
}

}  // namespace hotplane
