// Opening layer files without trusting them: the one way in for probe, boot, verify and publish.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "format/layer_file.h"
#include "io/env.h"

namespace hotplane {

// What a layer file must be to be used as this layer of this generation.
struct LayerExpectation {
  std::string path;
  Digest128 generation{};
  Digest128 manifest_digest{};
  Encoding encoding = Encoding::kInvalid;
  uint32_t layer = 0;
  uint32_t model_index = 0;
  LayerGeometry geometry;  // of one shard
  uint32_t shard_rank = 0;
  uint32_t shard_world = 1;
};

struct OpenedHeader {
  std::unique_ptr<File> file;
  LayerLayout layout;
};

// Opens the file, reads its header page and nothing else. kData when it is not what is expected.
Result<OpenedHeader> OpenLayerHeader(Env& env, const LayerExpectation& expected);

// The checked chunk checksums of an opened file.
Result<std::vector<uint64_t>> ReadChunkTable(const OpenedHeader& opened);

// kData naming file, layer, section, expert, chunk, offset and both checksums.
Status ChunkMismatch(const LayerLayout& layout, const std::vector<Chunk>& chunks,
                     const std::string& path, size_t chunk_index, uint64_t expected,
                     uint64_t found);
// "layer 3, section planes13, expert 17", "layer 3, rank 1, ...", or "layer 3, gap ...".
std::string DescribeChunk(const LayerLayout& layout, const Chunk& chunk);

}  // namespace hotplane
