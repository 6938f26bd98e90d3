// Writes safetensors checkpoints as a stream: tensors are declared first, then their data follows
// in the declared order, in pieces of any size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "io/env.h"

namespace hotplane {

struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::kInvalid;
  std::vector<uint64_t> shape;
};
// REQUIRES a size below 2^60.
uint64_t TensorSpecBytes(const TensorSpec& spec);

// The first bytes of a safetensors file that holds these tensors in this order: the length and the
// JSON, padded with spaces to a multiple of 8.
std::string EncodeSafetensorsHeader(std::span<const TensorSpec> tensors);

struct CheckpointWriterOptions {
  // Data bytes of a shard; a larger tensor gets a shard of its own. 0: one model.safetensors
  // without an index.
  uint64_t shard_bytes_max = 0;
  std::string config_text;   // config.json; none when empty
  uint64_t other_bytes = 0;  // of files that AddFile will write: counted when space is checked
};

// Move-only, not thread-safe. Everything is written under temporary names, `.tmp-*`, and gets its
// name in Finish, the index before the shards: what a kill leaves has no model in it, or an index
// of shards that are missing, and is refused by Checkpoint::Open. Destroyed before it has finished,
// it removes what it wrote.
class CheckpointWriter {
 public:
  ~CheckpointWriter();
  CheckpointWriter(CheckpointWriter&&) = default;
  CheckpointWriter& operator=(CheckpointWriter&&) = delete;

  // `directory` is created when missing; files in the way are kSystem with EEXIST,
  // kCapacity when it does not fit on the disk.
  static Result<CheckpointWriter> Create(Env& env, const std::string& directory,
                                         std::vector<TensorSpec> tensors,
                                         CheckpointWriterOptions options);

  // The next bytes of the concatenated data of all tensors. HP_CHECK: not more than was declared.
  Result<void> Append(std::span<const std::byte> bytes);
  // A further file beside the shards, in pieces. EEXIST as of Create.
  Result<void> AddFile(const std::string& name,
                       const std::function<Result<void>(const FileSink&)>& produce);
  // Writes index and config, syncs, and gives everything its name. HP_CHECK: all declared bytes
  // were appended.
  Result<void> Finish();

  uint64_t data_bytes() const { return data_bytes_; }

 private:
  struct Shard {
    std::string name;
    size_t begin = 0;  // tensors_[begin, end)
    size_t end = 0;
    uint64_t bytes = 0;
  };

  CheckpointWriter(Env& env, std::string directory, std::vector<TensorSpec> tensors,
                   CheckpointWriterOptions options);
  void PlanShards();
  Result<void> CheckSpace() const;
  Result<std::unique_ptr<File>> CreateFile(const std::string& name);
  Result<void> OpenShard();
  Result<void> CloseShard();
  std::string EncodeIndex() const;

  Env* env_;
  std::string directory_;
  std::vector<TensorSpec> tensors_;
  CheckpointWriterOptions options_;
  std::vector<Shard> shards_;
  uint64_t data_bytes_ = 0;

  size_t shard_ = 0;  // the one being written; shards_.size() when all are
  std::unique_ptr<File> file_;
  uint64_t data_start_ = 0;
  uint64_t written_ = 0;              // data bytes of the open shard
  std::vector<std::string> created_;  // names, until all is finished; on disk `.tmp-` before them
  size_t published_ = 0;              // of them, those that have their name
};

}  // namespace hotplane
