#include <nlohmann/json.hpp>

#include "base/format_text.h"
#include "base/log.h"
#include "base/number_text.h"
#include "base/units.h"
#include "boot/paired_generation.h"
#include "boot/verify_source.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "store/store.h"

namespace hotplane::cli {
namespace {

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

// Layers without a base file, which this store cannot boot by itself: a partial build, or lost.
std::string Listed(const std::vector<uint32_t>& numbers) {
  std::string text;
  for (const uint32_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return text;
}
std::vector<uint32_t> WithoutBase(const Generation& generation) {
  std::vector<uint32_t> layers;
  for (uint32_t layer = 0; layer < generation.manifest().layers.size(); ++layer)
    if (generation.Probe(layer, Encoding::kBase).presence == Presence::kAbsent)
      layers.push_back(layer);
  return layers;
}

void PrintJson(const VerifyReport& report, const SourceReport& source, bool with_source,
               const std::vector<uint32_t>& without_base) {
  nlohmann::ordered_json json;
  json["layers_without_base"] = without_base;
  json["files_checked"] = report.files_checked;
  json["chunks_checked"] = report.chunks_checked;
  json["bytes_checked"] = report.bytes_checked;
  json["findings"] = nlohmann::ordered_json::array();
  for (const VerifyFinding& finding : report.findings) {
    nlohmann::ordered_json entry;
    entry["file"] = finding.file;
    entry["layer"] = finding.layer;
    if (finding.rank) entry["rank"] = *finding.rank;
    entry["chunk"] =
        finding.chunk ? nlohmann::ordered_json(*finding.chunk) : nlohmann::ordered_json();
    entry["what"] = finding.status.what();
    if (finding.status.offset()) entry["offset"] = *finding.status.offset();
    entry["expected"] = finding.status.expected();
    entry["found"] = finding.status.found();
    json["findings"].push_back(std::move(entry));
  }
  if (with_source)
    json["source"] = {{"layers_checked", source.layers_checked},
                      {"layers_without_record", source.layers_without_record},
                      {"tensors_checked", source.tensors_checked},
                      {"bytes_checked", source.bytes_checked}};
  PrintLine(json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

}  // namespace

Result<void> RunVerify(const Context& context) {
  const Options& options = context.options;
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.path));
  HP_ASSIGN(const std::string name, ChooseGeneration(context, store));
  HP_ASSIGN(const Generation generation, store.OpenGeneration(name, OpenOptionsOf(context)));
  WorkerPool pool(options.workers);
  Progress progress;
  VerifyReport report;
  SourceReport source;
  {
    const ProgressDisplay display(progress, options.common, options.stall_seconds);
    progress.Begin("verifying", 0);
    const ByteProgress on_bytes = [&progress](uint64_t done, uint64_t total) {
      progress.bytes_total = total;
      progress.bytes_done = done;
    };
    HP_ASSIGN(report, generation.Verify(pool, &context.cancel, on_bytes));
    if (!options.source.empty() && report.findings.empty()) {
      HP_ASSIGN(source, VerifyPairing(context, generation, pool, &progress));
    }
  }
  const std::vector<uint32_t> without_base = WithoutBase(generation);
  if (options.common.json) {
    PrintJson(report, source, !options.source.empty(), without_base);
  } else {
    for (const VerifyFinding& finding : report.findings)
      PrintLine("BAD   " + finding.status.ToString());
    if (report.findings.empty() && !options.common.quiet) {
      PrintLine(Text("OK    {}, {}, {}", Counted(report.files_checked, "files"),
                     Counted(report.chunks_checked, "chunks"), FormatBytes(report.bytes_checked)));
      if (!options.source.empty())
        PrintLine(Text("OK    built from {}: {} of {}, {}", options.source,
                       Counted(source.tensors_checked, "tensors"),
                       Counted(source.layers_checked, "layers"),
                       FormatBytes(source.bytes_checked)));
    }
  }
  if (!without_base.empty() && !options.common.json)
    PrintLine(
        Text("WARN  {} without a base tier: {}; a boot needs --checkpoint, or --layers that "
             "are there",
             Counted(without_base.size(), "layers"), Listed(without_base)));
  if (report.findings.empty()) return {};
  const std::string findings = Counted(report.findings.size(), "findings");
  // A file that could not be read says nothing about its content: never advise to remove it.
  for (const VerifyFinding& finding : report.findings)
    if (finding.status.code() == StatusCode::kSystem)
      return Fail(
          Status(finding.status).Because(Text("{}, among them what could not be read", findings)));
  return Fail(Status::Data(Text("{} in the store", findings))
                  .File(generation.directory())
                  .Advice("remove the files named above and run `hotplane build` again: only "
                          "their layers are built"));
}

}  // namespace hotplane::cli
