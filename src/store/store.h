// The store: a directory of generations. A generation is a directory named by its identity's
// digest:
//
//   STORE/GENERATION/manifest            sealed, immutable
//   STORE/GENERATION/layer-0007.base     layer files, published by rename
//   STORE/GENERATION/layer-0007.delta-quintal
//   STORE/GENERATION/layer-0007.rank1.base  of a sharded generation, one per rank
//   STORE/GENERATION/layer-0007.source   source record of the layer
//   STORE/GENERATION/locks/users         shared by users, exclusive for gc
//   STORE/GENERATION/locks/layer-0007    exclusive for the layer's builder; of a sharded
//                                        generation for who publishes one of its files
//   STORE/GENERATION/locks/layer-0007.rank1  exclusive for the builder of this rank's files
//   .tmp-*                               leftovers of a crash; removable when no builder holds the
//   lock
//
// Everything about presence fails closed.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/cancel.h"
#include "base/status.h"
#include "base/worker_pool.h"
#include "format/layer_file.h"
#include "format/manifest.h"
#include "io/env.h"
#include "store/locks.h"

namespace hotplane {

enum class Presence : uint8_t {
  kInvalid = 0,
  kAbsent,      // no such file
  kPresent,     // header, generation, geometry and exact length are right
  kDamaged,     // a file is there and must not be used; `reason` says why
  kUnreadable,  // a file is there and the system does not let us look at it; `reason` says why.
                // It may well be right: nothing may be built in its place
};

struct TierProbe {
  Presence presence = Presence::kInvalid;
  LayerLayout layout;            // of kPresent
  std::optional<Status> reason;  // of kDamaged and kUnreadable
  uint64_t bytes_metadata = 0;   // read to find out
};

// An opened layer file whose header and chunk table were checked. Immutable; thread-safe.
class LayerFile {
 public:
  const LayerLayout& layout() const { return layout_; }
  const std::vector<Chunk>& chunks() const { return chunks_; }
  const std::vector<uint64_t>& checksums() const { return checksums_; }
  File& file() const { return *file_; }
  uint64_t bytes_metadata() const { return layout_.data_offset; }

  // kData naming file, layer, section, expert, chunk, offset and both checksums.
  Status ChunkError(size_t chunk_index, uint64_t found) const;
  // Reads one chunk past the page cache where possible, and checks it. For the one retry of a bad
  // chunk.
  Result<void> RereadChunk(Env& env, size_t chunk_index, std::span<std::byte> destination) const;

 private:
  friend class Generation;
  LayerLayout layout_;
  std::vector<Chunk> chunks_;
  std::vector<uint64_t> checksums_;
  std::unique_ptr<File> file_;
};

// Writes one layer file under a temporary name. Pieces may come in any order and from several
// threads. Destroyed without Publish, it removes the temporary.
class LayerFileWriter {
 public:
  virtual ~LayerFileWriter() = default;
  virtual const LayerLayout& layout() const = 0;
  // One expert's piece of a section, whole; each exactly once. Computes its chunk checksums.
  virtual Result<void> WritePiece(std::string_view role, uint32_t expert,
                                  std::span<const std::byte> bytes) = 0;
  // REQUIRES every piece written. Writes gaps, table and header; fsync, rename, fsync directory.
  virtual Result<void> Publish() = 0;
};

struct VerifyFinding {
  std::string file;
  uint32_t layer = 0;
  std::optional<uint32_t> rank;  // none: unsharded, or of all ranks
  std::optional<size_t> chunk;   // none: the file as a whole (header, table, length)
  Status status;
};
struct VerifyReport {
  uint64_t files_checked = 0;
  uint64_t chunks_checked = 0;
  uint64_t bytes_checked = 0;
  std::vector<VerifyFinding> findings;  // by file, then chunk
};
using ByteProgress = std::function<void(uint64_t bytes_done, uint64_t bytes_total)>;

// One generation of an open store, as one of its ranks sees it: layer files and their locks are
// those of this rank, which is 0 when it was opened; of an unsharded generation there is no other.
// Holds the shared users lock while it, or a view of another rank made from it, lives (where locks
// work; a read-only store too). Immutable; thread-safe.
class Generation {
 public:
  Generation(Generation&&) noexcept;
  Generation& operator=(Generation&&) noexcept;
  ~Generation();

  Env& env() const;
  const std::string& directory() const;
  const Digest128& id() const;
  const Manifest& manifest() const;
  const Digest128& manifest_digest() const;  // of the published file's bytes
  bool locked() const;                       // false: the file system refused, `gc` cannot see us

  uint32_t world() const;  // number of ranks; 1: unsharded
  uint32_t rank() const { return rank_; }
  // The same generation seen by another rank. REQUIRES rank < world().
  Generation ForRank(uint32_t rank) const;
  // Of one rank's shard of the layer. REQUIRES a layer of the manifest.
  LayerGeometry geometry(uint32_t layer) const;

  std::string LayerPath(uint32_t layer, Encoding encoding) const;
  // Reads the header only.
  TierProbe Probe(uint32_t layer, Encoding encoding) const;
  // Header and table checked.
  Result<LayerFile> OpenLayer(uint32_t layer, Encoding encoding) const;

  // The build lock of this rank's files of the layer. kTry: null when another builder holds it;
  // kBlock: waits, as long as `waiting` says. kSystem with advice (--no-lock) where the
  // file system refuses locks. Holding it, removes temporaries that a dead builder of them left.
  Result<std::unique_ptr<FileLock>> LockLayer(uint32_t layer, LockWait wait,
                                              const LockWaiting& waiting = {}) const;
  // The file of this lock.
  std::string LayerLockPath(uint32_t layer) const;
  // A number that changes while whoever holds this lock writes what it builds.
  uint64_t BuilderMark(uint32_t layer) const;
  // Held from a layer's source record to the last of the files that it proves, so that ranks built
  // by several processes come from the same source bytes. Waits. Null for an unsharded generation,
  // where the build lock does that.
  Result<std::unique_ptr<FileLock>> LockPublishing(uint32_t layer,
                                                   const LockWaiting& waiting = {}) const;
  // REQUIRES the layer's lock (or a builder that was told to do without locks).
  Result<std::unique_ptr<LayerFileWriter>> CreateLayer(uint32_t layer, Encoding encoding) const;

  // Of any rank and encoding, damaged ones too.
  bool HasLayerFile(uint32_t layer) const;
  // One record for all ranks of the layer.
  std::string SourceRecordPath(uint32_t layer) const;
  Result<std::optional<SourceRecord>> ReadSourceRecord(uint32_t layer) const;
  Result<void> PublishSourceRecord(const SourceRecord& record) const;

  // Every byte of every layer file there is, of all ranks. Damage is in the report, not in the
  // Status.
  Result<VerifyReport> Verify(WorkerPool& pool, const CancelToken* cancel,
                              const ByteProgress& progress) const;

 private:
  friend class Store;
  struct State;
  std::string LayerLockName(uint32_t layer) const;
  explicit Generation(std::shared_ptr<const State> state, uint32_t rank = 0);
  std::shared_ptr<const State> state_;
  uint32_t rank_ = 0;
};

struct GcReport {
  std::vector<std::string> removed;  // paths
  std::vector<std::string> kept_in_use;
  // Generations with layer files and no manifest: a build of their checkpoint writes it again.
  std::vector<std::string> kept_without_manifest;
  uint64_t bytes_freed = 0;
};

class Store {
 public:
  // kUsage when there is no such directory, it is a file, or a generation's own folder; kData when
  // it has no generation (with advice).
  static Result<Store> Open(Env& env, const std::string& directory);

  // kUsage naming its parent when `directory` is the folder of one generation.
  static Result<void> CheckPlace(Env& env, const std::string& directory);

  const std::string& directory() const { return directory_; }
  // Directories that look like generations and have a manifest; sorted by name.
  Result<std::vector<Digest128>> ListGenerations() const;
  struct OpenOptions {
    const CancelToken* cancel = nullptr;  // ends the wait for a running gc
    bool read_only = false;    // creates nothing, not even the users lock; gc may then not see us
    double stall_seconds = 0;  // ends that wait too, with kSystem; 0: waits for ever
  };
  struct Entry {
    Digest128 id{};
    std::optional<Identity> identity;  // none: its manifest cannot be read
    std::string model = {};            // DescribeModel, with the checkpoint's name where it has one
    int64_t modified_ns = 0;           // of its manifest; a copy may have another
    // By the names of its files; those that no layer and rank of the manifest has do not count.
    // What is in them does not decide which generation is meant.
    bool holds_layers = false;        // true also where the folder cannot be listed
    uint32_t layer_count = 0;         // of the model
    uint32_t layers_with_base = 0;    // of every rank
    uint32_t layers_with_record = 0;  // their source record
    // Certain: no file says that it ever held a layer. A store that lost files, or was copied in
    // part, looks like the rest of a build that did not end: nothing tells them apart, so that one
    // is not to be passed over for another model's. A build writes a layer's source record before
    // its files, so records of all layers are what was left of a whole store.
    bool never_held_layers() const {
      return identity && !holds_layers && layers_with_record < layer_count;
    }
  };
  // The generations whose name begins with `prefix`, by their manifests; sorted by name.
  Result<std::vector<Entry>> FindGenerations(std::string_view prefix) const;
  // "9f3c..., 7a10... (4 ranks)", for messages.
  static std::string ListText(const std::vector<Entry>& generations);
  // kUsage: which of them is meant? Tells them apart, each with the option that chooses it.
  static Status Ambiguous(std::string what, const std::vector<Entry>& generations,
                          const std::string& directory);
  // Folders of generations that have layer files and lost their manifest; paths.
  Result<std::vector<std::string>> ListWithoutManifest() const;
  // Without a prefix there must be exactly one: several are kUsage with the list, none is kData.
  Result<Generation> OpenGeneration(std::string_view prefix = {}) const;
  Result<Generation> OpenGeneration(std::string_view prefix, const OpenOptions& options) const;

  // Creates store, generation directory and manifest where missing (for builders), then opens it.
  // An existing manifest stands, its layers must be the same. kUsage when `directory` is a file, a
  // checkpoint or a planes cache, kSystem when it cannot be written.
  static Result<Generation> OpenOrCreateGeneration(Env& env, const std::string& directory,
                                                   const Manifest& manifest,
                                                   const LockWaiting& waiting = {});

  // Removes temporaries and generation directories without a manifest; with `generation_prefix`
  // that generation, whole. Nothing whose users or layer lock is held by anyone is touched.
  static Result<GcReport> CollectGarbage(Env& env, const std::string& directory,
                                         std::string_view generation_prefix, bool dry_run);

 private:
  Store(Env& env, std::string directory) : env_(&env), directory_(std::move(directory)) {}
  static Result<void> RefuseOtherKinds(Env& env, const std::string& directory);
  static Result<Generation> LoadGeneration(Env& env, const std::string& directory,
                                           const Digest128& id,
                                           std::unique_ptr<FileLock> users_lock);
  static Result<Generation> TryCreateGeneration(Env& env, const std::string& directory,
                                                const Manifest& manifest,
                                                const LockWaiting& waiting);
  Env* env_;
  std::string directory_;
};

}  // namespace hotplane
