#include "engine/export_planes_cache.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <utility>

#include "base/format_text.h"
#include "base/log.h"
#include "base/number_text.h"
#include "base/units.h"
#include "engine/record_reader.h"
#include "format/sha256.h"
#include "io/path_kind.h"
#include "store/locks.h"
#include "store/paths.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kVersion = PlanesCacheMeta::kVersionMax;

bool IsFp4(std::string_view part) { return part.starts_with("fp"); }
bool OfW13(std::string_view part) { return part.ends_with("13"); }

// One part of one layer of one rank, expert by expert, in the encoding that is asked for.
class PartPieces {
 public:
  static Result<PartPieces> Open(const Generation& of_rank, uint32_t layer, std::string_view part,
                                 Encoding wanted, const Kernels& kernels);

  uint32_t experts() const { return file_->layout().geometry.experts; }
  uint64_t piece_bytes() const;
  // `piece` has piece_bytes().
  Result<void> Read(uint32_t expert, std::span<std::byte> piece);

 private:
  PartPieces(Env& env, std::string_view part, Encoding wanted, const Kernels& kernels)
      : env_(&env), part_(part), wanted_(wanted), kernels_(&kernels) {}
  size_t n() const {
    const LayerGeometry& g = file_->layout().geometry;
    return OfW13(part_) ? g.n13() : g.n2();
  }
  size_t k() const {
    const LayerGeometry& g = file_->layout().geometry;
    return OfW13(part_) ? g.k13() : g.k2();
  }
  bool converted() const { return IsFp4(part_) && file_->layout().encoding != wanted_; }

  Env* env_;
  std::string_view part_;
  Encoding wanted_;
  const Kernels* kernels_;
  std::optional<LayerFile> file_;
  std::optional<LayerFile> base_;  // beside quintals that become nibbles
  std::vector<std::byte> stored_;
  std::vector<std::byte> codes_;
};

bool IsPresent(const Generation& of_rank, uint32_t layer, Encoding encoding) {
  return of_rank.Probe(layer, encoding).presence == Presence::kPresent;
}

Result<PartPieces> PartPieces::Open(const Generation& of_rank, uint32_t layer,
                                    std::string_view part, Encoding wanted,
                                    const Kernels& kernels) {
  PartPieces pieces(of_rank.env(), part, wanted, kernels);
  Encoding stored = wanted;
  if (IsFp4(part) && !IsPresent(of_rank, layer, wanted))
    stored = wanted == Encoding::kDeltaNibble ? Encoding::kDeltaQuintal : Encoding::kDeltaNibble;
  HP_ASSIGN(pieces.file_, of_rank.OpenLayer(layer, stored));
  if (!pieces.converted()) return pieces;
  pieces.stored_.resize(pieces.file_->layout().Find(part)->expert_bytes);
  if (stored == Encoding::kDeltaNibble) return pieces;
  HP_ASSIGN(pieces.base_, of_rank.OpenLayer(layer, Encoding::kBase));
  pieces.codes_.resize(CodePlaneBytes(pieces.n(), pieces.k()));
  return pieces;
}

uint64_t PartPieces::piece_bytes() const {
  if (!converted()) return file_->layout().Find(part_)->expert_bytes;
  return wanted_ == Encoding::kDeltaNibble ? NibblePlaneBytes(n(), k())
                                           : QuintalPlaneBytes(n(), k());
}

Result<void> PartPieces::Read(uint32_t expert, std::span<std::byte> piece) {
  uint64_t reread_bytes = 0;
  if (!converted()) return ReadPiece(*env_, *file_, part_, expert, piece, reread_bytes);
  HP_TRY(ReadPiece(*env_, *file_, part_, expert, stored_, reread_bytes));
  if (wanted_ == Encoding::kDeltaQuintal) {
    kernels_->derive_quintals(stored_.data(), n(), k(), piece.data());
    return {};
  }
  HP_TRY(ReadPiece(*env_, *base_, OfW13(part_) ? "planes13" : "planes2", expert, codes_,
                   reread_bytes));
  return MergePart(*kernels_, *file_, part_, expert, codes_, stored_, piece);
}

class Exporter {
 public:
  Exporter(const Generation& generation, WorkerPool& pool, const PlanesCacheExportOptions& options,
           const Kernels& kernels)
      : generation_(generation), pool_(pool), options_(options), kernels_(kernels) {}

  Result<PlanesCacheExportReport> Run();

 private:
  struct Job {
    uint32_t rank = 0;
    uint32_t layer = 0;
    uint32_t number = 0;  // in file names
    std::string_view part;
    uint64_t bytes = 0;
  };

  Result<void> ChooseName();
  void ChooseFp4();
  Result<void> PlanJobs();
  Result<void> PlanLayer(uint32_t rank, const ManifestLayer& layer, uint32_t number);
  Result<void> CheckSpace() const;
  Result<std::unique_ptr<FileLock>> Lock() const;
  Result<void> PrepareFolder(uint32_t rank);
  Result<void> CheckOthers(uint32_t rank, const std::vector<std::string>& names) const;
  Result<void> Invalidate(uint32_t rank);
  Result<void> Write(const Job& job);
  Result<bool> IsThere(const std::string& path, PartPieces& pieces, std::vector<std::byte>& piece,
                       std::string* digest) const;
  Result<void> PublishText(const std::string& path, const std::string& text);
  Result<void> CheckCancel() const {
    return options_.cancel == nullptr ? Result<void>() : options_.cancel->Check();
  }
  PlanesCacheMeta MetaOf(uint32_t rank) const;
  std::string FolderOf(uint32_t rank) const {
    return PlanesCacheRankPath(options_.output_directory, MetaOf(rank));
  }

  const Generation& generation_;
  WorkerPool& pool_;
  const PlanesCacheExportOptions& options_;
  const Kernels& kernels_;
  std::vector<Job> jobs_;
  std::vector<uint32_t> ranks_;
  PlanesCacheExportReport report_;
  std::mutex mutex_;  // of the report's counts while files are written
};

PlanesCacheMeta Exporter::MetaOf(uint32_t rank) const {
  const Identity& identity = generation_.manifest().identity;
  PlanesCacheMeta meta;
  meta.version = kVersion;
  meta.checkpoint_id = report_.checkpoint_id;
  meta.zero_mode = identity.zero_mode;
  meta.world = identity.shard_world;
  meta.rank = rank;
  meta.fp4 = report_.fp4;
  return meta;
}

Result<void> Exporter::ChooseName() {
  report_.checkpoint_id = options_.checkpoint_id.empty() ? generation_.manifest().checkpoint_id
                                                         : options_.checkpoint_id;
  const bool printable = std::all_of(report_.checkpoint_id.begin(), report_.checkpoint_id.end(),
                                     [](char letter) { return letter >= ' ' && letter <= '~'; });
  if (!report_.checkpoint_id.empty() && printable) return {};
  return Fail(
      Status::Usage(printable ? "nothing says what vLLM-MoET will call its checkpoint"
                              : "the name of the checkpoint is no printable ASCII text")
          .Expected("--checkpoint-id ID")
          .Advice("choose a name, and set VLLM_MOE_W2_CKPT_ID to it for vLLM-MoET: it finds "
                  "only files of the name that it has itself"));
}

// One value for the whole cache.
void Exporter::ChooseFp4() {
  report_.fp4 = options_.fp4.value_or(Encoding::kDeltaQuintal);
  if (options_.fp4) return;
  for (const uint32_t rank : ranks_)
    for (const ManifestLayer& layer : generation_.manifest().layers) {
      const Generation of_rank = generation_.ForRank(rank);
      if (IsPresent(of_rank, layer.ordinal, Encoding::kDeltaNibble) &&
          !IsPresent(of_rank, layer.ordinal, Encoding::kDeltaQuintal))
        report_.fp4 = Encoding::kDeltaNibble;
    }
}

Result<void> Exporter::PlanLayer(uint32_t rank, const ManifestLayer& layer, uint32_t number) {
  const Generation of_rank = generation_.ForRank(rank);
  if (layer.geometry.biases)
    return Fail(Status::Data(Text("layer {} has biases, which a planes cache has no place for",
                                  layer.ordinal))
                    .File(generation_.directory()));
  if (of_rank.Probe(layer.ordinal, Encoding::kBase).presence == Presence::kAbsent) {
    report_.warnings.push_back(Text("layer {}{} has no base and is left out", layer.ordinal,
                                    generation_.world() > 1 ? Text(" of rank {}", rank) : ""));
    return {};
  }
  bool delta = false;
  for (const Encoding encoding : {Encoding::kDeltaQuintal, Encoding::kDeltaNibble})
    delta |= of_rank.Probe(layer.ordinal, encoding).presence != Presence::kAbsent;
  for (const std::string_view part : kPlanesCacheParts) {
    if (IsFp4(part) && !(delta && options_.delta)) continue;
    HP_ASSIGN(const PartPieces pieces,
              PartPieces::Open(of_rank, layer.ordinal, part,
                               IsFp4(part) ? report_.fp4 : Encoding::kBase, kernels_));
    jobs_.push_back({rank, layer.ordinal, number, part, pieces.piece_bytes() * pieces.experts()});
  }
  return {};
}

Result<void> Exporter::PlanJobs() {
  const std::vector<ManifestLayer>& layers = generation_.manifest().layers;
  const bool imported = generation_.manifest().scheme == kPlanesCacheScheme;
  uint32_t after_main = 0;
  for (const ManifestLayer& layer : layers)
    if (!layer.mtp) after_main = std::max(after_main, layer.model_index + 1);
  for (const ManifestLayer& layer : layers) {
    // MTP layers count on after all others, as vLLM numbers them; imported ones have that number.
    const uint32_t number = layer.mtp && !imported ? after_main++ : layer.model_index;
    const size_t before = jobs_.size();
    for (const uint32_t rank : ranks_) HP_TRY(PlanLayer(rank, layer, number));
    if (jobs_.size() > before) ++report_.layers;
  }
  if (!jobs_.empty()) return {};
  return Fail(Status::Data("no layer of the store has a base")
                  .File(generation_.directory())
                  .Advice("build it first"));
}

Result<void> Exporter::CheckSpace() const {
  uint64_t bytes = 0;
  for (const Job& job : jobs_) {
    HP_ASSIGN(const FileStat stat,
              generation_.env().Stat(
                  JoinPath(FolderOf(job.rank), PlanesCacheFileName(job.number, job.part))));
    if (stat.type == FileType::kInvalid || stat.bytes != job.bytes) bytes += job.bytes;
  }
  std::string place = options_.output_directory;
  for (;; place = ParentPath(place)) {
    HP_ASSIGN(const FileStat stat, generation_.env().Stat(place));
    if (stat.type == FileType::kDirectory) break;
    if (stat.type != FileType::kInvalid)
      return Fail(Status::Usage("a planes cache is a folder, this is not one")
                      .File(place)
                      .Expected("a folder, or nothing yet")
                      .Found(DescribePath(generation_.env(), place))
                      .Advice("name another folder, or move the file away"));
  }
  HP_ASSIGN(const uint64_t free_bytes, generation_.env().FreeBytes(place));
  if (bytes <= free_bytes) return {};
  return Fail(Status::Capacity("the planes cache does not fit on the disk")
                  .File(options_.output_directory)
                  .Expected(Text("{} free ({} bytes)", FormatBytes(bytes), bytes))
                  .Found(Text("{} free ({} bytes)", FormatBytes(free_bytes), free_bytes))
                  .Advice("free space, or choose another folder"));
}

// Of several exports into one folder each finds what the one before has written. Beside v2, where
// neither vLLM-MoET nor an import looks.
Result<std::unique_ptr<FileLock>> Exporter::Lock() const {
  Env& env = generation_.env();
  HP_TRY(CreateDirectories(env, options_.output_directory));
  return LockPlanesCache(env, options_.output_directory, "export into it once at a time",
                         {options_.cancel, 0, options_.progress});
}

// Parts that this export does not write would stand beside its own under one name.
Result<void> Exporter::CheckOthers(uint32_t rank, const std::vector<std::string>& names) const {
  for (const std::string& name : names) {
    if (!name.starts_with("layer") || !name.ends_with(".bin")) continue;
    const bool ours = std::any_of(jobs_.begin(), jobs_.end(), [&](const Job& job) {
      return job.rank == rank && PlanesCacheFileName(job.number, job.part) == name;
    });
    if (ours) continue;
    return Fail(Status::Data("the folder has parts that this export does not write: one cache "
                             "would hold two")
                    .File(JoinPath(FolderOf(rank), name))
                    .Expected("files of the layers and tiers of this export alone")
                    .Found(name)
                    .Advice("export into another folder, or remove this cache first"));
  }
  return {};
}

// Until the end the folder is no cache: before the first file in it changes, the meta file goes.
Result<void> Exporter::Invalidate(uint32_t rank) {
  Env& env = generation_.env();
  const std::string meta = JoinPath(FolderOf(rank), kPlanesCacheMetaName);
  const std::lock_guard lock(mutex_);
  HP_ASSIGN(const FileStat stat, env.Stat(meta));
  if (stat.type == FileType::kInvalid) return {};
  HP_TRY(env.Remove(meta));
  return env.SyncDirectory(FolderOf(rank));
}

// What an export that was killed left behind goes.
Result<void> Exporter::PrepareFolder(uint32_t rank) {
  Env& env = generation_.env();
  const std::string folder = FolderOf(rank);
  HP_TRY(CreateDirectories(env, folder));
  HP_ASSIGN(const std::vector<std::string> names, env.List(folder));
  HP_TRY(CheckOthers(rank, names));
  for (const std::string& name : names)
    if (name.starts_with(Text("{}layer", kTemporaryPrefix)) ||
        name.starts_with(Text("{}{}", kTemporaryPrefix, kPlanesCacheMetaName)))
      HP_TRY(env.Remove(JoinPath(folder, name)));
  return {};
}

Result<void> Exporter::PublishText(const std::string& path, const std::string& text) {
  Env& env = generation_.env();
  HP_ASSIGN(const FileStat stat, env.Stat(path));
  if (stat.type == FileType::kRegular && stat.bytes == text.size()) {
    HP_ASSIGN(const std::vector<std::byte> there, ReadWholeFile(env, path, text.size()));
    const auto bytes = std::as_bytes(std::span(text));
    if (std::equal(there.begin(), there.end(), bytes.begin(), bytes.end())) return {};
  }
  return PublishFile(env, path, std::as_bytes(std::span(text)));
}

// Whether the file has the right content; then also its digest.
Result<bool> Exporter::IsThere(const std::string& path, PartPieces& pieces,
                               std::vector<std::byte>& piece, std::string* digest) const {
  Env& env = generation_.env();
  HP_ASSIGN(const FileStat stat, env.Stat(path));
  if (stat.type != FileType::kRegular || stat.bytes != piece.size() * pieces.experts())
    return false;
  HP_ASSIGN(const std::unique_ptr<File> file, env.Open(path, OpenMode::kRead));
  std::vector<std::byte> there(piece.size());
  Sha256 sha;
  for (uint32_t expert = 0; expert < pieces.experts(); ++expert) {
    HP_TRY(CheckCancel());
    HP_TRY(pieces.Read(expert, piece));
    HP_TRY(ReadFully(*file, uint64_t{expert} * there.size(), there));
    if (there != piece) return false;
    sha.Update(piece);
  }
  *digest = sha.FinishHex();
  return true;
}

Result<void> Exporter::Write(const Job& job) {
  Env& env = generation_.env();
  const std::string path = JoinPath(FolderOf(job.rank), PlanesCacheFileName(job.number, job.part));
  HP_ASSIGN(PartPieces pieces,
            PartPieces::Open(generation_.ForRank(job.rank), job.layer, job.part,
                             IsFp4(job.part) ? report_.fp4 : Encoding::kBase, kernels_));
  std::vector<std::byte> piece(pieces.piece_bytes());
  std::string digest;
  HP_ASSIGN(const bool there, IsThere(path, pieces, piece, &digest));
  if (!there) {
    HP_TRY(Invalidate(job.rank));
    Sha256 sha;
    HP_TRY(PublishFileInPieces(env, path, [&](const FileSink& sink) -> Result<void> {
      for (uint32_t expert = 0; expert < pieces.experts(); ++expert) {
        HP_TRY(CheckCancel());
        HP_TRY(pieces.Read(expert, piece));
        sha.Update(piece);
        HP_TRY(sink(piece));
      }
      return {};
    }));
    digest = sha.FinishHex();
  }
  HP_TRY(PublishText(path + std::string(kPlanesCacheDigestSuffix), digest + "\n"));
  if (options_.progress != nullptr) options_.progress->Add(job.bytes);
  std::lock_guard lock(mutex_);
  ++(there ? report_.files_kept : report_.files_written);
  if (!there) report_.bytes_written += job.bytes;
  return {};
}

Result<PlanesCacheExportReport> Exporter::Run() {
  const auto start = Clock::now();
  HP_TRY(ChooseName());
  for (uint32_t rank = 0; rank < generation_.world(); ++rank)
    if (!options_.rank || *options_.rank == rank) ranks_.push_back(rank);
  if (ranks_.empty())
    return Fail(Status::Usage(Text("the store has no rank {}", *options_.rank))
                    .File(generation_.directory())
                    .Expected(Text("0 to {}", generation_.world() - 1)));
  ChooseFp4();
  HP_TRY(PlanJobs());
  HP_TRY(CheckSpace());
  for (const std::string& warning : report_.warnings) Log(LogLevel::kWarning, "{}", warning);
  uint64_t bytes = 0;
  for (const Job& job : jobs_) bytes += job.bytes;
  if (options_.progress != nullptr) options_.progress->Begin("writing the planes cache", bytes);
  HP_ASSIGN(const std::unique_ptr<FileLock> lock, Lock());
  for (const uint32_t rank : ranks_) HP_TRY(PrepareFolder(rank));
  HP_TRY(pool_.ParallelFor(jobs_.size(), [this](size_t i, size_t) { return Write(jobs_[i]); }));
  for (const uint32_t rank : ranks_) {
    report_.folders.push_back(FolderOf(rank));
    HP_TRY(PublishText(JoinPath(FolderOf(rank), kPlanesCacheMetaName),
                       EncodePlanesCacheMeta(MetaOf(rank))));
  }
  report_.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return std::move(report_);
}

}  // namespace

Result<PlanesCacheExportReport> ExportPlanesCache(const Generation& generation, WorkerPool& pool,
                                                  const PlanesCacheExportOptions& options) {
  const Kernels* kernels = options.kernels;
  if (kernels == nullptr) {
    HP_ASSIGN(kernels, SelectKernels(std::nullopt));
  }
  return Exporter(generation, pool, options, *kernels).Run();
}

}  // namespace hotplane
