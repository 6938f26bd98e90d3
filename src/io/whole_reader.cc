#include "io/whole_reader.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/check.h"
#include "base/format_text.h"
#include "base/units.h"

namespace hotplane {
namespace {

// EAGAIN of an asynchronous read is rare and passes; for ever it is an error.
constexpr int kRetryCountMax = 64;

bool IsAligned(uint64_t offset, std::span<const std::byte> memory) {
  return offset % kPageBytes == 0 && memory.size() % kPageBytes == 0 &&
         reinterpret_cast<uintptr_t>(memory.data()) % kPageBytes == 0;
}

}  // namespace

WholeReader::WholeReader(std::unique_ptr<AsyncReader> reader)
    : reader_(std::move(reader)), running_(reader_->depth()) {
  for (uint64_t slot = 0; slot < running_.size(); ++slot) free_.push_back(slot);
}

void WholeReader::Start(const WholeRead& read) {
  HP_CHECK(!full() && read.needed_bytes > 0 && read.needed_bytes <= read.destination.size());
  const uint64_t slot = free_.back();
  free_.pop_back();
  running_[slot] = {read};
  StartRest(slot);
}

void WholeReader::StartRest(uint64_t slot) {
  Running& running = running_[slot];
  WholeRead& read = running.read;
  const uint64_t offset = read.offset + running.done_bytes;
  const std::span<std::byte> rest = read.destination.subspan(running.done_bytes);
  // Direct reads cannot go on from inside a page.
  if (!IsAligned(offset, rest)) read.direct = nullptr;
  if (read.direct != nullptr) return reader_->Start({read.direct, offset, rest, slot});
  reader_->Start({read.file, offset, rest.first(read.needed_bytes - running.done_bytes), slot});
}

bool WholeReader::Ended(uint64_t slot, IoCount count, Result<void>* result) {
  Running& running = running_[slot];
  WholeRead& read = running.read;
  const uint64_t offset = read.offset + running.done_bytes;
  // Some file systems refuse direct reads only when one comes.
  const bool refused = count.error == EINVAL && read.direct != nullptr;
  if (refused) read.direct = nullptr;
  if (refused || count.error == EINTR ||
      (count.error == EAGAIN && ++running.retries <= kRetryCountMax))
    return false;
  if (count.error != 0) {
    *result =
        Fail(Status::FromErrno(count.error, "cannot read").File(read.file->path()).At(offset));
    return true;
  }
  running.done_bytes += count.bytes;
  if (running.done_bytes >= read.needed_bytes) return true;
  if (count.bytes > 0) return false;
  *result = Fail(Status::Data("the file ends early")
                     .File(read.file->path())
                     .At(offset)
                     .Expected(Text("{} bytes", read.needed_bytes - running.done_bytes))
                     .Found("0 bytes"));
  return true;
}

Result<void> WholeReader::Collect(std::chrono::milliseconds wait,
                                  std::vector<WholeReadEnd>* ended) {
  ends_.clear();
  HP_TRY(reader_->Collect(wait, &ends_));
  for (const ReadEnd& end : ends_) {
    Result<void> result;
    if (!Ended(end.tag, end.count, &result)) {
      StartRest(end.tag);
      continue;
    }
    free_.push_back(end.tag);
    const Running& running = running_[end.tag];
    ended->push_back({running.read.tag, running.done_bytes, std::move(result)});
  }
  return {};
}

}  // namespace hotplane
