// The dense part of the bundled model family: a Qwen3-MoE over bytes, in float32.
#pragma once

#include <cstddef>
#include <vector>

#include "checkpoint.h"
#include "matmul.h"
#include "result.h"

namespace tinylm {

// A token is a byte.
constexpr size_t kVocabulary = 256;

struct Config {
  size_t layers = 0;
  size_t hidden = 0;
  size_t heads = 0;     // of queries
  size_t kv_heads = 0;  // of keys and values; divides `heads`
  size_t head_dim = 0;
  size_t experts = 0;
  size_t top_k = 0;  // experts per token
  size_t intermediate = 0;
  size_t positions_max = 0;
  float norm_epsilon = 0;
  double rope_theta = 0;
};

// From config.json, checked: sizes that loops and panels can take, and none of the family's
// variations that Session does not compute.
Result<Config> ReadConfig(const Checkpoint& checkpoint);

struct LayerWeights {
  std::vector<float> attention_norm;  // [hidden]
  Matrix q, k, v, o;
  std::vector<float> q_norm, k_norm;  // [head_dim]
  std::vector<float> moe_norm;        // [hidden]
  Matrix router;                      // [experts, hidden]
};

// Immutable; shared by all sessions.
struct Model {
  Config config;
  std::vector<float> embedding;  // [256, hidden]
  std::vector<LayerWeights> layers;
  std::vector<float> norm;  // [hidden]
  Matrix head;              // [256, hidden]
};

// Takes the names of Hugging Face or of DeepSeek, whichever the checkpoint has.
Result<Model> LoadModel(const Checkpoint& checkpoint);

}  // namespace tinylm
