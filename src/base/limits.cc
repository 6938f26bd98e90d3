#include "base/limits.h"

#include <sys/sysinfo.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/memory.h"
#include "base/units.h"

namespace hotplane {
namespace {

constexpr size_t kWindowBytes = 24 * kMiB;
constexpr size_t kPieceBytes = kMiB;
constexpr int kPassCount = 3;

template <typename PerPiece>
double BestRate(WorkerPool& pool, std::span<const std::byte> bytes, const PerPiece& per_piece) {
  using Clock = std::chrono::steady_clock;
  if (bytes.empty()) return 0;
  const size_t piece_bytes = std::min(kPieceBytes, bytes.size());
  const size_t piece_count = bytes.size() / piece_bytes;
  double best = 0;
  for (int pass = 0; pass < kPassCount; ++pass) {
    const auto start = Clock::now();
    (void)pool.ParallelFor(piece_count, [&](size_t index, size_t worker) -> Result<void> {
      per_piece(bytes.subspan(index * piece_bytes, piece_bytes), index, worker);
      return {};
    });
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, static_cast<double>(piece_count * piece_bytes) / seconds);
  }
  return best;
}

// Eight independent sums keep as many loads in flight as the core can.
uint64_t SumWords(std::span<const std::byte> piece) {
  uint64_t sums[8] = {};
  for (size_t i = 0; i + 64 <= piece.size(); i += 64) {
    uint64_t words[8];
    std::memcpy(words, piece.data() + i, sizeof(words));
    for (int lane = 0; lane < 8; ++lane) sums[lane] += words[lane];
  }
  uint64_t sum = 0;
  for (const uint64_t lane : sums) sum += lane;
  return sum;
}

}  // namespace

double MeasureReadRate(WorkerPool& pool, std::span<const std::byte> bytes) {
  std::atomic<uint64_t> sink{0};
  return BestRate(pool, bytes, [&](std::span<const std::byte> piece, size_t, size_t) {
    sink.fetch_xor(SumWords(piece), std::memory_order_relaxed);
  });
}

Result<double> MeasureCopyRate(WorkerPool& pool, std::span<const std::byte> bytes) {
  std::vector<HugeBuffer> windows;
  for (size_t worker = 0; worker < pool.worker_count(); ++worker) {
    HP_ASSIGN(HugeBuffer window, HugeBuffer::Allocate(kWindowBytes));
    std::memset(window.data(), 1, window.size());
    windows.push_back(std::move(window));
  }
  return BestRate(pool, bytes, [&](std::span<const std::byte> piece, size_t index, size_t worker) {
    const size_t offset = index * kPieceBytes % kWindowBytes;
    std::memcpy(windows[worker].data() + offset, piece.data(), piece.size());
  });
}

Result<void> BackFreeMemory(uint64_t bytes) {
  constexpr uint64_t kTouchBytes = 32 * kMiB;
  // Some stays for whoever else needs memory meanwhile.
  struct sysinfo info {};
  if (sysinfo(&info) != 0) return {};
  const uint64_t free_bytes = uint64_t{info.freeram} * info.mem_unit / 16 * 15;
  HP_ASSIGN(const HugeBuffer buffer, HugeBuffer::Allocate(std::min(bytes, free_bytes)));
  WorkerPool pool;
  return pool.ParallelFor((buffer.size() + kTouchBytes - 1) / kTouchBytes, [&](size_t i, size_t) {
    const uint64_t begin = i * kTouchBytes;
    TouchPages(
        buffer.span().subspan(begin, std::min<uint64_t>(kTouchBytes, buffer.size() - begin)));
    return Result<void>();
  });
}

}  // namespace hotplane
