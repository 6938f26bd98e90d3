// What a store with several generations asks of the commands that read it.
#pragma once

#include <string>
#include <vector>

#include "format/checksum.h"

namespace hotplane::cli {

// For a command that has written generation `written` of the store: where it now has several, one
// of which must be chosen, says so in the log and appends it to `warnings`. A store that cannot be
// listed has none.
void WarnOfSeveralGenerations(const std::string& store, const Digest128& written,
                              std::vector<std::string>* warnings);

}  // namespace hotplane::cli
