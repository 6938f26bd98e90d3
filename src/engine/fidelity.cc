#include "engine/fidelity.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>

#include "base/check.h"
#include "base/format_text.h"
#include "boot/describe.h"
#include "boot/layer_selection.h"
#include "checkpoint/source_weights.h"
#include "engine/stored_weights.h"
#include "format/number_values.h"

namespace hotplane {
namespace {

constexpr std::array<double, 4> kCodeValues = {-4, -1, 1, 4};
constexpr std::array<double, 16> kNibbleValues = [] {
  std::array<double, 16> values{};
  for (unsigned i = 0; i < values.size(); ++i) values[i] = E2m1Value(i);
  return values;
}();

void Add(const TierSums& from, TierSums& to) {
  to.error_squares += from.error_squares;
  to.errors += from.errors;
  to.magnitude_errors += from.magnitude_errors;
  to.largest += from.largest;
  to.clipped += from.clipped;
}

// Sums in turn, so that no addition waits for the one before; without branches on the weights,
// which nothing could predict.
constexpr size_t kLanes = 4;
static_assert(kScaleBlock % kLanes == 0);

// 32 weights as a tier has them: value[mark] times scale.
template <size_t kMarks>
void AddBlock(std::span<const double> source, const std::array<double, kMarks>& value,
              const uint8_t* marks, double scale, TierSums& sums) {
  constexpr size_t kLargestMark = kMarks == 4 ? 3 : 7;
  const double largest = value[kLargestMark];
  const double limit = largest * scale;
  std::array<double, kLanes> squares{}, errors{}, magnitude_errors{};
  uint64_t largest_count = 0;
  uint64_t clipped_count = 0;
  for (size_t first = 0; first < source.size(); first += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const double w = source[first + lane];
      const double mark = value[marks[first + lane]];
      const double error = mark * scale - w;
      squares[lane] += error * error;
      errors[lane] += error;
      magnitude_errors[lane] += static_cast<double>(w != 0) * std::copysign(1.0, w) * error;
      const unsigned is_largest = std::fabs(mark) == largest;
      largest_count += is_largest;
      clipped_count += is_largest & static_cast<unsigned>(std::fabs(w) > limit);
    }
  }
  const auto sum = [](const std::array<double, kLanes>& lanes) {
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  };
  sums.error_squares += sum(squares);
  sums.errors += sum(errors);
  sums.magnitude_errors += sum(magnitude_errors);
  sums.largest += largest_count;
  sums.clipped += clipped_count;
}

}  // namespace

void FidelitySums::Add(const FidelitySums& other) {
  weights += other.weights;
  zeros += other.zeros;
  negative_zeros += other.negative_zeros;
  squares += other.squares;
  magnitudes += other.magnitudes;
  zero_nibbles += other.zero_nibbles;
  negative_zero_nibbles += other.negative_zero_nibbles;
  blocks += other.blocks;
  zero_blocks += other.zero_blocks;
  exponent_min = std::min(exponent_min, other.exponent_min);
  exponent_max = std::max(exponent_max, other.exponent_max);
  hotplane::Add(other.base, base);
  hotplane::Add(other.fp4, fp4);
}

void FidelitySums::AddRow(std::span<const double> source, std::span<const uint8_t> scales,
                          std::span<const uint8_t> codes, std::span<const uint8_t> nibbles) {
  HP_CHECK(source.size() % kScaleBlock == 0 && scales.size() == source.size() / kScaleBlock &&
           codes.size() == source.size());
  // Sums of a row, then of a matrix: a running sum over millions would lose more.
  FidelitySums row;
  row.weights = source.size();
  row.blocks = scales.size();
  for (size_t block = 0; block < scales.size(); ++block) {
    const size_t first = block * kScaleBlock;
    const std::span<const double> part = source.subspan(first, kScaleBlock);
    uint64_t zeros_here = 0;
    for (const double w : part) {
      row.squares += w * w;
      row.magnitudes += std::fabs(w);
      zeros_here += w == 0 ? 1 : 0;
      row.negative_zeros += w == 0 && std::signbit(w) ? 1 : 0;
    }
    row.zeros += zeros_here;
    const int exponent = int{scales[block]} - kE8m0Bias;
    const double scale = std::ldexp(1.0, exponent);
    if (zeros_here == kScaleBlock) {
      ++row.zero_blocks;
    } else {
      row.exponent_min = std::min(row.exponent_min, exponent);
      row.exponent_max = std::max(row.exponent_max, exponent);
    }
    AddBlock(part, kCodeValues, codes.data() + first, scale, row.base);
    if (nibbles.empty()) continue;
    AddBlock(part, kNibbleValues, nibbles.data() + first, scale, row.fp4);
    for (size_t i = first; i < first + kScaleBlock; ++i) {
      row.zero_nibbles += (nibbles[i] & 7) == 0 ? 1 : 0;
      row.negative_zero_nibbles += nibbles[i] == 8 ? 1 : 0;
    }
  }
  Add(row);
}

std::optional<double> RelativeRms(const FidelitySums& sums, const TierSums& tier) {
  if (!(sums.squares > 0)) return std::nullopt;
  return std::sqrt(tier.error_squares / sums.squares);
}

std::optional<double> SignedBias(const FidelitySums& sums, const TierSums& tier) {
  if (!(sums.squares > 0)) return std::nullopt;
  const auto count = static_cast<double>(sums.weights);
  return tier.errors / count / std::sqrt(sums.squares / count);
}

std::optional<double> MagnitudeBias(const FidelitySums& sums, const TierSums& tier) {
  if (!(sums.magnitudes > 0)) return std::nullopt;
  return tier.magnitude_errors / sums.magnitudes;
}

FidelitySums FidelityLayer::Total() const {
  FidelitySums total;
  for (const FidelitySums& sums : projections) total.Add(sums);
  return total;
}

FidelitySums FidelityReport::Total(bool fp4) const {
  FidelitySums total;
  for (const FidelityLayer& layer : layers)
    if ((fp4 ? layer.fp4_missing : layer.base_missing).empty()) total.Add(layer.Total());
  return total;
}

namespace {

// What one worker needs for one expert at a time.
struct Workspace {
  SourceWeights source;
  StoredExpert stored;
  std::vector<SourceTensorDigest> digests;
  std::vector<double> row;
};

using SourceDigests = std::map<std::string, Digest128, std::less<>>;

class Measurement {
 public:
  Measurement(const Generation& generation, const Checkpoint& checkpoint, const MoeModel& model,
              const FidelityOptions& options, const Kernels& kernels)
      : generation_(generation),
        checkpoint_(checkpoint),
        model_(model),
        options_(options),
        stored_(generation, kernels) {}

  Result<FidelityReport> Run(WorkerPool& pool);

 private:
  struct Unit {
    size_t place;  // in report_.layers
    uint32_t expert;
  };

  Result<void> ListLayers();
  Result<SourceDigests> ReadDigests(uint32_t layer) const;
  Result<void> Measure(const Unit& unit, Workspace& space,
                       std::array<FidelitySums, kProjectionCount>& sums) const;
  Result<void> CheckDigests(size_t place, const Workspace& space) const;

  const Generation& generation_;
  const Checkpoint& checkpoint_;
  const MoeModel& model_;
  const FidelityOptions& options_;
  const StoredWeights stored_;
  FidelityReport report_;
  std::vector<SourceDigests> digests_;  // by place in report_.layers
  std::vector<Unit> units_;
};

Result<SourceDigests> Measurement::ReadDigests(uint32_t layer) const {
  HP_ASSIGN(const std::optional<SourceRecord> record, generation_.ReadSourceRecord(layer));
  if (!record)
    return Fail(Status::Data(Text("layer {} has no source record: nothing proves what it was "
                                  "built from",
                                  layer))
                    .File(generation_.SourceRecordPath(layer))
                    .Expected("the layer's .source file beside its layer files")
                    .Found("no such file")
                    .Advice("remove the layer's files and build it again"));
  SourceDigests digests;
  for (const SourceTensorDigest& entry : record->tensors) digests[entry.name] = entry.digest;
  return digests;
}

Result<void> Measurement::ListLayers() {
  const Manifest& manifest = generation_.manifest();
  HP_ASSIGN(const std::vector<uint32_t> selected, SelectLayers(options_.layers, manifest));
  for (const uint32_t ordinal : selected) {
    FidelityLayer layer;
    layer.layer = manifest.layers[ordinal];
    HP_ASSIGN(const std::optional<std::string> base, stored_.FindMissing(ordinal, false));
    layer.base_missing = base.value_or("");
    HP_ASSIGN(const std::optional<std::string> fp4, stored_.FindMissing(ordinal, true));
    layer.fp4_missing = fp4.value_or("");
    if (base && *base == *fp4) layer.fp4_missing += ", which has its block exponents";
    SourceDigests digests;
    if (layer.base_missing.empty()) {
      HP_ASSIGN(digests, ReadDigests(ordinal));
      for (uint32_t expert = 0; expert < layer.layer.geometry.experts; ++expert)
        units_.push_back({report_.layers.size(), expert});
    }
    digests_.push_back(std::move(digests));
    report_.layers.push_back(std::move(layer));
  }
  if (!units_.empty()) return {};
  return Fail(Status::Data("none of the selected layers has a base tier to measure")
                  .File(generation_.directory())
                  .Advice("build them: `hotplane build CHECKPOINT --store DIR`"));
}

Result<void> Measurement::CheckDigests(size_t place, const Workspace& space) const {
  const FidelityLayer& layer = report_.layers[place];
  for (const SourceTensorDigest& found : space.digests) {
    const auto expected = digests_[place].find(found.name);
    if (expected != digests_[place].end() && expected->second == found.digest) continue;
    return Fail(Status::Data(Text("{} is not what layer {} of the store was built from", found.name,
                                  layer.layer.ordinal))
                    .File(checkpoint_.path())
                    .Expected(expected == digests_[place].end() ? "a tensor that the store knows"
                                                                : ToHex(expected->second))
                    .Found(ToHex(found.digest))
                    .Advice("restore the checkpoint, or build a store from this one"));
  }
  return {};
}

Result<void> Measurement::Measure(const Unit& unit, Workspace& space,
                                  std::array<FidelitySums, kProjectionCount>& sums) const {
  const FidelityLayer& layer = report_.layers[unit.place];
  const uint32_t ordinal = layer.layer.ordinal;
  const bool fp4 = layer.fp4_missing.empty();
  HP_TRY(stored_.Read({ordinal, unit.expert}, fp4, space.stored));
  space.digests.clear();
  for (size_t p = 0; p < kProjectionCount; ++p) {
    const uint64_t read_before = space.source.bytes_read();
    HP_TRY(space.source.Read(checkpoint_, model_.layers[ordinal], unit.expert,
                             static_cast<Projection>(p), &space.digests));
    const StoredMatrix& matrix = space.stored.projections[p];
    HP_CHECK(matrix.n == space.source.rows() && matrix.k == space.source.columns());
    space.row.resize(matrix.k);
    const size_t blocks = matrix.k / kScaleBlock;
    for (size_t row = 0; row < matrix.n; ++row) {
      HP_TRY(space.source.Row(row, space.row));
      sums[p].AddRow(space.row, std::span(matrix.scales).subspan(row * blocks, blocks),
                     std::span(matrix.codes).subspan(row * matrix.k, matrix.k),
                     fp4 ? std::span(matrix.nibbles).subspan(row * matrix.k, matrix.k)
                         : std::span<const uint8_t>());
    }
    if (options_.progress != nullptr)
      options_.progress->Add(space.source.bytes_read() - read_before);
  }
  return CheckDigests(unit.place, space);
}

Result<FidelityReport> Measurement::Run(WorkerPool& pool) {
  const auto start = std::chrono::steady_clock::now();
  HP_ASSIGN(const Digest128 fingerprint, Fingerprint(checkpoint_, model_));
  HP_TRY(CheckSamePair(generation_, checkpoint_, model_, fingerprint));
  report_.generation = generation_.id();
  report_.model = DescribeModel(generation_.manifest());
  HP_TRY(ListLayers());
  uint64_t total = 0;
  for (const Unit& unit : units_) {
    const ExpertTensors& expert =
        model_.layers[report_.layers[unit.place].layer.ordinal].experts[unit.expert];
    for (size_t p = 0; p < kProjectionCount; ++p)
      for (const Tensor* tensor : {expert.weight[p], expert.scale[p], expert.global_scale[p]})
        if (tensor != nullptr) total += tensor->bytes;
  }
  if (options_.progress != nullptr) options_.progress->Begin("comparing weights", total);

  std::vector<Workspace> spaces(pool.worker_count());
  std::vector<std::array<FidelitySums, kProjectionCount>> sums(units_.size());
  HP_TRY(pool.ParallelFor(units_.size(), [&](size_t index, size_t worker) -> Result<void> {
    if (options_.cancel != nullptr) HP_TRY(options_.cancel->Check());
    return Measure(units_[index], spaces[worker], sums[index]);
  }));
  // In the order of the experts, whoever measured them.
  for (size_t i = 0; i < units_.size(); ++i)
    for (size_t p = 0; p < kProjectionCount; ++p)
      report_.layers[units_[i].place].projections[p].Add(sums[i][p]);
  for (const Workspace& space : spaces) report_.bytes_read_checkpoint += space.source.bytes_read();
  report_.bytes_read_store = stored_.bytes_read();
  report_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return std::move(report_);
}

}  // namespace

Result<FidelityReport> MeasureFidelity(const Generation& generation, const Checkpoint& checkpoint,
                                       const MoeModel& model, WorkerPool& pool,
                                       const FidelityOptions& options) {
  const Kernels* kernels = options.kernels;
  if (kernels == nullptr) {
    HP_ASSIGN(kernels, SelectKernels(std::nullopt));
  }
  return Measurement(generation, checkpoint, model, options, *kernels).Run(pool);
}

}  // namespace hotplane
