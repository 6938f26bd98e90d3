#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/format_text.h"
#include "base/json_text.h"
#include "base/number_text.h"
#include "base/units.h"
#include "boot/describe.h"
#include "boot/layer_selection.h"
#include "boot/paired_generation.h"
#include "boot/plan.h"
#include "boot/shard_choice.h"
#include "boot/verify_source.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "store/coverage.h"
#include "store/replaceable.h"
#include "store/store.h"

namespace hotplane::cli {
namespace {

using Json = nlohmann::ordered_json;

Result<SourceReport> VerifyPairing(const Context& context, const Generation& generation,
                                   WorkerPool& pool, Progress* progress) {
  HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(PosixEnv(), context.options.source));
  HP_ASSIGN(const MoeModel model, DiscoverMoe(checkpoint));
  return VerifySource(generation, checkpoint, model, pool, &context.cancel, progress);
}

// Of several generations the one that was built from --source. With one there is no choice, and the
// checkpoint is not looked at before the store is known to be whole.
Result<std::string> ChooseGeneration(const Context& context, const Store& store) {
  const Options& options = context.options;
  HP_ASSIGN(const std::vector<Store::Entry> found, store.FindGenerations(options.generation));
  if (options.source.empty() || found.size() < 2) return options.generation;
  HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(PosixEnv(), options.source));
  HP_ASSIGN(const MoeModel model, DiscoverMoe(checkpoint));
  HP_ASSIGN(const Digest128 fingerprint, Fingerprint(checkpoint, model));
  return FindPairedGeneration(store, options.generation, fingerprint);
}

// What should be there, and what is.
struct Completeness {
  Coverage all;             // of all layers
  Coverage coverage;        // of the layers that should be there
  std::vector<Tier> tiers;  // of them, those that should be

  // A lost source record is a fault wherever it is.
  bool complete() const {
    return all.layers_without_record.empty() &&
           std::ranges::all_of(tiers, [this](Tier tier) { return coverage.Of(tier).complete(); });
  }
};

Result<Completeness> FindMissing(const Context& context, const Generation& generation) {
  const Options& options = context.options;
  HP_ASSIGN(const std::vector<uint32_t> layers,
            SelectLayers(options.layers, generation.manifest()));
  Completeness found{.all = ProbeCoverage(generation), .coverage = {}, .tiers = options.tiers};
  found.coverage = found.all.OfLayers(layers);
  return found;
}

Json FindingJson(const VerifyFinding& finding) {
  Json entry;
  entry["file"] = finding.file;
  entry["layer"] = finding.layer;
  if (finding.rank) entry["rank"] = *finding.rank;
  entry["chunk"] = finding.chunk ? Json(*finding.chunk) : Json();
  entry["what"] = finding.status.what();
  if (finding.status.offset()) entry["offset"] = *finding.status.offset();
  entry["expected"] = finding.status.expected();
  entry["found"] = finding.status.found();
  return entry;
}

Json TierJson(const TierCoverage& tier) {
  Json json{{"tier", TierName(tier.tier)},
            {"files_total", tier.file_count},
            {"files_present", tier.file_count_present},
            {"layers_missing", tier.Layers(Presence::kAbsent)},
            {"files_missing", Json::array()}};
  for (const CoverageGap& gap : tier.gaps)
    if (gap.presence == Presence::kAbsent) json["files_missing"].push_back(gap.file);
  return json;
}

struct Verified {
  VerifyReport report;
  SourceReport source;
};

void PrintReport(const MeantGeneration& meant, const Verified& verified, bool with_source,
                 const Completeness& found) {
  const auto& [report, source] = verified;
  Json json;
  json["generation"] = ToHex(meant.generation.id());
  json["complete"] = found.complete();
  json["tiers"] = {TierJson(found.coverage.base), TierJson(found.coverage.delta)};
  json["layers_without_base"] = found.all.base.Layers(Presence::kAbsent);
  json["layers_without_record"] = found.all.layers_without_record;
  json["files_checked"] = report.files_checked;
  json["chunks_checked"] = report.chunks_checked;
  json["bytes_checked"] = report.bytes_checked;
  json["findings"] = Json::array();
  for (const VerifyFinding& finding : report.findings)
    json["findings"].push_back(FindingJson(finding));
  json["warnings"] = meant.warnings;
  if (with_source)
    json["source"] = {{"layers_checked", source.layers_checked},
                      {"layers_without_record", source.layers_without_record},
                      {"tensors_checked", source.tensors_checked},
                      {"bytes_checked", source.bytes_checked}};
  PrintJson(JsonText(json));
}

// The files of these tiers that are not there.
void PrintMissingFiles(const Completeness& found, const std::vector<Tier>& tiers) {
  constexpr size_t kNamesMax = 12;
  std::vector<std::string> names;
  for (const Tier tier : tiers)
    for (const CoverageGap& gap : found.coverage.Of(tier).gaps)
      if (gap.presence == Presence::kAbsent) names.push_back(gap.file);
  for (size_t i = 0; i < std::min(names.size(), kNamesMax); ++i) PrintLine("      " + names[i]);
  if (names.size() > kNamesMax)
    PrintLine(Text("      and {} more: --json names all", names.size() - kNamesMax));
}

// Layers that a build was not asked for, or has not come to, look like layers that were lost: only
// --complete makes a fault of them. What is there and bad is one in any case.
void PrintCompleteness(const Options& options, const Generation& generation,
                       const Completeness& found) {
  std::vector<Tier> missing;
  bool bad = false;
  for (const Tier tier : {Tier::kBase, Tier::kDelta}) {
    const TierCoverage& files = found.coverage.Of(tier);
    const auto absent = std::ranges::count(files.gaps, Presence::kAbsent,
                                           [](const auto& gap) { return gap.presence; });
    const bool expected = options.complete ? std::ranges::count(found.tiers, tier) > 0
                                           : tier == Tier::kBase || absent < files.file_count;
    if (expected && absent > 0) missing.push_back(tier);
    bad = bad || std::cmp_less(absent, files.gaps.size());
  }
  const std::string counts = DescribeCoverage(found.coverage, generation.manifest());
  if (missing.empty() && !bad) {
    if (!options.common.quiet) PrintLine("OK    " + counts);
  } else {
    PrintLine((options.complete || bad ? "BAD   " : "WARN  ") + counts);
    PrintMissingFiles(found, missing);
  }
  for (const uint32_t layer : found.all.layers_without_record) {
    PrintLine(
        Text("BAD   layer {} has no source record: nothing proves what its files were built "
             "from",
             layer));
    PrintLine("      " + generation.SourceRecordPath(layer));
  }
  if (options.complete || missing.empty()) return;
  if (!found.all.base.Layers(Presence::kAbsent).empty())
    PrintLine("      a boot needs --checkpoint, or --layers that are there");
  PrintLine(
      "      that may be all that was built so far: `verify --complete` fails when anything is "
      "missing");
}

Result<void> CheckFindings(const Generation& generation, const VerifyReport& report) {
  if (report.findings.empty()) return {};
  const std::string findings = Counted(report.findings.size(), "findings");
  // A file that could not be read says nothing about its content: never advise to remove it.
  for (const VerifyFinding& finding : report.findings)
    if (finding.status.code() == StatusCode::kSystem ||
        finding.status.code() == StatusCode::kCapacity)
      return Fail(
          Status(finding.status).Because(Text("{}, among them what could not be read", findings)));
  const auto stays = [&generation](const VerifyFinding& finding) {
    return !finding.chunk && !finding.file.ends_with(".source") &&
           !CheckReplaceable(generation.env(), finding.file, finding.layer);
  };
  const auto staying = std::ranges::count_if(report.findings, stays);
  if (std::cmp_equal(staying, report.findings.size()))
    return Fail(Status::Data(Text("{} in the store", findings))
                    .File(generation.directory())
                    .Advice("do what is said above of each: no build replaces a directory or "
                            "another release's file"));
  // A layer that is there is not built again, and builds write the record.
  const bool records = std::ranges::any_of(report.findings, [](const VerifyFinding& finding) {
    return finding.file.ends_with(".source");
  });
  return Fail(
      Status::Data(Text("{} in the store", findings))
          .File(generation.directory())
          .Advice(Text("{}remove the {}files named above{} and run `hotplane build` again: only "
                       "their layers are built",
                       staying > 0 ? "do what is said above of a directory or another release's "
                                     "file, which no build replaces; "
                                   : "",
                       staying > 0 ? "other " : "",
                       records ? ", of a source record with the files of its layer," : "")));
}

std::string LayersText(const std::vector<uint32_t>& layers, const Manifest& manifest) {
  return Text("layer{} {}", layers.size() == 1 ? "" : "s", LayerListText(layers, manifest));
}

Result<void> CheckComplete(const Options& options, const Generation& generation,
                           const Completeness& found) {
  const std::vector<uint32_t>& without_record = found.all.layers_without_record;
  if (!without_record.empty())
    return Fail(Status::Data("layers have no source record")
                    .File(generation.directory())
                    .Expected("a .source file beside the layer files of each layer")
                    .Found("none of " + LayersText(without_record, generation.manifest()))
                    .Advice("bring the files back from a copy of the store; or remove these "
                            "layers' files and run `hotplane build` again"));
  if (!options.complete || found.complete()) return {};
  HP_ASSIGN(const std::vector<uint32_t> layers,
            SelectLayers(options.layers, generation.manifest()));
  std::string tiers;
  for (const Tier tier : found.tiers)
    tiers += Text("{}{}", tiers.empty() ? "" : " and ", TierName(tier));
  return Fail(
      Status::Data("the store is not complete")
          .File(generation.directory())
          .Expected(Text("{} of {}", tiers, LayersText(layers, generation.manifest())))
          .Found(DescribeCoverage(found.coverage, generation.manifest()))
          .Advice("`hotplane build` of the checkpoint builds what is missing; where less is meant "
                  "to be there, say so by --layers and --tiers"));
}

Result<Verified> VerifyAll(const Context& context, const Generation& generation) {
  const Options& options = context.options;
  WorkerPool pool(options.workers);
  Progress progress;
  Verified verified;
  const ProgressDisplay display(progress, options.common, options.stall_seconds);
  progress.Begin("verifying", 0);
  const ByteProgress on_bytes = [&progress](uint64_t done, uint64_t total) {
    progress.bytes_total = total;
    progress.bytes_done = done;
  };
  HP_ASSIGN(verified.report, generation.Verify(pool, &context.cancel, on_bytes));
  if (!options.source.empty() && verified.report.findings.empty()) {
    HP_ASSIGN(verified.source, VerifyPairing(context, generation, pool, &progress));
  }
  return verified;
}

void PrintVerified(const Options& options, const Verified& verified) {
  const auto& [report, source] = verified;
  for (const VerifyFinding& finding : report.findings)
    PrintText("BAD   " + finding.status.ToString());
  if (!report.findings.empty() || options.common.quiet) return;
  PrintLine(Text("OK    {}, {}, {}", Counted(report.files_checked, "files"),
                 Counted(report.chunks_checked, "chunks"), FormatBytes(report.bytes_checked)));
  if (options.source.empty()) return;
  PrintLine(Text("OK    built from {}: {} of {}, {}", options.source,
                 Counted(source.tensors_checked, "tensors"),
                 Counted(source.layers_checked, "layers"), FormatBytes(source.bytes_checked)));
}

}  // namespace

Result<void> RunVerify(const Context& context) {
  const Options& options = context.options;
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.path));
  HP_ASSIGN(const std::string name, ChooseGeneration(context, store));
  HP_ASSIGN(const MeantGeneration meant, OpenMeant(store, name, OpenOptionsOf(context)));
  const Generation& generation = meant.generation;
  HP_TRY(SelectLayers(options.layers, generation.manifest()));
  HP_ASSIGN(const Verified verified, VerifyAll(context, generation));
  HP_ASSIGN(const Completeness found, FindMissing(context, generation));
  if (options.common.json) {
    PrintReport(meant, verified, !options.source.empty(), found);
  } else {
    PrintVerified(options, verified);
    PrintCompleteness(options, generation, found);
  }
  HP_TRY(CheckFindings(generation, verified.report));
  return CheckComplete(options, generation, found);
}

}  // namespace hotplane::cli
