// The routed experts: y = sum over chosen experts of weight * w2(silu(w1 x) * (w3 x)).
#pragma once

#include <cstddef>
#include <cstdint>

#include "result.h"

namespace tinylm {

struct ExpertCall {
  size_t layer;
  size_t tokens;
  const float* x;        // [tokens, hidden]
  const int32_t* ids;    // [tokens, top_k]
  const float* weights;  // [tokens, top_k]
  float* y;              // [tokens, hidden], written
};

// Forward may be called from any thread, also at the same time.
class Experts {
 public:
  virtual ~Experts() = default;
  virtual Result<void> Forward(const ExpertCall& call) const = 0;
};

}  // namespace tinylm
