// Source tensors, read from a checkpoint ahead of those who quantize them.
//
// The order in which pieces will be taken is known, and there is memory for some more of them than
// are worked on: one thread keeps the disk busy with those to come, past the page cache, while the
// workers quantize those that have come. What is in the page cache when its turn comes is left to
// the worker that takes it, and so is whatever could not be read ahead: its reads tell the errors.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/cancel.h"
#include "base/memory.h"
#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "io/whole_reader.h"

namespace hotplane {

// Tensors that are needed in memory together; not empty.
using SourcePiece = std::vector<const Tensor*>;

struct ReadAheadOptions {
  uint64_t slot_bytes = 0;  // SlotBytes of the largest piece
  size_t worker_count = 1;  // that take pieces, one each at a time
  size_t ahead_count = 0;   // pieces that may be in memory beyond theirs; 0: nothing is read ahead
  bool shared = false;      // other processes read the same bytes meanwhile: through the page cache
  const CancelToken* cancel = nullptr;
};

// Thread-safe.
class ReadAhead {
 public:
  // Memory that a piece takes: whole pages, for direct reads.
  static uint64_t SlotBytes(const SourcePiece& piece);
  // How many slots beyond the workers' keep a disk busy, where there is memory for them.
  static size_t AheadCountMax(uint64_t slot_bytes);

  // kCapacity when the memory is refused. `checkpoint` outlives it.
  static Result<std::unique_ptr<ReadAhead>> Create(const Checkpoint& checkpoint,
                                                   const ReadAheadOptions& options);
  // REQUIRES that nobody holds a piece. Returns after the last read has ended.
  ~ReadAhead();

  // Appends pieces, in the order in which they will be taken; the number of the first one, the
  // others follow. Tensors outlive their piece. Whoever is at a piece has taken those before it, or
  // somebody else works on them: a piece that nobody takes must be dropped, or the others wait.
  uint64_t Add(std::vector<SourcePiece> pieces);
  // Nobody takes what is left of these pieces, or uses what was taken.
  void Drop(uint64_t first, uint64_t count);
  // Waits until the piece is in memory, and reads what was not read ahead: its tensors' bytes, in
  // the order of the piece, until it is dropped. As Checkpoint::Read; kInterrupted.
  Result<std::vector<std::span<std::byte>>> Take(uint64_t number);

  std::span<std::byte> memory() const { return memory_.span(); }  // where all pieces are
  uint64_t bytes_ahead() const;  // of tensors, that were read ahead
  // How pieces were read so far, and why so: "64 MiB ahead, io_uring, O_DIRECT".
  std::string path() const;

 private:
  // Pages of one file with tensors in them.
  struct Run {
    uint32_t file = 0;
    uint64_t begin = 0;  // a multiple of the page size
    uint64_t end = 0;    // of the last tensor
    uint64_t place = 0;  // in the slot
    bool left_to_taker = true;
  };
  enum class State : uint8_t { kInvalid = 0, kWaiting, kReading, kThere };
  struct Piece {
    SourcePiece tensors;
    std::vector<size_t> run_of;  // by tensor
    std::vector<Run> runs;
    State state = State::kWaiting;
    size_t slot = 0;          // unless kWaiting
    uint64_t reads_left = 0;  // of kReading: not begun or not ended
    bool dropped = false;     // while it was read
  };
  using Pieces = std::map<uint64_t, Piece>;
  struct Request {
    Pieces::iterator piece;
    size_t run;
    uint64_t offset;  // in the file
    uint64_t bytes;   // whole pages
  };
  using Lock = std::unique_lock<std::mutex>;

  ReadAhead(const Checkpoint& checkpoint, const ReadAheadOptions& options);
  static void PlaceTensors(Piece& piece);
  void StartDriver();
  void Drive();
  void DriveUntilStopped(Lock& lock);
  // All of these with the mutex held.
  Pieces::iterator NextToRead();
  void GiveSlot(Pieces::iterator piece);
  void Forget(Pieces::iterator piece);
  void EndReading(Pieces::iterator piece);
  void StartRequests();
  File* DirectShard(uint32_t file);  // null: refused
  void Ended(const WholeReadEnd& end);
  // Without it, by the driver: decides what of the piece is read ahead, and lists its requests.
  void ListRequests(Pieces::iterator piece);
  std::byte* SlotOf(const Piece& piece) const;
  Result<void> ReadLeft(const Piece& piece);

  const Checkpoint& checkpoint_;
  const ReadAheadOptions options_;
  HugeBuffer memory_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;   // the driver: a slot or a piece
  std::condition_variable there_;  // takers: a piece is there, or a slot where nobody reads ahead
  Pieces pieces_;
  std::vector<size_t> free_slots_;
  std::deque<uint64_t> urgent_;  // pieces that somebody waits for
  uint64_t next_ahead_ = 0;
  uint64_t piece_count_ = 0;
  uint64_t bytes_ahead_ = 0;
  std::string reader_text_;
  std::string direct_refusal_;
  bool driving_ = false;
  bool stopping_ = false;

  // The driver's own.
  std::unique_ptr<WholeReader> reader_;
  std::deque<Request> ready_;            // not begun
  std::map<uint64_t, Request> running_;  // by tag
  std::set<uint32_t> refused_;           // shards that cannot be opened for direct reads
  uint64_t next_tag_ = 0;
  std::thread thread_;
};

// The pieces of one step, taken in order, one at a time. Gives back what is left when destroyed.
// Not thread-safe.
class TakenPieces {
 public:
  // `reads` outlives it.
  TakenPieces(ReadAhead& reads, uint64_t first, uint64_t count)
      : reads_(reads), next_(first), end_(first + count) {}
  ~TakenPieces() { reads_.Drop(held_ ? next_ - 1 : next_, end_ - next_ + (held_ ? 1 : 0)); }
  TakenPieces(const TakenPieces&) = delete;
  TakenPieces& operator=(const TakenPieces&) = delete;

  // Gives back the piece before. The tensors' bytes, in the order of the piece.
  Result<std::vector<std::span<std::byte>>> Next();

 private:
  ReadAhead& reads_;
  uint64_t next_;
  const uint64_t end_;
  bool held_ = false;  // next_ - 1
};

}  // namespace hotplane
