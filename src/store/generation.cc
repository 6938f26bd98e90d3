#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/format_text.h"
#include "base/log.h"
#include "base/number_text.h"
#include "io/output_place.h"
#include "store/generation_state.h"
#include "store/locks.h"
#include "store/paths.h"
#include "store/store.h"

namespace hotplane {
namespace {

// Temporaries left by builders that died: whoever holds their lock is the only builder, and has not
// begun yet.
Result<void> RemoveTemporariesOf(Env& env, const std::string& directory,
                                 const std::string& lock_name) {
  HP_ASSIGN(const std::vector<std::string> names, env.List(directory));
  for (const std::string& name : names) {
    if (LockOfTemporary(name) != lock_name) continue;
    const std::string path = JoinPath(directory, name);
    HP_ASSIGN(const FileStat stat, env.Stat(path));
    if (stat.type != FileType::kRegular) continue;  // nothing that a build makes
    HP_TRY(env.Remove(path));
    Log(LogLevel::kInfo, "removed {}, left by a build that was cut short", path);
  }
  return {};
}

// The sentence that says how two records of one layer differ.
Status RecordsDiffer(const SourceRecord& stored, const SourceRecord& offered,
                     const std::string& path) {
  const Status differs =
      Status::Data(Text("layer {} was built from other source bytes than these", offered.layer))
          .File(path)
          .Advice("use the checkpoint that the store was built from, or build into a new store");
  const size_t common = std::min(stored.tensors.size(), offered.tensors.size());
  for (size_t i = 0; i < common; ++i) {
    const SourceTensorDigest& was = stored.tensors[i];
    const SourceTensorDigest& is = offered.tensors[i];
    if (was == is) continue;
    return Status(differs)
        .Expected(Text("{} with xxh3-128 {}", was.name, ToHex(was.digest)))
        .Found(Text("{} with xxh3-128 {}", is.name, ToHex(is.digest)));
  }
  return Status(differs)
      .Expected(Counted(stored.tensors.size(), "tensors"))
      .Found(Counted(offered.tensors.size(), "tensors"));
}

}  // namespace

Generation::Generation(std::shared_ptr<const State> state, uint32_t rank)
    : state_(std::move(state)), rank_(rank) {}
Generation::Generation(Generation&&) noexcept = default;
Generation& Generation::operator=(Generation&&) noexcept = default;
Generation::~Generation() = default;

Env& Generation::env() const { return *state_->env; }
const std::string& Generation::directory() const { return state_->directory; }
const Digest128& Generation::id() const { return state_->id; }
const Manifest& Generation::manifest() const { return state_->manifest; }
const Digest128& Generation::manifest_digest() const { return state_->manifest_digest; }
bool Generation::locked() const { return state_->users_lock != nullptr; }

uint32_t Generation::world() const { return state_->manifest.identity.shard_world; }

Generation Generation::ForRank(uint32_t rank) const {
  HP_CHECK(rank < world());
  return Generation(state_, rank);
}

LayerGeometry Generation::geometry(uint32_t layer) const {
  return state_->manifest.layers[layer].geometry.OfShard(world());
}

std::string Generation::LayerPath(uint32_t layer, Encoding encoding) const {
  return state_->LayerPath(layer, rank_, encoding);
}

std::string Generation::State::LayerPath(uint32_t layer, uint32_t rank, Encoding encoding) const {
  const bool sharded = manifest.identity.shard_world > 1;
  return JoinPath(directory,
                  LayerFileName(layer, sharded ? std::optional(rank) : std::nullopt, encoding));
}

Result<LayerExpectation> Generation::State::Expect(uint32_t layer, uint32_t rank,
                                                   Encoding encoding) const {
  if (layer >= manifest.layers.size()) {
    return Fail(Status::Usage(Text("the model has no MoE layer {}", layer))
                    .File(JoinPath(directory, kManifestName))
                    .Expected(Text("0 to {}", manifest.layers.size() - 1)));
  }
  const ManifestLayer& entry = manifest.layers[layer];
  LayerExpectation expected;
  expected.path = LayerPath(layer, rank, encoding);
  expected.generation = id;
  expected.manifest_digest = manifest_digest;
  expected.encoding = encoding;
  expected.layer = layer;
  expected.model_index = entry.model_index;
  expected.geometry = entry.geometry.OfShard(manifest.identity.shard_world);
  expected.shard_rank = rank;
  expected.shard_world = manifest.identity.shard_world;
  return expected;
}

TierProbe Generation::Probe(uint32_t layer, Encoding encoding) const {
  TierProbe probe;
  const auto unusable = [&probe](Status reason) {
    const bool seen = reason.code() == StatusCode::kData || reason.code() == StatusCode::kUsage;
    probe.presence = seen ? Presence::kDamaged : Presence::kUnreadable;
    probe.reason = std::move(reason);
    return std::move(probe);
  };
  const Result<LayerExpectation> expected = state_->Expect(layer, rank_, encoding);
  if (!expected) return unusable(expected.error());
  const Result<FileStat> stat = env().Stat(expected->path);
  if (!stat) return unusable(stat.error());
  if (stat->type == FileType::kInvalid) {
    probe.presence = Presence::kAbsent;
    return probe;
  }
  probe.bytes_metadata = std::min<uint64_t>(stat->bytes, kHeaderBytes);
  Result<OpenedHeader> opened = OpenLayerHeader(env(), *expected);
  if (!opened) return unusable(std::move(opened.error()));
  probe.presence = Presence::kPresent;
  probe.layout = std::move(opened->layout);
  return probe;
}

Result<LayerFile> Generation::OpenLayer(uint32_t layer, Encoding encoding) const {
  HP_ASSIGN(const LayerExpectation expected, state_->Expect(layer, rank_, encoding));
  HP_ASSIGN(const FileStat stat, env().Stat(expected.path));
  if (stat.type == FileType::kInvalid) {
    return Fail(Status::Data(Text("layer {} has no {} tier{}", layer, EncodingName(encoding),
                                  world() > 1 ? Text(" of rank {}", rank_) : std::string()))
                    .File(expected.path)
                    .Found("no such file")
                    .Advice("build it from the checkpoint"));
  }
  HP_ASSIGN(OpenedHeader opened, OpenLayerHeader(env(), expected));
  LayerFile file;
  HP_ASSIGN(file.checksums_, ReadChunkTable(opened));
  file.chunks_ = ListChunks(opened.layout);
  file.layout_ = std::move(opened.layout);
  file.file_ = std::move(opened.file);
  return file;
}

Result<std::unique_ptr<FileLock>> Generation::State::Lock(const std::string& name, LockWait wait,
                                                          const std::string& what,
                                                          const LockWaiting& waiting) const {
  const std::string locks = JoinPath(directory, kLocksName);
  HP_TRY(CreateDirectories(*env, locks));
  // Lock files are never deleted but with the whole generation, so two builders cannot hold locks
  // on two files that had the same name one after the other.
  const std::string path = JoinPath(locks, name);
  Result<std::unique_ptr<FileLock>> lock =
      wait == LockWait::kTry ? env->Lock(path, LockKind::kExclusive, LockWait::kTry)
                             : WaitForLock(*env, path, LockKind::kExclusive, what, waiting);
  if (!lock) {
    Status status = std::move(lock.error());
    if (!LockingRefused(status)) return Fail(std::move(status));
    const std::string permission = PermissionAdvice(status.error_number());
    if (!permission.empty())
      return Fail(
          std::move(status).Advice(permission).Because(Text("cannot lock {} for building", name)));
    return Fail(std::move(status)
                    .Advice("where the file system has no locks, --no-lock builds without them; "
                            "then run one build at a time")
                    .Because(Text("cannot lock {} for building", name)));
  }
  if (*lock != nullptr) HP_TRY(RemoveTemporariesOf(*env, directory, name));
  return lock;
}

Result<std::unique_ptr<FileLock>> Generation::LockLayer(uint32_t layer, LockWait wait,
                                                        const LockWaiting& waiting) const {
  return state_->Lock(LayerLockName(layer), wait, Text("the build of layer {}", layer), waiting);
}

std::string Generation::LayerLockName(uint32_t layer) const {
  return ShardStem(layer, world() > 1 ? std::optional(rank_) : std::nullopt);
}

std::string Generation::LayerLockPath(uint32_t layer) const {
  return JoinPath(JoinPath(directory(), kLocksName), LayerLockName(layer));
}

uint64_t Generation::BuilderMark(uint32_t layer) const {
  const Result<std::vector<std::string>> names = env().List(directory());
  if (!names) return 0;
  const std::string lock = LayerLockName(layer);
  std::string seen;
  for (const std::string& name : *names) {
    if (LockOfTemporary(name) != lock) continue;
    const Result<FileStat> stat = env().Stat(JoinPath(directory(), name));
    if (stat) seen += Text("{} {} ", name, stat->modified_ns);
  }
  return Checksum64(std::as_bytes(std::span(seen)));
}

Result<std::unique_ptr<FileLock>> Generation::LockPublishing(uint32_t layer,
                                                             const LockWaiting& waiting) const {
  if (world() == 1) return std::unique_ptr<FileLock>();  // LockLayer is this lock
  return state_->Lock(LayerStem(layer), LockWait::kBlock,
                      Text("another rank to publish layer {}", layer), waiting);
}

Result<std::unique_ptr<LayerFileWriter>> Generation::CreateLayer(uint32_t layer,
                                                                 Encoding encoding) const {
  HP_ASSIGN(const LayerExpectation target, state_->Expect(layer, rank_, encoding));
  return CreateLayerFile(env(), target);
}

std::string Generation::SourceRecordPath(uint32_t layer) const {
  return JoinPath(state_->directory, SourceRecordName(layer));
}

Result<std::optional<SourceRecord>> Generation::ReadSourceRecord(uint32_t layer) const {
  const std::string path = SourceRecordPath(layer);
  HP_ASSIGN(const FileStat stat, env().Stat(path));
  if (stat.type == FileType::kInvalid) return std::nullopt;
  HP_ASSIGN(const std::vector<std::byte> bytes, ReadWholeFile(env(), path, kSealedTextBytesMax));
  // A layer that is there is not built again, and builds write the record.
  static constexpr char kAdvice[] =
      "remove this file and the files of its layer, and run `hotplane build` again";
  Result<SourceRecord> record = DecodeSourceRecord(AsText(bytes), path);
  if (!record) return Fail(Status(record.error()).Advice(kAdvice));
  if (record->generation == state_->id && record->layer == layer) return *std::move(record);
  return Fail(Status::Data("the source record belongs to another layer or generation")
                  .File(path)
                  .Expected(Text("generation {}, layer {}", ToHex(state_->id), layer))
                  .Found(Text("generation {}, layer {}", ToHex(record->generation), record->layer))
                  .Advice(kAdvice));
}

bool Generation::HasLayerFile(uint32_t layer) const {
  for (uint32_t rank = 0; rank < world(); ++rank)
    for (const Encoding encoding : kEncodings)
      if (ForRank(rank).Probe(layer, encoding).presence != Presence::kAbsent) return true;
  return false;
}

Result<void> Generation::PublishSourceRecord(const SourceRecord& record) const {
  HP_CHECK(record.generation == state_->id);
  const std::string path = SourceRecordPath(record.layer);
  HP_ASSIGN(const std::optional<SourceRecord> stored, ReadSourceRecord(record.layer));
  if (stored) {
    if (*stored == record) return {};
    // The record goes before the layer's files: alone, it is what a build that was cut short left.
    if (HasLayerFile(record.layer)) return Fail(RecordsDiffer(*stored, record, path));
  }
  const std::string text = EncodeSourceRecord(record);
  return PublishFile(env(), path, std::as_bytes(std::span(text)));
}

}  // namespace hotplane
