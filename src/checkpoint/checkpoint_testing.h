// Checkpoints in memory for tests: made from named tensors, changed, written again in other shards.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/worker_pool.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/moe_source.h"
#include "checkpoint/safetensors_writer.h"
#include "checkpoint/synth_checkpoint.h"
#include "io/env.h"
#include "io/mem_env.h"

namespace hotplane {

inline std::span<const std::byte> Bytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// A file of `8 + header` bytes and `data_bytes` zeros; the length field says `header.size()`.
inline std::string RawSafetensors(std::string_view header, size_t data_bytes) {
  std::string file(8, '\0');
  for (size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(header.size() >> (8 * i));
  return file + std::string(header) + std::string(data_bytes, '\0');
}

// All of a checkpoint, to change at will and write again.
struct Model {
  struct Entry {
    Dtype dtype = Dtype::kInvalid;
    std::vector<uint64_t> shape;
    std::vector<std::byte> data;
  };
  std::map<std::string, Entry> tensors;
  std::string config_text;

  // Zeros under this name.
  void Add(const std::string& name, Dtype dtype, std::vector<uint64_t> shape) {
    const uint64_t bytes = TensorSpecBytes({name, dtype, shape});
    tensors[name] = {dtype, std::move(shape), std::vector<std::byte>(bytes)};
  }
  void Rename(const std::string& from, const std::string& to) {
    auto node = tensors.extract(from);
    ASSERT_FALSE(node.empty()) << from;
    node.key() = to;
    tensors.insert(std::move(node));
  }
  void ReplaceInNames(const std::string& from, const std::string& to) {
    std::map<std::string, Entry> renamed;
    for (auto& [name, entry] : tensors) {
      std::string changed = name;
      for (size_t at = changed.find(from); at != std::string::npos;
           at = changed.find(from, at + to.size())) {
        changed.replace(at, from.size(), to);
      }
      renamed[changed] = std::move(entry);
    }
    tensors = std::move(renamed);
  }
};

// Writes `model` in the order of `names` (by name when empty).
inline void WriteModel(Env& env, const std::string& directory, const Model& model,
                       uint64_t shard_bytes_max, bool reverse_order = false) {
  std::vector<TensorSpec> specs;
  std::vector<const Model::Entry*> entries;
  const auto add = [&](const std::string& name, const Model::Entry& entry) {
    specs.push_back({name, entry.dtype, entry.shape});
    entries.push_back(&entry);
  };
  if (reverse_order) {
    for (auto it = model.tensors.rbegin(); it != model.tensors.rend(); ++it) {
      add(it->first, it->second);
    }
  } else {
    for (const auto& [name, entry] : model.tensors) add(name, entry);
  }
  Result<CheckpointWriter> writer = CheckpointWriter::Create(
      env, directory, std::move(specs),
      {.shard_bytes_max = shard_bytes_max, .config_text = model.config_text});
  ASSERT_TRUE(writer) << writer.error().ToString();
  for (const Model::Entry* entry : entries) ASSERT_TRUE(writer->Append(entry->data));
  const Result<void> finished = writer->Finish();
  ASSERT_TRUE(finished) << finished.error().ToString();
}

inline Model ReadModel(const Checkpoint& checkpoint) {
  Model model;
  model.config_text = checkpoint.config_text();
  for (const Tensor& tensor : checkpoint.tensors()) {
    model.Add(tensor.name, tensor.dtype, tensor.shape);
    EXPECT_TRUE(checkpoint.Read(tensor, 0, model.tensors[tensor.name].data));
  }
  return model;
}

// A synthetic checkpoint, opened and read back.
inline Model SynthModel(const SynthCheckpointOptions& options) {
  MemEnv env;
  WorkerPool pool(1);
  const auto report = WriteSynthCheckpoint(env, "/synth", options, pool);
  EXPECT_TRUE(report) << report.error().ToString();
  const Result<Checkpoint> checkpoint = Checkpoint::Open(env, "/synth");
  EXPECT_TRUE(checkpoint) << checkpoint.error().ToString();
  return checkpoint ? ReadModel(*checkpoint) : Model{};
}

// Discovery over the model as one file.
inline Result<MoeModel> Discover(const Model& model) {
  MemEnv env;
  WriteModel(env, "/model", model, 0);
  HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(env, "/model"));
  HP_ASSIGN(MoeModel found, DiscoverMoe(checkpoint));
  for (MoeLayer& layer : found.layers) layer.experts.clear();  // they point into `checkpoint`
  return found;
}

// Of a checkpoint that must be good.
inline Digest128 FingerprintOf(Env& env, const std::string& directory) {
  const auto digest = [&]() -> Result<Digest128> {
    HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(env, directory));
    HP_ASSIGN(const MoeModel model, DiscoverMoe(checkpoint));
    return Fingerprint(checkpoint, model);
  }();
  EXPECT_TRUE(digest) << digest.error().ToString();
  return digest.value_or(Digest128{});
}

}  // namespace hotplane
