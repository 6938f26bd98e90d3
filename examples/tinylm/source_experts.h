// The experts computed by this program, from the checkpoint's own weights in float32.
#pragma once

#include <memory>
#include <vector>

#include "checkpoint.h"
#include "experts.h"
#include "model.h"

namespace tinylm {

class SourceExperts : public Experts {
 public:
  // Weights are BF16 or F32; MXFP4, e2m1 nibbles with an e8m0 scale per 32 inputs; or NVFP4, with
  // an e4m3 scale per 16 and one float. float32 holds each value exactly but NVFP4's, which are
  // rounded twice at most.
  static Result<std::unique_ptr<SourceExperts>> Load(const Checkpoint& checkpoint,
                                                     const Config& config);

  Result<void> Forward(const ExpertCall& call) const override;

 private:
  struct Expert {
    Matrix gate, up, down;
  };

  explicit SourceExperts(const Config& config) : config_(config) {}

  Config config_;
  std::vector<Expert> experts_;  // [layer, expert]
};

}  // namespace tinylm
