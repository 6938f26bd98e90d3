// The operator.
#include <cstring>

#include "capi/capi_state.h"

namespace hotplane::capi {
namespace {

static_assert(int{HOTPLANE_FAST} == static_cast<int>(Arithmetic::kFast));
static_assert(int{HOTPLANE_EXACT} == static_cast<int>(Arithmetic::kExact));
static_assert(int{HOTPLANE_PRECISION_BASE} == static_cast<int>(Precision::kBase));
static_assert(int{HOTPLANE_PRECISION_FP4} == static_cast<int>(Precision::kFp4));

// The caller's fields. There is one version of the struct so far: its size must be that.
Result<hotplane_moe> ReadCall(const hotplane_moe* call) {
  hotplane_moe full;
  hotplane_moe_init(&full);
  HP_TRY(Need(call != nullptr, "a call is needed"));
  if (call->struct_bytes != sizeof(full))
    return Fail(
        Status::Usage("hotplane_moe has an unknown size")
            .Expected(Text("{} bytes", sizeof(full)))
            .Found(Text("{} bytes", call->struct_bytes))
            .Advice("fill it with hotplane_moe_init; a newer caller needs a newer library"));
  std::memcpy(&full, call, sizeof(full));
  return full;
}

Result<MoeRequest> RequestOf(const Engine& engine, const hotplane_moe& call) {
  if (call.arithmetic != HOTPLANE_FAST && call.arithmetic != HOTPLANE_EXACT)
    return Fail(Status::Usage("hotplane_moe.arithmetic has an unknown value")
                    .Found(Text("{}", call.arithmetic)));
  if (call.precision != HOTPLANE_PRECISION_BASE && call.precision != HOTPLANE_PRECISION_FP4)
    return Fail(Status::Usage("hotplane_moe.precision has an unknown value")
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
    HP_ASSIGN(const hotplane_moe full, hotplane::capi::ReadCall(call));
    hotplane::Engine& of = *engine->state->engine;
    HP_ASSIGN(const hotplane::MoeRequest request, hotplane::capi::RequestOf(of, full));
    return of.MoeForward(request);
  });
}

}  // extern "C"
