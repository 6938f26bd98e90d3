#include "boot/read_ahead.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <numeric>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/format_text.h"
#include "base/log.h"
#include "base/trace.h"
#include "base/units.h"

namespace hotplane {
namespace {

// How long a cancellation may go unnoticed.
constexpr std::chrono::milliseconds kPollTime{20};
// Twice what a reader of the default depth has in flight: one half on its way, one that waits for
// the workers.
constexpr uint64_t kAheadBytes = 2 * ReaderOptions{}.depth * kReadRequestBytes;
// More pieces than requests in flight are of no use: each is one at least.
constexpr size_t kAheadCountMax = 2 * ReaderOptions{}.depth;
// The piece that is read and the one that is next.
constexpr size_t kAheadCountMin = 2;

uint64_t PageBegin(uint64_t offset) { return offset / kPageBytes * kPageBytes; }

}  // namespace

// A tensor begins and ends anywhere in its pages. Runs of neighbours take less.
uint64_t ReadAhead::SlotBytes(const SourcePiece& piece) {
  uint64_t bytes = 0;
  for (const Tensor* tensor : piece) bytes += RoundUp(tensor->bytes, kPageBytes) + kPageBytes;
  return bytes;
}

size_t ReadAhead::AheadCountMax(uint64_t slot_bytes) {
  if (slot_bytes == 0) return 0;
  return std::clamp<size_t>((kAheadBytes + slot_bytes - 1) / slot_bytes, kAheadCountMin,
                            kAheadCountMax);
}

ReadAhead::ReadAhead(const Checkpoint& checkpoint, const ReadAheadOptions& options)
    : checkpoint_(checkpoint), options_(options) {}

Result<std::unique_ptr<ReadAhead>> ReadAhead::Create(const Checkpoint& checkpoint,
                                                     const ReadAheadOptions& options) {
  HP_CHECK(options.slot_bytes % kPageBytes == 0 && options.worker_count > 0);
  std::unique_ptr<ReadAhead> reads(new ReadAhead(checkpoint, options));
  const size_t slot_count = options.worker_count + options.ahead_count;
  HP_ASSIGN(reads->memory_, HugeBuffer::Allocate(slot_count * options.slot_bytes));
  for (size_t slot = slot_count; slot-- > 0;) reads->free_slots_.push_back(slot);
  if (options.ahead_count > 0) reads->StartDriver();
  return reads;
}

ReadAhead::~ReadAhead() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

// Without a reader or a thread the takers read for themselves.
void ReadAhead::StartDriver() {
  Result<std::unique_ptr<AsyncReader>> reader = checkpoint_.env().NewReader(ReaderOptions{});
  if (!reader) {
    Log(LogLevel::kWarning, "nothing is read ahead: {}", reader.error().what());
    return;
  }
  reader_text_ = (*reader)->name();
  if (!(*reader)->reason().empty()) reader_text_ += Text(" ({})", (*reader)->reason());
  reader_ = std::make_unique<WholeReader>(*std::move(reader));
  driving_ = true;
  try {
    thread_ = std::thread([this] { Drive(); });
  } catch (const std::system_error& error) {
    driving_ = false;
    Log(LogLevel::kWarning, "nothing is read ahead: {}", error.what());
  }
}

// Tensors whose pages touch are read together.
void ReadAhead::PlaceTensors(Piece& piece) {
  std::vector<size_t> order(piece.tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&piece](size_t a, size_t b) {
    const Tensor& x = *piece.tensors[a];
    const Tensor& y = *piece.tensors[b];
    return std::tie(x.file, x.offset) < std::tie(y.file, y.offset);
  });
  piece.run_of.resize(order.size());
  uint64_t place = 0;
  for (const size_t i : order) {
    const Tensor& tensor = *piece.tensors[i];
    const uint64_t begin = PageBegin(tensor.offset);
    const bool next = !piece.runs.empty() && piece.runs.back().file == tensor.file &&
                      begin <= RoundUp(piece.runs.back().end, kPageBytes);
    if (!next) {
      if (!piece.runs.empty())
        place += RoundUp(piece.runs.back().end, kPageBytes) - piece.runs.back().begin;
      piece.runs.push_back({.file = tensor.file, .begin = begin, .end = begin, .place = place});
    }
    piece.runs.back().end = tensor.offset + tensor.bytes;
    piece.run_of[i] = piece.runs.size() - 1;
  }
}

uint64_t ReadAhead::Add(std::vector<SourcePiece> pieces) {
  const std::lock_guard lock(mutex_);
  const uint64_t first = piece_count_;
  for (SourcePiece& tensors : pieces) {
    HP_CHECK(!tensors.empty() && SlotBytes(tensors) <= options_.slot_bytes);
    Piece piece;
    piece.tensors = std::move(tensors);
    PlaceTensors(piece);
    pieces_.emplace_hint(pieces_.end(), piece_count_++, std::move(piece));
  }
  wake_.notify_one();
  return first;
}

void ReadAhead::Drop(uint64_t first, uint64_t count) {
  const std::lock_guard lock(mutex_);
  for (auto piece = pieces_.lower_bound(first);
       piece != pieces_.end() && piece->first < first + count;) {
    const auto dropped = piece++;
    if (dropped->second.state == State::kReading) {
      dropped->second.dropped = true;
    } else {
      Forget(dropped);
    }
  }
}

void ReadAhead::Forget(Pieces::iterator piece) {
  if (piece->second.state != State::kWaiting) free_slots_.push_back(piece->second.slot);
  pieces_.erase(piece);
  wake_.notify_one();
  there_.notify_all();
}

void ReadAhead::GiveSlot(Pieces::iterator piece) {
  piece->second.slot = free_slots_.back();
  piece->second.state = State::kReading;
  free_slots_.pop_back();
}

std::byte* ReadAhead::SlotOf(const Piece& piece) const {
  return memory_.data() + piece.slot * options_.slot_bytes;
}

Result<std::vector<std::span<std::byte>>> ReadAhead::Take(uint64_t number) {
  Lock lock(mutex_);
  const auto found = pieces_.find(number);
  HP_CHECK(found != pieces_.end());
  Piece& piece = found->second;
  std::optional<TraceSpan> span;
  if (piece.state != State::kThere) span.emplace("wait", kNoLayer, 0, "checkpoint");
  if (piece.state == State::kWaiting) {
    urgent_.push_back(number);
    wake_.notify_one();
  }
  while (piece.state != State::kThere) {
    if (!driving_ && piece.state == State::kWaiting && !free_slots_.empty()) {
      GiveSlot(found);
      EndReading(found);
      break;
    }
    if (options_.cancel != nullptr) HP_TRY(options_.cancel->Check());
    there_.wait_for(lock, kPollTime);
  }
  span.reset();
  lock.unlock();
  HP_TRY(ReadLeft(piece));
  std::vector<std::span<std::byte>> views;
  for (size_t i = 0; i < piece.tensors.size(); ++i) {
    const Run& run = piece.runs[piece.run_of[i]];
    const Tensor& tensor = *piece.tensors[i];
    views.emplace_back(SlotOf(piece) + run.place + (tensor.offset - run.begin), tensor.bytes);
  }
  return views;
}

Result<void> ReadAhead::ReadLeft(const Piece& piece) {
  for (size_t i = 0; i < piece.tensors.size(); ++i) {
    const Run& run = piece.runs[piece.run_of[i]];
    if (!run.left_to_taker) continue;
    const Tensor& tensor = *piece.tensors[i];
    const TraceSpan span("read", kNoLayer, tensor.bytes, "checkpoint");
    HP_TRY(checkpoint_.Read(
        tensor, 0, {SlotOf(piece) + run.place + (tensor.offset - run.begin), tensor.bytes}));
  }
  return {};
}

uint64_t ReadAhead::bytes_ahead() const {
  const std::lock_guard lock(mutex_);
  return bytes_ahead_;
}

std::string ReadAhead::path() const {
  const std::lock_guard lock(mutex_);
  if (options_.ahead_count == 0)
    return "by the workers (the staging limit leaves no room to read ahead)";
  if (bytes_ahead_ == 0)
    return driving_ ? "from the page cache" : "by the workers (nothing could be read ahead)";
  std::string way = "O_DIRECT";
  if (options_.shared)
    way = "through the page cache (builders of other ranks read the same)";
  else if (!direct_refusal_.empty())
    way = Text("through the page cache ({})", direct_refusal_);
  return Text("{} ahead, {}, {}", FormatBytes(options_.ahead_count * options_.slot_bytes),
              reader_text_, way);
}

// What somebody waits for comes first, then what is next in order. Slots cannot all be held by
// pieces that wait for workers that wait for slots: those were next in order when they got theirs,
// so everything before them has been taken.
ReadAhead::Pieces::iterator ReadAhead::NextToRead() {
  if (free_slots_.empty()) return pieces_.end();
  const auto waits = [this](Pieces::iterator piece) {
    return piece != pieces_.end() && piece->second.state == State::kWaiting;
  };
  while (!urgent_.empty()) {
    if (const auto piece = pieces_.find(urgent_.front()); waits(piece)) return piece;
    urgent_.pop_front();
  }
  while (next_ahead_ < piece_count_) {
    if (const auto piece = pieces_.find(next_ahead_); waits(piece)) return piece;
    ++next_ahead_;
  }
  return pieces_.end();
}

void ReadAhead::EndReading(Pieces::iterator piece) {
  piece->second.state = State::kThere;
  if (piece->second.dropped) return Forget(piece);
  for (size_t i = 0; i < piece->second.tensors.size(); ++i)
    if (!piece->second.runs[piece->second.run_of[i]].left_to_taker)
      bytes_ahead_ += piece->second.tensors[i]->bytes;
  there_.notify_all();
}

// One thread from here on.
void ReadAhead::Drive() {
  NameTraceThread("read ahead", 0);
  Lock lock(mutex_);
  try {
    DriveUntilStopped(lock);
  } catch (const std::exception& error) {
    if (!lock.owns_lock()) lock.lock();
    Log(LogLevel::kWarning, "nothing is read ahead any more: {}", error.what());
  }
  lock.unlock();
  // Ends what is in flight before the memory under it can go to others.
  reader_.reset();
  lock.lock();
  driving_ = false;
  for (auto piece = pieces_.begin(); piece != pieces_.end();) {
    const auto reading = piece++;
    if (reading->second.state != State::kReading) continue;
    for (Run& run : reading->second.runs) run.left_to_taker = true;
    EndReading(reading);
  }
  there_.notify_all();
}

void ReadAhead::DriveUntilStopped(Lock& lock) {
  std::vector<WholeReadEnd> ended;
  while (!stopping_) {
    while (ready_.size() < ReaderOptions{}.depth) {
      const auto piece = NextToRead();
      if (piece == pieces_.end()) break;
      GiveSlot(piece);
      lock.unlock();
      ListRequests(piece);
      lock.lock();
      if (piece->second.reads_left == 0) EndReading(piece);
    }
    StartRequests();
    if (reader_->in_flight() == 0) {
      wake_.wait(lock, [this] { return stopping_ || NextToRead() != pieces_.end(); });
      continue;
    }
    lock.unlock();
    ended.clear();
    Result<void> collected;
    {
      TraceSpan span("read", kNoLayer, 0, "checkpoint");
      collected = reader_->Collect(kPollTime, &ended);
      uint64_t bytes = 0;
      for (const WholeReadEnd& end : ended) bytes += end.bytes;
      span.set_bytes(bytes);
    }
    lock.lock();
    for (const WholeReadEnd& end : ended) Ended(end);
    if (collected) continue;
    Log(LogLevel::kWarning, "nothing is read ahead any more: {}", collected.error().what());
    return;
  }
}

void ReadAhead::ListRequests(Pieces::iterator piece) {
  for (size_t r = 0; r < piece->second.runs.size(); ++r) {
    Run& run = piece->second.runs[r];
    const Result<File*> file = checkpoint_.OpenShard(run.file, OpenMode::kRead);
    run.left_to_taker = !file || IsCached(**file, run.begin, run.end - run.begin);
    if (run.left_to_taker) continue;
    const uint64_t end = RoundUp(run.end, kPageBytes);
    for (uint64_t at = run.begin; at < end; at += kReadRequestBytes) {
      ready_.push_back({piece, r, at, std::min(kReadRequestBytes, end - at)});
      ++piece->second.reads_left;
    }
  }
}

File* ReadAhead::DirectShard(uint32_t file) {
  if (options_.shared || refused_.contains(file)) return nullptr;
  const Result<File*> direct = checkpoint_.OpenShard(file, OpenMode::kReadDirect);
  if (direct) return *direct;
  refused_.insert(file);
  direct_refusal_ = direct.error().error_number() == EINVAL ? "the file system refuses O_DIRECT"
                                                            : direct.error().what();
  return nullptr;
}

void ReadAhead::StartRequests() {
  while (!reader_->full() && !ready_.empty()) {
    const Request request = ready_.front();
    ready_.pop_front();
    Piece& piece = request.piece->second;
    const Run& run = piece.runs[request.run];
    if (piece.dropped || run.left_to_taker) {
      if (--piece.reads_left == 0) EndReading(request.piece);
      continue;
    }
    const uint64_t tag = next_tag_++;
    running_.emplace(tag, request);
    reader_->Start(
        {.file = checkpoint_.OpenShard(run.file, OpenMode::kRead).value(),
         .direct = DirectShard(run.file),
         .offset = request.offset,
         .destination = {SlotOf(piece) + run.place + (request.offset - run.begin), request.bytes},
         .needed_bytes = std::min(request.bytes, run.end - request.offset),
         .tag = tag});
  }
}

// What failed is read again by who takes it, who tells what is wrong with it.
void ReadAhead::Ended(const WholeReadEnd& end) {
  const auto running = running_.find(end.tag);
  HP_CHECK(running != running_.end());
  const Request request = running->second;
  running_.erase(running);
  Piece& piece = request.piece->second;
  if (!end.result) piece.runs[request.run].left_to_taker = true;
  if (--piece.reads_left == 0) EndReading(request.piece);
}

Result<std::vector<std::span<std::byte>>> TakenPieces::Next() {
  HP_CHECK(next_ < end_);
  if (held_) reads_.Drop(next_ - 1, 1);
  held_ = true;
  return reads_.Take(next_++);
}

}  // namespace hotplane
