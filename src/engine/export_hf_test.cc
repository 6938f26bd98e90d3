// The exported model against the oracle: every weight of every format, by expert at the precision
// that was asked for, and what is left when the export fails.
#include "engine/export_hf.h"

#include <gtest/gtest.h>

#include <csignal>
#include <nlohmann/json.hpp>

#include "boot/formats_testing.h"
#include "io/fault_env.h"

namespace hotplane::formats_testing {
namespace {

constexpr char kOut[] = "/out";

struct Request {
  std::string precision = "fp4";  // or a map as JSON
  uint64_t shard_bytes = kGiB;
  size_t workers = 2;
  const CancelToken* cancel = nullptr;
  std::string out = kOut;
};

Result<HfExportReport> Export(Env& env, const Request& request = {},
                              const std::string& generation_prefix = "") {
  HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(env, kTestCheckpoint));
  HP_ASSIGN(const MoeModel model, DiscoverMoe(checkpoint));
  HP_ASSIGN(const Store store, Store::Open(env, kTestStore));
  HP_ASSIGN(const Generation generation, store.OpenGeneration(generation_prefix));
  const std::optional<Precision> all = ParsePrecision(request.precision);
  Result<PrecisionMap> map =
      all ? PrecisionMap::Uniform(*all, generation.manifest())
          : PrecisionMap::Parse(request.precision, "map.json", generation.manifest());
  if (!map) return Fail(map.error());
  WorkerPool pool(request.workers);
  return ExportHf(generation, checkpoint, model, *map, pool,
                  {.output_directory = request.out,
                   .shard_bytes_max = request.shard_bytes,
                   .cancel = request.cancel});
}

// Weights without the block exponents at the end of the range, where BF16 ends too.
Layer ExactMxfp4Layer(uint64_t seed) {
  Layer layer = Mxfp4Layer(seed);
  for (auto& expert : layer) {
    for (Matrix& m : expert) {
      for (uint8_t& scale : m.scales) scale = static_cast<uint8_t>(scale % 253);
    }
  }
  return layer;
}

using Fp4 = std::function<bool(size_t expert)>;
constexpr char kMixed[] = R"({"default": "fp4", "layers": {"0": {"default": "base", "1": "fp4"}}})";
const Fp4 kAllFp4 = [](size_t) { return true; };
const Fp4 kAllBase = [](size_t) { return false; };
const Fp4 kSecondFp4 = [](size_t expert) { return expert == 1; };

// By expert and projection, by the oracle.
using QuantizedLayer = std::vector<std::array<oracle::Matrix, 3>>;
QuantizedLayer QuantizedOf(const Layer& layer) {
  QuantizedLayer quantized(layer.size());
  ForEachMatrix(layer, [&](size_t e, size_t p, Shape s, const Matrix& m) {
    quantized[e][p] = Quantized(m, s);
  });
  return quantized;
}

// The weights of a matrix at a precision.
std::vector<long double> Values(const oracle::Matrix& quantized, bool fp4) {
  std::vector<long double> values;
  for (size_t i = 0; i < quantized.nibbles.size(); ++i) {
    const unsigned nibble = quantized.nibbles[i];
    const long double code = (nibble % 8 >= 5 ? 4 : 1) * (nibble >= 8 ? -1 : 1);
    values.push_back(std::ldexp(fp4 ? E2m1(nibble) : code, quantized.scales[i / 32] - 127));
  }
  return values;
}

void ExpectBf16(const Model& out, const std::string& name, std::vector<uint64_t> shape,
                const std::vector<long double>& expected) {
  const auto found = out.tensors.find(name);
  ASSERT_NE(found, out.tensors.end()) << name;
  EXPECT_EQ(found->second.dtype, Dtype::kBf16) << name;
  EXPECT_EQ(found->second.shape, shape) << name;
  ASSERT_EQ(found->second.data.size(), 2 * expected.size()) << name;
  size_t wrong_count = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const long double value = oracle::Value(SourceFormat::kBf16, found->second.data.data(), i);
    const bool same = value == expected[i] && std::signbit(value) == std::signbit(expected[i]);
    wrong_count += same ? 0 : 1;
  }
  EXPECT_EQ(wrong_count, 0u) << name;
}

// Gate and up, or down, of all experts: [rows, columns] one after the other, or [columns, rows]
// with the rows of gate and up in turn.
std::vector<long double> Fused(const QuantizedLayer& layer, bool down, bool transposed,
                               const Fp4& fp4) {
  std::vector<long double> all;
  for (size_t e = 0; e < layer.size(); ++e) {
    const auto [n, k] = ShapeOf(down ? 2 : 0);
    const size_t parts = down ? 1 : 2;
    std::vector<std::vector<long double>> values;
    for (size_t part = 0; part < parts; ++part) {
      const size_t p = down ? 2 : part;
      values.push_back(Values(layer[e][p], fp4(e)));
    }
    const size_t base = all.size();
    all.resize(base + parts * n * k);
    for (size_t part = 0; part < parts; ++part) {
      for (size_t row = 0; row < n; ++row) {
        for (size_t column = 0; column < k; ++column) {
          const size_t at =
              transposed ? column * parts * n + row * parts + part : (part * n + row) * k + column;
          all[base + at] = values[part][row * k + column];
        }
      }
    }
  }
  return all;
}

struct Case {
  const char* name;
  Layer layer;
  std::function<void(Model&, const Layer&)> add;
  // Name of an expert's tensor, where it has one of its own.
  std::function<std::string(size_t expert, size_t p)> expert_name;
  bool transposed = false;
};

std::vector<Case> Cases() {
  const auto hf = [](size_t e, size_t p) { return Hf(0, e, p) + ".weight"; };
  const auto numbered = [](size_t e, size_t p) {
    return Text("layers.0.ffn.experts.{}.{}.weight", e, kNumbered[p]);
  };
  return {
      {"deepseek", ExactMxfp4Layer(1), AddDeepSeek, numbered},
      {"packed mxfp4", ExactMxfp4Layer(2), AddPackedMxfp4, hf},
      {"modelopt", Nvfp4Layer(3), [](Model& m, const Layer& l) { AddModelopt(m, l); }, hf},
      {"compressed nvfp4", Nvfp4Layer(4), AddCompressedNvfp4, hf},
      {"fp8", Fp8Layer(5, 48, 80),
       [](Model& m, const Layer& l) { AddFp8(m, l, 48, 80, Dtype::kF32); }, hf},
      {"bf16", Bf16Layer(6), [](Model& m, const Layer& l) { AddBf16(m, l, "mlp", kNamed); }, hf},
      {"fused", Bf16Layer(7), [](Model& m, const Layer& l) { AddFused(m, l); }, nullptr},
      {"gpt-oss", ExactMxfp4Layer(8), AddGptOss, nullptr, true},
  };
}

// A model with dense tensors beside the experts, and a config that speaks of its quantization.
Model MakeModel(const Case& c) {
  Model model;
  c.add(model, c.layer);
  model.Add("model.norm.weight", Dtype::kBf16, {kHidden});
  model.Add("model.embed.\"quoted\\name", Dtype::kF32, {7, 3});
  model.Add("model.empty", Dtype::kF32, {0, 4});
  for (const char* name : {"model.norm.weight", "model.embed.\"quoted\\name"}) {
    std::vector<std::byte>& data = model.tensors.at(name).data;
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 37 + 1);
  }
  nlohmann::ordered_json config = nlohmann::ordered_json::parse(
      model.config_text.empty() ? R"({"quantization_config": {"quant_method": "x"}})"
                                : model.config_text);
  config["rms_norm_eps"] = 1e-6;
  config["text_config"] = {{"quantization_config", {{"a", 1}}}, {"num_experts_per_tok", 2}};
  model.config_text = config.dump();
  return model;
}

void ExpectExport(const Case& c, const Model& model, const QuantizedLayer& quantized, Env& env,
                  const std::string& precision, const Fp4& fp4) {
  SCOPED_TRACE(precision);
  const auto report = Export(env, {.precision = precision});
  ASSERT_TRUE(report) << report.error().ToString();
  const auto checkpoint = Checkpoint::Open(env, kOut);
  ASSERT_TRUE(checkpoint) << checkpoint.error().ToString();
  const Model out = ReadModel(*checkpoint);
  EXPECT_EQ(report->tensors_written, out.tensors.size());

  size_t expert_tensors = 2;
  if (c.expert_name) {
    expert_tensors = kExperts * 3;
    for (size_t e = 0; e < kExperts; ++e) {
      for (size_t p = 0; p < 3; ++p) {
        ExpectBf16(out, c.expert_name(e, p), {ShapeOf(p).n, ShapeOf(p).k},
                   Values(quantized[e][p], fp4(e)));
      }
    }
  } else {
    const std::string base = "model.layers.0.mlp.experts.";
    const uint64_t two = 2 * kIntermediate;
    ExpectBf16(out, base + "gate_up_proj",
               c.transposed ? std::vector<uint64_t>{kExperts, kHidden, two}
                            : std::vector<uint64_t>{kExperts, two, kHidden},
               Fused(quantized, false, c.transposed, fp4));
    ExpectBf16(out, base + "down_proj",
               c.transposed ? std::vector<uint64_t>{kExperts, kIntermediate, kHidden}
                            : std::vector<uint64_t>{kExperts, kHidden, kIntermediate},
               Fused(quantized, true, c.transposed, fp4));
  }
  size_t copied = 0;
  for (const auto& [name, entry] : model.tensors) {
    if (name.find(".experts.") != std::string::npos && !name.ends_with("_bias")) continue;
    ++copied;
    const auto found = out.tensors.find(name);
    ASSERT_NE(found, out.tensors.end()) << name;
    EXPECT_EQ(found->second.dtype, entry.dtype);
    EXPECT_EQ(found->second.shape, entry.shape);
    EXPECT_EQ(found->second.data, entry.data) << name;
  }
  EXPECT_EQ(out.tensors.size(), copied + expert_tensors);
  EXPECT_EQ(report->tensors_copied, copied);
  const auto config = nlohmann::json::parse(out.config_text);
  EXPECT_EQ(config, nlohmann::json(
                        {{"rms_norm_eps", 1e-6}, {"text_config", {{"num_experts_per_tok", 2}}}}));
}

std::map<std::string, std::vector<std::byte>> OutFiles(const MemEnv& env) {
  std::map<std::string, std::vector<std::byte>> files;
  for (const auto& [path, content] : env.Files())
    if (path.starts_with(kOut)) files.emplace(path, content);
  return files;
}

TEST(ExportHf, EveryFormatAtEveryPrecision) {
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.name);
    const Model model = MakeModel(c);
    const QuantizedLayer quantized = QuantizedOf(c.layer);
    Result<Built> built = BuildModel(model);
    ASSERT_TRUE(built) << built.error().ToString();
    const std::tuple<const char*, Fp4> precisions[] = {
        {"fp4", kAllFp4}, {"base", kAllBase}, {kMixed, kSecondFp4}};
    for (const auto& [precision, fp4] : precisions) {
      ExpectExport(c, model, quantized, *built->env, precision, fp4);
      for (const auto& [path, content] : OutFiles(*built->env)) {
        ASSERT_TRUE(built->env->Remove(path));
      }
    }
  }
}

// What was BF16 has the same names and shapes again: it can be built from.
TEST(ExportHf, ABf16ModelIsAModelAgain) {
  for (const Case& c : Cases()) {
    if (c.layer[0][0].bf16.empty()) continue;
    Result<Built> built = BuildModel(MakeModel(c));
    ASSERT_TRUE(built);
    ASSERT_TRUE(Export(*built->env));
    const auto checkpoint = Checkpoint::Open(*built->env, kOut);
    ASSERT_TRUE(checkpoint);
    const auto found = DiscoverMoe(*checkpoint);
    ASSERT_TRUE(found) << found.error().ToString();
    EXPECT_EQ(found->layers[0].geometry.experts, kExperts);
  }
}

TEST(ExportHf, IsTheSameForAnyNumberOfWorkersAndOfRanks) {
  const Case c = Cases()[7];
  const auto files = [&](size_t workers, uint32_t world) {
    MemEnv env;
    WriteModel(env, kTestCheckpoint, MakeModel(c), 0);
    BuildOptions options = BothTiers();
    options.shard_world = world;
    EXPECT_TRUE(BuildStore(env, options));
    const auto report =
        Export(env, {.precision = kMixed, .shard_bytes = 100'000, .workers = workers});
    EXPECT_TRUE(report) << report.error().ToString();
    return OutFiles(env);
  };
  const auto once = files(1, 1);
  EXPECT_GE(once.size(), 4u);  // two shards, index, config
  EXPECT_EQ(files(5, 1), once);
  EXPECT_EQ(files(2, 2), once);
}

class Failures : public testing::Test {
 protected:
  void SetUp() override {
    case_.emplace(Cases()[0]);
    WriteModel(env_, kTestCheckpoint, MakeModel(*case_), 0);
    ASSERT_TRUE(BuildStore(env_, BothTiers()));
  }
  Status Error(Env& env, const Request& request = {}) {
    const auto report = Export(env, request);
    EXPECT_FALSE(report);
    return report ? Status::System("none") : report.error();
  }
  std::string LayerPath(Encoding encoding) {
    return Store::Open(env_, kTestStore)->OpenGeneration()->LayerPath(0, encoding);
  }

  MemEnv env_;
  std::optional<Case> case_;
};

TEST_F(Failures, AValueThatBf16DoesNotHold) {
  // 6 * 2^126, and 4 * 2^126 at base: one block of one expert, the others are exact.
  Case c = *case_;
  Matrix& matrix = c.layer[2][1];
  matrix.scales[5 * kHidden / 32 + 1] = 253;
  for (size_t i = 0; i < 16; ++i) matrix.elements[(5 * kHidden + 32) / 2 + i] = 0x22;
  const auto error = [&](const Request& request) -> std::optional<Status> {
    MemEnv env;
    WriteModel(env, kTestCheckpoint, MakeModel(c), 0);
    EXPECT_TRUE(BuildStore(env, BothTiers()));
    const auto report = Export(env, request);
    EXPECT_EQ(report.has_value(), !OutFiles(env).empty());
    return report ? std::nullopt : std::optional(report.error());
  };
  // Small magnitudes are exact even there.
  EXPECT_EQ(error({}), std::nullopt);
  matrix.elements[(5 * kHidden + 32) / 2 + 3] = 0x27;
  for (const char* precision : {"fp4", "base"}) {
    const auto status = error({.precision = precision});
    ASSERT_TRUE(status);
    EXPECT_EQ(status->exit_code(), 3);
    EXPECT_EQ(status->what(), "a weight of layer 0, expert 2, up is not exact in BF16");
    EXPECT_EQ(status->found(),
              Text("{} * 2^126 at row 5, column 38", std::string_view(precision) == "fp4" ? 6 : 4));
  }
}

TEST_F(Failures, ATierThatIsAbsent) {
  ASSERT_TRUE(env_.Remove(LayerPath(Encoding::kDeltaQuintal)));
  for (const char* precision : {"fp4", kMixed}) {
    const Status error = Error(env_, {.precision = precision});
    EXPECT_EQ(error.exit_code(), 3);
    EXPECT_EQ(error.found(), "layer 0: no delta tier");
  }
  EXPECT_TRUE(OutFiles(env_).empty());
  EXPECT_TRUE(Export(env_, {.precision = "base"}));
}

TEST_F(Failures, DamageInTheStore) {
  const LayerFile file = Store::Open(env_, kTestStore)
                             ->OpenGeneration()
                             ->OpenLayer(0, Encoding::kDeltaQuintal)
                             .value();
  const uint64_t at = file.layout().PieceOffset(*file.layout().Find("fp13"), 1);
  env_.CorruptByte(file.file().path(), at + 9, std::byte{2});
  EXPECT_EQ(Error(env_).exit_code(), 3);
  EXPECT_TRUE(OutFiles(env_).empty());
  EXPECT_TRUE(Export(env_, {.precision = "base"}));
}

TEST_F(Failures, AFolderThatIsInUse) {
  env_.SetFile("/out/notes.txt", Bytes(1));
  const Status error = Error(env_);
  EXPECT_EQ(error.exit_code(), 2);
  EXPECT_EQ(error.found(), "1 entries, such as notes.txt");
  EXPECT_EQ(OutFiles(env_).size(), 1u);
}

TEST_F(Failures, AFolderInTheCheckpoints) {
  for (const std::string inside : {"", "/", "/hf", "/other/../hf/deep"}) {
    const auto report = Export(env_, {.out = kTestCheckpoint + inside});
    ASSERT_FALSE(report.has_value()) << inside;
    EXPECT_EQ(report.error().code(), StatusCode::kUsage);
    EXPECT_NE(report.error().ToString().find("lies in the checkpoint's own"), std::string::npos);
  }
  EXPECT_TRUE(Export(env_, {.out = kTestCheckpoint + std::string("-hf")}).has_value());
}

TEST_F(Failures, AnotherCheckpoint) {
  Case other = Cases()[0];
  other.layer = ExactMxfp4Layer(99);
  ASSERT_TRUE(env_.Remove(std::string(kTestCheckpoint) + "/model.safetensors"));
  ASSERT_TRUE(env_.Remove(std::string(kTestCheckpoint) + "/config.json"));
  WriteModel(env_, kTestCheckpoint, MakeModel(other), 0);
  EXPECT_EQ(Error(env_).exit_code(), 3);
  EXPECT_TRUE(OutFiles(env_).empty());
}

TEST_F(Failures, Cancelled) {
  CancelToken cancel;
  cancel.Cancel(SIGTERM);
  EXPECT_EQ(Error(env_, {.cancel = &cancel}).exit_code(), 143);
  EXPECT_TRUE(OutFiles(env_).empty());
}

TEST_F(Failures, ADiskThatIsTooSmallIsFoundOutFirst) {
  uint64_t used = 0;
  for (const auto& [path, content] : env_.Files()) used += content.size();
  env_.set_capacity_bytes(used + 200'000);
  FaultEnv watched(env_);
  const Status error = Error(watched);
  EXPECT_EQ(error.exit_code(), 4);
  for (const Operation& operation : watched.Log())
    EXPECT_FALSE(operation.kind == OperationKind::kWrite &&
                 operation.path.find(kOut) != std::string::npos);
}

TEST_F(Failures, ADiskThatFillsUpLeavesNothing) {
  FaultEnv counted(env_);
  ASSERT_TRUE(Export(counted, {.shard_bytes = 200'000}));
  uint64_t writes = 0;
  for (const Operation& operation : counted.Log()) {
    const bool here = operation.path.find(kOut) != std::string::npos;
    writes += here && operation.kind == OperationKind::kWrite ? 1 : 0;
  }
  ASSERT_GT(writes, 5u);
  for (const auto& [path, content] : OutFiles(env_)) ASSERT_TRUE(env_.Remove(path));
  for (uint64_t n = 1; n <= writes; ++n) {
    FaultEnv faulty(env_);
    faulty.Add(Fault{.action = FaultAction::kError,
                     .first = n,
                     .kind = OperationKind::kWrite,
                     .path_contains = kOut,
                     .error = ENOSPC});
    EXPECT_EQ(Error(faulty, {.shard_bytes = 200'000}).exit_code(), 4) << n;
    EXPECT_TRUE(OutFiles(env_).empty()) << n;
  }
}

// Killed anywhere, what is left under a name is whole, and is no checkpoint unless all of it is
// there.
TEST_F(Failures, KilledAnywhereLeavesNoHalfModel) {
  for (const CrashMode mode : {CrashMode::kDropUnsynced, CrashMode::kKeepUnsynced}) {
    const auto clear = [&] {
      for (const auto& [path, content] : OutFiles(env_)) ASSERT_TRUE(env_.Remove(path));
    };
    FaultEnv counted(env_);
    ASSERT_TRUE(Export(counted, {.shard_bytes = 200'000, .workers = 1}));
    const auto whole = OutFiles(env_);
    uint64_t operations = 0;
    for (const Operation& operation : counted.Log())
      operations += operation.path.find(kOut) != std::string::npos && operation.number > 0 ? 1 : 0;
    clear();
    for (uint64_t n = 1; n <= operations; ++n) {
      FaultEnv faulty(env_);
      faulty.Add(
          Fault{.action = FaultAction::kCrash, .first = n, .path_contains = kOut, .bytes = 100});
      const auto report = Export(faulty, {.shard_bytes = 200'000, .workers = 1});
      EXPECT_FALSE(report) << n;
      env_.Crash(mode);
      for (const auto& [path, content] : OutFiles(env_)) {
        if (path.find("/.tmp-") == std::string::npos) {
          EXPECT_EQ(content, whole.at(path)) << path;
        }
      }
      const auto found = Checkpoint::Open(env_, kOut);
      if (found) {
        EXPECT_EQ(found->files().size() + 2, whole.size()) << n;
      }
      clear();
    }
  }
}

TEST_F(Failures, OtherFilesComeAlongAndWeightsDoNot) {
  const std::string folder = std::string(kTestCheckpoint) + "/";
  const std::vector<std::byte> text(100'000, std::byte{'x'});
  for (const char* name :
       {"tokenizer.json", "generation_config.json", "empty.txt", "pytorch_model.bin",
        "hf_quant_config.json", ".gitattributes", "assets/picture.png"}) {
    env_.SetFile(folder + name, std::string_view(name) == "empty.txt" ? Bytes() : text);
  }
  const auto report = Export(env_);
  ASSERT_TRUE(report) << report.error().ToString();
  EXPECT_EQ(report->files_copied,
            (std::vector<std::string>{"empty.txt", "generation_config.json", "tokenizer.json"}));
  EXPECT_EQ(report->warnings,
            std::vector<std::string>{"assets is no regular file and was not copied"});
  const auto files = OutFiles(env_);
  EXPECT_EQ(files.at("/out/tokenizer.json"), text);
  EXPECT_TRUE(files.at("/out/empty.txt").empty());
  EXPECT_EQ(files.size(), 6u);  // three of these, one shard, index, config
}

TEST_F(Failures, QuantizedTensorsBesideTheExpertsAreWarnedOf) {
  Model model = MakeModel(*case_);
  model.Add("layers.0.attn.wq.weight", Dtype::kF8E4m3, {128, 128});
  MemEnv env;
  WriteModel(env, kTestCheckpoint, model, 0);
  ASSERT_TRUE(BuildStore(env, BothTiers()));
  const auto report = Export(env);
  ASSERT_TRUE(report);
  ASSERT_EQ(report->warnings.size(), 1u);
  EXPECT_NE(report->warnings[0].find("layers.0.attn.wq.weight (F8_E4M3)"), std::string::npos);
}

Manifest SmallManifest() {
  Manifest manifest;
  for (uint32_t layer = 0; layer < 3; ++layer) {
    ManifestLayer entry;
    entry.ordinal = layer;
    entry.geometry.experts = 4 + layer;
    manifest.layers.push_back(std::move(entry));
  }
  return manifest;
}

TEST(PrecisionMapText, DefaultsAndExceptions) {
  const auto map = PrecisionMap::Parse(
      R"({"layers": {"0": "fp4", "2": {"3": "base", "default": "fp4", "5": "fp4"}},
          "default": "base"})",
      "map.json", SmallManifest());
  ASSERT_TRUE(map) << map.error().ToString();
  for (uint32_t e = 0; e < 4; ++e) EXPECT_EQ(map->Of(0, e), Precision::kFp4);
  for (uint32_t e = 0; e < 5; ++e) EXPECT_EQ(map->Of(1, e), Precision::kBase);
  for (uint32_t e = 0; e < 6; ++e)
    EXPECT_EQ(map->Of(2, e), e == 3 ? Precision::kBase : Precision::kFp4);
  EXPECT_TRUE(map->Uses(2, Precision::kBase));
  EXPECT_FALSE(map->Uses(1, Precision::kFp4));
}

TEST(PrecisionMapText, HostileOnesAreRefusedByName) {
  const std::string deep = R"({"default": "base", "layers": )" + std::string(100'000, '[');
  struct {
    std::string text;
    const char* what;
  } const cases[] = {
      {"", "no JSON"},
      {"{", "no JSON"},
      {"\xff\xfe", "no JSON"},
      {R"({"default": "base"} x)", "no JSON"},
      {deep, "nests too deeply"},
      {"[]", "no JSON object"},
      {"null", "no JSON object"},
      {"{}", "no `default`"},
      {R"({"default": "fp8"})", "neither"},
      {R"({"default": 4})", "neither"},
      {R"({"default": null})", "neither"},
      {R"({"default": "base", "default": "fp4"})", "\"default\" twice"},
      {R"({"default": "base", "layer": {}})", "unknown key \"layer\""},
      {R"({"default": "base", "layers": []})", "`layers`"},
      {R"({"default": "base", "layers": {"3": "fp4"}})", "names a layer that is not there"},
      {R"({"default": "base", "layers": {"-1": "fp4"}})", "names a layer"},
      {R"({"default": "base", "layers": {"01": "fp4"}})", "names a layer"},
      {R"({"default": "base", "layers": {"": "fp4"}})", "names a layer"},
      {R"({"default": "base", "layers": {"99999999999999999999": "fp4"}})", "names a layer"},
      {R"({"default": "base", "layers": {"1": "fp4", "1": "base"}})", "\"1\" twice"},
      {R"({"default": "base", "layers": {"1": {"5": "fp4"}}})", "names an expert of layer 1"},
      {R"({"default": "base", "layers": {"1": {"0": "fp4", "0": "fp4"}}})", "\"0\" twice"},
      {R"({"default": "base", "layers": {"1": {"0": {"0": "fp4"}}}})", "layer 1, expert 0"},
      {R"({"default": "base", "layers": {"1": true}})", "neither"},
  };
  for (const auto& c : cases) {
    const auto map = PrecisionMap::Parse(c.text, "map.json", SmallManifest());
    ASSERT_FALSE(map) << c.text;
    EXPECT_EQ(map.error().exit_code(), 3);
    EXPECT_EQ(map.error().file(), "map.json");
    EXPECT_NE(map.error().what().find(c.what), std::string::npos) << c.text.substr(0, 80) << "\n"
                                                                  << map.error().ToString();
  }
}

}  // namespace
}  // namespace hotplane::formats_testing
