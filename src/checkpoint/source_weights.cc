#include "checkpoint/source_weights.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/format_text.h"
#include "format/checksum.h"
#include "format/number_values.h"
#include "format/tsym4.h"

namespace hotplane {
namespace {

// NVFP4 has one e4m3 scale for so many consecutive elements of a row.
constexpr size_t kNvfp4ScaleBlock = 16;

double ReadFloat(Dtype dtype, const std::byte* from) {
  if (dtype == Dtype::kF32) {
    float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  if (dtype == Dtype::kBf16) return std::bit_cast<float>(uint32_t{bits} << 16);
  return F16Value(bits);
}

const std::array<double, 256>& E4m3Table() {
  static const std::array<double, 256> table = [] {
    std::array<double, 256> values{};
    for (unsigned i = 0; i < values.size(); ++i) values[i] = E4m3Value(static_cast<uint8_t>(i));
    return values;
  }();
  return table;
}

unsigned Byte(std::byte byte) { return std::to_integer<unsigned>(byte); }

Status BadElement(const Checkpoint& checkpoint, const Tensor& tensor, std::string_view what,
                  uint64_t row, uint64_t column, uint64_t byte_offset) {
  return Status::Data(Text("{} holds a {} at row {}, column {}", tensor.name, what, row, column))
      .File(checkpoint.files()[tensor.file])
      .At(tensor.offset + byte_offset)
      .Advice("the checkpoint is damaged or was exported wrongly: fetch or convert it again");
}

}  // namespace

Result<void> SourceWeights::ReadTensor(const Tensor& tensor, std::vector<std::byte>& bytes) {
  bytes.resize(tensor.bytes);
  HP_TRY(checkpoint_->Read(tensor, 0, bytes));
  bytes_read_ += tensor.bytes;
  digests_->push_back({tensor.name, Digest(std::span<const std::byte>(bytes))});
  return {};
}

Result<void> SourceWeights::CheckScales(const Stored& stored) const {
  const SourceFormat format = layer_->format;
  const size_t step = DtypeBytes(stored.scale->dtype);
  const uint64_t columns = stored.scale->shape.back();
  for (size_t at = 0; at < stored.scales.size(); at += step) {
    bool usable = true;
    if (format == SourceFormat::kMxfp4) usable = Byte(stored.scales[at]) != kE8m0NaN;
    if (format == SourceFormat::kNvfp4) usable = Byte(stored.scales[at]) < 0x7f;
    if (format == SourceFormat::kFp8) {
      const double scale = ReadFloat(stored.scale->dtype, stored.scales.data() + at);
      usable = scale >= 0 && std::isfinite(scale);
    }
    if (usable) continue;
    const uint64_t index = at / step;
    return Fail(BadElement(*checkpoint_, *stored.scale, "scale that is not usable", index / columns,
                           index % columns, at)
                    .Expected("finite scales that are not negative"));
  }
  return {};
}

Result<void> SourceWeights::ReadStored(const ExpertTensors& expert, Projection projection,
                                       Stored& stored) {
  const auto p = static_cast<size_t>(projection);
  stored.weight = expert.weight[p];
  stored.scale = expert.scale[p];
  stored.global_factor = stored.global_divisor = 1;
  HP_TRY(ReadTensor(*stored.weight, stored.elements));
  if (stored.scale == nullptr) return {};
  HP_TRY(ReadTensor(*stored.scale, stored.scales));
  if (const Tensor* const tensor = expert.global_scale[p]; tensor != nullptr) {
    std::vector<std::byte> bytes;
    HP_TRY(ReadTensor(*tensor, bytes));
    const double scale = ReadFloat(Dtype::kF32, bytes.data());
    if (!(scale > 0) || !std::isfinite(scale))
      return Fail(BadElement(*checkpoint_, *tensor, "global scale that is not usable", 0, 0, 0)
                      .Expected("a positive, finite number")
                      .Found(Text("{}", scale)));
    (layer_->divide_by_global_scale ? stored.global_divisor : stored.global_factor) = scale;
  }
  return CheckScales(stored);
}

Result<void> SourceWeights::Read(const Checkpoint& checkpoint, const MoeLayer& layer,
                                 uint32_t expert, Projection projection,
                                 std::vector<SourceTensorDigest>* digests) {
  const bool down = projection == Projection::kDown;
  const bool same_pair =
      pair_read_ && checkpoint_ == &checkpoint && layer_ == &layer && expert_ == expert;
  checkpoint_ = &checkpoint;
  layer_ = &layer;
  digests_ = digests;
  expert_ = expert;
  projection_ = projection;
  rows_ = down ? layer.geometry.hidden : layer.geometry.intermediate;
  columns_ = down ? layer.geometry.intermediate : layer.geometry.hidden;
  const bool pair = layer.interleaved_rows && !down;
  if (pair && same_pair) return {};
  pair_read_ = false;
  HP_TRY(ReadStored(layer.experts[expert], pair ? Projection::kGate : projection, stored_[0]));
  if (pair) HP_TRY(ReadStored(layer.experts[expert], Projection::kUp, stored_[1]));
  pair_read_ = pair;
  return {};
}

void SourceWeights::NibbleRow(const Stored& stored, size_t row,
                              std::span<double> destination) const {
  const bool mxfp4 = layer_->format == SourceFormat::kMxfp4;
  const size_t block = mxfp4 ? kScaleBlock : kNvfp4ScaleBlock;
  const std::byte* const nibbles = stored.elements.data() + row * columns_ / 2;
  const std::byte* const scales = stored.scales.data() + row * columns_ / block;
  for (size_t first = 0; first < columns_; first += block) {
    const unsigned bits = Byte(scales[first / block]);
    // Exact: at most 2 + 4 + 24 significant bits.
    const double scale = mxfp4 ? std::ldexp(1.0, static_cast<int>(bits) - kE8m0Bias)
                               : E4m3Table()[bits] * stored.global_factor;
    for (size_t k = first; k < first + block; k += 2) {
      const unsigned pair = Byte(nibbles[k / 2]);
      destination[k] = E2m1Value(pair & 15) * scale / stored.global_divisor;
      destination[k + 1] = E2m1Value(pair >> 4) * scale / stored.global_divisor;
    }
  }
}

void SourceWeights::Fp8Row(const Stored& stored, size_t row, std::span<double> destination) const {
  const BlockShape block = layer_->fp8_block;
  const size_t step = DtypeBytes(stored.scale->dtype);
  const size_t scales_per_row = (columns_ + block.columns - 1) / block.columns;
  const std::byte* const scales = stored.scales.data() + row / block.rows * scales_per_row * step;
  const std::byte* const elements = stored.elements.data() + row * columns_;
  for (size_t k = 0; k < columns_; ++k) {
    destination[k] = E4m3Table()[Byte(elements[k])] *
                     ReadFloat(stored.scale->dtype, scales + k / block.columns * step);
  }
}

void SourceWeights::FloatRow(const Stored& stored, size_t row,
                             std::span<double> destination) const {
  const Dtype dtype = stored.weight->dtype;
  const size_t step = DtypeBytes(dtype);
  const std::byte* const elements = stored.elements.data() + row * columns_ * step;
  for (size_t k = 0; k < columns_; ++k) destination[k] = ReadFloat(dtype, elements + k * step);
}

Result<void> SourceWeights::Row(size_t row, std::span<double> destination) const {
  HP_CHECK(row < rows_ && destination.size() == columns_);
  // Of gate and up that alternate, the first tensor has the upper half of the rows of both.
  const bool pair = layer_->interleaved_rows && projection_ != Projection::kDown;
  const size_t fused = 2 * row + (projection_ == Projection::kUp ? 1 : 0);
  const Stored& stored = stored_[pair && fused >= rows_ ? 1 : 0];
  const size_t stored_row = pair ? fused % rows_ : row;
  switch (layer_->format) {
    case SourceFormat::kMxfp4:
    case SourceFormat::kNvfp4: NibbleRow(stored, stored_row, destination); break;
    case SourceFormat::kFp8: Fp8Row(stored, stored_row, destination); break;
    default: FloatRow(stored, stored_row, destination); break;
  }
  for (size_t k = 0; k < columns_; ++k) {
    if (std::isfinite(destination[k])) continue;
    return Fail(BadElement(*checkpoint_, *stored.weight, "value that is not finite", stored_row, k,
                           (stored_row * columns_ + k) * DtypeBytes(stored.weight->dtype))
                    .Expected("finite weights")
                    .Found("NaN or infinity"));
  }
  return {};
}

}  // namespace hotplane
