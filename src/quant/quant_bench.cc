// How fast one core quantizes, memory to memory: from sources far larger than the caches to base
// and quintal planes, with the checksum of every 256 KiB of output, beside what memcpy reaches on
// the same core in the same run.

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "base/format_text.h"
#include "base/memory.h"
#include "base/result_file.h"
#include "base/units.h"
#include "format/checksum.h"
#include "quant/quantize.h"

namespace hotplane {
namespace {

constexpr size_t kChunkBytes = 256 * kKiB;
constexpr size_t kFp8Block = 128;

struct Options {
  bool smoke = false;
  size_t repetitions = 7;
  std::string json_path;
};

// One projection of an expert; the DeepSeek-V4-Flash shapes unless smoke.
struct Shape {
  size_t n = 0;
  size_t k = 0;
  size_t elements() const { return n * k; }
};
struct Expert {
  Shape gate_or_up;
  Shape down;
  size_t elements() const { return 2 * gate_or_up.elements() + down.elements(); }
};

uint64_t Mix(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

void FillRandom(std::span<std::byte> bytes) {
  uint64_t state = 88172645463325252u;
  for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    const uint64_t word = Mix(state);
    std::memcpy(bytes.data() + i, &word, 8);
  }
}

// Weights between 2^-9 and 2^-5 of either sign, and none that is zero.
void FillBf16(std::span<std::byte> bytes) {
  uint64_t state = 1181783497276652981u;
  for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    const uint64_t word = (Mix(state) & 0x81FF81FF81FF81FFu) + 0x3B003B003B003B00u;
    std::memcpy(bytes.data() + i, &word, 8);
  }
}

void FillScales(std::span<std::byte> bytes) {
  FillRandom(bytes);
  for (std::byte& byte : bytes) byte = std::byte(110 + (std::to_integer<unsigned>(byte) & 15));
}

// base plus the bits of a random number that are in `mask`.
void FillE4m3(std::span<std::byte> bytes, unsigned base, unsigned mask) {
  FillRandom(bytes);
  for (std::byte& byte : bytes) {
    byte = std::byte((base + (std::to_integer<unsigned>(byte) & mask & 0x7Fu)) & 0x7Fu) |
           (byte & std::byte(mask & 0x80u));
  }
}

// Checksums a plane chunk by chunk as it grows, while it is still in the cache.
class ChunkHasher {
 public:
  explicit ChunkHasher(std::byte* plane) : plane_(plane) {}
  std::byte* end() const { return plane_ + written_; }
  void Grow(size_t bytes) {
    written_ += bytes;
    while (written_ - hashed_ >= kChunkBytes) Hash(kChunkBytes);
  }
  uint64_t Finish() {
    if (written_ > hashed_) Hash(written_ - hashed_);
    return sum_;
  }

 private:
  void Hash(size_t bytes) {
    sum_ ^= Checksum64({plane_ + hashed_, bytes});
    hashed_ += bytes;
  }
  std::byte* plane_;
  size_t written_ = 0;
  size_t hashed_ = 0;
  uint64_t sum_ = 0;
};

// Base and quintal planes of one matrix.
struct PlaneWriter {
  PlaneWriter(std::byte* base, const Shape& shape)
      : codes(base),
        scales(base + CodePlaneBytes(shape.n, shape.k)),
        quintals(scales.end() + ScalePlaneBytes(shape.n, shape.k)) {}
  PlaneOutputs outputs() const { return {codes.end(), scales.end(), nullptr, quintals.end()}; }
  void Grow(size_t n, size_t k) {
    codes.Grow(CodePlaneBytes(n, k));
    scales.Grow(ScalePlaneBytes(n, k));
    quintals.Grow(QuintalPlaneBytes(n, k));
  }
  uint64_t Finish() { return codes.Finish() ^ scales.Finish() ^ quintals.Finish(); }

  ChunkHasher codes;
  ChunkHasher scales;
  ChunkHasher quintals;
};

size_t OutputBytes(const Shape& shape) {
  return CodePlaneBytes(shape.n, shape.k) + ScalePlaneBytes(shape.n, shape.k) +
         QuintalPlaneBytes(shape.n, shape.k);
}

struct Buffers {
  Expert expert;
  size_t mxfp4_experts = 0;
  size_t bf16_experts = 0;
  HugeBuffer nibbles;
  HugeBuffer scales;
  HugeBuffer bf16;
  HugeBuffer e4m3_scales;          // of NVFP4, with `nibbles`
  HugeBuffer fp8;                  // as many experts as of bf16
  std::vector<double> fp8_scales;  // of one matrix, for all
  HugeBuffer output;  // as large as what all experts of a case give: no line is still in a cache
};

using PackStrip = std::function<void(size_t row, const PlaneOutputs& out)>;

void WriteMatrix(const Shape& rows, PlaneWriter& writer, const PackStrip& pack) {
  for (size_t row = 0; row < rows.n; row += kStripRows) {
    pack(row, writer.outputs());
    writer.Grow(kStripRows, rows.k);
  }
}

uint64_t RunMxfp4(const Kernels& kernels, const Buffers& buffers, size_t experts) {
  uint64_t sum = 0;
  const std::byte* nibbles = buffers.nibbles.data();
  const std::byte* scales = buffers.scales.data();
  std::byte* to = buffers.output.data();
  for (size_t e = 0; e < experts; ++e) {
    const Shape w13 = {2 * buffers.expert.gate_or_up.n, buffers.expert.gate_or_up.k};
    for (const Shape& shape : {w13, buffers.expert.down}) {
      PlaneWriter writer(to, shape);
      WriteMatrix(shape, writer, [&](size_t row, const PlaneOutputs& out) {
        kernels.pack_mxfp4(nibbles + row * shape.k / 2, scales + row * shape.k / kScaleBlock,
                           kStripRows, shape.k, out);
      });
      sum ^= writer.Finish();
      nibbles += shape.elements() / 2;
      scales += shape.elements() / kScaleBlock;
      to += OutputBytes(shape);
    }
  }
  return sum;
}

uint64_t RunBf16(const Kernels& kernels, const Buffers& buffers, size_t experts) {
  uint64_t sum = 0;
  const std::byte* weights = buffers.bf16.data();
  std::byte* to = buffers.output.data();
  const auto quantize = [&](const Shape& shape, PlaneWriter& writer) {
    const ZeroCount zeros = kernels.count_zeros(SourceFormat::kBf16, weights, shape.elements());
    const bool alternate = ZerosAlternate(ZeroMode::kAuto, zeros);
    WriteMatrix(shape, writer, [&](size_t row, const PlaneOutputs& out) {
      kernels.quantize(SourceFormat::kBf16, weights + row * shape.k * 2, kStripRows, shape.k,
                       alternate, out);
    });
    weights += shape.elements() * 2;
  };
  for (size_t e = 0; e < experts; ++e) {
    const Shape w13 = {2 * buffers.expert.gate_or_up.n, buffers.expert.gate_or_up.k};
    PlaneWriter writer13(to, w13);
    quantize(buffers.expert.gate_or_up, writer13);
    quantize(buffers.expert.gate_or_up, writer13);
    sum ^= writer13.Finish();
    to += OutputBytes(w13);
    PlaneWriter writer2(to, buffers.expert.down);
    quantize(buffers.expert.down, writer2);
    sum ^= writer2.Finish();
    to += OutputBytes(buffers.expert.down);
  }
  return sum;
}

// Planes of whole matrices: gate and up side by side, then down. `quantize` takes one matrix.
using QuantizeMatrix = std::function<void(const Shape&, const PlaneOutputs&)>;
uint64_t RunMatrices(const Buffers& buffers, size_t experts, const QuantizeMatrix& quantize) {
  uint64_t sum = 0;
  std::byte* to = buffers.output.data();
  for (size_t e = 0; e < experts; ++e) {
    const Shape& half = buffers.expert.gate_or_up;
    const Shape w13 = {2 * half.n, half.k};
    PlaneWriter writer13(to, w13);
    for (int projection = 0; projection < 2; ++projection) {
      quantize(half, writer13.outputs());
      writer13.Grow(half.n, half.k);
    }
    sum ^= writer13.Finish();
    to += OutputBytes(w13);
    PlaneWriter writer2(to, buffers.expert.down);
    quantize(buffers.expert.down, writer2.outputs());
    writer2.Grow(buffers.expert.down.n, buffers.expert.down.k);
    sum ^= writer2.Finish();
    to += OutputBytes(buffers.expert.down);
  }
  return sum;
}

uint64_t RunNvfp4(const Kernels& kernels, const Buffers& buffers, size_t experts) {
  const std::byte* nibbles = buffers.nibbles.data();
  const std::byte* scales = buffers.e4m3_scales.data();
  return RunMatrices(buffers, experts, [&](const Shape& shape, const PlaneOutputs& out) {
    const Nvfp4Matrix matrix = {nibbles, scales, 0x1.5p-12, false};
    const ZeroCount zeros = kernels.count_zeros_nvfp4(nibbles, scales, shape.elements());
    kernels.quantize_nvfp4(matrix, shape.n, shape.k, ZerosAlternate(ZeroMode::kAuto, zeros), out);
    nibbles += shape.elements() / 2;
    scales += shape.elements() / kNvfp4Block;
  });
}

uint64_t RunFp8(const Kernels& kernels, const Buffers& buffers, size_t experts) {
  const std::byte* elements = buffers.fp8.data();
  return RunMatrices(buffers, experts, [&](const Shape& shape, const PlaneOutputs& out) {
    const Fp8Matrix matrix = {elements, buffers.fp8_scales.data(), kFp8Block, kFp8Block};
    const ZeroCount zeros = kernels.count_zeros_fp8(matrix, shape.n, shape.k);
    kernels.quantize_fp8(matrix, shape.n, shape.k, ZerosAlternate(ZeroMode::kAuto, zeros), out);
    elements += shape.elements();
  });
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double Seconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Case {
  std::string name;
  std::string variant;
  size_t source_bytes = 0;
  std::function<uint64_t()> run;
  std::vector<double> seconds = {};      // of the wall clock
  std::vector<double> cpu_seconds = {};  // that this thread was running
  uint64_t checksum = 0;                 // of all outputs; equal for cases of equal name and size

  double bytes_per_second() const { return static_cast<double>(source_bytes) / Median(seconds); }
  double bytes_per_cpu_second() const {
    return static_cast<double>(source_bytes) / Median(cpu_seconds);
  }
};

Result<Buffers> MakeBuffers(bool smoke) {
  Buffers buffers;
  buffers.expert = smoke ? Expert{{64, 256}, {256, 64}} : Expert{{2048, 4096}, {4096, 2048}};
  buffers.mxfp4_experts = smoke ? 2 : 24;
  buffers.bf16_experts = smoke ? 2 : 8;
  const size_t elements = buffers.expert.elements();
  const size_t count = buffers.mxfp4_experts * elements;
  HP_ASSIGN(buffers.nibbles, HugeBuffer::Allocate(count / 2));
  HP_ASSIGN(buffers.scales, HugeBuffer::Allocate(count / kScaleBlock));
  HP_ASSIGN(buffers.bf16, HugeBuffer::Allocate(buffers.bf16_experts * elements * 2));
  HP_ASSIGN(buffers.output, HugeBuffer::Allocate(count / 4 + count / 16 * 5 + count / kScaleBlock));
  FillRandom(buffers.nibbles.span());
  FillScales(buffers.scales.span());
  FillBf16(buffers.bf16.span());
  HP_ASSIGN(buffers.e4m3_scales, HugeBuffer::Allocate(count / kNvfp4Block));
  HP_ASSIGN(buffers.fp8, HugeBuffer::Allocate(buffers.bf16_experts * elements));
  FillE4m3(buffers.e4m3_scales.span(), 0x28, 31);
  FillE4m3(buffers.fp8.span(), 0x20, 0x9F);
  for (size_t i = 0; i < elements / (kFp8Block * kFp8Block) + 4; ++i) {
    buffers.fp8_scales.push_back(static_cast<float>(1 + i % 97) * 0x1.3p-14F);
  }
  FillRandom(buffers.output.span());
  return buffers;
}

std::vector<Case> MakeCases(const Buffers& buffers) {
  std::vector<Case> cases;
  const size_t copied = std::min(buffers.nibbles.size(), buffers.output.size());
  cases.push_back({"memcpy", "libc", copied, [&buffers, copied] {
                     std::memcpy(buffers.output.data(), buffers.nibbles.data(), copied);
                     return uint64_t{0};
                   }});
  for (const Kernels* kernels : AvailableKernels()) {
    // The reference is there to be right; one expert tells its speed.
    const bool slow = kernels->isa == Isa::kScalar;
    const size_t mxfp4 = slow ? 1 : buffers.mxfp4_experts;
    const size_t bf16 = slow ? 1 : buffers.bf16_experts;
    const size_t elements = buffers.expert.elements();
    cases.push_back({"mxfp4 -> base + quintal", kernels->name,
                     mxfp4 * (elements / 2 + elements / kScaleBlock),
                     [=, &buffers] { return RunMxfp4(*kernels, buffers, mxfp4); }});
    cases.push_back({"nvfp4 -> base + quintal", kernels->name,
                     mxfp4 * (elements / 2 + elements / kNvfp4Block),
                     [=, &buffers] { return RunNvfp4(*kernels, buffers, mxfp4); }});
    cases.push_back({"fp8 -> base + quintal", kernels->name, bf16 * elements,
                     [=, &buffers] { return RunFp8(*kernels, buffers, bf16); }});
    cases.push_back({"bf16 -> base + quintal", kernels->name, bf16 * elements * 2,
                     [=, &buffers] { return RunBf16(*kernels, buffers, bf16); }});
  }
  return cases;
}

std::string CpuName() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

void StayOnThisCpu() {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(sched_getcpu(), &set);
  sched_setaffinity(0, sizeof set, &set);
}

// The share is taken from CPU time, so that other work on the machine weighs on neither side; on an
// idle machine both rates are the same.
Result<void> Report(const std::vector<Case>& cases, const Options& options) {
  std::printf("%s, one core, median of %zu%s\n", CpuName().c_str(), options.repetitions,
              options.smoke ? ", smoke sizes: figures mean nothing" : "");
  std::printf("%-24s %-8s %12s %16s %16s\n", "case", "variant", "source GB/s", "GB/s of CPU time",
              "share of memcpy");
  std::string rows;
  for (const Case& each : cases) {
    const double rate = each.bytes_per_second() / 1e9;
    const double cpu_rate = each.bytes_per_cpu_second() / 1e9;
    const double share = each.bytes_per_cpu_second() / cases.front().bytes_per_cpu_second();
    std::printf("%-24s %-8s %12.3f %16.3f %15.1f%%\n", each.name.c_str(), each.variant.c_str(),
                rate, cpu_rate, 100 * share);
    rows += Text(
        "{}    {{\"case\": \"{}\", \"variant\": \"{}\", \"source_bytes\": {}, "
        "\"gigabytes_per_second\": {:.4f}, \"gigabytes_per_cpu_second\": {:.4f}, "
        "\"share_of_memcpy\": {:.4f}}}",
        rows.empty() ? "" : ",\n", each.name, each.variant, each.source_bytes, rate, cpu_rate,
        share);
  }
  return WriteResultFile(
      options.json_path,
      Text("{{\n  \"benchmark\": \"quant\",\n  \"machine\": \"{}\",\n", CpuName()) +
          Text("  \"version\": \"{}\",\n  \"smoke\": {},\n  \"cores\": 1,\n", HOTPLANE_VERSION_TEXT,
               options.smoke) +
          Text("  \"repetitions\": {},\n  \"rows\": [\n{}\n  ]\n}}\n", options.repetitions, rows));
}

template <typename T>
int Told(const Result<T>& failed) {
  std::fprintf(stderr, "%s\n", failed.error().ToString().c_str());
  return failed.error().exit_code();
}

int Run(const Options& options) {
  if (const Result<void> writable = CheckResultFile(options.json_path); !writable)
    return Told(writable);
  StayOnThisCpu();
  const Result<Buffers> buffers = MakeBuffers(options.smoke);
  if (!buffers) return Told(buffers);
  std::vector<Case> cases = MakeCases(*buffers);
  // Round by round, so that a slow moment of the machine meets all cases alike.
  for (size_t round = 0; round < options.repetitions; ++round) {
    for (Case& each : cases) {
      if (each.variant != "libc" && !ForceChecksumIsa(each.variant)) return 1;
      const double wall = Seconds(CLOCK_MONOTONIC);
      const double cpu = Seconds(CLOCK_THREAD_CPUTIME_ID);
      each.checksum = each.run();
      each.cpu_seconds.push_back(Seconds(CLOCK_THREAD_CPUTIME_ID) - cpu);
      each.seconds.push_back(Seconds(CLOCK_MONOTONIC) - wall);
    }
  }
  if (const Result<void> reported = Report(cases, options); !reported) return Told(reported);
  for (const Case& one : cases) {
    for (const Case& other : cases) {
      const bool same_work = one.name == other.name && one.source_bytes == other.source_bytes;
      if (same_work && one.checksum != other.checksum) {
        std::fprintf(stderr, "%s: %s and %s differ\n", one.name.c_str(), one.variant.c_str(),
                     other.variant.c_str());
        return 1;
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace hotplane

int main(int argc, char** argv) {
  hotplane::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--smoke") {
      options.smoke = true;
    } else if (argument == "--json" && i + 1 < argc) {
      options.json_path = argv[++i];
    } else {
      std::fprintf(stderr, "usage: quant_bench [--smoke] [--json FILE]\n");
      return 2;
    }
  }
  return hotplane::Run(options);
}
