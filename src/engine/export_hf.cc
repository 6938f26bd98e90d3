#include "engine/export_hf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/check.h"
#include "base/format_text.h"
#include "base/json_text.h"
#include "boot/describe.h"
#include "checkpoint/naming_scheme.h"
#include "checkpoint/safetensors_writer.h"
#include "checkpoint/shard_index.h"
#include "engine/stored_weights.h"
#include "format/number_values.h"

namespace hotplane {
namespace {

// Of what is copied, at a time.
constexpr uint64_t kCopyBytes = 4 * kMiB;

// BF16 bits of every mark at every block exponent, or kInexact: m * 2^e with m of at most two bits
// is exact unless it is above the largest BF16, (2 - 2^-7) * 2^127. Small ones are: the smallest,
// 0.5 * 2^-127, is a subnormal multiple of 2^-133.
class Bf16Table {
 public:
  static constexpr uint16_t kInexact = 0x7fc0;  // a NaN: no weight has these bits

  Bf16Table() {
    for (size_t scale = 0; scale < kScales; ++scale) {
      const int exponent = static_cast<int>(scale) - kE8m0Bias;
      for (unsigned mark = 0; mark < 16; ++mark)
        fp4_[scale][mark] = Bits(std::ldexp(E2m1Value(mark), exponent));
      for (size_t code = 0; code < 4; ++code)
        base_[scale][code] = Bits(std::ldexp(kCodeValue[code], exponent));
    }
  }

  const uint16_t* Of(Precision precision, uint8_t scale) const {
    return precision == Precision::kFp4 ? fp4_[scale].data() : base_[scale].data();
  }

 private:
  static constexpr size_t kScales = 256;

  static uint16_t Bits(double value) {
    const auto narrow = static_cast<float>(value);
    const auto bits = std::bit_cast<uint32_t>(narrow);
    const bool exact = std::isfinite(narrow) && narrow == value && (bits & 0xffff) == 0;
    return exact ? static_cast<uint16_t>(bits >> 16) : kInexact;
  }

  std::array<std::array<uint16_t, 16>, kScales> fp4_{};
  std::array<std::array<uint16_t, 4>, kScales> base_{};
};

// How the experts' numbers lie in a tensor that is written.
enum class Form : uint8_t {
  kCopy = 0,    // no experts: the checkpoint's bytes
  kMatrix,      // one projection of one expert [out, in]
  kStack,       // all experts, [E, 2I, H] with gate's rows first, or [E, H, I]
  kTransposed,  // all experts, [E, H, 2I] with gate and up in turn, or [E, I, H]
};

struct Output {
  TensorSpec spec;
  const Tensor* tensor = nullptr;  // of the checkpoint
  Form form = Form::kCopy;
  const MoeLayer* layer = nullptr;  // of experts
  Projection projection = Projection::kGate;
  uint32_t expert = 0;  // of kMatrix
};

// What one worker makes at a time: a piece of a copied tensor, or what one expert has in tensors
// that follow one another.
struct Unit {
  size_t first = 0;  // outputs
  size_t count = 1;
  uint64_t offset = 0;  // of kCopy
  uint64_t bytes = 0;
  uint32_t expert = 0;  // of the others
};

class Exporter {
 public:
  Exporter(const Generation& generation, const Checkpoint& checkpoint, const MoeModel& model,
           const PrecisionMap& precision, const HfExportOptions& options, const Kernels& kernels)
      : generation_(generation),
        env_(generation.env()),
        checkpoint_(checkpoint),
        model_(model),
        precision_(precision),
        options_(options),
        stored_(generation, kernels) {}

  Result<HfExportReport> Run(WorkerPool& pool);

 private:
  Result<void> CheckOutput() const;
  Result<void> CheckTiers() const;
  Result<void> PlanOutputs();
  Result<void> PlanExpertTensor(const Tensor& tensor, const ExpertName& name);
  void PlanUnits();
  void WarnOfQuantizedTensors();
  Result<uint64_t> PlanOtherFiles();
  Result<std::string> Config() const;
  Result<void> Make(const Unit& unit, StoredExpert& expert, std::vector<std::byte>& bytes) const;
  Result<void> FillExpert(const Output& output, uint32_t expert, const StoredExpert& stored,
                          uint16_t* to) const;
  Result<void> FillMatrix(const Output& output, uint32_t expert, Projection projection,
                          const StoredMatrix& matrix, uint16_t* to, size_t row_step,
                          size_t column_step) const;
  Status Inexact(const Output& output, uint32_t expert, Projection projection,
                 const StoredMatrix& matrix, size_t at) const;
  Result<void> WriteTensors(WorkerPool& pool, CheckpointWriter& writer);
  Result<void> CopyFile(const std::string& name, CheckpointWriter& writer) const;
  std::string Folder() const { return ParentPath(checkpoint_.files().front()); }

  const Generation& generation_;
  Env& env_;
  const Checkpoint& checkpoint_;
  const MoeModel& model_;
  const PrecisionMap& precision_;
  const HfExportOptions& options_;
  const StoredWeights stored_;
  const Bf16Table table_;
  std::vector<Output> outputs_;
  std::vector<Unit> units_;
  HfExportReport report_;
};

Result<void> Exporter::CheckOutput() const {
  const std::string& directory = options_.output_directory;
  std::error_code of_model, of_output;
  const auto model = std::filesystem::weakly_canonical(Folder(), of_model);
  const auto output = std::filesystem::weakly_canonical(directory, of_output);
  if (of_model || of_output)
    return Fail(Status::System("cannot resolve the folder to export to")
                    .File(of_model ? Folder() : directory)
                    .Found((of_model ? of_model : of_output).message()));
  if (std::mismatch(model.begin(), model.end(), output.begin(), output.end()).first == model.end())
    return Fail(Status::Usage("the folder to export to lies in the checkpoint's own")
                    .File(directory)
                    .Expected(Text("a folder outside {}", Folder()))
                    .Advice("name another folder: a model is one folder, and this one would be "
                            "taken for a part of its source"));
  HP_ASSIGN(const FileStat stat, env_.Stat(directory));
  if (stat.type == FileType::kInvalid) return {};
  Status refusal = Status::Usage("the folder to export to is there already")
                       .File(directory)
                       .Expected("a new folder, or an empty one")
                       .Advice("name another folder, or remove this one");
  if (stat.type != FileType::kDirectory) return Fail(std::move(refusal).Found("a file"));
  HP_ASSIGN(const std::vector<std::string> names, env_.List(directory));
  if (names.empty()) return {};
  return Fail(std::move(refusal).Found(Text("{} entries, such as {}", names.size(), names[0])));
}

Result<void> Exporter::CheckTiers() const {
  constexpr size_t kShownMax = 10;
  size_t count = 0;
  std::string found;
  for (const MoeLayer& layer : model_.layers) {
    const bool fp4 = precision_.Uses(layer.ordinal, Precision::kFp4);
    HP_ASSIGN(const std::optional<std::string> missing, stored_.FindMissing(layer.ordinal, fp4));
    if (!missing) continue;
    if (++count <= kShownMax)
      found += Text("{}layer {}: {}", found.empty() ? "" : "; ", layer.ordinal, *missing);
  }
  if (count == 0) return {};
  if (count > kShownMax) found += Text("; and {} more layers", count - kShownMax);
  return Fail(Status::Data("the store lacks tiers that this export needs")
                  .File(generation_.directory())
                  .Expected("the base tier of every layer, and the delta tier where FP4 is asked "
                            "for")
                  .Found(found)
                  .Advice(Text("build them: `hotplane build {} --store DIR`", checkpoint_.path())));
}

Result<void> Exporter::PlanExpertTensor(const Tensor& tensor, const ExpertName& name) {
  if (name.part == ExpertPart::kScale || name.part == ExpertPart::kGlobalScale ||
      name.part == ExpertPart::kUnused) {
    ++report_.tensors_dropped;
    return {};
  }
  const std::string prefix =
      Text("{}{}{}", name.layer->head, name.layer_number, name.layer->middle);
  const auto layer = std::find_if(model_.layers.begin(), model_.layers.end(),
                                  [&](const MoeLayer& each) { return each.prefix == prefix; });
  HP_CHECK(layer != model_.layers.end());
  const auto scheme =
      std::find_if(NamingSchemes().begin(), NamingSchemes().end(),
                   [&](const NamingScheme& each) { return each.name == layer->scheme; });
  HP_CHECK(scheme != NamingSchemes().end());
  const auto rule = std::find_if(scheme->parts.begin(), scheme->parts.end(),
                                 [](const auto& part) { return part.part == ExpertPart::kWeight; });
  const LayerGeometry& g = layer->geometry;
  const bool down = name.projection == Projection::kDown;
  Output output{.spec = {.name = tensor.name, .dtype = Dtype::kBf16, .shape = {}},
                .tensor = &tensor,
                .form = Form::kMatrix,
                .layer = &*layer,
                .projection = name.projection,
                .expert = name.expert};
  std::string& text = output.spec.name;
  text.resize(text.size() - rule->suffix.size());
  const uint64_t rows = down ? g.hidden : g.intermediate;
  const uint64_t columns = down ? g.intermediate : g.hidden;
  const uint64_t fused_rows = down ? rows : 2 * rows;
  if (scheme->fusion == Fusion::kNone) {
    text += ".weight";
    output.spec.shape = {rows, columns};
  } else if (scheme->fusion == Fusion::kHalves) {
    output.form = Form::kStack;
    output.spec.shape = {g.experts, fused_rows, columns};
  } else {
    output.form = Form::kTransposed;
    output.spec.shape = {g.experts, columns, fused_rows};
  }
  outputs_.push_back(std::move(output));
  return {};
}

Result<void> Exporter::PlanOutputs() {
  std::vector<const Tensor*> tensors;
  for (const Tensor& tensor : checkpoint_.tensors()) tensors.push_back(&tensor);
  // The order of the files, so that what is copied is read from front to back.
  std::sort(tensors.begin(), tensors.end(), [](const Tensor* a, const Tensor* b) {
    return std::tie(a->file, a->offset, a->name) < std::tie(b->file, b->offset, b->name);
  });
  for (const Tensor* tensor : tensors) {
    const std::optional<ExpertName> name = MatchExpertTensor(*tensor);
    if (name && name->part != ExpertPart::kBias) {
      HP_TRY(PlanExpertTensor(*tensor, *name));
    } else {
      outputs_.push_back({.spec = {tensor->name, tensor->dtype, tensor->shape}, .tensor = tensor});
      ++report_.tensors_copied;
    }
  }
  report_.tensors_written = outputs_.size();
  for (const MoeLayer& layer : model_.layers)
    for (uint32_t e = 0; e < layer.geometry.experts; ++e)
      ++(precision_.Of(layer.ordinal, e) == Precision::kFp4 ? report_.experts_fp4
                                                            : report_.experts_base);
  WarnOfQuantizedTensors();
  return {};
}

// Without the config's words about them, programs may not know how to read them.
void Exporter::WarnOfQuantizedTensors() {
  size_t count = 0;
  const Tensor* first = nullptr;
  for (const Output& output : outputs_) {
    const Dtype dtype = output.spec.dtype;
    const bool small =
        dtype == Dtype::kF8E4m3 || dtype == Dtype::kF8E5m2 || dtype == Dtype::kF8E8m0 ||
        ((dtype == Dtype::kI8 || dtype == Dtype::kU8) && output.spec.shape.size() > 1);
    if (output.form != Form::kCopy || !small) continue;
    if (first == nullptr) first = output.tensor;
    ++count;
  }
  if (count == 0) return;
  report_.warnings.push_back(Text(
      "{} tensors beside the routed experts are quantized in the checkpoint and were copied as "
      "they are, such as {} ({}): config.json says no more how",
      count, first->name, DtypeName(first->dtype)));
}

void Exporter::PlanUnits() {
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const Output& output = outputs_[i];
    const uint64_t bytes = TensorSpecBytes(output.spec);
    if (output.form == Form::kCopy) {
      for (uint64_t at = 0; at < bytes; at += kCopyBytes)
        units_.push_back({.first = i, .offset = at, .bytes = std::min(kCopyBytes, bytes - at)});
      continue;
    }
    if (output.form == Form::kMatrix) {
      const bool same = !units_.empty() && outputs_[units_.back().first].form == Form::kMatrix &&
                        outputs_[units_.back().first].layer == output.layer &&
                        units_.back().expert == output.expert;
      if (!same) units_.push_back({.first = i, .count = 0, .expert = output.expert});
      ++units_.back().count;
      units_.back().bytes += bytes;
      continue;
    }
    const uint32_t experts = output.layer->geometry.experts;
    for (uint32_t e = 0; e < experts; ++e)
      units_.push_back({.first = i, .bytes = bytes / experts, .expert = e});
  }
}

// Weights of the same model in another form would contradict those that are written.
bool HoldsWeights(std::string_view name) {
  constexpr std::string_view kEnds[] = {".safetensors", ".bin",  ".pt",
                                        ".pth",         ".gguf", ".index.json"};
  return std::any_of(std::begin(kEnds), std::end(kEnds),
                     [name](std::string_view end) { return name.ends_with(end); });
}

Result<uint64_t> Exporter::PlanOtherFiles() {
  if (!options_.copy_other_files) return uint64_t{0};
  HP_ASSIGN(const std::vector<std::string> names, env_.List(Folder()));
  uint64_t bytes = 0;
  for (const std::string& name : names) {
    // modelopt's own description of the quantization stands beside the config.
    const bool ours = name == "config.json" || name == "hf_quant_config.json";
    if (ours || name.starts_with('.') || HoldsWeights(name)) continue;
    HP_ASSIGN(const FileStat stat, env_.Stat(JoinPath(Folder(), name)));
    if (stat.type != FileType::kRegular) {
      report_.warnings.push_back(Text("{} is no regular file and was not copied", name));
      continue;
    }
    report_.files_copied.push_back(name);
    bytes += stat.bytes;
  }
  return bytes;
}

// Deeper than any config; what walks and prints JSON recurses.
constexpr int kConfigDepthMax = 64;

void RemoveQuantization(nlohmann::ordered_json& json) {
  json.erase("quantization_config");
  json.erase("compression_config");
  json.erase("expert_dtype");  // DeepSeek-V4's word about its experts
  for (auto& [key, value] : json.items())
    if (value.is_object()) RemoveQuantization(value);
}

Result<std::string> Exporter::Config() const {
  if (checkpoint_.config_text().empty()) return std::string();
  try {
    bool too_deep = false;
    auto json = nlohmann::ordered_json::parse(
        checkpoint_.config_text(),
        [&](int depth, nlohmann::ordered_json::parse_event_t, nlohmann::ordered_json&) {
          too_deep = too_deep || depth > kConfigDepthMax;
          return !too_deep;
        });
    if (too_deep)
      return Fail(Status::Data("config.json nests too deeply")
                      .File(JoinPath(Folder(), "config.json"))
                      .Expected(Text("at most {} levels", kConfigDepthMax)));
    if (json.is_object()) RemoveQuantization(json);
    return JsonText(json) + "\n";
  } catch (const nlohmann::ordered_json::exception& error) {
    return Fail(Status::Data("config.json is no JSON")
                    .File(JoinPath(Folder(), "config.json"))
                    .Found(error.what()));
  }
}

Status Exporter::Inexact(const Output& output, uint32_t expert, Projection projection,
                         const StoredMatrix& matrix, size_t at) const {
  const uint32_t layer = output.layer->ordinal;
  const bool fp4 = precision_.Of(layer, expert) == Precision::kFp4;
  const double mark =
      fp4 ? E2m1Value(matrix.nibbles[at]) : static_cast<double>(kCodeValue[matrix.codes[at]]);
  return Status::Data(Text("a weight of layer {}, expert {}, {} is not exact in BF16", layer,
                           expert, ProjectionName(projection)))
      .File(generation_.directory())
      .Expected("values up to 3.39e38")
      .Found(Text("{} * 2^{} at row {}, column {}", mark,
                  int{matrix.scales[at / kScaleBlock]} - kE8m0Bias, at / matrix.k, at % matrix.k))
      .Advice("such weights do not come from training: look at the checkpoint's scales");
}

Result<void> Exporter::FillMatrix(const Output& output, uint32_t expert, Projection projection,
                                  const StoredMatrix& matrix, uint16_t* to, size_t row_step,
                                  size_t column_step) const {
  const Precision precision = precision_.Of(output.layer->ordinal, expert);
  const uint8_t* const marks =
      precision == Precision::kFp4 ? matrix.nibbles.data() : matrix.codes.data();
  for (size_t row = 0; row < matrix.n; ++row) {
    for (size_t first = 0; first < matrix.k; first += kScaleBlock) {
      const size_t at = row * matrix.k + first;
      const uint16_t* const values = table_.Of(precision, matrix.scales[at / kScaleBlock]);
      uint16_t* const row_to = to + row * row_step;
      bool exact = true;
      for (size_t i = 0; i < kScaleBlock; ++i) {
        const uint16_t bits = values[marks[at + i]];
        exact = exact && bits != Bf16Table::kInexact;
        row_to[(first + i) * column_step] = bits;
      }
      if (exact) continue;
      size_t bad = at;
      while (values[marks[bad]] != Bf16Table::kInexact) ++bad;
      return Fail(Inexact(output, expert, projection, matrix, bad));
    }
  }
  return {};
}

Result<void> Exporter::FillExpert(const Output& output, uint32_t expert, const StoredExpert& stored,
                                  uint16_t* to) const {
  const StoredMatrix& matrix = stored.projections[static_cast<size_t>(output.projection)];
  const bool down = output.projection == Projection::kDown;
  const bool transposed = output.form == Form::kTransposed;
  if (down || output.form == Form::kMatrix)
    return FillMatrix(output, expert, output.projection, matrix, to, transposed ? 1 : matrix.k,
                      transposed ? matrix.n : 1);
  const StoredMatrix& up = stored.projections[static_cast<size_t>(Projection::kUp)];
  const size_t row_step = transposed ? 2 : matrix.k;
  const size_t column_step = transposed ? 2 * matrix.n : 1;
  HP_TRY(FillMatrix(output, expert, Projection::kGate, matrix, to, row_step, column_step));
  uint16_t* const up_to = transposed ? to + 1 : to + matrix.n * matrix.k;
  return FillMatrix(output, expert, Projection::kUp, up, up_to, row_step, column_step);
}

Result<void> Exporter::Make(const Unit& unit, StoredExpert& expert,
                            std::vector<std::byte>& bytes) const {
  bytes.resize(unit.bytes);
  const Output& first = outputs_[unit.first];
  if (first.form == Form::kCopy) return checkpoint_.Read(*first.tensor, unit.offset, bytes);
  const ExpertKey key = {first.layer->ordinal, unit.expert};
  HP_TRY(stored_.Read(key, precision_.Of(key.layer, key.expert) == Precision::kFp4, expert));
  auto* to = reinterpret_cast<uint16_t*>(bytes.data());
  for (size_t i = unit.first; i < unit.first + unit.count; ++i) {
    HP_TRY(FillExpert(outputs_[i], unit.expert, expert, to));
    if (unit.count > 1) to += TensorSpecBytes(outputs_[i].spec) / sizeof(*to);
  }
  return {};
}

Result<void> Exporter::WriteTensors(WorkerPool& pool, CheckpointWriter& writer) {
  if (options_.progress != nullptr)
    options_.progress->Begin("writing the model", writer.data_bytes());
  const size_t batch = pool.worker_count();
  std::vector<std::vector<std::byte>> buffers(batch);
  std::vector<StoredExpert> experts(batch);
  for (size_t begin = 0; begin < units_.size(); begin += batch) {
    if (options_.cancel != nullptr) HP_TRY(options_.cancel->Check());
    const size_t count = std::min(batch, units_.size() - begin);
    HP_TRY(pool.ParallelFor(
        count, [&](size_t i, size_t) { return Make(units_[begin + i], experts[i], buffers[i]); }));
    for (size_t i = 0; i < count; ++i) {
      HP_TRY(writer.Append(buffers[i]));
      report_.bytes_written += buffers[i].size();
      if (options_.progress != nullptr) options_.progress->Add(buffers[i].size());
    }
  }
  return {};
}

Result<void> Exporter::CopyFile(const std::string& name, CheckpointWriter& writer) const {
  HP_ASSIGN(const std::unique_ptr<File> file, env_.Open(JoinPath(Folder(), name), OpenMode::kRead));
  HP_ASSIGN(const FileStat stat, file->Stat());
  return writer.AddFile(name, [&](const FileSink& sink) -> Result<void> {
    std::vector<std::byte> buffer(std::min(kCopyBytes, stat.bytes));
    for (uint64_t at = 0; at < stat.bytes; at += kCopyBytes) {
      const std::span<std::byte> piece =
          std::span(buffer).first(std::min(kCopyBytes, stat.bytes - at));
      if (options_.cancel != nullptr) HP_TRY(options_.cancel->Check());
      HP_TRY(ReadFully(*file, at, piece));
      HP_TRY(sink(piece));
    }
    return {};
  });
}

Result<HfExportReport> Exporter::Run(WorkerPool& pool) {
  HP_TRY(CheckOutput());
  HP_ASSIGN(const Digest128 fingerprint, Fingerprint(checkpoint_, model_));
  HP_TRY(CheckSamePair(generation_, checkpoint_, model_, fingerprint));
  HP_TRY(CheckTiers());
  HP_TRY(PlanOutputs());
  PlanUnits();
  CheckpointWriterOptions options;
  options.shard_bytes_max = options_.shard_bytes_max;
  HP_ASSIGN(options.config_text, Config());
  HP_ASSIGN(options.other_bytes, PlanOtherFiles());
  std::vector<TensorSpec> specs;
  for (const Output& output : outputs_) specs.push_back(output.spec);
  HP_ASSIGN(CheckpointWriter writer,
            CheckpointWriter::Create(env_, options_.output_directory, std::move(specs),
                                     std::move(options)));
  HP_TRY(WriteTensors(pool, writer));
  for (const std::string& name : report_.files_copied) HP_TRY(CopyFile(name, writer));
  HP_TRY(checkpoint_.CheckUnchanged());
  HP_TRY(writer.Finish());
  return std::move(report_);
}

}  // namespace

Result<HfExportReport> ExportHf(const Generation& generation, const Checkpoint& checkpoint,
                                const MoeModel& model, const PrecisionMap& precision,
                                WorkerPool& pool, const HfExportOptions& options) {
  HP_CHECK(options.shard_bytes_max > 0);
  const Kernels* kernels = options.kernels;
  if (kernels == nullptr) {
    HP_ASSIGN(kernels, SelectKernels(std::nullopt));
  }
  return Exporter(generation, checkpoint, model, precision, options, *kernels).Run(pool);
}

}  // namespace hotplane
