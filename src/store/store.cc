#include "store/store.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <utility>

#include "base/format_text.h"
#include "base/log.h"
#include "base/number_text.h"
#include "io/path_kind.h"
#include "store/generation_files.h"
#include "store/generation_state.h"
#include "store/locks.h"
#include "store/paths.h"

namespace hotplane {
namespace {

// How often creating a generation starts over because gc removed its still empty directory.
constexpr int kCreateAttemptsMax = 3;

// The shared lock that tells gc that the generation is in use. Null, with a line in the log, where
// the file system has no locks or the lock file cannot be made.
Result<std::unique_ptr<FileLock>> TakeUsersLock(Env& env, const std::string& directory,
                                                bool read_only, const LockWaiting& waiting) {
  const std::string locks = JoinPath(directory, kLocksName);
  const std::string path = JoinPath(locks, kUsersLockName);
  if (read_only) {
    HP_ASSIGN(const FileStat stat, env.Stat(path));
    if (stat.type == FileType::kInvalid) return std::unique_ptr<FileLock>();
  } else {
    (void)env.CreateDirectory(locks);  // there already, or nothing can be created: Lock will tell
  }
  Result<std::unique_ptr<FileLock>> lock = WaitForLock(
      env, path, LockKind::kShared, "the garbage collection of this generation", waiting);
  if (lock || !LockingRefused(lock.error())) return lock;
  Log(LogLevel::kWarning, "cannot lock {} ({}): do not run gc while this process uses the store",
      path, lock.error().found());
  return std::unique_ptr<FileLock>();
}

// Equal identities with unequal layers cannot come from one checkpoint: names or shapes are part of
// the fingerprint.
Result<void> CheckSameLayers(const Manifest& stored, const Manifest& offered,
                             const std::string& file) {
  if (stored.layers == offered.layers && stored.scheme == offered.scheme) return {};
  return Fail(
      Status::Data("this checkpoint's description differs from the one in the store")
          .File(file)
          .Expected(Text("{}, scheme {}", Counted(stored.layers.size(), "layers"), stored.scheme))
          .Found(Text("{}, scheme {}", Counted(offered.layers.size(), "layers"), offered.scheme))
          .Advice("build into another store"));
}

void Describe(const Manifest& manifest, Store::Entry& entry) {
  entry.identity = manifest.identity;
  entry.model = DescribeModel(manifest);
  if (!manifest.checkpoint_id.empty()) entry.model += Text(" ({})", manifest.checkpoint_id);
  entry.layer_count = static_cast<uint32_t>(manifest.layers.size());
}

// A folder that cannot be listed may hold anything.
void CountLayers(Env& env, const std::string& directory, Store::Entry& entry) {
  const auto names = env.List(directory);
  entry.holds_layers = !names;
  if (!names || !entry.identity) return;
  const uint32_t world = entry.identity->shard_world;
  std::map<uint32_t, uint32_t> bases;  // layer -> ranks
  for (const std::string& name : *names) {
    const std::optional<LayerName> parsed = ParseLayerName(name);
    if (!parsed || parsed->layer >= entry.layer_count) continue;
    if (parsed->encoding == Encoding::kInvalid) {
      ++entry.layers_with_record;
      continue;
    }
    if (parsed->rank.has_value() != (world > 1) || parsed->rank.value_or(0) >= world) continue;
    entry.holds_layers = true;
    if (parsed->encoding == Encoding::kBase) ++bases[parsed->layer];
  }
  entry.layers_with_base = static_cast<uint32_t>(
      std::ranges::count_if(bases, [world](const auto& base) { return base.second >= world; }));
}

// The shortest prefix, of eight digits or more, that no other one begins with.
std::string ShortName(const Store::Entry& entry, const std::vector<Store::Entry>& all) {
  const std::string name = ToHex(entry.id);
  const auto means_one = [&all](std::string_view prefix) {
    return std::ranges::count_if(all, [prefix](const Store::Entry& other) {
             return ToHex(other.id).starts_with(prefix);
           }) == 1;
  };
  for (size_t digits = 8; digits < name.size(); ++digits)
    if (means_one(name.substr(0, digits))) return name.substr(0, digits);
  return name;
}

std::string DateText(int64_t nanoseconds) {
  const std::chrono::sys_seconds time{std::chrono::seconds(nanoseconds / 1'000'000'000)};
  const auto day = std::chrono::floor<std::chrono::days>(time);
  const std::chrono::year_month_day date(day);
  const std::chrono::hh_mm_ss clock(time - day);
  return Text("{}-{:02}-{:02} {:02}:{:02} UTC", static_cast<int>(date.year()),
              static_cast<unsigned>(date.month()), static_cast<unsigned>(date.day()),
              clock.hours().count(), clock.minutes().count());
}

}  // namespace

// The manifest is read after the lock was taken: until then gc may remove the generation.
Result<Generation> Store::LoadGeneration(Env& env, const std::string& directory,
                                         const Digest128& id,
                                         std::unique_ptr<FileLock> users_lock) {
  auto state = std::make_unique<Generation::State>();
  state->env = &env;
  state->directory = directory;
  state->id = id;
  state->users_lock = std::move(users_lock);
  const std::string path = JoinPath(directory, kManifestName);
  HP_ASSIGN(const std::vector<std::byte> bytes, ReadWholeFile(env, path, kSealedTextBytesMax));
  state->manifest_digest = Digest(bytes);
  auto manifest = DecodeManifest(AsText(bytes), path);
  if (!manifest) {
    if (!manifest.error().advice().empty()) return Fail(std::move(manifest.error()));
    return Fail(std::move(manifest.error())
                    .Advice("remove this file and build again from the same checkpoint: the "
                            "manifest is written anew and the layer files that fit it are kept"));
  }
  state->manifest = std::move(*manifest);
  const Digest128 found = GenerationOf(state->manifest.identity);
  if (found != id) {
    return Fail(Status::Data("the manifest belongs to another generation")
                    .File(path)
                    .Expected(ToHex(id))
                    .Found(ToHex(found)));
  }
  return Generation(std::move(state));
}

// A checkpoint or a planes cache where a store is expected: its owner would find a store's files
// between the others.
Result<void> Store::RefuseOtherKinds(Env& env, const std::string& directory) {
  const PathKind kind = PathKindOf(env, directory);
  if (kind == PathKind::kCheckpoint)
    return Fail(Status::Usage("this is a checkpoint, not a store")
                    .File(directory)
                    .Expected("the folder of a store")
                    .Found("the files of a checkpoint")
                    .Advice(Text("give the store that was built from it; or build one in another "
                                 "folder: hotplane build {} --store DIR",
                                 directory)));
  if (kind == PathKind::kPlanesCache)
    return Fail(Status::Usage("this is a planes cache of vLLM-MoET, not a store")
                    .File(directory)
                    .Expected("the folder of a store")
                    .Found("v2/KEY/tp<W>-rank<R>")
                    .Advice(Text("make a store of it: hotplane import --planes-cache {} "
                                 "--layers-geometry GEOMETRY STORE",
                                 directory)));
  return {};
}

Result<void> Store::CheckPlace(Env& env, const std::string& directory) {
  std::string path = directory;
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const std::string name = path.substr(path.rfind('/') + 1);
  const std::string parent = ParentPath(path);
  if (name == kLocksName && ParseGenerationName(parent.substr(parent.rfind('/') + 1)))
    return Fail(Status::Usage("this is the folder of a generation's lock files, not a store")
                    .File(directory)
                    .Advice(Text("give {}", ParentPath(parent))));
  HP_ASSIGN(const FileStat manifest, env.Stat(JoinPath(directory, kManifestName)));
  if (manifest.type == FileType::kInvalid) return {};
  const bool named = ParseGenerationName(name).has_value();
  if (!named) {  // moved or copied from its store; or somebody's other file of that name
    const std::string file = JoinPath(directory, kManifestName);
    const auto bytes = ReadWholeFile(env, file, kSealedTextBytesMax);
    if (!bytes || !DecodeManifest(AsText(*bytes), file)) return {};
  }
  return Fail(Status::Usage("this is the folder of one generation, not a store")
                  .File(directory)
                  .Expected("a folder of such folders")
                  .Found(Text("a {} in it", kManifestName))
                  .Advice(Text("give {}{}", named ? parent : "the folder that holds it",
                               named ? Text(", with --generation {}", name.substr(0, 8)) : "")));
}

Result<Store> Store::Open(Env& env, const std::string& directory) {
  HP_ASSIGN(const FileStat stat, env.Stat(directory));
  if (stat.type == FileType::kInvalid) {
    return Fail(Status::Usage("there is no store here")
                    .File(directory)
                    .Expected("a directory")
                    .Found("nothing")
                    .Advice("build one: hotplane build CHECKPOINT --store DIR"));
  }
  if (stat.type != FileType::kDirectory) {
    return Fail(Status::Usage("a store is a directory, this is not one")
                    .File(directory)
                    .Expected("a directory")
                    .Found(stat.type == FileType::kRegular
                               ? std::string(PathKindText(PathKindOf(env, directory)))
                               : "a special file")
                    .Advice("give the folder that `build --store` was given"));
  }
  Store store(env, directory);
  HP_ASSIGN(const std::vector<Digest128> generations, store.ListGenerations());
  if (generations.empty()) HP_TRY(CheckPlace(env, directory));
  HP_ASSIGN(const std::vector<std::string> lost, store.ListWithoutManifest());
  if (!generations.empty()) {
    for (const std::string& path : lost)
      Log(LogLevel::kWarning, "{} is not used: it has layer files and no manifest", path);
    return store;
  }
  if (!lost.empty())
    return Fail(Status::Data("the manifest of a generation is missing")
                    .File(JoinPath(lost.front(), kManifestName))
                    .Expected("the manifest beside the layer files")
                    .Found("no such file")
                    .Advice("bring it back from a copy of the store, or run `hotplane build` of "
                            "the same checkpoint: it writes the manifest again and keeps the "
                            "layer files that fit it"));
  HP_TRY(RefuseOtherKinds(env, directory));
  const std::string inside = FirstInside(env, directory, PathKind::kStore);
  return Fail(Status::Data("the directory holds no quantized checkpoint")
                  .File(directory)
                  .Expected("a folder named by 32 hexadecimal digits with a manifest in it")
                  .Found(DescribePath(env, directory))
                  .Advice(inside.empty() ? "build one: hotplane build CHECKPOINT --store DIR"
                                         : "give " + inside));
}

Result<std::vector<Digest128>> Store::ListGenerations() const {
  HP_ASSIGN(const std::vector<std::string> names, env_->List(directory_));
  std::vector<Digest128> generations;
  for (const std::string& name : names) {
    const auto id = ParseGenerationName(name);
    if (!id) continue;
    const std::string manifest = JoinPath(JoinPath(directory_, name), kManifestName);
    HP_ASSIGN(const FileStat stat, env_->Stat(manifest));
    if (stat.type != FileType::kInvalid) generations.push_back(*id);
  }
  return generations;
}

Result<std::vector<std::string>> Store::ListWithoutManifest() const {
  HP_ASSIGN(const std::vector<std::string> names, env_->List(directory_));
  std::vector<std::string> lost;
  for (const std::string& name : names) {
    if (!ParseGenerationName(name)) continue;
    const std::string path = JoinPath(directory_, name);
    bool manifest = false;
    for (const char* const of : {kManifestName, kDoomedManifestName}) {
      const Result<FileStat> stat = env_->Stat(JoinPath(path, of));
      manifest = manifest || !stat || stat->type != FileType::kInvalid;
    }
    if (manifest) continue;
    const auto files = env_->List(path);
    const auto is_layer = [](const std::string& file) { return ParseLayerName(file).has_value(); };
    if (files && std::ranges::any_of(*files, is_layer)) lost.push_back(path);
  }
  return lost;
}

Result<std::vector<Store::Entry>> Store::FindGenerations(std::string_view prefix) const {
  HP_ASSIGN(const std::vector<Digest128> all, ListGenerations());
  std::vector<Entry> found;
  for (const Digest128& id : all) {
    const std::string name = ToHex(id);
    if (!name.starts_with(prefix)) continue;
    Entry entry{.id = id, .identity = std::nullopt};
    const std::string path = JoinPath(JoinPath(directory_, name), kManifestName);
    if (const auto stat = env_->Stat(path)) entry.modified_ns = stat->modified_ns;
    if (const auto bytes = ReadWholeFile(*env_, path, kSealedTextBytesMax)) {
      if (const auto manifest = DecodeManifest(AsText(*bytes), path)) Describe(*manifest, entry);
    }
    CountLayers(*env_, JoinPath(directory_, name), entry);
    found.push_back(std::move(entry));
  }
  return found;
}

std::string Store::ListText(const std::vector<Entry>& generations) {
  std::string text;
  for (const Entry& entry : generations) {
    text += (text.empty() ? "" : ", ") + ToHex(entry.id);
    if (!entry.identity) {
      text += " (unreadable)";
    } else if (entry.identity->shard_world > 1) {
      text += Text(" ({} ranks)", entry.identity->shard_world);
    }
  }
  return text;
}

Status Store::Ambiguous(std::string what, const std::vector<Entry>& generations,
                        const std::string& directory) {
  std::vector<std::string> choices;
  for (const Entry& entry : generations) {
    std::string choice = Text("--generation {}  ", ShortName(entry, generations));
    if (!entry.identity) {
      choice += "its manifest cannot be read";
    } else {
      choice +=
          Text("{}{}, {} of {} there", entry.model,
               entry.identity->shard_world > 1 ? Text(" for {} ranks", entry.identity->shard_world)
                                               : std::string(),
               entry.layers_with_base, Counted(entry.layer_count, "layers"));
    }
    choices.push_back(choice + Text(", manifest of {}", DateText(entry.modified_ns)));
  }
  return Status::Usage(std::move(what))
      .File(directory)
      .Expected("exactly one")
      .Found(ListText(generations))
      .Advice("choose one with --generation PREFIX")
      .Choices(std::move(choices));
}

Result<Generation> Store::OpenGeneration(std::string_view prefix) const {
  return OpenGeneration(prefix, OpenOptions());
}

Result<Generation> Store::OpenGeneration(std::string_view prefix,
                                         const OpenOptions& options) const {
  HP_ASSIGN(const std::vector<Digest128> all, ListGenerations());
  std::vector<Digest128> matches;
  std::ranges::copy_if(all, std::back_inserter(matches),
                       [&](const Digest128& id) { return ToHex(id).starts_with(prefix); });
  if (matches.size() == 1) {
    const std::string path = JoinPath(directory_, ToHex(matches.front()));
    HP_ASSIGN(std::unique_ptr<FileLock> lock,
              TakeUsersLock(*env_, path, options.read_only,
                            {.cancel = options.cancel, .stall_seconds = options.stall_seconds}));
    return LoadGeneration(*env_, path, matches.front(), std::move(lock));
  }
  if (all.empty()) {
    return Fail(Status::Data("the directory holds no quantized checkpoint").File(directory_));
  }
  if (matches.empty()) {
    HP_ASSIGN(const std::vector<Entry> there, FindGenerations({}));
    return Fail(Status::Usage(Text("no generation begins with \"{}\"", prefix))
                    .File(directory_)
                    .Expected(ListText(there)));
  }
  HP_ASSIGN(const std::vector<Entry> found, FindGenerations(prefix));
  return Fail(Ambiguous(Text("the store holds {} generations that could be meant", matches.size()),
                        found, directory_));
}

// One attempt; ENOENT when gc removed the directory between two steps.
Result<Generation> Store::TryCreateGeneration(Env& env, const std::string& directory,
                                              const Manifest& manifest,
                                              const LockWaiting& waiting) {
  const Digest128 id = GenerationOf(manifest.identity);
  const std::string path = JoinPath(directory, ToHex(id));
  HP_TRY(CreateDirectories(env, path));
  HP_ASSIGN(std::unique_ptr<FileLock> lock, TakeUsersLock(env, path, /*read_only=*/false, waiting));
  const std::string file = JoinPath(path, kManifestName);
  const std::string text = EncodeManifest(manifest);
  HP_TRY(DecodeManifest(text, file));  // shapes that no layer file can hold are refused before
  HP_TRY(RemoveGenerationTemporaries(env, path));
  HP_ASSIGN(const FileStat stat, env.Stat(file));
  if (stat.type == FileType::kInvalid)
    HP_TRY(PublishGenerationFile(env, path, kManifestName, std::as_bytes(std::span(text)),
                                 ExistingFile::kKeep, waiting));
  HP_ASSIGN(Generation generation, LoadGeneration(env, path, id, std::move(lock)));
  if (generation.manifest_digest() == Digest(text)) return generation;
  HP_TRY(CheckSameLayers(generation.manifest(), manifest, file));
  // What is left are settings that do not touch a byte of the planes. The store's own stand.
  Log(LogLevel::kWarning,
      "activation or top-k of this checkpoint's config differ from {}: the store's are kept; a new "
      "store takes the config's",
      file);
  return generation;
}

Result<Generation> Store::OpenOrCreateGeneration(Env& env, const std::string& directory,
                                                 const Manifest& manifest,
                                                 const LockWaiting& waiting) {
  HP_ASSIGN(const FileStat stat, env.Stat(directory));
  if (stat.type != FileType::kInvalid && stat.type != FileType::kDirectory) {
    return Fail(Status::Usage("a store is a directory, this is not one")
                    .File(directory)
                    .Expected("a directory, or nothing yet")
                    .Found(stat.type == FileType::kRegular
                               ? std::string(PathKindText(PathKindOf(env, directory)))
                               : "a special file")
                    .Advice("name another directory, or move the file away"));
  }
  HP_TRY(CheckPlace(env, directory));
  HP_TRY(RefuseOtherKinds(env, directory));
  for (int attempt = 1;; ++attempt) {
    Result<Generation> generation = TryCreateGeneration(env, directory, manifest, waiting);
    const bool removed = !generation && generation.error().error_number() == ENOENT;
    if (!removed || attempt == kCreateAttemptsMax) return generation;
  }
}

}  // namespace hotplane
