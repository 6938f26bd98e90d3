// How fast this machine boots a store, every byte verified, beside what the same machine reaches on
// the same bytes in the same run: page-cached against reading the mapped files, and against memcpy
// from them into touched huge pages; cold against the best raw rate of the disk, and half cached
// against the larger of the two times.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <string>
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
#include "io/reader.h"

namespace hotplane {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  bool smoke = false;
  std::string directory;  // of the store; made when missing
  uint32_t layers = 4;
  size_t repetitions = 5;
  std::string json_path;
};

struct Measurement {
  const char* name;
  double bytes_per_second = 0;      // landing or mapping alone
  double bytes_per_second_all = 0;  // planning and fresh memory included
  double limit = 0;
  double share = 0;  // the median of the rounds' own shares: limit and boot drift together
  uint64_t anonymous_bytes_extra = 0;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double MedianShare(const std::vector<double>& rates, const std::vector<double>& limits) {
  std::vector<double> shares(rates.size());
  for (size_t i = 0; i < rates.size(); ++i) shares[i] = rates[i] / limits[i];
  return Median(std::move(shares));
}

template <typename Work>
double RateOf(uint64_t bytes, const Work& work) {
  const auto start = Clock::now();
  work();
  return static_cast<double>(bytes) / std::chrono::duration<double>(Clock::now() - start).count();
}

// The largest RssAnon over a boot comes at its end: nothing is given back before the session
// closes.
struct BootRun {
  double bytes = 0;
  double land_rate = 0;
  double whole_rate = 0;
  uint64_t anonymous_bytes_extra = 0;
};

Result<BootRun> RunBoot(const Options& options, bool map, CacheMode cache = CacheMode::kAuto) {
  EngineOptions engine_options;
  engine_options.store_directory = options.directory;
  engine_options.boot.map = map;
  engine_options.boot.cache = cache;
  const uint64_t anonymous_before = ReadResidentAnonymousBytes();
  HP_ASSIGN(const std::unique_ptr<Engine> engine, Engine::Open(PosixEnv(), engine_options));
  HP_TRY(engine->Boot({}));
  const uint64_t anonymous = ReadResidentAnonymousBytes() - anonymous_before;
  const BootReport& report = engine->report();
  if (report.bytes_verified != report.bytes_needed)
    return Fail(Status::Data("a boot did not verify every byte"));
  const uint64_t asked_for = map ? 0 : report.bytes_needed;
  BootRun run;
  run.bytes = static_cast<double>(report.bytes_read);
  run.land_rate = static_cast<double>(report.bytes_read) / report.seconds_land;
  run.whole_rate = static_cast<double>(report.bytes_read) / report.seconds;
  run.anonymous_bytes_extra = anonymous - std::min(anonymous, asked_for);
  return run;
}

// The machine's limits on the very bytes that a boot takes: the data regions, mapped.
class Limits {
 public:
  Result<void> Open(const Generation& generation) {
    for (const ManifestLayer& layer : generation.manifest().layers) {
      HP_ASSIGN(LayerFile file, generation.OpenLayer(layer.ordinal, Encoding::kBase));
      const LayerLayout& layout = file.layout();
      HP_ASSIGN(std::unique_ptr<Mapping> mapping,
                file.file().Map(layout.data_offset, layout.data_bytes));
      HP_TRY(mapping->Populate(0, layout.data_bytes));
      bytes_ += layout.data_bytes;
      mappings_.push_back(std::move(mapping));
    }
    return {};
  }

  double ReadRate(WorkerPool& pool) const {
    // Weighted by bytes, as a boot meets them.
    double seconds = 0;
    for (const auto& mapping : mappings_)
      seconds +=
          static_cast<double>(mapping->bytes().size()) / MeasureReadRate(pool, mapping->bytes());
    return static_cast<double>(bytes_) / seconds;
  }

  // memcpy of every layer into one touched destination as large as all of them.
  double CopyRate(WorkerPool& pool, std::span<std::byte> touched) const {
    constexpr uint64_t kPiece = kMiB;
    struct Copy {
      std::byte* to;
      const std::byte* from;
      uint64_t bytes;
    };
    std::vector<Copy> copies;
    std::byte* to = touched.data();
    for (const auto& mapping : mappings_) {
      const std::span<const std::byte> bytes = mapping->bytes();
      for (uint64_t offset = 0; offset < bytes.size(); offset += kPiece) {
        const uint64_t count = std::min(kPiece, bytes.size() - offset);
        copies.push_back({to, bytes.data() + offset, count});
        to += count;
      }
    }
    return RateOf(bytes_, [&] {
      (void)pool.ParallelFor(copies.size(), [&](size_t i, size_t) -> Result<void> {
        std::memcpy(copies[i].to, copies[i].from, copies[i].bytes);
        return {};
      });
    });
  }

  uint64_t bytes() const { return bytes_; }

 private:
  std::vector<std::unique_ptr<Mapping>> mappings_;
  uint64_t bytes_ = 0;
};

// What a piece of the page cache is dropped in for a half-cached store.
constexpr uint64_t kHalfPieceBytes = 64 * kMiB;

// The data regions on disk.
class DiskLimits {
 public:
  Result<void> Open(const Generation& generation) {
    for (const ManifestLayer& layer : generation.manifest().layers) {
      HP_ASSIGN(LayerFile file, generation.OpenLayer(layer.ordinal, Encoding::kBase));
      files_.push_back(std::move(file));
    }
    return {};
  }

  // Drops all of it, or every second piece; returns the bytes that are gone.
  uint64_t Drop(bool half) const {
    uint64_t cached = 0;
    uint64_t bytes = 0;
    for (const LayerFile& layer : files_) {
      const LayerLayout& layout = layer.layout();
      for (uint64_t at = 0; at < layout.data_bytes; at += (half ? 2 : 1) * kHalfPieceBytes)
        layer.file().DropCache(layout.data_offset + at,
                               std::min(kHalfPieceBytes, layout.data_bytes - at));
      cached += layer.file().CachedBytes(layout.data_offset, layout.data_bytes).value_or(0);
      bytes += layout.data_bytes;
    }
    return bytes - cached;
  }

  // Bytes per second of plain reads of 1 MiB, 32 at once, into touched memory. REQUIRES Drop.
  Result<double> ReadRate(bool direct, std::span<std::byte> touched) const {
    constexpr uint64_t kRequest = kMiB;
    HP_ASSIGN(const std::unique_ptr<AsyncReader> reader, PosixEnv().NewReader({}));
    std::vector<std::unique_ptr<File>> files;
    std::vector<ReadRequest> requests;
    uint64_t bytes = 0;
    for (const LayerFile& layer : files_) {
      HP_ASSIGN(
          std::unique_ptr<File> file,
          PosixEnv().Open(layer.file().path(), direct ? OpenMode::kReadDirect : OpenMode::kRead));
      const LayerLayout& layout = layer.layout();
      for (uint64_t at = 0; at < layout.data_bytes; at += kRequest) {
        const uint64_t count = std::min(kRequest, layout.data_bytes - at);
        requests.push_back(
            {file.get(), layout.data_offset + at, touched.subspan(at, count), count});
      }
      bytes += layout.data_bytes;
      files.push_back(std::move(file));
    }
    const auto start = Clock::now();
    size_t started = 0;
    size_t ended_count = 0;
    std::vector<ReadEnd> ended;
    while (ended_count < requests.size()) {
      while (started < requests.size() && started - ended_count < reader->depth())
        reader->Start(requests[started++]);
      ended.clear();
      HP_TRY(reader->Collect(std::chrono::seconds(10), &ended));
      for (const ReadEnd& end : ended)
        if (end.count.error != 0 || end.count.bytes != end.tag)
          return Fail(Status::FromErrno(end.count.error, "a raw read failed, or was short"));
      ended_count += ended.size();
    }
    return static_cast<double>(bytes) / std::chrono::duration<double>(Clock::now() - start).count();
  }

 private:
  std::vector<LayerFile> files_;
};

struct ColdSamples {
  std::vector<double> raw_direct, raw_buffered, cold[2], cold_all[2], half, half_all, half_limit;
  std::vector<double> anonymous[2], anonymous_half;
};

// One round of what needs the disk. `copy_rate` is this round's.
Result<void> MeasureCold(const Options& options, const Generation& generation, double copy_rate,
                         bool counted, ColdSamples* samples) {
  DiskLimits disk;
  HP_TRY(disk.Open(generation));
  double raw[2] = {};
  {
    HP_ASSIGN(
        HugeBuffer touched,
        HugeBuffer::Allocate(
            PlanLayerLayout(Encoding::kBase, generation.manifest().layers[0].geometry).data_bytes));
    std::memset(touched.data(), 1, touched.size());
    for (const bool direct : {true, false}) {
      const uint64_t dropped = disk.Drop(false);
      HP_TRY(BackFreeMemory(dropped));
      HP_ASSIGN(raw[direct], disk.ReadRate(direct, touched.span()));
    }
  }
  BootRun cold[2];
  for (const bool bypass : {true, false}) {
    const uint64_t dropped = disk.Drop(false);
    HP_TRY(BackFreeMemory(2 * dropped));
    HP_ASSIGN(cold[bypass],
              RunBoot(options, false, bypass ? CacheMode::kBypass : CacheMode::kKeep));
  }
  // The last boot left everything in the page cache.
  const double best = std::max(raw[0], raw[1]);
  const auto dropped = static_cast<double>(disk.Drop(true));
  HP_TRY(BackFreeMemory(2 * static_cast<uint64_t>(dropped)));
  HP_ASSIGN(const BootRun half, RunBoot(options, false, CacheMode::kBypass));
  if (!counted) return {};
  samples->raw_direct.push_back(raw[true]);
  samples->raw_buffered.push_back(raw[false]);
  for (const bool bypass : {true, false}) {
    samples->cold[bypass].push_back(cold[bypass].land_rate);
    samples->cold_all[bypass].push_back(cold[bypass].whole_rate);
    samples->anonymous[bypass].push_back(static_cast<double>(cold[bypass].anonymous_bytes_extra));
  }
  const double bytes = half.bytes;
  samples->half.push_back(half.land_rate);
  samples->half_all.push_back(half.whole_rate);
  samples->anonymous_half.push_back(static_cast<double>(half.anonymous_bytes_extra));
  samples->half_limit.push_back(bytes / std::max(dropped / best, (bytes - dropped) / copy_rate));
  return {};
}

Result<void> PrepareStore(const Options& options) {
  SynthStoreOptions synth;
  HP_ASSIGN(synth.geometry, ParseGeometry(options.smoke ? "4,512,256" : "ds4-flash"));
  synth.layers = options.layers;
  HP_TRY(SynthStore(PosixEnv(), options.directory, synth));
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.directory));
  HP_ASSIGN(const Generation generation, store.OpenGeneration());
  WorkerPool pool;
  HP_TRY(Warm(generation, {Tier::kBase}, pool, nullptr, nullptr));
  return {};
}

Measurement MakeRow(const char* name, const std::vector<double>& rates,
                    const std::vector<double>& rates_all, const std::vector<double>& limits,
                    const std::vector<double>& anonymous_bytes) {
  const double anonymous = *std::max_element(anonymous_bytes.begin(), anonymous_bytes.end());
  return {name,
          Median(rates),
          Median(rates_all),
          Median(limits),
          MedianShare(rates, limits),
          static_cast<uint64_t>(anonymous)};
}

void AddColdRows(const ColdSamples& cold, std::vector<Measurement>* rows) {
  std::vector<double> best(cold.raw_direct);
  for (size_t i = 0; i < best.size(); ++i) best[i] = std::max(best[i], cold.raw_buffered[i]);
  for (const bool bypass : {true, false})
    rows->push_back(MakeRow(bypass ? "cold, bypass" : "cold, keep", cold.cold[bypass],
                            cold.cold_all[bypass], best, cold.anonymous[bypass]));
  rows->push_back(
      MakeRow("half cached", cold.half, cold.half_all, cold.half_limit, cold.anonymous_half));
  rows->push_back(MakeRow("raw, direct", cold.raw_direct, cold.raw_direct, best, {0}));
  rows->push_back(MakeRow("raw, buffered", cold.raw_buffered, cold.raw_buffered, best, {0}));
}

// Limit and boot take turns, so that drift of a noisy machine hits both.
Result<std::vector<Measurement>> Measure(const Options& options, uint64_t* bytes) {
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.directory));
  HP_ASSIGN(const Generation generation, store.OpenGeneration());
  std::vector<double> read_rates, copy_rates, anonymous[2], land[2], whole[2];
  ColdSamples cold;
  for (size_t repetition = 0; repetition <= options.repetitions; ++repetition) {
    const bool counted = repetition > 0;  // the first round warms page tables and clocks
    double copy_rate = 0;
    {
      WorkerPool pool;
      Limits limits;
      HP_TRY(limits.Open(generation));
      *bytes = limits.bytes();
      HP_ASSIGN(HugeBuffer touched, HugeBuffer::Allocate(limits.bytes()));
      std::memset(touched.data(), 1, touched.size());
      const double read_rate = limits.ReadRate(pool);
      copy_rate = limits.CopyRate(pool, touched.span());
      if (counted) read_rates.push_back(read_rate);
      if (counted) copy_rates.push_back(copy_rate);
    }
    for (const bool map : {true, false}) {
      if (!map) HP_TRY(BackFreeMemory(*bytes));
      HP_ASSIGN(const BootRun run, RunBoot(options, map));
      if (!counted) continue;
      land[map].push_back(run.land_rate);
      whole[map].push_back(run.whole_rate);
      anonymous[map].push_back(static_cast<double>(run.anonymous_bytes_extra));
    }
    HP_TRY(MeasureCold(options, generation, copy_rate, counted, &cold));
    // Whole in the page cache again, for the next round.
    WorkerPool pool;
    HP_TRY(Warm(generation, {Tier::kBase}, pool, nullptr, nullptr));
  }
  std::vector<Measurement> rows;
  for (const bool map : {true, false})
    rows.push_back(MakeRow(map ? "boot --map" : "boot", land[map], whole[map],
                           map ? read_rates : copy_rates, anonymous[map]));
  AddColdRows(cold, &rows);
  return rows;
}

void Print(const std::vector<Measurement>& rows, const Options& options, uint64_t bytes) {
  std::printf("%zu cores, %u layers, %s, every byte verified, medians of %zu\n", UsableCpuCount(),
              options.layers, FormatBytes(bytes).c_str(), options.repetitions);
  std::printf("%-13s %10s %10s %9s %14s %16s\n", "", "GB/s", "limit", "of limit", "all in, GB/s",
              "RssAnon beyond");
  for (const Measurement& row : rows)
    std::printf("%-13s %10.2f %10.2f %8.0f%% %14.2f %16s\n", row.name, row.bytes_per_second / 1e9,
                row.limit / 1e9, 100 * row.share, row.bytes_per_second_all / 1e9,
                FormatBytes(row.anonymous_bytes_extra).c_str());
  std::printf(
      "limit of --map: the same cores summing the mapped bytes; of landing: memcpy into "
      "touched huge pages; of cold: the best raw read;\nof half cached (every second 64 MiB on "
      "disk "
      "only): the larger of the cached part's copy time and the other's read time\nall in: "
      "planning and allocating fresh memory included\n");
}

Result<void> WriteJson(const std::vector<Measurement>& rows, const Options& options,
                       uint64_t bytes) {
  std::ostringstream out;
  out << "{\n";
  for (const Measurement& row : rows)
    out << Text(
        "  \"{}\": {{\"gigabytes_per_second\": {:.3f}, \"limit_gigabytes_per_second\": {:.3f}, "
        "\"share_of_limit\": {:.3f}, \"all_in_gigabytes_per_second\": {:.3f}, "
        "\"anonymous_bytes_beyond\": {}}},\n",
        row.name, row.bytes_per_second / 1e9, row.limit / 1e9, row.share,
        row.bytes_per_second_all / 1e9, row.anonymous_bytes_extra);
  out << Text("  \"layers\": {}, \"bytes\": {}, \"cores\": {}, \"repetitions\": {}\n}}\n",
              options.layers, bytes, UsableCpuCount(), options.repetitions);
  return WriteResultFile(options.json_path, out.str());
}

Result<void> Run(Options options) {
  HP_TRY(CheckResultFile(options.json_path));
  const bool own_directory = options.directory.empty();
  if (own_directory)
    options.directory =
        (std::filesystem::temp_directory_path() / Text("hotplane-bench-{}", getpid())).string();
  Result<void> result = PrepareStore(options);
  if (result) {
    uint64_t bytes = 0;
    const Result<std::vector<Measurement>> rows = Measure(options, &bytes);
    if (rows) {
      Print(*rows, options, bytes);
      result = WriteJson(*rows, options, bytes);
    } else {
      result = Fail(rows.error());
    }
  }
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
      options.repetitions = 1;
    } else if (argument == "--store" && has_value) {
      options.directory = argv[++i];
    } else if (argument == "--layers" && has_value) {
      options.layers = static_cast<uint32_t>(std::stoul(argv[++i]));
    } else if (argument == "--repetitions" && has_value) {
      options.repetitions = std::stoul(argv[++i]);
    } else if (argument == "--json" && has_value) {
      options.json_path = argv[++i];
    } else {
      std::fprintf(
          stderr,
          "usage: %s [--smoke] [--store DIR] [--layers N] [--repetitions N] [--json FILE]\n",
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
