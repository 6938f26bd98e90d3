// What options take: checked in one way and told in one phrase, wherever the value came from.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "boot/layer_selection.h"

namespace hotplane::cli {

struct Accepted {
  std::string expected;  // a phrase such as "auto, sign or alt"
  std::function<bool(const std::string& value)> fits;
};

// Without sign, blanks or leading zeros: nobody has to know whether 010 is eight.
Accepted DecimalFrom(uint64_t lowest, uint64_t highest);
// A finite number of seconds that is not below 0.
Accepted Seconds();
Accepted OneOf(std::vector<std::string> words);
// `base`, `delta`, or both with a comma.
Accepted TierList();
// As ParseSize reads it.
Accepted Size();
Accepted SizeAboveZero();
// The size, or `auto`.
Accepted OrAuto(const Accepted& size);
// As ParseDeviceName reads it.
Accepted Device();
// As ParseExpertRange reads it.
Accepted ExpertRangeText();
// "A-B", with B below UINT32_MAX; kUsage otherwise.
Result<ExpertRange> ParseExpertRange(std::string_view text);
// base, fp4, or mixed:FILE
Accepted Precision();
// A variant of the quantizer that runs on this CPU.
Accepted InstructionSet();

}  // namespace hotplane::cli
