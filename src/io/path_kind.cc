#include "io/path_kind.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "base/format_text.h"
#include "io/file_names.h"

namespace hotplane {
namespace {

// Whoever keeps stores or models side by side has dozens of them, not thousands.
constexpr size_t kFoldersLookedAt = 64;

bool Is(Env& env, const std::string& path, FileType type) {
  const Result<FileStat> stat = env.Stat(path);
  return stat && stat->type == type;
}

bool IsGenerationName(std::string_view name) {
  return name.size() == kGenerationNameDigits &&
         name.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

bool IsLayerFileName(std::string_view name) {
  return name.starts_with(kLayerPrefix) &&
         (name.ends_with(kBaseSuffix) || name.find(kDeltaMark) != std::string_view::npos);
}

std::vector<std::string> NamesIn(Env& env, const std::string& folder) {
  Result<std::vector<std::string>> names = env.List(folder);
  return names ? std::move(*names) : std::vector<std::string>();
}

bool IsCheckpointFileName(std::string_view name) {
  return !name.starts_with('.') &&
         (name.ends_with(kSafetensorsSuffix) || name.ends_with(kShardIndexSuffix));
}

// A folder of the Hugging Face cache: snapshots/REVISION/ with a model's files.
bool HoldsSnapshots(Env& env, const std::string& path) {
  const std::string snapshots = JoinPath(path, kSnapshotsName);
  const std::vector<std::string> revisions = NamesIn(env, snapshots);
  for (size_t i = 0; i < std::min(revisions.size(), kFoldersLookedAt); ++i)
    for (const std::string& name : NamesIn(env, JoinPath(snapshots, revisions[i])))
      if (IsCheckpointFileName(name) || name == kConfigName) return true;
  return false;
}

PathKind FolderKind(Env& env, const std::string& path) {
  const std::vector<std::string> names = NamesIn(env, path);
  bool layers = false;
  for (const std::string& name : names) {
    if (IsGenerationName(name) &&
        Is(env, JoinPath(JoinPath(path, name), kManifestName), FileType::kRegular))
      return PathKind::kStore;
    layers |= IsLayerFileName(name);
  }
  if (HoldsCheckpoint(env, path)) return PathKind::kCheckpoint;
  if (layers &&
      std::find(names.begin(), names.end(), std::string_view(kManifestName)) != names.end())
    return PathKind::kGeneration;
  for (const std::string& key : NamesIn(env, JoinPath(path, "v2")))
    for (const std::string& rank : NamesIn(env, JoinPath(JoinPath(path, "v2"), key)))
      if (rank.starts_with("tp") && rank.find("-rank") != std::string::npos)
        return PathKind::kPlanesCache;
  return PathKind::kFolder;
}

}  // namespace

PathKind PathKindOf(Env& env, const std::string& path) {
  const Result<FileStat> stat = env.Stat(path);
  if (!stat || stat->type == FileType::kInvalid) return PathKind::kNothing;
  if (stat->type == FileType::kDirectory) return FolderKind(env, path);
  const std::string_view name = std::string_view(path).substr(path.rfind('/') + 1);
  if (IsLayerFileName(name)) return PathKind::kLayerFile;
  return name.ends_with(kSafetensorsSuffix) ? PathKind::kSafetensors : PathKind::kFile;
}

bool HoldsCheckpoint(Env& env, const std::string& folder) {
  const std::vector<std::string> names = NamesIn(env, folder);
  return std::any_of(names.begin(), names.end(), IsCheckpointFileName) ||
         HoldsSnapshots(env, folder);
}

std::string_view PathKindText(PathKind kind) {
  switch (kind) {
    case PathKind::kFile: return "a file";
    case PathKind::kFolder: return "a folder";
    case PathKind::kStore: return "a store";
    case PathKind::kGeneration: return "the folder of one generation of a store";
    case PathKind::kLayerFile: return "a layer file of a store";
    case PathKind::kCheckpoint: return "a checkpoint";
    case PathKind::kSafetensors: return "a safetensors file, a checkpoint or a part of one";
    case PathKind::kPlanesCache: return "a planes cache of vLLM-MoET";
    case PathKind::kNothing:
    case PathKind::kInvalid: break;
  }
  return "nothing";
}

std::string FirstInside(Env& env, const std::string& path, PathKind kind) {
  const std::vector<std::string> names = NamesIn(env, path);
  for (size_t i = 0; i < std::min(names.size(), kFoldersLookedAt); ++i)
    if (PathKindOf(env, JoinPath(path, names[i])) == kind) return JoinPath(path, names[i]);
  return "";
}

std::string DescribePath(Env& env, const std::string& path) {
  const PathKind kind = PathKindOf(env, path);
  if (kind != PathKind::kFolder) return std::string(PathKindText(kind));
  const Result<std::vector<std::string>> names = env.List(path);
  if (!names) return Text("a folder that cannot be listed: {}", names.error().found());
  if (names->empty()) return "an empty folder";
  for (const PathKind inner : {PathKind::kStore, PathKind::kCheckpoint})
    if (const std::string found = FirstInside(env, path, inner); !found.empty())
      return Text("a folder, with {} in it: {}", PathKindText(inner), found);
  return "a folder with other files";
}

}  // namespace hotplane
