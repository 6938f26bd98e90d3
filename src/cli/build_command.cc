#include <memory>

#include "base/format_text.h"
#include "base/number_text.h"
#include "base/units.h"
#include "boot/build.h"
#include "boot/describe.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/several_generations.h"
#include "device/device.h"
#include "engine/report_json.h"

namespace hotplane::cli {
namespace {

// Null for the CPU.
Result<std::unique_ptr<Device>> OpenDevice(const Options& options) {
  if (!options.device.cuda) return std::unique_ptr<Device>();
  DeviceOptions device;
  device.ring_bytes = kStagedBytesMax;  // nothing lands
  device.thread_count = options.workers;
  return OpenCudaDevice(options.device.ordinal, device);
}

}  // namespace

Result<void> RunBuild(const Context& context) {
  const Options& options = context.options;
  HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(PosixEnv(), options.path));
  HP_ASSIGN(const MoeModel model, DiscoverMoe(checkpoint));
  HP_ASSIGN(const std::unique_ptr<Device> device, OpenDevice(options));
  Progress progress;
  BuildOptions build;
  build.layers = options.layers;
  build.encodings = options.encodings;
  build.zero_mode = options.zero_mode;
  build.shard_world = options.tp;
  build.worker_count = options.workers;
  build.batch_size = options.batch;
  build.staging_limit_bytes = options.staging_limit_bytes;
  build.stall_seconds = options.stall_seconds;
  build.no_lock = options.no_lock;
  build.kernels = &context.kernels;
  build.device = device.get();
  build.cancel = &context.cancel;
  build.progress = &progress;
  Result<BuildReport> built = [&] {
    const ProgressDisplay display(progress, options.common, options.stall_seconds);
    return Build(PosixEnv(), checkpoint, model, options.store, build);
  }();
  if (!built) return Fail(WithResumeAdvice(built.error()));
  WarnOfSeveralGenerations(options.store, built->generation, &built->warnings);
  const BuildReport& report = *built;
  if (options.common.json) {
    PrintJson(BuildReportJson(report));
    return {};
  }
  if (options.common.quiet) return {};
  const std::string rebuilt = report.layers_rebuilt == 0
                                  ? std::string()
                                  : Text("{} rebuilt, damaged before; ", report.layers_rebuilt);
  PrintLine(Text("built {} of {} ({}{} were there){} into {}, generation {}", report.layers_built,
                 Counted(report.layers_total, "layers"), rebuilt, report.layers_attached,
                 report.shard_world > 1 ? Text(" for {} ranks", report.shard_world) : "",
                 options.store, ToHex(report.generation)));
  if (report.layers_built == 0) {
    PrintLine("nothing was missing by the files' headers; `hotplane verify` checks every byte");
    return {};
  }
  PrintLine(Text(
      "read {}, wrote {}, {}, quantizing at {} with {} ({}), staging {}",
      FormatBytes(report.bytes_read), FormatBytes(report.bytes_built),
      FormatSeconds(report.seconds), FormatRate(report.bytes_read, report.seconds_quantize),
      Counted(report.worker_count, "workers"), report.isa, FormatBytes(report.peak_staging_bytes)));
  if (device != nullptr)
    PrintLine(Text("of that {} quantized on {}, in {} of its memory",
                   FormatBytes(report.bytes_quantized_on_device), report.device,
                   FormatBytes(report.peak_device_bytes)));
  return {};
}

}  // namespace hotplane::cli
