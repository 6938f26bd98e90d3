// How fast this machine boots a page-cached store on its CPUs, every byte verified, beside what the
// same cores reach on the same bytes in the same run: reading the mapped files, and memcpy from
// them into touched huge pages.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/fault_guard.h"
#include "base/format_text.h"
#include "base/memory.h"
#include "base/topology.h"
#include "base/units.h"
#include "boot/limits.h"
#include "engine/engine.h"
#include "engine/synth.h"
#include "engine/warm.h"

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
  uint64_t anonymous_bytes_extra = 0;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
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
  double land_rate = 0;
  double whole_rate = 0;
  uint64_t anonymous_bytes_extra = 0;
};

Result<BootRun> RunBoot(const Options& options, bool map) {
  EngineOptions engine_options;
  engine_options.store_directory = options.directory;
  engine_options.boot.map = map;
  const uint64_t anonymous_before = ReadResidentAnonymousBytes();
  HP_ASSIGN(const std::unique_ptr<Engine> engine, Engine::Open(PosixEnv(), engine_options));
  HP_TRY(engine->Boot({}));
  const uint64_t anonymous = ReadResidentAnonymousBytes() - anonymous_before;
  const BootReport& report = engine->report();
  if (report.bytes_verified != report.bytes_needed)
    return Fail(Status::Data("a boot did not verify every byte"));
  const uint64_t asked_for = map ? 0 : report.bytes_needed;
  BootRun run;
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

// Limit and boot take turns, so that drift of a noisy machine hits both.
Result<std::vector<Measurement>> Measure(const Options& options, uint64_t* bytes) {
  HP_ASSIGN(const Store store, Store::Open(PosixEnv(), options.directory));
  HP_ASSIGN(const Generation generation, store.OpenGeneration());
  std::vector<double> read_rates, copy_rates, anonymous[2], land[2], whole[2];
  for (size_t repetition = 0; repetition <= options.repetitions; ++repetition) {
    const bool counted = repetition > 0;  // the first round warms page tables and clocks
    {
      WorkerPool pool;
      Limits limits;
      HP_TRY(limits.Open(generation));
      *bytes = limits.bytes();
      HP_ASSIGN(HugeBuffer touched, HugeBuffer::Allocate(limits.bytes()));
      std::memset(touched.data(), 1, touched.size());
      const double read_rate = limits.ReadRate(pool);
      const double copy_rate = limits.CopyRate(pool, touched.span());
      if (counted) read_rates.push_back(read_rate);
      if (counted) copy_rates.push_back(copy_rate);
    }
    for (const bool map : {true, false}) {
      HP_ASSIGN(const BootRun run, RunBoot(options, map));
      if (!counted) continue;
      land[map].push_back(run.land_rate);
      whole[map].push_back(run.whole_rate);
      anonymous[map].push_back(static_cast<double>(run.anonymous_bytes_extra));
    }
  }
  std::vector<Measurement> rows;
  for (const bool map : {true, false})
    rows.push_back(
        {map ? "boot --map" : "boot", Median(land[map]), Median(whole[map]),
         Median(map ? read_rates : copy_rates),
         static_cast<uint64_t>(*std::max_element(anonymous[map].begin(), anonymous[map].end()))});
  return rows;
}

void Print(const std::vector<Measurement>& rows, const Options& options, uint64_t bytes) {
  std::printf("%zu cores, %u layers, %s, page cache warm, every byte verified, medians of %zu\n",
              UsableCpuCount(), options.layers, FormatBytes(bytes).c_str(), options.repetitions);
  std::printf("%-12s %10s %10s %9s %14s %16s\n", "", "GB/s", "limit", "of limit", "all in, GB/s",
              "RssAnon beyond");
  for (const Measurement& row : rows)
    std::printf("%-12s %10.2f %10.2f %8.0f%% %14.2f %16s\n", row.name, row.bytes_per_second / 1e9,
                row.limit / 1e9, 100 * row.bytes_per_second / row.limit,
                row.bytes_per_second_all / 1e9, FormatBytes(row.anonymous_bytes_extra).c_str());
  std::printf(
      "limit of --map: the same cores summing the mapped bytes; of landing: memcpy into "
      "touched huge pages\nall in: planning and allocating fresh memory included\n");
}

void WriteJson(const std::vector<Measurement>& rows, const Options& options, uint64_t bytes) {
  std::ofstream out(options.json_path);
  out << "{\n";
  for (const Measurement& row : rows)
    out << Text(
        "  \"{}\": {{\"gigabytes_per_second\": {:.3f}, \"limit_gigabytes_per_second\": {:.3f}, "
        "\"share_of_limit\": {:.3f}, \"all_in_gigabytes_per_second\": {:.3f}, "
        "\"anonymous_bytes_beyond\": {}}},\n",
        row.name, row.bytes_per_second / 1e9, row.limit / 1e9, row.bytes_per_second / row.limit,
        row.bytes_per_second_all / 1e9, row.anonymous_bytes_extra);
  out << Text("  \"layers\": {}, \"bytes\": {}, \"cores\": {}, \"repetitions\": {}\n}}\n",
              options.layers, bytes, UsableCpuCount(), options.repetitions);
}

Result<void> Run(Options options) {
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
      if (!options.json_path.empty()) WriteJson(*rows, options, bytes);
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
