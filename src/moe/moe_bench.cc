// The operator on this machine's cores beside the rate at which they read memory, in one run:
// decode (1 to 8 tokens) rotating over the experts of a layer far larger than the caches, and
// prefill. DeepSeek-V4-Flash shapes unless --smoke.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/format_text.h"
#include "base/limits.h"
#include "base/memory.h"
#include "base/result_file.h"
#include "moe/moe.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  bool smoke = false;
  size_t repetitions = 5;
  size_t workers = 0;
  std::string isa;  // empty: the best one
  std::string json_path;
};

struct Measured {
  std::string name;
  size_t tokens = 0;
  double seconds = 0;  // a call, median
  uint64_t bytes = 0;  // of weights, a call
  double limit = 0;    // bytes per second that memory is read at, just before
  double rate() const { return static_cast<double>(bytes) / seconds; }
};

// One layer's planes, random: every byte of codes and nibbles is valid, scales are near 2^-6, and
// quintal words are made of valid bits (0 or 1 in every digit would do; zeros do).
class Layer {
 public:
  static Result<Layer> Make(const LayerGeometry& geometry) {
    Layer layer;
    layer.geometry_ = geometry;
    const size_t elements = geometry.n13() * geometry.k13() + geometry.n2() * geometry.k2();
    HP_ASSIGN(layer.codes_, HugeBuffer::Allocate(geometry.experts * elements / 4));
    HP_ASSIGN(layer.scales_, HugeBuffer::Allocate(geometry.experts * elements / 32));
    HP_ASSIGN(layer.nibbles_, HugeBuffer::Allocate(geometry.experts * elements / 2));
    HP_ASSIGN(layer.quintals_, HugeBuffer::Allocate(geometry.experts * elements / 16 * 5));
    Fill(layer.codes_.span());
    Fill(layer.nibbles_.span());
    TouchPages(layer.quintals_.span());
    std::memset(layer.scales_.data(), 121, layer.scales_.size());
    return layer;
  }

  std::vector<ExpertWeights> Experts(Precision precision, Encoding encoding) const {
    const size_t w13 = geometry_.n13() * geometry_.k13();
    const size_t elements = w13 + geometry_.n2() * geometry_.k2();
    const bool quintals = encoding == Encoding::kDeltaQuintal;
    std::vector<ExpertWeights> experts(geometry_.experts);
    for (size_t e = 0; e < experts.size(); ++e) {
      ExpertWeights& expert = experts[e];
      expert.precision = precision;
      expert.fp_encoding = encoding;
      expert.planes13 = codes_.data() + e * elements / 4;
      expert.planes2 = expert.planes13 + w13 / 4;
      expert.sc13 = scales_.data() + e * elements / 32;
      expert.sc2 = expert.sc13 + w13 / 32;
      expert.fp13 =
          quintals ? quintals_.data() + e * elements / 16 * 5 : nibbles_.data() + e * elements / 2;
      expert.fp2 = expert.fp13 + (quintals ? w13 / 16 * 5 : w13 / 2);
    }
    return experts;
  }

  // Bytes of one expert that a call has to read.
  size_t ExpertBytes(Precision precision, Encoding encoding) const {
    const size_t elements = geometry_.n13() * geometry_.k13() + geometry_.n2() * geometry_.k2();
    if (precision == Precision::kBase) return elements / 4 + elements / 32;
    if (encoding == Encoding::kDeltaNibble) return elements / 2 + elements / 32;
    return elements / 4 + elements / 16 * 5 + elements / 32;
  }
  std::span<const std::byte> codes() const { return codes_.span(); }
  const LayerGeometry& geometry() const { return geometry_; }

 private:
  static void Fill(std::span<std::byte> bytes) {
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
      state ^= state << 13;
      state ^= state >> 7;
      state ^= state << 17;
      std::memcpy(bytes.data() + i, &state, 8);
    }
  }

  LayerGeometry geometry_;
  HugeBuffer codes_, scales_, nibbles_, quintals_;
};

struct Variant {
  const char* name;
  Precision precision;
  Encoding encoding;
  Arithmetic arithmetic;
};

constexpr Variant kVariants[] = {
    {"base, fast", Precision::kBase, Encoding::kDeltaNibble, Arithmetic::kFast},
    {"base, exact", Precision::kBase, Encoding::kDeltaNibble, Arithmetic::kExact},
    {"FP4 of nibbles, fast", Precision::kFp4, Encoding::kDeltaNibble, Arithmetic::kFast},
    {"FP4 of nibbles, exact", Precision::kFp4, Encoding::kDeltaNibble, Arithmetic::kExact},
    {"FP4 of quintals, fast", Precision::kFp4, Encoding::kDeltaQuintal, Arithmetic::kFast},
};

class Bench {
 public:
  Bench(const Layer& layer, const MoeKernels& kernels, WorkerPool& pool, const Options& options)
      : layer_(layer), kernels_(kernels), pool_(pool), options_(options) {}

  // Calls over all experts of the layer: `tokens` tokens each, every token's experts next in turn
  // where `tokens` is small, drawn at random (as a router spreads them) where `random`.
  Result<Measured> Run(const Variant& variant, size_t tokens, bool random) const {
    constexpr size_t kTopK = 6;
    const LayerGeometry& geometry = layer_.geometry();
    const std::vector<ExpertWeights> experts = layer_.Experts(variant.precision, variant.encoding);
    std::vector<float> x(tokens * geometry.hidden), y(x.size());
    std::mt19937 generator(5);
    for (float& v : x) v = std::normal_distribution<float>()(generator);
    const std::vector<float> weights(tokens * kTopK, 1.0f / kTopK);
    const size_t rotation = geometry.experts / kTopK;
    const size_t calls = random ? 2 : std::max<size_t>(1, rotation / tokens);
    std::vector<int32_t> ids(calls * tokens * kTopK);
    for (size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<int32_t>((random ? generator() : i) % geometry.experts);
    MoeCall call;
    call.geometry = geometry;
    call.activation = {ActivationKind::kSiluGatedClamped, 10, 0};
    call.arithmetic = variant.arithmetic;
    call.token_count = tokens;
    call.top_k = kTopK;
    call.x = x.data();
    call.weights = weights.data();
    call.y = y.data();
    call.experts = experts;
    Measured measured = {variant.name, tokens, 0, 0, MeasureReadRate(pool_, layer_.codes())};
    std::vector<double> seconds;
    for (size_t repetition = 0; repetition < options_.repetitions; ++repetition) {
      measured.bytes = 0;
      const auto start = Clock::now();
      for (size_t c = 0; c < calls; ++c) {
        call.ids = ids.data() + c * tokens * kTopK;
        HP_TRY(CheckMoeCall(call));
        HP_TRY(MoeForward(call, kernels_, pool_));
        measured.bytes += Distinct(call) * layer_.ExpertBytes(variant.precision, variant.encoding);
      }
      const std::chrono::duration<double> elapsed = Clock::now() - start;
      seconds.push_back(elapsed.count() / static_cast<double>(calls));
    }
    measured.bytes /= calls;
    std::sort(seconds.begin(), seconds.end());
    measured.seconds = seconds[seconds.size() / 2];
    return measured;
  }

 private:
  static size_t Distinct(const MoeCall& call) {
    std::vector<int32_t> ids(call.ids, call.ids + call.token_count * call.top_k);
    std::sort(ids.begin(), ids.end());
    return static_cast<size_t>(std::unique(ids.begin(), ids.end()) - ids.begin());
  }

  const Layer& layer_;
  const MoeKernels& kernels_;
  WorkerPool& pool_;
  const Options& options_;
};

void Print(const Measured& m) {
  std::printf(
      "%-24s %4zu tokens  %10.0f us  %8.2f MB  %6.2f of %5.2f GB/s  %5.1f%%  %8.1f tokens/s\n",
      m.name.c_str(), m.tokens, m.seconds * 1e6, static_cast<double>(m.bytes) / 1e6, m.rate() / 1e9,
      m.limit / 1e9, 100 * m.rate() / m.limit, static_cast<double>(m.tokens) / m.seconds);
  std::fflush(stdout);
}

std::string Json(const std::vector<Measured>& all, const MoeKernels& kernels, size_t workers) {
  std::string rows;
  for (const Measured& m : all)
    rows += Text(
        "{}{{\"name\": \"{}\", \"tokens\": {}, \"microseconds\": {:.1f}, \"bytes\": {}, "
        "\"gigabytes_per_second\": {:.2f}, \"read_gigabytes_per_second\": {:.2f}, "
        "\"share_of_read\": {:.3f}, \"tokens_per_second\": {:.1f}}}",
        rows.empty() ? "" : ", ", m.name, m.tokens, m.seconds * 1e6, m.bytes, m.rate() / 1e9,
        m.limit / 1e9, m.rate() / m.limit, static_cast<double>(m.tokens) / m.seconds);
  return Text(
      "{{\"isa\": \"{}\", \"workers\": {}, \"rows\": "
      "[{}]}}\n",
      kernels.name, workers, rows);
}

Result<void> Measure(const Options& options) {
  HP_TRY(CheckResultFile(options.json_path));
  WorkerPool pool(options.workers);
  HP_ASSIGN(const MoeKernels* kernels,
            SelectMoeKernels(options.isa.empty() ? std::nullopt
                                                 : std::optional<std::string_view>(options.isa)));
  const LayerGeometry geometry =
      options.smoke ? LayerGeometry{12, 256, 128, false} : LayerGeometry{256, 4096, 2048, false};
  if (!options.smoke) HP_TRY(BackFreeMemory(uint64_t{7} << 30));
  HP_ASSIGN(const Layer layer, Layer::Make(geometry));
  std::printf("E %u, H %u, I %u, top 6; %s, %zu threads; shares of what memory is read at\n",
              geometry.experts, geometry.hidden, geometry.intermediate, kernels->name,
              pool.worker_count());
  const Bench bench(layer, *kernels, pool, options);
  std::vector<Measured> all;
  for (const Variant& variant : kVariants) {
    for (const size_t tokens : {1, 2, 4, 8}) {
      HP_ASSIGN(all.emplace_back(), bench.Run(variant, tokens, false));
      Print(all.back());
    }
    const double single = all[all.size() - 4].seconds;
    HP_ASSIGN(all.emplace_back(), bench.Run(variant, options.smoke ? 16 : 256, true));
    Print(all.back());
    std::printf("%-24s prefill is %.2f times as fast as single tokens\n", "",
                single * static_cast<double>(all.back().tokens) / all.back().seconds);
  }
  return WriteResultFile(options.json_path, Json(all, *kernels, pool.worker_count()));
}

bool Parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    const bool value = i + 1 < argc;
    if (arg == "--smoke") {
      options.smoke = true;
      options.repetitions = 1;
    } else if (arg == "--repetitions" && value) {
      options.repetitions = std::max(1ul, std::strtoul(argv[++i], nullptr, 10));
    } else if (arg == "--workers" && value) {
      options.workers = std::strtoul(argv[++i], nullptr, 10);
    } else if (arg == "--isa" && value) {
      options.isa = argv[++i];
    } else if (arg == "--json" && value) {
      options.json_path = argv[++i];
    } else {
      std::fprintf(
          stderr,
          "usage: %s [--smoke] [--repetitions N] [--workers N] [--isa NAME] [--json FILE]\n"
          "no such option, or its value is missing: %s\n",
          argv[0], argv[i]);
      return false;
    }
  }
  return true;
}

}  // namespace
}  // namespace hotplane

int main(int argc, char** argv) {
  hotplane::Options options;
  if (!hotplane::Parse(argc, argv, options)) return 2;
  if (const auto done = hotplane::Measure(options); !done) {
    std::fprintf(stderr, "%s\n", done.error().ToString().c_str());
    return 1;
  }
  return 0;
}
