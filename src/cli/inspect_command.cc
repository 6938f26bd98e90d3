#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "base/format_text.h"
#include "base/json_text.h"
#include "base/number_text.h"
#include "base/units.h"
#include "boot/describe.h"
#include "checkpoint/moe_source.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/inspect_file.h"
#include "engine/import_planes_cache.h"
#include "io/path_kind.h"
#include "store/replaceable.h"
#include "store/store.h"

namespace hotplane::cli {
namespace {

using Json = nlohmann::ordered_json;

// What is wrong with a layer file.
struct BadFile {
  Status reason;
  bool unreadable = false;  // it may well be right
  bool foreign = false;     // a directory, or another release's file: no build replaces it
};

const char* PresenceText(Presence presence) {
  switch (presence) {
    case Presence::kAbsent: return "absent";
    case Presence::kPresent: return "present";
    case Presence::kDamaged: return "damaged";
    case Presence::kUnreadable: return "unreadable";
    case Presence::kInvalid: break;
  }
  return "unknown";
}

// What the files of one layer and encoding are, of all ranks together.
struct RankProbes {
  std::string text;  // "present"; "3/4" where they differ and none of them is bad
  uint64_t bytes = 0;
  std::vector<std::string> by_rank;
  std::vector<BadFile> bad;
};

RankProbes ProbeRanks(const Generation& generation, uint32_t layer, Encoding encoding) {
  RankProbes all;
  uint32_t present_count = 0;
  for (uint32_t rank = 0; rank < generation.world(); ++rank) {
    const Generation ranked = generation.ForRank(rank);
    const TierProbe probe = ranked.Probe(layer, encoding);
    const bool foreign =
        probe.presence == Presence::kDamaged &&
        !CheckReplaceable(generation.env(), ranked.LayerPath(layer, encoding), layer);
    all.by_rank.push_back(foreign ? "foreign" : PresenceText(probe.presence));
    if (probe.presence == Presence::kPresent) {
      ++present_count;
      all.bytes += probe.layout.file_bytes;
    }
    if (!probe.reason) continue;
    if (all.bad.empty()) all.text = all.by_rank.back();
    all.bad.push_back({*probe.reason, probe.presence == Presence::kUnreadable, foreign});
  }
  if (!all.bad.empty()) return all;
  const bool partly = present_count > 0 && present_count < generation.world();
  all.text = partly ? Text("{}/{}", present_count, generation.world()) : all.by_rank.front();
  return all;
}

// What is wrong with its files, by their headers, is appended to `bad`.
Json GenerationJson(const Generation& generation, std::vector<BadFile>& bad) {
  const Manifest& manifest = generation.manifest();
  Json json;
  json["generation"] = ToHex(generation.id());
  json["model"] = DescribeModel(manifest);
  json["scheme"] = manifest.scheme;
  if (!manifest.checkpoint_id.empty()) json["checkpoint_id"] = manifest.checkpoint_id;
  json["source_fingerprint"] = ToHex(manifest.identity.source_fingerprint);
  json["zero_mode"] = ZeroModeName(manifest.identity.zero_mode);
  json["world"] = generation.world();
  json["layers"] = Json::array();
  for (const ManifestLayer& layer : manifest.layers) {
    Json entry{{"layer", layer.ordinal},
               {"model_index", layer.model_index},
               {"mtp", layer.mtp},
               {"prefix", layer.prefix},
               {"geometry", GeometryJson(layer.geometry)},
               {"source_format", SourceFormatName(layer.source_format)}};
    for (const Encoding encoding : kEncodings) {
      const std::string name(EncodingName(encoding));
      const RankProbes probes = ProbeRanks(generation, layer.ordinal, encoding);
      entry["tiers"][name] = probes.text;
      if (probes.bytes > 0) entry["bytes"][name] = probes.bytes;
      if (generation.world() > 1) entry["ranks"][name] = probes.by_rank;
      if (!probes.bad.empty()) entry["reason"] = probes.bad.front().reason.ToString();
      bad.insert(bad.end(), probes.bad.begin(), probes.bad.end());
    }
    json["layers"].push_back(std::move(entry));
  }
  return json;
}

// As GenerationJson.
void PrintGeneration(const Generation& generation, std::vector<BadFile>& bad) {
  const Manifest& manifest = generation.manifest();
  PrintLine(Text("generation  {}{}", ToHex(generation.id()),
                 generation.world() > 1 ? Text(", {} ranks", generation.world()) : ""));
  PrintLine(Text("  {}, scheme {}, zero mode {}", DescribeModel(manifest), manifest.scheme,
                 ZeroModeName(manifest.identity.zero_mode)));
  if (manifest.scheme == kPlanesCacheScheme)
    PrintLine(
        Text("  imported from a planes cache, of the checkpoint {}",
             manifest.checkpoint_id.empty() ? "that it does not name" : manifest.checkpoint_id));
  PrintLine("  layer  model's  base      delta-quintal  delta-nibble");
  const size_t bad_before = bad.size();
  for (const ManifestLayer& layer : manifest.layers) {
    std::string row = Text("  {:>5}  {:>7}", layer.ordinal, layer.model_index);
    constexpr int kWidths[] = {8, 13, 12};
    int column = 0;
    for (const Encoding encoding : kEncodings) {
      const RankProbes probes = ProbeRanks(generation, layer.ordinal, encoding);
      row += Text("  {:<{}}", probes.text, kWidths[column++]);
      bad.insert(bad.end(), probes.bad.begin(), probes.bad.end());
    }
    PrintLine(layer.mtp ? row + "  (MTP)" : row);
  }
  for (size_t i = bad_before; i < bad.size(); ++i) PrintText("  " + bad[i].reason.ToString());
}

// Files that are not what their names say are damage, whoever looks; those that nobody may look at
// may well be right.
Result<void> CheckBadFiles(const Store& store, const std::vector<BadFile>& bad) {
  if (bad.empty()) return {};
  const std::string files = Counted(bad.size(), "layer files");
  for (const auto& [reason, unreadable, foreign] : bad)
    if (unreadable)
      return Fail(Status::System(reason.what())
                      .File(reason.file())
                      .Expected(reason.expected())
                      .Found(reason.found())
                      .Advice(reason.advice())
                      .Because(Text("{} bad, among them what could not be read", files)));
  const size_t foreign_count =
      static_cast<size_t>(std::ranges::count(bad, true, &BadFile::foreign));
  if (foreign_count > 0)
    return Fail(
        Status::Data(
            foreign_count == bad.size()
                ? Text("{} that no build replaces", files)
                : Text("{} of the store damaged, or another thing is in their place", files))
            .File(store.directory())
            .Expected("headers as a build writes them")
            .Found("what is said above of each")
            .Advice("do what is said above of a directory or another release's file, which no "
                    "build replaces; then `hotplane build` of the checkpoint builds what is "
                    "missing or damaged"));
  return Fail(
      Status::Data(Text("{} of the store damaged", files))
          .File(store.directory())
          .Expected("headers as a build writes them")
          .Found("what is said above of each")
          .Advice("`hotplane build` of the checkpoint, or a boot with --checkpoint, builds "
                  "damaged files again; `hotplane verify` checks every byte of the others"));
}

Result<void> InspectStore(const Context& context, const Store& store) {
  HP_ASSIGN(const std::vector<Digest128> ids, store.ListGenerations());
  Json json{{"kind", "store"}, {"generations", Json::array()}};
  std::vector<BadFile> bad;
  const std::string& prefix = context.options.generation;
  const Store::OpenOptions open = OpenOptionsOf(context, /*read_only=*/true);
  if (!prefix.empty()) HP_TRY(store.OpenGeneration(prefix, open));
  for (const Digest128& id : ids) {
    if (ToHex(id).rfind(prefix, 0) != 0) continue;
    HP_ASSIGN(const Generation generation, store.OpenGeneration(ToHex(id), open));
    if (context.options.common.json) {
      json["generations"].push_back(GenerationJson(generation, bad));
    } else {
      PrintGeneration(generation, bad);
    }
  }
  if (context.options.common.json) {
    PrintJson(JsonText(json));
  } else if (bad.empty()) {
    PrintLine("of layer files their headers were looked at: `hotplane verify` checks every byte");
  }
  return CheckBadFiles(store, bad);
}

Json SurveyJson(const MoeLayerSurvey& survey) {
  Json json{{"prefix", survey.prefix},        {"scheme", survey.scheme},
            {"tensors", survey.tensor_count}, {"bytes", survey.tensor_bytes},
            {"dtypes", survey.dtypes},        {"missing", survey.missing},
            {"unexpected", survey.unexpected}};
  if (survey.problem) json["problem"] = survey.problem->ToString();
  return json;
}

void PrintSurvey(const std::vector<MoeLayerSurvey>& surveys, const MoeModel* model) {
  PrintLine(
      "  layer  scheme                    format  experts  hidden  intermediate  dtypes"
      "                 bytes");
  for (const MoeLayerSurvey& survey : surveys) {
    std::string what = "       -        -       -             -";
    std::string number = "-";
    for (const MoeLayer& layer : model != nullptr ? model->layers : std::vector<MoeLayer>()) {
      if (layer.prefix != survey.prefix) continue;
      number = Text("{}", layer.ordinal);
      what = Text("{:<6}  {:>7}  {:>6}  {:>12}", SourceFormatName(layer.format),
                  layer.geometry.experts, layer.geometry.hidden, layer.geometry.intermediate);
    }
    PrintLine(Text("  {:>5}  {:<24}  {}  {:<21}  {}", number,
                   survey.scheme.empty() ? "none fits" : survey.scheme, what, survey.dtypes,
                   FormatBytes(survey.tensor_bytes)));
    if (!survey.missing.empty()) PrintLine(Text("         missing     {}", survey.missing));
    if (!survey.unexpected.empty()) PrintLine(Text("         unexpected  {}", survey.unexpected));
  }
}

// What there is, layer by layer, although it is not a checkpoint that can be used; then why not.
Result<void> InspectBadCheckpoint(const Context& context, const Checkpoint& checkpoint,
                                  const Status& problem) {
  const std::vector<MoeLayerSurvey> surveys = SurveyMoe(checkpoint);
  if (context.options.common.json) {
    Json json{{"kind", "checkpoint"}, {"usable", false}, {"layers", Json::array()}};
    for (const MoeLayerSurvey& survey : surveys) json["layers"].push_back(SurveyJson(survey));
    PrintJson(JsonText(json));
  } else if (!surveys.empty()) {
    PrintLine(Text("checkpoint  {}, not usable", checkpoint.path()));
    PrintSurvey(surveys, nullptr);
  }
  return Fail(problem);
}

Result<void> InspectCheckpoint(const Context& context) {
  HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(PosixEnv(), context.options.path));
  const Result<MoeModel> discovered = DiscoverMoe(checkpoint);
  if (!discovered) return InspectBadCheckpoint(context, checkpoint, discovered.error());
  const MoeModel& model = *discovered;
  HP_ASSIGN(const Digest128 fingerprint, Fingerprint(checkpoint, model));
  const Manifest manifest = MakeManifest(model, fingerprint, ZeroMode::kAuto);
  const std::vector<MoeLayerSurvey> surveys = SurveyMoe(checkpoint);
  if (!context.options.common.json) {
    PrintLine(Text("checkpoint  {}, scheme {}", DescribeModel(manifest), model.scheme));
    PrintLine(Text("  {}, {}, fingerprint {}", Counted(checkpoint.files().size(), "files"),
                   Counted(checkpoint.tensors().size(), "tensors"), ToHex(fingerprint)));
    PrintLine(Text("  generation in a store: {} (zero mode auto)",
                   ToHex(GenerationOf(manifest.identity))));
    PrintSurvey(surveys, &model);
    return {};
  }
  Json json;
  json["kind"] = "checkpoint";
  json["usable"] = true;
  json["model"] = DescribeModel(manifest);
  json["scheme"] = model.scheme;
  json["files"] = checkpoint.files().size();
  json["tensors"] = checkpoint.tensors().size();
  json["source_fingerprint"] = ToHex(fingerprint);
  json["generation"] = ToHex(GenerationOf(manifest.identity));
  for (const MoeLayer& layer : model.layers) {
    Json entry{{"layer", layer.ordinal},
               {"model_index", layer.model_index},
               {"mtp", layer.mtp},
               {"source_format", SourceFormatName(layer.format)},
               {"geometry", GeometryJson(layer.geometry)},
               {"biases", layer.geometry.biases}};
    for (const MoeLayerSurvey& survey : surveys) {
      if (survey.prefix == layer.prefix) entry.update(SurveyJson(survey));
    }
    json["layers"].push_back(std::move(entry));
  }
  PrintJson(JsonText(json));
  return {};
}

}  // namespace

Result<void> RunInspect(const Context& context) {
  Env& env = PosixEnv();
  const std::string& path = context.options.path;
  HP_ASSIGN(const FileStat stat, env.Stat(path));
  if (stat.type == FileType::kInvalid)
    return Fail(Status::Usage("there is no such file or directory").File(path));
  if (stat.type == FileType::kRegular) {
    HP_ASSIGN(const bool inspected, InspectStoreFile(context));
    if (inspected) return {};
    return InspectCheckpoint(context);
  }
  if (PathKindOf(env, path) == PathKind::kCheckpoint) return InspectCheckpoint(context);
  const Result<Store> store = Store::Open(env, path);
  if (store) return InspectStore(context, *store);
  // No generation in it: then it can only be a checkpoint. Anything else is said as it is, also
  // about what is in it.
  if (store.error().code() != StatusCode::kData || store.error().file() != path)
    return Fail(store.error());
  return InspectCheckpoint(context);
}

}  // namespace hotplane::cli
