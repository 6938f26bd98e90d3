// The files that a generation has once, whatever its layers: manifest and source stamp. They are
// written under a lock, so that what a killed process left of them can be told from what a living
// one is writing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"
#include "io/env.h"
#include "store/locks.h"

namespace hotplane {

enum class ExistingFile : uint8_t { kInvalid = 0, kKeep, kReplace };

// Publishes `name` in the generation's directory, or leaves the file that is there. Where the file
// system has no locks, several processes may publish at once: the last one's stays.
Result<void> PublishGenerationFile(Env& env, const std::string& directory, const std::string& name,
                                   std::span<const std::byte> content, ExistingFile existing,
                                   const LockWaiting& waiting);

// Removes temporaries of these files that nobody is writing. Waits for nobody; where locks are
// refused it leaves everything.
Result<void> RemoveGenerationTemporaries(Env& env, const std::string& directory);

}  // namespace hotplane
