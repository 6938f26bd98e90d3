#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/format_text.h"
#include "base/units.h"
#include "device/cuda/cuda_handles.h"
#include "engine/device_compute.h"
#include "engine/expert_compute.h"
#include "moe/bfloat16.h"
#include "moe/cuda/cuda_moe.h"

namespace hotplane {
namespace {

using moe_cuda::ExpertSlot;
using moe_cuda::Refusal;

static_assert(int{moe_cuda::kWantBase} == static_cast<int>(DevicePrecision::kBase));
static_assert(int{moe_cuda::kWantFp4} == static_cast<int>(DevicePrecision::kFp4));
static_assert(int{moe_cuda::kWantFp4OrBase} == static_cast<int>(DevicePrecision::kFp4OrBase));
static_assert(kDeviceWorkspaceZeros == CudaMoe::kWorkspaceZeros);

constexpr uint64_t kAlign = 256;
// A call on host arrays goes in pieces of so much workspace: some thousand assignments, far more
// than what reading the weights once more for each piece costs.
constexpr uint64_t kPieceWorkspaceBytes = 256 * kMiB;
// Of each layer's refusal in their array: the operator wants it aligned.
constexpr uint64_t kRefusalStride = 16;
static_assert(sizeof(Refusal) <= kRefusalStride);

const uint8_t* Bytes(const std::byte* at) { return reinterpret_cast<const uint8_t*>(at); }
const float* Floats(const std::byte* at) { return reinterpret_cast<const float*>(at); }

// Device memory, freed with the context current by itself. Move-only.
class DeviceBytes {
 public:
  DeviceBytes() = default;
  ~DeviceBytes() { Free(); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  DeviceBytes(DeviceBytes&& other) noexcept { *this = std::move(other); }
  DeviceBytes& operator=(DeviceBytes&& other) noexcept {
    std::swap(cuda_, other.cuda_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  // The context is current. REQUIRES nothing allocated.
  Result<void> Allocate(const CudaHandles& cuda, uint64_t bytes, const char* what) {
    HP_CHECK(address_ == 0);
    HP_CUDA_TRY(*cuda.driver,
                Text("cannot allocate {} of device memory for {}", FormatBytes(bytes), what),
                cuda.driver->cuMemAlloc(&address_, bytes));
    cuda_ = &cuda;
    bytes_ = bytes;
    return {};
  }
  void Free() {
    if (address_ == 0) return;
    const CurrentContext current(*cuda_->driver, cuda_->context);
    (void)cuda_->driver->cuMemFree(address_);
    address_ = 0;
    bytes_ = 0;
  }
  std::byte* data() const { return reinterpret_cast<std::byte*>(address_); }
  uint64_t bytes() const { return bytes_; }

 private:
  const CudaHandles* cuda_ = nullptr;
  CUdeviceptr address_ = 0;
  uint64_t bytes_ = 0;
};

// Places in one block of memory, one after the other.
class Places {
 public:
  uint64_t Take(uint64_t bytes) {
    return std::exchange(bytes_, bytes_ + RoundUp(std::max<uint64_t>(bytes, 1), kAlign));
  }
  uint64_t bytes() const { return bytes_; }

 private:
  uint64_t bytes_ = 0;
};

ExpertSlot SlotOf(const ExpertWeights& expert) {
  ExpertSlot slot = {};
  slot.planes13 = Bytes(expert.planes13);
  slot.sc13 = Bytes(expert.sc13);
  slot.planes2 = Bytes(expert.planes2);
  slot.sc2 = Bytes(expert.sc2);
  slot.fp13 = Bytes(expert.fp13);
  slot.fp2 = Bytes(expert.fp2);
  slot.bias13 = Floats(expert.bias13);
  slot.bias2 = Floats(expert.bias2);
  slot.fp_quintals = expert.fp_encoding == Encoding::kDeltaQuintal ? 1 : 0;
  return slot;
}

// `top_k`: of the call, to say which token it was; 0: not known.
Result<void> Told(const Refusal& refusal, uint32_t layer, uint32_t top_k) {
  if (refusal.kind == 0) return {};
  if (refusal.kind == moe_cuda::kRefusedExpert)
    return Fail(Status::Data(Text("layer {}: expert {} lacks what was asked for on the device",
                                  layer, refusal.expert))
                    .Expected("its planes, for FP4 its record too")
                    .Found("not there; the rows of its tokens are NaN")
                    .Advice("load its FP4 to the device first, ask for FP4 or base, or boot the "
                            "expert"));
  const std::string where =
      top_k == 0 ? Text("assignment {}", refusal.expert)
                 : Text("ids [{}, {}]", refusal.expert / top_k, refusal.expert % top_k);
  return Fail(Status::Usage(Text("layer {}: {} of a call is no expert of it", layer, where))
                  .Expected("ids from 0 to E-1")
                  .Found("another; the rows of these tokens are NaN"));
}

// A layer's slots as calls on the device read them.
// The FP4 that a slot has.
uint8_t FromOf(const ExpertSlot& slot) {
  return slot.fp_quintals != 0 ? moe_cuda::kFromQuintals : moe_cuda::kFromNibbles;
}

struct Table {
  bool prepared = false;
  bool published = false;         // the device knows the parts; before it refuses every expert
  uint64_t offset = 0;            // in memory of the device
  std::vector<ExpertSlot> slots;  // as they are there
  std::map<uint32_t, DeviceBytes> fp4;  // by expert
  uint8_t fp4_from = 0;                 // what it is there, moe_cuda::Froms
};

// What a call is computed from. A graph that captures it may be replayed when more records are
// there: those of a layer are all of one encoding.
uint8_t TiersOf(const DeviceMoeRequest& request, const Table& table) {
  if (request.precisions == nullptr && request.precision == DevicePrecision::kBase)
    return moe_cuda::kFromBase;
  if (request.precisions != nullptr || table.fp4_from == 0) return moe_cuda::kFromAnything;
  return request.precision == DevicePrecision::kFp4
             ? table.fp4_from
             : static_cast<uint8_t>(table.fp4_from | moe_cuda::kFromBase);
}

class CudaCompute final : public DeviceCompute {
 public:
  CudaCompute(const CudaHandles& cuda, std::span<const uint32_t> expert_counts)
      : cuda_(cuda), tables_(expert_counts.size()) {
    for (size_t i = 0; i < tables_.size(); ++i) tables_[i].slots.resize(expert_counts[i]);
  }
  ~CudaCompute() override {
    const CurrentContext current(*cuda_.driver, cuda_.context);
    // On streams of callers calls may still read the planes, which are given back after this.
    if (enqueued_) (void)cuda_.driver->cuCtxSynchronize();
    if (stream_ == nullptr) return;
    (void)cuda_.driver->cuStreamSynchronize(stream_);
    (void)cuda_.driver->cuStreamDestroy(stream_);
  }

  Result<void> Open();
  Result<void> Forward(const MoeCall& call, std::span<const HostFp4> fp4) override;
  Result<void> Prepare(const BootedLayer& layer) override;
  Result<void> Enqueue(const BootedLayer& layer, uint32_t expert_count,
                       const Activation& activation, const DeviceMoeRequest& request) override;
  Result<void> TakeRefusal(uint32_t layer) override;
  Result<void> LoadFp4(uint32_t layer, const HostFp4& record) override;
  ResidentFp4 Resident(uint32_t layer, uint32_t expert) const override;

 private:
  // What a call on host arrays has in device memory.
  struct Inputs {
    uint64_t slots, wanted, refusal, x, ids, weights, y, workspace;
    uint8_t wanted_of_all = 0;  // 0: as `wanted` says
    uint8_t tiers = 0;
  };

  Result<void> Upload(std::byte* to, const void* from, uint64_t bytes) const;
  Result<void> Download(void* to, const std::byte* from, uint64_t bytes) const;
  Result<void> Clear(std::byte* at, uint64_t bytes) const;
  Result<void> Wait() const;
  // Waits for what is on its way also after a failure: until then memory is in use that is about to
  // be given back. A wait that fails does not say that nothing is: once more.
  Result<void> Settle(Result<void> done) const;
  Result<void> Run(const MoeCall& call, std::span<const HostFp4> fp4);
  // What the experts that are chosen have in common.
  static void Narrow(const MoeCall& call, std::span<const ExpertSlot> slots,
                     std::span<const uint8_t> wanted, Inputs* at);
  Result<void> UploadFp4(const HostFp4& record, DeviceBytes* memory, ExpertSlot* slot) const;
  Result<void> RunPiece(const MoeCall& call, size_t first, size_t count, const Inputs& at);
  Result<void> Reserve(uint64_t bytes);

  const CudaHandles& cuda_;
  std::unique_ptr<CudaMoe> moe_;
  CUstream stream_ = nullptr;
  DeviceBytes refusals_;  // by layer
  DeviceBytes slots_;     // of all layers: their tables
  std::atomic<bool> enqueued_ = false;

  std::mutex call_mutex_;  // guards what follows: one call on host arrays at a time
  DeviceBytes scratch_;    // kept for the next one

  mutable std::mutex mutex_;   // guards what follows
  std::vector<Table> tables_;  // by layer
};

Result<void> CudaCompute::Open() {
  const CurrentContext current(*cuda_.driver, cuda_.context);
  HP_ASSIGN(moe_, CudaMoe::Load(*cuda_.driver, cuda_.context, cuda_.device));
  if (moe_ == nullptr)
    return Fail(Status::System("this build has no kernels of the experts for this GPU")
                    .Advice("build hotplane for its architecture, or boot with the device "
                            "\"cpu\""));
  HP_ASSIGN(stream_, NewCudaStream(*cuda_.driver));
  const uint64_t bytes = std::max<size_t>(tables_.size(), 1) * kRefusalStride;
  HP_TRY(refusals_.Allocate(cuda_, bytes, "refusals"));
  HP_TRY(Clear(refusals_.data(), bytes));
  Places places;
  for (Table& table : tables_) table.offset = places.Take(table.slots.size() * sizeof(ExpertSlot));
  HP_TRY(slots_.Allocate(cuda_, std::max(places.bytes(), kAlign), "the tables of experts"));
  return Clear(slots_.data(), slots_.bytes());
}

Result<void> CudaCompute::Upload(std::byte* to, const void* from, uint64_t bytes) const {
  if (bytes == 0) return {};
  HP_CUDA_TRY(
      *cuda_.driver, "cannot copy to the device",
      cuda_.driver->cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to), from, bytes, stream_));
  return {};
}

// On a stream of its own: copies that wait by themselves wait for the default stream too, and end
// what a caller captures.
Result<void> CudaCompute::Download(void* to, const std::byte* from, uint64_t bytes) const {
  HP_CUDA_TRY(
      *cuda_.driver, "cannot copy from the device",
      cuda_.driver->cuMemcpyDtoHAsync(to, reinterpret_cast<CUdeviceptr>(from), bytes, stream_));
  return {};
}

// And waits: what callers enqueue on their streams is not ordered after anything else.
Result<void> CudaCompute::Clear(std::byte* at, uint64_t bytes) const {
  const std::vector<std::byte> zeros(bytes);
  return Settle(Upload(at, zeros.data(), bytes));
}

Result<void> CudaCompute::Wait() const {
  HP_CUDA_TRY(*cuda_.driver, "the device failed while it computed experts",
              cuda_.driver->cuStreamSynchronize(stream_));
  return {};
}

Result<void> CudaCompute::Settle(Result<void> done) const {
  const Result<void> waited = Wait();
  if (!waited) (void)Wait();
  return done ? waited : done;
}

Result<void> CudaCompute::Forward(const MoeCall& call, std::span<const HostFp4> fp4) {
  if (call.token_count == 0) return {};
  const std::lock_guard lock(call_mutex_);
  const CurrentContext current(*cuda_.driver, cuda_.context);
  return Run(call, fp4);
}

Result<void> CudaCompute::Reserve(uint64_t bytes) {
  if (scratch_.bytes() >= bytes) return {};
  scratch_.Free();
  return scratch_.Allocate(cuda_, bytes, "activations");
}

Result<void> CudaCompute::UploadFp4(const HostFp4& record, DeviceBytes* memory,
                                    ExpertSlot* slot) const {
  const uint64_t fp2_at = RoundUp(record.fp13.size(), kAlign);
  HP_TRY(memory->Allocate(cuda_, fp2_at + record.fp2.size(), "FP4 of an expert"));
  HP_TRY(Upload(memory->data(), record.fp13.data(), record.fp13.size()));
  HP_TRY(Upload(memory->data() + fp2_at, record.fp2.data(), record.fp2.size()));
  slot->fp13 = Bytes(memory->data());
  slot->fp2 = Bytes(memory->data() + fp2_at);
  slot->fp_quintals = record.encoding == Encoding::kDeltaQuintal ? 1 : 0;
  return {};
}

void CudaCompute::Narrow(const MoeCall& call, std::span<const ExpertSlot> slots,
                         std::span<const uint8_t> wanted, Inputs* at) {
  uint8_t all = 0;  // as bits
  for (size_t i = 0; i < call.token_count * call.top_k; ++i) {
    const auto e = static_cast<size_t>(call.ids[i]);
    all |= static_cast<uint8_t>(1u << wanted[e]);
    const uint8_t from =
        wanted[e] == moe_cuda::kWantBase ? uint8_t{moe_cuda::kFromBase} : FromOf(slots[e]);
    at->tiers = static_cast<uint8_t>(at->tiers | from);
  }
  if (at->tiers == 0) at->tiers = moe_cuda::kFromAnything;
  for (const uint8_t one : {moe_cuda::kWantBase, moe_cuda::kWantFp4})
    if (all == 1u << one) at->wanted_of_all = one;
}

Result<void> CudaCompute::Run(const MoeCall& call, std::span<const HostFp4> fp4) {
  const size_t experts = call.experts.size();
  std::vector<ExpertSlot> slots(experts);
  std::vector<uint8_t> wanted(experts);
  for (size_t e = 0; e < experts; ++e) {
    slots[e] = SlotOf(call.experts[e]);
    wanted[e] =
        call.experts[e].precision == Precision::kFp4 ? moe_cuda::kWantFp4 : moe_cuda::kWantBase;
  }
  const auto top_k = static_cast<uint32_t>(call.top_k);
  // Of one of many: few take more.
  constexpr uint32_t kMany = 4096;
  const uint64_t token_bytes = CudaMoe::WorkspaceBytes(call.geometry, kMany, top_k) / kMany;
  const auto piece = static_cast<uint32_t>(
      std::clamp<uint64_t>(kPieceWorkspaceBytes / token_bytes, 1, call.token_count));
  Places places;
  Inputs at = {};
  at.slots = places.Take(experts * sizeof(ExpertSlot));
  at.wanted = places.Take(experts);
  at.refusal = places.Take(sizeof(Refusal));
  at.x = places.Take(uint64_t{piece} * call.geometry.hidden * sizeof(uint16_t));
  at.ids = places.Take(uint64_t{piece} * top_k * sizeof(int32_t));
  at.weights = places.Take(uint64_t{piece} * top_k * sizeof(float));
  at.y = places.Take(uint64_t{piece} * call.geometry.hidden * sizeof(uint16_t));
  at.workspace = places.Take(CudaMoe::WorkspaceBytes(call.geometry, piece, top_k));
  HP_TRY(Reserve(places.bytes()));
  std::vector<DeviceBytes> copies(fp4.size());
  return Settle([&]() -> Result<void> {
    for (size_t i = 0; i < fp4.size(); ++i)
      HP_TRY(UploadFp4(fp4[i], &copies[i], &slots[fp4[i].expert]));
    Narrow(call, slots, wanted, &at);
    HP_TRY(Upload(scratch_.data() + at.slots, slots.data(), experts * sizeof(ExpertSlot)));
    HP_TRY(Upload(scratch_.data() + at.wanted, wanted.data(), experts));
    for (size_t first = 0; first < call.token_count; first += piece)
      HP_TRY(RunPiece(call, first, std::min<size_t>(piece, call.token_count - first), at));
    return {};
  }());
}

Result<void> CudaCompute::RunPiece(const MoeCall& call, size_t first, size_t count,
                                   const Inputs& at) {
  const size_t hidden = call.geometry.hidden;
  std::vector<uint16_t> rounded(count * hidden);
  std::transform(call.x + first * hidden, call.x + (first + count) * hidden, rounded.begin(),
                 ToBf16);
  std::byte* const memory = scratch_.data();
  static constexpr std::byte kZeros[CudaMoe::kWorkspaceZeros] = {};
  Refusal refusal = {};
  HP_TRY(Settle([&]() -> Result<void> {
    HP_TRY(Upload(memory + at.x, rounded.data(), rounded.size() * sizeof(uint16_t)));
    HP_TRY(Upload(memory + at.ids, call.ids + first * call.top_k,
                  count * call.top_k * sizeof(int32_t)));
    HP_TRY(Upload(memory + at.weights, call.weights + first * call.top_k,
                  count * call.top_k * sizeof(float)));
    HP_TRY(Upload(memory + at.refusal, kZeros, sizeof(Refusal)));
    HP_TRY(Upload(memory + at.workspace, kZeros, sizeof kZeros));
    CudaMoeCall on_device;
    on_device.geometry = call.geometry;
    on_device.activation = call.activation;
    on_device.fp8 = call.arithmetic == Arithmetic::kFp8;
    on_device.token_count = static_cast<uint32_t>(count);
    on_device.top_k = static_cast<uint32_t>(call.top_k);
    on_device.slots = reinterpret_cast<const ExpertSlot*>(memory + at.slots);
    on_device.wanted = at.wanted_of_all == 0 ? Bytes(memory + at.wanted) : nullptr;
    on_device.wanted_of_all = at.wanted_of_all;
    on_device.tiers = at.tiers;
    on_device.x = reinterpret_cast<const uint16_t*>(memory + at.x);
    on_device.ids = reinterpret_cast<const int32_t*>(memory + at.ids);
    on_device.weights = Floats(memory + at.weights);
    on_device.y = reinterpret_cast<uint16_t*>(memory + at.y);
    on_device.workspace = memory + at.workspace;
    on_device.workspace_bytes = scratch_.bytes() - at.workspace;
    on_device.refusal = reinterpret_cast<Refusal*>(memory + at.refusal);
    HP_TRY(moe_->Forward(on_device, stream_));
    HP_TRY(Download(&refusal, memory + at.refusal, sizeof refusal));
    return Download(rounded.data(), memory + at.y, rounded.size() * sizeof(uint16_t));
  }()));
  HP_TRY(Told(refusal, call.layer, static_cast<uint32_t>(call.top_k)));
  std::transform(rounded.begin(), rounded.end(), call.y + first * hidden, FromBf16);
  return {};
}

Result<void> CudaCompute::Prepare(const BootedLayer& layer) {
  const std::lock_guard lock(mutex_);
  Table& table = tables_.at(layer.ordinal);
  if (!table.published && !layer.planes13.empty()) {
    for (size_t i = 0; i < layer.geometry.experts; ++i) {
      ExpertWeights expert;
      SetBase(layer, i, &expert);
      table.slots.at(layer.first_expert + i) = SlotOf(expert);
    }
    const CurrentContext current(*cuda_.driver, cuda_.context);
    HP_TRY(Settle(Upload(slots_.data() + table.offset, table.slots.data(),
                         table.slots.size() * sizeof(ExpertSlot))));
    table.published = true;
  }
  table.prepared = true;
  return {};
}

Result<void> CudaCompute::Enqueue(const BootedLayer& layer, uint32_t expert_count,
                                  const Activation& activation, const DeviceMoeRequest& request) {
  if (request.precision < DevicePrecision::kBase || request.precision > DevicePrecision::kFp4OrBase)
    return Fail(Status::Usage(Text("layer {}: no such precision", layer.ordinal))
                    .Expected("1 (base), 2 (FP4) or 3 (FP4 or base)")
                    .Found(Text("{}", static_cast<unsigned>(request.precision))));
  CudaMoeCall call;
  {
    const std::lock_guard lock(mutex_);
    const Table& table = tables_.at(layer.ordinal);
    if (!table.prepared)
      return Fail(Status::Usage(Text("layer {} is not prepared", layer.ordinal))
                      .Advice("ask for the bytes of its workspace first"));
    call.slots = reinterpret_cast<const ExpertSlot*>(slots_.data() + table.offset);
    call.tiers = TiersOf(request, table);
  }
  call.geometry = layer.geometry;
  call.geometry.experts = expert_count;
  call.activation = activation;
  call.fp8 = request.fp8;
  call.token_count = request.token_count;
  call.top_k = request.top_k;
  call.wanted = request.precisions;
  call.wanted_of_all = static_cast<uint8_t>(request.precision);
  call.x = request.x;
  call.ids = request.ids;
  call.weights = request.weights;
  call.y = request.y;
  call.workspace = request.workspace;
  call.workspace_bytes = request.workspace_bytes;
  call.refusal =
      reinterpret_cast<Refusal*>(refusals_.data() + uint64_t{layer.ordinal} * kRefusalStride);
  const CurrentContext current(*cuda_.driver, cuda_.context);
  enqueued_ = true;
  return moe_->Forward(call, static_cast<CUstream>(request.stream));
}

Result<void> CudaCompute::TakeRefusal(uint32_t layer) {
  const CurrentContext current(*cuda_.driver, cuda_.context);
  std::byte* const at = refusals_.data() + uint64_t{layer} * kRefusalStride;
  Refusal refusal = {};
  HP_TRY(Settle(Download(&refusal, at, sizeof refusal)));
  if (refusal.kind != 0) HP_TRY(Clear(at, sizeof refusal));
  return Told(refusal, layer, 0);
}

// Without the mutex where memory is allocated: that may wait for streams which wait for layers, and
// these are published with it.
Result<void> CudaCompute::LoadFp4(uint32_t layer, const HostFp4& record) {
  if (Resident(layer, record.expert).encoding != Encoding::kInvalid) return {};
  const CurrentContext current(*cuda_.driver, cuda_.context);
  DeviceBytes memory;
  ExpertSlot fp4 = {};
  HP_TRY(Settle(UploadFp4(record, &memory, &fp4)));
  const std::lock_guard lock(mutex_);
  Table& table = tables_.at(layer);
  HP_CHECK(table.published && record.expert < table.slots.size());
  // Somebody else was faster, and its memory may be read from already.
  if (table.fp4.count(record.expert) != 0) return {};
  ExpertSlot slot = table.slots[record.expert];
  slot.fp13 = fp4.fp13;
  slot.fp2 = fp4.fp2;
  slot.fp_quintals = fp4.fp_quintals;
  HP_TRY(Settle(
      Upload(slots_.data() + table.offset + record.expert * sizeof slot, &slot, sizeof slot)));
  table.slots[record.expert] = slot;
  table.fp4_from = static_cast<uint8_t>(table.fp4_from | FromOf(slot));
  table.fp4.emplace(record.expert, std::move(memory));
  return {};
}

ResidentFp4 CudaCompute::Resident(uint32_t layer, uint32_t expert) const {
  const std::lock_guard lock(mutex_);
  const Table& table = tables_.at(layer);
  if (table.fp4.count(expert) == 0) return {};
  const ExpertSlot& slot = table.slots[expert];
  return {slot.fp_quintals != 0 ? Encoding::kDeltaQuintal : Encoding::kDeltaNibble,
          reinterpret_cast<const std::byte*>(slot.fp13),
          reinterpret_cast<const std::byte*>(slot.fp2)};
}

}  // namespace

Result<std::unique_ptr<DeviceCompute>> NewDeviceCompute(Device& device,
                                                        std::span<const uint32_t> expert_counts) {
  auto compute = std::make_unique<CudaCompute>(device.cuda(), expert_counts);
  HP_TRY(compute->Open());
  return std::unique_ptr<DeviceCompute>(std::move(compute));
}

uint64_t DeviceWorkspaceBytes(const LayerGeometry& geometry, uint32_t tokens, uint32_t top_k) {
  return CudaMoe::WorkspaceBytes(geometry, tokens, top_k);
}

}  // namespace hotplane
