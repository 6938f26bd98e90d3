// The few fields of config.json that describe how experts are used. None of them decides what the
// expert tensors are.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "io/env.h"

namespace hotplane {

struct ModelConfig {
  std::optional<uint32_t> top_k;       // num_experts_per_tok
  std::optional<double> swiglu_limit;  // absent also when it is 0, which means no clamp
  // quantization_config.weight_block_size: rows and columns that share an FP8 scale.
  std::optional<std::pair<uint32_t, uint32_t>> weight_block_size;
  // The shape as the config has it, to compare with: whole numbers only, anything else is as if it
  // were not there. hidden_size, moe_intermediate_size; n_routed_experts, num_experts or
  // num_local_experts.
  std::optional<uint32_t> hidden, intermediate, experts;
};

// Fields of "text_config" win over those of the outer object: multimodal models keep the language
// model's there. Empty `text` (no config.json) gives no fields. kData naming `file` when the text
// is not a JSON object, or a field that is read is of another type, out of range, or there twice.
Result<ModelConfig> ParseModelConfig(std::string_view text, const std::string& file);
// Of config.json at `path`, or in that folder.
Result<ModelConfig> ReadModelConfig(Env& env, const std::string& path);

}  // namespace hotplane
