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
  HP_ASSIGN(std::unique_ptr<AsyncReader> reader, state_.options.env->NewReader(ReaderOptions{}));
  const bool direct = state_.options.bypass_cache && direct_refused.empty();
  state_.disk_path = Text("{}, {}, {} requests of {}", reader->name(),
                          direct ? "O_DIRECT" : "through the page cache", reader->depth(),
                          FormatBytes(kReadRequestBytes));
  if (!reader->reason().empty()) state_.disk_path += Text(" ({})", reader->reason());
  if (!direct_refused.empty()) state_.disk_path += Text(" ({})", direct_refused);
  reader_ = std::make_unique<WholeReader>(std::move(reader));
  return {};
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
  for (uint64_t at = 0; at < unit.bytes; at += kReadRequestBytes) {
    const uint64_t bytes = std::min(kReadRequestBytes, unit.bytes - at);
    ready_.push_back({index, unit.offset + at, {unit.staged + at, bytes}});
    ++unit.requests_left;
  }
  return true;
}

void DiskDriver::StartRequests() {
  while (!reader_->full() && (!ready_.empty() || NextUnitToStage())) {
    const Request request = ready_.front();
    ready_.pop_front();
    const size_t extent = state_.units[request.unit].extent;
    reader_->Start({.file = state_.extents[extent].file,
                    .direct = direct_files_[extent].get(),
                    .offset = request.offset,
                    .destination = request.destination,
                    .needed_bytes = request.destination.size(),
                    .tag = request.unit});
  }
}

void DiskDriver::Ended(size_t unit_index) {
  if (--state_.units[unit_index].requests_left > 0) return;
  ++units_landed_;
  state_.Landed(unit_index);
}

void DiskDriver::Run() {
  NameTraceThread("disk", 0);
  Result<void> ran = NothingThrown([this] {
    Drive();
    return Result<void>();
  });
  if (!ran) state_.Fail(state_.disk_units[units_landed_], std::move(ran).error());
  // Ends what is in flight before the memory under it can go.
  reader_.reset();
}

void DiskDriver::Drive() {
  std::vector<WholeReadEnd> ended;
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
      for (const WholeReadEnd& end : ended) bytes += end.bytes;
      span.set_bytes(bytes);
    }
    for (WholeReadEnd& end : ended) {
      if (!result) break;
      unit = end.tag;
      result = std::move(end.result);
      if (result) Ended(unit);
    }
    if (!result) state_.Fail(unit, std::move(result).error());
  }
}

}  // namespace hotplane
