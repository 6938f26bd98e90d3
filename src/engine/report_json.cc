#include "engine/report_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/json_text.h"
#include "base/topology.h"

namespace hotplane {
namespace {

using Json = nlohmann::ordered_json;

double Rate(uint64_t bytes, double seconds) {
  return seconds > 0 ? static_cast<double>(bytes) / seconds / 1e9 : 0;
}

Json MachineJson() {
  const MachineDescription machine = DescribeMachine();
  return {{"cpu", machine.cpu},
          {"cores", machine.cores},
          {"memory_bytes", machine.memory.total_bytes},
          {"memory_from_cgroup", machine.memory.from_cgroup},
          {"kernel", machine.kernel},
          {"version", HOTPLANE_VERSION_TEXT}};
}

Json EntryJson(const PlanEntry& entry) {
  Json json = {{"layer", entry.layer},
               {"model_index", entry.model_index},
               {"mtp", entry.mtp},
               {"tier", TierName(TierOf(entry.encoding))},
               {"encoding", EncodingName(entry.encoding)},
               {"action", PlanActionName(entry.action)},
               {"residency", nullptr},
               {"reason", entry.reason},
               {"bytes_store", entry.bytes_store},
               {"bytes_checkpoint", entry.bytes_checkpoint},
               {"bytes_built", entry.bytes_built},
               {"bytes_kept", entry.bytes_kept},
               {"bytes_skipped", entry.bytes_skipped}};
  if (entry.residency != Residency::kInvalid) json["residency"] = ResidencyName(entry.residency);
  return json;
}

Json ActionsJson(const BootPlan& plan) {
  Json actions = Json::array();
  for (const PlanEntry& entry : plan.entries) actions.push_back(EntryJson(entry));
  return actions;
}

// Where each published layer came from, and what was done about its delta tier and why.
Json SourcesJson(const BootReport& report, const BootPlan& plan) {
  Json sources = Json::array();
  for (const BootReport::LayerSource& source : report.sources) {
    const PlanEntry& base = plan.Of(source.ordinal, Tier::kBase);
    const PlanEntry& delta = plan.Of(source.ordinal, Tier::kDelta);
    sources.push_back({{"layer", source.ordinal},
                       {"source", source.source},
                       {"built", base.action == PlanAction::kBuild},
                       {"bytes", source.bytes},
                       {"bytes_cached", source.bytes_cached},
                       {"bytes_skipped", base.bytes_skipped + delta.bytes_skipped},
                       {"delta", PlanActionName(delta.action)},
                       {"delta_reason", delta.reason},
                       {"seconds_ready", source.seconds_ready}});
  }
  return sources;
}

}  // namespace

std::string PlanesCacheImportJson(const PlanesCacheImportReport& report) {
  return JsonText({{"layers_total", report.layers_total},
                   {"layers_imported", report.layers_imported},
                   {"layers_attached", report.layers_attached},
                   {"bytes_read", report.bytes_read},
                   {"bytes_built", report.bytes_built},
                   {"bytes_compared", report.bytes_compared},
                   {"bytes_removed", report.bytes_removed},
                   {"files_removed", report.files_removed},
                   {"moved_before", report.moved_before},
                   {"seconds", report.seconds},
                   {"generation", ToHex(report.generation)},
                   {"world", report.shard_world},
                   {"warnings", report.warnings}});
}

std::string BuildReportJson(const BuildReport& report) {
  Json json;
  json["layers_total"] = report.layers_total;
  json["layers_built"] = report.layers_built;
  json["layers_rebuilt"] = report.layers_rebuilt;
  json["layers_attached"] = report.layers_attached;
  json["bytes_needed"] = report.bytes_needed;
  json["bytes_read"] = report.bytes_read;
  json["bytes_read_ahead"] = report.bytes_read_ahead;
  json["read_path"] = report.read_path;
  json["bytes_metadata"] = report.bytes_metadata;
  json["bytes_skipped"] = report.bytes_skipped;
  json["bytes_built"] = report.bytes_built;
  json["seconds"] = report.seconds;
  json["seconds_by_phase"] = {{"fingerprint", report.seconds_fingerprint},
                              {"quantize", report.seconds_quantize}};
  json["gigabytes_per_second"] = Rate(report.bytes_read, report.seconds_quantize);
  json["peak_staging_bytes"] = report.peak_staging_bytes;
  json["device"] = report.device;
  json["bytes_quantized_on_device"] = report.bytes_quantized_on_device;
  json["peak_device_bytes"] = report.peak_device_bytes;
  json["workers"] = report.worker_count;
  json["isa"] = report.isa;
  json["generation"] = ToHex(report.generation);
  json["world"] = report.shard_world;
  json["warnings"] = report.warnings;
  json["machine"] = MachineJson();
  return JsonText(json);
}

std::string BootReportJson(const BootReport& report, const BootPlan& plan, const BuildReport& build,
                           const Digest128& generation, double limit_bytes_per_second) {
  Json json;
  json["layers_total"] = report.layers_total;
  json["layers_read"] = std::count_if(report.sources.begin(), report.sources.end(),
                                      [](const auto& layer) { return !layer.kept; });
  json["layers_built"] = build.layers_built;
  json["layers_rebuilt"] = build.layers_rebuilt;
  json["layers_attached"] =
      std::count_if(plan.entries.begin(), plan.entries.end(),
                    [](const PlanEntry& entry) { return entry.action == PlanAction::kAttach; });
  json["bytes_needed"] = report.bytes_needed;
  json["bytes_read"] = report.bytes_read;
  json["bytes_read_base"] = report.bytes_read - report.bytes_read_delta;
  json["bytes_read_delta"] = report.bytes_read_delta;
  json["bytes_read_checkpoint"] = build.bytes_read;
  json["bytes_metadata"] = report.bytes_metadata;
  json["bytes_reread"] = report.bytes_reread;
  json["bytes_skipped"] = report.bytes_skipped;
  json["bytes_kept"] = report.bytes_kept;
  json["bytes_verified"] = report.bytes_verified;
  json["bytes_built"] = build.bytes_built;
  json["seconds"] = report.seconds;
  json["seconds_by_phase"] = {{"plan", report.seconds_plan},
                              {"fingerprint", build.seconds_fingerprint},
                              {"allocate", report.seconds_allocate},
                              {"land", report.seconds_land},
                              {"pin", report.seconds_pin}};
  if (report.seconds_device > 0) {
    json["seconds_by_phase"]["device"] = report.seconds_device;
    json["seconds_device_context"] = report.seconds_device_context;
    json["seconds_device_ring"] = report.seconds_device_ring;
    json["bytes_device_context"] = report.bytes_device_context;
    json["peak_device_bytes"] = report.peak_device_bytes;
  }
  const double rate = Rate(report.bytes_read - report.bytes_read_delta, report.seconds_land);
  json["gigabytes_per_second"] = rate;
  json["limit_gigabytes_per_second"] = nullptr;
  json["share_of_limit"] = nullptr;
  if (limit_bytes_per_second > 0) {
    json["limit_gigabytes_per_second"] = limit_bytes_per_second / 1e9;
    json["share_of_limit"] = rate / (limit_bytes_per_second / 1e9);
  }
  json["seconds_first_layer"] = report.sources.empty() ? 0 : report.sources.front().seconds_ready;
  json["source_by_layer"] = SourcesJson(report, plan);
  json["actions"] = ActionsJson(plan);
  json["peak_staging_bytes"] = build.peak_staging_bytes;
  json["bytes_quantized_on_device"] = build.bytes_quantized_on_device;
  json["bytes_read_disk"] = report.bytes_read_disk;
  json["read_path"] = report.read_path;
  json["peak_pinned_bytes"] = report.bytes_pinned + report.bytes_ring;
  json["device"] = report.device;
  json["generation"] = ToHex(generation);
  json["rank"] = plan.shard_rank;
  json["world"] = plan.shard_world;
  json["warnings"] = report.warnings;
  json["machine"] = MachineJson();
  return JsonText(json);
}

std::string BootPlanJson(const BootPlan& plan, const Digest128& generation) {
  Json json;
  json["generation"] = ToHex(generation);
  json["rank"] = plan.shard_rank;
  json["world"] = plan.shard_world;
  json["layers_total"] = plan.layers_total;
  json["bytes_store"] = plan.bytes_store;
  json["bytes_checkpoint"] = plan.bytes_checkpoint;
  json["bytes_built"] = plan.bytes_built;
  json["bytes_kept"] = plan.bytes_kept;
  json["bytes_skipped"] = plan.bytes_skipped;
  json["bytes_device"] = plan.bytes_device;
  json["bytes_host"] = plan.bytes_host;
  json["bytes_pinned"] = plan.bytes_pinned;
  json["device_limit_bytes"] = plan.device_limit_bytes;
  json["actions"] = ActionsJson(plan);
  json["warnings"] = plan.warnings;
  return JsonText(json);
}

std::string StatusJson(const Status& status) {
  Json error;
  error["code"] = status.exit_code();
  error["kind"] = StatusCodeName(status.code());
  error["what"] = status.what();
  const auto field = [&error](const char* name, const std::string& value) {
    if (!value.empty()) error[name] = value;
  };
  field("file", status.file());
  if (status.offset()) error["offset"] = *status.offset();
  field("expected", status.expected());
  field("found", status.found());
  field("advice", status.advice());
  if (!status.choices().empty()) error["choices"] = status.choices();
  return JsonText(Json{{"error", std::move(error)}});
}

}  // namespace hotplane
