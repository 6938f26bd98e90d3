// The operator.
#include <cstring>
#include <numeric>

#include "capi/capi_state.h"

namespace hotplane::capi {
namespace {

static_assert(int{HOTPLANE_FAST} == static_cast<int>(Arithmetic::kFast));
static_assert(int{HOTPLANE_EXACT} == static_cast<int>(Arithmetic::kExact));
static_assert(int{HOTPLANE_FP8} == static_cast<int>(Arithmetic::kFp8));
static_assert(int{HOTPLANE_PRECISION_BASE} == static_cast<int>(Precision::kBase));
static_assert(int{HOTPLANE_PRECISION_FP4} == static_cast<int>(Precision::kFp4));

static_assert(int{HOTPLANE_PRECISION_FP4_OR_BASE} == static_cast<int>(DevicePrecision::kFp4OrBase));
static_assert(HOTPLANE_WORKSPACE_ZEROS == kDeviceWorkspaceZeros);

// The caller's fields. There is one version of each struct so far: its size must be that.
template <typename Call>
Result<Call> ReadCall(const Call* call, const char* name) {
  HP_TRY(Need(call != nullptr, "a call is needed"));
  if (call->struct_bytes != sizeof(Call))
    return Fail(
        Status::Usage(Text("{} has an unknown size", name))
            .Expected(Text("{} bytes", sizeof(Call)))
            .Found(Text("{} bytes", call->struct_bytes))
            .Advice(Text("fill it with {}_init; a newer caller needs a newer library", name)));
  return *call;
}

Result<void> CheckArithmetic(int arithmetic, const char* of) {
  if (arithmetic >= HOTPLANE_FAST && arithmetic <= HOTPLANE_FP8) return {};
  return Fail(Status::Usage(Text("{}.arithmetic has an unknown value", of))
                  .Expected(Text("{} to {}", int{HOTPLANE_FAST}, int{HOTPLANE_FP8}))
                  .Found(Text("{}", arithmetic)));
}

Result<MoeRequest> RequestOf(const Engine& engine, const hotplane_moe& call) {
  HP_TRY(CheckArithmetic(call.arithmetic, "hotplane_moe"));
  if (call.precision != HOTPLANE_PRECISION_BASE && call.precision != HOTPLANE_PRECISION_FP4)
    return Fail(Status::Usage("hotplane_moe.precision has an unknown value")
                    .Expected("base or FP4, where arrays are the host's")
                    .Found(Text("{}", call.precision)));
  MoeRequest request;
  request.layer = call.layer;
  request.arithmetic = static_cast<Arithmetic>(call.arithmetic);
  request.precision = static_cast<Precision>(call.precision);
  request.token_count = call.token_count;
  request.top_k = call.top_k;
  request.x = call.x;
  request.ids = call.ids;
  request.weights = call.weights;
  request.y = call.y;
  const std::vector<ManifestLayer>& layers = engine.generation().manifest().layers;
  if (call.precisions != nullptr && call.layer < layers.size())
    request.precisions = {call.precisions, layers[call.layer].geometry.experts};
  return request;
}

Result<DeviceMoeRequest> RequestOf(const hotplane_device_moe& call) {
  if (call.precision < HOTPLANE_PRECISION_BASE || call.precision > HOTPLANE_PRECISION_FP4_OR_BASE)
    return Fail(Status::Usage("hotplane_device_moe.precision has an unknown value")
                    .Found(Text("{}", call.precision)));
  HP_TRY(CheckArithmetic(call.arithmetic, "hotplane_device_moe"));
  DeviceMoeRequest request;
  request.layer = call.layer;
  request.fp8 = call.arithmetic == HOTPLANE_FP8;
  request.precision = static_cast<DevicePrecision>(call.precision);
  request.precisions = static_cast<const uint8_t*>(call.precisions);
  request.token_count = call.token_count;
  request.top_k = call.top_k;
  request.x = static_cast<const uint16_t*>(call.x);
  request.ids = static_cast<const int32_t*>(call.ids);
  request.weights = static_cast<const float*>(call.weights);
  request.y = static_cast<uint16_t*>(call.y);
  request.workspace = static_cast<std::byte*>(call.workspace);
  request.workspace_bytes = call.workspace_bytes;
  request.stream = call.stream;
  return request;
}

Result<void> LoadFp4(Engine& engine, uint32_t layer, const uint32_t* experts, size_t count) {
  if (experts != nullptr) return engine.LoadFp4OnDevice(layer, {experts, count});
  HP_TRY(Need(count == 0, "experts are needed"));
  HP_ASSIGN(const BootedLayer* const booted, engine.PublishedLayer(layer));
  std::vector<uint32_t> all(booted->geometry.experts);
  std::iota(all.begin(), all.end(), booted->first_expert);
  return engine.LoadFp4OnDevice(layer, all);
}

// Of a boot that was started: which layers it publishes is known a moment later.
void WaitPlan(EngineState& state) {
  {
    const std::lock_guard lock(state.mutex);
    if (state.phase != EngineState::Phase::kBooting) return;
  }
  state.engine->WaitPlan();
}

}  // namespace
}  // namespace hotplane::capi

extern "C" {

using hotplane::Result;
using hotplane::capi::Guarded;
using hotplane::capi::Need;

void hotplane_moe_init(hotplane_moe* call) {
  hotplane::capi::InitStruct(call);
  if (call == nullptr) return;
  call->arithmetic = HOTPLANE_FAST;
  call->precision = HOTPLANE_PRECISION_BASE;
}

hotplane_code hotplane_moe_forward(hotplane_engine* engine, const hotplane_moe* call) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(engine != nullptr, "an engine is needed"));
    HP_ASSIGN(const hotplane_moe full, hotplane::capi::ReadCall(call, "hotplane_moe"));
    hotplane::Engine& of = *engine->state->engine;
    HP_ASSIGN(const hotplane::MoeRequest request, hotplane::capi::RequestOf(of, full));
    return of.MoeForward(request);
  });
}

void hotplane_device_moe_init(hotplane_device_moe* call) {
  hotplane::capi::InitStruct(call);
  if (call == nullptr) return;
  call->arithmetic = HOTPLANE_FAST;
  call->precision = HOTPLANE_PRECISION_BASE;
}

hotplane_code hotplane_stream_wait_layer(hotplane_engine* engine, uint32_t layer, void* stream) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(engine != nullptr, "an engine is needed"));
    return engine->state->engine->StreamWaitLayer(layer, stream);
  });
}

hotplane_code hotplane_moe_workspace_bytes(hotplane_engine* engine, uint32_t layer,
                                           uint32_t token_count, uint32_t top_k, size_t* bytes) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(engine != nullptr, "an engine is needed"));
    HP_TRY(Need(bytes != nullptr, "a place for the bytes is needed"));
    hotplane::capi::EngineState& state = *engine->state;
    hotplane::capi::WaitPlan(state);
    HP_ASSIGN(*bytes, state.engine->MoeWorkspaceBytes(layer, token_count, top_k));
    return {};
  });
}

hotplane_code hotplane_moe_forward_on_device(hotplane_engine* engine,
                                             const hotplane_device_moe* call) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(engine != nullptr, "an engine is needed"));
    HP_ASSIGN(const hotplane_device_moe full,
              hotplane::capi::ReadCall(call, "hotplane_device_moe"));
    HP_ASSIGN(const hotplane::DeviceMoeRequest request, hotplane::capi::RequestOf(full));
    return engine->state->engine->MoeForwardOnDevice(request);
  });
}

hotplane_code hotplane_moe_refusal(hotplane_engine* engine, uint32_t layer) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(engine != nullptr, "an engine is needed"));
    return engine->state->engine->TakeMoeRefusal(layer);
  });
}

hotplane_code hotplane_moe_load_fp4(hotplane_engine* engine, uint32_t layer,
                                    const uint32_t* experts, size_t count) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(engine != nullptr, "an engine is needed"));
    return hotplane::capi::LoadFp4(*engine->state->engine, layer, experts, count);
  });
}

}  // extern "C"
