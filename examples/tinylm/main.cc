// tinylm: a small language model end to end, its routed experts computed by hotplane. `tinylm
// --help` tells the rest.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <nlohmann/json.hpp>

#include "generation.h"
#include "options.h"
#include "scoring.h"
#include "source_experts.h"
#include "store_experts.h"

namespace tinylm {
namespace {

using nlohmann::json;

// Everything that a command computes with.
struct Setup {
  Options options;
  Model model;
  std::unique_ptr<SourceExperts> source;  // where the source weights are needed
  std::unique_ptr<StoreExperts> store;    // where others are
};

struct Row {
  Precision precision;
  double share;        // of the routed weight at FP4
  double experts_fp4;  // share of the experts at FP4
  Scoring scoring;
  double agreement;  // with the source weights' predictions
};

// What hotplane builds, repairs and chooses while it boots, and why.
void InstallLog(bool quiet) {
  static hotplane_log_level least;
  least = quiet ? HOTPLANE_LOG_WARNING : HOTPLANE_LOG_INFO;
  hotplane_set_log(
      [](void*, hotplane_log_level level, const char* line) {
        if (level < least) return;
        const char* const label = level == HOTPLANE_LOG_ERROR     ? "error: "
                                  : level == HOTPLANE_LOG_WARNING ? "warning: "
                                                                  : "";
        std::fprintf(stderr, "%s%s\n", label, line);
      },
      nullptr);
}

Result<Setup> Prepare(Options options) {
  InstallLog(options.quiet);
  const Result<Checkpoint> checkpoint = Checkpoint::Open(options.model);
  if (!checkpoint) return Failure(checkpoint.error());
  Result<Model> model = LoadModel(*checkpoint);
  if (!model) return Failure(model.error());
  Setup setup{std::move(options), std::move(*model), nullptr, nullptr};

  const auto& precision = setup.options.precision;
  if (setup.options.command == "eval" || precision == Precision::kSource ||
      precision == Precision::kMixed) {
    auto source = SourceExperts::Load(*checkpoint, setup.model.config);
    if (!source) return Failure(source.error());
    setup.source = std::move(*source);
  }
  if (precision != Precision::kSource) {
    const bool fp4 = precision != Precision::kBase;
    auto store = StoreExperts::Boot({setup.options.store, setup.options.model, fp4,
                                     setup.options.arithmetic, setup.options.device},
                                    setup.model.config);
    if (!store) return Failure(store.error());
    setup.store = std::move(*store);
  }
  return setup;
}

// The precision of every expert; of no meaning for kSource.
Precisions PrecisionsOf(const Setup& setup, Precision precision, double share,
                        const std::vector<double>& routed) {
  const Config& config = setup.model.config;
  if (precision == Precision::kMixed) return MixedPrecisions(config, routed, share);
  return Precisions(config.layers * config.experts, precision == Precision::kFp4
                                                        ? HOTPLANE_PRECISION_FP4
                                                        : HOTPLANE_PRECISION_BASE);
}

Result<Row> ScoreRow(Setup& setup, const std::string& text, Precision precision, double share,
                     const Scoring& source) {
  if (precision == Precision::kSource) return Row{precision, 0, 0, source, 1};
  const Precisions precisions = PrecisionsOf(setup, precision, share, source.routed);
  const auto fp4 = std::count(precisions.begin(), precisions.end(), HOTPLANE_PRECISION_FP4);
  setup.store->Use(precisions);
  Result<Scoring> scoring = Score(setup.model, *setup.store, text, setup.options.threads);
  if (!scoring) return Failure(scoring.error());
  const double agreement = Agreement(*scoring, source);
  return Row{precision, share, static_cast<double>(fp4) / static_cast<double>(precisions.size()),
             std::move(*scoring), agreement};
}

json ToJson(const Row& row) {
  return {{"precision", Name(row.precision)},
          {"share", row.share},
          {"experts_fp4", row.experts_fp4},
          {"loss", row.scoring.loss},
          {"bytes_scored", row.scoring.predictions.size()},
          {"top1_agreement", row.agreement}};
}

void PrintJson(const json& object) {
  // A generated text need not be UTF-8.
  std::printf("%s\n", object.dump(2, ' ', false, json::error_handler_t::replace).c_str());
}

void PrintRows(const Options& options, const std::vector<Row>& rows) {
  if (options.json) {
    json report = {{"command", "tinylm eval"},
                   {"model", options.model},
                   {"text", options.text},
                   {"arithmetic", Name(options.arithmetic)},
                   {"device", options.device},
                   {"loss", rows.front().scoring.loss},
                   {"bytes_scored", rows.front().scoring.predictions.size()},
                   {"rows", json::array()}};
    if (options.precision) report["precision"] = Name(*options.precision);
    for (const Row& row : rows) report["rows"].push_back(ToJson(row));
    PrintJson(report);
    return;
  }
  std::printf("precision  routed weight at FP4  experts at FP4     loss  top-1 agreement\n");
  for (const Row& row : rows) {
    std::printf("%-9s  %20.2f  %13.1f%%  %7.4f  %14.2f%%\n", Name(row.precision), row.share,
                100 * row.experts_fp4, row.scoring.loss, 100 * row.agreement);
  }
  std::printf("%zu bytes scored, nats per byte; the routed weight is that of the same text\n",
              rows.front().scoring.predictions.size());
}

Result<void> RunEval(Setup& setup) {
  const Options& options = setup.options;
  const Result<std::string> text = ReadText(options.text);
  if (!text) return Failure(text.error());
  const Result<Scoring> source = Score(setup.model, *setup.source, *text, options.threads);
  if (!source) return Failure(source.error());

  std::vector<std::pair<Precision, double>> wanted = {
      {Precision::kSource, 0},   {Precision::kFp4, 1},     {Precision::kMixed, 0.9},
      {Precision::kMixed, 0.75}, {Precision::kMixed, 0.5}, {Precision::kMixed, 0.25},
      {Precision::kBase, 0}};
  if (options.precision) {
    const bool fp4 = options.precision == Precision::kFp4;
    const bool mixed = options.precision == Precision::kMixed;
    wanted = {{*options.precision, fp4 ? 1 : mixed ? options.share : 0}};
  }
  std::vector<Row> rows;
  for (const auto& [precision, share] : wanted) {
    Result<Row> row = ScoreRow(setup, *text, precision, share, *source);
    if (!row) return Failure(row.error());
    rows.push_back(std::move(*row));
  }
  PrintRows(options, rows);
  return {};
}

Result<void> RunGenerate(Setup& setup) {
  const Options& options = setup.options;
  const Experts* experts = setup.source.get();
  if (options.precision != Precision::kSource) {
    std::vector<double> routed;
    if (options.precision == Precision::kMixed) {
      const Result<std::string> text = ReadText(options.text);
      if (!text) return Failure(text.error());
      Result<Scoring> source = Score(setup.model, *setup.source, *text, options.threads);
      if (!source) return Failure(source.error());
      routed = std::move(source->routed);
    }
    setup.store->Use(PrecisionsOf(setup, *options.precision, options.share, routed));
    experts = setup.store.get();
  }
  const Result<Generation> done = Generate(setup.model, *experts, options);
  if (!done) return Failure(done.error());
  if (options.json) {
    PrintJson({{"command", "tinylm generate"},
               {"model", options.model},
               {"precision", Name(*options.precision)},
               {"prompt", options.prompt},
               {"text", done->text},
               {"tokens", done->text.size()},
               {"prompt_seconds", done->prompt_seconds},
               {"seconds", done->seconds},
               {"tokens_per_second", done->TokensPerSecond()}});
    return {};
  }
  std::fwrite(options.prompt.data(), 1, options.prompt.size(), stdout);
  std::fwrite(done->text.data(), 1, done->text.size(), stdout);
  std::printf("\n");
  std::fprintf(stderr, "%zu tokens, %.0f tokens per second; prompt of %zu in %.3f s\n",
               done->text.size(), done->TokensPerSecond(), options.prompt.size(),
               done->prompt_seconds);
  return {};
}

Result<void> Run(int argc, char** argv) {
  Result<Options> options = ParseOptions(argc, argv);
  if (!options) return Failure(options.error());
  if (options->help) {
    std::fputs(kHelp, stdout);
    return {};
  }
  Result<Setup> setup = Prepare(std::move(*options));
  if (!setup) return Failure(setup.error());
  return setup->options.command == "eval" ? RunEval(*setup) : RunGenerate(*setup);
}

}  // namespace
}  // namespace tinylm

int main(int argc, char** argv) {
  try {
    const tinylm::Result<void> done = tinylm::Run(argc, argv);
    if (!done) {
      std::fprintf(stderr, "tinylm: %s\n", done.error().text.c_str());
      return done.error().code;
    }
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "tinylm: out of memory\n");
    return HOTPLANE_CAPACITY;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tinylm: %s\n", error.what());
    return HOTPLANE_SYSTEM;
  }
  // What was written before a failure counts too.
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return 0;
  std::fprintf(stderr, "tinylm: standard output cannot be written\n");
  return HOTPLANE_SYSTEM;
}
