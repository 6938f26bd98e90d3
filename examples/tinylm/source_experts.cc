#include "source_experts.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tinylm {
namespace {

struct Names {
  const char *layer, *expert, *gate, *up, *down;
};
constexpr Names kHuggingFace = {"model.layers.", ".mlp.experts.", ".gate_proj", ".up_proj",
                                ".down_proj"};
constexpr Names kDeepSeek = {"layers.", ".ffn.experts.", ".w1", ".w3", ".w2"};

float E8m0(uint8_t byte) {
  return byte == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, byte - 127);
}

float E4m3(uint8_t byte) {
  const int exponent = byte >> 3 & 15;
  const int mantissa = byte & 7;
  const float sign = byte & 128 ? -1.0f : 1.0f;
  if ((byte & 127) == 127) return std::numeric_limits<float>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -9);
  return sign * std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
}

// The scales of one matrix, [out, in/block].
struct Scales {
  size_t block = 0;
  std::vector<float> values;
};

Result<Scales> ReadMxfp4Scales(const Checkpoint& checkpoint, const std::string& name, size_t out,
                               size_t in) {
  const auto bytes = checkpoint.Bytes(name + ".scale", "F8_E8M0", {out, in / 32});
  if (!bytes) return Failure(bytes.error());
  Scales scales{32, {}};
  for (const uint8_t byte : *bytes) scales.values.push_back(E8m0(byte));
  return scales;
}

Result<Scales> ReadNvfp4Scales(const Checkpoint& checkpoint, const std::string& name, size_t out,
                               size_t in) {
  const auto bytes = checkpoint.Bytes(name + ".weight_scale", "F8_E4M3", {out, in / 16});
  if (!bytes) return Failure(bytes.error());
  const Result<const Tensor*> found = checkpoint.Find(name + ".weight_scale_2");
  if (!found) return Failure(found.error());
  const std::vector<uint64_t> one(std::min<size_t>((*found)->shape.size(), 1), 1);
  const auto global = checkpoint.Floats(name + ".weight_scale_2", one);
  if (!global) return Failure(global.error());
  Scales scales{16, {}};
  for (const uint8_t byte : *bytes) scales.values.push_back(E4m3(byte) * global->front());
  return scales;
}

Result<Matrix> ReadMatrix(const Checkpoint& checkpoint, const std::string& name, size_t out,
                          size_t in) {
  const Result<const Tensor*> found = checkpoint.Find(name + ".weight");
  if (!found) return Failure(found.error());
  const std::string& dtype = (*found)->dtype;
  if (dtype != "I8" && dtype != "U8") {
    const auto rows = checkpoint.Floats(name + ".weight", {out, in});
    if (!rows) return Failure(rows.error());
    return Matrix(*rows, out, in);
  }
  const auto nibbles = checkpoint.Bytes(name + ".weight", dtype, {out, in / 2});
  if (!nibbles) return Failure(nibbles.error());
  const auto scales = checkpoint.Has(name + ".weight_scale")
                          ? ReadNvfp4Scales(checkpoint, name, out, in)
                          : ReadMxfp4Scales(checkpoint, name, out, in);
  if (!scales) return Failure(scales.error());
  // e2m1: the sign is bit 3.
  constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  std::vector<float> rows(out * in);
  for (size_t at = 0; at < rows.size(); ++at) {
    const int byte = (*nibbles)[at / 2];
    const float scale = scales->values[at / scales->block];
    rows[at] = kValues[at % 2 == 0 ? byte & 15 : byte >> 4] * scale;
  }
  const auto bad =
      std::find_if(rows.begin(), rows.end(), [](float w) { return !std::isfinite(w); });
  if (bad != rows.end()) {
    return Failure(HOTPLANE_DATA, "a weight of " + name + " is not a number", (*found)->file,
                   "finite weights", "element " + std::to_string(bad - rows.begin()));
  }
  return Matrix(rows, out, in);
}

}  // namespace

Result<std::unique_ptr<SourceExperts>> SourceExperts::Load(const Checkpoint& checkpoint,
                                                           const Config& config) {
  const Names& names = checkpoint.HasDeepSeekNames() ? kDeepSeek : kHuggingFace;
  std::unique_ptr<SourceExperts> source(new SourceExperts(config));
  for (size_t layer = 0; layer < config.layers; ++layer) {
    for (size_t e = 0; e < config.experts; ++e) {
      const std::string name =
          names.layer + std::to_string(layer) + names.expert + std::to_string(e);
      auto gate = ReadMatrix(checkpoint, name + names.gate, config.intermediate, config.hidden);
      if (!gate) return Failure(gate.error());
      auto up = ReadMatrix(checkpoint, name + names.up, config.intermediate, config.hidden);
      if (!up) return Failure(up.error());
      auto down = ReadMatrix(checkpoint, name + names.down, config.hidden, config.intermediate);
      if (!down) return Failure(down.error());
      source->experts_.push_back({std::move(*gate), std::move(*up), std::move(*down)});
    }
  }
  return source;
}

Result<void> SourceExperts::Forward(const ExpertCall& call) const {
  const size_t hidden = config_.hidden;
  const size_t inner = config_.intermediate;
  const size_t slots = call.tokens * config_.top_k;
  std::vector<std::vector<size_t>> slots_of(config_.experts);
  for (size_t slot = 0; slot < slots; ++slot) {
    slots_of[static_cast<size_t>(call.ids[slot])].push_back(slot);
  }

  // A row per slot, so that each token's sum has one order: that of its slots.
  std::vector<float> outputs(slots * hidden);
  std::vector<float> x, gate, up, y;
  for (size_t e = 0; e < config_.experts; ++e) {
    const std::vector<size_t>& rows = slots_of[e];
    if (rows.empty()) continue;
    const Expert& expert = experts_[call.layer * config_.experts + e];
    x.resize(rows.size() * hidden);
    y.resize(rows.size() * hidden);
    gate.resize(rows.size() * inner);
    up.resize(rows.size() * inner);
    for (size_t r = 0; r < rows.size(); ++r) {
      std::copy_n(call.x + rows[r] / config_.top_k * hidden, hidden, &x[r * hidden]);
    }
    MatMul(rows.size(), x.data(), hidden, expert.gate.View(), gate.data(), inner);
    MatMul(rows.size(), x.data(), hidden, expert.up.View(), up.data(), inner);
    for (size_t i = 0; i < gate.size(); ++i)
      gate[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
    MatMul(rows.size(), gate.data(), inner, expert.down.View(), y.data(), hidden);
    for (size_t r = 0; r < rows.size(); ++r) {
      std::copy_n(&y[r * hidden], hidden, &outputs[rows[r] * hidden]);
    }
  }

  std::fill_n(call.y, call.tokens * hidden, 0.0f);
  for (size_t slot = 0; slot < slots; ++slot) {
    float* sum = call.y + slot / config_.top_k * hidden;
    for (size_t i = 0; i < hidden; ++i) sum[i] += call.weights[slot] * outputs[slot * hidden + i];
  }
  return {};
}

}  // namespace tinylm
