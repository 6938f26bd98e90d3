// Names inside a store. docs/format/store-layout.md is the prose.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "format/checksum.h"
#include "format/kinds.h"
#include "io/file_names.h"

namespace hotplane {

// What gc renames the manifest of a generation to before it removes the rest: the mark that
// somebody asked for that.
inline constexpr char kDoomedManifestName[] = "manifest.doomed";
inline constexpr char kLocksName[] = "locks";
inline constexpr char kSourceStampName[] = "source-stamp";
inline constexpr char kUsersLockName[] = "users";
inline constexpr char kGenerationLockName[] = "generation";
inline constexpr std::string_view kTemporaryPrefix = ".tmp-";

// "layer-0007": at least four digits.
std::string LayerStem(uint32_t layer);
// Of one rank's shard, "layer-0007.rank1"; of an unsharded layer the stem alone. Also the name of
// the lock of its builder.
std::string ShardStem(uint32_t layer, std::optional<uint32_t> rank);
// "layer-0007.delta-quintal", "layer-0007.rank1.delta-quintal"
std::string LayerFileName(uint32_t layer, std::optional<uint32_t> rank, Encoding encoding);
// "layer-0007.source"
std::string SourceRecordName(uint32_t layer);

// What a file in a generation directory is by its name. Only names that this build writes count:
// parsing is the inverse of the functions above.
struct LayerName {
  uint32_t layer = 0;
  std::optional<uint32_t> rank;            // none: of an unsharded layer, or the source record
  Encoding encoding = Encoding::kInvalid;  // kInvalid: the source record
};
std::optional<LayerName> ParseLayerName(std::string_view name);

// The layer, and the rank where it has one, whose builder this lock is of; none for another name.
std::optional<LayerName> ParseLayerLock(std::string_view name);

// A name that no other process or thread uses: ".tmp-<final name>-<pid>-<random>".
std::string TemporaryName(std::string_view final_name);
// What such a name is made of; none for another name.
struct TemporaryParts {
  std::string final_name;
  uint32_t process = 0;  // that made it
};
std::optional<TemporaryParts> ParseTemporaryName(std::string_view name);
// The lock of whoever writes a temporary of a layer: the stem of what it is to become. None for a
// temporary of something else.
std::optional<std::string> LockOfTemporary(std::string_view name);
// True for a temporary of the manifest or of the source stamp.
bool IsGenerationTemporary(std::string_view name);

// 32 lower-case hexadecimal digits.
std::optional<Digest128> ParseGenerationName(std::string_view name);

}  // namespace hotplane
