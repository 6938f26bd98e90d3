// The side of the executor that asks a device whether what landed on it is right.
#include <chrono>

#include "base/format_text.h"
#include "boot/executor_state.h"

namespace hotplane {

void ExtentFinisher::Start() {
  thread_ = std::thread([this] { Loop(); });
}

void ExtentFinisher::Add(size_t extent) {
  {
    const std::lock_guard lock(mutex_);
    landed_.push_back(extent);
  }
  wake_.notify_one();
}

void ExtentFinisher::Finish() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void ExtentFinisher::Loop() {
  NameTraceThread("verify", 0);
  while (true) {
    size_t extent = 0;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return over_ || !landed_.empty(); });
      if (landed_.empty()) return;
      extent = landed_.front();
      landed_.pop_front();
    }
    if (state_.Failed()) continue;
    if (Result<void> settled = NothingThrown([&] { return Settle(extent); }); !settled)
      state_.Fail(state_.first_unit_of[extent], std::move(settled).error());
  }
}

Result<void> ExtentFinisher::Settle(size_t index) {
  const Extent& extent = state_.extents[index];
  std::vector<LandedCheck> checks;
  if (state_.options.verify) {
    checks.reserve(extent.chunks.size());
    for (size_t c = 0; c < extent.chunks.size(); ++c)
      checks.push_back(
          {extent.chunks[c].offset - extent.offset, extent.checksums[c], extent.chunks[c].bytes});
  }
  {
    const TraceSpan span("verify", extent.trace_layer, extent.bytes, "device");
    HP_ASSIGN(const std::vector<LandedMismatch> mismatches,
              state_.options.device->Settle(extent.destination, checks));
    for (const LandedMismatch& mismatch : mismatches)
      HP_TRY(Repair(index, mismatch, checks[mismatch.check]));
  }
  if (state_.options.verify) state_.bytes_verified += extent.bytes;
  state_.callbacks.done(index);
  return {};
}

// What `repair` reads again goes the way of every piece, and is compared on the device again.
Result<void> ExtentFinisher::Repair(size_t index, const LandedMismatch& mismatch,
                                    const LandedCheck& check) {
  const Extent& extent = state_.extents[index];
  LandingDevice& device = *state_.options.device;
  std::byte* const destination = extent.destination + check.offset;
  std::byte* staged = nullptr;
  while ((staged = device.Stage(destination, check.bytes)) == nullptr) {
    if (state_.options.cancel != nullptr) HP_TRY(state_.options.cancel->Check());
    if (state_.Failed()) return {};
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  const Result<void> repaired =
      state_.callbacks.repair(index, mismatch.check, mismatch.found, {staged, check.bytes});
  // A staged piece is landed, so that its slot comes back.
  HP_TRY(device.Land(staged, destination, check.bytes));
  HP_TRY(repaired);
  LandedCheck again = check;
  again.offset = 0;
  HP_ASSIGN(const std::vector<LandedMismatch> still, device.Settle(destination, {&again, 1}));
  if (still.empty()) return {};
  return Fail(Status::System("a chunk that is right in host memory is wrong on the device")
                  .File(extent.file->path())
                  .At(extent.chunks[mismatch.check].offset)
                  .Expected(Text("checksum {:016x}", check.checksum))
                  .Found(Text("checksum {:016x}", still.front().found))
                  .Advice("look after this device, its memory and its link"));
}

}  // namespace hotplane
