#include "moe/kernels.h"

#include <array>

#include "base/variant.h"
#include "moe/cpu/kernel_tables.h"

namespace hotplane {
namespace {

// What kernels_avx2.cc and kernels_avx512.cc are compiled with.
bool RunsAvx2() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}
bool RunsAvx512() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512vbmi") != 0 && __builtin_cpu_supports("avx512vnni") != 0;
}

struct Available {
  Available() {
    if (RunsAvx512()) tables[count++] = &kAvx512MoeKernels;
    if (RunsAvx2()) tables[count++] = &kAvx2MoeKernels;
    tables[count++] = &kScalarMoeKernels;
  }
  std::array<const MoeKernels*, 3> tables = {};
  size_t count = 0;
};

}  // namespace

std::span<const MoeKernels* const> AvailableMoeKernels() {
  static const Available available;
  return {available.tables.data(), available.count};
}

Result<const MoeKernels*> SelectMoeKernels(std::optional<std::string_view> forced_name) {
  return SelectVariant(AvailableMoeKernels(), forced_name);
}

}  // namespace hotplane
