#include "format/kinds.h"

namespace hotplane {

std::string_view TierName(Tier tier) {
  switch (tier) {
    case Tier::kBase: return "base";
    case Tier::kDelta: return "delta";
    case Tier::kInvalid: break;
  }
  return "invalid";
}

std::string_view EncodingName(Encoding encoding) {
  switch (encoding) {
    case Encoding::kBase: return "base";
    case Encoding::kDeltaQuintal: return "delta-quintal";
    case Encoding::kDeltaNibble: return "delta-nibble";
    case Encoding::kInvalid: break;
  }
  return "invalid";
}

std::string_view ProjectionName(Projection projection) {
  switch (projection) {
    case Projection::kGate: return "gate";
    case Projection::kUp: return "up";
    case Projection::kDown: return "down";
  }
  return "invalid";
}

std::string_view SourceFormatName(SourceFormat format) {
  switch (format) {
    case SourceFormat::kMxfp4: return "mxfp4";
    case SourceFormat::kBf16: return "bf16";
    case SourceFormat::kF16: return "f16";
    case SourceFormat::kF32: return "f32";
    case SourceFormat::kNvfp4: return "nvfp4";
    case SourceFormat::kFp8: return "fp8";
    case SourceFormat::kPlanes: return "planes";
    case SourceFormat::kInvalid: break;
  }
  return "invalid";
}

std::optional<SourceFormat> ParseSourceFormat(std::string_view name) {
  for (SourceFormat format :
       {SourceFormat::kMxfp4, SourceFormat::kBf16, SourceFormat::kF16, SourceFormat::kF32,
        SourceFormat::kNvfp4, SourceFormat::kFp8, SourceFormat::kPlanes}) {
    if (SourceFormatName(format) == name) return format;
  }
  return std::nullopt;
}

std::string_view ZeroModeName(ZeroMode mode) {
  switch (mode) {
    case ZeroMode::kAuto: return "auto";
    case ZeroMode::kSign: return "sign";
    case ZeroMode::kAlternate: return "alt";
    case ZeroMode::kInvalid: break;
  }
  return "invalid";
}

std::optional<ZeroMode> ParseZeroMode(std::string_view name) {
  for (ZeroMode mode : {ZeroMode::kAuto, ZeroMode::kSign, ZeroMode::kAlternate}) {
    if (ZeroModeName(mode) == name) return mode;
  }
  return std::nullopt;
}

std::string_view PrecisionName(Precision precision) {
  return precision == Precision::kFp4 ? "fp4" : "base";
}

std::optional<Precision> ParsePrecision(std::string_view name) {
  if (name == "base") return Precision::kBase;
  if (name == "fp4") return Precision::kFp4;
  return std::nullopt;
}

}  // namespace hotplane
