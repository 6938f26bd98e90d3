#include "checkpoint/synth_checkpoint.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#include "base/format_text.h"
#include "base/units.h"
#include "checkpoint/safetensors_writer.h"

namespace hotplane {
namespace {

// What a tensor's bytes are drawn from.
enum class Content : uint8_t {
  kInvalid = 0,
  kNibbles,
  kScales,  // e8m0
  kBf16,
  kF16,
  kF32,
  kOnesBf16,
  kNvfp4Nibbles,
  kNvfp4Scales,
  kNvfp4GlobalScale,
  kFp8,
  kFp8Scales,
};

struct SynthTensor {
  TensorSpec spec;
  Content content;
};

// Pieces are generated side by side and written in order. A multiple of 8, so that every piece
// begins on a whole draw.
constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr size_t kBufferBytes = 16 * kPieceBytes;
constexpr uint64_t kFp8Block = 128;

// splitmix64's output function: draw i of a stream is Mix(stream + i * kWeyl), so that any piece of
// a tensor can be generated alone. All arithmetic below is exact, hence the same everywhere.
constexpr uint64_t kWeyl = 0x9e3779b97f4a7c15;
inline uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

uint64_t StreamOf(uint64_t seed, const std::string& name) {
  uint64_t stream = Mix(seed + kWeyl);
  for (const char c : name) stream = Mix(stream ^ static_cast<unsigned char>(c)) + kWeyl;
  return stream;
}

// e2m1 nibbles of 16 random bits: their four hex digits add up to a bell curve around 30 with
// sigma 9.2; a quarter of it, sigma 2.3, fills e2m1's range as block-scaled weights do.
std::array<uint8_t, 65536> MakeNibbleTable() {
  constexpr std::array kMidpointsTimes4 = {1, 3, 5, 7, 10, 14, 20};
  std::array<uint8_t, 65536> table{};
  for (unsigned bits = 0; bits < table.size(); ++bits) {
    const int sum =
        static_cast<int>((bits & 15) + (bits >> 4 & 15) + (bits >> 8 & 15) + (bits >> 12));
    const int value = sum - 30;
    unsigned magnitude = 0;
    for (const int midpoint : kMidpointsTimes4) magnitude += std::abs(value) > midpoint ? 1 : 0;
    const bool negative = value < 0 || (value == 0 && (bits & 1) != 0);
    table[bits] = static_cast<uint8_t>(magnitude | (negative ? 8u : 0u));
  }
  return table;
}

// Two bytes of nibbles per draw.
void FillNibbles(uint64_t stream, uint64_t first_draw, std::span<std::byte> out) {
  static const std::array<uint8_t, 65536> table = MakeNibbleTable();
  for (size_t i = 0; i < out.size(); i += 2) {
    const uint64_t bits = Mix(stream + (first_draw + i / 2) * kWeyl);
    out[i] = static_cast<std::byte>(table[bits & 0xffff] | table[bits >> 16 & 0xffff] << 4);
    out[i + 1] = static_cast<std::byte>(table[bits >> 32 & 0xffff] | table[bits >> 48] << 4);
  }
}

// Eight scales per draw, each 2^-9 to 2^-6 with the middle ones most frequent. Rows of scales are
// short, so the last draw may be cut.
void FillScales(uint64_t stream, uint64_t first_draw, std::span<std::byte> out) {
  constexpr uint64_t kOnes = 0x0101010101010101;
  for (size_t i = 0; i < out.size(); i += 8) {
    const uint64_t bits = Mix(stream + (first_draw + i / 8) * kWeyl);
    const uint64_t scales =
        118 * kOnes + (bits & kOnes) + (bits >> 1 & kOnes) + (bits >> 2 & kOnes);
    std::memcpy(out.data() + i, &scales, std::min<size_t>(8, out.size() - i));
  }
}

// Eight e4m3 scales per draw, 1 to 3.75: with a global scale of 2^-9 weights get a sigma near
// 0.014.
constexpr float kNvfp4GlobalScale = 0x1p-9f;
void FillNvfp4Scales(uint64_t stream, uint64_t first_draw, std::span<std::byte> out) {
  for (size_t i = 0; i < out.size(); i += 8) {
    const uint64_t bits = Mix(stream + (first_draw + i / 8) * kWeyl);
    const uint64_t scales = 0x3838383838383838 + (bits & 0x0f0f0f0f0f0f0f0f);
    std::memcpy(out.data() + i, &scales, std::min<size_t>(8, out.size() - i));
  }
}

// The sum of the four 16-bit quarters of a draw: near normal, sigma 0.018, exact in float. One in
// 1024 is an exact zero of either sign.
inline float DrawWeight(uint64_t bits) {
  const auto sum = static_cast<int32_t>((bits & 0xffff) + (bits >> 16 & 0xffff) +
                                        (bits >> 32 & 0xffff) + (bits >> 48));
  const float weight = static_cast<float>(sum - 2 * 65535) * 0x1p-21f;
  return (bits & 0x3ff) == 0x1a5 ? ((bits & 0x400) != 0 ? -0.0f : 0.0f) : weight;
}

inline uint16_t Bf16Of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Round to nearest even. REQUIRES |value| below 1; values from DrawWeight are multiples of 2^-21,
// so that subnormal results are exact.
inline uint16_t F16Of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  constexpr uint32_t kNormalMin = 113u << 23;  // 2^-14
  if (magnitude < kNormalMin) {
    const float steps = std::bit_cast<float>(magnitude) * 0x1p24f;
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(steps));
  }
  const uint32_t rebased = magnitude - (112u << 23);
  return static_cast<uint16_t>(sign | (rebased + 0xfff + (rebased >> 13 & 1)) >> 13);
}

// A weight times 2^12, which fills e4m3's range, to the nearest e4m3, ties to even. Small results
// are exact, see F16Of.
inline uint8_t E4m3Of(float value) {
  const auto bits = std::bit_cast<uint32_t>(value * 0x1p12f);
  const uint32_t sign = bits >> 24 & 0x80;
  const uint32_t magnitude = bits & 0x7fffffff;
  constexpr uint32_t kNormalMin = 121u << 23;  // 2^-6
  if (magnitude < kNormalMin) {
    const float steps = std::bit_cast<float>(magnitude) * 0x1p9f;
    return static_cast<uint8_t>(sign | static_cast<uint32_t>(steps));
  }
  const uint32_t rebased = magnitude - (120u << 23);
  return static_cast<uint8_t>(sign | (rebased + 0x7ffff + (rebased >> 20 & 1)) >> 20);
}
// Scales near 2^-12.
inline float DrawFp8Scale(uint64_t bits) {
  return (1 + static_cast<float>(bits & 0xffff) * 0x1p-16f) * 0x1p-12f;
}

template <typename T, typename Draw>
void FillDraws(uint64_t stream, uint64_t first_draw, std::span<std::byte> out, Draw draw) {
  for (size_t i = 0; i < out.size() / sizeof(T); ++i) {
    const T value = draw(Mix(stream + (first_draw + i) * kWeyl));
    std::memcpy(out.data() + i * sizeof(T), &value, sizeof(T));
  }
}
template <typename T, typename Convert>
void FillWeights(uint64_t stream, uint64_t first_draw, std::span<std::byte> out, Convert convert) {
  for (size_t i = 0; i < out.size() / sizeof(T); ++i) {
    const T value = convert(DrawWeight(Mix(stream + (first_draw + i) * kWeyl)));
    std::memcpy(out.data() + i * sizeof(T), &value, sizeof(T));
  }
}

// The bytes [offset, offset + out.size()) of a tensor; offset is a multiple of kPieceBytes.
void Fill(Content content, uint64_t stream, uint64_t offset, std::span<std::byte> out) {
  switch (content) {
    case Content::kNibbles:
    case Content::kNvfp4Nibbles: return FillNibbles(stream, offset / 2, out);
    case Content::kNvfp4Scales: return FillNvfp4Scales(stream, offset / 8, out);
    case Content::kNvfp4GlobalScale:
      return FillDraws<float>(stream, offset / 4, out, [](uint64_t) { return kNvfp4GlobalScale; });
    case Content::kFp8: return FillWeights<uint8_t>(stream, offset, out, E4m3Of);
    case Content::kFp8Scales: return FillDraws<float>(stream, offset / 4, out, DrawFp8Scale);
    case Content::kScales: return FillScales(stream, offset / 8, out);
    case Content::kBf16: return FillWeights<uint16_t>(stream, offset / 2, out, Bf16Of);
    case Content::kF16: return FillWeights<uint16_t>(stream, offset / 2, out, F16Of);
    case Content::kF32:
      return FillWeights<float>(stream, offset / 4, out, [](float value) { return value; });
    case Content::kOnesBf16:
      return FillWeights<uint16_t>(stream, offset / 2, out, [](float) { return Bf16Of(1.0f); });
    case Content::kInvalid: break;
  }
}

// Names and content of one model.
class Plan {
 public:
  explicit Plan(const SynthCheckpointOptions& options) : options_(options) {
    const uint64_t hidden = options.geometry.hidden;
    Add(mxfp4() ? "embed.weight" : "model.embed_tokens.weight", Content::kBf16, {256, hidden});
    for (uint32_t i = 0; i < options.main_layers; ++i) {
      const bool dense = i < options.dense_layers;
      AddLayer(Text("{}layers.{}.", mxfp4() ? "" : "model.", i), dense);
    }
    for (uint32_t i = 0; i < options.mtp_layers; ++i) {
      const std::string base =
          mxfp4() ? Text("mtp.{}.", i) : Text("model.layers.{}.", options.main_layers + i);
      if (!mxfp4()) Add(base + "enorm.weight", Content::kOnesBf16, {hidden});
      AddLayer(base, false);
    }
    Add(mxfp4() ? "norm.weight" : "model.norm.weight", Content::kOnesBf16, {hidden});
  }

  const std::vector<SynthTensor>& tensors() const { return tensors_; }

 private:
  bool mxfp4() const { return options_.format == SourceFormat::kMxfp4; }

  void Add(std::string name, Content content, std::vector<uint64_t> shape) {
    Dtype dtype = Dtype::kBf16;
    if (content == Content::kNibbles) dtype = Dtype::kI8;
    if (content == Content::kScales) dtype = Dtype::kF8E8m0;
    if (content == Content::kF16) dtype = Dtype::kF16;
    if (content == Content::kF32) dtype = Dtype::kF32;
    if (content == Content::kNvfp4Nibbles) dtype = Dtype::kU8;
    if (content == Content::kNvfp4Scales || content == Content::kFp8) dtype = Dtype::kF8E4m3;
    if (content == Content::kNvfp4GlobalScale) dtype = Dtype::kF32;
    if (content == Content::kFp8Scales) dtype = Dtype::kF32;
    tensors_.push_back({{std::move(name), dtype, std::move(shape)}, content});
  }

  void AddMatrix(const std::string& name, uint64_t out, uint64_t in) {
    switch (options_.format) {
      case SourceFormat::kMxfp4:
        Add(name + ".weight", Content::kNibbles, {out, in / 2});
        return Add(name + ".scale", Content::kScales, {out, in / 32});
      case SourceFormat::kNvfp4:
        Add(name + ".weight", Content::kNvfp4Nibbles, {out, in / 2});
        Add(name + ".weight_scale", Content::kNvfp4Scales, {out, in / 16});
        return Add(name + ".weight_scale_2", Content::kNvfp4GlobalScale, {});
      case SourceFormat::kFp8:
        Add(name + ".weight", Content::kFp8, {out, in});
        return Add(name + ".weight_scale_inv", Content::kFp8Scales,
                   {(out + kFp8Block - 1) / kFp8Block, (in + kFp8Block - 1) / kFp8Block});
      case SourceFormat::kF16: return Add(name + ".weight", Content::kF16, {out, in});
      case SourceFormat::kF32: return Add(name + ".weight", Content::kF32, {out, in});
      default: return Add(name + ".weight", Content::kBf16, {out, in});
    }
  }

  void AddLayer(const std::string& base, bool dense) {
    const uint64_t expert_count = options_.geometry.experts;
    const uint64_t hidden = options_.geometry.hidden;
    const uint64_t intermediate = options_.geometry.intermediate;
    const std::string block = base + (mxfp4() ? "ffn." : "mlp.");
    Add(base + (mxfp4() ? "ffn_norm.weight" : "post_attention_layernorm.weight"),
        Content::kOnesBf16, {hidden});
    const auto add_mlp = [&](const std::string& prefix) {
      AddMatrix(prefix + (mxfp4() ? "w1" : "gate_proj"), intermediate, hidden);
      AddMatrix(prefix + (mxfp4() ? "w2" : "down_proj"), hidden, intermediate);
      AddMatrix(prefix + (mxfp4() ? "w3" : "up_proj"), intermediate, hidden);
    };
    if (dense) return add_mlp(block);
    Add(block + "gate.weight", Content::kBf16, {expert_count, hidden});
    for (uint64_t e = 0; e < expert_count; ++e) add_mlp(Text("{}experts.{}.", block, e));
  }

  const SynthCheckpointOptions& options_;
  std::vector<SynthTensor> tensors_;
};

std::string EncodeConfig(const SynthCheckpointOptions& options) {
  std::string more;
  if (options.format == SourceFormat::kMxfp4) more = ",\n  \"swiglu_limit\": 10.0";
  if (options.format == SourceFormat::kFp8) {
    more = Text(
        ",\n  \"quantization_config\": {{\"quant_method\": \"fp8\", "
        "\"weight_block_size\": [{}, {}]}}",
        kFp8Block, kFp8Block);
  }
  const uint32_t top_k =
      options.top_k != 0 ? options.top_k : std::min<uint32_t>(6, options.geometry.experts);
  return Text(R"({{
  "model_type": "hotplane_synth",
  "hidden_size": {},
  "moe_intermediate_size": {},
  "n_routed_experts": {},
  "num_experts_per_tok": {},
  "num_hidden_layers": {},
  "num_nextn_predict_layers": {}{}
}}
)",
              options.geometry.hidden, options.geometry.intermediate, options.geometry.experts,
              top_k, options.main_layers, options.mtp_layers, more);
}

Result<void> CheckOptions(const SynthCheckpointOptions& options) {
  const LayerGeometry& geometry = options.geometry;
  const auto fits = [](uint32_t n) { return n > 0 && n % 64 == 0 && n <= 1u << 20; };
  const bool good = options.format != SourceFormat::kInvalid && geometry.experts > 0 &&
                    geometry.experts <= 65536 && fits(geometry.hidden) &&
                    fits(geometry.intermediate) && options.main_layers <= 10'000 &&
                    options.mtp_layers <= 100 && options.dense_layers <= options.main_layers &&
                    options.main_layers + options.mtp_layers > options.dense_layers &&
                    options.top_k <= geometry.experts;
  if (good) return {};
  return Fail(
      Status::Usage("a synthetic checkpoint of this geometry cannot be written")
          .Expected("experts from 1 to 65536, hidden and intermediate sizes that are "
                    "multiples of 64 up to 1048576, at least one layer with experts, and "
                    "a top-k of at most the experts")
          .Found(Text("{} experts, hidden {}, intermediate {}, {} layers of which {} dense, "
                      "{} MTP layers, top-k {}",
                      geometry.experts, geometry.hidden, geometry.intermediate, options.main_layers,
                      options.dense_layers, options.mtp_layers, options.top_k)));
}

// A run of bytes of one tensor inside the write buffer.
struct Piece {
  const SynthTensor* tensor;
  uint64_t stream;
  uint64_t offset;  // in the tensor
  size_t at;        // in the buffer
  size_t bytes;
};

}  // namespace

Result<SynthCheckpointReport> WriteSynthCheckpoint(
    Env& env, const std::string& directory, const SynthCheckpointOptions& options, WorkerPool& pool,
    const CancelToken* cancel, const std::function<void(uint64_t, uint64_t)>& progress) {
  HP_TRY(CheckOptions(options));
  const Plan plan(options);
  std::vector<TensorSpec> specs;
  for (const SynthTensor& tensor : plan.tensors()) specs.push_back(tensor.spec);
  HP_ASSIGN(CheckpointWriter writer,
            CheckpointWriter::Create(env, directory, std::move(specs),
                                     {.shard_bytes_max = options.shard_bytes_max,
                                      .config_text = EncodeConfig(options)}));
  std::vector<std::byte> buffer(std::min<uint64_t>(kBufferBytes, writer.data_bytes()));
  std::vector<Piece> pieces;
  size_t filled = 0;
  uint64_t done = 0;
  const auto flush = [&]() -> Result<void> {
    if (cancel != nullptr) HP_TRY(cancel->Check());
    HP_TRY(pool.ParallelFor(pieces.size(), [&](size_t i, size_t) -> Result<void> {
      const Piece& piece = pieces[i];
      Fill(piece.tensor->content, piece.stream, piece.offset,
           std::span(buffer).subspan(piece.at, piece.bytes));
      return {};
    }));
    HP_TRY(writer.Append(std::span(buffer).first(filled)));
    done += filled;
    if (progress) progress(done, writer.data_bytes());
    pieces.clear();
    filled = 0;
    return {};
  };
  for (const SynthTensor& tensor : plan.tensors()) {
    const uint64_t stream = StreamOf(options.seed, tensor.spec.name);
    const uint64_t tensor_bytes = TensorSpecBytes(tensor.spec);
    for (uint64_t offset = 0; offset < tensor_bytes; offset += kPieceBytes) {
      const size_t bytes = std::min<uint64_t>(kPieceBytes, tensor_bytes - offset);
      if (filled + bytes > buffer.size()) HP_TRY(flush());
      pieces.push_back({&tensor, stream, offset, filled, bytes});
      filled += bytes;
    }
  }
  HP_TRY(flush());
  HP_TRY(writer.Finish());
  return SynthCheckpointReport{writer.data_bytes(), plan.tensors().size()};
}

}  // namespace hotplane
