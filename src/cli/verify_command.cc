#include <nlohmann/json.hpp>

#include "base/format_text.h"
#include "base/log.h"
#include "base/units.h"
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

void PrintJson(const VerifyReport& report, const SourceReport& source, bool with_source) {
  nlohmann::ordered_json json;
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
  HP_ASSIGN(const Generation generation,
            store.OpenGeneration(options.generation, OpenOptionsOf(context)));
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
  if (options.common.json) {
    PrintJson(report, source, !options.source.empty());
  } else {
    for (const VerifyFinding& finding : report.findings)
      PrintLine("BAD   " + finding.status.ToString());
    if (report.findings.empty() && !options.common.quiet) {
      PrintLine(Text("OK    {} files, {} chunks, {}", report.files_checked, report.chunks_checked,
                     FormatBytes(report.bytes_checked)));
      if (!options.source.empty())
        PrintLine(Text("OK    built from {}: {} tensors of {} layers, {}", options.source,
                       source.tensors_checked, source.layers_checked,
                       FormatBytes(source.bytes_checked)));
    }
  }
  if (report.findings.empty()) return {};
  // A file that could not be read says nothing about its content: never advise to remove it.
  for (const VerifyFinding& finding : report.findings)
    if (finding.status.code() == StatusCode::kSystem)
      return Fail(Status(finding.status)
                      .Because(Text("{} findings, among them what could not be read",
                                    report.findings.size())));
  return Fail(Status::Data(Text("{} findings in the store", report.findings.size()))
                  .File(generation.directory())
                  .Advice("remove the files named above and run `hotplane build` again: only "
                          "their layers are built"));
}

}  // namespace hotplane::cli
