// HP_CHECK: our own mistakes only. Never for bytes, arguments or errors that come from outside.
#pragma once

namespace hotplane {
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);
}  // namespace hotplane

#define HP_CHECK(condition)                                    \
  do {                                                         \
    if (!(condition)) [[unlikely]]                             \
      ::hotplane::CheckFailed(__FILE__, __LINE__, #condition); \
  } while (false)
