#include "quant/slice.h"

#include <cstring>

#include "base/check.h"
#include "format/tsym4.h"

namespace hotplane {
namespace {

// `whole` is [outer, world, run bytes]: of each outer piece the rank's run.
void TakeRuns(std::span<const std::byte> whole, size_t outer, Shard shard,
              std::span<std::byte> slice) {
  HP_CHECK(shard.rank < shard.world && outer > 0);
  const size_t run_bytes = whole.size() / outer / shard.world;
  HP_CHECK(run_bytes * outer * shard.world == whole.size());
  HP_CHECK(slice.size() == outer * run_bytes);
  for (size_t i = 0; i < outer; ++i)
    std::memcpy(slice.data() + i * run_bytes,
                whole.data() + (i * shard.world + shard.rank) * run_bytes, run_bytes);
}

}  // namespace

void SliceGateUp(std::span<const std::byte> whole, Shard shard, std::span<std::byte> slice) {
  TakeRuns(whole, 2, shard, slice);
}

void SliceDown(std::span<const std::byte> whole, size_t hidden, Shard shard,
               std::span<std::byte> slice) {
  TakeRuns(whole, hidden / kStripRows, shard, slice);
}

}  // namespace hotplane
