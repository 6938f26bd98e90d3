#include "engine/engine.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/units.h"
#include "boot/limits.h"
#include "engine/report_json.h"

namespace hotplane {

Engine::~Engine() = default;

Result<std::unique_ptr<Engine>> Engine::Open(Env& env, const EngineOptions& options) {
  std::unique_ptr<Engine> engine(new Engine);
  engine->options_ = options;
  HP_ASSIGN(const Store store, Store::Open(env, options.store_directory));
  HP_ASSIGN(Generation generation, store.OpenGeneration(options.generation_prefix));
  engine->generation_ = std::make_unique<Generation>(std::move(generation));
  engine->pool_ = std::make_unique<WorkerPool>(options.worker_count);
  engine->options_.records.worker_count = options.worker_count;
  engine->records_ =
      std::make_unique<ExpertRecords>(*engine->generation_, engine->options_.records);
  return engine;
}

Result<void> Engine::Boot(const LayerReady& on_layer_ready) {
  HP_CHECK(session_ == nullptr);
  options_.boot.pool = pool_.get();
  HP_ASSIGN(session_, BootSession::Open(*generation_, options_.boot));
  HP_TRY(session_->Run([&](const BootedLayer& layer) {
    // Mapped pages may leave the page cache and come back unverified; landed ones stay.
    if (!options_.boot.map && options_.boot.verify)
      records_->reader().SetResident(layer.ordinal,
                                     {layer.planes13, layer.sc13, layer.planes2, layer.sc2});
    if (on_layer_ready) on_layer_ready(layer);
  }));
  if (options_.measure_limit) MeasureLimit();
  return {};
}

void Engine::MeasureLimit() {
  // Less than this would be measured in the caches.
  constexpr size_t kSampleBytesMin = 64 * kMiB;
  constexpr size_t kSampleBytesMax = 512 * kMiB;
  std::span<const std::byte> sample;
  for (const BootedLayer& layer : layers())
    if (layer.planes13.size() > sample.size()) sample = layer.planes13;
  HugeBuffer own;
  if (sample.size() < kSampleBytesMin) {
    Result<HugeBuffer> buffer = HugeBuffer::Allocate(kSampleBytesMin);
    if (!buffer) return;
    own = *std::move(buffer);
    std::memset(own.data(), 1, own.size());
    sample = own.span();
  }
  sample = sample.first(std::min(sample.size(), kSampleBytesMax));
  if (options_.boot.map) {
    limit_bytes_per_second_ = MeasureReadRate(*pool_, sample);
    return;
  }
  const Result<double> rate = MeasureCopyRate(*pool_, sample);
  if (rate) {
    limit_bytes_per_second_ = *rate;
  } else {
    Log(LogLevel::kWarning, "the memory's limit was not measured: {}", rate.error().what());
  }
}

std::span<const BootedLayer> Engine::layers() const {
  return session_ == nullptr ? std::span<const BootedLayer>() : session_->layers();
}

const BootReport& Engine::report() const {
  HP_CHECK(session_ != nullptr);
  return session_->report();
}

std::string Engine::ReportJson() const {
  return BootReportJson(report(), generation_->id(), limit_bytes_per_second_);
}

}  // namespace hotplane
