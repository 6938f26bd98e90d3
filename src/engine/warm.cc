#include "engine/warm.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "base/format_text.h"
#include "base/log.h"
#include "base/topology.h"
#include "base/units.h"
#include "boot/plan.h"
#include "store/coverage.h"

namespace hotplane {
namespace {

constexpr uint64_t kPieceBytes = 4 * kMiB;

struct Piece {
  File* file;
  Mapping* mapping;  // of the whole file; null: read instead
  uint64_t offset;
  uint64_t bytes;
};

uint64_t CountCached(const std::vector<std::unique_ptr<File>>& files) {
  uint64_t cached = 0;
  for (const auto& file : files) cached += file->CachedBytes(0, 0).value_or(0);
  return cached;
}

// The files to warm, opened and mapped, and what there is to say of the others.
struct OpenedFiles {
  std::vector<std::unique_ptr<File>> files;
  std::vector<std::unique_ptr<Mapping>> mappings;
  std::vector<Piece> pieces;

  Result<void> Add(const Generation& of_rank, uint32_t layer, Encoding encoding,
                   WarmReport& report);
};

Result<void> OpenedFiles::Add(const Generation& of_rank, uint32_t layer, Encoding encoding,
                              WarmReport& report) {
  const TierProbe probe = of_rank.Probe(layer, encoding);
  const std::string rank = of_rank.world() > 1 ? Text(" of rank {}", of_rank.rank()) : "";
  if (probe.reason)
    report.warnings.push_back(Text("layer {} ({}){} is passed over: {}", layer,
                                   EncodingName(encoding), rank, probe.reason->what()));
  if (probe.presence == Presence::kAbsent && encoding == Encoding::kBase)
    report.warnings.push_back(Text("layer {} has no base tier{}", layer, rank));
  if (probe.presence != Presence::kPresent) return {};
  HP_ASSIGN(std::unique_ptr<File> file,
            of_rank.env().Open(of_rank.LayerPath(layer, encoding), OpenMode::kRead));
  const uint64_t bytes = probe.layout.file_bytes;
  Result<std::unique_ptr<Mapping>> mapped = file->Map(0, bytes);
  if (!mapped)
    Log(LogLevel::kInfo, "cannot map {}: reading it instead ({})", file->path(),
        mapped.error().what());
  std::unique_ptr<Mapping> mapping = mapped ? *std::move(mapped) : nullptr;
  for (uint64_t offset = 0; offset < bytes; offset += kPieceBytes)
    pieces.push_back({file.get(), mapping.get(), offset, std::min(kPieceBytes, bytes - offset)});
  report.bytes += bytes;
  mappings.push_back(std::move(mapping));
  files.push_back(std::move(file));
  return {};
}

// Asked for, and not there in either encoding.
void WarnOfAbsentDeltas(const Generation& generation, std::optional<uint32_t> rank,
                        WarmReport& report) {
  std::vector<uint32_t> layers;
  for (const CoverageGap& gap : ProbeCoverage(generation).delta.gaps) {
    const bool other_rank = rank && gap.rank && *gap.rank != *rank;
    if (gap.presence != Presence::kAbsent || other_rank) continue;
    if (layers.empty() || layers.back() != gap.layer) layers.push_back(gap.layer);
  }
  if (layers.empty()) return;
  report.warnings.push_back(Text("no delta tier of layer{} {}", layers.size() == 1 ? "" : "s",
                                 LayerListText(layers, generation.manifest())));
}

}  // namespace

Result<WarmReport> Warm(const Generation& generation, const std::vector<Tier>& tiers,
                        WorkerPool& pool, const CancelToken* cancel, Progress* progress,
                        std::optional<uint32_t> rank) {
  const auto start = std::chrono::steady_clock::now();
  WarmReport report;
  OpenedFiles opened;
  for (uint32_t r = 0; r < generation.world(); ++r) {
    if (rank && *rank != r) continue;
    const Generation of_rank = generation.ForRank(r);
    for (const ManifestLayer& layer : generation.manifest().layers)
      for (const Encoding encoding : kEncodings)
        if (std::find(tiers.begin(), tiers.end(), TierOf(encoding)) != tiers.end())
          HP_TRY(opened.Add(of_rank, layer.ordinal, encoding, report));
  }
  if (std::find(tiers.begin(), tiers.end(), Tier::kDelta) != tiers.end())
    WarnOfAbsentDeltas(generation, rank, report);
  const std::vector<std::unique_ptr<File>>& files = opened.files;
  const std::vector<Piece>& pieces = opened.pieces;
  if (files.empty())
    return Fail(Status::Data("there is no layer file to warm").File(generation.directory()));
  report.files = static_cast<uint32_t>(files.size());
  report.bytes_cached_before = CountCached(files);
  report.bytes_available = ReadMemoryLimit().available_bytes;
  if (report.bytes > report.bytes_available)
    report.warnings.push_back(Text("{} of files cannot stay in {} of page cache",
                                   FormatBytes(report.bytes), FormatBytes(report.bytes_available)));

  if (progress != nullptr) progress->Begin("warming", report.bytes);
  // Through mappings: nothing is copied, and where the kernel has huge pages for files, the next
  // boot finds them.
  HP_TRY(pool.ParallelFor(pieces.size(), [&](size_t index, size_t) -> Result<void> {
    if (cancel != nullptr) HP_TRY(cancel->Check());
    const Piece& piece = pieces[index];
    const size_t ahead = index + 4 * pool.worker_count();
    if (ahead < pieces.size()) pieces[ahead].file->WillNeed(pieces[ahead].offset, kPieceBytes);
    if (piece.mapping != nullptr) {
      HP_TRY(piece.mapping->Populate(piece.offset, piece.bytes));
    } else {
      std::vector<std::byte> buffer(piece.bytes);
      HP_TRY(ReadFully(*piece.file, piece.offset, buffer));
    }
    if (progress != nullptr) progress->Add(piece.bytes);
    return {};
  }));
  report.bytes_cached_after = CountCached(files);
  if (report.bytes <= report.bytes_available &&
      report.bytes_cached_after < report.bytes - report.bytes / 64)
    report.warnings.push_back(Text("only {} of {} are in the page cache after reading all of it",
                                   FormatBytes(report.bytes_cached_after),
                                   FormatBytes(report.bytes)));
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace hotplane
