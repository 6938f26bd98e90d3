// The side of the executor that fills the page cache.
#include <algorithm>
#include <system_error>

#include "base/format_text.h"
#include "base/log.h"
#include "base/units.h"
#include "boot/executor_state.h"

namespace hotplane {
namespace {

// Each has one unit of 4 MiB under way, and asks for the next one only when it has been woken and
// run: on busy cores that takes milliseconds, in which the others keep the disk busy. Beside
// compilers on 2 cores 4 threads reached 90% of direct reads, 8 reached 96%, 12 and 16 all of them.
constexpr size_t kThreadCountMax = 12;
// How far ahead older kernels are told what to read: at 100 us a request and 10 GB/s of disk, 16
// units keep it busy.
constexpr size_t kReadAheadUnits = 16;

}  // namespace

void CacheFiller::Start() {
  const size_t thread_count = std::min(kThreadCountMax, state_.fill_units.size());
  if (thread_count == 0) return;
  if (!state_.disk_path.empty()) state_.disk_path += "; ";
  state_.disk_path +=
      Text("into the page cache, {} threads, {} at a time", thread_count, FormatBytes(kUnitBytes));
  try {
    for (size_t i = 0; i < thread_count; ++i) threads_.emplace_back([this, i] { Loop(i); });
  } catch (const std::system_error& error) {
    Log(LogLevel::kWarning, "{} threads fill the page cache instead of {}: {}", threads_.size(),
        thread_count, error.what());
  }
  if (!threads_.empty()) return;
  // Then the workers read what they need themselves.
  for (const size_t unit : state_.fill_units) state_.units[unit].path = UnitPath::kCached;
  state_.cache_units.insert(state_.cache_units.end(), state_.fill_units.begin(),
                            state_.fill_units.end());
}

void CacheFiller::Wait() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void CacheFiller::Loop(size_t thread) {
  NameTraceThread("fill", thread);
  while (state_.WaitForRoomToFill()) {
    const size_t place = next_++;
    if (place >= state_.fill_units.size()) return;
    const size_t unit = state_.fill_units[place];
    Result<void> filled = NothingThrown([&] { return Fill(place); });
    if (filled) {
      state_.Landed(unit);
    } else {
      state_.Fail(unit, std::move(filled).error());
    }
  }
}

Result<void> CacheFiller::Fill(size_t place) {
  if (state_.options.cancel != nullptr) HP_TRY(state_.options.cancel->Check());
  if (place + kReadAheadUnits < state_.fill_units.size()) {
    const Unit& ahead = state_.units[state_.fill_units[place + kReadAheadUnits]];
    state_.extents[ahead.extent].file->WillNeed(ahead.offset, ahead.bytes);
  }
  const Unit& unit = state_.units[state_.fill_units[place]];
  const Extent& extent = state_.extents[unit.extent];
  const TraceSpan span("read", extent.trace_layer, unit.bytes, "disk");
  return extent.mapping->Populate(unit.offset - extent.offset, unit.bytes);
}

}  // namespace hotplane
