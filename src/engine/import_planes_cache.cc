#include "engine/import_planes_cache.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "base/bytes_text.h"
#include "base/check.h"
#include "base/format_text.h"
#include "base/log.h"
#include "base/number_text.h"
#include "base/units.h"
#include "boot/build.h"
#include "boot/plan.h"
#include "checkpoint/json_scan.h"
#include "engine/record_reader.h"
#include "engine/synth.h"
#include "format/sha256.h"
#include "store/paths.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPartCount = kPlanesCacheParts.size();
constexpr size_t kDigestBytesMax = 256;
// One task of comparing: large enough for the disk, small enough to share out.
constexpr size_t kCompareChunks = 32;

bool IsBasePart(size_t part) { return part < kPlanesCacheBaseParts; }
bool OfW13(size_t part) { return kPlanesCacheParts[part].ends_with("13"); }

uint64_t PartBytes(size_t part, const LayerGeometry& g, Encoding fp4) {
  const size_t n = OfW13(part) ? g.n13() : g.n2();
  const size_t k = OfW13(part) ? g.k13() : g.k2();
  if (kPlanesCacheParts[part].starts_with("planes")) return CodePlaneBytes(n, k);
  if (IsBasePart(part)) return ScalePlaneBytes(n, k);
  return fp4 == Encoding::kDeltaQuintal ? QuintalPlaneBytes(n, k) : NibblePlaneBytes(n, k);
}

// Files of one layer of one rank.
struct Unit {
  uint32_t ordinal = 0;
  uint32_t number = 0;  // in file names
  const PlanesCacheRank* folder = nullptr;
  PlanesCacheLayer files;
  bool base_whole = false;  // all four base parts are there
  bool has_fp4 = false;     // fp13 and fp2 are there, and wanted
};

class Importer {
 public:
  Importer(Env& env, const std::string& store_directory, WorkerPool& pool,
           const PlanesCacheImportOptions& options, const Kernels& kernels)
      : env_(env),
        store_directory_(store_directory),
        pool_(pool),
        options_(options),
        kernels_(kernels) {}

  Result<PlanesCacheImportReport> Run(const std::string& cache_directory);

 private:
  // Planning, before anything is written.
  Result<void> ChooseRanks();
  Result<void> FindGeneration();
  Result<void> MakeManifest();
  Result<void> CheckManifest();
  Result<void> CheckConfig() const;
  Result<void> MatchStoredLayers();
  Result<void> CheckMissingRanks() const;
  Result<void> PlanUnits();
  Result<void> PlanUnit(const ManifestLayer& layer, const PlanesCacheRank& folder);
  Result<void> CheckSizes(const Unit& unit) const;
  Result<void> CheckParts(Unit& unit) const;
  Result<void> CheckSpace() const;
  bool IsPresent(uint32_t ordinal, uint32_t rank, Encoding encoding) const;
  void Warn(std::string text);

  // One unit.
  Result<void> ImportUnit(const Unit& unit);
  Result<bool> IsMissing(const Generation& of_rank, const Unit& unit, Encoding encoding) const;
  Result<void> CopyTiers(const Generation& of_rank, const Unit& unit, bool base, bool fp4);
  Result<void> CopyPart(const Generation& of_rank, const Unit& unit, size_t part,
                        LayerFileWriter& writer, const LayerFile* stored_base);
  Result<void> CheckPiece(const Unit& unit, size_t part, uint32_t expert,
                          std::span<const std::byte> piece, std::span<const std::byte> codes,
                          std::vector<std::byte>& scratch, const std::string& path) const;
  Result<std::string> ReadDigest(const Unit& unit, size_t part) const;
  Result<void> CompareSample(const Generation& of_rank, const Unit& unit) const;

  // --move.
  Result<bool> WasMoved(const std::string& cache_directory);
  Result<void> MoveUnit(const Unit& unit);
  Result<void> CompareFile(const Generation& of_rank, const Unit& unit, Encoding encoding);
  Result<void> CompareChunks(const Unit& unit, const LayerFile& file,
                             const std::array<std::unique_ptr<File>, kPartCount>& cached,
                             size_t begin, size_t end);
  Result<void> MakeStoreDurable() const;
  Result<void> RemoveEmptyFolders();

  Encoding Fp4Of(const Unit& unit) const { return unit.folder->meta.fp4; }
  LayerGeometry ShardOf(const Unit& unit) const {
    return manifest_.layers[unit.ordinal].geometry.OfShard(manifest_.identity.shard_world);
  }
  std::string PathOf(const Unit& unit, size_t part) const {
    return JoinPath(unit.folder->path, PlanesCacheFileName(unit.number, kPlanesCacheParts[part]));
  }
  uint32_t StoreRank(const Unit& unit) const {
    return manifest_.identity.shard_world > 1 ? unit.folder->meta.rank : 0;
  }
  LockWaiting Waiting() const {
    return {options_.cancel, options_.stall_seconds, options_.progress};
  }
  void AddProgress(uint64_t bytes) const {
    if (options_.progress != nullptr) options_.progress->Add(bytes);
  }

  Env& env_;
  const std::string& store_directory_;
  WorkerPool& pool_;
  const PlanesCacheImportOptions& options_;
  const Kernels& kernels_;

  PlanesCache cache_;
  Manifest manifest_;
  std::optional<Generation> generation_;  // of the store, once it is there
  std::vector<Unit> units_;
  std::set<uint32_t> layers_imported_;
  PlanesCacheImportReport report_;
  std::atomic<uint64_t> bytes_read_{0};
  std::atomic<uint64_t> bytes_compared_{0};
};

void Importer::Warn(std::string text) {
  Log(LogLevel::kWarning, "{}", text);
  report_.warnings.push_back(std::move(text));
}

Result<void> Importer::ChooseRanks() {
  if (!options_.rank) return {};
  const uint32_t world = cache_.ranks.front().meta.world;
  if (*options_.rank >= world)
    return Fail(Status::Usage(Text("the planes cache has no rank {}", *options_.rank))
                    .File(cache_.directory)
                    .Expected(Text("0 to {}", world - 1)));
  std::erase_if(cache_.ranks, [this](const PlanesCacheRank& folder) {
    return folder.meta.rank != *options_.rank;
  });
  if (!cache_.ranks.empty()) return {};
  return Fail(Status::Usage(Text("there is no folder of rank {} here", *options_.rank))
                  .File(cache_.directory)
                  .Expected(Text("tp{}-rank{}", world, *options_.rank)));
}

// The generation that an import of this cache makes, if it is in the store already. What its
// manifest says then counts: layers that were moved are no longer in the cache.
Result<void> Importer::FindGeneration() {
  const PlanesCacheMeta& meta = cache_.ranks.front().meta;
  manifest_.scheme = kPlanesCacheScheme;
  manifest_.checkpoint_id = meta.checkpoint_id;
  manifest_.identity.source_fingerprint =
      Digest(Text("hotplane imported planes 1\ncheckpoint_id {}\n", meta.checkpoint_id));
  manifest_.identity.abi = kPlaneAbiName;
  manifest_.identity.zero_mode = meta.zero_mode;
  manifest_.identity.shard_world = meta.world;
  manifest_.identity.shard_axis = meta.world == 1 ? "none" : "intermediate";
  HP_TRY(Store::CheckPlace(env_, store_directory_));
  const std::string name = ToHex(GenerationOf(manifest_.identity));
  HP_ASSIGN(const FileStat there,
            env_.Stat(JoinPath(JoinPath(store_directory_, name), kManifestName)));
  if (there.type == FileType::kInvalid) return {};
  HP_ASSIGN(const Store store, Store::Open(env_, store_directory_));
  HP_ASSIGN(generation_, store.OpenGeneration(name, {.cancel = options_.cancel,
                                                     .stall_seconds = options_.stall_seconds}));
  return {};
}

bool IsMtp(const PlanesCacheImportOptions& options, uint32_t number) {
  return std::find(options.mtp_layers.begin(), options.mtp_layers.end(), number) !=
         options.mtp_layers.end();
}

Result<void> Importer::MakeManifest() {
  std::map<uint32_t, LayerGeometry> layers;
  for (const LayersGeometry::Range& range : options_.geometry.ranges)
    for (uint32_t number = range.first; number <= range.last; ++number)
      layers[number] = range.geometry;
  for (const PlanesCacheRank& folder : cache_.ranks)
    for (const auto& [number, files] : folder.layers) {
      if (options_.geometry.all) layers[number] = *options_.geometry.all;
      if (layers.contains(number)) continue;
      return Fail(Status::Data(Text("layer {} of the planes cache has no geometry", number))
                      .File(folder.path)
                      .Expected("layers that --layers-geometry names")
                      .Found(PlanesCacheFileName(number, "*"))
                      .Advice("name the geometry of all layers"));
    }
  for (const uint32_t number : options_.mtp_layers)
    if (!layers.contains(number) && !generation_)
      return Fail(Status::Usage(Text("there is no layer {} to be an MTP layer", number))
                      .File(cache_.directory));
  for (const bool mtp : {false, true})
    for (const auto& [number, geometry] : layers) {
      if (IsMtp(options_, number) != mtp) continue;
      ManifestLayer layer;
      layer.ordinal = static_cast<uint32_t>(manifest_.layers.size());
      layer.model_index = number;
      layer.mtp = mtp;
      layer.prefix = Text("layer{}.", number);
      layer.geometry = geometry;
      layer.source_format = SourceFormat::kPlanes;
      manifest_.layers.push_back(std::move(layer));
    }
  if (options_.config) {
    manifest_.top_k = options_.config->top_k;
    if (options_.config->swiglu_limit)
      manifest_.activation = {ActivationKind::kSiluGatedClamped, *options_.config->swiglu_limit};
  }
  return CheckManifest();
}

// Shapes that planes or layer files cannot have.
Result<void> Importer::CheckManifest() {
  const uint32_t world = manifest_.identity.shard_world;
  for (const ManifestLayer& layer : manifest_.layers) {
    if (layer.geometry.intermediate % (uint64_t{kDimensionMultiple} * world) != 0)
      return Fail(Status::Usage(Text("I={} is not what {} ranks can have",
                                     layer.geometry.intermediate, world))
                      .File(cache_.directory)
                      .Expected(Text("a multiple of {}", uint64_t{kDimensionMultiple} * world))
                      .Advice("--layers-geometry takes the shape of the whole layer, not of a "
                              "rank's share"));
    for (const Encoding encoding : kEncodings) {
      const Result<void> fits = CheckLayerGeometry(encoding, layer.geometry.OfShard(world));
      if (!fits)
        return Fail(
            Status::Usage("no layer file can have this geometry").Found(fits.error().what()));
    }
  }
  if (!generation_ && manifest_.layers.empty())
    return Fail(Status::Data("the planes cache has no layers")
                    .File(cache_.directory)
                    .Expected("files such as layer0.planes13.bin")
                    .Found("none"));
  HP_TRY(CheckConfig());
  return generation_ ? MatchStoredLayers() : Result<void>();
}

// Sizes tell E * H * I only: a config that says otherwise is the one way to see a wrong shape.
Result<void> Importer::CheckConfig() const {
  if (!options_.config) return {};
  const ModelConfig& config = *options_.config;
  for (const ManifestLayer& layer : manifest_.layers) {
    const LayerGeometry& g = layer.geometry;
    if (config.hidden.value_or(g.hidden) == g.hidden &&
        config.intermediate.value_or(g.intermediate) == g.intermediate &&
        config.experts.value_or(g.experts) == g.experts)
      continue;
    return Fail(
        Status::Data("the geometry and the config disagree")
            .Expected(Text("E={} H={} I={}, of the config", config.experts.value_or(g.experts),
                           config.hidden.value_or(g.hidden),
                           config.intermediate.value_or(g.intermediate)))
            .Found(Text("E={} H={} I={} for layer {}", g.experts, g.hidden, g.intermediate,
                        layer.model_index))
            .Advice("file sizes do not tell which is right: look at the checkpoint's "
                    "tensors and correct --layers-geometry, or leave out --config"));
  }
  return {};
}

Result<void> Importer::MatchStoredLayers() {
  const Manifest& stored = generation_->manifest();
  for (const ManifestLayer& layer : manifest_.layers) {
    const auto same =
        std::find_if(stored.layers.begin(), stored.layers.end(), [&](const ManifestLayer& other) {
          return other.model_index == layer.model_index && other.geometry == layer.geometry;
        });
    if (same != stored.layers.end()) continue;
    return Fail(
        Status::Data(Text("layer {} is not in the generation that earlier imports of this cache "
                          "made",
                          layer.model_index))
            .File(JoinPath(generation_->directory(), kManifestName))
            .Expected(Text("E={} H={} I={}", layer.geometry.experts, layer.geometry.hidden,
                           layer.geometry.intermediate))
            .Found("no such layer, or another geometry")
            .Advice(Text("give the geometry that it was imported with; or, if the cache has grown "
                         "or the geometry was wrong, import into another store. What --move took "
                         "out of the cache is in {} alone: `hotplane export {} --planes-cache DIR` "
                         "gives it back, delete nothing before",
                         store_directory_, store_directory_)));
  }
  const bool same_use = !options_.config || (stored.activation == manifest_.activation &&
                                             stored.top_k == manifest_.top_k);
  manifest_ = stored;
  if (!same_use)
    Warn("activation or top-k of the config differ from what the store says: the store's are kept");
  return {};
}

bool Importer::IsPresent(uint32_t ordinal, uint32_t rank, Encoding encoding) const {
  return generation_ &&
         generation_->ForRank(rank).Probe(ordinal, encoding).presence == Presence::kPresent;
}

// A rank whose folder was moved before is in the store, whole.
Result<void> Importer::CheckMissingRanks() const {
  if (options_.rank) return {};
  const uint32_t world = manifest_.identity.shard_world;
  std::string missing;
  for (uint32_t rank = 0; rank < world; ++rank) {
    const bool there =
        std::any_of(cache_.ranks.begin(), cache_.ranks.end(),
                    [rank](const PlanesCacheRank& folder) { return folder.meta.rank == rank; });
    const bool stored = std::all_of(manifest_.layers.begin(), manifest_.layers.end(),
                                    [&](const ManifestLayer& layer) {
                                      return IsPresent(layer.ordinal, rank, Encoding::kBase);
                                    });
    if (!there && !stored) missing += Text("{}{}", missing.empty() ? "" : ", ", rank);
  }
  if (missing.empty()) return {};
  return Fail(
      Status::Data("the planes cache lacks ranks")
          .File(cache_.directory)
          .Expected(Text("{} folders, tp{}-rank0 to tp{}-rank{}", world, world, world, world - 1))
          .Found(Text("no folder of rank {}", missing))
          .Advice("gather the folders of all ranks under one v2, or import what is here "
                  "with --rank R"));
}

Result<void> Importer::CheckSizes(const Unit& unit) const {
  const LayerGeometry g = ShardOf(unit);
  for (size_t part = 0; part < kPartCount; ++part) {
    const PlanesCacheFile& file = unit.files.parts[part];
    if (!file.there || (!IsBasePart(part) && !options_.delta)) continue;
    if (!IsBasePart(part) && Fp4Of(unit) == Encoding::kInvalid)
      return Fail(Status::Data("meta.json does not tell what the FP4 files are")
                      .File(JoinPath(unit.folder->path, kPlanesCacheMetaName))
                      .Expected("fp4_split: false (nibbles) or \"w4q\" (quintals)")
                      .Found("no fp4_split")
                      .Advice("--tiers base imports the rest"));
    const uint64_t expected = uint64_t{g.experts} * PartBytes(part, g, Fp4Of(unit));
    if (file.bytes == expected) continue;
    const LayerGeometry& whole = manifest_.layers[unit.ordinal].geometry;
    return Fail(
        Status::Data(Text("{} of layer {} has not the size that its geometry gives",
                          kPlanesCacheParts[part], unit.number))
            .File(PathOf(unit, part))
            .Expected(Text("{} bytes: E={} H={} I={}{}{}", expected, whole.experts, whole.hidden,
                           whole.intermediate,
                           unit.folder->meta.world > 1
                               ? Text(", one of {} ranks", unit.folder->meta.world)
                               : "",
                           IsBasePart(part)                         ? ""
                           : Fp4Of(unit) == Encoding::kDeltaQuintal ? ", quintals"
                                                                    : ", nibbles"))
            .Found(Text("{} bytes", file.bytes))
            .Advice(IsBasePart(part)
                        ? "give the model's --layers-geometry, or remove the files of a layer "
                          "that was not written to its end"
                        : "remove a file that was not written to its end; FP4 that is neither "
                          "nibbles nor quintals stays behind with --tiers base"));
  }
  return {};
}

// Which tiers there are; a tier is whole, or is in the store since a move that was cut short.
Result<void> Importer::CheckParts(Unit& unit) const {
  const auto there = [&unit](size_t part) { return unit.files.parts[part].there; };
  const auto missing = [&](size_t begin, size_t end) {
    for (size_t part = begin; part < end; ++part)
      if (!there(part)) return part;
    return end;
  };
  const size_t base = missing(0, kPlanesCacheBaseParts);
  const size_t fp4 = missing(kPlanesCacheBaseParts, kPartCount);
  const bool any_base = there(0) || there(1) || there(2) || there(3);
  const bool any_fp4 = options_.delta && (there(4) || there(5));
  unit.base_whole = base == kPlanesCacheBaseParts;
  unit.has_fp4 = any_fp4 && fp4 == kPartCount;
  const uint32_t rank = StoreRank(unit);
  const bool base_lacking = !unit.base_whole && !IsPresent(unit.ordinal, rank, Encoding::kBase);
  const bool fp4_lacking = any_fp4 && !unit.has_fp4 && !IsPresent(unit.ordinal, rank, Fp4Of(unit));
  if (!base_lacking && !fp4_lacking) return {};
  const size_t part = base_lacking ? base : fp4;
  return Fail(Status::Data(Text("layer {} of the planes cache lacks a part", unit.number))
                  .File(PathOf(unit, part))
                  .Expected("planes13, sc13, planes2 and sc2, and either both of fp13 and fp2 or "
                            "none")
                  .Found(any_base || any_fp4 ? Text("no {}", kPlanesCacheParts[part])
                                             : "nothing of this layer and rank")
                  .Advice("let the program that made the cache complete it, or remove the files "
                          "of this layer"));
}

Result<void> Importer::PlanUnit(const ManifestLayer& layer, const PlanesCacheRank& folder) {
  Unit unit;
  unit.ordinal = layer.ordinal;
  unit.number = layer.model_index;
  unit.folder = &folder;
  const auto found = folder.layers.find(layer.model_index);
  if (found != folder.layers.end()) unit.files = found->second;
  HP_TRY(CheckSizes(unit));
  HP_TRY(CheckParts(unit));
  units_.push_back(std::move(unit));
  return {};
}

// A layer that any rank has, all of them have. Layers that the geometry names and nobody has are
// layers of the model that were not built.
Result<void> Importer::PlanUnits() {
  for (const ManifestLayer& layer : manifest_.layers) {
    const bool cached = std::any_of(cache_.ranks.begin(), cache_.ranks.end(),
                                    [&layer](const PlanesCacheRank& folder) {
                                      return folder.layers.contains(layer.model_index);
                                    });
    if (!cached) continue;
    ++report_.layers_total;
    for (const PlanesCacheRank& folder : cache_.ranks) HP_TRY(PlanUnit(layer, folder));
  }
  if (report_.layers_total > 0 || (options_.move && generation_)) return {};
  return Fail(Status::Data("the planes cache has no layers")
                  .File(cache_.directory)
                  .Expected("files such as layer0.planes13.bin")
                  .Found("none"));
}

// Of a move within one file system the cache's files go as the store's come: what counts is the
// most that is there at once.
Result<void> Importer::CheckSpace() const {
  std::string place = store_directory_;
  FileStat stat{};
  for (;; place = ParentPath(place)) {
    HP_ASSIGN(stat, env_.Stat(place));
    if (stat.type == FileType::kDirectory) break;
    if (stat.type != FileType::kInvalid) return {};  // no folder can be made: that is told later
  }
  HP_ASSIGN(const FileStat cache, env_.Stat(cache_.ranks.front().path));
  const bool frees = options_.move && cache.device == stat.device;
  uint64_t needed = 0;
  uint64_t written = 0;
  uint64_t freed = 0;
  for (const Unit& unit : units_) {
    for (const Encoding encoding : {Encoding::kBase, Fp4Of(unit)}) {
      const bool wanted = encoding == Encoding::kBase ? unit.base_whole : unit.has_fp4;
      if (wanted && !IsPresent(unit.ordinal, StoreRank(unit), encoding))
        written += PlanLayerLayout(encoding, ShardOf(unit)).file_bytes;
    }
    needed = std::max(needed, written - std::min(written, freed));
    for (const PlanesCacheFile& file : unit.files.parts) freed += frees ? file.bytes : 0;
  }
  HP_ASSIGN(const uint64_t free_bytes, env_.FreeBytes(place));
  if (needed <= free_bytes) return {};
  return Fail(Status::Capacity("the layers to import do not fit on the disk")
                  .File(store_directory_)
                  .Expected(Text("{} free ({} bytes)", FormatBytes(needed), needed))
                  .Found(Text("{} free ({} bytes)", FormatBytes(free_bytes), free_bytes))
                  .Advice("free space, or choose another store; --move within one file system "
                          "needs little more than one layer"));
}

Result<bool> Importer::IsMissing(const Generation& of_rank, const Unit& unit,
                                 Encoding encoding) const {
  const TierProbe probe = of_rank.Probe(unit.ordinal, encoding);
  if (probe.presence == Presence::kUnreadable)
    return Fail(
        UnreadableFile(*probe.reason, Text("layer {} ({})", unit.ordinal, EncodingName(encoding))));
  if (probe.presence == Presence::kDamaged)
    Log(LogLevel::kWarning, "layer {} ({}) is damaged and is imported again: {}", unit.ordinal,
        EncodingName(encoding), probe.reason->what());
  return probe.presence != Presence::kPresent;
}

Result<void> Importer::ImportUnit(const Unit& unit) {
  const Generation of_rank = generation_->ForRank(StoreRank(unit));
  std::unique_ptr<FileLock> lock;
  if (!options_.no_lock) {
    HP_ASSIGN(lock, of_rank.LockLayer(unit.ordinal, LockWait::kBlock, Waiting()));
  }
  bool base = false;
  bool fp4 = false;
  if (unit.base_whole) {
    HP_ASSIGN(base, IsMissing(of_rank, unit, Encoding::kBase));
  }
  if (unit.has_fp4) {
    HP_ASSIGN(fp4, IsMissing(of_rank, unit, Fp4Of(unit)));
  }
  if (!options_.move) HP_TRY(CompareSample(of_rank, unit));
  if (!base && !fp4) return {};
  HP_TRY(CopyTiers(of_rank, unit, base, fp4));
  layers_imported_.insert(unit.ordinal);
  return {};
}

Result<void> Importer::CopyTiers(const Generation& of_rank, const Unit& unit, bool base, bool fp4) {
  std::unique_ptr<LayerFileWriter> base_writer;
  std::unique_ptr<LayerFileWriter> fp4_writer;
  std::optional<LayerFile> stored_base;
  if (base) {
    HP_ASSIGN(base_writer, of_rank.CreateLayer(unit.ordinal, Encoding::kBase));
  } else {
    HP_ASSIGN(stored_base, of_rank.OpenLayer(unit.ordinal, Encoding::kBase));
  }
  if (fp4) {
    HP_ASSIGN(fp4_writer, of_rank.CreateLayer(unit.ordinal, Fp4Of(unit)));
  }
  std::vector<size_t> parts;  // largest first
  if (fp4) parts = {4, 5};
  if (base) parts.insert(parts.end(), {0, 2, 1, 3});
  HP_TRY(pool_.ParallelFor(parts.size(), [&](size_t i, size_t) {
    LayerFileWriter& writer = IsBasePart(parts[i]) ? *base_writer : *fp4_writer;
    return CopyPart(of_rank, unit, parts[i], writer, stored_base ? &*stored_base : nullptr);
  }));
  for (const auto& writer : {base_writer.get(), fp4_writer.get()}) {
    if (writer == nullptr) continue;
    HP_TRY(writer->Publish());
    report_.bytes_built += writer->layout().file_bytes;
  }
  return {};
}

// The digest that lies beside the file; empty: none does.
Result<std::string> Importer::ReadDigest(const Unit& unit, size_t part) const {
  if (!unit.files.parts[part].digest) return std::string();
  const std::string path = PathOf(unit, part) + std::string(kPlanesCacheDigestSuffix);
  HP_ASSIGN(const std::vector<std::byte> bytes, ReadWholeFile(env_, path, kDigestBytesMax));
  std::string text(AsText(bytes));
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  constexpr size_t kDigits = 64;
  if (text.size() == kDigits && text.find_first_not_of("0123456789abcdef") == std::string::npos)
    return text;
  return Fail(Status::Data("a digest of the planes cache is malformed")
                  .File(path)
                  .Expected("64 lower-case hexadecimal digits")
                  .Found(Text("\"{}\"", PrintableText(text, 80)))
                  .Advice("remove it to import the file without this check, or the files of the "
                          "layer"));
}

Result<void> Importer::CheckPiece(const Unit& unit, size_t part, uint32_t expert,
                                  std::span<const std::byte> piece,
                                  std::span<const std::byte> codes, std::vector<std::byte>& scratch,
                                  const std::string& path) const {
  const uint64_t offset = uint64_t{expert} * piece.size();
  if (part == 1 || part == 3) {
    const auto bad = std::find(piece.begin(), piece.end(), std::byte{kE8m0NaN});
    if (bad == piece.end()) return {};
    return Fail(
        Status::Data(Text("a scale of expert {} in layer {} is not a number", expert, unit.number))
            .File(path)
            .At(offset + static_cast<uint64_t>(bad - piece.begin()))
            .Expected("0 to 254")
            .Found("255")
            .Advice("remove the files of this layer and let the program that made them "
                    "write them again"));
  }
  if (IsBasePart(part)) return {};
  const LayerGeometry g = ShardOf(unit);
  const size_t n = OfW13(part) ? g.n13() : g.n2();
  const size_t k = OfW13(part) ? g.k13() : g.k2();
  bool fits = false;
  if (Fp4Of(unit) == Encoding::kDeltaQuintal) {
    scratch.resize(NibblePlaneBytes(n, k));
    fits = kernels_.merge(codes.data(), piece.data(), n, k, scratch.data());
  } else {
    scratch.resize(codes.size());
    kernels_.derive_codes(piece.data(), n, k, scratch.data());
    fits = std::equal(codes.begin(), codes.end(), scratch.begin());
  }
  if (fits) return {};
  return Fail(Status::Data(Text("{} of expert {} in layer {} does not fit its base codes",
                                kPlanesCacheParts[part], expert, unit.number))
                  .File(path)
                  .At(offset)
                  .Expected(Text("{} of the weights that {} is of",
                                 Fp4Of(unit) == Encoding::kDeltaQuintal ? "quintals" : "nibbles",
                                 OfW13(part) ? "planes13" : "planes2"))
                  .Found("others")
                  .Advice("the two were not made from the same weights, or one is damaged: remove "
                          "the files of this layer, or leave the FP4 behind with --tiers base"));
}

Result<void> Importer::CopyPart(const Generation& of_rank, const Unit& unit, size_t part,
                                LayerFileWriter& writer, const LayerFile* stored_base) {
  const std::string path = PathOf(unit, part);
  HP_ASSIGN(const std::unique_ptr<File> file, env_.Open(path, OpenMode::kRead));
  HP_ASSIGN(const std::string digest, ReadDigest(unit, part));
  const LayerGeometry g = ShardOf(unit);
  const size_t codes_part = OfW13(part) ? 0 : 2;
  std::unique_ptr<File> codes_file;
  std::vector<std::byte> piece(PartBytes(part, g, Fp4Of(unit)));
  std::vector<std::byte> codes;
  std::vector<std::byte> scratch;
  if (!IsBasePart(part)) {
    codes.resize(PartBytes(codes_part, g, Fp4Of(unit)));
    if (stored_base == nullptr) {
      HP_ASSIGN(codes_file, env_.Open(PathOf(unit, codes_part), OpenMode::kRead));
    }
  }
  Sha256 sha;
  uint64_t reread_bytes = 0;
  for (uint32_t expert = 0; expert < g.experts; ++expert) {
    if (options_.cancel != nullptr) HP_TRY(options_.cancel->Check());
    HP_TRY(ReadFully(*file, uint64_t{expert} * piece.size(), piece));
    if (codes_file != nullptr) {
      HP_TRY(ReadFully(*codes_file, uint64_t{expert} * codes.size(), codes));
    } else if (!codes.empty()) {
      HP_TRY(ReadPiece(of_rank.env(), *stored_base, kPlanesCacheParts[codes_part], expert, codes,
                       reread_bytes));
    }
    HP_TRY(CheckPiece(unit, part, expert, piece, codes, scratch, path));
    if (!digest.empty()) sha.Update(piece);
    HP_TRY(writer.WritePiece(kPlanesCacheParts[part], expert, piece));
    bytes_read_ += piece.size();
    AddProgress(piece.size());
  }
  if (digest.empty()) return {};
  const std::string found = sha.FinishHex();
  if (found == digest) return {};
  return Fail(Status::Data(Text("{} of layer {} does not match its digest", kPlanesCacheParts[part],
                                unit.number))
                  .File(path)
                  .Expected(Text("SHA-256 {}", digest))
                  .Found(found)
                  .Advice("remove the files of this layer and let the program that made them "
                          "write them again"));
}

// What to do about a file of the store that is damaged; `whole`: the cache has all parts of it.
const char* DamageAdvice(bool whole) {
  return whole ? "nothing of this layer was removed from the cache; remove this file and import "
                 "again"
               : "keep this file: the cache no longer has all parts of this layer, an earlier "
                 "--move removed some; take them from a copy of the cache, or build the layer "
                 "from its checkpoint";
}

// What is there already is compared in one expert: a generation is known by what the cache calls
// its checkpoint, and nobody vouches for that.
Result<void> Importer::CompareSample(const Generation& of_rank, const Unit& unit) const {
  const LayerGeometry g = ShardOf(unit);
  const uint32_t expert = unit.ordinal % g.experts;
  uint64_t reread_bytes = 0;
  std::vector<std::byte> stored;
  std::vector<std::byte> cached;
  std::array<std::optional<LayerFile>, 2> files;
  for (size_t part = 0; part < kPartCount; ++part) {
    if (!unit.files.parts[part].there || (!IsBasePart(part) && !options_.delta)) continue;
    const Encoding encoding = IsBasePart(part) ? Encoding::kBase : Fp4Of(unit);
    if (of_rank.Probe(unit.ordinal, encoding).presence != Presence::kPresent) continue;
    std::optional<LayerFile>& file = files[IsBasePart(part) ? 0 : 1];
    if (!file) {
      HP_ASSIGN(file, of_rank.OpenLayer(unit.ordinal, encoding));
    }
    stored.resize(PartBytes(part, g, Fp4Of(unit)));
    cached.resize(stored.size());
    Result<void> read =
        ReadPiece(env_, *file, kPlanesCacheParts[part], expert, stored, reread_bytes);
    if (!read && read.error().code() == StatusCode::kData)
      return Fail(std::move(read).error().Advice(
          DamageAdvice(IsBasePart(part) ? unit.base_whole : unit.has_fp4)));
    HP_TRY(read);
    HP_ASSIGN(const std::unique_ptr<File> source, env_.Open(PathOf(unit, part), OpenMode::kRead));
    HP_TRY(ReadFully(*source, uint64_t{expert} * cached.size(), cached));
    if (stored == cached) continue;
    return Fail(
        Status::Data(Text("the store has layer {} with other bytes than this cache", unit.ordinal))
            .File(PathOf(unit, part))
            .At(uint64_t{expert} * cached.size())
            .Expected(Text("what {} has", file->file().path()))
            .Found("other bytes")
            .Advice("two caches that name the same checkpoint differ: import one of them "
                    "into another store"));
  }
  return {};
}

Result<void> Importer::CompareChunks(const Unit& unit, const LayerFile& file,
                                     const std::array<std::unique_ptr<File>, kPartCount>& cached,
                                     size_t begin, size_t end) {
  if (options_.cancel != nullptr) HP_TRY(options_.cancel->Check());
  const LayerLayout& layout = file.layout();
  const bool whole =
      std::all_of(layout.sections.begin(), layout.sections.end(), [&](const Section& section) {
        const auto role =
            std::find(kPlanesCacheParts.begin(), kPlanesCacheParts.end(), section.role);
        return role == kPlanesCacheParts.end() ||
               cached[static_cast<size_t>(role - kPlanesCacheParts.begin())] != nullptr;
      });
  std::vector<std::byte> stored(kChunkBytes);
  std::vector<std::byte> source(kChunkBytes);
  for (size_t i = begin; i < end; ++i) {
    const Chunk& chunk = file.chunks()[i];
    const std::span<std::byte> bytes = std::span(stored).first(chunk.bytes);
    HP_TRY(ReadFully(file.file(), chunk.offset, bytes));
    if (const uint64_t found = Checksum64(bytes); found != file.checksums()[i])
      return Fail(file.ChunkError(i, found).Advice(DamageAdvice(whole)));
    bytes_compared_ += chunk.bytes;
    AddProgress(chunk.bytes);
    if (chunk.section < 0) continue;
    const Section& section = layout.sections[static_cast<size_t>(chunk.section)];
    const auto role = std::find(kPlanesCacheParts.begin(), kPlanesCacheParts.end(), section.role);
    HP_CHECK(role != kPlanesCacheParts.end());
    const auto part = static_cast<size_t>(role - kPlanesCacheParts.begin());
    if (cached[part] == nullptr) continue;
    const uint64_t offset = chunk.expert * section.expert_bytes +
                            (chunk.offset - layout.PieceOffset(section, chunk.expert));
    const std::span<std::byte> other = std::span(source).first(chunk.bytes);
    HP_TRY(ReadFully(*cached[part], offset, other));
    if (std::equal(bytes.begin(), bytes.end(), other.begin())) continue;
    return Fail(
        Status::Data(Text("the store has layer {} with other bytes than this cache", unit.ordinal))
            .File(cached[part]->path())
            .At(offset)
            .Expected(Text("what {} has at {}", file.file().path(), chunk.offset))
            .Found("other bytes")
            .Advice(whole ? "nothing of this layer was removed from the cache; two caches that "
                            "name the same checkpoint differ: import one of them into another "
                            "store"
                          : "delete neither: the cache no longer has all parts of this layer, an "
                            "earlier --move removed some; what is left of it is another model's, "
                            "or damaged"));
  }
  return {};
}

Result<void> Importer::CompareFile(const Generation& of_rank, const Unit& unit, Encoding encoding) {
  HP_ASSIGN(const LayerFile file, of_rank.OpenLayer(unit.ordinal, encoding));
  // From the disk, not from what the writing left in memory.
  file.file().DropCache(0, 0);
  std::array<std::unique_ptr<File>, kPartCount> cached;
  for (size_t part = 0; part < kPartCount; ++part) {
    if (!unit.files.parts[part].there) continue;
    if (IsBasePart(part) != (encoding == Encoding::kBase)) continue;
    HP_ASSIGN(cached[part], env_.Open(PathOf(unit, part), OpenMode::kRead));
  }
  const size_t count = file.chunks().size();
  return pool_.ParallelFor((count + kCompareChunks - 1) / kCompareChunks, [&](size_t i, size_t) {
    return CompareChunks(unit, file, cached, i * kCompareChunks,
                         std::min(count, (i + 1) * kCompareChunks));
  });
}

// The names of what was published: an import that was killed may have left them in memory only.
Result<void> Importer::MakeStoreDurable() const {
  HP_TRY(env_.SyncDirectory(generation_->directory()));
  HP_TRY(env_.SyncDirectory(store_directory_));
  return env_.SyncDirectory(ParentPath(store_directory_));
}

Result<void> Importer::MoveUnit(const Unit& unit) {
  const Generation of_rank = generation_->ForRank(StoreRank(unit));
  bool base = false;
  bool fp4 = false;
  bool digests = false;
  for (size_t part = 0; part < kPartCount; ++part) {
    (IsBasePart(part) ? base : fp4) |= unit.files.parts[part].there;
    digests |= unit.files.parts[part].digest;
  }
  if (!base && !fp4 && !digests) return {};
  if (base) HP_TRY(CompareFile(of_rank, unit, Encoding::kBase));
  if (fp4) HP_TRY(CompareFile(of_rank, unit, Fp4Of(unit)));
  HP_TRY(MakeStoreDurable());
  for (size_t part = 0; part < kPartCount; ++part) {
    const PlanesCacheFile& file = unit.files.parts[part];
    const std::string path = PathOf(unit, part);
    if (file.digest) {
      HP_TRY(env_.Remove(path + std::string(kPlanesCacheDigestSuffix)));
      ++report_.files_removed;
    }
    if (!file.there) continue;
    HP_TRY(env_.Remove(path));
    ++report_.files_removed;
    report_.bytes_removed += file.bytes;
  }
  return env_.SyncDirectory(unit.folder->path);
}

// Whether a --move has ended here; one that was killed at its end is ended.
Result<bool> Importer::WasMoved(const std::string& cache_directory) {
  HP_ASSIGN(const FileStat cache, env_.Stat(cache_directory));
  HP_ASSIGN(const FileStat stat, env_.Stat(store_directory_));
  if (!options_.move || cache.type != FileType::kDirectory || stat.type != FileType::kDirectory)
    return false;
  HP_ASSIGN(const Store store, Store::Open(env_, store_directory_));
  HP_ASSIGN(const std::vector<Digest128> generations, store.ListGenerations());
  for (const Digest128& id : generations) {
    const auto generation =
        store.OpenGeneration(ToHex(id), {.cancel = options_.cancel, .read_only = true});
    if (!generation || generation->manifest().scheme != kPlanesCacheScheme) continue;
    report_.generation = id;
    report_.shard_world = generation->world();
    HP_TRY(RemoveFromPlanesCache(env_, cache_directory, Waiting(), [&] {
      return RemoveEmptyPlanesCacheFolders(env_, cache_directory);
    }));
    HP_ASSIGN(const std::vector<std::string> left, env_.List(cache_directory));
    return std::all_of(left.begin(), left.end(),
                       [](const std::string& name) { return name == kPlanesCacheLockName; });
  }
  return false;
}

// Where all layers are gone. What is none of the cache's stays, and with it its folder.
Result<void> Importer::RemoveEmptyFolders() {
  for (const PlanesCacheRank& folder : cache_.ranks) {
    HP_ASSIGN(const std::vector<std::string> names, env_.List(folder.path));
    if (names.size() != 1 || names.front() != kPlanesCacheMetaName) {
      Warn(Text("{} stays: there are other files in it", folder.path));
      continue;
    }
    HP_TRY(env_.Remove(JoinPath(folder.path, kPlanesCacheMetaName)));
    ++report_.files_removed;
    HP_TRY(env_.SyncDirectory(folder.path));
  }
  return RemoveEmptyPlanesCacheFolders(env_, cache_.directory);
}

Result<PlanesCacheImportReport> Importer::Run(const std::string& cache_directory) {
  const auto start = Clock::now();
  Result<PlanesCache> cache = ScanPlanesCache(env_, cache_directory, options_.key_prefix);
  if (!cache) {
    HP_ASSIGN(report_.moved_before, WasMoved(cache_directory));
    if (!report_.moved_before) return Fail(std::move(cache).error());
    return std::move(report_);
  }
  cache_ = *std::move(cache);
  HP_TRY(ChooseRanks());
  HP_TRY(FindGeneration());
  HP_TRY(MakeManifest());
  HP_TRY(CheckMissingRanks());
  HP_TRY(PlanUnits());
  HP_TRY(CheckSpace());
  if (manifest_.checkpoint_id.empty())
    Warn(
        "the planes cache does not name its checkpoint (no ckpt_id in meta.json): another one "
        "without a name would be taken for the same model");
  if (!options_.config && !generation_)
    Warn(
        "the planes cache does not tell the activation: silu(gate) * up is assumed; "
        "--config CONFIG.json tells it");
  for (const PlanesCacheRank& folder : cache_.ranks)
    if (!folder.others.empty())
      Warn(Text("{} in {} {} no part of a planes cache and not imported, {} first",
                Counted(folder.others.size(), "files"), folder.path,
                folder.others.size() == 1 ? "is" : "are", PrintableText(folder.others.front())));
  if (!generation_) {
    HP_ASSIGN(generation_,
              Store::OpenOrCreateGeneration(env_, store_directory_, manifest_, Waiting()));
  }
  report_.generation = generation_->id();
  report_.shard_world = generation_->world();
  uint64_t bytes = 0;
  for (const Unit& unit : units_)
    for (size_t part = 0; part < kPartCount; ++part)
      if (IsBasePart(part) ? unit.base_whole : unit.has_fp4)
        bytes += unit.files.parts[part].bytes * (options_.move ? 2 : 1);
  if (options_.progress != nullptr) options_.progress->Begin("importing", bytes);
  for (const Unit& unit : units_) {
    HP_TRY(ImportUnit(unit));
    if (options_.move) HP_TRY(MoveUnit(unit));
  }
  if (options_.move)
    HP_TRY(RemoveFromPlanesCache(env_, cache_.directory, Waiting(),
                                 [this] { return RemoveEmptyFolders(); }));
  report_.layers_imported = static_cast<uint32_t>(layers_imported_.size());
  report_.layers_attached = report_.layers_total - report_.layers_imported;
  report_.bytes_read = bytes_read_;
  report_.bytes_compared = bytes_compared_;
  report_.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return std::move(report_);
}

Result<LayersGeometry::Range> ParseRange(std::string_view text, std::string_view whole) {
  const size_t colon = text.find(':');
  const std::string_view numbers = text.substr(0, colon);
  const size_t dash = numbers.find('-');
  const auto first = ParseDecimal(numbers.substr(0, dash));
  const auto last = dash == std::string_view::npos ? first : ParseDecimal(numbers.substr(dash + 1));
  if (colon == std::string_view::npos || !first || !last || *last < *first ||
      *last >= kDimensionMax)
    return Fail(Status::Usage(Text("'{}' is not a geometry of layers", whole))
                    .Expected("GEOMETRY, or A-B:GEOMETRY;C:GEOMETRY, where GEOMETRY is E,H,I or "
                              "a name such as ds4-flash")
                    .Found(std::string(text)));
  HP_ASSIGN(const LayerGeometry geometry, ParseGeometry(text.substr(colon + 1)));
  return LayersGeometry::Range{*first, *last, geometry};
}

}  // namespace

Result<LayersGeometry> ParseLayersGeometry(std::string_view text) {
  LayersGeometry layers;
  if (text.find(':') == std::string_view::npos) {
    HP_ASSIGN(layers.all, ParseGeometry(text));
    return layers;
  }
  for (std::string_view rest = text;;) {
    const size_t semicolon = rest.find(';');
    HP_ASSIGN(const LayersGeometry::Range range, ParseRange(rest.substr(0, semicolon), text));
    if (!layers.ranges.empty() && range.first <= layers.ranges.back().last)
      return Fail(Status::Usage(Text("'{}' names layers twice or out of order", text))
                      .Found(std::string(rest.substr(0, semicolon))));
    layers.ranges.push_back(range);
    if (semicolon == std::string_view::npos) return layers;
    rest.remove_prefix(semicolon + 1);
  }
}

Result<std::vector<uint32_t>> ParseLayerNumbers(std::string_view text) {
  const size_t dash = text.find('-');
  const auto first = ParseDecimal(text.substr(0, dash));
  const auto last = dash == std::string_view::npos ? first : ParseDecimal(text.substr(dash + 1));
  if (!first || !last || *last < *first || *last >= kDimensionMax)
    return Fail(Status::Usage(Text("'{}' is not a number of a layer, or a range", text))
                    .Expected("N or A-B, as in the file names"));
  std::vector<uint32_t> numbers;
  for (uint32_t number = *first; number <= *last; ++number) numbers.push_back(number);
  return numbers;
}

Result<void> CheckCacheApart(const std::string& cache_directory,
                             const std::string& store_directory) {
  std::error_code error;
  const auto cache = std::filesystem::weakly_canonical(cache_directory, error);
  const auto store = std::filesystem::weakly_canonical(store_directory, error);
  const auto [a, b] = std::mismatch(cache.begin(), cache.end(), store.begin(), store.end());
  if (!error && a != cache.end() && b != store.end()) return {};
  return Fail(Status::Usage("the store and the planes cache lie inside each other")
                  .File(store_directory)
                  .Found(cache_directory)
                  .Advice("name another folder for the store"));
}

Result<PlanesCacheImportReport> ImportPlanesCache(Env& env, const std::string& cache_directory,
                                                  const std::string& store_directory,
                                                  WorkerPool& pool,
                                                  const PlanesCacheImportOptions& options) {
  HP_CHECK(options.delta || !options.move);
  const Kernels* kernels = options.kernels;
  if (kernels == nullptr) {
    HP_ASSIGN(kernels, SelectKernels(std::nullopt));
  }
  return Importer(env, store_directory, pool, options, *kernels).Run(cache_directory);
}

}  // namespace hotplane
