#include <algorithm>

#include "base/format_text.h"
#include "base/log.h"
#include "base/number_text.h"
#include "base/units.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "engine/engine.h"

namespace hotplane::cli {
namespace {

bool Wants(const Options& options, Tier tier) {
  return std::find(options.tiers.begin(), options.tiers.end(), tier) != options.tiers.end();
}

EngineOptions ToEngineOptions(const Context& context, Progress* progress) {
  const Options& options = context.options;
  EngineOptions engine;
  engine.store_directory = options.path;
  engine.generation_prefix = options.generation;
  engine.checkpoint = options.checkpoint;
  engine.no_build = options.no_build;
  engine.worker_count = options.workers;
  engine.device = options.device;
  engine.base = Wants(options, Tier::kBase);
  engine.delta = Wants(options, Tier::kDelta);
  engine.delta_layers = options.delta_layers;
  engine.no_delta_layers = options.no_delta_layers;
  engine.delta_encodings = options.delta_encodings;
  engine.base_residency = options.base_residency;
  engine.reserve_bytes = options.reserve_bytes;
  engine.pin_delta_bytes = options.pin_delta_bytes;
  engine.experts = options.experts;
  engine.shard = {.rank = options.rank, .world = options.world, .launched = LaunchedRanks()};
  engine.zero_mode = options.zero_mode_given;
  engine.dry_run = options.dry_run;
  engine.measure_limit = true;
  engine.boot.layers = options.layers;
  engine.boot.map = options.map;
  engine.boot.verify = options.verify;
  engine.boot.cache = options.cache;
  engine.boot.cancel = &context.cancel;
  engine.boot.progress = progress;
  engine.boot.memory_limit_bytes = options.memory_bytes;
  engine.build.worker_count = options.workers;
  engine.build.batch_size = options.batch;
  engine.build.staging_limit_bytes = options.staging_limit_bytes;
  engine.build.stall_seconds = options.stall_seconds;
  engine.build.no_lock = options.no_lock;
  engine.build.kernels = &context.kernels;
  return engine;
}

void PrintReport(const Engine& engine) {
  const BootReport& report = engine.report();
  const double limit = engine.limit_bytes_per_second();
  const uint64_t base_bytes = report.bytes_read - report.bytes_read_delta;
  const double rate =
      report.seconds_land > 0 ? static_cast<double>(base_bytes) / report.seconds_land : 0;
  const BuildReport build = engine.build_report();
  if (build.layers_built > 0 || engine.plan().builds()) {
    PrintLine(Text(
        "built {}{}: read {} of the checkpoint, wrote {}", Counted(build.layers_built, "layers"),
        build.layers_rebuilt > 0 ? Text(" ({} rebuilt, damaged before)", build.layers_rebuilt)
                                 : std::string(),
        FormatBytes(build.bytes_read), FormatBytes(build.bytes_built)));
  }
  const BootPlan& plan = engine.plan();
  PrintLine(Text(
      "booted {}{}, {}{}, in {}: plan {}, allocate {}, land {}",
      Counted(report.layers_total, "layers"),
      plan.shard_world > 1 ? Text(" of rank {} of {}", plan.shard_rank, plan.shard_world) : "",
      FormatBytes(report.bytes_read),
      report.bytes_verified == report.bytes_read + report.bytes_kept ? ", every byte verified" : "",
      FormatSeconds(report.seconds), FormatSeconds(report.seconds_plan),
      FormatSeconds(report.seconds_allocate), FormatSeconds(report.seconds_land)));
  const bool on_device = report.seconds_device > 0;
  if (on_device)
    PrintLine(
        Text("{}: opened in {} (context {}, ring of {} {}); {} of its memory at most, {} "
             "planes, beside {} of the context and others",
             report.device, FormatSeconds(report.seconds_device),
             FormatSeconds(report.seconds_device_context), FormatBytes(report.bytes_ring),
             FormatSeconds(report.seconds_device_ring), FormatBytes(report.peak_device_bytes),
             FormatBytes(plan.bytes_device), FormatBytes(report.bytes_device_context)));
  if (report.bytes_kept > 0)
    PrintLine(Text("kept {} of planes on the device where they were built, not read back",
                   FormatBytes(report.bytes_kept)));
  if (base_bytes > 0 && !report.sources.empty())
    PrintLine(Text("{} landing, {:.0f}% of the {} that this {} gives; first layer after {}",
                   FormatRate(base_bytes, report.seconds_land), limit > 0 ? 100 * rate / limit : 0,
                   FormatRate(static_cast<uint64_t>(limit), 1), on_device ? "link" : "memory",
                   FormatSeconds(report.sources.front().seconds_ready)));
  if (report.bytes_read_delta > 0)
    PrintLine(Text("pinned {} of delta records in {}", FormatBytes(report.bytes_read_delta),
                   FormatSeconds(report.seconds_pin)));
  uint64_t attached_bytes = 0;
  const PlanEntry* first_skipped = nullptr;
  for (const PlanEntry& entry : engine.plan().entries) {
    if (entry.action == PlanAction::kAttach) {
      attached_bytes += entry.bytes_skipped;
    } else if (entry.bytes_skipped > 0 && first_skipped == nullptr) {
      first_skipped = &entry;
    }
  }
  if (attached_bytes > 0)
    PrintLine(Text("attached {} of the delta tier, unread", FormatBytes(attached_bytes)));
  if (first_skipped != nullptr)
    PrintLine(Text("skipped {}: there, and not needed ({})",
                   FormatBytes(report.bytes_skipped - attached_bytes), first_skipped->reason));
}

}  // namespace

Result<void> RunBoot(const Context& context) {
  const Options& options = context.options;
  Progress progress;
  std::unique_ptr<Engine> engine;
  {
    const ProgressDisplay display(progress, options.common, options.stall_seconds);
    HP_ASSIGN(engine, Engine::Open(PosixEnv(), ToEngineOptions(context, &progress)));
    HP_TRY(engine->Plan());
    if (!options.dry_run) {
      const Result<void> booted = engine->Boot([](const BootedLayer& layer) {
        Log(LogLevel::kDebug, "layer {} (model's {}) ready", layer.ordinal, layer.model_index);
      });
      if (!booted)
        return Fail(engine->plan().builds() ? WithResumeAdvice(booted.error()) : booted.error());
    }
  }
  if (options.dry_run) {
    if (options.common.json) {
      PrintJson(engine->PlanJson());
    } else {
      PrintText(PlanTable(engine->plan()));
    }
  } else if (options.common.json) {
    PrintJson(engine->ReportJson());
  } else if (!options.common.quiet) {
    PrintReport(*engine);
  }
  return {};
}

}  // namespace hotplane::cli
