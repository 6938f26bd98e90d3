// Text that goes on from a prompt, a byte at a time.
#pragma once

#include <string>

#include "experts.h"
#include "model.h"
#include "options.h"

namespace tinylm {

struct Generation {
  std::string text;           // without the prompt
  double prompt_seconds = 0;  // until the first byte was known
  double seconds = 0;         // for the bytes after it
  // Of the bytes after the first; 0 where there are none.
  double TokensPerSecond() const {
    return text.size() < 2 ? 0 : static_cast<double>(text.size() - 1) / seconds;
  }
};

// Takes prompt, tokens, temperature, seed and no_cache of `options`. Ends early at byte 0, which
// ends a text in the model's training. The same options give the same text.
Result<Generation> Generate(const Model& model, const Experts& experts, const Options& options);

}  // namespace tinylm
