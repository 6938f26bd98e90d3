// The planes cache of the program that hotplane's users come from, vLLM-MoET's moe_w2 modules, as
// it lies on the disk; docs/format/planes-cache.md is its prose.
//
//   DIR/v2/KEY/tp<W>-rank<R>/meta.json
//   DIR/v2/KEY/tp<W>-rank<R>/layer<L>.<part>.bin         raw bytes, experts in order
//   DIR/v2/KEY/tp<W>-rank<R>/layer<L>.<part>.bin.sha256  digest of the file beside it
//
// KEY is a digest of meta.json, rank included: the folders of one model's ranks have different
// ones.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "format/kinds.h"
#include "io/env.h"
#include "store/locks.h"

namespace hotplane {

// The base first, in the order of the sections of layer files, whose roles they are.
inline constexpr std::array<std::string_view, 6> kPlanesCacheParts = {"planes13", "sc13", "planes2",
                                                                      "sc2",      "fp13", "fp2"};
inline constexpr size_t kPlanesCacheBaseParts = 4;

struct PlanesCacheMeta {
  // Versions from 3 on have digests beside the files.
  static constexpr uint32_t kVersionMax = 3;
  std::optional<uint32_t> version;  // none: it does not tell; as of the next two
  std::string checkpoint_id;        // empty
  ZeroMode zero_mode = ZeroMode::kAuto;
  uint32_t world = 1;
  uint32_t rank = 0;
  // What fp13 and fp2 are: kDeltaNibble, kDeltaQuintal; kInvalid: it does not tell.
  Encoding fp4 = Encoding::kInvalid;
  bool operator==(const PlanesCacheMeta&) const = default;
};

// `folder_world` and `folder_rank` are what the folder's name says. kData naming `file` for what is
// no JSON object, a field of another type or value, another plane order, or a rank that is not the
// folder's. Unknown fields are left alone.
Result<PlanesCacheMeta> DecodePlanesCacheMeta(std::string_view text, const std::string& file,
                                              uint32_t folder_world, uint32_t folder_rank);
// Of the newest version, as the program itself writes it. REQUIRES a version, an fp4 and a
// printable ASCII checkpoint_id.
std::string EncodePlanesCacheMeta(const PlanesCacheMeta& meta);
// "DIR/v2/KEY/tp2-rank0": where the program looks for files of this meta.json.
std::string PlanesCacheRankPath(const std::string& directory, const PlanesCacheMeta& meta);
std::string PlanesCacheFileName(uint32_t layer, std::string_view part);
inline constexpr char kPlanesCacheMetaName[] = "meta.json";
inline constexpr std::string_view kPlanesCacheDigestSuffix = ".sha256";
// In DIR itself: held by an export into it, and by an import that removes its folders.
inline constexpr char kPlanesCacheLockName[] = ".hotplane-lock";

struct PlanesCacheFile {
  bool there = false;
  uint64_t bytes = 0;   // of `there`
  bool digest = false;  // the file with its digest is there; `there` may be false
};
struct PlanesCacheLayer {
  std::array<PlanesCacheFile, kPlanesCacheParts.size()> parts;
};
struct PlanesCacheRank {
  std::string path;  // of its folder
  std::string key;
  PlanesCacheMeta meta;
  std::map<uint32_t, PlanesCacheLayer> layers;  // by L
  std::vector<std::string> others;              // names that are none of the format's
};
struct PlanesCache {
  std::string directory;
  std::vector<PlanesCacheRank> ranks;  // at least one, ascending; of one model and configuration
};

// Looks at names, sizes and every meta.json; reads no planes. Folders without files are passed by.
// kUsage where there is no cache, or several models or configurations and `key_prefix` (of a KEY of
// the one that is meant) does not choose, or two folders of one rank; kData for symbolic links
// below `directory`, for what is no regular file and for files without their meta.json.
Result<PlanesCache> ScanPlanesCache(Env& env, const std::string& directory,
                                    std::string_view key_prefix);

// The lock of `directory`, which is there. Null, with `without` in the log as a warning, where the
// file system has no locks.
Result<std::unique_ptr<FileLock>> LockPlanesCache(Env& env, const std::string& directory,
                                                  const std::string& without,
                                                  const LockWaiting& waiting);
// Runs `remove` under the lock: no export is making the folders that it finds empty. A lock file
// that this had to make goes with it.
Result<void> RemoveFromPlanesCache(Env& env, const std::string& directory,
                                   const LockWaiting& waiting,
                                   const std::function<Result<void>()>& remove);

// Removes tp<W>-rank<R>, KEY and v2 where nothing is in them. Links and other names are left alone.
// To be called under the lock.
Result<void> RemoveEmptyPlanesCacheFolders(Env& env, const std::string& directory);

}  // namespace hotplane
