#include "boot/expert_quantizer.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "base/format_text.h"
#include "base/trace.h"
#include "base/units.h"

namespace hotplane {
namespace {

// Each plane starts on a cache line of its own.
constexpr uint64_t kPlaneAlignBytes = 64;

uint64_t TensorBytesMax(SourceFormat format, const LayerGeometry& geometry) {
  return std::max(geometry.intermediate * SourceRowBytes(format, geometry.hidden),
                  geometry.hidden * SourceRowBytes(format, geometry.intermediate));
}

uint64_t ScaleBytesMax(SourceFormat format, const LayerGeometry& geometry) {
  if (format != SourceFormat::kMxfp4) return 0;
  return ScalePlaneBytes(geometry.intermediate, geometry.hidden);
}

uint64_t SourceBytes(SourceFormat format, const LayerGeometry& geometry) {
  return RoundUp(TensorBytesMax(format, geometry), kPlaneAlignBytes) +
         RoundUp(ScaleBytesMax(format, geometry), kPlaneAlignBytes);
}

// Where each plane of an expert lies in the workspace.
struct PlaneMap {
  uint64_t codes13 = 0, sc13 = 0, codes2 = 0, sc2 = 0;
  uint64_t nibbles13 = 0, nibbles2 = 0, quintals13 = 0, quintals2 = 0;
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
  return map;
}

size_t ElementBytes(SourceFormat format) { return SourceRowBytes(format, 1); }

bool IsFinite(SourceFormat format, const std::byte* element) {
  if (format == SourceFormat::kF32) {
    uint32_t bits;
    std::memcpy(&bits, element, sizeof(bits));
    return (bits & 0x7f800000u) != 0x7f800000u;
  }
  uint16_t bits;
  std::memcpy(&bits, element, sizeof(bits));
  const uint16_t exponent = format == SourceFormat::kBf16 ? 0x7f80 : 0x7c00;
  return (bits & exponent) != exponent;
}

Status NotFinite(const Checkpoint& checkpoint, SourceFormat format, const Tensor& tensor,
                 std::span<const std::byte> bytes, size_t k) {
  const size_t step = ElementBytes(format);
  size_t index = 0;
  while (IsFinite(format, bytes.data() + index * step)) ++index;
  return Status::Data(Text("{} holds a value that is not finite at row {}, column {}", tensor.name,
                           index / k, index % k))
      .File(checkpoint.files()[tensor.file])
      .At(tensor.offset + index * step)
      .Expected("finite weights")
      .Found("NaN or infinity")
      .Advice("the checkpoint is damaged or was exported wrongly: fetch or convert it again");
}

Status BadScale(const Checkpoint& checkpoint, const Tensor& tensor,
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

}  // namespace

uint64_t ExpertQuantizer::WorkspaceBytes(SourceFormat format, const LayerGeometry& geometry,
                                         PlanesWanted wanted) {
  return SourceBytes(format, geometry) + MapPlanes(geometry, wanted).bytes;
}

Result<ExpertQuantizer> ExpertQuantizer::Create(const Kernels& kernels,
                                                std::span<const MoeLayer* const> layers,
                                                PlanesWanted wanted, ZeroMode zero_mode) {
  ExpertQuantizer quantizer;
  quantizer.kernels_ = &kernels;
  quantizer.zero_mode_ = zero_mode;
  uint64_t source_bytes = 0;
  uint64_t plane_bytes = 0;
  for (const MoeLayer* layer : layers) {
    source_bytes = std::max(source_bytes, SourceBytes(layer->format, layer->geometry));
    plane_bytes = std::max(plane_bytes, MapPlanes(layer->geometry, wanted).bytes);
  }
  HP_ASSIGN(quantizer.source_, HugeBuffer::Allocate(source_bytes));
  HP_ASSIGN(quantizer.planes_, HugeBuffer::Allocate(plane_bytes));
  return quantizer;
}

Result<std::span<std::byte>> ExpertQuantizer::ReadTensor(const Checkpoint& checkpoint,
                                                         const Tensor& tensor,
                                                         uint64_t workspace_offset,
                                                         std::vector<SourceTensorDigest>* digests) {
  HP_CHECK(workspace_offset + tensor.bytes <= source_.size());
  const std::span<std::byte> bytes = source_.span().subspan(workspace_offset, tensor.bytes);
  {
    const TraceSpan span("read", kNoLayer, tensor.bytes, "checkpoint");
    HP_TRY(checkpoint.Read(tensor, 0, bytes));
  }
  bytes_read_ += tensor.bytes;
  digests->push_back({tensor.name, Digest(std::span<const std::byte>(bytes))});
  return bytes;
}

Result<void> ExpertQuantizer::RunProjection(const Checkpoint& checkpoint, const MoeLayer& layer,
                                            uint32_t expert, Projection projection,
                                            const PlaneOutputs& out,
                                            std::vector<SourceTensorDigest>* digests) {
  const auto index = static_cast<size_t>(projection);
  const Tensor& weight = *layer.experts[expert].weight[index];
  const bool down = projection == Projection::kDown;
  const size_t n = down ? layer.geometry.hidden : layer.geometry.intermediate;
  const size_t k = down ? layer.geometry.intermediate : layer.geometry.hidden;
  HP_ASSIGN(const std::span<std::byte> elements, ReadTensor(checkpoint, weight, 0, digests));
  if (layer.format == SourceFormat::kMxfp4) {
    const Tensor& scale = *layer.experts[expert].scale[index];
    HP_ASSIGN(const std::span<std::byte> scales,
              ReadTensor(checkpoint, scale, RoundUp(weight.bytes, kPlaneAlignBytes), digests));
    if (!kernels_->pack_mxfp4(elements.data(), scales.data(), n, k, out))
      return Fail(BadScale(checkpoint, scale, scales));
    return {};
  }
  const ZeroCount zeros = kernels_->count_zeros(layer.format, elements.data(), n * k);
  if (!zeros.finite) return Fail(NotFinite(checkpoint, layer.format, weight, elements, k));
  kernels_->quantize(layer.format, elements.data(), n, k, ZerosAlternate(zero_mode_, zeros), out);
  return {};
}

Result<ExpertPieces> ExpertQuantizer::Run(const Checkpoint& checkpoint, const MoeLayer& layer,
                                          uint32_t expert, PlanesWanted wanted,
                                          std::vector<SourceTensorDigest>* digests) {
  const LayerGeometry& g = layer.geometry;
  TraceSpan span("quantize", layer.ordinal);
  const PlaneMap map = MapPlanes(g, wanted);
  std::byte* const planes = planes_.data();
  bytes_read_ = 0;

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
  HP_TRY(RunProjection(checkpoint, layer, expert, Projection::kGate,
                       outputs(map.codes13, map.sc13, map.nibbles13, map.quintals13), digests));
  HP_TRY(RunProjection(checkpoint, layer, expert, Projection::kUp,
                       outputs(map.codes13 + CodePlaneBytes(half_n, g.k13()),
                               map.sc13 + ScalePlaneBytes(half_n, g.k13()),
                               map.nibbles13 + NibblePlaneBytes(half_n, g.k13()),
                               map.quintals13 + QuintalPlaneBytes(half_n, g.k13())),
                       digests));
  HP_TRY(RunProjection(checkpoint, layer, expert, Projection::kDown,
                       outputs(map.codes2, map.sc2, map.nibbles2, map.quintals2), digests));

  span.set_bytes(bytes_read_);
  const auto view = [planes](bool yes, uint64_t offset, uint64_t bytes) {
    return yes ? std::span<const std::byte>(planes + offset, bytes) : std::span<const std::byte>();
  };
  ExpertPieces pieces;
  pieces.planes13 = view(wanted.base, map.codes13, CodePlaneBytes(g.n13(), g.k13()));
  pieces.sc13 = view(wanted.base, map.sc13, ScalePlaneBytes(g.n13(), g.k13()));
  pieces.planes2 = view(wanted.base, map.codes2, CodePlaneBytes(g.n2(), g.k2()));
  pieces.sc2 = view(wanted.base, map.sc2, ScalePlaneBytes(g.n2(), g.k2()));
  pieces.nibbles13 = view(wanted.nibbles, map.nibbles13, NibblePlaneBytes(g.n13(), g.k13()));
  pieces.nibbles2 = view(wanted.nibbles, map.nibbles2, NibblePlaneBytes(g.n2(), g.k2()));
  pieces.quintals13 = view(wanted.quintals, map.quintals13, QuintalPlaneBytes(g.n13(), g.k13()));
  pieces.quintals2 = view(wanted.quintals, map.quintals2, QuintalPlaneBytes(g.n2(), g.k2()));
  return pieces;
}

}  // namespace hotplane
