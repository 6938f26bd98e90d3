#include "engine/synth.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <optional>

#include "base/format_text.h"
#include "base/log.h"
#include "base/number_text.h"
#include "base/units.h"
#include "base/worker_pool.h"
#include "boot/plan.h"
#include "quant/quantize.h"
#include "store/replaceable.h"
#include "store/store.h"

namespace hotplane {
namespace {

struct NamedGeometry {
  const char* name;
  LayerGeometry geometry;  // E, H, I
};
constexpr NamedGeometry kGeometries[] = {
    {"ds4-flash", {256, 4096, 2048}},
    {"glm-5.2", {256, 6144, 2048}},
    {"kimi-k2", {384, 7168, 2048}},
    {"gpt-oss-120b", {128, 2880, 2880}},
};

// SplitMix64: a counter-based stream, so that every expert has its own without shared state.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

void FillRandom(std::span<std::byte> bytes, uint64_t seed) {
  for (size_t i = 0; i + 8 <= bytes.size(); i += 8) {
    const uint64_t word = Mix(seed + i);
    std::memcpy(bytes.data() + i, &word, 8);
  }
}

// Scales of trained weights lie around 2^-7.
void FillScales(std::span<std::byte> bytes, uint64_t seed) {
  FillRandom(bytes, seed);
  for (std::byte& scale : bytes) scale = std::byte(116 + (std::to_integer<unsigned>(scale) & 7));
}

// One expert's pieces, by role, in memory that is allocated once per worker.
class RandomExpert {
 public:
  RandomExpert(const LayerGeometry& g, const Kernels& kernels) : g_(g), kernels_(kernels) {
    source_.resize(std::max(g.n13() * g.k13(), g.n2() * g.k2()) / 2);
    scales_.resize(std::max(ScalePlaneBytes(g.n13(), g.k13()), ScalePlaneBytes(g.n2(), g.k2())));
  }

  void Generate(uint64_t seed) {
    Pack(g_.n13(), g_.k13(), Mix(seed * 2), &planes_[0]);
    Pack(g_.n2(), g_.k2(), Mix(seed * 2 + 1), &planes_[1]);
    if (!g_.biases) return;
    FillBias(g_.n13(), Mix(seed * 2), &planes_[0].bias);
    FillBias(g_.n2(), Mix(seed * 2 + 1), &planes_[1].bias);
  }

  Result<void> Write(LayerFileWriter& writer, uint32_t expert) const {
    const Encoding encoding = writer.layout().encoding;
    if (encoding == Encoding::kBase) {
      HP_TRY(writer.WritePiece("planes13", expert, planes_[0].codes));
      HP_TRY(writer.WritePiece("sc13", expert, planes_[0].scales));
      HP_TRY(writer.WritePiece("planes2", expert, planes_[1].codes));
      HP_TRY(writer.WritePiece("sc2", expert, planes_[1].scales));
      if (!g_.biases) return {};
      HP_TRY(writer.WritePiece("bias13", expert, planes_[0].bias));
      return writer.WritePiece("bias2", expert, planes_[1].bias);
    }
    const bool nibbles = encoding == Encoding::kDeltaNibble;
    HP_TRY(writer.WritePiece("fp13", expert, nibbles ? planes_[0].nibbles : planes_[0].quintals));
    return writer.WritePiece("fp2", expert, nibbles ? planes_[1].nibbles : planes_[1].quintals);
  }

 private:
  struct Planes {
    std::vector<std::byte> codes, scales, nibbles, quintals, bias;
  };

  // Between -1/2 and 1/2.
  static void FillBias(size_t count, uint64_t seed, std::vector<std::byte>* bias) {
    bias->resize(count * sizeof(float));
    for (size_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(Mix(seed + i) >> 40) * 0x1p-24f - 0.5f;
      std::memcpy(bias->data() + i * sizeof value, &value, sizeof value);
    }
  }

  void Pack(size_t n, size_t k, uint64_t seed, Planes* out) {
    const std::span<std::byte> source(source_.data(), n * k / 2);
    const std::span<std::byte> scales(scales_.data(), ScalePlaneBytes(n, k));
    FillRandom(source, seed);
    FillScales(scales, Mix(seed));
    out->codes.resize(CodePlaneBytes(n, k));
    out->scales.resize(ScalePlaneBytes(n, k));
    out->nibbles.resize(NibblePlaneBytes(n, k));
    out->quintals.resize(QuintalPlaneBytes(n, k));
    (void)kernels_.pack_mxfp4(
        source.data(), scales.data(), n, k,
        {out->codes.data(), out->scales.data(), out->nibbles.data(), out->quintals.data()});
  }

  LayerGeometry g_;
  const Kernels& kernels_;
  std::vector<std::byte> source_, scales_;
  std::array<Planes, 2> planes_;
};

Manifest SynthManifest(const SynthStoreOptions& options) {
  Manifest manifest;
  manifest.identity.source_fingerprint = Digest(
      Text("synthetic E={} H={} I={} layers={} seed={}", options.geometry.experts,
           options.geometry.hidden, options.geometry.intermediate, options.layers, options.seed));
  manifest.identity.abi = kPlaneAbiName;
  manifest.scheme = kSyntheticScheme;
  if (options.geometry.biases) manifest.activation = {ActivationKind::kSwigluOai, 7, 1.702};
  for (uint32_t l = 0; l < options.layers; ++l) {
    ManifestLayer layer;
    layer.ordinal = l;
    layer.model_index = l;
    layer.prefix = Text("layers.{}.ffn.", l);
    layer.geometry = options.geometry;
    layer.source_format = SourceFormat::kMxfp4;
    manifest.layers.push_back(std::move(layer));
  }
  return manifest;
}

// Random experts beside a model's would fill its disk, and from then on every command would have to
// be told which of the two is meant.
Result<void> CheckNoModelThere(Env& env, const std::string& directory) {
  Status refusal =
      Status::Usage("there is a model's store here: random experts are not put beside it")
          .File(directory)
          .Expected("a new folder, or a store that only synth has written to")
          .Advice("give another folder; nothing was written");
  const Result<Store> store = Store::Open(env, directory);
  if (!store) {
    const StatusCode code = store.error().code();
    // What the making of a generation refuses itself.
    if (code == StatusCode::kUsage) return {};
    if (code != StatusCode::kData) return Fail(store.error());
    if (store.error().file() == directory) return {};  // nothing is here
    return Fail(std::move(refusal).Found(store.error().what() + ": " + store.error().file()));
  }
  HP_ASSIGN(const std::vector<Store::Entry> entries, store->FindGenerations(""));
  for (const Store::Entry& entry : entries) {
    const auto opened = store->OpenGeneration(ToHex(entry.id), {.read_only = true});
    if (opened && opened->manifest().scheme == kSyntheticScheme) continue;
    if (!opened && opened.error().code() != StatusCode::kData) return Fail(opened.error());
    return Fail(std::move(refusal).Found(
        Text("generation {}, {}", ToHex(entry.id),
             opened ? entry.model : std::string("whose manifest cannot be read"))));
  }
  HP_ASSIGN(const std::vector<std::string> lost, store->ListWithoutManifest());
  if (lost.empty()) return {};
  return Fail(std::move(refusal).Found("layer files without their manifest: " + lost.front()));
}

std::string LayerText(uint32_t layer, Encoding encoding) {
  return Text("layer {} ({})", layer, EncodingName(encoding));
}

// Of a file that is there already or may be made: one that may well be right is not replaced, nor
// is one that no build replaces.
Result<TierProbe> ProbeFile(const Generation& generation, uint32_t layer, Encoding encoding) {
  TierProbe probe = generation.Probe(layer, encoding);
  if (probe.presence == Presence::kUnreadable)
    return Fail(UnreadableFile(*probe.reason, LayerText(layer, encoding)));
  if (probe.presence == Presence::kDamaged)
    HP_TRY(CheckReplaceable(generation.env(), generation.LayerPath(layer, encoding), layer));
  return probe;
}

// The bytes of the files that are to be made.
Result<uint64_t> BytesMissing(Env& env, const std::string& directory, const Manifest& manifest,
                              const SynthStoreOptions& options) {
  const std::string name = ToHex(GenerationOf(manifest.identity));
  std::optional<Generation> there;
  const Result<Store> store = Store::Open(env, directory);
  if (store) {
    HP_ASSIGN(const std::vector<Store::Entry> found, store->FindGenerations(name));
    if (!found.empty()) {
      HP_ASSIGN(there, store->OpenGeneration(name, {.read_only = true}));
    }
  }
  uint64_t bytes = 0;
  for (uint32_t l = 0; l < options.layers; ++l)
    for (const Encoding encoding : options.encodings) {
      TierProbe probe;
      if (there) {
        HP_ASSIGN(probe, ProbeFile(*there, l, encoding));
      }
      if (probe.presence != Presence::kPresent)
        bytes += PlanLayerLayout(encoding, options.geometry).file_bytes;
    }
  return bytes;
}

// Before anything is written: of a folder that is not there yet the disk that it would be on.
Result<void> CheckSpace(Env& env, const std::string& directory, uint64_t bytes) {
  std::string place = directory;
  for (;; place = ParentPath(place)) {
    HP_ASSIGN(const FileStat stat, env.Stat(place));
    if (stat.type == FileType::kDirectory) break;
    if (stat.type != FileType::kInvalid) return {};  // no folder can be made: that is told later
  }
  HP_ASSIGN(const uint64_t free_bytes, env.FreeBytes(place));
  if (bytes <= free_bytes) return {};
  return Fail(Status::Capacity("the synthetic store does not fit on the disk")
                  .File(directory)
                  .Expected(Text("{} free", FormatBytes(bytes)))
                  .Found(Text("{} free", FormatBytes(free_bytes)))
                  .Advice("fewer --layers, or another directory"));
}

}  // namespace

Result<LayerGeometry> ParseGeometry(std::string_view text) {
  std::string names;
  for (const NamedGeometry& named : kGeometries) {
    if (text == named.name) return named.geometry;
    names += Text("{}, ", named.name);
  }
  uint32_t numbers[3] = {};
  std::string_view rest = text;
  for (int i = 0; i < 3; ++i) {
    const size_t comma = i == 2 ? std::string_view::npos : rest.find(',');
    numbers[i] = ParseDecimal(rest.substr(0, comma)).value_or(0);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    if (numbers[i] == 0)
      return Fail(Status::Usage(Text("'{}' is not a geometry", text))
                      .Expected(names + "or E,H,I such as 8,256,128"));
  }
  const LayerGeometry geometry{numbers[0], numbers[1], numbers[2]};
  if (geometry.hidden % 64 != 0 || geometry.intermediate % 64 != 0 || geometry.experts > 4096 ||
      geometry.hidden > 65536 || geometry.intermediate > 65536)
    return Fail(Status::Usage(Text("'{}' is not a geometry that planes can have", text))
                    .Expected("E up to 4096; H and I multiples of 64 up to 65536"));
  return geometry;
}

Result<SynthReport> SynthStore(Env& env, const std::string& directory,
                               const SynthStoreOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const LockWaiting waiting{options.cancel, options.stall_seconds, options.progress};
  HP_TRY(CheckNoModelThere(env, directory));
  const Manifest manifest = SynthManifest(options);
  HP_ASSIGN(const uint64_t bytes_missing, BytesMissing(env, directory, manifest, options));
  HP_TRY(CheckSpace(env, directory, bytes_missing));
  HP_ASSIGN(const Generation generation,
            Store::OpenOrCreateGeneration(env, directory, manifest, waiting));
  HP_ASSIGN(const Kernels* const kernels, SelectKernels(std::nullopt));
  WorkerPool pool(options.worker_count);
  std::vector<RandomExpert> experts(pool.worker_count(), RandomExpert(options.geometry, *kernels));
  SynthReport report;
  report.generation = ToHex(generation.id());
  uint64_t bytes_layer = 0;
  for (const Encoding encoding : options.encodings)
    bytes_layer += PlanLayerLayout(encoding, options.geometry).file_bytes;
  if (options.progress != nullptr)
    options.progress->Begin("synthesizing", bytes_layer * options.layers);
  for (uint32_t l = 0; l < options.layers; ++l) {
    HP_ASSIGN(const auto lock, generation.LockLayer(l, LockWait::kBlock, waiting));
    std::vector<std::unique_ptr<LayerFileWriter>> writers;
    for (const Encoding encoding : options.encodings) {
      HP_ASSIGN(const TierProbe probe, ProbeFile(generation, l, encoding));
      if (probe.presence == Presence::kPresent) continue;
      if (probe.presence == Presence::kDamaged)
        Log(LogLevel::kWarning, "{} is damaged and is made again: {}", LayerText(l, encoding),
            probe.reason->what());
      HP_ASSIGN(std::unique_ptr<LayerFileWriter> writer, generation.CreateLayer(l, encoding));
      writers.push_back(std::move(writer));
    }
    HP_TRY(pool.ParallelFor(writers.empty() ? 0 : options.geometry.experts,
                            [&](size_t e, size_t worker) -> Result<void> {
                              if (options.cancel != nullptr) HP_TRY(options.cancel->Check());
                              experts[worker].Generate(
                                  Mix(options.seed ^ Mix(uint64_t{l} << 32 | e)));
                              for (const auto& writer : writers)
                                HP_TRY(experts[worker].Write(*writer, static_cast<uint32_t>(e)));
                              if (options.progress != nullptr)
                                options.progress->Add(bytes_layer / options.geometry.experts);
                              return {};
                            }));
    for (const auto& writer : writers) {
      HP_TRY(writer->Publish());
      report.bytes_written += writer->layout().file_bytes;
    }
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace hotplane
