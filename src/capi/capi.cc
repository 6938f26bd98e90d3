// Opening, booting and closing; errors and logs.
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/fault_guard.h"
#include "base/log.h"
#include "capi/api_words.h"
#include "capi/capi_state.h"

namespace hotplane::capi {
namespace {

thread_local std::optional<Status> tls_failure;
thread_local std::string tls_failure_text;
// Threads of a boot touch this one alone: it registers no destructor.
constinit thread_local const EngineState* tls_callback_of = nullptr;

hotplane_layer Describe(const BootedLayer& from) {
  hotplane_layer layer;
  hotplane_layer_init(&layer);
  const size_t experts = from.planes13.empty() ? 1 : from.geometry.experts;
  layer.ordinal = from.ordinal;
  layer.model_index = from.model_index;
  layer.experts = from.geometry.experts;
  layer.hidden = from.geometry.hidden;
  layer.intermediate = from.geometry.intermediate;
  layer.planes13 = from.planes13.data();
  layer.planes13_bytes = from.planes13.size();
  layer.sc13 = from.sc13.data();
  layer.sc13_bytes = from.sc13.size();
  layer.planes2 = from.planes2.data();
  layer.planes2_bytes = from.planes2.size();
  layer.sc2 = from.sc2.data();
  layer.sc2_bytes = from.sc2.size();
  layer.device = from.device;
  layer.bias13 = from.bias13.data();
  layer.bias13_bytes = from.bias13.size();
  layer.bias2 = from.bias2.data();
  layer.bias2_bytes = from.bias2.size();
  layer.planes13_stride = from.planes13.size() / experts;
  layer.sc13_stride = from.sc13.size() / experts;
  layer.planes2_stride = from.planes2.size() / experts;
  layer.sc2_stride = from.sc2.size() / experts;
  layer.sc13_offset = static_cast<size_t>(from.sc13.data() - from.planes13.data());
  layer.planes2_offset = static_cast<size_t>(from.planes2.data() - from.planes13.data());
  layer.sc2_offset = static_cast<size_t>(from.sc2.data() - from.planes13.data());
  return layer;
}

// Options as the caller's version of the header has them; what it does not know keeps its default.
// A size between versions would cut a pointer in two.
Result<hotplane_boot_options> ReadOptions(const hotplane_boot_options* options) {
  constexpr size_t kVersionBytes[] = {offsetof(hotplane_boot_options, delta_cache_bytes),
                                      offsetof(hotplane_boot_options, checkpoint),
                                      offsetof(hotplane_boot_options, device),
                                      sizeof(hotplane_boot_options)};
  hotplane_boot_options full;
  hotplane_boot_options_init(&full);
  if (options == nullptr) return full;
  for (const size_t bytes : kVersionBytes) {
    if (options->struct_bytes != bytes) continue;
    std::memcpy(static_cast<void*>(&full), options, bytes);
    return full;
  }
  return Fail(Status::Usage("hotplane_boot_options has an unknown size")
                  .Expected(Text("{}, {}, {} or {} bytes", kVersionBytes[0], kVersionBytes[1],
                                 kVersionBytes[2], kVersionBytes[3]))
                  .Found(Text("{} bytes", options->struct_bytes))
                  .Advice("fill it with hotplane_boot_options_init; a newer caller needs "
                          "a newer library"));
}

std::string OrEmpty(const char* text) { return text == nullptr ? "" : text; }

// An enumerator that this version does not know must not pass for the default.
Status UnknownValue(const char* field, int value) {
  return Status::Usage(Text("hotplane_boot_options.{} has an unknown value", field))
      .Found(Text("{}", value));
}

Result<std::vector<Encoding>> DeltaEncodings(int value) {
  switch (value) {
    case 0: return std::vector{Encoding::kDeltaQuintal, Encoding::kDeltaNibble};
    case HOTPLANE_QUINTALS: return std::vector{Encoding::kDeltaQuintal};
    case HOTPLANE_NIBBLES: return std::vector{Encoding::kDeltaNibble};
    default: return Fail(UnknownValue("delta_encoding", value));
  }
}

Result<Residency> BaseResidency(int value) {
  switch (value) {
    case HOTPLANE_RESIDENCY_AUTO: return Residency::kAuto;
    case HOTPLANE_RESIDENCY_DEVICE: return Residency::kDevice;
    case HOTPLANE_RESIDENCY_HOST: return Residency::kHost;
    default: return Fail(UnknownValue("base_residency", value));
  }
}

Result<CacheMode> ReadCacheMode(int value) {
  switch (value) {
    case HOTPLANE_CACHE_AUTO: return CacheMode::kAuto;
    case HOTPLANE_CACHE_KEEP: return CacheMode::kKeep;
    case HOTPLANE_CACHE_BYPASS: return CacheMode::kBypass;
    default: return Fail(UnknownValue("cache", value));
  }
}

Result<void> SetBuildOptions(const hotplane_boot_options& options, EngineOptions* engine) {
  engine->checkpoint = OrEmpty(options.checkpoint);
  engine->no_build = options.no_build != 0;
  if (engine->no_build && !engine->checkpoint.empty())
    return Fail(Status::Usage("a checkpoint is given and building is refused")
                    .Advice("set one of checkpoint and no_build"));
  engine->delta = options.want_delta != 0;
  const bool delta_named = options.pin_delta_bytes != 0 || options.delta_layers != nullptr ||
                           options.no_delta_layers != nullptr;
  if (delta_named && !engine->delta)
    return Fail(Status::Usage("options of the delta tier are given, and it is not wanted")
                    .Advice("set want_delta"));
  engine->delta_layers = OrEmpty(options.delta_layers);
  engine->no_delta_layers = OrEmpty(options.no_delta_layers);
  HP_ASSIGN(engine->delta_encodings, DeltaEncodings(options.delta_encoding));
  if (options.batch != 0) engine->build.batch_size = options.batch;
  engine->build.worker_count = options.workers;
  engine->build.staging_limit_bytes = options.staging_limit_bytes;
  engine->pin_delta_bytes = options.pin_delta_bytes;
  return {};
}

Result<void> SetDestination(const hotplane_boot_options& options, EngineOptions* engine) {
  if (options.expert_count == 0 && options.first_expert != 0)
    return Fail(Status::Usage("hotplane_boot_options.first_expert is set and expert_count is not"));
  if (options.expert_count != 0) {
    if (options.expert_count > UINT32_MAX - options.first_expert)
      return Fail(Status::Usage("the range of experts overflows")
                      .Found(Text("{} from {} on", options.expert_count, options.first_expert)));
    engine->experts =
        ExpertRange{options.first_expert, options.first_expert + options.expert_count};
  }
  HP_ASSIGN(engine->base_residency, BaseResidency(options.base_residency));
  HP_ASSIGN(engine->boot.cache, ReadCacheMode(options.cache));
  engine->boot.memory_limit_bytes = options.memory_bytes;
  engine->reserve_bytes = options.reserve_bytes;
  return {};
}

Result<std::shared_ptr<EngineState>> Open(const char* store, const hotplane_boot_options* given) {
  HP_ASSIGN(const hotplane_boot_options options, ReadOptions(given));
  auto state = std::make_shared<EngineState>();
  state->on_layer = options.on_layer;
  state->user = options.user;
  EngineOptions engine;
  if (const char* const isa = std::getenv("HOTPLANE_ISA"); isa != nullptr) engine.isa = isa;
  engine.store_directory = store;
  engine.generation_prefix = OrEmpty(options.generation);
  engine.boot.layers = OrEmpty(options.layers);
  HP_TRY(SetBuildOptions(options, &engine));
  HP_TRY(SetDestination(options, &engine));
  engine.worker_count = options.workers;
  if (options.device != nullptr) {
    HP_ASSIGN(engine.device, ParseDeviceName(options.device));
  }
  if (options.rank < -1)
    return Fail(Status::Usage("there is no such rank")
                    .Expected("0 or more, or -1 for the environment's")
                    .Found(Text("{}", options.rank)));
  if (options.rank >= 0) engine.shard.rank = static_cast<uint32_t>(options.rank);
  if (options.world != 0) engine.shard.world = options.world;
  engine.shard.launched = LaunchedRanks();
  engine.boot.map = options.map != 0;
  engine.boot.verify = options.verify != 0;
  engine.boot.cancel = &state->cancel;
  engine.records.delta_cache_bytes = options.delta_cache_bytes;
  engine.records.fp4_cache_bytes = options.full_cache_bytes;
  engine.records.base_cache_bytes = options.base_cache_bytes;
  InstallFaultGuard();
  HP_ASSIGN(state->engine, Engine::Open(PosixEnv(), engine));
  state->generation_text = ToHex(state->engine->generation().id());
  return state;
}

// REQUIRES state.mutex. The index-th layer, or why there is none.
Result<void> FillLayer(const EngineState& state, uint32_t index, hotplane_layer* layer) {
  if (index >= state.layers.size())
    return Fail(Status::Usage(Text("there is no booted layer {}", index))
                    .Expected(Text("below {}", state.layers.size())));
  return FillStruct(state.layers[index], offsetof(hotplane_layer, planes13_stride), layer);
}

// REQUIRES `lock` of state.mutex. Until `index` layers are published or the boot has ended.
Result<void> WaitFor(EngineState& state, std::unique_lock<std::mutex>& lock, size_t index) {
  using Phase = EngineState::Phase;
  if (state.phase == Phase::kIdle)
    return Fail(Status::Usage("no boot was started").Advice("call hotplane_start first"));
  if (state.CalledByItsOwnCallback())
    return Fail(Status::Usage("a boot's on_layer callback cannot wait for that boot"));
  state.changed.wait(lock,
                     [&] { return state.phase == Phase::kEnded || state.layers.size() > index; });
  if (state.layers.size() > index || !state.failure) return {};
  return Fail(*state.failure);
}

}  // namespace

hotplane_code Failed(const Status& status) {
  tls_failure = InApiWords(status);
  tls_failure_text = tls_failure->ToString();
  return static_cast<hotplane_code>(status.exit_code());
}

bool EngineState::CalledByItsOwnCallback() const { return tls_callback_of == this; }

void EngineState::RunBoot() {
  Result<void> booted;
  std::string report;
  try {
    booted = engine->Boot([this](const BootedLayer& booted_layer) {
      const hotplane_layer layer = Describe(booted_layer);
      {
        std::lock_guard lock(mutex);
        layers.push_back(layer);
      }
      changed.notify_all();
      if (on_layer == nullptr) return;
      const EngineState* const outer = std::exchange(tls_callback_of, this);
      on_layer(user, &layer);
      tls_callback_of = outer;
    });
    if (booted) report = engine->ReportJson();
  } catch (const std::bad_alloc&) {
    booted = Fail(Status::Capacity("out of memory"));
  } catch (...) {
    booted = Fail(Status::System("an unexpected exception was stopped at the C API"));
  }
  {
    std::lock_guard lock(mutex);
    phase = Phase::kEnded;
    if (booted) {
      stats_json = std::move(report);
    } else {
      failure = booted.error();
    }
  }
  changed.notify_all();
}

}  // namespace hotplane::capi

using hotplane::Fail;
using hotplane::Result;
using hotplane::Status;
using hotplane::capi::EngineState;
using hotplane::capi::Failed;
using hotplane::capi::FillStruct;
using hotplane::capi::Guarded;
using hotplane::capi::InitStruct;
using hotplane::capi::Need;

extern "C" {

const char* hotplane_version(void) { return HOTPLANE_VERSION_TEXT; }

const char* hotplane_last_error(void) { return hotplane::capi::tls_failure_text.c_str(); }

void hotplane_error_init(hotplane_error* error) { InitStruct(error); }

hotplane_code hotplane_get_last_error(hotplane_error* error) {
  hotplane_error full = {};
  full.what = full.file = full.expected = full.found = full.advice = "";
  const std::optional<Status>& failure = hotplane::capi::tls_failure;
  if (failure) {
    full.code = static_cast<hotplane_code>(failure->exit_code());
    full.error_number = failure->error_number();
    full.has_offset = failure->offset() ? 1 : 0;
    full.offset = failure->offset().value_or(0);
    full.what = failure->what().c_str();
    full.file = failure->file().c_str();
    full.expected = failure->expected().c_str();
    full.found = failure->found().c_str();
    full.advice = failure->advice().c_str();
  }
  return Guarded([&] { return FillStruct(full, sizeof(full), error); });
}

void hotplane_set_log(hotplane_log_callback callback, void* user) {
  if (callback == nullptr) {
    hotplane::SetLogSink({});
    return;
  }
  hotplane::SetLogSink([callback, user](hotplane::LogLevel level, std::string_view line) {
    callback(user, static_cast<hotplane_log_level>(level),
             hotplane::capi::InApiWords(line).c_str());
  });
}

void hotplane_layer_init(hotplane_layer* layer) { InitStruct(layer); }

void hotplane_boot_options_init(hotplane_boot_options* options) {
  if (options == nullptr) return;
  InitStruct(options);
  options->verify = 1;
  options->rank = -1;
}

hotplane_code hotplane_open(const char* store, const hotplane_boot_options* options,
                            hotplane_engine** engine) {
  if (engine != nullptr) *engine = nullptr;
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(engine != nullptr && store != nullptr,
                "a store and a place for the engine are needed"));
    auto out = std::make_unique<hotplane_engine>();
    HP_ASSIGN(out->state, hotplane::capi::Open(store, options));
    *engine = out.release();
    return {};
  });
}

hotplane_code hotplane_plan_json(hotplane_engine* engine, const char** json) {
  if (json != nullptr) *json = "{}";
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(engine != nullptr && json != nullptr,
                "an engine and a place for the plan are needed"));
    EngineState& state = *engine->state;
    std::lock_guard lock(state.mutex);
    if (state.plan_json.empty()) {
      if (state.phase != EngineState::Phase::kIdle)
        return Fail(Status::Usage("this engine was booted without asking for its plan")
                        .Advice("call hotplane_plan_json before hotplane_start"));
      HP_TRY(state.engine->Plan());
      state.plan_json = state.engine->PlanJson();
    }
    *json = state.plan_json.c_str();
    return {};
  });
}

hotplane_code hotplane_start(hotplane_engine* engine) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(engine != nullptr, "an engine is needed"));
    // Held: a callback may close the engine before this call returns.
    const std::shared_ptr<EngineState> state = engine->state;
    std::lock_guard lock(state->mutex);
    if (state->phase != EngineState::Phase::kIdle)
      return Fail(Status::Usage("this engine was booted already")
                      .Advice("open another engine to boot again"));
    engine->boot = std::thread([state] { state->RunBoot(); });
    state->phase = EngineState::Phase::kBooting;
    return {};
  });
}

hotplane_code hotplane_wait(hotplane_engine* engine) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(engine != nullptr, "an engine is needed"));
    std::unique_lock lock(engine->state->mutex);
    return hotplane::capi::WaitFor(*engine->state, lock, SIZE_MAX);
  });
}

hotplane_code hotplane_wait_layer(hotplane_engine* engine, uint32_t index, hotplane_layer* layer) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(engine != nullptr && layer != nullptr, "an engine and a layer are needed"));
    std::unique_lock lock(engine->state->mutex);
    HP_TRY(hotplane::capi::WaitFor(*engine->state, lock, index));
    return hotplane::capi::FillLayer(*engine->state, index, layer);
  });
}

hotplane_code hotplane_boot(const char* store, const hotplane_boot_options* options,
                            hotplane_engine** engine) {
  const hotplane_code opened = hotplane_open(store, options, engine);
  if (opened != HOTPLANE_OK) return opened;
  EngineState& state = *(*engine)->state;
  {
    std::lock_guard lock(state.mutex);
    state.phase = EngineState::Phase::kBooting;
  }
  state.RunBoot();
  const hotplane_code booted = hotplane_wait(*engine);
  if (booted == HOTPLANE_OK) return booted;
  hotplane_close(*engine);
  *engine = nullptr;
  return booted;
}

uint32_t hotplane_layer_count(const hotplane_engine* engine) {
  if (engine == nullptr) return 0;
  std::lock_guard lock(engine->state->mutex);
  return static_cast<uint32_t>(engine->state->layers.size());
}

hotplane_code hotplane_get_layer(const hotplane_engine* engine, uint32_t index,
                                 hotplane_layer* layer) {
  return Guarded([&]() -> Result<void> {
    HP_TRY(Need(engine != nullptr && layer != nullptr, "an engine and a layer are needed"));
    std::lock_guard lock(engine->state->mutex);
    return hotplane::capi::FillLayer(*engine->state, index, layer);
  });
}

const char* hotplane_stats_json(const hotplane_engine* engine) {
  if (engine == nullptr) return "{}";
  std::lock_guard lock(engine->state->mutex);
  const bool booted = engine->state->phase == EngineState::Phase::kEnded;
  return booted ? engine->state->stats_json.c_str() : "{}";
}

void hotplane_cancel(hotplane_engine* engine) {
  if (engine != nullptr) engine->state->cancel.Cancel(SIGINT);
}

void hotplane_close(hotplane_engine* engine) {
  if (engine == nullptr) return;
  engine->state->cancel.Cancel(SIGTERM);
  if (engine->boot.joinable()) {
    // The boot's own callback cannot wait for it: what is left is freed by the boot's thread.
    if (engine->state->CalledByItsOwnCallback()) {
      engine->boot.detach();
    } else {
      engine->boot.join();
    }
  }
  delete engine;
}

void hotplane_close_at(hotplane_engine** engine) {
  if (engine != nullptr) hotplane_close(std::atomic_ref(*engine).exchange(nullptr));
}

}  // extern "C"
