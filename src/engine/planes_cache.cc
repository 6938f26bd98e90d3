#include "engine/planes_cache.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/bytes_text.h"
#include "base/check.h"
#include "base/format_text.h"
#include "base/log.h"
#include "base/number_text.h"
#include "checkpoint/json_scan.h"
#include "format/layer_file.h"
#include "format/sha256.h"
#include "format/tsym4.h"
#include "io/path_kind.h"

namespace hotplane {
namespace {

constexpr char kVersionFolder[] = "v2";
constexpr size_t kKeyDigits = 20;
constexpr uint64_t kMetaBytesMax = 1 << 20;
constexpr size_t kCheckpointIdLengthMax = 1024;
constexpr uint32_t kWorldMax = kDimensionMax / kDimensionMultiple;
constexpr std::string_view kFileSuffix = ".bin";

// The fields of the outer object that decide something, each at most once.
class MetaVisitor : public JsonVisitor {
 public:
  explicit MetaVisitor(PlanesCacheMeta& meta) : meta_(meta) {}

  Result<void> BeginObject() override {
    if (depth_ == 1) HP_TRY(Nested("an object"));
    ++depth_;
    return {};
  }
  Result<void> EndObject() override {
    --depth_;
    return {};
  }
  Result<void> BeginArray() override {
    if (depth_ == 0) return NotAnObject();
    if (depth_ == 1) HP_TRY(Nested("a list"));
    ++depth_;
    return {};
  }
  Result<void> EndArray() override { return EndObject(); }
  Result<void> Key(std::string_view key) override {
    if (depth_ != 1) return {};
    key_ = key;
    if (!Known() || seen_.insert(key_).second) return {};
    return Fail(Status::Data("meta.json has a duplicate key").Found(key_));
  }
  Result<void> Scalar(const JsonScalar& scalar) override {
    if (depth_ == 0) return NotAnObject();
    if (depth_ > 1 || !Known()) return {};
    if (key_ == "version") return Number(scalar, 1, PlanesCacheMeta::kVersionMax, version_);
    if (key_ == "world") return Number(scalar, 1, kWorldMax, world_);
    if (key_ == "rank") return Number(scalar, 0, kWorldMax - 1, rank_);
    if (key_ == "quantizer_abi") return Abi(scalar);
    if (key_ == "ckpt_id") return CheckpointId(scalar);
    if (key_ == "zero_mode") return TakeZeroMode(scalar);
    return Split(scalar);
  }

  std::optional<uint32_t> version_, world_, rank_;

 private:
  bool Known() const {
    constexpr std::string_view kKnown[] = {"version",   "quantizer_abi", "ckpt_id",  "world",
                                           "zero_mode", "rank",          "fp4_split"};
    return std::find(std::begin(kKnown), std::end(kKnown), key_) != std::end(kKnown);
  }
  static Result<void> NotAnObject() {
    return Fail(Status::Data("meta.json of a planes cache is malformed").Expected("a JSON object"));
  }
  Result<void> Malformed(std::string expected, std::string found) const {
    return Fail(Status::Data(Text("{} of meta.json is not what this build reads", key_))
                    .Expected(std::move(expected))
                    .Found(std::move(found)));
  }
  Result<void> Nested(const char* found) const {
    return Known() ? Malformed("a single value", found) : Result<void>();
  }
  Result<void> Number(const JsonScalar& scalar, uint32_t low, uint32_t high,
                      std::optional<uint32_t>& value) const {
    if (scalar.kind != JsonScalar::Kind::kUnsigned || scalar.unsigned_value < low ||
        scalar.unsigned_value > high)
      return Malformed(Text("a whole number from {} to {}", low, high), JsonScalarText(scalar));
    value = static_cast<uint32_t>(scalar.unsigned_value);
    return {};
  }
  Result<void> Abi(const JsonScalar& scalar) const {
    if (scalar.kind == JsonScalar::Kind::kString && scalar.text == kPlaneAbiName) return {};
    return Malformed(kPlaneAbiName, JsonScalarText(scalar));
  }
  Result<void> CheckpointId(const JsonScalar& scalar) {
    if (scalar.kind != JsonScalar::Kind::kString || scalar.text.size() > kCheckpointIdLengthMax ||
        !IsPrintableName(scalar.text))
      return Malformed(Text("a text of at most {} characters without control characters",
                            kCheckpointIdLengthMax),
                       JsonScalarText(scalar));
    meta_.checkpoint_id = scalar.text;
    return {};
  }
  Result<void> TakeZeroMode(const JsonScalar& scalar) {
    const bool text = scalar.kind == JsonScalar::Kind::kString;
    const auto mode = text ? ParseZeroMode(scalar.text) : std::nullopt;
    if (!mode) return Malformed("auto, sign or alt", JsonScalarText(scalar));
    meta_.zero_mode = *mode;
    return {};
  }
  Result<void> Split(const JsonScalar& scalar) {
    const std::string text = JsonScalarText(scalar);
    if (text == "false") {
      meta_.fp4 = Encoding::kDeltaNibble;
    } else if (text == "true" || text == "\"w4q\"") {
      meta_.fp4 = Encoding::kDeltaQuintal;
    } else {
      return Malformed("false (nibbles), or \"w4q\" or true (quintals)", text);
    }
    return {};
  }

  PlanesCacheMeta& meta_;
  uint32_t depth_ = 0;
  std::string key_;
  std::set<std::string> seen_;
};

nlohmann::json MetaJson(const PlanesCacheMeta& meta) {
  nlohmann::json json = {{"version", *meta.version},
                         {"quantizer_abi", kPlaneAbiName},
                         {"ckpt_id", meta.checkpoint_id},
                         {"world", meta.world},
                         {"rank", meta.rank},
                         {"zero_mode", ZeroModeName(meta.zero_mode)}};
  if (meta.fp4 == Encoding::kDeltaQuintal) {
    json["fp4_split"] = "w4q";
  } else {
    json["fp4_split"] = false;
  }
  return json;
}

struct FolderName {
  uint32_t world = 0;
  uint32_t rank = 0;
};

// Of "tp<W>-rank<R>".
std::optional<FolderName> ParseFolderName(std::string_view name) {
  constexpr std::string_view kWorld = "tp";
  constexpr std::string_view kRank = "-rank";
  const size_t middle = name.find(kRank);
  if (!name.starts_with(kWorld) || middle == std::string_view::npos) return std::nullopt;
  const auto world = ParseDecimal(name.substr(kWorld.size(), middle - kWorld.size()));
  const auto rank = ParseDecimal(name.substr(middle + kRank.size()));
  if (!world || !rank || *world == 0 || *world > kWorldMax || *rank >= *world) return std::nullopt;
  return FolderName{*world, *rank};
}

struct FileName {
  uint32_t layer = 0;
  size_t part = 0;
  bool digest = false;
};

// Of "layer<L>.<part>.bin", with or without ".sha256".
std::optional<FileName> ParseFileName(std::string_view name) {
  constexpr std::string_view kLayer = "layer";
  FileName parsed;
  parsed.digest = name.ends_with(kPlanesCacheDigestSuffix);
  if (parsed.digest) name.remove_suffix(kPlanesCacheDigestSuffix.size());
  const size_t dot = name.find('.');
  if (!name.starts_with(kLayer) || !name.ends_with(kFileSuffix) || dot == std::string_view::npos)
    return std::nullopt;
  const auto layer = ParseDecimal(name.substr(kLayer.size(), dot - kLayer.size()));
  name.remove_suffix(kFileSuffix.size());
  if (!layer || name.size() <= dot) return std::nullopt;
  const auto part =
      std::find(kPlanesCacheParts.begin(), kPlanesCacheParts.end(), name.substr(dot + 1));
  if (part == kPlanesCacheParts.end()) return std::nullopt;
  parsed.layer = *layer;
  parsed.part = static_cast<size_t>(part - kPlanesCacheParts.begin());
  return parsed;
}

Status NoCache(const std::string& directory, std::string found) {
  return Status::Usage("there is no planes cache here")
      .File(directory)
      .Expected("a folder with v2/KEY/tp<W>-rank<R>/meta.json in it")
      .Found(std::move(found))
      .Advice("give the folder that VLLM_MOE_W2_PLANES_CACHE names");
}

class Scanner {
 public:
  Scanner(Env& env, const std::string& directory) : env_(env), directory_(directory) {}

  Result<PlanesCache> Run(std::string_view key_prefix);

 private:
  Result<FileStat> StatNoLink(const std::string& path, FileType expected);
  Result<void> ScanKey(const std::string& key);
  Result<void> ScanRank(const std::string& key, const std::string& name, FolderName folder);
  Result<void> Choose(std::string_view key_prefix);
  Result<void> CheckRanks(std::string_view key_prefix);

  Env& env_;
  const std::string& directory_;
  std::vector<PlanesCacheRank> ranks_;
};

// A link would have us read, and with --move delete, something that is not the cache's.
Result<FileStat> Scanner::StatNoLink(const std::string& path, FileType expected) {
  HP_ASSIGN(const FileStat stat, env_.StatLink(path));
  if (stat.type == expected || stat.type == FileType::kInvalid) return stat;
  const char* const found = stat.type == FileType::kDirectory ? "a folder"
                            : stat.type == FileType::kRegular ? "a file"
                                                              : "a symbolic link or special file";
  return Fail(
      Status::Data("something else is where a planes cache has its own")
          .File(path)
          .Expected(expected == FileType::kDirectory ? "a folder" : "a regular file")
          .Found(found)
          .Advice("a cache is read where it lies: name its real folder, or put the file itself "
                  "in this place"));
}

Result<void> Scanner::ScanRank(const std::string& key, const std::string& name, FolderName folder) {
  PlanesCacheRank rank;
  rank.key = key;
  rank.path = JoinPath(JoinPath(JoinPath(directory_, kVersionFolder), key), name);
  HP_TRY(StatNoLink(rank.path, FileType::kDirectory));
  HP_ASSIGN(const std::vector<std::string> names, env_.List(rank.path));
  if (names.empty()) return {};
  const std::string meta = JoinPath(rank.path, kPlanesCacheMetaName);
  HP_ASSIGN(const FileStat stat, StatNoLink(meta, FileType::kRegular));
  if (stat.type == FileType::kInvalid)
    return Fail(Status::Data("files of a planes cache lie without their meta.json")
                    .File(meta)
                    .Expected("what the files are")
                    .Found("nothing")
                    .Advice("remove the folder, or put its meta.json back"));
  HP_ASSIGN(const std::vector<std::byte> text, ReadWholeFile(env_, meta, kMetaBytesMax));
  HP_ASSIGN(rank.meta, DecodePlanesCacheMeta(AsText(text), meta, folder.world, folder.rank));
  for (const std::string& file : names) {
    if (file == kPlanesCacheMetaName) continue;
    const auto parsed = ParseFileName(file);
    if (!parsed) {
      rank.others.push_back(file);
      continue;
    }
    HP_ASSIGN(const FileStat found, StatNoLink(JoinPath(rank.path, file), FileType::kRegular));
    PlanesCacheFile& entry = rank.layers[parsed->layer].parts[parsed->part];
    if (parsed->digest) {
      entry.digest = true;
    } else {
      entry.there = true;
      entry.bytes = found.bytes;
    }
  }
  ranks_.push_back(std::move(rank));
  return {};
}

Result<void> Scanner::ScanKey(const std::string& key) {
  const std::string path = JoinPath(JoinPath(directory_, kVersionFolder), key);
  HP_TRY(StatNoLink(path, FileType::kDirectory));
  HP_ASSIGN(const std::vector<std::string> names, env_.List(path));
  for (const std::string& name : names)
    if (const auto folder = ParseFolderName(name)) HP_TRY(ScanRank(key, name, *folder));
  return {};
}

bool SameConfiguration(PlanesCacheMeta a, const PlanesCacheMeta& b) {
  a.rank = b.rank;
  return a == b;
}

// Leaves the ranks of one model and configuration.
Result<void> Scanner::Choose(std::string_view key_prefix) {
  std::vector<PlanesCacheMeta> found;
  std::string list;
  for (const PlanesCacheRank& rank : ranks_) {
    if (!rank.key.starts_with(key_prefix)) continue;
    const bool known = std::any_of(
        found.begin(), found.end(),
        [&rank](const PlanesCacheMeta& other) { return SameConfiguration(other, rank.meta); });
    if (known) continue;
    found.push_back(rank.meta);
    list += Text("{}{} ({}, tp {}, zero mode {}, FP4 as {})", list.empty() ? "" : "; ", rank.key,
                 rank.meta.checkpoint_id.empty() ? "no checkpoint named"
                                                 : PrintableText(rank.meta.checkpoint_id, 40),
                 rank.meta.world, ZeroModeName(rank.meta.zero_mode),
                 rank.meta.fp4 == Encoding::kDeltaQuintal ? "quintals" : "nibbles");
  }
  if (found.empty())
    return Fail(Status::Usage(Text("no KEY of the planes cache begins with \"{}\"", key_prefix))
                    .File(JoinPath(directory_, kVersionFolder)));
  if (found.size() > 1)
    return Fail(Status::Usage("the planes cache holds several models or configurations")
                    .File(JoinPath(directory_, kVersionFolder))
                    .Expected("one")
                    .Found(std::move(list))
                    .Advice("choose one with --key PREFIX"));
  std::erase_if(ranks_, [&found](const PlanesCacheRank& rank) {
    return !SameConfiguration(rank.meta, found.front());
  });
  return {};
}

// One folder for each rank: of two, the one whose key was named.
Result<void> Scanner::CheckRanks(std::string_view key_prefix) {
  std::stable_sort(ranks_.begin(), ranks_.end(),
                   [](const auto& a, const auto& b) { return a.meta.rank < b.meta.rank; });
  for (size_t i = 1; i < ranks_.size();) {
    PlanesCacheRank& first = ranks_[i - 1];
    PlanesCacheRank& second = ranks_[i];
    if (first.meta.rank != second.meta.rank) {
      ++i;
      continue;
    }
    const bool first_named = first.key.starts_with(key_prefix);
    if (first_named == second.key.starts_with(key_prefix))
      return Fail(Status::Usage(Text("two folders are rank {} of {} of the same model",
                                     first.meta.rank, first.meta.world))
                      .File(first.path)
                      .Expected("one folder for each rank")
                      .Found(second.path)
                      .Advice("choose one with --key PREFIX, or remove the other"));
    ranks_.erase(ranks_.begin() + static_cast<std::ptrdiff_t>(first_named ? i : i - 1));
  }
  return {};
}

Result<PlanesCache> Scanner::Run(std::string_view key_prefix) {
  HP_ASSIGN(const FileStat stat, env_.Stat(directory_));
  if (stat.type != FileType::kDirectory)
    return Fail(NoCache(directory_, stat.type == FileType::kInvalid ? "nothing" : "not a folder"));
  const std::string versions = JoinPath(directory_, kVersionFolder);
  HP_ASSIGN(const FileStat version, StatNoLink(versions, FileType::kDirectory));
  if (version.type == FileType::kInvalid)
    return Fail(NoCache(directory_, Text("no folder v2: {}", DescribePath(env_, directory_))));
  HP_ASSIGN(const std::vector<std::string> keys, env_.List(versions));
  for (const std::string& key : keys) HP_TRY(ScanKey(key));
  if (ranks_.empty()) return Fail(NoCache(directory_, "no tp<W>-rank<R> with files in it"));
  HP_TRY(Choose(key_prefix));
  HP_TRY(CheckRanks(key_prefix));
  return PlanesCache{directory_, std::move(ranks_)};
}

}  // namespace

Result<PlanesCacheMeta> DecodePlanesCacheMeta(std::string_view text, const std::string& file,
                                              uint32_t folder_world, uint32_t folder_rank) {
  PlanesCacheMeta meta;
  MetaVisitor visitor(meta);
  HP_TRY(ScanJson(text, {.what = "meta.json", .file = file}, visitor));
  meta.version = visitor.version_;
  meta.world = visitor.world_.value_or(folder_world);
  meta.rank = visitor.rank_.value_or(folder_rank);
  if (meta.world != folder_world || meta.rank != folder_rank)
    return Fail(Status::Data("meta.json belongs to another rank than its folder")
                    .File(file)
                    .Expected(Text("rank {} of {}", folder_rank, folder_world))
                    .Found(Text("rank {} of {}", meta.rank, meta.world))
                    .Advice("put the files of each rank back into the folder they came from"));
  return meta;
}

std::string EncodePlanesCacheMeta(const PlanesCacheMeta& meta) {
  return MetaJson(meta).dump(-1, ' ', /*ensure_ascii=*/true) + "\n";
}

std::string PlanesCacheRankPath(const std::string& directory, const PlanesCacheMeta& meta) {
  HP_CHECK(meta.version && meta.fp4 != Encoding::kInvalid);
  // Keys in order and no white space, as the program makes it.
  const std::string text = MetaJson(meta).dump(-1, ' ', /*ensure_ascii=*/true);
  const std::string key = Sha256Hex(std::as_bytes(std::span(text))).substr(0, kKeyDigits);
  return JoinPath(JoinPath(JoinPath(directory, kVersionFolder), key),
                  Text("tp{}-rank{}", meta.world, meta.rank));
}

std::string PlanesCacheFileName(uint32_t layer, std::string_view part) {
  return Text("layer{}.{}{}", layer, part, kFileSuffix);
}

Result<void> RemoveEmptyPlanesCacheFolders(Env& env, const std::string& directory) {
  const auto list = [&env](const std::string& path) -> Result<std::vector<std::string>> {
    HP_ASSIGN(const FileStat stat, env.StatLink(path));
    if (stat.type != FileType::kDirectory) return std::vector<std::string>();
    return env.List(path);
  };
  const auto remove = [&env](const std::string& path) -> Result<void> {
    HP_ASSIGN(const FileStat stat, env.StatLink(path));
    if (stat.type != FileType::kDirectory) return {};
    HP_ASSIGN(const std::vector<std::string> left, env.List(path));
    if (!left.empty()) return {};
    HP_TRY(env.RemoveDirectory(path));
    return env.SyncDirectory(ParentPath(path));
  };
  const std::string versions = JoinPath(directory, kVersionFolder);
  HP_ASSIGN(const std::vector<std::string> keys, list(versions));
  for (const std::string& key : keys) {
    if (key.size() != kKeyDigits || key.find_first_not_of("0123456789abcdef") != std::string::npos)
      continue;
    HP_ASSIGN(const std::vector<std::string> ranks, list(JoinPath(versions, key)));
    for (const std::string& rank : ranks)
      if (ParseFolderName(rank)) HP_TRY(remove(JoinPath(JoinPath(versions, key), rank)));
    HP_TRY(remove(JoinPath(versions, key)));
  }
  return remove(versions);
}

Result<std::unique_ptr<FileLock>> LockPlanesCache(Env& env, const std::string& directory,
                                                  const std::string& without,
                                                  const LockWaiting& waiting) {
  Result<std::unique_ptr<FileLock>> lock =
      WaitForLock(env, JoinPath(directory, kPlanesCacheLockName), LockKind::kExclusive,
                  "an export into this folder, or an import that empties it", waiting);
  if (lock || !LockingRefused(lock.error())) return lock;
  Log(LogLevel::kWarning, "{}: no lock can be had here: {}", directory, without);
  return nullptr;
}

Result<void> RemoveFromPlanesCache(Env& env, const std::string& directory,
                                   const LockWaiting& waiting,
                                   const std::function<Result<void>()>& remove) {
  const std::string path = JoinPath(directory, kPlanesCacheLockName);
  HP_ASSIGN(const FileStat before, env.Stat(path));
  HP_ASSIGN(const std::unique_ptr<FileLock> lock,
            LockPlanesCache(env, directory, "no export may be writing to it", waiting));
  Result<void> removed = remove();
  if (lock == nullptr || before.type != FileType::kInvalid) return removed;
  // Who waits for it finds out that the file is another, and makes one.
  const Result<void> gone = env.Remove(path);
  return removed ? gone : removed;
}

Result<PlanesCache> ScanPlanesCache(Env& env, const std::string& directory,
                                    std::string_view key_prefix) {
  return Scanner(env, directory).Run(key_prefix);
}

}  // namespace hotplane
