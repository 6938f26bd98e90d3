// The C API over the engine. No exception and no C++ type crosses it.
#include <hotplane/hotplane.h>

#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "base/log.h"
#include "engine/engine.h"

struct hotplane_engine {
  std::unique_ptr<hotplane::Engine> engine;
  std::string stats_json;
};

namespace {

using hotplane::BootedLayer;
using hotplane::Engine;
using hotplane::EngineOptions;
using hotplane::Result;
using hotplane::Status;

thread_local std::string tls_last_error;

hotplane_code Failed(const Status& status) {
  tls_last_error = status.ToString();
  return static_cast<hotplane_code>(status.exit_code());
}

// Nothing here throws but allocation; out of memory is an answer too.
template <typename Body>
hotplane_code Guarded(const Body& body) {
  try {
    const Result<void> result = body();
    return result ? HOTPLANE_OK : Failed(result.error());
  } catch (const std::bad_alloc&) {
    return Failed(Status::Capacity("out of memory"));
  } catch (...) {
    return Failed(Status::System("an unexpected exception was stopped at the C API"));
  }
}

// The caller's struct may be older than ours: only the bytes it knows are written.
void Fill(const BootedLayer& from, hotplane_layer* to) {
  hotplane_layer full = {};
  full.struct_bytes = to->struct_bytes;
  full.ordinal = from.ordinal;
  full.model_index = from.model_index;
  full.experts = from.geometry.experts;
  full.hidden = from.geometry.hidden;
  full.intermediate = from.geometry.intermediate;
  full.planes13 = from.planes13.data();
  full.planes13_bytes = from.planes13.size();
  full.sc13 = from.sc13.data();
  full.sc13_bytes = from.sc13.size();
  full.planes2 = from.planes2.data();
  full.planes2_bytes = from.planes2.size();
  full.sc2 = from.sc2.data();
  full.sc2_bytes = from.sc2.size();
  std::memcpy(to, &full, std::min(to->struct_bytes, sizeof(full)));
}

// Options of a caller compiled against another version: what it does not know keeps its default.
Result<hotplane_boot_options> ReadOptions(const hotplane_boot_options* options) {
  hotplane_boot_options full;
  hotplane_boot_options_init(&full);
  if (options == nullptr) return full;
  if (options->struct_bytes < sizeof(size_t) || options->struct_bytes > sizeof(full))
    return hotplane::Fail(
        Status::Usage("hotplane_boot_options has an unknown size")
            .Expected(hotplane::Text("up to {} bytes", sizeof(full)))
            .Found(hotplane::Text("{} bytes", options->struct_bytes))
            .Advice("fill it with hotplane_boot_options_init; a newer caller needs "
                    "a newer library"));
  std::memcpy(&full, options, options->struct_bytes);
  return full;
}

Result<std::unique_ptr<Engine>> Boot(const char* store, const hotplane_boot_options& options) {
  EngineOptions engine_options;
  engine_options.store_directory = store;
  if (options.generation != nullptr) engine_options.generation_prefix = options.generation;
  if (options.layers != nullptr) engine_options.boot.layers = options.layers;
  engine_options.worker_count = options.workers;
  engine_options.boot.map = options.map != 0;
  engine_options.boot.verify = options.verify != 0;
  HP_ASSIGN(std::unique_ptr<Engine> engine, Engine::Open(hotplane::PosixEnv(), engine_options));
  HP_TRY(engine->Boot([&options](const BootedLayer& layer) {
    if (options.on_layer == nullptr) return;
    hotplane_layer out;
    hotplane_layer_init(&out);
    Fill(layer, &out);
    options.on_layer(options.user, &out);
  }));
  return engine;
}

}  // namespace

extern "C" {

const char* hotplane_version(void) { return HOTPLANE_VERSION_TEXT; }

const char* hotplane_last_error(void) { return tls_last_error.c_str(); }

void hotplane_set_log(hotplane_log_callback callback, void* user) {
  if (callback == nullptr) {
    hotplane::SetLogSink({});
    return;
  }
  hotplane::SetLogSink([callback, user](hotplane::LogLevel level, std::string_view line) {
    callback(user, static_cast<hotplane_log_level>(level), std::string(line).c_str());
  });
}

void hotplane_layer_init(hotplane_layer* layer) {
  *layer = {};
  layer->struct_bytes = sizeof(*layer);
}

void hotplane_boot_options_init(hotplane_boot_options* options) {
  *options = {};
  options->struct_bytes = sizeof(*options);
  options->verify = 1;
}

hotplane_code hotplane_boot(const char* store, const hotplane_boot_options* options,
                            hotplane_engine** engine) {
  if (engine == nullptr || store == nullptr)
    return Failed(Status::Usage("hotplane_boot needs a store and a place for the engine"));
  *engine = nullptr;
  return Guarded([&]() -> Result<void> {
    HP_ASSIGN(const hotplane_boot_options full, ReadOptions(options));
    auto out = std::make_unique<hotplane_engine>();
    HP_ASSIGN(out->engine, Boot(store, full));
    out->stats_json = out->engine->ReportJson();
    *engine = out.release();
    return {};
  });
}

uint32_t hotplane_layer_count(const hotplane_engine* engine) {
  return engine == nullptr ? 0 : static_cast<uint32_t>(engine->engine->layers().size());
}

hotplane_code hotplane_get_layer(const hotplane_engine* engine, uint32_t index,
                                 hotplane_layer* layer) {
  return Guarded([&]() -> Result<void> {
    if (engine == nullptr || layer == nullptr || layer->struct_bytes < sizeof(size_t))
      return hotplane::Fail(
          Status::Usage("hotplane_get_layer needs an engine and a layer filled "
                        "by hotplane_layer_init"));
    if (index >= engine->engine->layers().size())
      return hotplane::Fail(
          Status::Usage(hotplane::Text("there is no booted layer {}", index))
              .Expected(hotplane::Text("below {}", engine->engine->layers().size())));
    Fill(engine->engine->layers()[index], layer);
    return {};
  });
}

const char* hotplane_stats_json(const hotplane_engine* engine) {
  return engine == nullptr ? "{}" : engine->stats_json.c_str();
}

void hotplane_close(hotplane_engine* engine) { delete engine; }

}  // extern "C"
