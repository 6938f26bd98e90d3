#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace hotplane {

void CheckFailed(const char* file, int line, const char* condition) {
  std::fprintf(stderr, "hotplane: internal error at %s:%d: %s\n", file, line, condition);
  std::abort();
}

}  // namespace hotplane
