#include "boot/source_rates.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>

#include "base/fault_guard.h"
#include "base/memory.h"
#include "base/units.h"
#include "base/worker_pool.h"
#include "boot/executor.h"
#include "io/whole_reader.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr uint64_t kPieceBytes = 4 * kMiB;
constexpr uint64_t kRingBytes = 128 * kMiB;
constexpr int kPassCount = 3;
// A part of a file is measured in turns of so much: what a turn took out of the page cache is back
// after it.
constexpr uint64_t kTurnBytes = 64 * kMiB;
constexpr uint64_t kDiskBytesMax = kGiB;
constexpr double kDiskSecondsMax = 1;

struct Piece {
  std::byte* to;
  const std::byte* from;
  size_t bytes;
  // In steps that stay in the caches, as the executor copies.
  static void Copy(void* context) {
    constexpr size_t kStepBytes = 16 * kKiB;
    const auto& piece = *static_cast<const Piece*>(context);
    for (size_t at = 0; at < piece.bytes; at += kStepBytes)
      std::memcpy(piece.to + at, piece.from + at, std::min(kStepBytes, piece.bytes - at));
  }
};

Result<double> CopyOnce(WorkerPool& pool, std::span<const std::byte> pages,
                        std::span<std::byte> ring, const std::string& path) {
  const size_t count = (pages.size() + kPieceBytes - 1) / kPieceBytes;
  const auto start = Clock::now();
  HP_TRY(pool.ParallelFor(count, [&](size_t index, size_t) -> Result<void> {
    const size_t offset = index * kPieceBytes;
    Piece piece = {ring.data() + offset % ring.size(), pages.data() + offset,
                   std::min<size_t>(kPieceBytes, pages.size() - offset)};
    if (!FaultGuardInstalled()) {
      Piece::Copy(&piece);
      return {};
    }
    if (CallGuarded({piece.from, piece.bytes}, &Piece::Copy, &piece)) return {};
    return Fail(PagesGone(path, offset, piece.bytes));
  }));
  return static_cast<double>(pages.size()) / SecondsSince(start);
}

// One way of reading, over the parts, in turns.
class DiskRun {
 public:
  DiskRun(Env& env, bool direct, const CancelToken* cancel)
      : env_(env), direct_(direct), cancel_(cancel) {}

  // 0: not this way.
  Result<double> Measure(std::span<const FilePart> parts) {
    HP_ASSIGN(std::unique_ptr<AsyncReader> reader, env_.NewReader(ReaderOptions{}));
    HP_ASSIGN(memory_, HugeBuffer::Allocate(kTurnBytes));
    TouchPages(memory_.span());
    reader_ = std::make_unique<WholeReader>(std::move(reader));
    for (const FilePart& part : parts) {
      HP_TRY(MeasurePart(part));
      if (refused_ || Over()) break;
    }
    return refused_ || seconds_ == 0 ? 0 : static_cast<double>(bytes_) / seconds_;
  }

 private:
  bool Over() const { return bytes_ >= kDiskBytesMax || seconds_ >= kDiskSecondsMax; }

  Result<void> MeasurePart(const FilePart& part) {
    HP_ASSIGN(const std::unique_ptr<File> file, env_.Open(part.path, OpenMode::kRead));
    std::unique_ptr<File> direct;
    if (direct_) {
      Result<std::unique_ptr<File>> opened = env_.Open(part.path, OpenMode::kReadDirect);
      refused_ = !opened && opened.error().error_number() == EINVAL;
      if (refused_) return {};
      if (!opened) return Fail(std::move(opened).error());
      direct = *std::move(opened);
    }
    for (uint64_t at = 0; at < part.bytes && !Over(); at += kTurnBytes) {
      if (cancel_ != nullptr) HP_TRY(cancel_->Check());
      const uint64_t bytes = std::min(kTurnBytes, part.bytes - at) / kPageBytes * kPageBytes;
      if (bytes == 0) return {};
      HP_TRY(Turn(*file, direct.get(), part.offset + at, bytes));
      if (refused_) return {};
    }
    return {};
  }

  Result<void> Turn(File& file, File* direct, uint64_t offset, uint64_t bytes) {
    const uint64_t cached = file.CachedBytes(offset, bytes).value_or(0);
    if (!direct_) {
      file.DropCache(offset, bytes);
      refused_ = file.CachedBytes(offset, bytes).value_or(0) > bytes / 2;
      if (refused_) return {};
    }
    const auto start = Clock::now();
    HP_TRY(Read(file, direct, offset, bytes));
    seconds_ += SecondsSince(start);
    bytes_ += bytes;
    if (!direct_ && cached == 0) file.DropCache(offset, bytes);
    return {};
  }

  // No read is in flight afterwards, after a failure neither: the files end.
  Result<void> Read(File& file, File* direct, uint64_t offset, uint64_t bytes) {
    std::vector<WholeReadEnd> ended;
    Result<void> read;
    uint64_t next = 0;
    while ((read && next < bytes) || reader_->in_flight() > 0) {
      for (; read && next < bytes && !reader_->full(); next += kReadRequestBytes) {
        const uint64_t count = std::min<uint64_t>(kReadRequestBytes, bytes - next);
        reader_->Start({.file = &file,
                        .direct = direct,
                        .offset = offset + next,
                        .destination = memory_.span().subspan(next, count),
                        .needed_bytes = count});
      }
      ended.clear();
      if (Result<void> collected = reader_->Collect(std::chrono::milliseconds(20), &ended);
          !collected) {
        reader_ = nullptr;  // it waits for what is in flight
        return collected;
      }
      for (const WholeReadEnd& end : ended)
        if (read && !end.result) read = end.result;
    }
    return read;
  }

  Env& env_;
  const bool direct_;
  const CancelToken* const cancel_;
  HugeBuffer memory_;
  std::unique_ptr<WholeReader> reader_;  // after the memory that it reads to
  uint64_t bytes_ = 0;
  double seconds_ = 0;
  bool refused_ = false;
};

}  // namespace

Result<std::vector<CopyRate>> MeasureCopyRates(std::span<const std::byte> pages, size_t threads_max,
                                               const std::string& path, const CancelToken* cancel) {
  std::vector<CopyRate> rates;
  const size_t ring_bytes = RoundUp(std::min<uint64_t>(kRingBytes, pages.size()), kPieceBytes);
  HP_ASSIGN(const HugeBuffer ring, HugeBuffer::Allocate(std::max<size_t>(ring_bytes, kPieceBytes)));
  TouchPages(ring.span());
  for (size_t threads = 1; !pages.empty(); threads = std::min(2 * threads, threads_max)) {
    WorkerPool pool(threads);
    CopyRate& rate = rates.emplace_back(CopyRate{threads, 0});
    for (int pass = 0; pass < kPassCount; ++pass) {
      if (cancel != nullptr) HP_TRY(cancel->Check());
      HP_ASSIGN(const double once, CopyOnce(pool, pages, ring.span(), path));
      rate.bytes_per_second = std::max(rate.bytes_per_second, once);
    }
    if (threads >= threads_max) break;
  }
  return rates;
}

Result<DiskRates> MeasureDiskRates(Env& env, std::span<const FilePart> parts,
                                   const CancelToken* cancel) {
  DiskRates rates;
  HP_ASSIGN(rates.direct, DiskRun(env, true, cancel).Measure(parts));
  HP_ASSIGN(rates.buffered, DiskRun(env, false, cancel).Measure(parts));
  return rates;
}

}  // namespace hotplane
