#include "engine/expert_compute.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>

#include "base/format_text.h"
#include "base/log.h"

namespace hotplane {
namespace {

std::span<const std::byte> PartOf(const PinnedRecord& record, std::string_view role) {
  for (size_t i = 0; i < record.shape.part_count; ++i)
    if (record.shape.parts[i].role == role) return record.parts[i];
  return {};
}

// Of a layer on the host what is for devices.
Status NotOnADevice(const BootedLayer& layer) {
  return Status::Usage(Text("layer {} is in memory of the host", layer.ordinal))
      .Expected("a layer on a device, for arrays on a device")
      .Advice("boot with a device and room for all layers on it, or give arrays of the host");
}

Result<Precision> PrecisionOf(const MoeRequest& request, uint32_t expert) {
  const unsigned value = request.precisions.empty() ? static_cast<unsigned>(request.precision)
                                                    : request.precisions[expert];
  if (value == static_cast<unsigned>(Precision::kBase)) return Precision::kBase;
  if (value == static_cast<unsigned>(Precision::kFp4)) return Precision::kFp4;
  return Fail(Status::Usage(Text("layer {}, expert {}: no such precision", request.layer, expert))
                  .Expected("1 (base) or 2 (FP4)")
                  .Found(Text("{}", value)));
}

}  // namespace

void SetBase(const BootedLayer& layer, size_t index, ExpertWeights* expert) {
  const auto piece = [&](std::span<const std::byte> part) {
    return part.empty() ? nullptr : part.data() + part.size() / layer.geometry.experts * index;
  };
  expert->planes13 = piece(layer.planes13);
  expert->sc13 = piece(layer.sc13);
  expert->planes2 = piece(layer.planes2);
  expert->sc2 = piece(layer.sc2);
  expert->bias13 = piece(layer.bias13);
  expert->bias2 = piece(layer.bias2);
}

WorkerPool& ExpertCompute::pool() {
  const std::lock_guard lock(mutex_);
  if (pool_ == nullptr) pool_ = std::make_unique<WorkerPool>(worker_count_);
  return *pool_;
}

Result<const MoeKernels*> ExpertCompute::Kernels() {
  const std::lock_guard lock(mutex_);
  if (kernels_ != nullptr) return kernels_;
  Result<const MoeKernels*> selected =
      SelectMoeKernels(isa_.empty() ? std::nullopt : std::optional<std::string_view>(isa_));
  if (!selected)
    return Fail(std::move(selected)
                    .error()
                    .Because(Text("HOTPLANE_ISA={}", isa_))
                    .Advice("correct HOTPLANE_ISA; or unset it, to get the best one"));
  kernels_ = *selected;
  Log(LogLevel::kInfo, "experts are computed with {}, {}", kernels_->name,
      isa_.empty() ? "the best this CPU runs" : "as asked for");
  return kernels_;
}

Result<DeviceCompute*> ExpertCompute::OnDevice(const BootedLayer& layer) {
  if (layer.device < 0 || device_ == nullptr) return Fail(NotOnADevice(layer));
  const std::lock_guard lock(mutex_);
  if (on_device_ == nullptr) {
    std::vector<uint32_t> expert_counts(records_.reader().layer_count());
    for (uint32_t i = 0; i < expert_counts.size(); ++i)
      expert_counts[i] = records_.reader().geometry(i).experts;
    HP_ASSIGN(on_device_, NewDeviceCompute(*device_, expert_counts));
    opened_ = on_device_.get();
    Log(LogLevel::kInfo, "experts of layers on {} are computed there", device_->name());
  }
  return on_device_.get();
}

Result<void> ExpertCompute::PinFp4(uint32_t layer, std::span<const uint32_t> experts,
                                   Chosen& chosen) {
  chosen.pinned.resize(experts.size());
  chosen.fp4.resize(experts.size());
  return pool().ParallelFor(experts.size(), [&](size_t i, size_t) -> Result<void> {
    Result<PinnedRecord> got =
        records_.Get(RecordKind::kDelta, {layer, experts[i]}, RecordAccess::kDemand);
    if (!got)
      return Fail(
          std::move(got).error().Because(Text("FP4 of layer {}, expert {}", layer, experts[i])));
    PinnedRecord& record = chosen.pinned[i] = *std::move(got);
    chosen.fp4[i] = {experts[i], record.shape.encoding, PartOf(record, "fp13"),
                     PartOf(record, "fp2")};
    return {};
  });
}

Result<ExpertCompute::Chosen> ExpertCompute::ChooseExperts(const BootedLayer& layer,
                                                           const MoeRequest& request,
                                                           uint32_t expert_count) {
  Chosen chosen;
  chosen.experts.resize(expert_count);
  DeviceCompute* on_device = nullptr;
  if (layer.device >= 0) {
    HP_ASSIGN(on_device, OnDevice(layer));
  }
  std::vector<uint32_t> fp4;
  const size_t booted = layer.geometry.experts;
  for (size_t i = 0; i < request.token_count * request.top_k; ++i) {
    const auto expert = static_cast<uint32_t>(request.ids[i]);
    ExpertWeights& weights = chosen.experts[expert];
    if (weights.precision != Precision::kInvalid) continue;
    if (expert < layer.first_expert || expert - layer.first_expert >= booted)
      return Fail(Status::Data(Text("layer {}: expert {} was not booted", layer.ordinal, expert))
                      .Expected(Text("experts {} to {}", layer.first_expert,
                                     layer.first_expert + booted - 1))
                      .Advice("boot all experts that the router can choose"));
    HP_ASSIGN(weights.precision, PrecisionOf(request, expert));
    SetBase(layer, expert - layer.first_expert, &weights);
    if (weights.precision != Precision::kFp4) continue;
    ResidentFp4 resident;
    if (on_device != nullptr) resident = on_device->Resident(layer.ordinal, expert);
    weights.fp_encoding = resident.encoding;
    weights.fp13 = resident.fp13;
    weights.fp2 = resident.fp2;
    if (resident.encoding == Encoding::kInvalid) fp4.push_back(expert);
  }
  HP_TRY(PinFp4(layer.ordinal, fp4, chosen));
  for (const HostFp4& record : chosen.fp4) {
    ExpertWeights& weights = chosen.experts[record.expert];
    weights.fp_encoding = record.encoding;
    weights.fp13 = record.fp13.data();
    weights.fp2 = record.fp2.data();
  }
  return chosen;
}

Result<void> ExpertCompute::Forward(const BootedLayer& layer, const Activation& activation,
                                    const MoeRequest& request) {
  MoeCall call;
  call.layer = layer.ordinal;
  call.geometry = layer.geometry;
  call.geometry.experts = ExpertCount(layer);
  if (!request.precisions.empty() && request.precisions.size() != call.geometry.experts)
    return Fail(
        Status::Usage(Text("layer {}: one precision for each expert is needed", layer.ordinal))
            .Expected(Text("{}", call.geometry.experts))
            .Found(Text("{}", request.precisions.size())));
  call.activation = activation;
  call.arithmetic = request.arithmetic;
  call.token_count = request.token_count;
  call.top_k = request.top_k;
  call.x = request.x;
  call.ids = request.ids;
  call.weights = request.weights;
  call.y = request.y;
  call.mapped = layer.mapped;
  HP_TRY(CheckMoeCall(call));
  HP_ASSIGN(const Chosen chosen, ChooseExperts(layer, request, call.geometry.experts));
  call.experts = chosen.experts;
  if (layer.device >= 0) {
    HP_ASSIGN(DeviceCompute* const on_device, OnDevice(layer));
    return on_device->Forward(call, chosen.fp4);
  }
  HP_ASSIGN(const MoeKernels* const kernels, Kernels());
  return MoeForward(call, *kernels, pool());
}

Result<uint64_t> ExpertCompute::PrepareOnDevice(const BootedLayer& layer, uint32_t tokens,
                                                uint32_t top_k) {
  HP_ASSIGN(DeviceCompute* const on_device, OnDevice(layer));
  HP_TRY(on_device->Prepare(layer));
  // Calls name any expert of the model, also those that were not booted.
  LayerGeometry geometry = layer.geometry;
  geometry.experts = ExpertCount(layer);
  return DeviceWorkspaceBytes(geometry, tokens, top_k);
}

Result<void> ExpertCompute::ForwardOnDevice(const BootedLayer& layer, const Activation& activation,
                                            const DeviceMoeRequest& request) {
  HP_ASSIGN(DeviceCompute* const on_device, OnDevice(layer));
  return on_device->Enqueue(layer, ExpertCount(layer), activation, request);
}

Result<void> ExpertCompute::Publish(const BootedLayer& layer) {
  DeviceCompute* const on_device = opened_;
  if (on_device == nullptr || layer.device < 0) return {};
  return on_device->Prepare(layer);
}

Result<void> ExpertCompute::TakeRefusal(const BootedLayer& layer) {
  HP_ASSIGN(DeviceCompute* const on_device, OnDevice(layer));
  return on_device->TakeRefusal(layer.ordinal);
}

Result<void> ExpertCompute::LoadFp4(const BootedLayer& layer, std::span<const uint32_t> experts) {
  HP_ASSIGN(DeviceCompute* const on_device, OnDevice(layer));
  const size_t booted = layer.geometry.experts;
  for (const uint32_t expert : experts)
    if (expert < layer.first_expert || expert - layer.first_expert >= booted)
      return Fail(Status::Usage(Text("layer {}: expert {} was not booted", layer.ordinal, expert))
                      .Expected(Text("experts {} to {}", layer.first_expert,
                                     layer.first_expert + booted - 1)));
  HP_TRY(on_device->Prepare(layer));
  std::vector<uint32_t> absent;
  for (const uint32_t expert : experts)
    if (on_device->Resident(layer.ordinal, expert).encoding == Encoding::kInvalid)
      absent.push_back(expert);
  // As many at once as are read in parallel, so that memory of the host stays small.
  const size_t at_once = std::max<size_t>(pool().worker_count(), 1);
  for (std::span<const uint32_t> left = absent; !left.empty();) {
    const size_t count = std::min(at_once, left.size());
    Chosen some;
    HP_TRY(PinFp4(layer.ordinal, left.first(count), some));
    left = left.subspan(count);
    for (const HostFp4& record : some.fp4) HP_TRY(on_device->LoadFp4(layer.ordinal, record));
  }
  return {};
}

}  // namespace hotplane
