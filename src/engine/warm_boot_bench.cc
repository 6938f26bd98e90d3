// A restart on the same bytes, in one run: twice as the reference system did it, re-implemented
// from its description, and as hotplane does it warm, warm and mapped, and cold. Beside them what
// this machine's memory and disk give in the same run.
//
// The reference reads the planes as numpy.fromfile does: a part of a layer is opened, read whole
// into fresh memory (huge pages advised, as numpy does for large arrays) and closed. It checks
// nothing. `reference-before` takes one layer after the other and reads the FP4 parts too, which it
// then drops; `reference-after` leaves them alone and has 4 workers over batches of 12 layers. Both
// find all they read in the page cache, which is the best case for them.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/fault_guard.h"
#include "base/format_text.h"
#include "base/limits.h"
#include "base/memory.h"
#include "base/result_file.h"
#include "base/topology.h"
#include "base/units.h"
#include "engine/engine.h"
#include "engine/synth.h"
#include "engine/warm.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Options {
  bool smoke = false;
  std::string directory;  // of the store; made when missing, removed when not named
  uint32_t layers = 0;    // 0: as many as memory allows, 4 at most
  size_t rounds = 3;
  bool small_pages = false;  // reference: no advice, as torch's allocator
  std::string json_path;
};

constexpr size_t kReferenceBatchLayers = 12;
constexpr size_t kReferenceWorkers = 4;
constexpr uint32_t kLayersMax = 4;

// numpy advises huge pages from this size on.
constexpr size_t kAdvisedBytesMin = 4 * kMiB;

// What numpy.fromfile reads into: malloc, which gives fresh pages at this size.
class FreshArray {
 public:
  FreshArray(uint64_t bytes, bool small_pages)
      : data_(static_cast<std::byte*>(std::malloc(bytes))), bytes_(bytes) {
    if (data_ == nullptr || small_pages || bytes < kAdvisedBytesMin) return;
    const uint64_t begin = RoundUp(reinterpret_cast<uintptr_t>(data_), kPageBytes);
    const uint64_t end = reinterpret_cast<uintptr_t>(data_) + bytes;
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
  FreshArray(FreshArray&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
  }
  FreshArray& operator=(FreshArray&&) = delete;
  ~FreshArray() { std::free(data_); }

  std::span<std::byte> span() const { return {data_, data_ != nullptr ? bytes_ : 0}; }

 private:
  std::byte* data_;
  uint64_t bytes_;
};

struct Part {
  std::string path;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// The byte ranges of a store, as the reference sees them.
struct StoreParts {
  std::vector<std::vector<Part>> base;  // by layer: planes13, sc13, planes2, sc2
  std::vector<std::vector<Part>> fp4;   // by layer: as many bytes as fp13 and fp2
  std::vector<Part> base_files;         // data regions
  uint64_t base_bytes = 0;              // of the data regions
  uint64_t fp4_bytes = 0;
};

Result<StoreParts> ListParts(const Generation& generation) {
  StoreParts parts;
  for (const ManifestLayer& layer : generation.manifest().layers) {
    HP_ASSIGN(const LayerFile base, generation.OpenLayer(layer.ordinal, Encoding::kBase));
    const std::string& path = base.file().path();
    std::vector<Part> sections;
    for (const Section& section : base.layout().sections)
      sections.push_back({path, section.offset, section.expert_bytes * layer.geometry.experts});
    parts.base.push_back(std::move(sections));
    parts.base_files.push_back({path, base.layout().data_offset, base.layout().data_bytes});
    parts.base_bytes += base.layout().data_bytes;
    HP_ASSIGN(const LayerFile fp4, generation.OpenLayer(layer.ordinal, Encoding::kDeltaNibble));
    sections.clear();
    uint64_t offset = fp4.layout().data_offset;
    for (const Section& section : fp4.layout().sections) {
      const uint64_t bytes = section.expert_bytes * layer.geometry.experts;
      sections.push_back({fp4.file().path(), offset, bytes});
      offset += bytes;
      parts.fp4_bytes += bytes;
    }
    parts.fp4.push_back(std::move(sections));
  }
  return parts;
}

Result<FreshArray> ReadPart(const Part& part, bool small_pages) {
  HP_ASSIGN(const std::unique_ptr<File> file, PosixEnv().Open(part.path, OpenMode::kRead));
  FreshArray array(part.bytes, small_pages);
  if (array.span().empty()) return Fail(Status::Capacity("no memory for a part"));
  HP_TRY(ReadFully(*file, part.offset, array.span()));
  return array;
}

// What one way of booting took.
struct Sample {
  double seconds = 0;
  double seconds_first_layer = 0;
  double seconds_landing = 0;  // of hotplane: without planning and fresh memory
  double share_of_limit = 0;   // of hotplane cold: of the disk's rate in the same round
};

using Layers = std::vector<std::vector<FreshArray>>;

Result<Sample> ReferenceBefore(const StoreParts& parts, bool small_pages, Layers* kept) {
  Sample sample;
  const auto start = Clock::now();
  for (size_t layer = 0; layer < parts.base.size(); ++layer) {
    std::vector<FreshArray> arrays;
    for (const Part& part : parts.base[layer]) {
      HP_ASSIGN(FreshArray array, ReadPart(part, small_pages));
      arrays.push_back(std::move(array));
    }
    for (const Part& part : parts.fp4[layer]) {
      HP_ASSIGN(const FreshArray dropped, ReadPart(part, small_pages));
    }
    kept->push_back(std::move(arrays));
    if (layer == 0) sample.seconds_first_layer = SecondsSince(start);
  }
  sample.seconds = SecondsSince(start);
  return sample;
}

Result<Sample> ReferenceAfter(const StoreParts& parts, bool small_pages, Layers* kept) {
  Sample sample;
  kept->resize(parts.base.size());
  std::mutex mutex;
  std::optional<Status> failure;
  const auto start = Clock::now();
  for (size_t begin = 0; begin < parts.base.size(); begin += kReferenceBatchLayers) {
    const size_t end = std::min(begin + kReferenceBatchLayers, parts.base.size());
    std::atomic<size_t> next{begin};
    const auto work = [&] {
      for (size_t layer = next++; layer < end; layer = next++) {
        for (const Part& part : parts.base[layer]) {
          Result<FreshArray> array = ReadPart(part, small_pages);
          if (!array) {
            std::lock_guard lock(mutex);
            failure = std::move(array).error();
            return;
          }
          (*kept)[layer].push_back(*std::move(array));
        }
        if (layer == 0) sample.seconds_first_layer = SecondsSince(start);
      }
    };
    std::vector<std::thread> workers;
    for (size_t w = 0; w < kReferenceWorkers; ++w) workers.emplace_back(work);
    for (std::thread& worker : workers) worker.join();
    if (failure) return Fail(*std::move(failure));
  }
  sample.seconds = SecondsSince(start);
  return sample;
}

Result<Sample> Hotplane(const Options& options, bool map, const Layers* compare) {
  EngineOptions engine_options;
  engine_options.store_directory = options.directory;
  engine_options.boot.map = map;
  Sample sample;
  const auto start = Clock::now();
  HP_ASSIGN(const std::unique_ptr<Engine> engine, Engine::Open(PosixEnv(), engine_options));
  std::atomic<bool> first{true};
  HP_TRY(engine->Boot([&](const BootedLayer&) {
    if (first.exchange(false)) sample.seconds_first_layer = SecondsSince(start);
  }));
  sample.seconds = SecondsSince(start);
  const BootReport& report = engine->report();
  sample.seconds_landing = report.seconds_land;
  if (report.bytes_verified != report.bytes_needed || report.bytes_read != report.bytes_needed)
    return Fail(Status::Data("a boot did not read and verify every byte once"));
  if (compare == nullptr) return sample;
  for (size_t layer = 0; layer < compare->size(); ++layer) {
    const auto reference = (*compare)[layer].front().span();
    const auto ours = engine->layers()[layer].planes13;
    if (ours.size() != reference.size() ||
        std::memcmp(ours.data(), reference.data(), ours.size()) != 0)
      return Fail(Status::Data(Text("layer {} differs from what the reference read", layer)));
  }
  return sample;
}

Result<void> DropFiles(const std::vector<Part>& files) {
  for (const Part& part : files) {
    HP_ASSIGN(const std::unique_ptr<File> file, PosixEnv().Open(part.path, OpenMode::kRead));
    file->DropCache(0, 0);
  }
  return {};
}

// All of the files by 4 MiB reads of several threads: what the disk gives. Depth by threads: 16
// direct reads in flight, or 4 readers with the kernel's read-ahead behind them.
Result<double> DiskRate(const std::vector<Part>& files, bool direct) {
  constexpr uint64_t kPiece = 4 * kMiB;
  HP_TRY(DropFiles(files));
  std::vector<std::unique_ptr<File>> open;
  std::vector<std::pair<size_t, uint64_t>> pieces;
  uint64_t bytes = 0;
  for (const Part& part : files) {
    HP_ASSIGN(std::unique_ptr<File> file,
              PosixEnv().Open(part.path, direct ? OpenMode::kReadDirect : OpenMode::kRead));
    for (uint64_t offset = 0; offset < part.bytes; offset += kPiece)
      pieces.emplace_back(open.size(), part.offset + offset);
    bytes += part.bytes;
    open.push_back(std::move(file));
  }
  WorkerPool pool(direct ? 16 : 4);
  HP_ASSIGN(const HugeBuffer buffers, HugeBuffer::Allocate(pool.worker_count() * kPiece));
  std::memset(buffers.data(), 1, buffers.size());
  const auto start = Clock::now();
  HP_TRY(pool.ParallelFor(pieces.size(), [&](size_t index, size_t worker) -> Result<void> {
    const auto& [file, offset] = pieces[index];
    const uint64_t count = std::min(kPiece, files[file].offset + files[file].bytes - offset);
    return ReadFully(*open[file], offset, {buffers.data() + worker * kPiece, count});
  }));
  return static_cast<double>(bytes) / SecondsSince(start);
}

struct Limits {
  std::vector<double> read, copy, disk_direct, disk_buffered;  // bytes per second
};

Result<void> MeasureMemory(const StoreParts& parts, Limits* limits) {
  WorkerPool pool;
  const Part& part = parts.base_files.front();
  HP_ASSIGN(const std::unique_ptr<File> file, PosixEnv().Open(part.path, OpenMode::kRead));
  HP_ASSIGN(const std::unique_ptr<Mapping> mapping, file->Map(part.offset, part.bytes));
  HP_TRY(mapping->Populate(0, part.bytes));
  limits->read.push_back(MeasureReadRate(pool, mapping->bytes()));
  HP_ASSIGN(const double copy, MeasureCopyRate(pool, mapping->bytes()));
  limits->copy.push_back(copy);
  return {};
}

constexpr const char* kBefore = "reference-before";
constexpr const char* kAfter = "reference-after";
constexpr const char* kWarm = "hotplane warm";
constexpr const char* kMapped = "hotplane warm --map";
constexpr const char* kCold = "hotplane cold";
constexpr const char* kWays[] = {kBefore, kAfter, kWarm, kMapped, kCold};

using Samples = std::map<std::string, std::vector<Sample>>;

Result<void> WarmTiers(const Options& options, const std::vector<Tier>& tiers) {
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.directory));
  HP_ASSIGN(const Generation generation, store.OpenGeneration());
  WorkerPool pool;
  HP_ASSIGN(const WarmReport report, Warm(generation, tiers, pool, nullptr, nullptr));
  if (!report.warnings.empty())
    std::fprintf(stderr, "warning: %s\n", report.warnings.front().c_str());
  return {};
}

// One after the other, so that drift of a noisy machine hits all of them.
Result<void> Round(const Options& options, const StoreParts& parts, bool first, Samples* samples,
                   Limits* limits) {
  HP_TRY(WarmTiers(options, {Tier::kBase, Tier::kDelta}));
  HP_TRY(MeasureMemory(parts, limits));
  // Each way finds the memory that it asks for at hand.
  HP_TRY(BackFreeMemory(parts.base_bytes + parts.fp4_bytes));
  {
    Layers kept;
    HP_ASSIGN(const Sample sample, ReferenceBefore(parts, options.small_pages, &kept));
    (*samples)[kBefore].push_back(sample);
  }
  HP_TRY(BackFreeMemory(parts.base_bytes));
  Layers kept;
  HP_ASSIGN(const Sample after, ReferenceAfter(parts, options.small_pages, &kept));
  (*samples)[kAfter].push_back(after);
  if (first) {
    // Mapped, so that the two need not fit in memory twice.
    HP_TRY(Hotplane(options, true, &kept));
  }
  kept.clear();
  HP_TRY(BackFreeMemory(parts.base_bytes));
  HP_ASSIGN(const Sample warm, Hotplane(options, false, nullptr));
  (*samples)[kWarm].push_back(warm);
  HP_ASSIGN(const Sample mapped, Hotplane(options, true, nullptr));
  (*samples)[kMapped].push_back(mapped);
  // 0 where the file system refuses direct reads.
  const double direct = DiskRate(parts.base_files, true).value_or(0);
  HP_ASSIGN(const double buffered, DiskRate(parts.base_files, false));
  limits->disk_direct.push_back(direct);
  limits->disk_buffered.push_back(buffered);
  HP_TRY(DropFiles(parts.base_files));
  HP_TRY(BackFreeMemory(2 * parts.base_bytes));
  HP_ASSIGN(Sample cold, Hotplane(options, false, nullptr));
  cold.share_of_limit =
      static_cast<double>(parts.base_bytes) / cold.seconds_landing / std::max(direct, buffered);
  (*samples)[kCold].push_back(cold);
  return {};
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

template <typename Field>
double MedianOf(const std::vector<Sample>& samples, const Field& field) {
  std::vector<double> values;
  for (const Sample& sample : samples) values.push_back(field(sample));
  return Median(std::move(values));
}

// Medians over the rounds; a ratio is the median of the rounds' ratios.
struct Row {
  double seconds = 0;
  double seconds_first_layer = 0;
  double seconds_landing = 0;
  double share_of_limit = 0;
  double times_before = 0;
  double times_after = 0;
};

Row Summarize(const Samples& samples, const char* way) {
  const std::vector<Sample>& own = samples.at(way);
  const auto times = [&](const char* reference) {
    std::vector<double> ratios;
    for (size_t i = 0; i < own.size(); ++i)
      ratios.push_back(samples.at(reference)[i].seconds / own[i].seconds);
    return Median(std::move(ratios));
  };
  Row row;
  row.seconds = MedianOf(own, [](const Sample& s) { return s.seconds; });
  row.seconds_first_layer = MedianOf(own, [](const Sample& s) { return s.seconds_first_layer; });
  row.seconds_landing = MedianOf(own, [](const Sample& s) { return s.seconds_landing; });
  row.share_of_limit = MedianOf(own, [](const Sample& s) { return s.share_of_limit; });
  row.times_before = times(kBefore);
  row.times_after = times(kAfter);
  return row;
}

void Print(const Samples& samples, const Limits& limits, const StoreParts& parts,
           const Options& options) {
  std::printf("%zu cores, %zu layers, base %s, FP4 %s, medians of %zu rounds\n", UsableCpuCount(),
              parts.base.size(), FormatBytes(parts.base_bytes).c_str(),
              FormatBytes(parts.fp4_bytes).c_str(), options.rounds);
  std::printf("%-20s %9s %9s %12s %9s %11s %11s\n", "", "seconds", "of base", "first layer", "read",
              "x before", "x after");
  for (const char* way : kWays) {
    const Row row = Summarize(samples, way);
    const uint64_t read = parts.base_bytes + (way == kBefore ? parts.fp4_bytes : 0);
    std::printf("%-20s %9.3f %9s %10.3f s %9s %11.2f %11.2f\n", way, row.seconds,
                FormatRate(parts.base_bytes, row.seconds).c_str(), row.seconds_first_layer,
                FormatBytes(read).c_str(), row.times_before, row.times_after);
  }
  std::printf(
      "this machine: reading mapped memory %.2f GB/s, memcpy %.2f GB/s, disk %.2f GB/s direct, "
      "%.2f buffered\n",
      Median(limits.read) / 1e9, Median(limits.copy) / 1e9, Median(limits.disk_direct) / 1e9,
      Median(limits.disk_buffered) / 1e9);
  std::printf("landing cold: %.0f%% of the better disk rate of its round; warm: %.0f%% of memcpy\n",
              100 * Summarize(samples, kCold).share_of_limit,
              100 * static_cast<double>(parts.base_bytes) /
                  Summarize(samples, kWarm).seconds_landing / Median(limits.copy));
}

Result<void> WriteJson(const Samples& samples, const Limits& limits, const StoreParts& parts,
                       const Options& options) {
  std::ostringstream out;
  out << "{\n";
  for (const char* way : kWays) {
    const Row row = Summarize(samples, way);
    out << Text(
        "  \"{}\": {{\"seconds\": {:.4f}, \"seconds_first_layer\": {:.4f}, \"seconds_landing\": "
        "{:.4f}, \"gigabytes_per_second\": {:.3f}, \"times_reference_before\": {:.3f}, "
        "\"times_reference_after\": {:.3f}, \"bytes_read\": {}}},\n",
        way, row.seconds, row.seconds_first_layer, row.seconds_landing,
        static_cast<double>(parts.base_bytes) / row.seconds / 1e9, row.times_before,
        row.times_after, parts.base_bytes + (way == kBefore ? parts.fp4_bytes : 0));
  }
  out << Text(
      "  \"cold_share_of_disk\": {:.3f},\n  \"limits\": {{\"read_gigabytes_per_second\": {:.3f}, "
      "\"copy_gigabytes_per_second\": {:.3f}, \"disk_direct_gigabytes_per_second\": {:.3f}, "
      "\"disk_buffered_gigabytes_per_second\": {:.3f}}},\n",
      Summarize(samples, kCold).share_of_limit, Median(limits.read) / 1e9,
      Median(limits.copy) / 1e9, Median(limits.disk_direct) / 1e9,
      Median(limits.disk_buffered) / 1e9);
  out << Text(
      "  \"layers\": {}, \"base_bytes\": {}, \"fp4_bytes\": {}, \"cores\": {}, \"rounds\": {}, "
      "\"reference_pages\": \"{}\"\n}}\n",
      parts.base.size(), parts.base_bytes, parts.fp4_bytes, UsableCpuCount(), options.rounds,
      options.small_pages ? "small" : "huge");
  return WriteResultFile(options.json_path, out.str());
}

// The reference needs both tiers in the page cache, and the landed base beside them.
uint32_t ChooseLayers(const LayerGeometry& geometry) {
  const uint64_t base = PlanLayerLayout(Encoding::kBase, geometry).file_bytes;
  const uint64_t fp4 = PlanLayerLayout(Encoding::kDeltaNibble, geometry).file_bytes;
  const uint64_t available = ReadMemoryLimit().available_bytes;
  // One FP4 layer in fresh memory, and something for everybody else.
  const uint64_t spare = fp4 + kGiB;
  const uint64_t fitting = available > spare ? (available - spare) / (2 * base + fp4) : 0;
  return static_cast<uint32_t>(std::clamp<uint64_t>(fitting, 1, kLayersMax));
}

Result<void> Measure(Options options) {
  SynthStoreOptions synth;
  HP_ASSIGN(synth.geometry, ParseGeometry(options.smoke ? "4,512,256" : "ds4-flash"));
  if (options.layers == 0) options.layers = ChooseLayers(synth.geometry);
  synth.layers = options.layers;
  synth.encodings = {Encoding::kBase, Encoding::kDeltaNibble};
  HP_TRY(SynthStore(PosixEnv(), options.directory, synth));
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.directory));
  HP_ASSIGN(const Generation generation, store.OpenGeneration());
  HP_ASSIGN(const StoreParts parts, ListParts(generation));
  Samples samples;
  Limits limits;
  // The first round warms page tables and clocks, and compares what everyone read.
  for (size_t round = 0; round <= options.rounds; ++round) {
    HP_TRY(Round(options, parts, round == 0, &samples, &limits));
    std::string line = round == 0 ? "warm-up:" : Text("round {} of {}:", round, options.rounds);
    for (const char* way : kWays) line += Text("  {} {:.2f} s", way, samples[way].back().seconds);
    std::fprintf(stderr, "%s\n", line.c_str());
    if (round > 0) continue;
    samples.clear();
    limits = {};
  }
  Print(samples, limits, parts, options);
  return WriteJson(samples, limits, parts, options);
}

Result<void> Run(Options options) {
  const bool own_directory = options.directory.empty();
  if (own_directory)
    options.directory =
        (std::filesystem::temp_directory_path() / Text("hotplane-warm-{}", getpid())).string();
  HP_TRY(CheckResultFile(options.json_path));
  Result<void> result = Measure(options);
  if (own_directory) std::filesystem::remove_all(options.directory);
  return result;
}

}  // namespace
}  // namespace hotplane

int main(int argc, char** argv) {
  hotplane::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const bool has_value = i + 1 < argc;
    if (argument == "--smoke") {
      options.smoke = true;
      options.layers = 14;  // two batches
      options.rounds = 1;
    } else if (argument == "--reference-small-pages") {
      options.small_pages = true;
    } else if (argument == "--store" && has_value) {
      options.directory = argv[++i];
    } else if (argument == "--layers" && has_value) {
      options.layers = static_cast<uint32_t>(std::stoul(argv[++i]));
    } else if (argument == "--rounds" && has_value) {
      options.rounds = std::max(1ul, std::stoul(argv[++i]));
    } else if (argument == "--json" && has_value) {
      options.json_path = argv[++i];
    } else {
      std::fprintf(stderr,
                   "usage: %s [--smoke] [--store DIR] [--layers N] [--rounds N] [--json FILE] "
                   "[--reference-small-pages]\n",
                   argv[0]);
      return 2;
    }
  }
  hotplane::InstallFaultGuard();
  const hotplane::Result<void> result = hotplane::Run(options);
  if (result) return 0;
  std::fprintf(stderr, "error: %s\n", result.error().ToString().c_str());
  return result.error().exit_code();
}
