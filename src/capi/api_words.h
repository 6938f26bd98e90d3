// What the library says, in the words of who calls it from C or Python. Its messages name the
// options of the command line; where the APIs have an argument or a function for it, that is what
// can be done about an error there.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace hotplane::capi {

// Options become arguments ("--staging-limit 12M" `staging_limit_bytes` of 12M), and the commands
// that are functions become calls: "hotplane build A --store B" build(A, B). Other commands stay:
// they are there for a shell.
std::string InApiWords(std::string_view text);

// Of what would be right, what was found, and what to do.
Status InApiWords(const Status& status);

}  // namespace hotplane::capi
