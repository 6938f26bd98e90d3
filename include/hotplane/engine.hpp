// hotplane's C++ API: owners and results over the C API of hotplane.h, header-only, C++17. What a
// call does, its units, errors and threads are told there.
//
//   auto engine = hotplane::api::Engine::Boot("/store");
//   if (!engine) return Report(engine.error());
//   for (const hotplane_layer& layer : engine->Layers()) Use(layer.planes13);
#pragma once

#include <hotplane/hotplane.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <tl/expected.hpp>
#include <type_traits>
#include <utility>
#include <vector>

namespace hotplane::api {

struct Error {
  hotplane_code code = HOTPLANE_SYSTEM;
  std::string text;  // as hotplane_last_error()
  std::string what, file, expected, found, advice;
  uint64_t offset = 0;  // in `file`; 0 where none is told

  // The last failure of this thread.
  static Error Last() {
    hotplane_error last;
    hotplane_error_init(&last);
    (void)hotplane_get_last_error(&last);
    return {last.code,  hotplane_last_error(), last.what,  last.file, last.expected,
            last.found, last.advice,           last.offset};
  }
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
  // Memory for records that are kept, by kind: HOTPLANE_DELTA, HOTPLANE_FULL, HOTPLANE_BASE.
  uint64_t delta_cache_bytes = 0;
  uint64_t full_cache_bytes = 0;
  uint64_t base_cache_bytes = 0;

  std::string checkpoint;  // what may be built from; empty: none, missing layers end the boot
  bool no_build = false;
  bool want_delta = false;      // the delta tier is wanted: built where it is absent
  std::string delta_layers;     // of which layers; empty: of all that are booted
  std::string no_delta_layers;  // of them, those that go without
  int delta_encoding = 0;       // HOTPLANE_QUINTALS, HOTPLANE_NIBBLES; 0: either
  uint32_t batch = 0;           // layers that begin to be built together; 0: 12
  uint64_t staging_limit_bytes = 0;
  uint64_t pin_delta_bytes = 0;  // of delta records that the boot reads into their cache
  uint32_t first_expert = 0;     // of each layer
  uint32_t expert_count = 0;     // 0: all
  int base_residency = HOTPLANE_RESIDENCY_AUTO;
  uint64_t memory_bytes = 0;   // of the device, to use; 0: what is available
  uint64_t reserve_bytes = 0;  // of it, how much stays free
  int cache = HOTPLANE_CACHE_AUTO;
  int32_t rank = -1;   // of a sharded store; -1: the launcher's, see hotplane_boot_options
  uint32_t world = 0;  // number of ranks; 0: the store's
  std::string device;  // "cpu", "cuda" or "cuda:N": where the base lands; empty: "cpu"
};

// A pinned record: its bytes stay where and what they are while it lives. Move-only.
class Record {
 public:
  Record(Record&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Record& operator=(Record&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Record() { hotplane_record_release(handle_); }

  hotplane_record_view View() const {
    hotplane_record_view view;
    hotplane_record_view_init(&view);
    (void)hotplane_record_look(handle_, &view);
    return view;
  }

 private:
  friend class Engine;
  explicit Record(hotplane_record* handle) : handle_(handle) {}
  hotplane_record* handle_;
};

// An open store, booted or not. Move-only; pointers of its layers are valid while it lives.
class Engine {
 public:
  // Opens the store; boots nothing yet.
  static Result<Engine> Open(const std::string& store, BootOptions options = {}) {
    return Make(&hotplane_open, store, std::move(options));
  }
  // Opens and boots it.
  static Result<Engine> Boot(const std::string& store, BootOptions options = {}) {
    return Make(&hotplane_boot, store, std::move(options));
  }

  Engine(Engine&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)), on_layer_(std::move(other.on_layer_)) {}
  Engine& operator=(Engine&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(on_layer_, other.on_layer_);
    return *this;
  }
  ~Engine() { hotplane_close(handle_); }

  // What a boot would do, and why: the JSON of `hotplane boot --dry-run --json`. Before Start.
  Result<std::string> PlanJson() const {
    const char* json = nullptr;
    const hotplane_code code = hotplane_plan_json(handle_, &json);
    return Ended(code, std::string(json));
  }
  // Boots an opened store in the background.
  Result<void> Start() { return Ended(hotplane_start(handle_)); }
  Result<void> Wait() { return Ended(hotplane_wait(handle_)); }
  Result<hotplane_layer> WaitLayer(uint32_t index) {
    hotplane_layer layer;
    hotplane_layer_init(&layer);
    return Ended(hotplane_wait_layer(handle_, index, &layer), layer);
  }
  // The layers published so far.
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

  Result<hotplane_store> Describe() const {
    hotplane_store store;
    hotplane_store_init(&store);
    return Ended(hotplane_describe(handle_, &store), store);
  }
  // Every layer of the model, by ordinal.
  Result<std::vector<hotplane_layer_info>> DescribeLayers() const {
    const Result<hotplane_store> store = Describe();
    if (!store) return tl::unexpected<Error>(store.error());
    std::vector<hotplane_layer_info> layers(store->layer_count);
    for (uint32_t i = 0; i < layers.size(); ++i) {
      hotplane_layer_info_init(&layers[i]);
      const hotplane_code code = hotplane_describe_layer(handle_, i, &layers[i]);
      if (code != HOTPLANE_OK) return tl::unexpected<Error>(Error::Last());
    }
    return layers;
  }

  Result<size_t> RecordBytes(hotplane_kind kind, uint32_t layer) const {
    size_t bytes = 0;
    const hotplane_code code = hotplane_record_bytes(handle_, kind, layer, &bytes);
    return Ended(code, bytes);
  }
  Result<std::vector<std::byte>> ReadRecord(hotplane_kind kind, uint32_t layer,
                                            uint32_t expert) const {
    const Result<size_t> bytes = RecordBytes(kind, layer);
    if (!bytes) return tl::unexpected<Error>(bytes.error());
    std::vector<std::byte> record(*bytes);
    const hotplane_code code =
        hotplane_read_record(handle_, kind, layer, expert, record.data(), record.size());
    return Ended(code, std::move(record));
  }
  // Several experts of one layer, in parallel; each destination has RecordBytes.
  Result<void> ReadRecords(hotplane_kind kind, uint32_t layer, const std::vector<uint32_t>& experts,
                           const std::vector<void*>& destinations) const {
    if (destinations.size() != experts.size())
      return tl::unexpected<Error>(
          Error{HOTPLANE_USAGE, "as many destinations as experts are needed", {}, {}, {}, {}, {}});
    const Result<size_t> bytes = RecordBytes(kind, layer);
    if (!bytes) return tl::unexpected<Error>(bytes.error());
    return Ended(hotplane_read_records(handle_, kind, layer, experts.data(), destinations.data(),
                                       experts.size(), *bytes));
  }
  // Through the cache of this kind; `bulk`: a pass over many records, which replaces nothing.
  Result<Record> GetRecord(hotplane_kind kind, uint32_t layer, uint32_t expert,
                           bool bulk = false) const {
    hotplane_record* record = nullptr;
    const hotplane_code code =
        hotplane_record_get(handle_, kind, layer, expert, bulk ? 1 : 0, &record);
    if (code != HOTPLANE_OK) return tl::unexpected<Error>(Error::Last());
    return Record(record);
  }
  // How many of `experts` are in the cache then.
  Result<size_t> Prefetch(hotplane_kind kind, uint32_t layer,
                          const std::vector<uint32_t>& experts) const {
    size_t cached = 0;
    const hotplane_code code =
        hotplane_prefetch(handle_, kind, layer, experts.data(), experts.size(), &cached);
    return Ended(code, cached);
  }
  hotplane_cache_stats CacheStats(hotplane_kind kind) const {
    hotplane_cache_stats stats;
    hotplane_cache_stats_init(&stats);
    (void)hotplane_get_cache_stats(handle_, kind, &stats);
    return stats;
  }

  // `call` as hotplane_moe_init and the caller fill it.
  Result<void> MoeForward(const hotplane_moe& call) const {
    return Ended(hotplane_moe_forward(handle_, &call));
  }

  // What is enqueued on the CUDA stream afterwards runs once the layer, an ordinal, is published;
  // the host does not wait.
  Result<void> StreamWaitLayer(uint32_t layer, void* stream) const {
    return Ended(hotplane_stream_wait_layer(handle_, layer, stream));
  }

  // On arrays of the layer's device: hotplane.h says what each of these does.
  Result<size_t> MoeWorkspaceBytes(uint32_t layer, uint32_t token_count, uint32_t top_k) const {
    size_t bytes = 0;
    const auto ended =
        Ended(hotplane_moe_workspace_bytes(handle_, layer, token_count, top_k, &bytes));
    if (!ended) return tl::unexpected<Error>(ended.error());
    return bytes;
  }
  Result<void> MoeForwardOnDevice(const hotplane_device_moe& call) const {
    return Ended(hotplane_moe_forward_on_device(handle_, &call));
  }
  Result<void> MoeRefusal(uint32_t layer) const {
    return Ended(hotplane_moe_refusal(handle_, layer));
  }
  // Empty: of all experts that were booted.
  Result<void> MoeLoadFp4(uint32_t layer, const std::vector<uint32_t>& experts = {}) const {
    return Ended(hotplane_moe_load_fp4(handle_, layer, experts.empty() ? nullptr : experts.data(),
                                       experts.size()));
  }

  hotplane_engine* handle() const { return handle_; }

 private:
  using Opener = hotplane_code (*)(const char*, const hotplane_boot_options*, hotplane_engine**);
  using OnLayer = std::function<void(const hotplane_layer&)>;

  Engine() = default;

  // The strings are those of `options`.
  static hotplane_boot_options ToC(const BootOptions& options) {
    const auto text = [](const std::string& from) { return from.empty() ? nullptr : from.c_str(); };
    hotplane_boot_options to;
    hotplane_boot_options_init(&to);
    to.generation = text(options.generation);
    to.layers = text(options.layers);
    to.map = options.map ? 1 : 0;
    to.verify = options.verify ? 1 : 0;
    to.workers = options.workers;
    to.delta_cache_bytes = options.delta_cache_bytes;
    to.full_cache_bytes = options.full_cache_bytes;
    to.base_cache_bytes = options.base_cache_bytes;
    to.checkpoint = text(options.checkpoint);
    to.no_build = options.no_build ? 1 : 0;
    to.want_delta = options.want_delta ? 1 : 0;
    to.delta_layers = text(options.delta_layers);
    to.no_delta_layers = text(options.no_delta_layers);
    to.delta_encoding = options.delta_encoding;
    to.batch = options.batch;
    to.staging_limit_bytes = options.staging_limit_bytes;
    to.pin_delta_bytes = options.pin_delta_bytes;
    to.first_expert = options.first_expert;
    to.expert_count = options.expert_count;
    to.base_residency = options.base_residency;
    to.memory_bytes = options.memory_bytes;
    to.reserve_bytes = options.reserve_bytes;
    to.cache = options.cache;
    to.rank = options.rank;
    to.world = options.world;
    to.device = text(options.device);
    return to;
  }

  static Result<Engine> Make(Opener opener, const std::string& store, BootOptions options) {
    hotplane_boot_options c_options = ToC(options);
    Engine engine;
    if (options.on_layer) {
      // On the heap: a background boot calls it after this engine was moved.
      engine.on_layer_ = std::make_unique<OnLayer>(std::move(options.on_layer));
      c_options.user = engine.on_layer_.get();
      c_options.on_layer = [](void* user, const hotplane_layer* layer) {
        (*static_cast<OnLayer*>(user))(*layer);
      };
    }
    const hotplane_code code = opener(store.c_str(), &c_options, &engine.handle_);
    if (code != HOTPLANE_OK) return tl::unexpected<Error>(Error::Last());
    return engine;
  }

  static Result<void> Ended(hotplane_code code) {
    if (code != HOTPLANE_OK) return tl::unexpected<Error>(Error::Last());
    return {};
  }
  template <typename T>
  static Result<std::decay_t<T>> Ended(hotplane_code code, T&& value) {
    if (code != HOTPLANE_OK) return tl::unexpected<Error>(Error::Last());
    return std::forward<T>(value);
  }

  hotplane_engine* handle_ = nullptr;
  std::unique_ptr<OnLayer> on_layer_;  // after handle_ is closed by ~Engine it is called no more
};

}  // namespace hotplane::api
