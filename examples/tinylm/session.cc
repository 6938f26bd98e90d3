#include "session.h"

#include <algorithm>
#include <cmath>

namespace tinylm {
namespace {

// Queries that go through the keys together: their scores of 1024 positions are 192 KiB, of the
// second cache.
constexpr size_t kQueryBlock = 48;

void RmsNorm(const float* x, const std::vector<float>& weight, float epsilon, float* y) {
  float sum = 0;
  for (size_t i = 0; i < weight.size(); ++i) sum += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(weight.size()) + epsilon);
  for (size_t i = 0; i < weight.size(); ++i) y[i] = x[i] * scale * weight[i];
}

// Scores 0..count-1 become probabilities; those behind, up to `end`, zero.
void Softmax(float* scores, size_t count, size_t end) {
  const float most = *std::max_element(scores, scores + count);
  float sum = 0;
  for (size_t i = 0; i < count; ++i) {
    scores[i] = std::exp(scores[i] - most);
    sum += scores[i];
  }
  const float scale = 1.0f / sum;
  for (size_t i = 0; i < count; ++i) scores[i] *= scale;
  std::fill(scores + count, scores + end, 0.0f);
}

// The indices of the `count` greatest values, greatest first, of equal ones the lower index.
void TopIndices(const float* values, size_t size, size_t count, int32_t* out) {
  for (size_t chosen = 0; chosen < count; ++chosen) {
    int32_t best = -1;
    for (int32_t i = 0; i < static_cast<int32_t>(size); ++i) {
      if (std::find(out, out + chosen, i) != out + chosen) continue;
      if (best < 0 || values[i] > values[best]) best = i;
    }
    out[chosen] = best;
  }
}

void Add(std::vector<float>& x, const std::vector<float>& added, size_t count) {
  for (size_t i = 0; i < count; ++i) x[i] += added[i];
}

}  // namespace

Session::Session(const Model& model, const Experts& experts, size_t positions_max)
    : model_(model), experts_(experts), positions_max_(Padded(positions_max)) {
  const Config& config = model.config;
  cache_.resize(config.layers);
  for (LayerCache& layer : cache_) {
    layer.keys.resize(config.kv_heads * config.head_dim * positions_max_);
    layer.values.resize(config.kv_heads * config.head_dim * positions_max_);
  }
  const size_t half = config.head_dim / 2;
  cosines_.resize(positions_max_ * half);
  sines_.resize(positions_max_ * half);
  for (size_t i = 0; i < half; ++i) {
    const double exponent = 2.0 * static_cast<double>(i) / static_cast<double>(config.head_dim);
    const double frequency = std::pow(config.rope_theta, -exponent);
    for (size_t p = 0; p < positions_max_; ++p) {
      const double angle = static_cast<double>(p) * frequency;
      cosines_[p * half + i] = static_cast<float>(std::cos(angle));
      sines_[p * half + i] = static_cast<float>(std::sin(angle));
    }
  }
}

Result<void> Session::Forward(std::span<const uint8_t> bytes, std::vector<float>& logits) {
  const Config& config = model_.config;
  const size_t tokens = bytes.size();
  if (tokens > positions_max_ - position_) {
    return Failure(HOTPLANE_USAGE, "the text is longer than its session", {},
                   std::to_string(positions_max_) + " bytes or less",
                   std::to_string(position_ + tokens));
  }
  x_.resize(tokens * config.hidden);
  normed_.resize(tokens * config.hidden);
  added_.resize(tokens * config.hidden);
  for (size_t t = 0; t < tokens; ++t) {
    std::copy_n(&model_.embedding[bytes[t] * config.hidden], config.hidden, &x_[t * config.hidden]);
  }
  const auto norm = [&](const std::vector<float>& weight) {
    for (size_t at = 0; at < x_.size(); at += config.hidden) {
      RmsNorm(&x_[at], weight, config.norm_epsilon, &normed_[at]);
    }
  };
  for (size_t layer = 0; layer < config.layers; ++layer) {
    norm(model_.layers[layer].attention_norm);
    Attention(layer, tokens);
    Add(x_, added_, x_.size());

    norm(model_.layers[layer].moe_norm);
    const Result<void> routed = Route(layer, tokens);
    if (!routed) return routed;
    const Result<void> done = experts_.Forward(
        {layer, tokens, normed_.data(), ids_.data(), weights_.data(), added_.data()});
    if (!done) return done;
    Add(x_, added_, x_.size());
  }
  norm(model_.norm);
  logits.resize(tokens * kVocabulary);
  MatMul(tokens, normed_.data(), config.hidden, model_.head.View(), logits.data(), kVocabulary);
  position_ += tokens;
  return {};
}

// added_ = the attention's output for normed_.
void Session::Attention(size_t layer, size_t tokens) {
  const Config& config = model_.config;
  const LayerWeights& weights = model_.layers[layer];
  const size_t q_size = config.heads * config.head_dim;
  const size_t kv_size = config.kv_heads * config.head_dim;
  q_.resize(tokens * q_size);
  k_.resize(tokens * kv_size);
  v_.resize(tokens * kv_size);
  attended_.resize(tokens * q_size);
  MatMul(tokens, normed_.data(), config.hidden, weights.q.View(), q_.data(), q_size);
  MatMul(tokens, normed_.data(), config.hidden, weights.k.View(), k_.data(), kv_size);
  MatMul(tokens, normed_.data(), config.hidden, weights.v.View(), v_.data(), kv_size);

  const float scale = 1.0f / std::sqrt(static_cast<float>(config.head_dim));
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t at = t * q_size; at < (t + 1) * q_size; at += config.head_dim) {
      RmsNorm(&q_[at], weights.q_norm, config.norm_epsilon, &q_[at]);
      Rotate(&q_[at], position_ + t);
      for (size_t i = 0; i < config.head_dim; ++i) q_[at + i] *= scale;
    }
    for (size_t at = t * kv_size; at < (t + 1) * kv_size; at += config.head_dim) {
      RmsNorm(&k_[at], weights.k_norm, config.norm_epsilon, &k_[at]);
      Rotate(&k_[at], position_ + t);
    }
  }
  Store(layer, tokens);
  for (size_t head = 0; head < config.heads; ++head) AttendHead(layer, head, tokens);
  MatMul(tokens, attended_.data(), q_size, weights.o.View(), added_.data(), config.hidden);
}

void Session::Rotate(float* head, size_t position) const {
  const size_t half = model_.config.head_dim / 2;
  const float* cosines = &cosines_[position * half];
  const float* sines = &sines_[position * half];
  for (size_t i = 0; i < half; ++i) {
    const float low = head[i];
    const float high = head[i + half];
    head[i] = low * cosines[i] - high * sines[i];
    head[i + half] = high * cosines[i] + low * sines[i];
  }
}

void Session::Store(size_t layer, size_t tokens) {
  const size_t dim = model_.config.head_dim;
  const size_t kv_heads = model_.config.kv_heads;
  for (size_t t = 0; t < tokens; ++t) {
    const size_t position = position_ + t;
    for (size_t head = 0; head < kv_heads; ++head) {
      float* keys = &cache_[layer].keys[head * dim * positions_max_];
      float* values = &cache_[layer].values[head * dim * positions_max_];
      const size_t from = (t * kv_heads + head) * dim;
      for (size_t i = 0; i < dim; ++i) {
        keys[(position / kPanel * dim + i) * kPanel + position % kPanel] = k_[from + i];
        values[(i / kPanel * positions_max_ + position) * kPanel + i % kPanel] = v_[from + i];
      }
    }
  }
}

void Session::AttendHead(size_t layer, size_t head, size_t tokens) {
  const Config& config = model_.config;
  const size_t dim = config.head_dim;
  const size_t q_size = config.heads * dim;
  const size_t kv_head = head / (config.heads / config.kv_heads);
  const float* keys = &cache_[layer].keys[kv_head * dim * positions_max_];
  const float* values = &cache_[layer].values[kv_head * dim * positions_max_];
  scores_.resize(kQueryBlock * positions_max_);
  for (size_t first = 0; first < tokens; first += kQueryBlock) {
    const size_t count = std::min(kQueryBlock, tokens - first);
    const size_t end = position_ + first + count;
    const size_t at = first * q_size + head * dim;
    MatMul(count, &q_[at], q_size, {keys, dim, end, dim * kPanel}, scores_.data(), positions_max_);
    for (size_t t = 0; t < count; ++t) {
      Softmax(&scores_[t * positions_max_], position_ + first + t + 1, end);
    }
    MatMul(count, scores_.data(), positions_max_, {values, end, dim, positions_max_ * kPanel},
           &attended_[at], q_size);
  }
}

// ids_ and weights_: the top_k experts of each token, and the softmax over their logits. That over
// all experts, renormalized to the chosen ones, is the same.
Result<void> Session::Route(size_t layer, size_t tokens) {
  const Config& config = model_.config;
  const size_t stride = Padded(config.experts);
  router_logits_.resize(tokens * stride);
  ids_.resize(tokens * config.top_k);
  weights_.resize(tokens * config.top_k);
  MatMul(tokens, normed_.data(), config.hidden, model_.layers[layer].router.View(),
         router_logits_.data(), stride);
  for (size_t t = 0; t < tokens; ++t) {
    const float* logits = &router_logits_[t * stride];
    int32_t* ids = &ids_[t * config.top_k];
    float* weights = &weights_[t * config.top_k];
    TopIndices(logits, config.experts, config.top_k, ids);
    for (size_t slot = 0; slot < config.top_k; ++slot) weights[slot] = logits[ids[slot]];
    Softmax(weights, config.top_k, config.top_k);
    if (!std::isfinite(weights[0])) {
      return Failure(HOTPLANE_DATA, "a routing weight is not a number", {}, "finite weights",
                     "layer " + std::to_string(layer));
    }
    if (routed_ == nullptr) continue;
    for (size_t slot = 0; slot < config.top_k; ++slot) {
      (*routed_)[layer * config.experts + static_cast<size_t>(ids[slot])] +=
          static_cast<double>(weights[slot]);
    }
  }
  return {};
}

}  // namespace tinylm
