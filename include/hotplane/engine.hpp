// hotplane's C++ API: owners and results over the C API of hotplane.h, header-only, C++17.
//
//   auto engine = hotplane::api::Engine::Boot("/store");
//   if (!engine) { std::fprintf(stderr, "%s\n", engine.error().text.c_str()); return
//   engine.error().code; } for (const hotplane_layer& layer : engine->Layers()) Use(layer.planes13,
//   layer.planes13_bytes);
#pragma once

#include <hotplane/hotplane.h>

#include <functional>
#include <optional>
#include <string>
#include <tl/expected.hpp>
#include <utility>
#include <vector>

namespace hotplane::api {

struct Error {
  hotplane_code code = HOTPLANE_SYSTEM;
  std::string text;  // as hotplane_last_error()
};

template <typename T>
using Result = tl::expected<T, Error>;

struct BootOptions {
  std::string generation;  // prefix; empty: the only one there is
  std::string layers;      // "3-9", "main", "mtp"; empty: all
  bool map = false;        // serve from the page cache instead of landing in own memory
  bool verify = true;      // every byte
  uint32_t workers = 0;    // 0: the CPUs this process may use
  // Called for each layer in order, from a worker thread, the moment its bytes are verified. Must
  // not throw.
  std::function<void(const hotplane_layer&)> on_layer;
};

// A booted store. Move-only; pointers of its layers are valid while it lives.
class Engine {
 public:
  static Result<Engine> Boot(const std::string& store, BootOptions options = {}) {
    hotplane_boot_options c_options;
    hotplane_boot_options_init(&c_options);
    if (!options.generation.empty()) c_options.generation = options.generation.c_str();
    if (!options.layers.empty()) c_options.layers = options.layers.c_str();
    c_options.map = options.map ? 1 : 0;
    c_options.verify = options.verify ? 1 : 0;
    c_options.workers = options.workers;
    if (options.on_layer) {
      c_options.user = &options.on_layer;
      c_options.on_layer = [](void* user, const hotplane_layer* layer) {
        (*static_cast<std::function<void(const hotplane_layer&)>*>(user))(*layer);
      };
    }
    Engine engine;
    const hotplane_code code = hotplane_boot(store.c_str(), &c_options, &engine.handle_);
    if (code != HOTPLANE_OK) return tl::unexpected<Error>(Error{code, hotplane_last_error()});
    return engine;
  }

  Engine(Engine&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Engine& operator=(Engine&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Engine() { hotplane_close(handle_); }

  std::vector<hotplane_layer> Layers() const {
    std::vector<hotplane_layer> layers(hotplane_layer_count(handle_));
    for (uint32_t i = 0; i < layers.size(); ++i) {
      hotplane_layer_init(&layers[i]);
      (void)hotplane_get_layer(handle_, i, &layers[i]);
    }
    return layers;
  }
  // One JSON object with the keys of `hotplane boot --json`.
  std::string StatsJson() const { return hotplane_stats_json(handle_); }
  hotplane_engine* handle() const { return handle_; }

 private:
  Engine() = default;
  hotplane_engine* handle_ = nullptr;
};

}  // namespace hotplane::api
