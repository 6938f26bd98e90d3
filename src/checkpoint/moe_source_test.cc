#include "checkpoint/moe_source.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>

#include "base/format_text.h"
#include "base/units.h"
#include "checkpoint/checkpoint_testing.h"
#include "checkpoint/naming_scheme.h"
#include "format/tsym4.h"

namespace hotplane {
namespace {

SynthCheckpointOptions SmallOptions(SourceFormat format) {
  SynthCheckpointOptions options;
  options.format = format;
  options.geometry = {.experts = 5, .hidden = 128, .intermediate = 64};
  options.main_layers = 3;
  options.dense_layers = 1;
  options.mtp_layers = 1;
  options.top_k = 2;
  options.shard_bytes_max = 0;
  return options;
}
Model SmallModel(SourceFormat format) { return SynthModel(SmallOptions(format)); }

std::string Found(const Result<MoeModel>& result) { return result ? "" : result.error().found(); }

TEST(Discover, BundledModel) {
  const std::string directory = std::string(HOTPLANE_SOURCE_DIR) + "/models/tinymoe-mxfp4";
  const auto checkpoint = Checkpoint::Open(PosixEnv(), directory);
  ASSERT_TRUE(checkpoint) << checkpoint.error().ToString();
  const auto model = DiscoverMoe(*checkpoint);
  ASSERT_TRUE(model) << model.error().ToString();
  EXPECT_EQ(model->scheme, "deepseek-mxfp4");
  EXPECT_EQ(model->top_k, 4u);
  EXPECT_EQ(model->activation, Activation{});
  ASSERT_EQ(model->layers.size(), 4u);
  for (uint32_t i = 0; i < 4; ++i) {
    const MoeLayer& layer = model->layers[i];
    EXPECT_EQ(layer.ordinal, i);
    EXPECT_EQ(layer.model_index, i);
    EXPECT_FALSE(layer.mtp);
    EXPECT_EQ(layer.prefix, Text("layers.{}.ffn.", i));
    EXPECT_EQ(layer.format, SourceFormat::kMxfp4);
    EXPECT_EQ(layer.geometry, (LayerGeometry{.experts = 32, .hidden = 256, .intermediate = 128}));
    ASSERT_EQ(layer.experts.size(), 32u);
    const ExpertTensors& expert = layer.experts[31];
    const auto name = [&](const auto& tensors, Projection p) {
      return tensors[static_cast<size_t>(p)]->name;
    };
    EXPECT_EQ(name(expert.weight, Projection::kGate), layer.prefix + "experts.31.w1.weight");
    EXPECT_EQ(name(expert.weight, Projection::kUp), layer.prefix + "experts.31.w3.weight");
    EXPECT_EQ(name(expert.weight, Projection::kDown), layer.prefix + "experts.31.w2.weight");
    EXPECT_EQ(name(expert.scale, Projection::kUp), layer.prefix + "experts.31.w3.scale");
  }
  const auto fingerprint = Fingerprint(*checkpoint, *model);
  ASSERT_TRUE(fingerprint);
  EXPECT_EQ(ToHex(*fingerprint), "bc7741ab08af6954b0e2a8efb5470a38");
}

TEST(Discover, SharedModels) {
  const char* shared = std::getenv("HOTPLANE_SHARED");
  if (shared == nullptr) GTEST_SKIP() << "HOTPLANE_SHARED is not set";
  const auto open = [&](const char* name) {
    return Checkpoint::Open(PosixEnv(), Text("{}/models/{}", shared, name));
  };
  const auto bf16 = open("tinymoe-bf16");
  ASSERT_TRUE(bf16) << bf16.error().ToString();
  const auto model = DiscoverMoe(*bf16);
  ASSERT_TRUE(model) << model.error().ToString();
  EXPECT_EQ(model->scheme, "hf-per-expert");
  ASSERT_EQ(model->layers.size(), 4u);
  EXPECT_EQ(model->layers[3].geometry,
            (LayerGeometry{.experts = 32, .hidden = 256, .intermediate = 128}));
  EXPECT_EQ(model->layers[3].format, SourceFormat::kBf16);
  EXPECT_EQ(model->layers[3].prefix, "model.layers.3.mlp.");
  const auto nvfp4 = open("tinymoe-nvfp4");
  ASSERT_TRUE(nvfp4) << nvfp4.error().ToString();
  const auto requantized = DiscoverMoe(*nvfp4);
  ASSERT_TRUE(requantized) << requantized.error().ToString();
  EXPECT_EQ(requantized->scheme, "modelopt-nvfp4");
  ASSERT_EQ(requantized->layers.size(), 4u);
  EXPECT_EQ(requantized->layers[0].format, SourceFormat::kNvfp4);
}

// Main layers count with the dense ones; MTP layers follow all of them.
TEST(Discover, NumbersLayersOfBothSchemes) {
  struct Case {
    SourceFormat format;
    std::string scheme;
    std::vector<std::string> prefixes;
  };
  const std::vector<Case> cases = {
      {SourceFormat::kMxfp4, "deepseek-mxfp4", {"layers.1.ffn.", "layers.2.ffn.", "mtp.0.ffn."}},
      {SourceFormat::kBf16,
       "hf-per-expert",
       {"model.layers.1.mlp.", "model.layers.2.mlp.", "model.layers.3.mlp."}},
      {SourceFormat::kF16,
       "hf-per-expert",
       {"model.layers.1.mlp.", "model.layers.2.mlp.", "model.layers.3.mlp."}},
      {SourceFormat::kF32,
       "hf-per-expert",
       {"model.layers.1.mlp.", "model.layers.2.mlp.", "model.layers.3.mlp."}},
      {SourceFormat::kNvfp4,
       "modelopt-nvfp4",
       {"model.layers.1.mlp.", "model.layers.2.mlp.", "model.layers.3.mlp."}},
      {SourceFormat::kFp8,
       "hf-fp8-block",
       {"model.layers.1.mlp.", "model.layers.2.mlp.", "model.layers.3.mlp."}},
  };
  for (const Case& expected : cases) {
    SCOPED_TRACE(SourceFormatName(expected.format));
    const auto model = Discover(SmallModel(expected.format));
    ASSERT_TRUE(model) << model.error().ToString();
    EXPECT_EQ(model->scheme, expected.scheme);
    EXPECT_EQ(model->top_k, 2u);
    ASSERT_EQ(model->layers.size(), 3u);
    for (uint32_t i = 0; i < 3; ++i) {
      const MoeLayer& layer = model->layers[i];
      EXPECT_EQ(layer.ordinal, i);
      EXPECT_EQ(layer.model_index, i + 1);
      EXPECT_EQ(layer.mtp, i == 2);
      EXPECT_EQ(layer.prefix, expected.prefixes[i]);
      EXPECT_EQ(layer.format, expected.format);
      EXPECT_EQ(layer.geometry, (LayerGeometry{.experts = 5, .hidden = 128, .intermediate = 64}));
    }
  }
}

TEST(Discover, KnowsTheOtherPrefixesAndMixtral) {
  struct Case {
    std::vector<std::pair<std::string, std::string>> renames;
    std::string scheme;
    std::string prefix;
  };
  const std::vector<Case> cases = {
      {{{"model.layers.", "layers."}}, "hf-per-expert", "layers.1.mlp."},
      {{{"model.layers.", "model.language_model.layers."}},
       "hf-per-expert",
       "model.language_model.layers.1.mlp."},
      {{{"model.layers.", "language_model.model.layers."}},
       "hf-per-expert",
       "language_model.model.layers.1.mlp."},
      {{{".mlp.", ".block_sparse_moe."},
        {"gate_proj", "w1"},
        {"up_proj", "w3"},
        {"down_proj", "w2"}},
       "mixtral-per-expert",
       "model.layers.1.block_sparse_moe."},
      {{{"model.layers.", "layers."},
        {".mlp.", ".ffn."},
        {"gate_proj", "w1"},
        {"up_proj", "w3"},
        {"down_proj", "w2"}},
       "deepseek-per-expert",
       "layers.1.ffn."},
  };
  for (const Case& expected : cases) {
    SCOPED_TRACE(expected.prefix);
    Model model = SmallModel(SourceFormat::kBf16);
    for (const auto& [from, to] : expected.renames) model.ReplaceInNames(from, to);
    const auto found = Discover(model);
    ASSERT_TRUE(found) << found.error().ToString();
    EXPECT_EQ(found->scheme, expected.scheme);
    EXPECT_EQ(found->layers[0].prefix, expected.prefix);
    EXPECT_EQ(found->layers.size(), 3u);
  }
  Model model = SmallModel(SourceFormat::kBf16);
  model.ReplaceInNames("model.layers.3.", "mtp.layers.0.");
  const auto found = Discover(model);
  ASSERT_TRUE(found) << found.error().ToString();
  EXPECT_TRUE(found->layers[2].mtp);
  EXPECT_EQ(found->layers[2].model_index, 3u);
  EXPECT_EQ(found->layers[2].prefix, "mtp.layers.0.mlp.");
}

// Pruned checkpoints have fewer experts in some layers, and a layer's format is its own.
TEST(Discover, ExpertCountAndFormatAreTheLayersOwn) {
  Model model = SmallModel(SourceFormat::kBf16);
  for (const char* role : {"gate_proj", "up_proj", "down_proj"}) {
    model.tensors.erase(Text("model.layers.1.mlp.experts.4.{}.weight", role));
    for (int e = 0; e < 5; ++e) {
      const std::string name = Text("model.layers.2.mlp.experts.{}.{}.weight", e, role);
      model.Add(name, Dtype::kF32, model.tensors.at(name).shape);
    }
  }
  model.Add("model.layers.1.mlp.gate.weight", Dtype::kBf16, {4, 128});
  const auto found = Discover(model);
  ASSERT_TRUE(found) << found.error().ToString();
  EXPECT_EQ(found->layers[0].geometry.experts, 4u);
  EXPECT_EQ(found->layers[1].geometry.experts, 5u);
  EXPECT_EQ(found->layers[0].format, SourceFormat::kBf16);
  EXPECT_EQ(found->layers[1].format, SourceFormat::kF32);
}

struct BadModel {
  const char* name;
  SourceFormat format;
  std::function<void(Model&)> damage;
  std::string what;
  std::string expected;
  std::string found;
};

std::vector<BadModel> BadModels() {
  const auto mxfp4 = SourceFormat::kMxfp4;
  const auto bf16 = SourceFormat::kBf16;
  const std::string hf = "model.layers.1.mlp.experts.";
  const std::string ds = "layers.1.ffn.experts.";
  return {
      {"MissingTensor", bf16, [=](Model& m) { m.tensors.erase(hf + "2.up_proj.weight"); },
       "missing in model.layers.1.mlp.", "5 experts of 3 tensors",
       hf + "2.up_proj.weight (1 in all)"},
      {"MissingScale", mxfp4, [=](Model& m) { m.tensors.erase(ds + "0.w2.scale"); },
       "missing in layers.1.ffn.", "5 experts of 6 tensors", ds + "0.w2.scale (1 in all)"},
      {"GapInIds", bf16,
       [=](Model& m) {
         for (const char* role : {"gate_proj", "up_proj", "down_proj"}) {
           m.tensors.erase(hf + "2." + role + ".weight");
         }
       },
       "missing", "5 experts", "(3 in all)"},
      {"LastExpertMissing", bf16,
       [=](Model& m) {
         for (const char* role : {"gate_proj", "up_proj", "down_proj"}) {
           m.tensors.erase(hf + "4." + role + ".weight");
         }
       },
       "missing", "as model.layers.1.mlp.gate.weight says", hf + "4.gate_proj.weight"},
      {"HugeId", bf16,
       [=](Model& m) { m.Rename(hf + "4.up_proj.weight", hf + "99999.up_proj.weight"); },
       "more experts in model.layers.1.mlp. than its router", "100000 rows", "[5, 128]"},
      {"HugeIdWithoutRouter", bf16,
       [=](Model& m) {
         m.tensors.erase("model.layers.1.mlp.gate.weight");
         m.Rename(hf + "4.up_proj.weight", hf + "99999.up_proj.weight");
       },
       "missing", "100000 experts", "and 299975 more (299985 in all)"},
      {"IdTooLong", bf16,
       [=](Model& m) { m.Rename(hf + "4.up_proj.weight", hf + "123456.up_proj.weight"); },
       "missing in model.layers.1.mlp.", "5 experts",
       "none of " + hf + "4.up_proj.weight (1 in all); beside them " + hf +
           "123456.up_proj.weight BF16"},
      {"IdWithLeadingZero", bf16,
       [=](Model& m) { m.Rename(hf + "4.up_proj.weight", hf + "04.up_proj.weight"); },
       "missing in model.layers.1.mlp.", "", "beside them " + hf + "04.up_proj.weight"},
      {"UnequalShape", bf16,
       [=](Model& m) {
         m.Add(hf + "3.gate_proj.weight", Dtype::kBf16, {128, 128});
       },
       "unequal shape", "[64, 128] for " + hf + "3.gate_proj.weight",
       hf + "3.gate_proj.weight BF16 [128, 128] (1 in all)"},
      {"DownNotTransposed", bf16,
       [=](Model& m) {
         m.Add(hf + "3.down_proj.weight", Dtype::kBf16, {64, 128});
       },
       "unequal shape", "[128, 64]", "[64, 128]"},
      {"ScaleOfWrongShape", mxfp4,
       [=](Model& m) {
         m.Add(ds + "1.w1.scale", Dtype::kF8E8m0, {64, 8});
       },
       "unequal shape", "[64, 4] for " + ds + "1.w1.scale", "F8_E8M0 [64, 8]"},
      {"ScaleOfWrongDtype", mxfp4,
       [=](Model& m) {
         m.Add(ds + "1.w1.scale", Dtype::kF32, {64, 4});
       },
       "no known naming scheme", "F8_E8M0", ds + "1.w1.scale F32 [64, 4]"},
      {"UnequalDtype", bf16,
       [=](Model& m) {
         m.Add(hf + "3.up_proj.weight", Dtype::kF32, {64, 128});
       },
       "unequal dtype", "BF16, as " + hf + "0.gate_proj.weight", hf + "3.up_proj.weight F32"},
      {"UnknownDtype", bf16,
       [=](Model& m) {
         m.Add(hf + "3.up_proj.weight", Dtype::kF64, {64, 128});
       },
       "no known naming scheme", "F32", hf + "3.up_proj.weight F64 [64, 128]"},
      {"ExtraTensor", bf16, [=](Model& m) { m.Add(hf + "3.up_proj.bias", Dtype::kBf16, {64}); },
       "no known naming scheme", "", hf + "3.up_proj.bias BF16 [64]"},
      {"NotAMatrix", bf16,
       [=](Model& m) { m.Add(hf + "0.gate_proj.weight", Dtype::kBf16, {64 * 128}); },
       "not a matrix", "[out, in]", "[8192]"},
      {"HiddenNotAMultiple", bf16,
       [=](Model& m) {
         m.Add(hf + "0.gate_proj.weight", Dtype::kBf16, {64, 96});
       },
       "not supported", "multiples of 64", "hidden 96, intermediate 64"},
      {"IntermediateNotAMultiple", mxfp4,
       [=](Model& m) {
         m.Add(ds + "0.w1.weight", Dtype::kI8, {80, 64});
       },
       "not supported", "multiples of 64", "hidden 128, intermediate 80"},
      {"ZeroSized", bf16,
       [=](Model& m) {
         m.Add(hf + "0.gate_proj.weight", Dtype::kBf16, {0, 128});
       },
       "not supported", "multiples of 64", "intermediate 0"},
      {"TwoNamesForOne", bf16,
       [=](Model& m) {
         m.Add("layers.1.mlp.experts.0.gate_proj.weight", Dtype::kBf16, {64, 128});
       },
       "there twice", "only layers.1", "also model.layers.1"},
      {"LayerNamedInTwoWays", bf16,
       [=](Model& m) {
         m.Rename(hf + "4.up_proj.weight", "layers.1.mlp.experts.4.up_proj.weight");
       },
       "named in two ways", "only model.layers.1", "also layers.1.mlp.experts.4.up_proj.weight"},
      {"NoExperts", bf16,
       [=](Model& m) {
         std::erase_if(m.tensors, [](const auto& t) {
           return t.first.find(".experts.") != std::string::npos;
         });
       },
       "no routed experts", "layers.N.ffn.experts.E.w1.weight", "tensors, the first is"},
      {"NoTensors", bf16, [](Model& m) { m.tensors.clear(); }, "no routed experts", "",
       "no tensors at all"},
      {"Nvfp4", bf16,
       [=](Model& m) {
         m.Add(hf + "0.gate_proj.weight", Dtype::kU8, {64, 64});
         m.Add(hf + "0.gate_proj.weight_scale", Dtype::kF8E4m3, {64, 8});
         m.Add(hf + "0.gate_proj.weight_scale_2", Dtype::kF32, {});
       },
       "are in two formats", "only modelopt-nvfp4", hf + "0.up_proj.weight BF16"},
      {"CompressedTensors", bf16,
       [=](Model& m) {
         m.Add(hf + "0.gate_proj.weight_packed", Dtype::kU8, {64, 64});
         m.Add(hf + "0.gate_proj.weight_global_scale", Dtype::kF32, {1});
       },
       "are in two formats", hf + "0.gate_proj.weight", hf + "0.gate_proj.weight"},
      {"Fp8", bf16,
       [=](Model& m) {
         m.Add(hf + "0.gate_proj.weight", Dtype::kF8E4m3, {64, 128});
         m.Add(hf + "0.gate_proj.weight_scale_inv", Dtype::kF32, {1, 1});
       },
       "are in two formats", "only hf-fp8-block", hf + "0.up_proj.weight BF16"},
      {"GptOss", bf16,
       [=](Model& m) {
         m.Add("model.layers.1.mlp.experts.gate_up_proj_blocks", Dtype::kU8, {5, 128, 4, 16});
         m.Add("model.layers.1.mlp.experts.gate_up_proj_scales", Dtype::kU8, {5, 128, 4});
       },
       "are in two formats", "model.layers.1.mlp.experts.", "model.layers.1.mlp.experts."},
      {"NamedOtherwise", SourceFormat::kMxfp4,
       [=](Model& m) { m.Rename(ds + "2.w1.weight", ds + "2.wx.weight"); },
       "missing in layers.1.ffn.", "5 experts of 6 tensors",
       "none of " + ds + "2.w1.weight (1 in all); beside them " + ds + "2.wx.weight I8"},
      {"Gptq", bf16,
       [=](Model& m) {
         m.Add(hf + "0.gate_proj.qweight", Dtype::kI32, {16, 64});
       },
       "look like GPTQ or AWQ, which this version does not read", "", "qweight I32 [16, 64]"},
      {"Fp8PerRow", bf16,
       [=](Model& m) {
         m.Add(hf + "0.gate_proj.weight", Dtype::kF8E4m3, {64, 128});
         m.Add(hf + "0.gate_proj.weight_scale", Dtype::kF32, {64, 1});
       },
       "look like FP8 with one scale per tensor or row", "", "weight_scale F32 [64, 1]"},
      {"Fused", bf16,
       [=](Model& m) {
         m.Add("model.layers.1.mlp.experts.gate_up_proj", Dtype::kBf16, {5, 128, 128});
       },
       "are in two formats", "model.layers.1.mlp.experts.", "model.layers.1.mlp.experts."},
      {"ConfigNotJson", bf16, [](Model& m) { m.config_text = "{"; }, "config.json", "", "end"},
      {"ConfigNotAnObject", bf16, [](Model& m) { m.config_text = "[]"; }, "config.json", "object",
       ""},
      {"ConfigTopKZero", bf16, [](Model& m) { m.config_text = R"({"num_experts_per_tok": 0})"; },
       "num_experts_per_tok", "from 1", "0"},
      {"ConfigTopKText", bf16, [](Model& m) { m.config_text = R"({"num_experts_per_tok": "4"})"; },
       "num_experts_per_tok", "from 1", "\"4\""},
      {"ConfigTopKAboveExperts", bf16,
       [](Model& m) { m.config_text = R"({"num_experts_per_tok": 6})"; }, "more experts per token",
       "at most 5", "6"},
      {"ConfigLimitNegative", bf16, [](Model& m) { m.config_text = R"({"swiglu_limit": -1})"; },
       "swiglu_limit", "not negative", "-1"},
      {"ConfigTwice", bf16,
       [](Model& m) { m.config_text = R"({"swiglu_limit": 1, "swiglu_limit": 2})"; },
       "duplicate key", "", "swiglu_limit"},
      {"ConfigTextTwice", bf16,
       [](Model& m) { m.config_text = R"({"text_config": {}, "text_config": {}})"; },
       "duplicate key", "", "text_config"},
  };
}

TEST(Discover, RefusesBadModels) {
  for (const BadModel& bad : BadModels()) {
    SCOPED_TRACE(bad.name);
    Model model = SmallModel(bad.format);
    bad.damage(model);
    const auto result = Discover(model);
    ASSERT_FALSE(result);
    const Status& status = result.error();
    SCOPED_TRACE(status.ToString());
    EXPECT_EQ(status.exit_code(), 3);
    EXPECT_EQ(status.file().rfind("/model", 0), 0u);
    EXPECT_NE(status.what().find(bad.what), std::string::npos);
    EXPECT_NE(status.expected().find(bad.expected), std::string::npos);
    EXPECT_NE(status.found().find(bad.found), std::string::npos);
  }
}

TEST(Discover, NamesTheFirstTenOfMany) {
  Model model = SmallModel(SourceFormat::kMxfp4);
  std::erase_if(model.tensors, [](const auto& t) { return t.first.ends_with(".scale"); });
  const std::string found = Found(Discover(model));
  EXPECT_NE(found.find("layers.1.ffn.experts.0.w1.scale, layers.1.ffn.experts.0.w3.scale"),
            std::string::npos)
      << found;
  EXPECT_NE(found.find("and 5 more (15 in all)"), std::string::npos) << found;
}

TEST(Discover, ActivationAndTopKComeFromTheConfig) {
  struct Case {
    std::string config;
    Activation activation;
    std::optional<uint32_t> top_k;
  };
  const Activation plain;
  const std::vector<Case> cases = {
      {"", plain, {}},
      {"{}", plain, {}},
      {R"({"num_experts_per_tok": 3, "swiglu_limit": null})", plain, 3},
      {R"({"num_experts_per_tok": null, "swiglu_limit": 0.0})", plain, {}},
      {R"({"swiglu_limit": 10.0})", {ActivationKind::kSiluGatedClamped, 10.0}, {}},
      {R"({"swiglu_limit": 7})", {ActivationKind::kSiluGatedClamped, 7.0}, {}},
      {R"({"num_experts_per_tok": 5, "text_config": {"num_experts_per_tok": 2}})", plain, 2},
      {R"({"text_config": {"num_experts_per_tok": 2}, "num_experts_per_tok": 5})", plain, 2},
      {R"({"vision": {"num_experts_per_tok": 2}, "l": [{"swiglu_limit": 3}]})", plain, {}},
      {R"({"text_config": {"deep": {"num_experts_per_tok": 2}}})", plain, {}},
  };
  for (const SourceFormat format : {SourceFormat::kMxfp4, SourceFormat::kBf16}) {
    Model model = SmallModel(format);
    for (const Case& expected : cases) {
      SCOPED_TRACE(expected.config);
      model.config_text = expected.config;
      const auto found = Discover(model);
      ASSERT_TRUE(found) << found.error().ToString();
      EXPECT_EQ(found->activation, expected.activation);
      EXPECT_EQ(found->top_k, expected.top_k);
    }
  }
}

TEST(MakeManifest, SaysWhatTheModelIs) {
  const auto model = Discover(SmallModel(SourceFormat::kMxfp4));
  ASSERT_TRUE(model);
  const Digest128 fingerprint = Digest("x");
  const Manifest manifest = MakeManifest(*model, fingerprint, ZeroMode::kAlternate);
  EXPECT_EQ(manifest.identity,
            (Identity{fingerprint, kPlaneAbiName, ZeroMode::kAlternate, 1, "none"}));
  EXPECT_EQ(manifest.scheme, "deepseek-mxfp4");
  EXPECT_EQ(manifest.activation, (Activation{ActivationKind::kSiluGatedClamped, 10.0}));
  EXPECT_EQ(manifest.top_k, 2u);
  ASSERT_EQ(manifest.layers.size(), 3u);
  EXPECT_EQ(manifest.layers[2], (ManifestLayer{.ordinal = 2,
                                               .model_index = 3,
                                               .mtp = true,
                                               .prefix = "mtp.0.ffn.",
                                               .geometry = {5, 128, 64},
                                               .source_format = SourceFormat::kMxfp4}));
}

// No two schemes read a name in two ways: the other tensors of a layer may choose between them.
TEST(NamingScheme, SchemesThatKnowATensorAgree) {
  EXPECT_EQ(NamingSchemes().size(), 10u);
  std::set<std::string_view> names;
  for (const NamingScheme& scheme : NamingSchemes()) {
    EXPECT_TRUE(names.insert(scheme.name).second) << scheme.name;
    for (const LayerNaming& layer : scheme.layers) {
      for (size_t p = 0; p < kProjectionCount; ++p) {
        for (const PartRule& rule : scheme.parts) {
          if (scheme.roles[p].empty()) continue;
          const std::string expert = scheme.fusion == Fusion::kNone ? "12." : "";
          Tensor tensor;
          tensor.name = Text("{}3{}experts.{}{}{}", layer.head, layer.middle, expert,
                             scheme.roles[p], rule.suffix);
          tensor.dtype = rule.dtypes[0];
          const auto match = MatchExpertTensor(tensor);
          ASSERT_TRUE(match) << tensor.name;
          const auto index = static_cast<size_t>(&scheme - NamingSchemes().data());
          EXPECT_NE(match->schemes >> index & 1, 0u) << tensor.name;
          EXPECT_EQ(match->layer, &layer) << tensor.name;
          EXPECT_EQ(match->layer_number, 3u) << tensor.name;
          EXPECT_EQ(match->expert, expert.empty() ? 0u : 12u) << tensor.name;
          EXPECT_EQ(match->projection, static_cast<Projection>(p)) << tensor.name;
          EXPECT_EQ(match->part, rule.part) << tensor.name;
        }
      }
    }
  }
}

TEST(Survey, SaysWhatIsMissingAndWhatIsUnexpected) {
  Model model = SmallModel(SourceFormat::kMxfp4);
  model.tensors.erase("layers.1.ffn.experts.2.w3.scale");
  model.Add("layers.2.ffn.experts.0.w1.bias", Dtype::kBf16, {64});
  model.Add("layers.9.ffn.experts.0.zero_point", Dtype::kI32, {1});
  MemEnv env;
  WriteModel(env, "/model", model, 0);
  const auto checkpoint = Checkpoint::Open(env, "/model");
  ASSERT_TRUE(checkpoint);
  const std::vector<MoeLayerSurvey> layers = SurveyMoe(*checkpoint);
  ASSERT_EQ(layers.size(), 4u);
  EXPECT_EQ(layers[0].prefix, "layers.1.ffn.");
  EXPECT_EQ(layers[0].scheme, "deepseek-mxfp4");
  EXPECT_EQ(layers[0].tensor_count, 29u);
  EXPECT_EQ(layers[0].dtypes, "F8_E8M0+I8");
  EXPECT_EQ(layers[0].missing, "layers.1.ffn.experts.2.w3.scale (1 in all)");
  EXPECT_TRUE(layers[0].problem);
  EXPECT_EQ(layers[1].unexpected, "layers.2.ffn.experts.0.w1.bias BF16 [64] (1 in all)");
  EXPECT_FALSE(layers[1].problem);
  EXPECT_EQ(layers[2].prefix, "mtp.0.ffn.");
  EXPECT_EQ(layers[3].prefix, "layers.9.ffn.");
  EXPECT_EQ(layers[3].scheme, "");
}

class FingerprintTest : public ::testing::Test {
 protected:
  // Writes the model in some sharding into a fresh folder.
  Digest128 Of(const Model& model, uint64_t shard_bytes_max = 0, bool reverse_order = false) {
    const std::string directory = Text("/m{}", next_++);
    WriteModel(env_, directory, model, shard_bytes_max, reverse_order);
    return FingerprintOf(env_, directory);
  }

  MemEnv env_;
  int next_ = 0;
};

// These digests are in the names of the generations of every store there is: when this test fails,
// the change that broke it orphans them all.
TEST_F(FingerprintTest, IsPinned) {
  EXPECT_EQ(ToHex(Of(SmallModel(SourceFormat::kMxfp4))), "ae5ff2bb8a83f753bfa932196d0d063b");
  EXPECT_EQ(ToHex(Of(SmallModel(SourceFormat::kBf16))), "c41b4bd7b8f997e6cf190a13b7117883");
}

TEST_F(FingerprintTest, DoesNotDependOnFilesNorOnOtherTensorsNorOnTheConfig) {
  for (const SourceFormat format : {SourceFormat::kMxfp4, SourceFormat::kBf16}) {
    Model model = SmallModel(format);
    const Digest128 digest = Of(model);
    EXPECT_EQ(Of(model, 0, true), digest);
    EXPECT_EQ(Of(model, 1), digest);
    EXPECT_EQ(Of(model, 100'000), digest);
    EXPECT_EQ(Of(model, 50'000, true), digest);
    model.config_text = R"({"rope_scaling": {"factor": 4}, "num_experts_per_tok": 3})";
    EXPECT_EQ(Of(model), digest);
    model.config_text = "";
    EXPECT_EQ(Of(model), digest);
    for (auto& [name, entry] : model.tensors) {
      if (name.find(".experts.") == std::string::npos) {
        for (std::byte& byte : entry.data) byte ^= std::byte{1};
      }
    }
    model.Add("lm_head.weight", Dtype::kF32, {3});
    EXPECT_EQ(Of(model), digest);
  }
}

TEST_F(FingerprintTest, RenamedFilesKeepIt) {
  const Model model = SmallModel(SourceFormat::kMxfp4);
  const Digest128 digest = Of(model);
  WriteModel(env_, "/renamed", model, 0);
  ASSERT_TRUE(env_.Rename("/renamed/model.safetensors", "/renamed/other name.safetensors"));
  EXPECT_EQ(FingerprintOf(env_, "/renamed"), digest);
  EXPECT_EQ(FingerprintOf(env_, "/renamed/other name.safetensors"), digest);
}

TEST_F(FingerprintTest, ChangesWithNameDtypeAndShape) {
  const Model model = SmallModel(SourceFormat::kBf16);
  std::set<Digest128> seen = {Of(model)};
  Model changed = model;
  changed.ReplaceInNames("model.layers.", "layers.");
  EXPECT_TRUE(seen.insert(Of(changed)).second);
  changed = model;
  for (auto& [name, entry] : changed.tensors) {
    if (name.find(".experts.") != std::string::npos) entry.dtype = Dtype::kF16;
  }
  EXPECT_TRUE(seen.insert(Of(changed)).second);
  // One expert less, router and all.
  changed = model;
  std::erase_if(changed.tensors,
                [](const auto& t) { return t.first.find(".experts.4.") != std::string::npos; });
  for (auto& [name, entry] : changed.tensors) {
    if (name.ends_with("mlp.gate.weight")) {
      entry.shape[0] = 4;
      entry.data.resize(4 * 128 * 2);
    }
  }
  EXPECT_TRUE(seen.insert(Of(changed)).second);
}

TEST_F(FingerprintTest, ChangesWithAnyByteOfASampledPage) {
  const Model model = SmallModel(SourceFormat::kMxfp4);
  WriteModel(env_, "/m", model, 0);
  const auto checkpoint = Checkpoint::Open(env_, "/m");
  ASSERT_TRUE(checkpoint);
  const auto discovered = DiscoverMoe(*checkpoint);
  ASSERT_TRUE(discovered);
  const Digest128 digest = FingerprintOf(env_, "/m");
  std::mt19937_64 random(7);
  const std::vector<SampledPage> pages = ListSampledPages(*discovered);
  for (size_t i = 0; i < pages.size(); i += 7) {
    const SampledPage& page = pages[i];
    for (const uint64_t at : {uint64_t{0}, uint64_t{page.bytes} - 1, random() % page.bytes}) {
      const uint64_t offset = page.tensor->offset + page.offset + at;
      env_.CorruptByte("/m/model.safetensors", offset, std::byte{0x10});
      EXPECT_NE(FingerprintOf(env_, "/m"), digest) << page.tensor->name << " at " << at;
      env_.CorruptByte("/m/model.safetensors", offset, std::byte{0x10});
    }
  }
  EXPECT_EQ(FingerprintOf(env_, "/m"), digest);
}

// A layer, or any tensor of a layer with few experts, cannot be replaced unseen.
TEST_F(FingerprintTest, SwappedTensorsAndLayersAreSeen) {
  const Model model = SmallModel(SourceFormat::kMxfp4);
  const Digest128 digest = Of(model);
  for (const char* part :
       {"w1.weight", "w2.weight", "w3.weight", "w1.scale", "w2.scale", "w3.scale"}) {
    Model changed = model;
    std::swap(changed.tensors.at(Text("layers.1.ffn.experts.0.{}", part)).data,
              changed.tensors.at(Text("layers.1.ffn.experts.3.{}", part)).data);
    EXPECT_NE(Of(changed), digest) << part;
    changed = model;
    for (int e = 0; e < 5; ++e) {
      std::swap(changed.tensors.at(Text("layers.1.ffn.experts.{}.{}", e, part)).data,
                changed.tensors.at(Text("layers.2.ffn.experts.{}.{}", e, part)).data);
    }
    EXPECT_NE(Of(changed), digest) << part;
  }
}

// A model that exists only as a table of tensors: no data is needed to list pages.
MoeModel TableModel(uint32_t experts, std::vector<Tensor>& storage) {
  MoeModel model;
  model.scheme = "deepseek-mxfp4";
  storage.clear();
  storage.reserve(size_t{experts} * 6 * 2);
  for (uint32_t l = 0; l < 2; ++l) {
    MoeLayer layer;
    layer.ordinal = l;
    for (uint32_t e = 0; e < experts; ++e) {
      ExpertTensors expert;
      for (size_t p = 0; p < kProjectionCount; ++p) {
        const std::string base = Text("layers.{}.ffn.experts.{}.p{}", l, e, p);
        storage.push_back({base + ".weight", Dtype::kI8, {2048, 2048}, 0, 0, 4 * kMiB});
        expert.weight[p] = &storage.back();
        storage.push_back({base + ".scale", Dtype::kF8E8m0, {2048, 128}, 0, 0, 256 * kKiB});
        expert.scale[p] = &storage.back();
      }
      layer.experts.push_back(expert);
    }
    model.layers.push_back(std::move(layer));
  }
  return model;
}

TEST(SampledPages, CoverEveryLayerProjectionAndKind) {
  for (const uint32_t experts : {1u, 5u, 16u, 32u, 96u, 256u, 384u}) {
    SCOPED_TRACE(experts);
    std::vector<Tensor> storage;
    const MoeModel model = TableModel(experts, storage);
    const std::vector<SampledPage> pages = ListSampledPages(model);
    std::set<std::pair<const Tensor*, uint64_t>> distinct;
    for (const SampledPage& page : pages) {
      EXPECT_EQ(page.offset % kPageBytes, 0u);
      EXPECT_LT(page.offset, page.tensor->bytes);
      EXPECT_EQ(page.bytes, std::min<uint64_t>(kPageBytes, page.tensor->bytes - page.offset));
      EXPECT_TRUE(distinct.emplace(page.tensor, page.offset).second);
    }
    for (const MoeLayer& layer : model.layers) {
      std::vector<bool> expert_seen(experts);
      for (size_t p = 0; p < kProjectionCount; ++p) {
        for (const bool scale : {false, true}) {
          size_t page_count = 0;
          std::set<size_t> with_page;
          for (size_t e = 0; e < experts; ++e) {
            const ExpertTensors& expert = layer.experts[e];
            const Tensor* tensor = scale ? expert.scale[p] : expert.weight[p];
            const auto hits =
                std::count_if(pages.begin(), pages.end(),
                              [&](const SampledPage& page) { return page.tensor == tensor; });
            page_count += static_cast<size_t>(hits);
            if (hits > 0) with_page.insert(e);
            if (hits > 0) expert_seen[e] = true;
          }
          // Scales of one expert have 64 pages: a few of 16 draws may coincide there.
          EXPECT_GE(page_count, experts == 1 ? 12u : experts < 16 ? 14u : 16u);
          EXPECT_EQ(with_page.size(), std::min<size_t>(16, experts));
          size_t gap_max = 0, last = 0;
          for (const size_t e : with_page) gap_max = std::max(gap_max, e - std::exchange(last, e));
          EXPECT_LE(gap_max, 2 * (experts / 16) + 1);
        }
      }
      // All six together leave no run of experts unseen that is longer than two strata.
      size_t unseen = 0, unseen_max = 0;
      for (const bool seen : expert_seen) {
        unseen = seen ? 0 : unseen + 1;
        unseen_max = std::max(unseen_max, unseen);
      }
      EXPECT_LE(unseen_max, experts <= 96 ? 0u : 2 * (experts / 96));
    }
  }
}

TEST(Synth, IsTheSameForAnyWorkerCountAndSharding) {
  SynthCheckpointOptions options = SmallOptions(SourceFormat::kMxfp4);
  options.geometry = {.experts = 2, .hidden = 2048, .intermediate = 2048};  // weights above a piece
  MemEnv env;
  WorkerPool one(1), three(3);
  ASSERT_TRUE(WriteSynthCheckpoint(env, "/one", options, one));
  ASSERT_TRUE(WriteSynthCheckpoint(env, "/three", options, three));
  options.shard_bytes_max = 3'000'000;
  ASSERT_TRUE(WriteSynthCheckpoint(env, "/shards", options, three));
  const auto files = env.Files();
  EXPECT_EQ(files.at("/one/model.safetensors"), files.at("/three/model.safetensors"));
  const auto whole = Checkpoint::Open(env, "/one");
  const auto shards = Checkpoint::Open(env, "/shards");
  ASSERT_TRUE(whole && shards);
  EXPECT_GT(shards->files().size(), 5u);
  const Model a = ReadModel(*whole), b = ReadModel(*shards);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (const auto& [name, entry] : a.tensors)
    EXPECT_EQ(entry.data, b.tensors.at(name).data) << name;
}

float Decode(SourceFormat format, const std::byte* at) {
  if (format == SourceFormat::kF32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  if (format == SourceFormat::kBf16) return std::bit_cast<float>(uint32_t{bits} << 16);
  const int exponent = bits >> 10 & 31;
  const float mantissa = static_cast<float>(bits & 1023);
  const float magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

TEST(Synth, WeightsLookLikeWeights) {
  Model model = SmallModel(SourceFormat::kMxfp4);
  for (const std::byte scale : model.tensors.at("layers.1.ffn.experts.0.w1.scale").data) {
    EXPECT_GE(static_cast<int>(scale), 118);
    EXPECT_LE(static_cast<int>(scale), 121);
  }
  std::array<size_t, 16> histogram{};
  for (const std::byte byte : model.tensors.at("layers.1.ffn.experts.0.w1.weight").data) {
    ++histogram[static_cast<size_t>(byte) & 15];
    ++histogram[static_cast<size_t>(byte) >> 4];
  }
  for (const size_t count : histogram) EXPECT_GT(count, 50u);

  // The three float formats hold one and the same weight, each rounded its own way.
  const std::string name = "model.layers.1.mlp.experts.0.gate_proj.weight";
  const Model f32 = SmallModel(SourceFormat::kF32);
  const auto& exact = f32.tensors.at(name).data;
  size_t zeros = 0;
  double sum_of_squares = 0;
  const size_t count = exact.size() / 4;
  for (size_t i = 0; i < count; ++i) {
    const float value = Decode(SourceFormat::kF32, &exact[4 * i]);
    zeros += value == 0 ? 1 : 0;
    sum_of_squares += value * value;
  }
  EXPECT_NEAR(std::sqrt(sum_of_squares / static_cast<double>(count)), 0.018, 0.001);
  EXPECT_GT(zeros, 0u);
  EXPECT_LT(zeros, 30u);
  for (const SourceFormat format : {SourceFormat::kBf16, SourceFormat::kF16}) {
    const Model rounded = SmallModel(format);
    const auto& data = rounded.tensors.at(name).data;
    const float tolerance = format == SourceFormat::kBf16 ? 0x1p-8f : 0x1p-11f;
    for (size_t i = 0; i < count; ++i) {
      const float value = Decode(SourceFormat::kF32, &exact[4 * i]);
      const float found = Decode(format, &data[2 * i]);
      // Below 2^-14 float16 has a fixed step of 2^-24.
      ASSERT_NEAR(found, value, std::max(std::abs(value) * tolerance, 0x1p-25f)) << i;
      ASSERT_EQ(std::signbit(found), std::signbit(value));
    }
  }
}

TEST(Synth, RefusesBadGeometryAndExistingFiles) {
  MemEnv env;
  WorkerPool pool(1);
  SynthCheckpointOptions options = SmallOptions(SourceFormat::kBf16);
  ASSERT_TRUE(WriteSynthCheckpoint(env, "/m", options, pool));
  const auto again = WriteSynthCheckpoint(env, "/m", options, pool);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code(), StatusCode::kUsage);
  EXPECT_EQ(again.error().found(), "a checkpoint");
  for (const auto& change : std::vector<std::function<void(SynthCheckpointOptions&)>>{
           [](auto& o) { o.geometry.hidden = 96; }, [](auto& o) { o.geometry.experts = 0; },
           [](auto& o) { o.dense_layers = 4; }, [](auto& o) { o.top_k = 9; },
           [](auto& o) {
             o.main_layers = o.dense_layers;
             o.mtp_layers = 0;
           }}) {
    SynthCheckpointOptions bad = options;
    change(bad);
    const auto refused = WriteSynthCheckpoint(env, "/bad", bad, pool);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code(), StatusCode::kUsage);
  }
  EXPECT_EQ(env.Stat("/bad")->type, FileType::kInvalid);
}

TEST(Synth, CancelsBetweenBuffers) {
  MemEnv env;
  WorkerPool pool(1);
  CancelToken cancel;
  cancel.Cancel(2);
  const auto result =
      WriteSynthCheckpoint(env, "/m", SmallOptions(SourceFormat::kBf16), pool, &cancel);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code(), StatusCode::kInterrupted);
  EXPECT_TRUE(env.List("/m")->empty()) << "what was begun is removed";
}

TEST(Synth, AFullDiskIsSaidFirstAndLeavesNothing) {
  MemEnv env;
  WorkerPool pool(1);
  env.set_capacity_bytes(20000);
  const auto result = WriteSynthCheckpoint(env, "/m", SmallOptions(SourceFormat::kBf16), pool);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code(), StatusCode::kCapacity);
  EXPECT_NE(result.error().expected().find("free"), std::string::npos);
  EXPECT_TRUE(env.List("/m")->empty());
}

}  // namespace
}  // namespace hotplane
