// The source stamp: how the files looked that a store was built from, so that a later boot can tell
// without opening them that they are the same. Beside the manifest, and not part of the identity:
// what does not match it is fingerprinted.
#pragma once

#include <string>

#include "base/status.h"
#include "store/store.h"

namespace hotplane {

// Name, size, modification time and inode of every shard, found without opening any of them.
Result<std::string> MakeSourceStamp(Env& env, const std::string& checkpoint_path);

// Publishes the stamp of a checkpoint whose fingerprint was found to be the generation's. A store
// that cannot be written stays without, which costs later boots the fingerprint; that is logged.
void KeepSourceStamp(const Generation& generation, const std::string& stamp);

bool MatchesSourceStamp(const Generation& generation, const std::string& stamp);

}  // namespace hotplane
