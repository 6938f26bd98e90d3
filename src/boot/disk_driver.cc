// The disk side of the executor.
#include <algorithm>
#include <cerrno>

#include "base/check.h"
#include "base/log.h"
#include "base/units.h"
#include "boot/executor_state.h"

namespace hotplane {
namespace {

// How long a cancellation may go unnoticed.
constexpr std::chrono::milliseconds kPollTime{20};
// How soon to ask again for memory to stage in: the disk has others' requests to go on with.
constexpr std::chrono::milliseconds kStageTime{1};
// EAGAIN of an asynchronous read is rare and passes; for ever it is an error.
constexpr int kRetryCountMax = 64;

bool IsAligned(uint64_t offset, const std::byte* address, uint64_t bytes) {
  return offset % kPageBytes == 0 && bytes % kPageBytes == 0 &&
         reinterpret_cast<uintptr_t>(address) % kPageBytes == 0;
}

}  // namespace

DiskDriver::DiskDriver(Executor::State& state) : state_(state) {}

Result<void> DiskDriver::Prepare() {
  direct_files_.resize(state_.extents.size());
  std::string direct_refused;
  for (size_t i = 0; i < state_.extents.size(); ++i) {
    const ExtentSource source = state_.sources[i];
    if (!state_.options.bypass_cache) break;
    if (source != ExtentSource::kDiskDirect && source != ExtentSource::kBoth) continue;
    Result<std::unique_ptr<File>> file =
        state_.options.env->Open(state_.extents[i].file->path(), OpenMode::kReadDirect);
    if (file) {
      direct_files_[i] = *std::move(file);
    } else if (file.error().error_number() == EINVAL) {
      direct_refused = "the file system refuses O_DIRECT";
      if (source == ExtentSource::kDiskDirect) state_.sources[i] = ExtentSource::kDiskBuffered;
    } else {
      return Fail(std::move(file).error());
    }
  }
  HP_ASSIGN(reader_, state_.options.env->NewReader(ReaderOptions{}));
  running_.resize(reader_->depth());
  for (uint64_t tag = 0; tag < reader_->depth(); ++tag) free_tags_.push_back(tag);
  const bool direct = state_.options.bypass_cache && direct_refused.empty();
  state_.disk_path = Text("{}, {}, {} requests of {}", reader_->name(),
                          direct ? "O_DIRECT" : "through the page cache", reader_->depth(),
                          FormatBytes(kRequestBytes));
  if (!reader_->reason().empty()) state_.disk_path += Text(" ({})", reader_->reason());
  if (!direct_refused.empty()) state_.disk_path += Text(" ({})", direct_refused);
  return {};
}

bool DiskDriver::CanBeDirect(const Unit& unit, const std::byte* staged) const {
  return direct_files_[unit.extent] != nullptr && IsAligned(unit.offset, staged, unit.bytes);
}

File& DiskDriver::FileFor(const Request& request) const {
  const size_t extent = state_.units[request.unit].extent;
  return request.direct ? *direct_files_[extent] : *state_.extents[extent].file;
}

// Cuts the next disk unit into requests; false when there is none, or no memory to stage it in now.
bool DiskDriver::NextUnitToStage() {
  if (next_disk_unit_ == state_.disk_units.size()) return false;
  const size_t index = state_.disk_units[next_disk_unit_];
  Unit& unit = state_.units[index];
  unit.staged = state_.options.device->Stage(state_.Destination(unit), unit.bytes);
  stage_refused_ = unit.staged == nullptr;
  if (stage_refused_) return false;
  ++next_disk_unit_;
  bool fresh = false;
  {
    const std::lock_guard lock(state_.mutex);
    fresh = state_.options.fresh_destinations && state_.next_fresh_unit < next_disk_unit_;
    if (fresh) state_.next_fresh_unit = next_disk_unit_;
    state_.staged_unit_count = next_disk_unit_;
  }
  state_.wake.notify_one();
  // Nobody had time to do it: page faults in the middle of a request would cost more.
  if (fresh) state_.Populate(unit);
  const bool direct = CanBeDirect(unit, unit.staged);
  for (uint64_t at = 0; at < unit.bytes; at += kRequestBytes) {
    const uint64_t bytes = std::min(kRequestBytes, unit.bytes - at);
    ready_.push_back({index, unit.offset + at, {unit.staged + at, bytes}, direct});
    ++unit.requests_left;
  }
  return true;
}

void DiskDriver::StartRequest(Request request) {
  const uint64_t tag = free_tags_.back();
  free_tags_.pop_back();
  running_[tag] = request;
  reader_->Start({&FileFor(request), request.offset, request.destination, tag});
}

void DiskDriver::StartRequests() {
  while (!free_tags_.empty() && (!ready_.empty() || NextUnitToStage())) {
    const Request request = ready_.front();
    ready_.pop_front();
    StartRequest(request);
  }
}

// The rest of a request of which the first `done_bytes` are there.
Result<void> DiskDriver::Continue(Request request, size_t done_bytes) {
  request.offset += done_bytes;
  request.destination = request.destination.subspan(done_bytes);
  // Direct reads cannot go on from inside a page.
  if (!IsAligned(request.offset, request.destination.data(), request.destination.size()))
    request.direct = false;
  ready_.push_front(request);
  return {};
}

Result<void> DiskDriver::Ended(Request request, IoCount count) {
  Unit& unit = state_.units[request.unit];
  const std::string& path = FileFor(request).path();
  if (count.error == EINTR) return Continue(request, 0);
  if (count.error == EAGAIN && ++request.retries <= kRetryCountMax) return Continue(request, 0);
  if (count.error == EINVAL && request.direct) {
    // Some file systems refuse direct reads only when one comes.
    request.direct = false;
    return Continue(request, 0);
  }
  if (count.error != 0)
    return Fail(Status::FromErrno(count.error, "cannot read").File(path).At(request.offset));
  if (count.bytes == 0)
    return Fail(Status::Data("the file ends early")
                    .File(path)
                    .At(request.offset)
                    .Expected(Text("{} bytes", request.destination.size()))
                    .Found("0 bytes"));
  if (count.bytes < request.destination.size()) return Continue(request, count.bytes);
  if (--unit.requests_left > 0) return {};
  ++units_landed_;
  state_.Landed(request.unit);
  return {};
}

void DiskDriver::Run() {
  NameTraceThread("disk", 0);
  Result<void> ran = Executor::State::NothingThrown([this] {
    Drive();
    return Result<void>();
  });
  if (!ran) state_.Fail(state_.disk_units[units_landed_], std::move(ran).error());
  // Ends what is in flight before the memory under it can go.
  reader_.reset();
}

void DiskDriver::Drive() {
  std::vector<ReadEnd> ended;
  while (units_landed_ < state_.disk_units.size() && !state_.Failed()) {
    size_t unit = state_.disk_units[units_landed_];
    Result<void> result;
    if (state_.options.cancel != nullptr) result = state_.options.cancel->Check();
    if (result) {
      StartRequests();
      ended.clear();
      TraceSpan span("read", state_.extents[state_.units[unit].extent].trace_layer, 0, "disk");
      result = reader_->Collect(stage_refused_ ? kStageTime : kPollTime, &ended);
      uint64_t bytes = 0;
      for (const ReadEnd& end : ended) bytes += end.count.bytes;
      span.set_bytes(bytes);
    }
    for (const ReadEnd& end : ended) {
      if (!result) break;
      const Request request = running_[end.tag];
      free_tags_.push_back(end.tag);
      unit = request.unit;
      result = Ended(request, end.count);
    }
    if (!result) state_.Fail(unit, std::move(result).error());
  }
}

}  // namespace hotplane
