// One text's way through the model: a KV cache, and the forward that fills it.
#pragma once

#include <span>
#include <vector>

#include "experts.h"
#include "model.h"

namespace tinylm {

// Used by one thread. A byte's logits are the same to the last bit however many bytes each Forward
// took before and with it, as long as that holds for the experts.
class Session {
 public:
  // `positions_max`: bytes that the text may have. Model and experts must outlive the session.
  Session(const Model& model, const Experts& experts, size_t positions_max);

  // Takes the next bytes of the text; logits [bytes, 256] are of the byte after each of them.
  Result<void> Forward(std::span<const uint8_t> bytes, std::vector<float>& logits);

  size_t position() const { return position_; }
  void Restart() { position_ = 0; }

  // From now on routing weights are added to `sums` [layers, experts]; null: none are.
  void CountRouting(std::vector<double>* sums) { routed_ = sums; }

 private:
  // Keys [kv_head][position/16][head_dim][position%16] and values [kv_head][dim/16][position][16]:
  // panels whose outputs are positions, and head dimensions.
  struct LayerCache {
    std::vector<float> keys, values;
  };

  void Attention(size_t layer, size_t tokens);
  void AttendHead(size_t layer, size_t head, size_t tokens);
  void Store(size_t layer, size_t tokens);
  void Rotate(float* head, size_t position) const;
  Result<void> Route(size_t layer, size_t tokens);

  const Model& model_;
  const Experts& experts_;
  const size_t positions_max_;  // a multiple of 16
  size_t position_ = 0;
  std::vector<LayerCache> cache_;
  std::vector<float> cosines_, sines_;  // [position, head_dim/2]
  std::vector<double>* routed_ = nullptr;

  // Of one Forward: a row per token.
  std::vector<float> x_, normed_, q_, k_, v_, attended_, added_, scores_, router_logits_;
  std::vector<int32_t> ids_;
  std::vector<float> weights_;
};

}  // namespace tinylm
