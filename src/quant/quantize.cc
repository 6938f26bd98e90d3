#include "quant/quantize.h"

#include <cpuid.h>

#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/format_text.h"
#include "base/variant.h"
#include "quant/kernel_tables.h"

namespace hotplane {
namespace {

// clang 14 has no __builtin_cpu_supports("f16c").
bool HasF16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// What kernels_avx2.cc and kernels_avx512.cc are compiled with.
bool RunsAvx2() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("popcnt") != 0 && HasF16c();
}
bool RunsAvx512() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("popcnt") != 0;
}

struct Available {
  Available() {
    if (RunsAvx512()) tables[count++] = &kAvx512Kernels;
    if (RunsAvx2()) tables[count++] = &kAvx2Kernels;
    tables[count++] = &kScalarKernels;
  }
  std::array<const Kernels*, 3> tables = {};
  size_t count = 0;
};

}  // namespace

size_t SourceRowBytes(SourceFormat format, size_t k) {
  switch (format) {
    case SourceFormat::kMxfp4:
    case SourceFormat::kNvfp4: return k / 2;
    case SourceFormat::kFp8: return k;
    case SourceFormat::kBf16:
    case SourceFormat::kF16: return k * 2;
    case SourceFormat::kF32: return k * 4;
    case SourceFormat::kPlanes:
    case SourceFormat::kInvalid: break;
  }
  HP_CHECK(format != SourceFormat::kInvalid && format != SourceFormat::kPlanes);
  return 0;
}

bool ZerosAlternate(ZeroMode mode, const ZeroCount& count) {
  if (mode != ZeroMode::kAuto) return mode == ZeroMode::kAlternate;
  // 95% is 19/20; compared as parts so that counts near the top of the range cannot overflow.
  const uint64_t more = std::max(count.positive, count.negative);
  const uint64_t fewer = std::min(count.positive, count.negative);
  return more / 19 > fewer || (more / 19 == fewer && more % 19 > 0);
}

std::span<const Kernels* const> AvailableKernels() {
  static const Available available;
  return {available.tables.data(), available.count};
}

Result<const Kernels*> SelectKernels(std::optional<std::string_view> forced_name) {
  return SelectVariant(AvailableKernels(), forced_name);
}

Result<void> CheckPlaneShape(uint64_t n, uint64_t k, std::string_view what) {
  if (n > 0 && k > 0 && n % kStripRows == 0 && k % kTileColumns == 0) return {};
  return Fail(Status::Data(Text("{} has a shape that the planes cannot hold", what))
                  .Expected(Text("rows a multiple of {}, columns a multiple of {}, neither 0",
                                 kStripRows, kTileColumns))
                  .Found(Text("[{}, {}]", n, k)));
}

}  // namespace hotplane
