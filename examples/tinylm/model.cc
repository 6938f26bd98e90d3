#include "model.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

namespace tinylm {
namespace {

using nlohmann::json;

// Far above the family's models; sums and products of sizes below it cannot overflow.
constexpr uint64_t kSizeMax = 1 << 16;

struct Names {
  const char *embedding, *head, *norm, *layer;
  const char *attention_norm, *q, *k, *v, *o, *q_norm, *k_norm, *moe_norm, *router;
};
constexpr Names kHuggingFace = {"model.embed_tokens.weight",
                                "lm_head.weight",
                                "model.norm.weight",
                                "model.layers.",
                                "input_layernorm.weight",
                                "self_attn.q_proj.weight",
                                "self_attn.k_proj.weight",
                                "self_attn.v_proj.weight",
                                "self_attn.o_proj.weight",
                                "self_attn.q_norm.weight",
                                "self_attn.k_norm.weight",
                                "post_attention_layernorm.weight",
                                "mlp.gate.weight"};
constexpr Names kDeepSeek = {
    "embed.weight",     "head.weight",        "norm.weight",        "layers.",
    "attn_norm.weight", "attn.wq.weight",     "attn.wk.weight",     "attn.wv.weight",
    "attn.wo.weight",   "attn.q_norm.weight", "attn.k_norm.weight", "ffn_norm.weight",
    "ffn.gate.weight"};

// Reads what LoadModel asks for and keeps the first failure, so that the list of tensors stays one.
class WeightReader {
 public:
  explicit WeightReader(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  std::vector<float> Rows(const std::string& name, const std::vector<uint64_t>& shape) {
    if (error_) return {};
    Result<std::vector<float>> values = checkpoint_.Floats(name, shape);
    if (values) return std::move(*values);
    error_ = std::make_unique<Error>(values.error());
    return {};
  }
  Matrix Transposed(const std::string& name, size_t out, size_t in) {
    const std::vector<float> rows = Rows(name, {out, in});
    return error_ ? Matrix() : Matrix(rows, out, in);
  }
  const Error* error() const { return error_.get(); }

 private:
  const Checkpoint& checkpoint_;
  std::unique_ptr<Error> error_;
};

Result<json> ReadJson(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return Failure(HOTPLANE_SYSTEM, "the model's config cannot be opened", path, "a file",
                   std::strerror(errno));
  }
  std::ostringstream text;
  text << file.rdbuf();
  json config = ParseUntrusted(text.str());
  if (!config.is_object()) {
    return Failure(HOTPLANE_DATA, "the model's config is not JSON", path, "an object",
                   config.is_discarded() ? "malformed text" : config.type_name());
  }
  return config;
}

// The same for the numbers of config.json.
class ConfigReader {
 public:
  // `config` is an object, of the file `path`.
  ConfigReader(const json& config, std::string path) : config_(config), path_(std::move(path)) {}

  size_t Size(const char* key, const char* other_key = "") {
    const char* used = config_.contains(key) ? key : other_key;
    const json value = config_.value(used, json());
    if (value.is_number_unsigned() && value.get<uint64_t>() > 0 &&
        value.get<uint64_t>() <= kSizeMax) {
      return value.get<size_t>();
    }
    Fail(key, "a number from 1 to " + std::to_string(kSizeMax), value);
    return 1;
  }
  double Positive(const json& value, const char* key) {
    if (value.is_number() && std::isfinite(value.get<double>()) && value.get<double>() > 0) {
      return value.get<double>();
    }
    Fail(key, "a number above 0", value);
    return 1;
  }
  void Require(const char* key, const json& wanted) {
    const json value = config_.value(key, wanted);
    if (value != wanted) Fail(key, wanted.dump(), value);
  }
  void Check(bool holds, const char* key, const std::string& expected) {
    if (!holds) Fail(key, expected, config_.value(key, json()));
  }
  const Error* error() const { return error_.get(); }

 private:
  void Fail(const std::string& key, const std::string& expected, const json& found) {
    if (error_) return;
    error_ = std::make_unique<Error>(
        Failure(HOTPLANE_DATA, "this program does not compute the model: " + key, path_, expected,
                found.dump(-1, ' ', true, json::error_handler_t::replace))
            .value());
  }

  const json& config_;
  std::string path_;
  std::unique_ptr<Error> error_;
};

LayerWeights ReadLayer(WeightReader& reader, const Names& names, const Config& config,
                       size_t layer) {
  const std::string prefix = names.layer + std::to_string(layer) + ".";
  const size_t hidden = config.hidden;
  const size_t q_size = config.heads * config.head_dim;
  const size_t kv_size = config.kv_heads * config.head_dim;
  LayerWeights weights;
  weights.attention_norm = reader.Rows(prefix + names.attention_norm, {hidden});
  weights.q = reader.Transposed(prefix + names.q, q_size, hidden);
  weights.k = reader.Transposed(prefix + names.k, kv_size, hidden);
  weights.v = reader.Transposed(prefix + names.v, kv_size, hidden);
  weights.o = reader.Transposed(prefix + names.o, hidden, q_size);
  weights.q_norm = reader.Rows(prefix + names.q_norm, {config.head_dim});
  weights.k_norm = reader.Rows(prefix + names.k_norm, {config.head_dim});
  weights.moe_norm = reader.Rows(prefix + names.moe_norm, {hidden});
  weights.router = reader.Transposed(prefix + names.router, config.experts, hidden);
  return weights;
}

}  // namespace

Result<Config> ReadConfig(const Checkpoint& checkpoint) {
  const std::string path = checkpoint.folder() + "/config.json";
  const Result<json> file = ReadJson(path);
  if (!file) return Failure(file.error());
  ConfigReader reader(*file, path);
  Config config;
  config.layers = reader.Size("num_hidden_layers");
  config.hidden = reader.Size("hidden_size");
  config.heads = reader.Size("num_attention_heads");
  config.kv_heads = reader.Size("num_key_value_heads");
  config.head_dim = reader.Size("head_dim");
  config.experts = reader.Size("num_local_experts", "num_experts");
  config.top_k = reader.Size("num_experts_per_tok");
  config.intermediate = reader.Size("moe_intermediate_size");
  config.positions_max = reader.Size("max_position_embeddings");
  const json rope = file->value("rope_parameters", *file);
  config.rope_theta =
      reader.Positive(rope.is_object() ? rope.value("rope_theta", json()) : rope, "rope_theta");
  reader.Check(!rope.is_object() || rope.value("rope_type", json("default")) == "default",
               "rope_parameters", "rope_type default");
  const double epsilon = reader.Positive(file->value("rms_norm_eps", json()), "rms_norm_eps");
  config.norm_epsilon = static_cast<float>(epsilon);

  reader.Require("vocab_size", kVocabulary);
  reader.Require("hidden_act", "silu");
  reader.Require("norm_topk_prob", true);
  reader.Require("attention_bias", false);
  reader.Require("tie_word_embeddings", false);
  reader.Require("use_sliding_window", false);
  reader.Require("decoder_sparse_step", 1);
  reader.Require("mlp_only_layers", json::array());
  reader.Require("rope_scaling", json());
  reader.Check(config.hidden % 64 == 0, "hidden_size", "a multiple of 64");
  reader.Check(config.intermediate % 64 == 0, "moe_intermediate_size", "a multiple of 64");
  reader.Check(config.head_dim % kPanel == 0, "head_dim", "a multiple of 16");
  reader.Check(config.heads % config.kv_heads == 0, "num_key_value_heads",
               "a divisor of num_attention_heads");
  reader.Check(config.top_k <= config.experts, "num_experts_per_tok", "as many experts or more");
  if (reader.error() != nullptr) return Failure(*reader.error());
  return config;
}

Result<Model> LoadModel(const Checkpoint& checkpoint) {
  const Result<Config> config = ReadConfig(checkpoint);
  if (!config) return Failure(config.error());
  const Names& names = checkpoint.HasDeepSeekNames() ? kDeepSeek : kHuggingFace;
  WeightReader reader(checkpoint);
  Model model;
  model.config = *config;
  model.embedding = reader.Rows(names.embedding, {kVocabulary, config->hidden});
  for (size_t layer = 0; layer < config->layers && reader.error() == nullptr; ++layer) {
    model.layers.push_back(ReadLayer(reader, names, *config, layer));
  }
  model.norm = reader.Rows(names.norm, {config->hidden});
  model.head = reader.Transposed(names.head, kVocabulary, config->hidden);
  if (reader.error() != nullptr) return Failure(*reader.error());
  return model;
}

}  // namespace tinylm
