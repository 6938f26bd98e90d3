// The source stamp: how the files looked that a store was built from, so that a later boot can tell
// without opening them that they are the same. Beside the manifest, and not part of the identity:
// what does not match it is fingerprinted.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "store/store.h"

namespace hotplane {

// Name, size, modification time and inode of every shard, found without opening any of them.
Result<std::string> MakeSourceStamp(Env& env, const std::string& checkpoint_path);

// Publishes the stamp of a checkpoint whose fingerprint was found to be the generation's. A store
// that cannot be written stays without, which costs later boots the fingerprint; that is logged.
void KeepSourceStamp(const Generation& generation, const std::string& stamp);

// A shard as a stamp has it.
struct StampedShard {
  std::string name;
  uint64_t bytes = 0;
  int64_t modified_ns = 0;  // since the epoch
  uint64_t inode = 0;
};
inline constexpr std::string_view kSourceStampBegin = "hotplane source stamp 1\n";
// kData naming `file` and the line for what is no stamp.
Result<std::vector<StampedShard>> ParseSourceStamp(std::string_view stamp, const std::string& file);

bool MatchesSourceStamp(const Generation& generation, const std::string& stamp);

}  // namespace hotplane
