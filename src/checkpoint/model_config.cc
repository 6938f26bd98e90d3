#include "checkpoint/model_config.h"

#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "base/bytes_text.h"
#include "base/format_text.h"
#include "checkpoint/json_scan.h"

namespace hotplane {
namespace {

constexpr uint32_t kTopKMax = 4096;
constexpr uint64_t kConfigBytesMax = 16 << 20;
constexpr uint32_t kBlockSizeMax = 1u << 20;

struct Fields {
  bool top_k_seen = false;
  bool swiglu_limit_seen = false;
  bool quantization_seen = false;
  bool block_size_seen = false;
  ModelConfig values;
};

class ConfigVisitor : public JsonVisitor {
 public:
  ModelConfig Config() const {
    const auto& [outer, inner] = fields_;
    ModelConfig config = inner.values;
    if (!config.top_k) config.top_k = outer.values.top_k;
    if (!inner.swiglu_limit_seen) config.swiglu_limit = outer.values.swiglu_limit;
    if (!config.hidden) config.hidden = outer.values.hidden;
    if (!config.intermediate) config.intermediate = outer.values.intermediate;
    if (!config.experts) config.experts = outer.values.experts;
    if (!config.weight_block_size) config.weight_block_size = outer.values.weight_block_size;
    return config;
  }

  Result<void> BeginObject() override {
    if (depth_ == 1 && key_ == "text_config") {
      if (text_config_seen_) return Duplicate("text_config");
      text_config_seen_ = in_text_config_ = true;
    } else if (AtFields() && key_ == "quantization_config") {
      Fields& fields = CurrentFields();
      if (std::exchange(fields.quantization_seen, true)) return Duplicate("quantization_config");
      quantization_depth_ = depth_ + 1;
      quantization_fields_ = &fields;
    }
    if (in_block_size_) return BadBlockSize("an object");
    ++depth_;
    return {};
  }
  Result<void> EndObject() override {
    if (--depth_ == 1) in_text_config_ = false;
    if (depth_ < quantization_depth_) quantization_depth_ = 0;
    return {};
  }
  Result<void> BeginArray() override {
    if (depth_ == 0) return NotAnObject();
    if (in_block_size_) return BadBlockSize("an array in an array");
    if (AtBlockSize()) {
      if (std::exchange(quantization_fields_->block_size_seen, true)) {
        return Duplicate("weight_block_size");
      }
      in_block_size_ = true;
      block_size_.clear();
    }
    ++depth_;
    return {};
  }
  Result<void> EndArray() override {
    --depth_;
    if (!std::exchange(in_block_size_, false)) return {};
    if (block_size_.size() != 2) return BadBlockSize(Text("{} numbers", block_size_.size()));
    quantization_fields_->values.weight_block_size = {block_size_[0], block_size_[1]};
    return {};
  }
  Result<void> Key(std::string_view key) override {
    key_ = key;
    return {};
  }
  Result<void> Scalar(const JsonScalar& scalar) override {
    if (depth_ == 0) return NotAnObject();
    if (in_block_size_) return TakeBlockSize(scalar);
    if (AtBlockSize() && scalar.kind != JsonScalar::Kind::kNull) {
      return BadBlockSize(JsonScalarText(scalar));
    }
    if (!AtFields()) return {};
    Fields& fields = CurrentFields();
    if (key_ == "num_experts_per_tok") return TakeTopK(scalar, fields);
    if (key_ == "swiglu_limit") return TakeSwigluLimit(scalar, fields);
    TakeShape(scalar, fields.values);
    return {};
  }

 private:
  // Whether keys are fields of the outer object or of text_config.
  bool AtFields() const { return depth_ == 1 || (depth_ == 2 && in_text_config_); }
  Fields& CurrentFields() { return fields_[depth_ == 2 ? 1 : 0]; }
  bool AtBlockSize() const {
    return quantization_depth_ != 0 && depth_ == quantization_depth_ && key_ == "weight_block_size";
  }
  void TakeShape(const JsonScalar& scalar, ModelConfig& values) const {
    if (scalar.kind != JsonScalar::Kind::kUnsigned || scalar.unsigned_value > UINT32_MAX) return;
    const auto value = static_cast<uint32_t>(scalar.unsigned_value);
    if (key_ == "hidden_size") values.hidden = value;
    if (key_ == "moe_intermediate_size") values.intermediate = value;
    if (key_ == "n_routed_experts" || key_ == "num_experts" || key_ == "num_local_experts")
      values.experts = value;
  }
  static Result<void> BadBlockSize(std::string found) {
    return Fail(Status::Data("weight_block_size of config.json is malformed")
                    .Expected(Text("two whole numbers from 1 to {}", kBlockSizeMax))
                    .Found(std::move(found)));
  }
  Result<void> TakeBlockSize(const JsonScalar& scalar) {
    if (scalar.kind != JsonScalar::Kind::kUnsigned || scalar.unsigned_value < 1 ||
        scalar.unsigned_value > kBlockSizeMax || block_size_.size() == 2) {
      return BadBlockSize(JsonScalarText(scalar));
    }
    block_size_.push_back(static_cast<uint32_t>(scalar.unsigned_value));
    return {};
  }
  static Result<void> NotAnObject() {
    return Fail(Status::Data("config.json is malformed").Expected("a JSON object"));
  }
  static Result<void> Duplicate(std::string_view key) {
    return Fail(Status::Data("config.json has a duplicate key").Found(std::string(key)));
  }
  static Result<void> TakeTopK(const JsonScalar& scalar, Fields& fields) {
    if (fields.top_k_seen) return Duplicate("num_experts_per_tok");
    fields.top_k_seen = true;
    if (scalar.kind == JsonScalar::Kind::kNull) return {};
    if (scalar.kind != JsonScalar::Kind::kUnsigned || scalar.unsigned_value < 1 ||
        scalar.unsigned_value > kTopKMax) {
      return Fail(Status::Data("num_experts_per_tok of config.json is malformed")
                      .Expected(Text("a whole number from 1 to {}", kTopKMax))
                      .Found(JsonScalarText(scalar)));
    }
    fields.values.top_k = static_cast<uint32_t>(scalar.unsigned_value);
    return {};
  }
  static Result<void> TakeSwigluLimit(const JsonScalar& scalar, Fields& fields) {
    if (fields.swiglu_limit_seen) return Duplicate("swiglu_limit");
    fields.swiglu_limit_seen = true;
    if (scalar.kind == JsonScalar::Kind::kNull) return {};
    const bool is_number =
        scalar.kind == JsonScalar::Kind::kUnsigned || scalar.kind == JsonScalar::Kind::kNumber;
    if (!is_number || !std::isfinite(scalar.number) || scalar.number < 0) {
      return Fail(Status::Data("swiglu_limit of config.json is malformed")
                      .Expected("a number that is not negative")
                      .Found(JsonScalarText(scalar)));
    }
    if (scalar.number > 0) fields.values.swiglu_limit = scalar.number;
    return {};
  }

  uint32_t depth_ = 0;
  bool in_text_config_ = false;
  bool text_config_seen_ = false;
  std::string key_;
  uint32_t quantization_depth_ = 0;  // inside quantization_config: the depth of its fields
  Fields* quantization_fields_ = nullptr;
  bool in_block_size_ = false;
  std::vector<uint32_t> block_size_;
  std::array<Fields, 2> fields_;  // of the outer object, of text_config
};

}  // namespace

Result<ModelConfig> ParseModelConfig(std::string_view text, const std::string& file) {
  if (text.empty()) return ModelConfig{};
  ConfigVisitor visitor;
  HP_TRY(ScanJson(text, {.what = "config.json", .file = file}, visitor));
  return visitor.Config();
}

Result<ModelConfig> ReadModelConfig(Env& env, const std::string& path) {
  HP_ASSIGN(const FileStat stat, env.Stat(path));
  const std::string file = stat.type == FileType::kDirectory ? JoinPath(path, "config.json") : path;
  HP_ASSIGN(const std::vector<std::byte> bytes, ReadWholeFile(env, file, kConfigBytesMax));
  return ParseModelConfig(AsText(bytes), file);
}

}  // namespace hotplane
