#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/format_text.h"
#include "base/log.h"
#include "store/generation_state.h"
#include "store/locks.h"
#include "store/paths.h"
#include "store/store.h"

namespace hotplane {
namespace {

// Temporaries of the layer, left by builders that died: whoever holds the layer's lock is the only
// builder, and has not begun yet.
Result<void> RemoveLayerTemporaries(Env& env, const std::string& directory, uint32_t layer) {
  HP_ASSIGN(const std::vector<std::string> names, env.List(directory));
  for (const std::string& name : names) {
    if (LayerOfTemporary(name) != layer) continue;
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
      .Expected(Text("{} tensors", stored.tensors.size()))
      .Found(Text("{} tensors", offered.tensors.size()));
}

}  // namespace

Generation::Generation(std::unique_ptr<State> state) : state_(std::move(state)) {}
Generation::Generation(Generation&&) noexcept = default;
Generation& Generation::operator=(Generation&&) noexcept = default;
Generation::~Generation() = default;

Env& Generation::env() const { return *state_->env; }
const std::string& Generation::directory() const { return state_->directory; }
const Digest128& Generation::id() const { return state_->id; }
const Manifest& Generation::manifest() const { return state_->manifest; }
const Digest128& Generation::manifest_digest() const { return state_->manifest_digest; }
bool Generation::locked() const { return state_->users_lock != nullptr; }

std::string Generation::LayerPath(uint32_t layer, Encoding encoding) const {
  return JoinPath(state_->directory, LayerFileName(layer, encoding));
}

Result<LayerExpectation> Generation::State::Expect(uint32_t layer, Encoding encoding) const {
  if (layer >= manifest.layers.size()) {
    return Fail(Status::Usage(Text("the model has no MoE layer {}", layer))
                    .File(JoinPath(directory, kManifestName))
                    .Expected(Text("0 to {}", manifest.layers.size() - 1)));
  }
  const ManifestLayer& entry = manifest.layers[layer];
  LayerExpectation expected;
  expected.path = JoinPath(directory, LayerFileName(layer, encoding));
  expected.generation = id;
  expected.manifest_digest = manifest_digest;
  expected.encoding = encoding;
  expected.layer = layer;
  expected.model_index = entry.model_index;
  expected.geometry = entry.geometry;
  expected.geometry.intermediate /= manifest.identity.shard_world;
  expected.shard_world = manifest.identity.shard_world;
  return expected;
}

TierProbe Generation::Probe(uint32_t layer, Encoding encoding) const {
  TierProbe probe;
  const auto damaged = [&probe](Status reason) {
    probe.presence = Presence::kDamaged;
    probe.reason = std::move(reason);
    return std::move(probe);
  };
  const Result<LayerExpectation> expected = state_->Expect(layer, encoding);
  if (!expected) return damaged(expected.error());
  const Result<FileStat> stat = env().Stat(expected->path);
  if (!stat) return damaged(stat.error());
  if (stat->type == FileType::kInvalid) {
    probe.presence = Presence::kAbsent;
    return probe;
  }
  probe.bytes_metadata = std::min<uint64_t>(stat->bytes, kHeaderBytes);
  Result<OpenedHeader> opened = OpenLayerHeader(env(), *expected);
  if (!opened) return damaged(std::move(opened.error()));
  probe.presence = Presence::kPresent;
  probe.layout = std::move(opened->layout);
  return probe;
}

Result<LayerFile> Generation::OpenLayer(uint32_t layer, Encoding encoding) const {
  HP_ASSIGN(const LayerExpectation expected, state_->Expect(layer, encoding));
  HP_ASSIGN(const FileStat stat, env().Stat(expected.path));
  if (stat.type == FileType::kInvalid) {
    return Fail(Status::Data(Text("layer {} has no {} tier", layer, EncodingName(encoding)))
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

Result<std::unique_ptr<FileLock>> Generation::LockLayer(uint32_t layer, LockWait wait,
                                                        const CancelToken* cancel) const {
  const std::string locks = JoinPath(state_->directory, kLocksName);
  HP_TRY(CreateDirectories(env(), locks));
  // Lock files are never deleted but with the whole generation, so two builders cannot hold locks
  // on two files that had the same name one after the other.
  const std::string path = JoinPath(locks, LayerStem(layer));
  Result<std::unique_ptr<FileLock>> lock =
      wait == LockWait::kTry ? env().Lock(path, LockKind::kExclusive, LockWait::kTry)
                             : WaitForLock(env(), path, LockKind::kExclusive,
                                           Text("the build of layer {}", layer), cancel);
  if (!lock) {
    Status status = std::move(lock.error());
    if (!LockingRefused(status)) return Fail(std::move(status));
    return Fail(std::move(status)
                    .Advice("where the file system has no locks, --no-lock builds without them; "
                            "then run one build at a time")
                    .Because(Text("cannot lock layer {} for building", layer)));
  }
  if (*lock != nullptr) HP_TRY(RemoveLayerTemporaries(env(), state_->directory, layer));
  return lock;
}

Result<std::unique_ptr<LayerFileWriter>> Generation::CreateLayer(uint32_t layer,
                                                                 Encoding encoding) const {
  HP_ASSIGN(const LayerExpectation target, state_->Expect(layer, encoding));
  return CreateLayerFile(env(), target);
}

Result<std::optional<SourceRecord>> Generation::ReadSourceRecord(uint32_t layer) const {
  const std::string path = JoinPath(state_->directory, SourceRecordName(layer));
  HP_ASSIGN(const FileStat stat, env().Stat(path));
  if (stat.type == FileType::kInvalid) return std::nullopt;
  HP_ASSIGN(const std::vector<std::byte> bytes, ReadWholeFile(env(), path, kSealedTextBytesMax));
  HP_ASSIGN(SourceRecord record, DecodeSourceRecord(AsText(bytes), path));
  if (record.generation == state_->id && record.layer == layer) return record;
  return Fail(Status::Data("the source record belongs to another layer or generation")
                  .File(path)
                  .Expected(Text("generation {}, layer {}", ToHex(state_->id), layer))
                  .Found(Text("generation {}, layer {}", ToHex(record.generation), record.layer)));
}

bool Generation::HasLayerFile(uint32_t layer) const {
  return std::ranges::any_of(kEncodings, [&](Encoding encoding) {
    return Probe(layer, encoding).presence != Presence::kAbsent;
  });
}

Result<void> Generation::PublishSourceRecord(const SourceRecord& record) const {
  HP_CHECK(record.generation == state_->id);
  const std::string path = JoinPath(state_->directory, SourceRecordName(record.layer));
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
