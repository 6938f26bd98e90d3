#include "generation.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <span>

#include "session.h"

namespace tinylm {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// One byte by its probability at this temperature. The generator's sequence is the standard's, a
// distribution's would be the library's.
uint8_t Draw(const float* logits, double temperature, std::mt19937_64& random) {
  const float most = *std::max_element(logits, logits + kVocabulary);
  if (temperature == 0) return static_cast<uint8_t>(std::find(logits, logits + 256, most) - logits);
  double weights[kVocabulary];
  double sum = 0;
  for (size_t i = 0; i < kVocabulary; ++i) {
    sum += weights[i] = std::exp(static_cast<double>(logits[i] - most) / temperature);
  }
  double left = std::ldexp(static_cast<double>(random() >> 11), -53) * sum;
  for (size_t i = 0; i + 1 < kVocabulary; ++i) {
    if (left < weights[i]) return static_cast<uint8_t>(i);
    left -= weights[i];
  }
  return kVocabulary - 1;
}

std::span<const uint8_t> Bytes(const std::string& text, size_t from) {
  return {reinterpret_cast<const uint8_t*>(text.data()) + from, text.size() - from};
}

}  // namespace

Result<Generation> Generate(const Model& model, const Experts& experts, const Options& options) {
  const size_t positions = options.prompt.size() + options.tokens;
  if (positions > model.config.positions_max) {
    return Failure(HOTPLANE_USAGE, "prompt and --tokens are more than the model can take", {},
                   std::to_string(model.config.positions_max) + " bytes or less",
                   std::to_string(positions));
  }
  Session session(model, experts, positions);
  std::mt19937_64 random(options.seed);
  std::vector<float> logits;
  std::string text = options.prompt;
  Generation generation;
  Clock::time_point start = Clock::now();
  while (text.size() < positions) {
    if (options.no_cache) session.Restart();
    const Result<void> done = session.Forward(Bytes(text, session.position()), logits);
    if (!done) return Failure(done.error());
    const float* last = logits.data() + logits.size() - kVocabulary;
    if (!std::all_of(last, last + kVocabulary, [](float logit) { return std::isfinite(logit); })) {
      return Failure(HOTPLANE_DATA, "a logit of the model is not a number", {}, "finite weights");
    }
    if (text.size() == options.prompt.size()) {
      generation.prompt_seconds = SecondsSince(start);
      start = Clock::now();
    }
    const uint8_t byte = Draw(last, options.temperature, random);
    if (byte == 0) break;
    text.push_back(static_cast<char>(byte));
  }
  generation.seconds = SecondsSince(start);
  generation.text = text.substr(options.prompt.size());
  return generation;
}

}  // namespace tinylm
