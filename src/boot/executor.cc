#include "boot/executor.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/check.h"
#include "base/fault_guard.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/units.h"
#include "boot/executor_state.h"
#include "format/checksum.h"

namespace hotplane {
namespace {

class HostMemoryDevice final : public LandingDevice {
 public:
  std::byte* Stage(std::byte* destination, uint64_t) override { return destination; }
  Result<void> Land(std::byte*, std::byte*, uint64_t) override { return {}; }
  Result<void> Wait() override { return {}; }
};

// In steps that stay in the caches: a device reads staged bytes from there, which spares the memory
// two of three passes. On an H200 with 16 cores a boot from the page cache landed at 50 GB/s so,
// with stores past the caches at 45.
void CopyCached(std::byte* to, const std::byte* from, size_t bytes) {
  constexpr size_t kStepBytes = 16 * kKiB;
  for (size_t at = 0; at < bytes; at += kStepBytes)
    std::memcpy(to + at, from + at, std::min(kStepBytes, bytes - at));
}

// The body of a guarded call: copies or hashes the chunks of a unit and keeps what it found.
struct UnitPass {
  const std::byte* source;  // of the unit's first byte
  std::byte* destination;   // null: hash only
  std::span<const Chunk> chunks;
  uint64_t* found;  // checksums by chunk; null: copy only

  static void Run(void* context) {
    const auto& pass = *static_cast<const UnitPass*>(context);
    const uint64_t base = pass.chunks[0].offset;
    for (size_t i = 0; i < pass.chunks.size(); ++i) {
      const Chunk& chunk = pass.chunks[i];
      const std::byte* const from = pass.source + (chunk.offset - base);
      if (pass.destination == nullptr) {
        if (pass.found != nullptr) pass.found[i] = Checksum64({from, chunk.bytes});
        continue;
      }
      std::byte* const to = pass.destination + (chunk.offset - base);
      if (pass.found != nullptr) {
        pass.found[i] = CopyWithChecksum64(to, from, chunk.bytes);
      } else {
        CopyCached(to, from, chunk.bytes);
      }
    }
  }
};

}  // namespace

LandingDevice& HostMemory() {
  static HostMemoryDevice device;
  return device;
}

Status PagesGone(const std::string& path, uint64_t offset, uint64_t bytes) {
  return Status::System("the file was cut short, or its disk failed, while it was read")
      .File(path)
      .At(offset)
      .Expected(Text("{} readable bytes", bytes))
      .Found("a bus error")
      .Advice("`hotplane verify` tells what is left of the file");
}

const char* ExtentSourceName(ExtentSource source) {
  switch (source) {
    case ExtentSource::kInvalid: return "unknown";
    case ExtentSource::kMapped: return "mapped";
    case ExtentSource::kPageCache: return "page cache";
    case ExtentSource::kDiskBuffered: return "disk, buffered";
    case ExtentSource::kDiskDirect: return "disk, direct";
    case ExtentSource::kBoth: return "both";
    case ExtentSource::kThere: return "built";
  }
  return "unknown";
}

void Executor::State::Fail(size_t unit, Status status) {
  {
    const std::lock_guard lock(mutex);
    if (!failure || unit < failed_unit) {
      failed_unit = unit;
      failure = std::move(status);
    }
  }
  wake.notify_all();
}

void Executor::State::Landed(size_t unit) {
  {
    const std::lock_guard lock(mutex);
    (units[unit].path == UnitPath::kRead ? read_units : filled_units).push_back(unit);
  }
  wake.notify_one();
}

bool Executor::State::WaitForRoomToFill() {
  // How long a cancellation may go unnoticed.
  constexpr std::chrono::milliseconds kPollTime{20};
  std::unique_lock lock(mutex);
  while (!failure && filled_units.size() >= kFilledUnitsMax) {
    if (options.cancel != nullptr && !options.cancel->Check()) break;
    room.wait_for(lock, kPollTime);
  }
  return !failure;
}

bool Executor::State::Failed() {
  const std::lock_guard lock(mutex);
  return failure.has_value();
}

std::optional<size_t> Executor::State::TakeFrontLocked(std::deque<size_t>& queue) {
  if (failure || queue.empty()) return std::nullopt;
  const size_t unit = queue.front();
  queue.pop_front();
  return unit;
}

std::optional<size_t> Executor::State::TakeFreshLocked() {
  const size_t end = std::min(disk_units.size(), staged_unit_count + kFreshAheadUnits);
  if (!options.fresh_destinations || next_fresh_unit >= end) return std::nullopt;
  return disk_units[next_fresh_unit++];
}

std::optional<Job> Executor::State::TakeWindowLocked() {
  const uint64_t window_bytes = options.device->mapped_window_bytes();
  const size_t begin = next_cache_unit;
  uint64_t bytes = 0;
  size_t end = begin;
  for (; end < cache_units.size(); ++end) {
    const Unit& unit = units[cache_units[end]];
    const Extent& extent = extents[unit.extent];
    if (extent.mapping == nullptr || !SettlesLater(extent)) break;
    if (bytes + unit.bytes > window_bytes) break;
    if (end > begin) {
      const Unit& last = units[cache_units[end - 1]];
      if (last.extent != unit.extent || last.offset + last.bytes != unit.offset) break;
    }
    bytes += unit.bytes;
  }
  if (end == begin) return std::nullopt;
  next_cache_unit = end;
  return Job{begin, false, end - begin};
}

std::optional<Job> Executor::State::NextJob(size_t worker) {
  std::unique_lock lock(mutex);
  while (true) {
    if (failure || units_done == units.size()) return std::nullopt;
    // What the disk has brought comes first: it is still in the caches, and may hold a slot of a
    // ring. Then what the disk would have to wait for.
    if (const std::optional<size_t> unit = TakeFrontLocked(read_units)) return Job{*unit, false};
    if (const std::optional<size_t> unit = TakeFrontLocked(filled_units)) {
      room.notify_one();
      return Job{*unit, false};
    }
    if (const std::optional<size_t> unit = TakeFreshLocked()) return Job{*unit, true};
    if (worker < options.device->mapped_worker_count())
      if (const std::optional<Job> window = TakeWindowLocked()) return window;
    if (next_cache_unit < cache_units.size()) return Job{cache_units[next_cache_unit++], false};
    wake.wait(lock);
  }
}

void Executor::State::Populate(const Unit& unit) const {
  std::byte* const destination = Destination(unit);
  if (destination == nullptr) return;
  const TraceSpan span("allocate", extents[unit.extent].trace_layer, unit.bytes);
  PopulatePages({destination, unit.bytes});
}

// Cut where the file offset is aligned, so that a unit can be read past the page cache: at the last
// such place in the device's piece, else at the first one in kStagedBytesMax, else at the piece's
// end all the same.
void Executor::State::ListUnits(size_t extent) {
  const uint64_t piece_bytes = options.device->piece_bytes();
  const std::span<const Chunk> chunks = extents[extent].chunks;
  for (size_t c = 0; c < chunks.size();) {
    Unit unit;
    unit.extent = extent;
    unit.first_chunk = c;
    unit.offset = chunks[c].offset;
    uint64_t bytes = 0;
    bool aligned = false;
    const auto cut = [&](size_t end) {
      unit.end_chunk = end;
      unit.bytes = bytes;
    };
    for (size_t end = c; end < chunks.size();) {
      const uint64_t next_bytes = bytes + chunks[end].bytes;
      if (bytes > 0 && next_bytes > (aligned ? piece_bytes : kStagedBytesMax)) break;
      bytes = next_bytes;
      ++end;
      const bool aligned_end = (unit.offset + bytes) % kPageBytes == 0 || end == chunks.size();
      aligned = aligned || aligned_end;
      if (aligned_end || (!aligned && bytes <= piece_bytes)) cut(end);
    }
    HP_CHECK(unit.end_chunk > c);
    c = unit.end_chunk;
    units.push_back(unit);
  }
}

void Executor::State::Locate(size_t extent_index) {
  const Extent& extent = extents[extent_index];
  const size_t first_unit = units.size();
  first_unit_of.push_back(first_unit);
  if (extent.there) {
    sources[extent_index] = ExtentSource::kThere;
    return;
  }
  ListUnits(extent_index);
  units_left[extent_index] = units.size() - first_unit;
  // Where the system cannot tell, the disk path serves cached pages as well.
  const uint64_t cached = extent.file->CachedBytes(extent.offset, extent.bytes).value_or(0);
  uint64_t disk_bytes = 0;
  for (size_t u = first_unit; u < units.size(); ++u) {
    Unit& unit = units[u];
    const bool in_cache =
        cached == extent.bytes || (cached > 0 && IsCached(*extent.file, unit.offset, unit.bytes));
    if (in_cache) {
      unit.path = UnitPath::kCached;
      cache_units.push_back(u);
      continue;
    }
    disk_bytes += unit.bytes;
    const bool through_cache = extent.destination == nullptr || !options.bypass_cache;
    const bool fill = extent.mapping != nullptr && through_cache;
    unit.path = fill ? UnitPath::kFilled : UnitPath::kRead;
    (fill ? fill_units : disk_units).push_back(u);
  }
  sources[extent_index] = extent.destination == nullptr ? ExtentSource::kMapped
                          : disk_bytes == 0             ? ExtentSource::kPageCache
                          : disk_bytes < extent.bytes   ? ExtentSource::kBoth
                          : options.bypass_cache        ? ExtentSource::kDiskDirect
                                                        : ExtentSource::kDiskBuffered;
}

std::byte* Executor::State::Destination(const Unit& unit) const {
  const Extent& extent = extents[unit.extent];
  if (extent.destination == nullptr) return nullptr;
  return extent.destination + (unit.offset - extent.offset);
}

Result<std::byte*> Executor::State::Stage(const Unit& unit) {
  std::byte* const destination = Destination(unit);
  std::byte* staged = options.device->Stage(destination, unit.bytes);
  if (staged != nullptr) return staged;
  const TraceSpan span("wait", extents[unit.extent].trace_layer, 0, "ring");
  while (true) {
    staged = options.device->Stage(destination, unit.bytes);
    if (staged != nullptr) return staged;
    if (options.cancel != nullptr) HP_TRY(options.cancel->Check());
    std::optional<size_t> landed;
    {
      const std::lock_guard lock(mutex);
      if (failure) return hotplane::Fail(*failure);
      landed = TakeFrontLocked(read_units);
    }
    // All slots may hold units from the disk that wait for a worker: for this one, then. Not filled
    // units, which would ask for a slot themselves.
    if (landed) {
      RunUnit(*landed);
    } else {
      // Slots come back at the pace of copies of megabytes, some 100 us each.
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

Result<void> Executor::State::LandFromCache(Unit& unit, std::span<uint64_t> found) {
  const Extent& extent = extents[unit.extent];
  UnitPass pass{nullptr, nullptr,
                extent.chunks.subspan(unit.first_chunk, unit.end_chunk - unit.first_chunk),
                found.empty() ? nullptr : found.data()};
  if (extent.destination != nullptr) {
    if (options.fresh_destinations) {
      const auto start = std::chrono::steady_clock::now();
      Populate(unit);
      populating_ns += (std::chrono::steady_clock::now() - start) / std::chrono::nanoseconds(1);
    }
    HP_ASSIGN(unit.staged, Stage(unit));
  }
  if (extent.mapping == nullptr) {
    {
      const TraceSpan span("read", extent.trace_layer, unit.bytes, "page cache");
      HP_TRY(ReadFully(*extent.file, unit.offset, {unit.staged, unit.bytes}));
    }
    const TraceSpan span("verify", extent.trace_layer, unit.bytes);
    pass.source = unit.staged;
    if (pass.found != nullptr) UnitPass::Run(&pass);
    return {};
  }
  const uint64_t offset = unit.offset - extent.offset;
  {
    std::optional<TraceSpan> span;
    if (unit.path == UnitPath::kCached)
      span.emplace("read", extent.trace_layer, unit.bytes, "page cache");
    // A filled unit was populated a moment ago; were it gone again, only the guard would tell.
    if (unit.path == UnitPath::kCached || !FaultGuardInstalled())
      HP_TRY(extent.mapping->Populate(offset, unit.bytes));
  }
  const TraceSpan span(pass.found != nullptr ? "verify" : "copy", extent.trace_layer, unit.bytes);
  pass.source = extent.mapping->bytes().data() + offset;
  pass.destination = unit.staged;
  if (pass.destination == nullptr && pass.found == nullptr) return {};
  if (!FaultGuardInstalled()) {
    UnitPass::Run(&pass);
    return {};
  }
  if (CallGuarded({pass.source, unit.bytes}, &UnitPass::Run, &pass)) return {};
  return hotplane::Fail(PagesGone(extent.file->path(), unit.offset, unit.bytes));
}

Result<void> Executor::State::Verify(Unit& unit, std::span<const uint64_t> found) {
  const Extent& extent = extents[unit.extent];
  for (size_t i = 0; i < found.size(); ++i) {
    const size_t c = unit.first_chunk + i;
    if (found[i] == extent.checksums[c]) continue;
    const Chunk& chunk = extent.chunks[c];
    const std::span<std::byte> staged =
        unit.staged == nullptr
            ? std::span<std::byte>()
            : std::span<std::byte>(unit.staged + (chunk.offset - unit.offset), chunk.bytes);
    HP_TRY(callbacks.repair(unit.extent, c, found[i], staged));
  }
  if (!found.empty()) bytes_verified += unit.bytes;
  return {};
}

Result<void> Executor::State::WorkOn(size_t unit_index) {
  Unit& unit = units[unit_index];
  const Extent& extent = extents[unit.extent];
  if (options.cancel != nullptr) HP_TRY(options.cancel->Check());
  const bool hashes = options.verify && !SettlesLater(extent);
  std::vector<uint64_t> found(hashes ? unit.end_chunk - unit.first_chunk : 0);
  if (unit.path == UnitPath::kRead) {
    UnitPass pass{unit.staged, nullptr,
                  extent.chunks.subspan(unit.first_chunk, unit.end_chunk - unit.first_chunk),
                  found.empty() ? nullptr : found.data()};
    const TraceSpan span("verify", extent.trace_layer, unit.bytes);
    if (!found.empty()) UnitPass::Run(&pass);
  } else {
    HP_TRY(LandFromCache(unit, found));
  }
  HP_TRY(Verify(unit, found));
  if (unit.staged != nullptr)
    HP_TRY(options.device->Land(unit.staged, Destination(unit), unit.bytes));
  return Account(unit);
}

Result<void> Executor::State::Account(const Unit& unit) {
  const Extent& extent = extents[unit.extent];
  (unit.path == UnitPath::kCached ? bytes_from_cache : bytes_from_disk) += unit.bytes;
  if (options.progress != nullptr) options.progress->Add(unit.bytes);
  if (units_left[unit.extent].fetch_sub(1) > 1) return {};
  if (SettlesLater(extent)) {
    finisher->Add(unit.extent);
    return {};
  }
  HP_TRY(options.device->Wait());
  callbacks.done(unit.extent);
  return {};
}

void Executor::State::RunUnit(size_t unit_index) {
  Result<void> result = NothingThrown([&] { return WorkOn(unit_index); });
  if (!result) {
    Fail(unit_index, std::move(result).error());
    return;
  }
  const std::lock_guard lock(mutex);
  if (++units_done == units.size()) wake.notify_all();
}

Result<bool> Executor::State::LandWindow(size_t first_place, size_t count) {
  const Unit& first = units[cache_units[first_place]];
  const Unit& last = units[cache_units[first_place + count - 1]];
  const Extent& extent = extents[first.extent];
  const uint64_t offset = first.offset - extent.offset;
  const uint64_t bytes = last.offset + last.bytes - first.offset;
  if (options.cancel != nullptr) HP_TRY(options.cancel->Check());
  {
    const TraceSpan span("read", extent.trace_layer, bytes, "page cache");
    HP_TRY(extent.mapping->Populate(offset, bytes));
  }
  const TraceSpan span("register", extent.trace_layer, bytes);
  return options.device->LandMapped(extent.mapping->bytes().subspan(offset, bytes),
                                    Destination(first));
}

void Executor::State::RunWindow(size_t first_place, size_t count) {
  const Result<bool> landed = LandWindow(first_place, count);
  if (!landed) {
    Fail(cache_units[first_place], landed.error());
    return;
  }
  for (size_t place = first_place; place < first_place + count; ++place) {
    const size_t unit = cache_units[place];
    if (!*landed) {
      RunUnit(unit);
      continue;
    }
    if (Result<void> accounted = Account(units[unit]); !accounted) {
      Fail(unit, std::move(accounted).error());
      return;
    }
    const std::lock_guard lock(mutex);
    if (++units_done == units.size()) wake.notify_all();
  }
}

void Executor::State::Work(const Job& job) {
  if (job.populate) {
    Populate(units[job.unit]);
  } else if (job.window_units > 0) {
    RunWindow(job.unit, job.window_units);
  } else {
    RunUnit(job.unit);
  }
}

Executor::Executor(const ExecutorOptions& options, std::vector<Extent> extents, Callbacks callbacks)
    : state_(std::make_unique<State>()) {
  HP_CHECK(options.env != nullptr && options.pool != nullptr);
  state_->options = options;
  if (options.device == nullptr) state_->options.device = &HostMemory();
  state_->extents = std::move(extents);
  state_->callbacks = std::move(callbacks);
  state_->sources.resize(state_->extents.size());
  state_->units_left = std::make_unique<std::atomic<uint64_t>[]>(state_->extents.size());
}

Executor::~Executor() = default;

Result<void> Executor::Locate() {
  HP_CHECK(state_->units.empty());
  for (size_t i = 0; i < state_->extents.size(); ++i) {
    if (state_->options.cancel != nullptr) HP_TRY(state_->options.cancel->Check());
    state_->Locate(i);
  }
  return {};
}

ExtentSource Executor::source(size_t extent) const { return state_->sources[extent]; }
const std::string& Executor::disk_path() const { return state_->disk_path; }
bool Executor::needs_disk() const {
  return !state_->disk_units.empty() || !state_->fill_units.empty();
}

ExecutorCounts Executor::counts() const {
  return {state_->bytes_from_cache, state_->bytes_from_disk, state_->bytes_verified,
          static_cast<double>(state_->populating_ns) * 1e-9};
}

Result<void> Executor::Run() {
  State& state = *state_;
  DiskDriver driver(state);
  CacheFiller filler(state);
  ExtentFinisher finisher(state);
  if (state.options.device->verifies()) state.finisher = &finisher;
  std::thread disk;
  if (!state.disk_units.empty()) {
    HP_TRY(driver.Prepare());
    disk = std::thread([&driver] { driver.Run(); });
  }
  filler.Start();
  if (state.finisher != nullptr) finisher.Start();
  for (size_t i = 0; i < state.extents.size(); ++i) {
    if (!state.extents[i].there) continue;
    HP_CHECK(state.finisher != nullptr);
    finisher.Add(i);
  }
  // One long turn per worker: what there is to do comes from two places.
  const Result<void> worked = state.options.pool->ParallelFor(
      state.options.pool->worker_count(), [&](size_t index, size_t) {
        while (const std::optional<Job> job = state.NextJob(index)) state.Work(*job);
        return Result<void>();
      });
  if (disk.joinable()) disk.join();
  filler.Wait();
  finisher.Finish();
  state.finisher = nullptr;
  HP_TRY(worked);
  if (!state.failure) return {};
  // What is in flight must not land where somebody else's bytes are by then.
  (void)state.options.device->Wait();
  return Fail(*state.failure);
}

}  // namespace hotplane
