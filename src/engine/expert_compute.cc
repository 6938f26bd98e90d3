#include "engine/expert_compute.h"

#include <optional>
#include <string_view>
#include <utility>

#include "base/format_text.h"
#include "base/log.h"

namespace hotplane {
namespace {

// The piece of expert `index` in a part that holds `experts` of them.
const std::byte* PieceOf(std::span<const std::byte> part, size_t experts, size_t index) {
  return part.empty() ? nullptr : part.data() + part.size() / experts * index;
}

const std::byte* PartOf(const PinnedRecord& record, std::string_view role) {
  for (size_t i = 0; i < record.shape.part_count; ++i)
    if (record.shape.parts[i].role == role) return record.parts[i].data();
  return nullptr;
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

WorkerPool& ExpertCompute::pool() {
  const std::lock_guard lock(mutex_);
  if (pool_ == nullptr) pool_ = std::make_unique<WorkerPool>(worker_count_);
  return *pool_;
}

Result<const MoeKernels*> ExpertCompute::Kernels() {
  const std::lock_guard lock(mutex_);
  if (kernels_ != nullptr) return kernels_;
  HP_ASSIGN(kernels_,
            SelectMoeKernels(isa_.empty() ? std::nullopt : std::optional<std::string_view>(isa_)));
  Log(LogLevel::kInfo, "experts are computed with {}, {}", kernels_->name,
      isa_.empty() ? "the best this CPU runs" : "as asked for");
  return kernels_;
}

Result<std::vector<ExpertWeights>> ExpertCompute::AddExperts(const BootedLayer& layer,
                                                             const MoeRequest& request,
                                                             uint32_t expert_count,
                                                             std::vector<PinnedRecord>& pinned) {
  std::vector<ExpertWeights> experts(expert_count);
  std::vector<uint32_t> fp4;
  const size_t booted = layer.geometry.experts;
  for (size_t i = 0; i < request.token_count * request.top_k; ++i) {
    const auto expert = static_cast<uint32_t>(request.ids[i]);
    ExpertWeights& weights = experts[expert];
    if (weights.precision != Precision::kInvalid) continue;
    if (expert < layer.first_expert || expert - layer.first_expert >= booted)
      return Fail(Status::Data(Text("layer {}: expert {} was not booted", layer.ordinal, expert))
                      .Expected(Text("experts {} to {}", layer.first_expert,
                                     layer.first_expert + booted - 1))
                      .Advice("boot all experts that the router can choose"));
    HP_ASSIGN(weights.precision, PrecisionOf(request, expert));
    const size_t index = expert - layer.first_expert;
    weights.planes13 = PieceOf(layer.planes13, booted, index);
    weights.sc13 = PieceOf(layer.sc13, booted, index);
    weights.planes2 = PieceOf(layer.planes2, booted, index);
    weights.sc2 = PieceOf(layer.sc2, booted, index);
    weights.bias13 = PieceOf(layer.bias13, booted, index);
    weights.bias2 = PieceOf(layer.bias2, booted, index);
    if (weights.precision == Precision::kFp4) fp4.push_back(expert);
  }
  pinned.resize(fp4.size());
  HP_TRY(pool().ParallelFor(fp4.size(), [&](size_t i, size_t) -> Result<void> {
    ExpertWeights& weights = experts[fp4[i]];
    HP_ASSIGN(pinned[i],
              records_.Get(RecordKind::kDelta, {layer.ordinal, fp4[i]}, RecordAccess::kDemand));
    weights.fp_encoding = pinned[i].shape.encoding;
    weights.fp13 = PartOf(pinned[i], "fp13");
    weights.fp2 = PartOf(pinned[i], "fp2");
    return {};
  }));
  return experts;
}

Result<void> ExpertCompute::Forward(const BootedLayer& layer, const Activation& activation,
                                    const MoeRequest& request) {
  if (layer.device >= 0)
    return Fail(Status::Usage(Text("layer {} lives on CUDA device {}, and this operator computes "
                                   "on the host",
                                   layer.ordinal, layer.device))
                    .Advice("boot with the device \"cpu\""));
  MoeCall call;
  call.layer = layer.ordinal;
  call.geometry = layer.geometry;
  call.geometry.experts = records_.reader().geometry(layer.ordinal).experts;
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
  std::vector<PinnedRecord> pinned;
  HP_ASSIGN(const std::vector<ExpertWeights> experts,
            AddExperts(layer, request, call.geometry.experts, pinned));
  call.experts = experts;
  HP_ASSIGN(const MoeKernels* const kernels, Kernels());
  return MoeForward(call, *kernels, pool());
}

}  // namespace hotplane
