#include <algorithm>
#include <array>

#include "base/check.h"
#include "checkpoint/checkpoint.h"

namespace hotplane {
namespace {

struct DtypeEntry {
  Dtype dtype;
  std::string_view name;
  size_t bytes;
};
constexpr std::array kDtypes = {
    DtypeEntry{Dtype::kBool, "BOOL", 1},      DtypeEntry{Dtype::kU8, "U8", 1},
    DtypeEntry{Dtype::kI8, "I8", 1},          DtypeEntry{Dtype::kF8E4m3, "F8_E4M3", 1},
    DtypeEntry{Dtype::kF8E5m2, "F8_E5M2", 1}, DtypeEntry{Dtype::kF8E8m0, "F8_E8M0", 1},
    DtypeEntry{Dtype::kI16, "I16", 2},        DtypeEntry{Dtype::kU16, "U16", 2},
    DtypeEntry{Dtype::kF16, "F16", 2},        DtypeEntry{Dtype::kBf16, "BF16", 2},
    DtypeEntry{Dtype::kI32, "I32", 4},        DtypeEntry{Dtype::kU32, "U32", 4},
    DtypeEntry{Dtype::kF32, "F32", 4},        DtypeEntry{Dtype::kF64, "F64", 8},
    DtypeEntry{Dtype::kI64, "I64", 8},        DtypeEntry{Dtype::kU64, "U64", 8},
};

const DtypeEntry& EntryOf(Dtype dtype) {
  const auto* found = std::find_if(kDtypes.begin(), kDtypes.end(),
                                   [&](const DtypeEntry& entry) { return entry.dtype == dtype; });
  HP_CHECK(found != kDtypes.end());
  return *found;
}

}  // namespace

std::string_view DtypeName(Dtype dtype) { return EntryOf(dtype).name; }
size_t DtypeBytes(Dtype dtype) { return EntryOf(dtype).bytes; }

std::optional<Dtype> ParseDtype(std::string_view name) {
  for (const DtypeEntry& entry : kDtypes) {
    if (entry.name == name) return entry.dtype;
  }
  return std::nullopt;
}

}  // namespace hotplane
