// Checkpoint: the safetensors files of a model, opened without trusting any of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "io/env.h"

namespace hotplane {

enum class Dtype : uint8_t {
  kInvalid = 0,
  kBool,
  kU8,
  kI8,
  kF8E4m3,
  kF8E5m2,
  kF8E8m0,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kF64,
  kI64,
  kU64,
};
std::string_view DtypeName(Dtype dtype);  // as safetensors spells it: "BF16", "F8_E8M0", ...
std::optional<Dtype> ParseDtype(std::string_view name);
size_t DtypeBytes(Dtype dtype);

struct Tensor {
  std::string name;
  Dtype dtype = Dtype::kInvalid;
  std::vector<uint64_t> shape;
  uint32_t file = 0;    // index into Checkpoint::files()
  uint64_t offset = 0;  // of the data, from the start of that file
  uint64_t bytes = 0;
};
std::string ShapeText(std::span<const uint64_t> shape);  // "[256, 128]"

// One safetensors header; the fuzz surface. `header` is the JSON text of `8 + header_bytes` header,
// `file_bytes` the size of the whole file. Refuses (kData with file, offset, expected, found):
// malformed JSON, duplicate keys, unknown dtypes, sizes that do not match shape and dtype, ranges
// outside the file, holes and overlaps.
Result<std::vector<Tensor>> ParseSafetensorsHeader(std::string_view header, uint64_t file_bytes,
                                                   const std::string& file);
inline constexpr uint64_t kSafetensorsHeaderBytesMax = 100'000'000;

// The safetensors files of the checkpoint at `path` (as Checkpoint::Open takes it), found without
// opening any of them: the index is read where there is one. kUsage when there is no checkpoint.
Result<std::vector<std::string>> ListCheckpointFiles(Env& env, const std::string& path);

// Immutable after Open; thread-safe. Shards are opened on first read of a tensor in them, once.
class Checkpoint {
 public:
  // `path`: a folder with model.safetensors.index.json, with a single *.safetensors, or one
  // .safetensors file; also a folder of the Hugging Face cache, models--org--name, of which the
  // snapshot that refs/main names is taken, else its only one. Reads headers only. Files may be
  // symbolic links. A name in two shards, an index entry without a tensor (or a tensor in another
  // shard than the index says) is kData. A folder without any of these is kUsage. GGUF is refused
  // by name.
  static Result<Checkpoint> Open(Env& env, const std::string& path);

  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const std::string& path() const;
  std::span<const std::string> files() const;       // paths
  std::span<const Tensor> tensors() const;          // sorted by name
  const Tensor* Find(std::string_view name) const;  // null when there is none
  std::string_view config_text() const;             // config.json, "" when there is none

  // Bytes [offset, offset + destination.size()) of the tensor's data.
  Result<void> Read(const Tensor& tensor, uint64_t offset, std::span<std::byte> destination) const;

  // A shard for those who read many tensors at once, opened at the first call for its mode (kRead,
  // kReadDirect); valid while this lives. kData when it is another file by now; kSystem with EINVAL
  // in error_number() where the file system refuses direct reads.
  Result<File*> OpenShard(uint32_t file, OpenMode mode) const;
  Env& env() const;

  // kData naming the file when a shard is not the one whose header was read (size, inode or time of
  // change): what was read may be of two checkpoints.
  Result<void> CheckUnchanged() const;

  // Releases the page cache of a tensor's range, for callers that stream more than memory holds.
  void DropCache(const Tensor& tensor) const;

 private:
  struct State;
  explicit Checkpoint(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace hotplane
