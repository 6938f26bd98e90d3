// Result files of benchmarks, for programs without an Env: a name that cannot be written is found
// out before anything is measured.
#pragma once

#include <string>

#include "base/status.h"

namespace hotplane {

// Empty: no file is wanted. kSystem or kCapacity with the reason. A file that is there stays as it
// is, and where there is none, none is left: what is measured may fail or be skipped.
Result<void> CheckResultFile(const std::string& path);
// The same, and replaces its content.
Result<void> WriteResultFile(const std::string& path, const std::string& text);

}  // namespace hotplane
