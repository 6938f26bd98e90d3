#include "cli/inspect_file.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes_text.h"
#include "base/format_text.h"
#include "base/json_text.h"
#include "base/number_text.h"
#include "base/units.h"
#include "boot/source_stamp.h"
#include "cli/console.h"
#include "format/manifest.h"
#include "store/paths.h"
#include "store/store.h"

namespace hotplane::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kTextBytesMax = 64u << 20;

// "xxh3-128=..." of a sealed text whose seal was found right.
std::string SealOf(std::string_view text) {
  constexpr std::string_view kBefore = "xxh3-128=";
  const size_t begin = text.find(kBefore) + kBefore.size();
  return std::string(text.substr(begin, text.find(' ', begin) - begin));
}

class FileInspector {
 public:
  FileInspector(Env& env, const std::string& path)
      : env_(env),
        path_(path),
        absolute_(std::filesystem::absolute(path).lexically_normal()),
        name_(absolute_.filename()),
        folder_(absolute_.parent_path()),
        generation_(ParseGenerationName(folder_.filename().string())) {}

  // False where it is no file of a store.
  Result<bool> Run();

  const Json& json() const { return json_; }
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  bool Begins(std::string_view text) const { return AsText(begin_).starts_with(text); }
  Result<void> InspectManifest();
  Result<void> InspectSourceRecord();
  Result<void> InspectSourceStamp();
  Result<void> InspectLayerFile();
  Result<void> InspectTemporary(const TemporaryParts& parts);
  bool IsWhole(const TemporaryParts& parts) const;
  Result<void> InspectLock();
  bool IsLock() const;
  Result<void> CheckGeneration(const Digest128& found) const;
  Result<void> CheckName(const std::string& own_name) const;
  Result<void> CheckPlace(const LayerLayout& layout) const;
  std::string HolderText(const std::string& lock_path);
  void TellLayerFile(const LayerLayout& layout, std::string_view header_checksum);

  Env& env_;
  const std::string path_;
  const std::filesystem::path absolute_;
  const std::string name_;
  const std::filesystem::path folder_;
  const std::optional<Digest128> generation_;  // whose folder the file lies in
  FileStat stat_{};
  std::vector<std::byte> begin_;
  Json json_;
  std::vector<std::string> lines_;
};

Result<bool> FileInspector::Run() {
  HP_ASSIGN(stat_, env_.Stat(path_));
  HP_ASSIGN(const std::unique_ptr<File> file, env_.Open(path_, OpenMode::kRead));
  begin_.resize(std::min<uint64_t>(stat_.bytes, 64));
  HP_TRY(ReadFully(*file, 0, begin_));
  const auto layer = ParseLayerName(name_);
  const auto temporary = ParseTemporaryName(name_);
  Result<void> inspected;
  if (IsLock()) {
    inspected = InspectLock();
  } else if (temporary) {
    inspected = InspectTemporary(*temporary);
  } else if (Begins("hotplane-manifest ") ||
             (generation_ && (name_ == kManifestName || name_ == kDoomedManifestName))) {
    inspected = InspectManifest();
  } else if (Begins("hotplane-source ") ||
             (generation_ && layer && layer->encoding == Encoding::kInvalid)) {
    inspected = InspectSourceRecord();
  } else if (Begins("hotplane source stamp ") || (generation_ && name_ == kSourceStampName)) {
    inspected = InspectSourceStamp();
  } else if (Begins({kLayerMagic, sizeof(kLayerMagic)}) || (generation_ && layer)) {
    inspected = InspectLayerFile();
  } else if (generation_) {
    return Fail(Status::Usage("this is no file of a store, though it lies in a generation's folder")
                    .File(path_)
                    .Expected("manifest, source-stamp, layer-NNNN.*, or a temporary of these")
                    .Advice("nothing reads or removes it; gc keeps the folder because of it"));
  } else {
    return false;
  }
  if (!inspected) return Fail(inspected.error());
  return true;
}

bool FileInspector::IsLock() const {
  if (folder_.filename() != kLocksName) return false;
  const bool ours =
      name_ == kUsersLockName || name_ == kGenerationLockName || ParseLayerLock(name_).has_value();
  return ours && ParseGenerationName(folder_.parent_path().filename().string()).has_value();
}

// A folder of another name may be a copy's: only a generation's own name tells.
Result<void> FileInspector::CheckGeneration(const Digest128& found) const {
  if (!generation_ || *generation_ == found) return {};
  return Fail(Status::Data("the file belongs to another generation than its folder")
                  .File(path_)
                  .Expected(ToHex(*generation_))
                  .Found(ToHex(found)));
}

// Also where there is nothing else to compare with. A name that no file of a store has is
// anybody's.
Result<void> FileInspector::CheckName(const std::string& own_name) const {
  const bool of_a_store = ParseLayerName(name_) || name_ == kManifestName ||
                          name_ == kDoomedManifestName || name_ == kSourceStampName;
  if (!of_a_store || name_ == own_name) return {};
  return Fail(Status::Data("the file's content belongs to another name")
                  .File(path_)
                  .Expected(own_name)
                  .Found(name_));
}

Result<void> FileInspector::InspectManifest() {
  HP_ASSIGN(const std::vector<std::byte> bytes, ReadWholeFile(env_, path_, kTextBytesMax));
  HP_ASSIGN(const Manifest manifest, DecodeManifest(AsText(bytes), path_));
  const Digest128 id = GenerationOf(manifest.identity);
  HP_TRY(CheckGeneration(id));
  const bool doomed = name_ == kDoomedManifestName;
  HP_TRY(CheckName(doomed ? kDoomedManifestName : kManifestName));
  json_ = {{"kind", "manifest"},
           {"good", true},
           {"generation", ToHex(id)},
           {"file_bytes", bytes.size()},
           {"seal", SealOf(AsText(bytes))},
           {"digest", ToHex(Digest(bytes))},
           {"doomed", doomed},
           {"model", DescribeModel(manifest)},
           {"scheme", manifest.scheme},
           {"source_fingerprint", ToHex(manifest.identity.source_fingerprint)},
           {"zero_mode", ZeroModeName(manifest.identity.zero_mode)},
           {"world", manifest.identity.shard_world},
           {"layers_total", manifest.layers.size()}};
  if (!manifest.checkpoint_id.empty()) json_["checkpoint_id"] = manifest.checkpoint_id;
  const uint32_t world = manifest.identity.shard_world;
  lines_ = {Text("manifest  of generation {}{}, {} bytes, good", ToHex(id),
                 world > 1 ? Text(", {} ranks", world) : "", bytes.size()),
            Text("  {}, scheme {}, zero mode {}", DescribeModel(manifest), manifest.scheme,
                 ZeroModeName(manifest.identity.zero_mode)),
            Text("  seal xxh3-128 {}, right", SealOf(AsText(bytes))),
            Text("  digest xxh3-128 {}, which layer files cite", ToHex(Digest(bytes)))};
  if (!manifest.checkpoint_id.empty())
    lines_.push_back(Text("  imported of the checkpoint {}", Printable(manifest.checkpoint_id)));
  if (doomed) lines_.push_back("  gc was told to remove this generation: the next gc goes on");
  return {};
}

Result<void> FileInspector::InspectSourceRecord() {
  HP_ASSIGN(const std::vector<std::byte> bytes, ReadWholeFile(env_, path_, kTextBytesMax));
  HP_ASSIGN(const SourceRecord record, DecodeSourceRecord(AsText(bytes), path_));
  HP_TRY(CheckGeneration(record.generation));
  HP_TRY(CheckName(SourceRecordName(record.layer)));
  json_ = {{"kind", "source record"},
           {"good", true},
           {"generation", ToHex(record.generation)},
           {"layer", record.layer},
           {"file_bytes", bytes.size()},
           {"seal", SealOf(AsText(bytes))},
           {"tensors", record.tensors.size()}};
  lines_ = {Text("source record  of layer {}, {}, {} bytes, good", record.layer,
                 Counted(record.tensors.size(), "tensors"), bytes.size()),
            Text("  generation {}", ToHex(record.generation)),
            Text("  seal xxh3-128 {}, right", SealOf(AsText(bytes))),
            "  `hotplane verify --source CHECKPOINT` compares the tensors' digests with it"};
  return {};
}

Result<void> FileInspector::InspectSourceStamp() {
  HP_ASSIGN(const std::vector<std::byte> bytes, ReadWholeFile(env_, path_, kTextBytesMax));
  HP_ASSIGN(const std::vector<StampedShard> shards, ParseSourceStamp(AsText(bytes), path_));
  HP_TRY(CheckName(kSourceStampName));
  json_ = {{"kind", "source stamp"}, {"good", true}};
  if (generation_) json_["generation"] = ToHex(*generation_);
  json_["file_bytes"] = bytes.size();
  json_["shards"] = Json::array();
  uint64_t shard_bytes = 0;
  for (const StampedShard& shard : shards) {
    shard_bytes += shard.bytes;
    json_["shards"].push_back({{"name", shard.name},
                               {"bytes", shard.bytes},
                               {"modified_ns", shard.modified_ns},
                               {"inode", shard.inode}});
  }
  lines_ = {Text("source stamp  of {}, {}, well-formed", Counted(shards.size(), "shards"),
                 FormatBytes(shard_bytes)),
            "  it has no checksum and needs none: a boot with a checkpoint that looks otherwise "
            "reads its headers"};
  for (const StampedShard& shard : shards)
    lines_.push_back(Text("  {}  {} bytes", Printable(shard.name), shard.bytes));
  return {};
}

// Whether the generation takes it for what its name says.
Result<void> FileInspector::CheckPlace(const LayerLayout& layout) const {
  HP_TRY(CheckGeneration(layout.generation));
  const bool sharded = layout.shard_world > 1;
  HP_TRY(CheckName(LayerFileName(
      layout.layer, sharded ? std::optional(layout.shard_rank) : std::nullopt, layout.encoding)));
  const auto named = ParseLayerName(name_);
  if (!generation_ || !named || named->encoding == Encoding::kInvalid) return {};
  const Result<Store> store = Store::Open(env_, folder_.parent_path());
  if (!store) return {};
  const auto generation = store->OpenGeneration(ToHex(*generation_), {.read_only = true});
  if (!generation) return {};  // without its manifest there is nothing to compare with
  const uint32_t rank = named->rank.value_or(0);
  if (rank >= generation->world() || named->rank.has_value() != (generation->world() > 1))
    return Fail(Status::Data("no rank of this generation has a file of this name")
                    .File(path_)
                    .Expected(Text("files of {}", Counted(generation->world(), "ranks"))));
  const TierProbe probe = generation->ForRank(rank).Probe(named->layer, named->encoding);
  if (probe.reason) return Fail(*probe.reason);
  return {};
}

void FileInspector::TellLayerFile(const LayerLayout& layout, std::string_view header_checksum) {
  json_ = {{"kind", "layer file"},
           {"good", true},
           {"format", kLayerFormatVersion},
           {"generation", ToHex(layout.generation)},
           {"encoding", EncodingName(layout.encoding)},
           {"layer", layout.layer},
           {"model_index", layout.model_index},
           {"geometry", GeometryJson(layout.geometry)},
           {"rank", layout.shard_rank},
           {"world", layout.shard_world},
           {"file_bytes", layout.file_bytes},
           {"chunks", layout.chunk_count},
           {"header_checksum", header_checksum},
           {"table_checksum", Text("{:016x}", layout.table_checksum)},
           {"manifest_digest", ToHex(layout.manifest_digest)}};
  const LayerGeometry& g = layout.geometry;
  lines_ = {
      Text("layer file  {}, layer {} (model's {}){}, E={} H={} I={}", EncodingName(layout.encoding),
           layout.layer, layout.model_index,
           layout.shard_world > 1 ? Text(", rank {} of {}", layout.shard_rank, layout.shard_world)
                                  : "",
           g.experts, g.hidden, g.intermediate),
      Text("  generation {}, format {}, {} ({} bytes), {}", ToHex(layout.generation),
           kLayerFormatVersion, FormatBytes(layout.file_bytes), layout.file_bytes,
           Counted(layout.chunk_count, "chunks")),
      Text("  header xxh3-64 {}, table xxh3-64 {:016x}, both right; `hotplane verify` checks the "
           "data against the table",
           header_checksum, layout.table_checksum),
      "  section         offset   bytes/expert         stride"};
  for (const Section& section : layout.sections) {
    json_["sections"].push_back({{"role", section.role},
                                 {"offset", section.offset},
                                 {"expert_bytes", section.expert_bytes},
                                 {"expert_stride", section.expert_stride}});
    lines_.push_back(Text("  {:<9} {:>12} {:>14} {:>14}", section.role, section.offset,
                          section.expert_bytes, section.expert_stride));
  }
}

Result<void> FileInspector::InspectLayerFile() {
  HP_ASSIGN(const std::unique_ptr<File> file, env_.Open(path_, OpenMode::kRead));
  std::vector<std::byte> page(kHeaderBytes);
  HP_TRY(ReadFully(*file, 0, page));
  HP_ASSIGN(const LayerLayout layout, DecodeHeader(page, stat_.bytes, path_));
  std::vector<std::byte> table(layout.table_bytes);
  HP_TRY(ReadFully(*file, kHeaderBytes, table));
  HP_TRY(DecodeTable(layout, table, path_));
  HP_TRY(CheckPlace(layout));
  uint64_t checksum = 0;
  std::memcpy(&checksum, page.data() + offsetof(DiskLayerHeader, header_checksum),
              sizeof(checksum));
  TellLayerFile(layout, Text("{:016x}", checksum));
  if (generation_ && !ParseLayerName(name_))
    lines_.push_back("  nothing reads it: its name is none that a store gives");
  return {};
}

// Whoever writes the file holds the lock exclusively, as long as it lives.
std::string FileInspector::HolderText(const std::string& lock_path) {
  json_["held"] = nullptr;
  const Result<FileStat> stat = env_.Stat(lock_path);
  if (!stat) return "whether its lock is held cannot be told";
  if (stat->type == FileType::kInvalid) {
    json_["held"] = false;
    return "nobody holds its lock";
  }
  // Users share theirs.
  const bool shared = lock_path.ends_with(Text("/{}", kUsersLockName));
  const auto lock =
      env_.Lock(lock_path, shared ? LockKind::kExclusive : LockKind::kShared, LockWait::kTry);
  if (!lock) return "whether its lock is held cannot be told: " + lock.error().what();
  json_["held"] = *lock == nullptr;
  return *lock == nullptr ? "a process holds its lock" : "nobody holds its lock";
}

// A layer file's header is written last; sealed texts tell for themselves.
bool FileInspector::IsWhole(const TemporaryParts& parts) const {
  const auto bytes = ReadWholeFile(env_, path_, kTextBytesMax);
  if (parts.final_name == kManifestName) return bytes && DecodeManifest(AsText(*bytes), path_);
  if (parts.final_name == kSourceStampName) return bytes && ParseSourceStamp(AsText(*bytes), path_);
  const auto layer = ParseLayerName(parts.final_name);
  if (layer && layer->encoding == Encoding::kInvalid)
    return bytes && DecodeSourceRecord(AsText(*bytes), path_);
  const auto file = env_.Open(path_, OpenMode::kRead);
  std::vector<std::byte> page(kHeaderBytes);
  return file && ReadFully(**file, 0, page) && DecodeHeader(page, stat_.bytes, path_);
}

Result<void> FileInspector::InspectTemporary(const TemporaryParts& parts) {
  const auto lock = LockOfTemporary(name_);
  const bool ours = lock.has_value() || IsGenerationTemporary(name_);
  json_ = {{"kind", "temporary"}};
  if (generation_) json_["generation"] = ToHex(*generation_);
  json_["file_bytes"] = stat_.bytes;
  json_["of"] = parts.final_name;
  json_["process"] = parts.process;
  json_["whole"] = ours && IsWhole(parts);
  const std::string lock_path = folder_ / kLocksName / lock.value_or(kGenerationLockName);
  lines_ = {
      Text("temporary  of {}, {} bytes, made by process {}", parts.final_name, stat_.bytes,
           parts.process),
      Text("  {}; nothing reads it: a file counts when it has its own name",
           json_["whole"] == Json(true) ? "its content is whole" : "its content is not whole")};
  if (!ours) {
    json_["held"] = nullptr;
    return {};
  }
  const std::string holder = HolderText(lock_path);
  lines_.push_back(Text("  {}{}", holder,
                        json_["held"] == Json(true) ? ": it may be at work"
                        : json_["held"] == Json(false)
                            ? ": whoever made it is gone, and gc or the next build removes it"
                            : ""));
  return {};
}

Result<void> FileInspector::InspectLock() {
  const auto layer = ParseLayerLock(name_);
  json_ = {{"kind", "lock file"},
           {"good", true},
           {"generation", folder_.parent_path().filename().string()},
           {"file_bytes", stat_.bytes},
           {"lock", name_}};
  const std::string whose = name_ == kUsersLockName ? "everyone who uses the generation"
                            : name_ == kGenerationLockName
                                ? "whoever writes manifest or source stamp"
                                : Text("the builder of layer {}{}", layer->layer,
                                       layer->rank ? Text(", rank {}", *layer->rank) : "");
  if (layer) json_["layer"] = layer->layer;
  if (layer && layer->rank) json_["rank"] = *layer->rank;
  const std::string holder = HolderText(absolute_);
  lines_ = {Text("lock file  of {}; {}", whose, holder),
            "  it is empty by design and stays as long as its generation"};
  return {};
}

}  // namespace

Json GeometryJson(const LayerGeometry& geometry) {
  return {{"experts", geometry.experts},
          {"hidden", geometry.hidden},
          {"intermediate", geometry.intermediate}};
}

Result<bool> InspectStoreFile(const Context& context) {
  FileInspector inspector(PosixEnv(), context.options.path);
  HP_ASSIGN(const bool ours, inspector.Run());
  if (!ours) return false;
  if (context.options.common.json) {
    PrintJson(JsonText(inspector.json()));
    return true;
  }
  for (const std::string& line : inspector.lines()) PrintLine(line);
  return true;
}

}  // namespace hotplane::cli
