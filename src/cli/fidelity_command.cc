#include "base/format_text.h"
#include "base/units.h"
#include "boot/paired_generation.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "engine/fidelity.h"
#include "io/env.h"
#include "store/store.h"

namespace hotplane::cli {
namespace {

constexpr char kHeading[] =
    "  layer  source  tier     rel. RMS      gate        up      down  signed bias  magn. bias"
    "   largest   clipped  zeros/negative  exponents";

std::string Figure(const std::optional<double>& value) {
  return value ? Text("{:.6f}", *value) : std::string("-");
}
std::string Signed(const std::optional<double>& value) {
  return value ? Text("{:+.6f}", *value) : std::string("-");
}
std::string Percent(uint64_t part, uint64_t whole) {
  return whole == 0 ? std::string("-")
                    : Text("{:.3f}%", 100 * static_cast<double>(part) / static_cast<double>(whole));
}

std::string Exponents(const FidelitySums& sums) {
  if (sums.exponent_min > sums.exponent_max) return "-";
  return Text("{} to {}", sums.exponent_min, sums.exponent_max);
}

// What a tier's row says of zeros: the base has none, its row tells the source's.
std::string Zeros(const FidelitySums& sums, bool fp4) {
  const uint64_t zeros = fp4 ? sums.zero_nibbles : sums.zeros;
  const uint64_t negative = fp4 ? sums.negative_zero_nibbles : sums.negative_zeros;
  return Text("{}/{}", Percent(zeros, sums.weights), Percent(negative, zeros));
}

void PrintTier(const std::string& label, const FidelitySums& sums, bool fp4,
               const std::array<FidelitySums, kProjectionCount>* projections) {
  const TierSums& tier = fp4 ? sums.fp4 : sums.base;
  std::string row =
      Text("{}  {:<6} {:>10}", label, fp4 ? "fp4" : "base", Figure(RelativeRms(sums, tier)));
  for (size_t p = 0; p < kProjectionCount; ++p) {
    const FidelitySums* const part = projections == nullptr ? nullptr : &(*projections)[p];
    row += Text("{:>10}",
                part == nullptr ? "" : Figure(RelativeRms(*part, fp4 ? part->fp4 : part->base)));
  }
  row += Text("{:>13}{:>12}{:>10}{:>10}{:>16}  {}", Signed(SignedBias(sums, tier)),
              Signed(MagnitudeBias(sums, tier)), Percent(tier.largest, sums.weights),
              Percent(tier.clipped, sums.weights), Zeros(sums, fp4), Exponents(sums));
  PrintLine(row);
}

void PrintReport(const FidelityReport& report) {
  PrintLine(Text("generation  {}  {}", ToHex(report.generation), report.model));
  PrintLine(kHeading);
  for (const FidelityLayer& layer : report.layers) {
    const std::string label =
        Text("  {:>5}  {:<6}", layer.layer.ordinal, SourceFormatName(layer.layer.source_format));
    const FidelitySums total = layer.Total();
    for (const bool fp4 : {false, true}) {
      const std::string& missing = fp4 ? layer.fp4_missing : layer.base_missing;
      if (missing.empty()) {
        PrintTier(label, total, fp4, &layer.projections);
      } else {
        PrintLine(Text("{}  {:<6}  not measured: {}", label, fp4 ? "fp4" : "base", missing));
      }
    }
  }
  for (const bool fp4 : {false, true}) {
    const FidelitySums total = report.Total(fp4);
    if (total.weights > 0) PrintTier("    all        ", total, fp4, nullptr);
  }
  PrintLine(Text("compared {} of checkpoint with {} of store in {}",
                 FormatBytes(report.bytes_read_checkpoint), FormatBytes(report.bytes_read_store),
                 FormatSeconds(report.seconds)));
}

}  // namespace

Result<void> RunFidelity(const Context& context) {
  const Options& options = context.options;
  HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(PosixEnv(), options.path));
  HP_ASSIGN(const MoeModel model, DiscoverMoe(checkpoint));
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.store));
  HP_ASSIGN(const Generation generation, OpenPairedGeneration(store, options.generation, checkpoint,
                                                              model, OpenOptionsOf(context)));
  WorkerPool pool(options.workers);
  Progress progress;
  FidelityOptions fidelity;
  fidelity.layers = options.layers;
  fidelity.kernels = &context.kernels;
  fidelity.cancel = &context.cancel;
  fidelity.progress = &progress;
  Result<FidelityReport> measured = [&] {
    const ProgressDisplay display(progress, options.common, options.stall_seconds);
    return MeasureFidelity(generation, checkpoint, model, pool, fidelity);
  }();
  HP_ASSIGN(const FidelityReport report, std::move(measured));
  if (options.common.json) {
    PrintJson(FidelityJson(report));
  } else if (!options.common.quiet) {
    PrintReport(report);
  }
  return {};
}

}  // namespace hotplane::cli
