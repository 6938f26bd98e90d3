#include <sys/vfs.h>

#include <nlohmann/json.hpp>

#include "base/format_text.h"
#include "base/limits.h"
#include "base/memory.h"
#include "base/number_text.h"
#include "base/topology.h"
#include "base/units.h"
#include "boot/describe.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "device/device.h"
#include "format/checksum.h"
#include "io/reader.h"
#include "store/store.h"

namespace hotplane::cli {
namespace {

struct Finding {
  bool ok;
  std::string subject;
  std::string text;
};

class Doctor {
 public:
  explicit Doctor(const Context& context)
      : options_(context.options),
        kernels_(context.kernels),
        cancel_(context.cancel),
        pool_(context.options.workers) {}

  Result<void> Run();

 private:
  void CheckIsa();
  Result<void> CheckMemory();
  void CheckIo();
  Result<void> CheckDevice();
  Result<void> CheckStore();
  Result<void> CountFiles(const Generation& of_rank, Encoding encoding, size_t* present,
                          uint64_t* base_bytes, uint64_t* cached_bytes);
  void CheckCache(uint64_t bytes, uint64_t cached);
  void Add(bool ok, std::string subject, std::string text) {
    findings_.push_back({ok, std::move(subject), std::move(text)});
  }

  const Options& options_;
  const Kernels& kernels_;
  const CancelToken& cancel_;
  WorkerPool pool_;
  std::vector<Finding> findings_;
  double copy_rate_ = 0;
  double read_rate_ = 0;
  std::string device_;  // empty: none was asked for, or it cannot be opened
  uint64_t device_free_bytes_ = 0;
  DeviceRates device_rates_;
};

void Doctor::CheckIsa() {
  std::string names;
  for (const Kernels* kernels : AvailableKernels())
    names += Text("{}{}", names.empty() ? "" : ", ", kernels->name);
  Add(kernels_.isa != Isa::kScalar, "isa",
      Text("{} quantizes, {} checksums; this CPU runs {} (force one with HOTPLANE_ISA)",
           kernels_.name, ChecksumIsaName(), names));
}

Result<void> Doctor::CheckMemory() {
  const MemoryLimit limit = ReadMemoryLimit();
  Add(true, "memory",
      Text("{} available of {}{}", FormatBytes(limit.available_bytes),
           FormatBytes(limit.total_bytes), limit.from_cgroup ? " (cgroup limit)" : ""));
  Result<HugeBuffer> sample =
      HugeBuffer::Allocate(std::min<uint64_t>(512 * kMiB, limit.available_bytes / 4));
  if (!sample) {
    Add(false, "speed", Text("not measured: {}", sample.error().what()));
    return {};
  }
  for (size_t byte = 0; byte < sample->size(); byte += kPageBytes)
    sample->data()[byte] = std::byte{1};
  HP_ASSIGN(copy_rate_, MeasureCopyRate(pool_, sample->span()));
  read_rate_ = MeasureReadRate(pool_, sample->span());
  Add(true, "speed",
      Text("{} cores read memory at {}, copy it at {}", pool_.worker_count(),
           FormatRate(static_cast<uint64_t>(read_rate_), 1),
           FormatRate(static_cast<uint64_t>(copy_rate_), 1)));
  return {};
}

// Reads of what is not in the page cache.
void Doctor::CheckIo() {
  const Result<std::unique_ptr<AsyncReader>> reader = PosixEnv().NewReader({});
  if (!reader) {
    Add(false, "io", Text("cold reads are refused: {}", reader.error().ToString()));
    return;
  }
  const std::string reason = (*reader)->reason();
  Add(reason.empty(), "io",
      reason.empty() ? Text("cold reads by {}, {} at a time", (*reader)->name(), (*reader)->depth())
                     : Text("cold reads by {} ({})", (*reader)->name(), reason));
}

// A device that was asked for and is not there is a finding, not a failure.
Result<void> Doctor::CheckDevice() {
  if (!options_.device.cuda) return {};
  const Result<std::unique_ptr<Device>> device =
      OpenCudaDevice(options_.device.ordinal, {.thread_count = pool_.worker_count()});
  if (!device) {
    Add(false, "device", device.error().ToString());
    return {};
  }
  device_ = (*device)->name();
  const DeviceTimes times = (*device)->times();
  HP_ASSIGN(const DeviceMemory memory, (*device)->Memory());
  device_free_bytes_ = memory.free_bytes;
  Add(true, "device",
      Text("{}: {} free of {}; opened in {} (context {}, ring of {} {})", device_,
           FormatBytes(memory.free_bytes), FormatBytes(memory.total_bytes),
           FormatSeconds(times.all), FormatSeconds(times.context),
           FormatBytes((*device)->pinned_bytes()), FormatSeconds(times.ring)));
  HP_ASSIGN(device_rates_, (*device)->MeasureRates());
  const auto text = [](double rate) { return FormatRate(static_cast<uint64_t>(rate), 1); };
  Add(device_rates_.pinned_copy > 0, "link",
      Text("pinned memory to device: {} in pieces of 4 MiB, {} of 16 MiB; hashed there at {}",
           text(device_rates_.pinned_copy_4mib), text(device_rates_.pinned_copy_16mib),
           text(device_rates_.verify)));
  return {};
}

const char* FileSystemName(const std::string& path) {
  struct statfs info;
  if (statfs(path.c_str(), &info) != 0) return "unknown file system";
  switch (static_cast<unsigned long>(info.f_type)) {
    case 0xef53: return "ext4";
    case 0x58465342: return "xfs";
    case 0x01021994: return "tmpfs";
    case 0x9123683e: return "btrfs";
    case 0x6969: return "nfs";
    case 0x794c7630: return "overlayfs";
    case 0x65735546: return "fuse";
    default: return "another file system";
  }
}

void Doctor::CheckCache(uint64_t bytes, uint64_t cached) {
  // Onto a device the slower of the two decides: the link, or the copy to pinned memory.
  const double link = device_rates_.pinned_copy;
  const double rate = link > 0 ? std::min(link, copy_rate_) : copy_rate_;
  const double seconds = rate > 0 ? static_cast<double>(bytes) / rate : 0;
  if (cached >= bytes - bytes / 64) {
    Add(true, "cache",
        Text("all of {} in the page cache: next boot about {}, mapped {}", FormatBytes(bytes),
             FormatSeconds(seconds),
             FormatSeconds(read_rate_ > 0 ? static_cast<double>(bytes) / read_rate_ : 0)));
    return;
  }
  const bool fits = bytes <= ReadMemoryLimit().available_bytes;
  Add(false, "cache",
      Text("{} of {} in the page cache: the rest comes from the disk; {}", FormatBytes(cached),
           FormatBytes(bytes),
           fits ? Text("`hotplane warm {}` makes the next boot about {}", options_.path,
                       FormatSeconds(seconds))
                : std::string("it cannot all stay in this memory")));
}

// Layer files of one rank and encoding; bytes of the base only.
Result<void> Doctor::CountFiles(const Generation& of_rank, Encoding encoding, size_t* present,
                                uint64_t* base_bytes, uint64_t* cached_bytes) {
  for (const ManifestLayer& layer : of_rank.manifest().layers) {
    const TierProbe probe = of_rank.Probe(layer.ordinal, encoding);
    if (probe.reason) Add(false, "store", probe.reason->ToString());
    if (probe.presence != Presence::kPresent) continue;
    ++*present;
    if (encoding != Encoding::kBase) continue;
    *base_bytes += probe.layout.data_bytes;
    HP_ASSIGN(const std::unique_ptr<File> file,
              PosixEnv().Open(of_rank.LayerPath(layer.ordinal, encoding), OpenMode::kRead));
    *cached_bytes +=
        file->CachedBytes(probe.layout.data_offset, probe.layout.data_bytes).value_or(0);
  }
  return {};
}

Result<void> Doctor::CheckStore() {
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options_.path));
  HP_ASSIGN(const Generation generation,
            store.OpenGeneration(
                options_.generation,
                {.cancel = &cancel_, .read_only = true, .stall_seconds = options_.stall_seconds}));
  const uint32_t world = generation.world();
  const size_t files = generation.manifest().layers.size() * world;
  const std::string of_ranks = world > 1 ? Text(" (of {} ranks)", world) : "";
  uint64_t base_bytes = 0;
  uint64_t cached_bytes = 0;
  std::string counts;
  for (const Encoding encoding : kEncodings) {
    size_t present = 0;
    for (uint32_t rank = 0; rank < world; ++rank) {
      HP_TRY(CountFiles(generation.ForRank(rank), encoding, &present, &base_bytes, &cached_bytes));
    }
    if (present > 0 || encoding == Encoding::kBase)
      counts +=
          Text("{}{}/{} {}", counts.empty() ? "" : ", ", present, files, EncodingName(encoding));
    if (encoding == Encoding::kBase && present < files)
      Add(false, "store",
          Text("no base tier of {}{}: run `hotplane build`", Counted(files - present, "layers"),
               of_ranks));
  }
  Add(true, "store",
      Text("{}{}, generation {}, {}", counts, of_ranks, ToHex(generation.id()),
           FileSystemName(options_.path)));
  if (!generation.locked())
    Add(false, "locks",
        "this file system refuses locks: `hotplane gc` cannot see who uses the store");
  const uint64_t free_bytes =
      device_.empty() ? ReadMemoryLimit().available_bytes : device_free_bytes_;
  if (base_bytes > free_bytes)
    Add(false, "fit",
        Text("{} of planes, {} of {}memory available: boot with --map or fewer --layers",
             FormatBytes(base_bytes), FormatBytes(free_bytes), device_.empty() ? "" : "device "));
  if (base_bytes > 0) CheckCache(base_bytes, cached_bytes);
  return {};
}

Result<void> Doctor::Run() {
  // A store that is not there is said at once, before anything is measured.
  if (!options_.path.empty()) HP_TRY(Store::Open(PosixEnv(), options_.path));
  CheckIsa();
  HP_TRY(CheckMemory());
  CheckIo();
  HP_TRY(cancel_.Check());
  HP_TRY(CheckDevice());
  HP_TRY(cancel_.Check());
  if (!options_.path.empty()) HP_TRY(CheckStore());
  if (options_.common.json) {
    nlohmann::ordered_json json;
    for (const Finding& finding : findings_)
      json["findings"].push_back(
          {{"ok", finding.ok}, {"subject", finding.subject}, {"text", finding.text}});
    json["isa"] = kernels_.name;
    for (const Kernels* kernels : AvailableKernels())
      json["isa_available"].push_back(kernels->name);
    json["read_gigabytes_per_second"] = read_rate_ / 1e9;
    json["copy_gigabytes_per_second"] = copy_rate_ / 1e9;
    if (!device_.empty()) {
      json["device"] = device_;
      json["pinned_copy_4mib_gigabytes_per_second"] = device_rates_.pinned_copy_4mib / 1e9;
      json["pinned_copy_16mib_gigabytes_per_second"] = device_rates_.pinned_copy_16mib / 1e9;
      json["verify_gigabytes_per_second"] = device_rates_.verify / 1e9;
    }
    PrintLine(json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
    return {};
  }
  for (const Finding& finding : findings_)
    PrintLine(Text("{:<5} {:<8} {}", finding.ok ? "OK" : "WARN", finding.subject, finding.text));
  return {};
}

}  // namespace

Result<void> RunDoctor(const Context& context) { return Doctor(context).Run(); }

}  // namespace hotplane::cli
