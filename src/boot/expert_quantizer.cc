#include "boot/expert_quantizer.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/format_text.h"
#include "base/trace.h"
#include "base/units.h"
#include "boot/cpu_quantizer.h"
#include "quant/exponent_rule.h"

namespace hotplane {
namespace {

// Each plane starts on a cache line of its own.
constexpr uint64_t kPlaneAlignBytes = 64;

// Where each plane of an expert lies in the workspace.
struct PlaneMap {
  uint64_t codes13 = 0, sc13 = 0, codes2 = 0, sc2 = 0;
  uint64_t nibbles13 = 0, nibbles2 = 0, quintals13 = 0, quintals2 = 0;
  uint64_t bias13 = 0, bias2 = 0;
  uint64_t bytes = 0;
};

PlaneMap MapPlanes(const LayerGeometry& g, PlanesWanted wanted) {
  PlaneMap map;
  const auto place = [&map](bool yes, uint64_t* offset, uint64_t bytes) {
    *offset = map.bytes;
    if (yes) map.bytes += RoundUp(bytes, kPlaneAlignBytes);
  };
  place(wanted.base, &map.codes13, CodePlaneBytes(g.n13(), g.k13()));
  place(wanted.base, &map.sc13, ScalePlaneBytes(g.n13(), g.k13()));
  place(wanted.base, &map.codes2, CodePlaneBytes(g.n2(), g.k2()));
  place(wanted.base, &map.sc2, ScalePlaneBytes(g.n2(), g.k2()));
  place(wanted.nibbles, &map.nibbles13, NibblePlaneBytes(g.n13(), g.k13()));
  place(wanted.nibbles, &map.nibbles2, NibblePlaneBytes(g.n2(), g.k2()));
  place(wanted.quintals, &map.quintals13, QuintalPlaneBytes(g.n13(), g.k13()));
  place(wanted.quintals, &map.quintals2, QuintalPlaneBytes(g.n2(), g.k2()));
  place(wanted.base && g.biases, &map.bias13, g.n13() * sizeof(float));
  place(wanted.base && g.biases, &map.bias2, g.n2() * sizeof(float));
  return map;
}

// What one matrix takes on a device.
struct DeviceNeed {
  uint64_t source_bytes = 0;
  uint64_t plane_bytes = 0;
};
DeviceNeed NeedOnDevice(std::span<const MoeLayer* const> layers, PlanesWanted wanted) {
  const auto aligned = [](uint64_t bytes) { return RoundUp(bytes, kQuantizerAlignBytes); };
  DeviceNeed need;
  for (const MoeLayer* layer : layers) {
    for (size_t p = 0; p < kProjectionCount; ++p) {
      const ExpertTensors& expert = layer->experts.front();
      uint64_t bytes = aligned(expert.weight[p]->bytes);
      // FP8 scales go there as float64, from two bytes or four.
      if (const Tensor* scale = expert.scale[p]) bytes += aligned(scale->bytes * 4);
      need.source_bytes = std::max(need.source_bytes, bytes);
    }
    const size_t n = layer->geometry.intermediate;  // of one matrix; down has as many elements
    const size_t k = layer->geometry.hidden;
    uint64_t bytes = 0;
    if (wanted.base) bytes += aligned(CodePlaneBytes(n, k)) + aligned(ScalePlaneBytes(n, k));
    if (wanted.nibbles) bytes += aligned(NibblePlaneBytes(n, k));
    if (wanted.quintals) bytes += aligned(QuintalPlaneBytes(n, k));
    need.plane_bytes = std::max(need.plane_bytes, bytes);
  }
  return need;
}

size_t ElementBytes(SourceFormat format) { return SourceRowBytes(format, 1); }

float ReadFloat(Dtype dtype, const std::byte* from) {
  if (dtype == Dtype::kF32) {
    float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  if (dtype == Dtype::kBf16) return std::bit_cast<float>(uint32_t{bits} << 16);
  const int field = bits >> 10 & 31;
  const int fraction = bits & 1023;
  const float magnitude = field == 31 ? (fraction == 0 ? HUGE_VALF : NAN)
                          : field == 0
                              ? std::ldexp(static_cast<float>(fraction), -24)
                              : std::ldexp(static_cast<float>(1024 + fraction), field - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

bool IsFinite(SourceFormat format, const std::byte* element) {
  switch (format) {
    case SourceFormat::kFp8: return (*element & std::byte{0x7f}) != std::byte{0x7f};
    case SourceFormat::kF32: return std::isfinite(ReadFloat(Dtype::kF32, element));
    case SourceFormat::kF16: return std::isfinite(ReadFloat(Dtype::kF16, element));
    default: return std::isfinite(ReadFloat(Dtype::kBf16, element));
  }
}

// A byte that is no usable scale: `what` is "scale" or "value".
Status BadElement(const Checkpoint& checkpoint, const Tensor& tensor, std::string_view what,
                  uint64_t index, std::string found) {
  const uint64_t columns = tensor.shape.empty() ? 1 : tensor.shape.back();
  return Status::Data(Text("{} holds a {} at row {}, column {}", tensor.name, what, index / columns,
                           index % columns))
      .File(checkpoint.files()[tensor.file])
      .At(tensor.offset + index * DtypeBytes(tensor.dtype))
      .Found(std::move(found))
      .Advice("the checkpoint is damaged or was exported wrongly: fetch or convert it again");
}

Status NotFinite(const Checkpoint& checkpoint, SourceFormat format, const Tensor& tensor,
                 std::span<const std::byte> bytes) {
  const size_t step = ElementBytes(format);
  size_t index = 0;
  while (IsFinite(format, bytes.data() + index * step)) ++index;
  return BadElement(checkpoint, tensor, "value that is not finite", index, "NaN or infinity")
      .Expected("finite weights");
}

Status BadE8m0Scale(const Checkpoint& checkpoint, const Tensor& tensor,
                    std::span<const std::byte> scales) {
  const auto bad = std::find(scales.begin(), scales.end(), std::byte{kE8m0NaN});
  const auto index = static_cast<uint64_t>(bad - scales.begin());
  const uint64_t blocks = tensor.shape.back();
  return Status::Data(Text("{} holds a NaN scale at row {}, block {}", tensor.name, index / blocks,
                           index % blocks))
      .File(checkpoint.files()[tensor.file])
      .At(tensor.offset + index)
      .Expected("e8m0 bytes 0 to 254")
      .Found("255 (NaN)")
      .Advice("the checkpoint is damaged or was exported wrongly: fetch or convert it again");
}

Status BadE4m3Scale(const Checkpoint& checkpoint, const Tensor& tensor,
                    std::span<const std::byte> scales) {
  const auto bad = std::find_if(scales.begin(), scales.end(),
                                [](std::byte scale) { return scale > std::byte{0x7e}; });
  const unsigned byte = std::to_integer<unsigned>(*bad);
  return BadElement(checkpoint, tensor, "scale that is not usable",
                    static_cast<uint64_t>(bad - scales.begin()),
                    Text("byte 0x{:02x} ({})", byte, (byte & 0x7f) == 0x7f ? "NaN" : "negative"))
      .Expected("e4m3 scales from 0 to 448");
}

PlaneOutputs Advance(const PlaneOutputs& out, size_t n, size_t k) {
  PlaneOutputs at = out;
  if (at.codes != nullptr) at.codes += CodePlaneBytes(n, k);
  if (at.scales != nullptr) at.scales += ScalePlaneBytes(n, k);
  if (at.nibbles != nullptr) at.nibbles += NibblePlaneBytes(n, k);
  if (at.quintals != nullptr) at.quintals += QuintalPlaneBytes(n, k);
  return at;
}

}  // namespace

// A projection each, but gate and up together where their rows alternate; biases come last.
std::vector<SourcePiece> ExpertQuantizer::SourcePieces(const MoeLayer& layer, uint32_t expert) {
  const ExpertTensors& from = layer.experts[expert];
  std::vector<SourcePiece> pieces;
  SourcePiece biases;
  for (size_t p = 0; p < kProjectionCount; ++p) {
    const bool with_last = layer.interleaved_rows && p == static_cast<size_t>(Projection::kUp);
    SourcePiece& piece = with_last ? pieces.back() : pieces.emplace_back();
    for (const Tensor* tensor : {from.weight[p], from.scale[p], from.global_scale[p]})
      if (tensor != nullptr) piece.push_back(tensor);
    if (layer.geometry.biases) biases.push_back(from.bias[p]);
  }
  if (!biases.empty()) pieces.push_back(std::move(biases));
  return pieces;
}

uint64_t ExpertQuantizer::WorkspaceBytes(const MoeLayer& layer, PlanesWanted wanted) {
  return MapPlanes(layer.geometry, wanted).bytes;
}

uint64_t ExpertQuantizer::DeviceBytes(std::span<const MoeLayer* const> layers,
                                      PlanesWanted wanted) {
  const DeviceNeed need = NeedOnDevice(layers, wanted);
  return need.source_bytes + need.plane_bytes + ScaleThresholds().size_bytes();
}

Result<ExpertQuantizer> ExpertQuantizer::Create(const Kernels& kernels,
                                                std::span<const MoeLayer* const> layers,
                                                PlanesWanted wanted, ZeroMode zero_mode,
                                                Device* device) {
  ExpertQuantizer quantizer;
  quantizer.kernels_ = &kernels;
  quantizer.zero_mode_ = zero_mode;
  uint64_t plane_bytes = 0;
  for (const MoeLayer* layer : layers)
    plane_bytes = std::max(plane_bytes, MapPlanes(layer->geometry, wanted).bytes);
  HP_ASSIGN(quantizer.planes_, HugeBuffer::Allocate(plane_bytes));
  if (device != nullptr) {
    const DeviceNeed need = NeedOnDevice(layers, wanted);
    const QuantizerOptions options = {.source_bytes = need.source_bytes,
                                      .plane_bytes = need.plane_bytes,
                                      .thresholds = ScaleThresholds(),
                                      .host_planes = quantizer.planes_.span()};
    HP_ASSIGN(quantizer.matrices_, device->NewQuantizer(options));
    if (quantizer.matrices_ != nullptr) quantizer.device_bytes_ = options.device_bytes();
  }
  if (quantizer.matrices_ == nullptr) quantizer.matrices_ = NewCpuQuantizer(kernels);
  return quantizer;
}

Result<void> ExpertQuantizer::NextPiece() {
  HP_ASSIGN(piece_, reads_->Next());
  piece_used_ = 0;
  return {};
}

std::span<std::byte> ExpertQuantizer::TakeTensor(const Tensor& tensor) {
  HP_CHECK(piece_used_ < piece_.size() && piece_[piece_used_].size() == tensor.bytes);
  const std::span<std::byte> bytes = piece_[piece_used_++];
  bytes_read_ += tensor.bytes;
  digests_->push_back({tensor.name, Digest(std::span<const std::byte>(bytes))});
  return bytes;
}

ExpertQuantizer::Source ExpertQuantizer::TakeSource(const ExpertTensors& expert,
                                                    Projection projection) {
  const auto index = static_cast<size_t>(projection);
  Source source{.weight = expert.weight[index],
                .scale = expert.scale[index],
                .global_scale = expert.global_scale[index]};
  source.elements = TakeTensor(*source.weight);
  if (source.scale != nullptr) source.scales = TakeTensor(*source.scale);
  if (source.global_scale != nullptr) source.global_scales = TakeTensor(*source.global_scale);
  return source;
}

Result<MatrixSource> ExpertQuantizer::Describe(const MoeLayer& layer, const Source& source,
                                               Shape shape) {
  MatrixSource matrix = {.format = layer.format,
                         .n = shape.n,
                         .k = shape.k,
                         .elements = source.elements,
                         .divide = layer.divide_by_global_scale};
  if (layer.format == SourceFormat::kNvfp4) {
    const float global_scale = ReadFloat(Dtype::kF32, source.global_scales.data());
    if (!(global_scale > 0) || !std::isfinite(global_scale)) {
      return Fail(BadElement(*checkpoint_, *source.global_scale, "global scale that is not usable",
                             0, Text("{}", global_scale))
                      .Expected("a positive, finite number"));
    }
    matrix.global_scale = global_scale;
  }
  if (layer.format != SourceFormat::kFp8) {
    matrix.scales = source.scales;
    return matrix;
  }
  const Dtype dtype = source.scale->dtype;
  fp8_scales_.clear();
  for (size_t at = 0; at < source.scales.size(); at += DtypeBytes(dtype)) {
    const float scale = ReadFloat(dtype, source.scales.data() + at);
    if (!(scale >= 0) || !std::isfinite(scale)) {
      return Fail(BadElement(*checkpoint_, *source.scale, "scale that is not usable",
                             fp8_scales_.size(), Text("{}", scale))
                      .Expected("finite scales that are not negative"));
    }
    fp8_scales_.push_back(scale);
  }
  matrix.block_scales = fp8_scales_;
  matrix.block_rows = layer.fp8_block.rows;
  matrix.block_columns = layer.fp8_block.columns;
  return matrix;
}

// Names the element that made the matrix unusable.
Status ExpertQuantizer::Unusable(const MoeLayer& layer, const Source& source) const {
  if (layer.format == SourceFormat::kMxfp4)
    return BadE8m0Scale(*checkpoint_, *source.scale, source.scales);
  if (layer.format == SourceFormat::kNvfp4)
    return BadE4m3Scale(*checkpoint_, *source.scale, source.scales);
  return NotFinite(*checkpoint_, layer.format, *source.weight, source.elements);
}

Result<void> ExpertQuantizer::RunProjection(const MoeLayer& layer, uint32_t expert,
                                            Projection projection, const PlaneOutputs& out,
                                            const PlaneOutputs& on_device) {
  const bool down = projection == Projection::kDown;
  const Shape shape = {down ? layer.geometry.hidden : layer.geometry.intermediate,
                       down ? layer.geometry.intermediate : layer.geometry.hidden};
  HP_TRY(NextPiece());
  const Source source = TakeSource(layer.experts[expert], projection);
  HP_ASSIGN(const MatrixSource matrix, Describe(layer, source, shape));
  HP_ASSIGN(const MatrixCounts counts, matrices_->Load(matrix));
  if (!counts.usable) return Fail(Unusable(layer, source));
  const bool alternate_zeros =
      ZerosAlternate(zero_mode_, {counts.positive_zeros, counts.negative_zeros, true});
  HP_TRY(matrices_->Quantize(alternate_zeros, {out.codes, out.scales, out.nibbles, out.quintals,
                                               on_device.codes, on_device.scales}));
  if (device_bytes_ > 0)
    bytes_on_device_ += source.elements.size() + source.scales.size() + source.global_scales.size();
  return {};
}

Result<void> ExpertQuantizer::RunInterleaved(const MoeLayer& layer, uint32_t expert,
                                             const PlaneOutputs& gate, const PlaneOutputs& up) {
  HP_CHECK(layer.format == SourceFormat::kMxfp4);
  HP_TRY(NextPiece());
  const Source first = TakeSource(layer.experts[expert], Projection::kGate);
  const Source second = TakeSource(layer.experts[expert], Projection::kUp);
  for (const Source* source : {&first, &second}) {
    if (std::find(source->scales.begin(), source->scales.end(), std::byte{kE8m0NaN}) !=
        source->scales.end())
      return Fail(BadE8m0Scale(*checkpoint_, *source->scale, source->scales));
  }
  const size_t n = layer.geometry.intermediate;
  const size_t k = layer.geometry.hidden;
  const size_t row_bytes = k / 2;
  const size_t row_scales = k / kScaleBlock;
  strip_.resize(kStripRows * (row_bytes + row_scales));
  std::byte* const strip_scales = strip_.data() + kStripRows * row_bytes;
  for (size_t row = 0; row < n; row += kStripRows) {
    for (const size_t odd : {size_t{0}, size_t{1}}) {
      for (size_t r = 0; r < kStripRows; ++r) {
        const size_t from = 2 * (row + r) + odd;
        const Source& half = from < n ? first : second;
        std::memcpy(strip_.data() + r * row_bytes, half.elements.data() + from % n * row_bytes,
                    row_bytes);
        std::memcpy(strip_scales + r * row_scales, half.scales.data() + from % n * row_scales,
                    row_scales);
      }
      HP_CHECK(kernels_->pack_mxfp4(strip_.data(), strip_scales, kStripRows, k,
                                    Advance(odd == 0 ? gate : up, row, k)));
    }
  }
  return {};
}

Result<void> ExpertQuantizer::RunBiases(const MoeLayer& layer, uint32_t expert, float* bias13,
                                        float* bias2) {
  const size_t n = layer.geometry.intermediate;
  HP_TRY(NextPiece());
  for (size_t p = 0; p < kProjectionCount; ++p) {
    const Tensor& tensor = *layer.experts[expert].bias[p];
    const std::span<std::byte> bytes = TakeTensor(tensor);
    const size_t count = bytes.size() / DtypeBytes(tensor.dtype);
    for (size_t i = 0; i < count; ++i) {
      const float value = ReadFloat(tensor.dtype, bytes.data() + i * DtypeBytes(tensor.dtype));
      if (!std::isfinite(value)) {
        return Fail(
            BadElement(*checkpoint_, tensor, "bias that is not finite", i, "NaN or infinity")
                .Expected("finite biases"));
      }
      if (bias13 == nullptr) continue;
      const size_t row = p * n + i;  // of gate and up together
      if (p == static_cast<size_t>(Projection::kDown)) {
        bias2[i] = value;
      } else {
        bias13[layer.interleaved_rows ? row % 2 * n + row / 2 : row] = value;
      }
    }
  }
  return {};
}

Result<ExpertPieces> ExpertQuantizer::Run(const Checkpoint& checkpoint, const MoeLayer& layer,
                                          uint32_t expert, PlanesWanted wanted,
                                          const BasePlaces& places, TakenPieces& reads,
                                          std::vector<SourceTensorDigest>* digests) {
  const LayerGeometry& g = layer.geometry;
  TraceSpan span("quantize", layer.ordinal);
  const PlaneMap map = MapPlanes(g, wanted);
  std::byte* const planes = planes_.data();
  bytes_read_ = 0;
  bytes_on_device_ = 0;
  checkpoint_ = &checkpoint;
  digests_ = digests;
  reads_ = &reads;

  const auto outputs = [&](uint64_t codes, uint64_t scales, uint64_t nibbles, uint64_t quintals) {
    PlaneOutputs out;
    if (wanted.base) out.codes = planes + codes;
    if (wanted.base) out.scales = planes + scales;
    if (wanted.nibbles) out.nibbles = planes + nibbles;
    if (wanted.quintals) out.quintals = planes + quintals;
    return out;
  };
  // Gate is the upper half of w13's rows; planes are strips of rows, so each half is one run of
  // bytes.
  const size_t half_n = g.intermediate;
  const PlaneOutputs gate = outputs(map.codes13, map.sc13, map.nibbles13, map.quintals13);
  const PlaneOutputs up = Advance(gate, half_n, g.k13());
  const bool in_place = wanted.base && device_bytes_ > 0 && places.planes13 != nullptr;
  PlaneOutputs gate_there, down_there;
  if (in_place) {
    gate_there = {.codes = places.planes13, .scales = places.sc13};
    down_there = {.codes = places.planes2, .scales = places.sc2};
  }
  if (layer.interleaved_rows) {
    HP_TRY(RunInterleaved(layer, expert, gate, up));
  } else {
    HP_TRY(RunProjection(layer, expert, Projection::kGate, gate, gate_there));
    HP_TRY(RunProjection(layer, expert, Projection::kUp, up, Advance(gate_there, half_n, g.k13())));
  }
  HP_TRY(RunProjection(layer, expert, Projection::kDown,
                       outputs(map.codes2, map.sc2, map.nibbles2, map.quintals2), down_there));
  const bool biases = wanted.base && g.biases;
  if (g.biases) {
    HP_TRY(RunBiases(layer, expert,
                     biases ? reinterpret_cast<float*>(planes + map.bias13) : nullptr,
                     biases ? reinterpret_cast<float*>(planes + map.bias2) : nullptr));
  }

  span.set_bytes(bytes_read_);
  const auto view = [planes](bool yes, uint64_t offset, uint64_t bytes) {
    return yes ? std::span<const std::byte>(planes + offset, bytes) : std::span<const std::byte>();
  };
  ExpertPieces pieces;
  pieces.w13_in_place = in_place && !layer.interleaved_rows;
  pieces.w2_in_place = in_place;
  pieces.planes13 = view(wanted.base, map.codes13, CodePlaneBytes(g.n13(), g.k13()));
  pieces.sc13 = view(wanted.base, map.sc13, ScalePlaneBytes(g.n13(), g.k13()));
  pieces.planes2 = view(wanted.base, map.codes2, CodePlaneBytes(g.n2(), g.k2()));
  pieces.sc2 = view(wanted.base, map.sc2, ScalePlaneBytes(g.n2(), g.k2()));
  pieces.nibbles13 = view(wanted.nibbles, map.nibbles13, NibblePlaneBytes(g.n13(), g.k13()));
  pieces.nibbles2 = view(wanted.nibbles, map.nibbles2, NibblePlaneBytes(g.n2(), g.k2()));
  pieces.quintals13 = view(wanted.quintals, map.quintals13, QuintalPlaneBytes(g.n13(), g.k13()));
  pieces.quintals2 = view(wanted.quintals, map.quintals2, QuintalPlaneBytes(g.n2(), g.k2()));
  pieces.bias13 = view(biases, map.bias13, g.n13() * sizeof(float));
  pieces.bias2 = view(biases, map.bias2, g.n2() * sizeof(float));
  return pieces;
}

}  // namespace hotplane
