// Building a store, and importing one.
#include <chrono>
#include <csignal>
#include <cstring>

#include "base/fault_guard.h"
#include "boot/build.h"
#include "boot/describe.h"
#include "capi/capi_state.h"
#include "engine/import_planes_cache.h"
#include "engine/report_json.h"

namespace hotplane::capi {
namespace {

thread_local std::string tls_report;

constexpr std::chrono::milliseconds kProgressPeriod{100};

// Calls back until it is destroyed.
class ProgressCalls {
 public:
  ProgressCalls(hotplane_progress_callback callback, void* user)
      : callback_(callback), user_(user) {
    if (callback_ == nullptr) return;
    Call();
    thread_ = std::thread([this] {
      std::unique_lock lock(mutex_);
      while (!wake_.wait_for(lock, kProgressPeriod, [this] { return stopping_; })) Call();
    });
  }
  ~ProgressCalls() {
    if (!thread_.joinable()) return;
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  Progress progress;
  CancelToken cancel;

 private:
  void Call() {
    const hotplane_progress now = {sizeof(now), progress.phase.load(), progress.bytes_done.load(),
                                   progress.bytes_total.load()};
    if (callback_(user_, &now) != 0) cancel.Cancel(SIGINT);
  }

  const hotplane_progress_callback callback_;
  void* const user_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

// `first_bytes`: of the first version of the struct.
template <typename Options>
Result<Options> ReadOptions(const Options* options, const char* name, void (*init)(Options*),
                            size_t first_bytes) {
  Options full;
  init(&full);
  if (options == nullptr) return full;
  if (options->struct_bytes != sizeof(full) && options->struct_bytes != first_bytes)
    return Fail(
        Status::Usage(Text("{} has an unknown size", name))
            .Expected(Text("{} bytes", sizeof(full)))
            .Found(Text("{} bytes", options->struct_bytes))
            .Advice(Text("fill it with {}_init; a newer caller needs a newer library", name)));
  std::memcpy(static_cast<void*>(&full), options, options->struct_bytes);
  return full;
}

Status UnknownValue(const char* field, int value) {
  return Status::Usage(Text("hotplane_build_options.{} has an unknown value", field))
      .Found(Text("{}", value));
}

Result<BuildOptions> EngineOptionsOf(const hotplane_build_options& options) {
  BuildOptions build;
  build.layers = options.layers == nullptr ? "" : options.layers;
  switch (options.delta_encoding) {
    case 0:
    case HOTPLANE_QUINTALS: build.encodings.push_back(Encoding::kDeltaQuintal); break;
    case HOTPLANE_NIBBLES: build.encodings.push_back(Encoding::kDeltaNibble); break;
    default: return Fail(UnknownValue("delta_encoding", options.delta_encoding));
  }
  if (options.base_only != 0) {
    if (options.delta_encoding != 0)
      return Fail(Status::Usage("an encoding of the delta tier is given, and it is not wanted")
                      .Advice("set one of base_only and delta_encoding"));
    build.encodings = {Encoding::kBase};
  }
  switch (options.zero_mode) {
    case HOTPLANE_ZERO_AUTO: build.zero_mode = ZeroMode::kAuto; break;
    case HOTPLANE_ZERO_SIGN: build.zero_mode = ZeroMode::kSign; break;
    case HOTPLANE_ZERO_ALTERNATE: build.zero_mode = ZeroMode::kAlternate; break;
    default: return Fail(UnknownValue("zero_mode", options.zero_mode));
  }
  if (options.world != 0) build.shard_world = options.world;
  build.worker_count = options.workers;
  if (options.batch != 0) build.batch_size = options.batch;
  build.staging_limit_bytes = options.staging_limit_bytes;
  return build;
}

// Null: the CPU quantizes alone.
Result<std::unique_ptr<Device>> OpenDevice(const hotplane_build_options& options) {
  if (options.device == nullptr) return std::unique_ptr<Device>();
  HP_ASSIGN(const DeviceName name, ParseDeviceName(options.device));
  if (!name.cuda) return std::unique_ptr<Device>();
  DeviceOptions device;
  device.ring_bytes = kStagedBytesMax;  // nothing lands
  device.thread_count = options.workers;
  return OpenCudaDevice(name.ordinal, device);
}

Result<void> BuildStore(const std::string& path, const std::string& store,
                        const hotplane_build_options* given) {
  HP_ASSIGN(const hotplane_build_options options,
            ReadOptions(given, "hotplane_build_options", &hotplane_build_options_init,
                        offsetof(hotplane_build_options, device)));
  HP_ASSIGN(BuildOptions build, EngineOptionsOf(options));
  InstallFaultGuard();
  ProgressCalls calls(options.on_progress, options.user);
  HP_TRY(calls.cancel.Check());
  build.cancel = &calls.cancel;
  build.progress = &calls.progress;
  HP_ASSIGN(const std::unique_ptr<Device> device, OpenDevice(options));
  build.device = device.get();
  HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(PosixEnv(), path));
  HP_ASSIGN(const MoeModel model, DiscoverMoe(checkpoint));
  HP_ASSIGN(const BuildReport report, Build(PosixEnv(), checkpoint, model, store, build));
  tls_report = BuildReportJson(report);
  return {};
}

Result<PlanesCacheImportOptions> ImportOptionsOf(const hotplane_import_options& options) {
  PlanesCacheImportOptions import;
  HP_TRY(Need(options.layers_geometry != nullptr, "layers_geometry is needed"));
  HP_ASSIGN(import.geometry, ParseLayersGeometry(options.layers_geometry));
  if (options.mtp_layers != nullptr) {
    HP_ASSIGN(import.mtp_layers, ParseLayerNumbers(options.mtp_layers));
  }
  if (options.config != nullptr) {
    HP_ASSIGN(import.config, ReadModelConfig(PosixEnv(), options.config));
  }
  if (options.key != nullptr) import.key_prefix = options.key;
  if (options.rank < -1)
    return Fail(Status::Usage("hotplane_import_options.rank has an unknown value")
                    .Found(Text("{}", options.rank)));
  if (options.rank >= 0) import.rank = static_cast<uint32_t>(options.rank);
  import.delta = options.base_only == 0;
  import.move = options.move != 0;
  if (import.move && !import.delta)
    return Fail(Status::Usage("move with base_only would lose the FP4 files"));
  return import;
}

Result<void> ImportStore(const std::string& cache, const std::string& store,
                         const hotplane_import_options* given) {
  HP_ASSIGN(const hotplane_import_options options,
            ReadOptions(given, "hotplane_import_options", &hotplane_import_options_init,
                        sizeof(hotplane_import_options)));
  HP_ASSIGN(PlanesCacheImportOptions import, ImportOptionsOf(options));
  HP_TRY(CheckCacheApart(cache, store));
  InstallFaultGuard();
  ProgressCalls calls(options.on_progress, options.user);
  HP_TRY(calls.cancel.Check());
  import.cancel = &calls.cancel;
  import.progress = &calls.progress;
  WorkerPool pool(options.workers);
  HP_ASSIGN(const PlanesCacheImportReport report,
            ImportPlanesCache(PosixEnv(), cache, store, pool, import));
  tls_report = PlanesCacheImportJson(report);
  return {};
}

}  // namespace
}  // namespace hotplane::capi

extern "C" {

void hotplane_build_options_init(hotplane_build_options* options) {
  hotplane::capi::InitStruct(options);
}

hotplane_code hotplane_build(const char* checkpoint, const char* store,
                             const hotplane_build_options* options, const char** report_json) {
  if (report_json != nullptr) *report_json = "{}";
  return hotplane::capi::Guarded([&]() -> hotplane::Result<void> {
    HP_TRY(hotplane::capi::Need(checkpoint != nullptr && store != nullptr,
                                "a checkpoint and a store are needed"));
    HP_TRY(hotplane::capi::BuildStore(checkpoint, store, options));
    if (report_json != nullptr) *report_json = hotplane::capi::tls_report.c_str();
    return {};
  });
}

void hotplane_import_options_init(hotplane_import_options* options) {
  hotplane::capi::InitStruct(options);
  if (options != nullptr) options->rank = -1;
}

hotplane_code hotplane_import_planes_cache(const char* planes_cache, const char* store,
                                           const hotplane_import_options* options,
                                           const char** report_json) {
  if (report_json != nullptr) *report_json = "{}";
  return hotplane::capi::Guarded([&]() -> hotplane::Result<void> {
    HP_TRY(hotplane::capi::Need(planes_cache != nullptr && store != nullptr,
                                "a planes cache and a store are needed"));
    HP_TRY(hotplane::capi::ImportStore(planes_cache, store, options));
    if (report_json != nullptr) *report_json = hotplane::capi::tls_report.c_str();
    return {};
  });
}

}  // extern "C"
