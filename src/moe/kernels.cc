#include "moe/kernels.h"

#include <array>
#include <string>

#include "base/format_text.h"
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
  const std::span<const MoeKernels* const> available = AvailableMoeKernels();
  if (!forced_name) return available.front();
  std::string names;
  for (const MoeKernels* kernels : available) {
    if (kernels->name == *forced_name) return kernels;
    names += names.empty() ? "" : ", ";
    names += kernels->name;
  }
  return Fail(Status::Usage("the instruction set asked for is unknown or cannot run on this CPU")
                  .Expected(Text("one of {}", names))
                  .Found(Text("\"{}\"", *forced_name))
                  .Advice("leave it out to get the best one"));
}

}  // namespace hotplane
