#include "scoring.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <numeric>
#include <span>
#include <sstream>
#include <thread>

#include "session.h"

namespace tinylm {
namespace {

struct Window {
  Result<void> done;
  double loss = 0;  // sum
  std::vector<uint8_t> predictions;
  std::vector<double> routed;
};

// -log softmax(logits)[byte], in double: what is measured are differences of 1e-4.
double Loss(const float* logits, uint8_t byte) {
  const float most = *std::max_element(logits, logits + kVocabulary);
  double sum = 0;
  for (size_t i = 0; i < kVocabulary; ++i) sum += std::exp(static_cast<double>(logits[i] - most));
  return std::log(sum) - static_cast<double>(logits[byte] - most);
}

Window ScoreWindow(Session& session, std::span<const uint8_t> bytes, const Config& config) {
  Window window;
  window.routed.resize(config.layers * config.experts);
  std::vector<float> logits;
  session.Restart();
  session.CountRouting(&window.routed);
  window.done = session.Forward(bytes, logits);
  if (!window.done) return window;
  for (size_t i = 0; i + 1 < bytes.size(); ++i) {
    const float* row = &logits[i * kVocabulary];
    window.loss += Loss(row, bytes[i + 1]);
    window.predictions.push_back(
        static_cast<uint8_t>(std::max_element(row, row + kVocabulary) - row));
  }
  return window;
}

}  // namespace

Result<std::string> ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) {
    return Failure(HOTPLANE_SYSTEM, "the text cannot be read", path, "a file of bytes",
                   std::strerror(errno));
  }
  if (text.view().size() < kWindowBytes) {
    return Failure(HOTPLANE_USAGE, "the text is too short to be scored", path,
                   std::to_string(kWindowBytes) + " bytes or more",
                   std::to_string(text.view().size()));
  }
  return text.str();
}

Result<Scoring> Score(const Model& model, const Experts& experts, const std::string& text,
                      uint32_t threads) {
  std::vector<Window> windows(text.size() / kWindowBytes);
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    Session session(model, experts, kWindowBytes);
    for (size_t w = next++; w < windows.size(); w = next++) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(text.data()) + w * kWindowBytes;
      windows[w] = ScoreWindow(session, {bytes, kWindowBytes}, model.config);
    }
  };
  std::vector<std::thread> others;
  for (uint32_t i = 1; i < threads && i < windows.size(); ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();

  Scoring scoring;
  scoring.routed.resize(model.config.layers * model.config.experts);
  for (const Window& window : windows) {
    if (!window.done) return Failure(window.done.error());
    scoring.loss += window.loss;
    scoring.predictions.insert(scoring.predictions.end(), window.predictions.begin(),
                               window.predictions.end());
    for (size_t i = 0; i < scoring.routed.size(); ++i) scoring.routed[i] += window.routed[i];
  }
  scoring.loss /= static_cast<double>(scoring.predictions.size());
  if (!std::isfinite(scoring.loss)) {
    return Failure(HOTPLANE_DATA, "the model's loss is not a number", {}, "finite weights");
  }
  return scoring;
}

double Agreement(const Scoring& a, const Scoring& b) {
  const size_t same =
      std::inner_product(a.predictions.begin(), a.predictions.end(), b.predictions.begin(),
                         size_t{0}, std::plus<>(), std::equal_to<>());
  return static_cast<double>(same) / static_cast<double>(a.predictions.size());
}

Precisions MixedPrecisions(const Config& config, const std::vector<double>& routed, double share) {
  Precisions precisions(routed.size(), HOTPLANE_PRECISION_BASE);
  for (size_t layer = 0; layer < config.layers; ++layer) {
    const double* weights = &routed[layer * config.experts];
    std::vector<size_t> order(config.experts);
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return weights[a] > weights[b]; });
    const double wanted = share * std::accumulate(weights, weights + config.experts, 0.0);
    double carried = 0;
    for (const size_t e : order) {
      if (carried >= wanted) break;
      precisions[layer * config.experts + e] = HOTPLANE_PRECISION_FP4;
      carried += weights[e];
    }
  }
  return precisions;
}

}  // namespace tinylm
