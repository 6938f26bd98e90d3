// How fast a GPU quantizes matrices of every source format: from host memory to planes in host
// memory, as a build does it, beside the kernel alone, what the link gives and what the same
// threads do on the CPU. Without a GPU it says so.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "base/memory.h"
#include "base/topology.h"
#include "base/units.h"
#include "boot/matrix_cases.h"
#include "device/device.h"

namespace hotplane {
namespace {

using namespace matrix_cases;
using Clock = std::chrono::steady_clock;

struct Options {
  bool smoke = false;
  size_t n = 2048;
  size_t k = 4096;
  double seconds = .7;  // of each figure
};

// One worker's source and planes, in memory that a device can register.
struct Worker {
  HugeBuffer sources;
  HugeBuffer planes;
  MatrixSource source;
  MatrixPlanes out;
  std::unique_ptr<MatrixQuantizer> quantizer;

  Worker(const MatrixCase& each, Device* device) {
    const size_t n = each.source.n;
    const size_t k = each.source.k;
    source = each.Source();
    const uint64_t scales_at = RoundUp(each.elements.size(), kQuantizerAlignBytes);
    sources = HugeBuffer::Allocate(scales_at + each.scales.size()).value();
    std::memcpy(sources.data(), each.elements.data(), each.elements.size());
    if (!each.scales.empty())
      std::memcpy(sources.data() + scales_at, each.scales.data(), each.scales.size());
    source.elements = sources.span().first(each.elements.size());
    source.scales = sources.span().subspan(scales_at);
    // The base and the delta tier as quintals, as a build makes them.
    planes = HugeBuffer::Allocate(n * k).value();
    out.codes = planes.data();
    out.scales = out.codes + CodePlaneBytes(n, k);
    out.quintals = out.scales + ScalePlaneBytes(n, k);
    if (device == nullptr) {
      quantizer = NewCpuQuantizer(*SelectKernels(std::nullopt).value());
      return;
    }
    quantizer = device
                    ->NewQuantizer({.source_bytes = scales_at + each.scales.size() +
                                                    source.block_scales.size_bytes(),
                                    .plane_bytes = n * k,
                                    .thresholds = ScaleThresholds(),
                                    .host_sources = sources.span(),
                                    .host_planes = planes.span()})
                    .value();
  }
  void Run() {
    (void)quantizer->Load(source).value();
    if (!quantizer->Quantize(false, out)) std::abort();
  }
};

// Source bytes per second.
double RateOf(const MatrixCase& each, Device* device, size_t worker_count, const Options& options) {
  std::vector<std::unique_ptr<Worker>> workers;
  for (size_t i = 0; i < worker_count; ++i)
    workers.push_back(std::make_unique<Worker>(each, device));
  const auto start = Clock::now();
  const auto end = start + std::chrono::duration<double>(options.seconds);
  std::vector<size_t> rounds(worker_count);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < worker_count; ++i)
    threads.emplace_back([&, i] {
      do {
        workers[i]->Run();
        ++rounds[i];
      } while (Clock::now() < end);
    });
  size_t all = 0;
  for (size_t i = 0; i < worker_count; ++i) {
    threads[i].join();
    all += rounds[i];
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return static_cast<double>(all * (each.elements.size() + each.scales.size())) / seconds;
}

// The quantizing kernel, its launch, and a copy of the scales.
double KernelRateOf(const MatrixCase& each, Device* device, const Options& options) {
  Worker worker(each, device);
  worker.Run();
  const MatrixPlanes scales = {.scales = worker.out.scales};
  const auto start = Clock::now();
  size_t rounds = 0;
  double seconds = 0;
  while (seconds < options.seconds / 4) {
    if (!worker.quantizer->Quantize(false, scales)) std::abort();
    ++rounds;
    seconds = std::chrono::duration<double>(Clock::now() - start).count();
  }
  return static_cast<double>(rounds * (each.elements.size() + each.scales.size())) / seconds;
}

int Main(const Options& options) {
  Result<std::unique_ptr<Device>> device = OpenCudaDevice(0, {.ring_bytes = 64 * kMiB});
  if (!device) {
    std::printf("no GPU: %s\n", device.error().what().c_str());
    return 0;
  }
  const Result<DeviceRates> rates = (*device)->MeasureRates();
  const size_t cores = UsableCpuCount();
  std::printf("%s; link %.1f GB/s to it; %zu cores; matrices [%zu, %zu]; GB/s of source\n",
              (*device)->name().c_str(), rates ? rates->pinned_copy / 1e9 : 0.0, cores, options.n,
              options.k);
  std::printf("%-8s %10s %10s %10s %10s %10s\n", "format", "1 worker", "4 workers", "all cores",
              "kernel", "CPU");
  // The CPU counts the zeros of blocks whose scale is 0 one by one, so its figure for NVFP4, where
  // an eighth is such blocks, is no rate of a build. FP8's seed has blocks of 128 x 128 and none.
  const std::vector<MatrixCase> cases = {Mxfp4Case(options.n, options.k, 1),
                                         Nvfp4Case(options.n, options.k, 1),
                                         Fp8Case(options.n, options.k, 15),
                                         FloatCase(SourceFormat::kBf16, options.n, options.k, 1),
                                         FloatCase(SourceFormat::kF16, options.n, options.k, 1),
                                         FloatCase(SourceFormat::kF32, options.n, options.k, 1)};
  for (const MatrixCase& each : cases) {
    const auto rate = [&](Device* on, size_t workers) {
      return RateOf(each, on, workers, options) / 1e9;
    };
    std::printf("%-8s %10.2f %10.2f %10.2f %10.2f %10.2f\n",
                std::string(SourceFormatName(each.source.format)).c_str(), rate(device->get(), 1),
                rate(device->get(), 4), rate(device->get(), cores),
                KernelRateOf(each, device->get(), options) / 1e9, rate(nullptr, cores));
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace hotplane

int main(int argc, char** argv) {
  hotplane::Options options;
  for (int i = 1; i < argc; ++i) options.smoke = std::strcmp(argv[i], "--smoke") == 0;
  if (options.smoke) options = {.smoke = true, .n = 64, .k = 256, .seconds = .01};
  return hotplane::Main(options);
}
