// model.safetensors.index.json: which shard holds which tensor.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace hotplane {

inline constexpr char kShardIndexName[] = "model.safetensors.index.json";

struct ShardIndexEntry {
  std::string tensor;
  uint32_t shard = 0;  // index into ShardIndex::shards
};

struct ShardIndex {
  std::vector<std::string> shards;       // plain file names, sorted, each once
  std::vector<ShardIndexEntry> entries;  // sorted by tensor, each once
};

// kData with file, offset, expected and found: malformed JSON, no weight_map, a tensor or a field
// twice, a shard name that is not the plain name of a .safetensors file in the same folder.
Result<ShardIndex> ParseShardIndex(std::string_view text, const std::string& file);

}  // namespace hotplane
