#include "boot/boot_estimate.h"

#include <utility>

#include "base/format_text.h"
#include "base/units.h"

namespace hotplane {
namespace {

double Seconds(uint64_t bytes, double rate) {
  return rate > 0 ? static_cast<double>(bytes) / rate : 0;
}

std::string RateText(double rate) { return FormatRate(static_cast<uint64_t>(rate), 1); }

// Why pages that are in memory are copied to a device, and not registered with it.
std::string CopiedNotRegistered(const BootFacts& facts) {
  if (facts.register_rate <= 0 || facts.release_rate <= 0) return "";
  const double both = 1 / (1 / facts.register_rate + 1 / facts.release_rate);
  return Text("; copied, not registered: threads copy {}, registering and releasing makes {}",
              RateText(facts.copy_rate), RateText(both));
}

}  // namespace

bool PassesByCache(uint64_t bytes, bool on_device, uint64_t available_bytes) {
  // A sixteenth for everybody else's changes of mind.
  return (on_device ? 1 : 2) * bytes > available_bytes - available_bytes / 16;
}

BootEstimate EstimateBoot(const BootFacts& facts) {
  BootEstimate estimate;
  const uint64_t cold = facts.bytes - facts.bytes_cached;
  const bool direct = PassesByCache(facts.bytes, facts.on_device, facts.available_bytes);
  const double disk_rate =
      direct && facts.direct_rate > 0 ? facts.direct_rate : facts.buffered_rate;
  if (cold == 0) {
    estimate.source = "page cache";
    estimate.why = "all of it is there" + (facts.on_device ? CopiedNotRegistered(facts) : "");
  } else {
    estimate.source = facts.bytes_cached > 0 ? "both" : direct ? "disk, direct" : "disk, buffered";
    estimate.why = Text("{} is not in the page cache, and {}", FormatBytes(cold),
                        direct ? "would not stay there beside the boot: read past it"
                               : "stays there: the next boot is warm");
  }
  if (cold > 0 && disk_rate <= 0) return estimate;
  const std::pair<const char*, double> stages[] = {
      {"the link", Seconds(facts.bytes, facts.link_rate)},
      {"copying the page cache", Seconds(facts.bytes_cached, facts.copy_rate)},
      {"the disk", Seconds(cold, disk_rate)},
      {"verifying", Seconds(facts.bytes, facts.verify_rate)}};
  for (const auto& [name, seconds] : stages) {
    if (seconds <= estimate.seconds) continue;
    estimate.seconds = seconds;
    estimate.limit = name;
  }
  return estimate;
}

}  // namespace hotplane
