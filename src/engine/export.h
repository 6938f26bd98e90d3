// Export: one part of one layer as raw bytes, all experts in order.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/cancel.h"
#include "base/status.h"
#include "quant/quantize.h"
#include "store/store.h"

namespace hotplane {

struct ExportOptions {
  uint32_t layer = 0;
  std::string part;                // planes13, sc13, planes2, sc2, bias13, bias2, fp13, fp2
  std::optional<uint32_t> expert;  // none: all
  bool encoded = false;  // fp parts as stored (quintals stay quintals) instead of as nibble planes
  std::string output_path;
  const Kernels* kernels = nullptr;  // null: the best for this CPU
  const CancelToken* cancel = nullptr;
};

struct ExportReport {
  uint64_t bytes_written = 0;
  Encoding encoding = Encoding::kInvalid;  // of the file the bytes came from
};

// Every chunk is verified before it is used. fp parts come from the nibble file, or from base codes
// merged with the quintal file. The output appears under its name only when it is whole. kData for
// damage or an absent tier, kUsage for a part, layer or expert that the model does not have.
Result<ExportReport> ExportPart(const Generation& generation, const ExportOptions& options);

}  // namespace hotplane
