// How fast a store in the page cache boots onto a GPU, every byte verified there, verified by the
// CPU, and not at all, beside what the link gives to pinned memory in the same run and how fast the
// same threads copy the page cache.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/fault_guard.h"
#include "base/format_text.h"
#include "base/limits.h"
#include "base/result_file.h"
#include "base/topology.h"
#include "base/units.h"
#include "engine/engine.h"
#include "engine/synth.h"
#include "engine/warm.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  bool smoke = false;
  std::string directory;  // of the store; made when missing, removed when not named
  uint32_t layers = 8;
  size_t rounds = 3;
  std::vector<size_t> workers;                 // empty: the CPUs of this process
  std::vector<uint64_t> pieces = {4 * kMiB};   // bytes of a copy
  std::vector<uint64_t> mapped = {0};          // workers that register page cache
  uint64_t window_bytes = 64 * kMiB;           // of it, at a time
  std::vector<uint64_t> rings = {128 * kMiB};  // bytes of the ring
  bool verified_only = false;
  // Between boots: the driver clears device memory after it was freed, and the next allocation
  // waits for that when most of the memory is concerned.
  uint64_t pause_seconds = 0;
  std::string json_path;
};

struct Way {
  const char* name;
  bool verify;
  bool verify_on_device;
};
constexpr Way kWays[] = {{"verified on the GPU", true, true},
                         {"not verified", false, true},
                         {"verified by the CPU", true, false}};

struct Setting {
  size_t workers = 0;
  uint64_t piece_bytes = 0;
  uint64_t ring_bytes = 0;
  size_t mapped_workers = 0;
  uint64_t window_bytes = 64 * kMiB;
};

struct Sample {
  double seconds_ready = 0;  // from the boot call on an open device to the last verified layer
  double seconds_call = 0;   // to the end of the call
  double seconds_land = 0;
  double seconds_allocate = 0;
  double seconds_first_layer = 0;
  double seconds_open = 0;  // of engine and device
  double seconds_close = 0;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

template <typename Field>
double MedianOf(const std::vector<Sample>& samples, const Field& field) {
  std::vector<double> values;
  for (const Sample& sample : samples) values.push_back(field(sample));
  return Median(std::move(values));
}

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

Result<void> PrepareStore(const Options& options) {
  SynthStoreOptions synth;
  HP_ASSIGN(synth.geometry, ParseGeometry(options.smoke ? "8,1024,512" : "ds4-flash"));
  synth.layers = options.layers;
  HP_TRY(SynthStore(PosixEnv(), options.directory, synth));
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.directory));
  HP_ASSIGN(const Generation generation, store.OpenGeneration());
  WorkerPool pool;
  HP_TRY(Warm(generation, {Tier::kBase}, pool, nullptr, nullptr));
  return {};
}

Result<Sample> BootOnce(const Options& options, const Setting& setting, const Way& way,
                        DeviceRates* rates, uint64_t* bytes) {
  EngineOptions engine_options;
  engine_options.store_directory = options.directory;
  engine_options.worker_count = setting.workers;
  engine_options.device.cuda = true;
  engine_options.device_options.piece_bytes = setting.piece_bytes;
  engine_options.device_options.ring_bytes = setting.ring_bytes;
  engine_options.device_options.mapped_worker_count = setting.mapped_workers;
  engine_options.device_options.mapped_window_bytes = setting.window_bytes;
  engine_options.device_options.verify_on_device = way.verify_on_device;
  engine_options.boot.verify = way.verify;
  engine_options.base_residency = Residency::kDevice;
  Sample sample;
  const auto opening = Clock::now();
  HP_ASSIGN(std::unique_ptr<Engine> engine, Engine::Open(PosixEnv(), engine_options));
  sample.seconds_open = SecondsSince(opening);
  if (rates != nullptr) {
    HP_ASSIGN(*rates, engine->device()->MeasureRates());
  }
  const auto start = Clock::now();
  double ready = 0;
  HP_TRY(engine->Boot([&](const BootedLayer&) { ready = SecondsSince(start); }));
  sample.seconds_call = SecondsSince(start);
  sample.seconds_ready = ready;
  const BootReport& report = engine->report();
  if (report.bytes_read != report.bytes_needed ||
      (way.verify && report.bytes_verified != report.bytes_needed))
    return Fail(Status::Data("a boot did not read and verify every byte once"));
  sample.seconds_land = report.seconds_land;
  sample.seconds_allocate = report.seconds_allocate;
  sample.seconds_first_layer = report.sources.front().seconds_ready;
  *bytes = report.bytes_read;
  const auto closing = Clock::now();
  engine.reset();
  sample.seconds_close = SecondsSince(closing);
  return sample;
}

Result<double> CacheCopyRate(const Options& options, size_t workers) {
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.directory));
  HP_ASSIGN(const Generation generation, store.OpenGeneration());
  HP_ASSIGN(const LayerFile file, generation.OpenLayer(0, Encoding::kBase));
  HP_ASSIGN(const std::unique_ptr<Mapping> mapping,
            file.file().Map(file.layout().data_offset, file.layout().data_bytes));
  HP_TRY(mapping->Populate(0, file.layout().data_bytes));
  WorkerPool pool(workers);
  return MeasureCopyRate(pool, mapping->bytes());
}

nlohmann::ordered_json Row(const Setting& setting, const Way& way,
                           const std::vector<Sample>& samples, const DeviceRates& rates,
                           uint64_t bytes) {
  const auto median = [&](double Sample::*field) {
    return MedianOf(samples, [field](const Sample& sample) { return sample.*field; });
  };
  const double rate = static_cast<double>(bytes) / median(&Sample::seconds_ready);
  const double limit = std::max(rates.pinned_copy_16mib, rates.pinned_copy);
  std::printf("%4zu %6zu %8s %8s  %-19s %7.2f %6.0f%% %8.3f %8.3f %8.4f %8.4f\n", setting.workers,
              setting.mapped_workers, FormatBytes(setting.piece_bytes).c_str(),
              FormatBytes(setting.ring_bytes).c_str(), way.name, rate / 1e9, 100 * rate / limit,
              median(&Sample::seconds_ready), median(&Sample::seconds_call),
              median(&Sample::seconds_allocate), median(&Sample::seconds_first_layer));
  std::fflush(stdout);
  return {{"workers", setting.workers},
          {"piece_bytes", setting.piece_bytes},
          {"ring_bytes", setting.ring_bytes},
          {"way", way.name},
          {"gigabytes_per_second", rate / 1e9},
          {"share_of_pinned_copy", rate / limit},
          {"mapped_workers", setting.mapped_workers},
          {"window_bytes", setting.window_bytes},
          {"seconds_ready", median(&Sample::seconds_ready)},
          {"seconds_call", median(&Sample::seconds_call)},
          {"seconds_land", median(&Sample::seconds_land)},
          {"seconds_allocate", median(&Sample::seconds_allocate)},
          {"seconds_first_layer", median(&Sample::seconds_first_layer)},
          {"seconds_open", median(&Sample::seconds_open)},
          {"seconds_close", median(&Sample::seconds_close)}};
}

Result<void> Measure(const Options& options, nlohmann::ordered_json* json) {
  DeviceRates rates;
  uint64_t bytes = 0;
  // The first boot is not counted: it starts the driver.
  HP_TRY(BootOnce(options, {0, kStagedBytesMax, kStagedBytesMax * 4, 0}, kWays[0], &rates, &bytes));
  std::printf("%zu cores, %u layers, %s, medians of %zu\n", UsableCpuCount(), options.layers,
              FormatBytes(bytes).c_str(), options.rounds);
  std::printf("pinned to device: %.1f GB/s in pieces of 4 MiB, %.1f of 16 MiB; hashed at %.0f\n",
              rates.pinned_copy_4mib / 1e9, rates.pinned_copy_16mib / 1e9, rates.verify / 1e9);
  (*json)["bytes"] = bytes;
  (*json)["layers"] = options.layers;
  (*json)["cores"] = UsableCpuCount();
  (*json)["rounds"] = options.rounds;
  (*json)["pinned_copy_4mib_gigabytes_per_second"] = rates.pinned_copy_4mib / 1e9;
  (*json)["pinned_copy_16mib_gigabytes_per_second"] = rates.pinned_copy_16mib / 1e9;
  (*json)["verify_gigabytes_per_second"] = rates.verify / 1e9;
  std::vector<size_t> workers = options.workers;
  if (workers.empty()) workers = {UsableCpuCount()};
  for (const size_t count : workers) {
    HP_ASSIGN(const double rate, CacheCopyRate(options, count));
    std::printf("page cache copied by %zu threads: %.1f GB/s\n", count, rate / 1e9);
    (*json)["page_cache_copy"].push_back(
        {{"threads", count}, {"gigabytes_per_second", rate / 1e9}});
  }
  std::printf("%4s %6s %8s %8s  %-19s %7s %7s %8s %8s %8s %8s\n", "cpus", "mapped", "piece", "ring",
              "", "GB/s", "of link", "ready", "call", "allocate", "first");
  for (const size_t count : workers)
    for (const uint64_t piece : options.pieces)
      for (const uint64_t ring : options.rings)
        for (const uint64_t mapped : options.mapped)
          for (const Way& way : kWays) {
            if (options.verified_only && &way != &kWays[0]) continue;
            const Setting setting = {count, piece, ring, mapped, options.window_bytes};
            std::vector<Sample> samples;
            for (size_t round = 0; round < options.rounds; ++round) {
              std::this_thread::sleep_for(std::chrono::seconds(options.pause_seconds));
              HP_ASSIGN(const Sample sample, BootOnce(options, setting, way, nullptr, &bytes));
              samples.push_back(sample);
            }
            (*json)["rows"].push_back(Row(setting, way, samples, rates, bytes));
          }
  return {};
}

Result<void> Run(Options options) {
  if (CudaDeviceCount() == 0) {
    std::printf("skipped: %s\n", OpenCudaDevice(0, {}).error().what().c_str());
    return {};
  }
  HP_TRY(CheckResultFile(options.json_path));
  const bool own_directory = options.directory.empty();
  if (own_directory)
    options.directory =
        (std::filesystem::temp_directory_path() / Text("hotplane-bench-{}", getpid())).string();
  nlohmann::ordered_json json;
  const Result<void> result = [&]() -> Result<void> {
    HP_TRY(PrepareStore(options));
    return Measure(options, &json);
  }();
  if (own_directory) std::filesystem::remove_all(options.directory);
  if (result) HP_TRY(WriteResultFile(options.json_path, json.dump(2) + "\n"));
  return result;
}

// "4,8" in MiB, or plain numbers with a unit of 1.
std::vector<uint64_t> ParseList(const std::string& text, uint64_t unit) {
  std::vector<uint64_t> values;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    values.push_back(std::stoull(text.substr(begin, comma - begin)) * unit);
    begin = comma + 1;
  }
  return values;
}

}  // namespace
}  // namespace hotplane

int main(int argc, char** argv) {
  hotplane::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool has_value = i + 1 < argc;
    if (argument == "--smoke") {
      options.smoke = true;
      options.rounds = 1;
      options.layers = 2;
    } else if (argument == "--verified-only") {
      options.verified_only = true;
    } else if (argument == "--store" && has_value) {
      options.directory = argv[++i];
    } else if (argument == "--layers" && has_value) {
      options.layers = static_cast<uint32_t>(std::stoul(argv[++i]));
    } else if (argument == "--rounds" && has_value) {
      options.rounds = std::stoul(argv[++i]);
    } else if (argument == "--workers" && has_value) {
      for (const uint64_t count : hotplane::ParseList(argv[++i], 1))
        options.workers.push_back(static_cast<size_t>(count));
    } else if (argument == "--piece-mib" && has_value) {
      options.pieces = hotplane::ParseList(argv[++i], hotplane::kMiB);
    } else if (argument == "--ring-mib" && has_value) {
      options.rings = hotplane::ParseList(argv[++i], hotplane::kMiB);
    } else if (argument == "--mapped" && has_value) {
      options.mapped = hotplane::ParseList(argv[++i], 1);
    } else if (argument == "--window-mib" && has_value) {
      options.window_bytes = hotplane::ParseList(argv[++i], hotplane::kMiB).front();
    } else if (argument == "--pause" && has_value) {
      options.pause_seconds = std::stoull(argv[++i]);
    } else if (argument == "--json" && has_value) {
      options.json_path = argv[++i];
    } else {
      std::fprintf(stderr,
                   "usage: %s [--smoke] [--store DIR] [--layers N] [--rounds N] [--workers N,N] "
                   "[--piece-mib N,N] [--ring-mib N,N] [--mapped N,N] [--window-mib N] "
                   "[--verified-only] [--pause SECONDS] [--json FILE]\n",
                   argv[0]);
      return 2;
    }
  }
  hotplane::InstallFaultGuard();
  const hotplane::Result<void> result = hotplane::Run(options);
  if (result) return 0;
  std::fprintf(stderr, "error: %s\n", result.error().ToString().c_str());
  return result.error().exit_code();
}
