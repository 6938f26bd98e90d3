#include "options.h"

#include <algorithm>
#include <charconv>
#include <set>
#include <thread>

namespace tinylm {

const char* const kHelp =
    R"(tinylm eval MODEL --store DIR      loss of the model's next byte, by precision of the experts
tinylm generate MODEL --store DIR  goes on with a text

MODEL is the folder of a small Qwen3-MoE over bytes (BF16, F32, MXFP4 or NVFP4 experts). Its experts
are computed by hotplane from the store; layers that the store lacks are built of MODEL.

  --store DIR             needed for all precisions but source
  --precision P           source (the checkpoint's own weights), fp4, base (2-bit), or mixed; eval
                          without it compares them, generate takes base
  --share S               mixed: in each layer the experts that carry this share of the routed
                          weight are at FP4, the others at base; 0 to 1 (0.75)
  --text FILE             what is scored, and what the routed weight of mixed is measured on
  --arithmetic A          fast (int8 activations), exact (float32; on a GPU both are bfloat16),
                          or fp8 (activations in FP8) (fast)
  --device cpu|cuda|cuda:N where hotplane computes (cpu); on a GPU in bfloat16
  --threads N             eval: windows at the same time (the CPUs)
  --json                  one object on stdout
  -q, --quiet             of what hotplane builds, repairs and chooses, warnings and errors only

  --prompt TEXT           generate: what to go on from ("def main(")
  --tokens N              bytes to add at most (200)
  --temperature T         0 takes the most likely byte (0), above it bytes are drawn
  --seed S                of the draw (1): the same seed gives the same text
  --no-cache              computes the whole text again for every byte

Example: tinylm eval models/tinymoe-mxfp4 --store /tmp/store --json
)";

const char* Name(hotplane_arithmetic arithmetic) {
  return arithmetic == HOTPLANE_FP8 ? "fp8" : arithmetic == HOTPLANE_EXACT ? "exact" : "fast";
}

namespace {

// `value` as a number in its range.
template <typename T>
bool Parse(const std::string& value, T least, T most, T& out) {
  const char* end = value.data() + value.size();
  const auto [at, error] = std::from_chars(value.data(), end, out);
  return error == std::errc() && at == end && out >= least && out <= most;
}

bool SetPrecision(const std::string& value, Options& options) {
  for (const Precision precision :
       {Precision::kSource, Precision::kFp4, Precision::kBase, Precision::kMixed}) {
    if (value == Name(precision)) options.precision = precision;
  }
  return options.precision.has_value();
}

bool SetArithmetic(const std::string& value, Options& options) {
  for (const hotplane_arithmetic arithmetic : {HOTPLANE_FAST, HOTPLANE_EXACT, HOTPLANE_FP8}) {
    if (value != Name(arithmetic)) continue;
    options.arithmetic = arithmetic;
    return true;
  }
  return false;
}

bool IsFlag(const std::string& name) {
  return name == "--json" || name == "--no-cache" || name == "--quiet";
}

// False for a value that the option cannot have; `known` tells whether there is such an option.
bool Set(const std::string& name, const std::string& value, Options& options, bool& known) {
  known = true;
  if (name == "--json") return options.json = true;
  if (name == "--no-cache") return options.no_cache = true;
  if (name == "--quiet") return options.quiet = true;
  if (name == "--store") return !(options.store = value).empty();
  if (name == "--text") return !(options.text = value).empty();
  if (name == "--prompt") return !(options.prompt = value).empty();
  if (name == "--precision") return SetPrecision(value, options);
  if (name == "--arithmetic") return SetArithmetic(value, options);
  if (name == "--device") return !(options.device = value).empty();
  if (name == "--share") return Parse(value, 0.0, 1.0, options.share);
  if (name == "--threads") return Parse(value, 1u, 1024u, options.threads);
  if (name == "--tokens") return Parse(value, 1u, 1u << 20, options.tokens);
  if (name == "--temperature") return Parse(value, 0.0, 100.0, options.temperature);
  if (name == "--seed") return Parse(value, uint64_t{0}, UINT64_MAX, options.seed);
  return known = false;
}

Result<void> Complete(Options& options) {
  if (options.command != "eval" && options.command != "generate") {
    return Failure(HOTPLANE_USAGE, "expected `tinylm eval` or `tinylm generate`; see --help");
  }
  if (options.model.empty()) {
    return Failure(HOTPLANE_USAGE, "expected the folder of a model; see --help");
  }
  if (options.command == "generate" && !options.precision) options.precision = Precision::kBase;
  if (options.store.empty() && options.precision != Precision::kSource) {
    return Failure(HOTPLANE_USAGE, "all precisions but source need --store DIR");
  }
#if defined(TINYLM_TEXT)
  if (options.text.empty()) options.text = TINYLM_TEXT;
#endif
  const bool needs_text = options.command == "eval" || options.precision == Precision::kMixed;
  if (options.text.empty() && needs_text) {
    return Failure(HOTPLANE_USAGE, "expected --text FILE");
  }
  if (options.threads == 0) options.threads = std::max(1u, std::thread::hardware_concurrency());
  return {};
}

}  // namespace

const char* Name(Precision precision) {
  switch (precision) {
    case Precision::kSource: return "source";
    case Precision::kFp4: return "fp4";
    case Precision::kBase: return "base";
    case Precision::kMixed: return "mixed";
  }
  return "";
}

Result<Options> ParseOptions(int argc, char** argv) {
  Options options;
  std::set<std::string> given;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i] == std::string("-q") ? "--quiet" : argv[i];
    if (word == "--help" || word == "-h") {
      options.help = true;
      return options;
    }
    if (word.compare(0, 2, "--") != 0) {
      std::string& place = options.command.empty() ? options.command : options.model;
      if (!place.empty()) return Failure(HOTPLANE_USAGE, "one word too many: " + word);
      place = word;
      continue;
    }
    const bool is_flag = IsFlag(word);
    const std::string value = !is_flag && i + 1 < argc ? argv[i + 1] : "";
    bool known = false;
    const bool good = Set(word, value, options, known);
    if (!known) return Failure(HOTPLANE_USAGE, "there is no option " + word + "; see --help");
    if (!good) return Failure(HOTPLANE_USAGE, word + " cannot be \"" + value + "\"; see --help");
    if (!given.insert(word).second) return Failure(HOTPLANE_USAGE, word + " is given twice");
    if (!is_flag) ++i;
  }
  const Result<void> complete = Complete(options);
  if (!complete) return Failure(complete.error());
  return options;
}

}  // namespace tinylm
