#include <sys/vfs.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "base/format_text.h"
#include "base/json_text.h"
#include "base/limits.h"
#include "base/memory.h"
#include "base/number_text.h"
#include "base/topology.h"
#include "base/units.h"
#include "boot/boot_estimate.h"
#include "boot/describe.h"
#include "boot/plan.h"
#include "boot/plan_facts.h"
#include "boot/shard_choice.h"
#include "boot/source_rates.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "device/device.h"
#include "engine/report_json.h"
#include "format/checksum.h"
#include "io/reader.h"
#include "store/coverage.h"
#include "store/store.h"

namespace hotplane::cli {
namespace {

struct Finding {
  bool ok;
  std::string subject;
  std::string text;
  bool fails = false;  // what `subject` is about would end in an error
};

std::string RateText(double rate) { return FormatRate(static_cast<uint64_t>(rate), 1); }

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
  // The base files of a store, all ranks.
  struct Bases {
    uint64_t bytes = 0;
    uint64_t cached_bytes = 0;
    std::vector<FilePart> parts;
    std::vector<FilePart> cached_parts;  // of them, wholly in the page cache
  };
  Result<void> OpenGeneration();
  Result<void> CheckStore(Bases* bases);
  // The plan of a boot with no other option than --device: what it would do, or why it would fail.
  void PlanNext();
  Result<BootPlan> PlanRank(uint32_t rank) const;
  void TellFit(const BootPlan& plan);
  std::string FailureText() const;
  Result<void> CountFiles(const Generation& of_rank, Encoding encoding, size_t* present,
                          Bases* bases);
  void CheckCache(const Bases& bases);
  Result<void> CheckCopies(const Bases& bases);
  Result<void> CheckRegistration(std::span<const std::byte> pages, const char* of);
  Result<void> CheckDisk(const Bases& bases);
  void EstimateNext(const Bases& bases);
  void PrintReport() const;
  void Add(bool ok, std::string subject, std::string text) {
    findings_.push_back({ok, std::move(subject), std::move(text)});
  }

  const Options& options_;
  const Kernels& kernels_;
  const CancelToken& cancel_;
  WorkerPool pool_;
  std::unique_ptr<Generation> generation_;  // null: no store was named
  std::vector<Finding> findings_;
  HugeBuffer sample_;
  double copy_rate_ = 0;
  double read_rate_ = 0;
  uint32_t world_ = 1;              // ranks of the store
  std::unique_ptr<Device> device_;  // null: none was asked for, or it cannot be opened
  uint64_t device_free_bytes_ = 0;
  DeviceRates device_rates_;
  RegistrationRates registration_;
  std::vector<CopyRate> copy_rates_;
  DiskRates disk_;
  BootEstimate estimate_;
  std::optional<Status> device_failure_;  // of a device that was asked for
  std::optional<Status> boot_failure_;    // of the next boot
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
  sample_ = *std::move(sample);
  for (size_t byte = 0; byte < sample_.size(); byte += kPageBytes)
    sample_.data()[byte] = std::byte{1};
  HP_ASSIGN(copy_rate_, MeasureCopyRate(pool_, sample_.span()));
  read_rate_ = MeasureReadRate(pool_, sample_.span());
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
    Add(false, "io", Text("cold reads are refused: {}", reader.error().ToLine()));
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
  Result<std::unique_ptr<Device>> device =
      OpenCudaDevice(options_.device.ordinal, {.thread_count = pool_.worker_count()});
  if (!device) {
    Add(false, "device", device.error().ToLine());
    device_failure_ = std::move(device.error());
    return {};
  }
  device_ = *std::move(device);
  const DeviceTimes times = device_->times();
  HP_ASSIGN(const DeviceMemory memory, device_->Memory());
  device_free_bytes_ = memory.free_bytes;
  Add(true, "device",
      Text("{}: {} free of {}; opened in {} (context {}, ring of {} {})", device_->name(),
           FormatBytes(memory.free_bytes), FormatBytes(memory.total_bytes),
           FormatSeconds(times.all), FormatSeconds(times.context),
           FormatBytes(device_->pinned_bytes()), FormatSeconds(times.ring)));
  HP_ASSIGN(device_rates_, device_->MeasureRates());
  Add(device_rates_.pinned_copy > 0, "link",
      Text("pinned memory to device: {} in pieces of 4 MiB, {} of 16 MiB; hashed there at {}",
           RateText(device_rates_.pinned_copy_4mib), RateText(device_rates_.pinned_copy_16mib),
           RateText(device_rates_.verify)));
  return {};
}

// What threads copy of the page cache, and what a device registers of it: of the store's own pages,
// where enough of them are in memory, else of memory of our own.
Result<void> Doctor::CheckCopies(const Bases& bases) {
  // Less would be measured in the caches.
  constexpr uint64_t kPagesMin = 64 * kMiB;
  constexpr uint64_t kPagesMax = 512 * kMiB;
  std::span<const std::byte> pages = sample_.span();
  const char* of = "own memory";
  std::string path;
  std::unique_ptr<File> file;
  std::unique_ptr<Mapping> mapping;
  if (!bases.cached_parts.empty() && bases.cached_parts.front().bytes >= kPagesMin) {
    const FilePart& part = bases.cached_parts.front();
    path = part.path;
    HP_ASSIGN(file, PosixEnv().Open(path, OpenMode::kRead));
    HP_ASSIGN(mapping, file->Map(part.offset, std::min(part.bytes, kPagesMax)));
    HP_TRY(mapping->Populate(0, mapping->bytes().size()));
    pages = mapping->bytes();
    of = "the store's page cache";
  }
  HP_ASSIGN(copy_rates_, MeasureCopyRates(pages, pool_.worker_count(), path, &cancel_));
  std::string text;
  for (const CopyRate& rate : copy_rates_)
    text += Text("{}{} by {}", text.empty() ? "" : ", ", RateText(rate.bytes_per_second),
                 Counted(rate.threads, "threads"));
  if (!text.empty()) Add(true, "copy", Text("{} to a ring: {}", of, text));
  return CheckRegistration(pages, of);
}

Result<void> Doctor::CheckRegistration(std::span<const std::byte> pages, const char* of) {
  if (device_ == nullptr || pages.empty()) return {};
  HP_ASSIGN(registration_, device_->MeasureRegistration(pages));
  if (registration_.registering <= 0) {
    Add(true, "register", Text("the driver refuses to register {}: it is copied", of));
    return {};
  }
  Add(true, "register",
      Text("{} with the device at {}, released at {}", of, RateText(registration_.registering),
           RateText(registration_.releasing)));
  return {};
}

Result<void> Doctor::CheckDisk(const Bases& bases) {
  if (bases.parts.empty()) return {};
  HP_ASSIGN(disk_, MeasureDiskRates(PosixEnv(), bases.parts, &cancel_));
  const auto text = [](double rate, const char* otherwise) {
    return rate > 0 ? RateText(rate) : std::string(otherwise);
  };
  if (disk_.direct <= 0 && disk_.buffered <= 0) {
    Add(true, "disk", "these files are in memory, and nowhere else");
    return {};
  }
  Add(true, "disk",
      Text("direct {}, through the page cache {}", text(disk_.direct, "refused"),
           text(disk_.buffered, "not measured: the files do not leave memory")));
  return {};
}

// Of one rank, where there are several.
void Doctor::EstimateNext(const Bases& bases) {
  if (boot_failure_) {
    findings_.push_back({false, "boot", FailureText(), /*fails=*/true});
    return;
  }
  if (bases.bytes == 0) return;
  BootFacts facts;
  facts.bytes = bases.bytes / world_;
  // Some pages more or less are nobody's news.
  const bool all = bases.cached_bytes >= bases.bytes - bases.bytes / 64;
  facts.bytes_cached = all ? facts.bytes : bases.cached_bytes / world_;
  facts.on_device = device_ != nullptr;
  facts.available_bytes = ReadMemoryLimit().available_bytes;
  facts.copy_rate = copy_rate_;
  if (device_ != nullptr && !copy_rates_.empty())
    facts.copy_rate = copy_rates_.back().bytes_per_second;
  facts.direct_rate = disk_.direct;
  facts.buffered_rate = disk_.buffered;
  facts.link_rate = device_rates_.pinned_copy;
  facts.verify_rate = device_rates_.verify;
  facts.register_rate = registration_.registering;
  facts.release_rate = registration_.releasing;
  estimate_ = EstimateBoot(facts);
  const std::string what =
      Text("{}{}{} from {}", FormatBytes(facts.bytes), world_ > 1 ? " of a rank" : "",
           device_ != nullptr ? " onto " + device_->name() : "", estimate_.source);
  Add(true, "boot",
      estimate_.seconds > 0 ? Text("{}: about {}, {} decides; {}", what,
                                   FormatSeconds(estimate_.seconds), estimate_.limit, estimate_.why)
                            : Text("{}: not estimated; {}", what, estimate_.why));
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

void Doctor::CheckCache(const Bases& bases) {
  if (bases.cached_bytes >= bases.bytes - bases.bytes / 64) {
    const double seconds = read_rate_ > 0 ? static_cast<double>(bases.bytes) / read_rate_ : 0;
    Add(true, "cache",
        Text("all of {} in the page cache{}", FormatBytes(bases.bytes),
             boot_failure_ ? std::string()
                           : Text(": mapped, a boot takes about {}", FormatSeconds(seconds))));
    return;
  }
  const bool fits = bases.bytes <= ReadMemoryLimit().available_bytes;
  Add(false, "cache",
      Text("{} of {} in the page cache: the rest comes from the disk; {}",
           FormatBytes(bases.cached_bytes), FormatBytes(bases.bytes),
           fits ? Text("`hotplane warm {}` brings it there", options_.path)
                : std::string("it cannot all stay in this memory")));
}

// Layer files of one rank and encoding; bytes of the base only.
Result<void> Doctor::CountFiles(const Generation& of_rank, Encoding encoding, size_t* present,
                                Bases* bases) {
  for (const ManifestLayer& layer : of_rank.manifest().layers) {
    const TierProbe probe = of_rank.Probe(layer.ordinal, encoding);
    if (probe.reason) Add(false, "store", probe.reason->ToLine());
    if (probe.presence != Presence::kPresent) continue;
    ++*present;
    if (encoding != Encoding::kBase) continue;
    FilePart part = {of_rank.LayerPath(layer.ordinal, encoding), probe.layout.data_offset,
                     probe.layout.data_bytes};
    HP_ASSIGN(const std::unique_ptr<File> file, PosixEnv().Open(part.path, OpenMode::kRead));
    const uint64_t cached = file->CachedBytes(part.offset, part.bytes).value_or(0);
    bases->bytes += part.bytes;
    bases->cached_bytes += cached;
    if (cached >= part.bytes) bases->cached_parts.push_back(part);
    bases->parts.push_back(std::move(part));
  }
  return {};
}

Result<void> Doctor::OpenGeneration() {
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options_.path));
  HP_ASSIGN(
      MeantGeneration meant,
      OpenMeant(store, options_.generation,
                {.cancel = &cancel_, .read_only = true, .stall_seconds = options_.stall_seconds}));
  // The log has told people of it.
  for (std::string& warning : meant.warnings)
    if (options_.common.json) Add(false, "store", std::move(warning));
  generation_ = std::make_unique<Generation>(std::move(meant.generation));
  return {};
}

Result<void> Doctor::CheckStore(Bases* bases) {
  const Generation& generation = *generation_;
  const uint32_t world = generation.world();
  const size_t files = generation.manifest().layers.size() * world;
  const std::string of_ranks = world > 1 ? Text(" (of {} ranks)", world) : "";
  world_ = world;
  std::string counts;
  for (const Encoding encoding : kEncodings) {
    size_t present = 0;
    for (uint32_t rank = 0; rank < world; ++rank) {
      HP_TRY(CountFiles(generation.ForRank(rank), encoding, &present, bases));
    }
    if (present > 0 || encoding == Encoding::kBase)
      counts +=
          Text("{}{}/{} {}", counts.empty() ? "" : ", ", present, files, EncodingName(encoding));
    if (encoding == Encoding::kBase && present < files)
      Add(false, "store",
          Text("{}{}; `hotplane build` of the checkpoint makes what is missing",
               DescribeCoverage(ProbeCoverage(generation), generation.manifest()), of_ranks));
  }
  Add(true, "store",
      Text("{}{}, generation {}, {}", counts, of_ranks, ToHex(generation.id()),
           FileSystemName(options_.path)));
  if (!generation.locked())
    Add(false, "locks",
        "this file system refuses locks: `hotplane gc` cannot see who uses the store");
  PlanNext();
  if (bases->bytes > 0) CheckCache(*bases);
  return {};
}

Result<BootPlan> Doctor::PlanRank(uint32_t rank) const {
  const Generation of_rank = generation_->ForRank(rank);
  const uint64_t host_bytes = ReadMemoryLimit().available_bytes;
  PlanConfig config;
  config.layers.resize(of_rank.manifest().layers.size());
  std::iota(config.layers.begin(), config.layers.end(), 0u);
  config.device_is_host = device_ == nullptr;
  config.device_bytes = device_ == nullptr ? host_bytes : UsableDeviceBytes(device_free_bytes_);
  config.host_bytes = host_bytes;
  config.shard_rank = rank;
  config.shard_world = of_rank.world();
  return PlanBoot(ProbeStore(of_rank, config).facts, config);
}

void Doctor::PlanNext() {
  boot_failure_ = device_failure_;
  for (uint32_t rank = 0; rank < world_ && !boot_failure_; ++rank) {
    const Result<BootPlan> plan = PlanRank(rank);
    if (plan) {
      if (rank == 0) TellFit(*plan);
      continue;
    }
    boot_failure_ = plan.error();
    if (world_ > 1) boot_failure_ = Status(plan.error()).Because(Text("rank {}", rank));
  }
}

void Doctor::TellFit(const BootPlan& plan) {
  if (plan.bytes_host == 0) return;
  const auto on_host =
      std::count_if(plan.entries.begin(), plan.entries.end(),
                    [](const PlanEntry& entry) { return entry.residency == Residency::kHost; });
  Add(false, "fit",
      Text("{} of planes, {} of {}memory for them: {} of {} layers stay on the host, in the page "
           "cache; with --base device a boot would fail (exit code 4)",
           FormatBytes(plan.bytes_device + plan.bytes_host), FormatBytes(plan.device_limit_bytes),
           device_ != nullptr ? "device " : "", on_host, plan.layers_total));
}

// On one line, as findings are.
std::string Doctor::FailureText() const {
  const Status& why = *boot_failure_;
  return Text("would fail with exit code {}: {}", why.exit_code(), why.ToLine());
}

Result<void> Doctor::Run() {
  // What is wrong with a store's name is said at once, before anything is measured.
  if (!options_.path.empty()) HP_TRY(OpenGeneration());
  CheckIsa();
  HP_TRY(CheckMemory());
  CheckIo();
  HP_TRY(cancel_.Check());
  HP_TRY(CheckDevice());
  HP_TRY(cancel_.Check());
  Bases bases;
  if (!options_.path.empty()) HP_TRY(CheckStore(&bases));
  HP_TRY(CheckCopies(bases));
  HP_TRY(CheckDisk(bases));
  EstimateNext(bases);
  if (options_.common.json) {
    PrintReport();
    return {};
  }
  for (const Finding& finding : findings_)
    PrintLine(Text("{:<5} {:<8} {}",
                   finding.fails ? "FAIL"
                   : finding.ok  ? "OK"
                                 : "WARN",
                   finding.subject, finding.text));
  return {};
}

void Doctor::PrintReport() const {
  constexpr double kGiga = 1e9;
  const auto known = [](double rate) {
    return rate > 0 ? nlohmann::ordered_json(rate / kGiga) : nlohmann::ordered_json(nullptr);
  };
  nlohmann::ordered_json json;
  for (const Finding& finding : findings_)
    json["findings"].push_back(
        {{"ok", finding.ok}, {"subject", finding.subject}, {"text", finding.text}});
  if (generation_ != nullptr) json["generation"] = ToHex(generation_->id());
  json["isa"] = kernels_.name;
  for (const Kernels* kernels : AvailableKernels()) json["isa_available"].push_back(kernels->name);
  json["read_gigabytes_per_second"] = read_rate_ / kGiga;
  json["copy_gigabytes_per_second"] = copy_rate_ / kGiga;
  json["page_cache_copy"] = nlohmann::ordered_json::array();
  for (const CopyRate& rate : copy_rates_)
    json["page_cache_copy"].push_back(
        {{"threads", rate.threads}, {"gigabytes_per_second", rate.bytes_per_second / kGiga}});
  if (device_ != nullptr) {
    json["device"] = device_->name();
    json["pinned_copy_4mib_gigabytes_per_second"] = device_rates_.pinned_copy_4mib / kGiga;
    json["pinned_copy_16mib_gigabytes_per_second"] = device_rates_.pinned_copy_16mib / kGiga;
    json["verify_gigabytes_per_second"] = device_rates_.verify / kGiga;
    json["register_gigabytes_per_second"] = known(registration_.registering);
    json["release_gigabytes_per_second"] = known(registration_.releasing);
  }
  if (!options_.path.empty()) {
    json["disk_direct_gigabytes_per_second"] = known(disk_.direct);
    json["disk_buffered_gigabytes_per_second"] = known(disk_.buffered);
  }
  if (!estimate_.source.empty()) {
    json["boot"] = {{"source", estimate_.source}, {"why", estimate_.why}};
    json["boot"]["seconds"] = estimate_.seconds > 0 ? nlohmann::ordered_json(estimate_.seconds)
                                                    : nlohmann::ordered_json(nullptr);
    json["boot"]["limit"] = estimate_.limit;
  }
  if (boot_failure_) {
    json["boot"] = {{"seconds", nullptr}};
    json["boot"]["fails"] = nlohmann::ordered_json::parse(StatusJson(*boot_failure_))["error"];
  }
  PrintJson(JsonText(json));
}

}  // namespace

Result<void> RunDoctor(const Context& context) { return Doctor(context).Run(); }

}  // namespace hotplane::cli
