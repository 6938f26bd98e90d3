// Every checkpoint format from tensors to planes: the same weights in several forms give the same
// bytes, which are those of the oracle, and what cannot be trusted is refused by name.

#include <gtest/gtest.h>

#include <functional>

#include "boot/formats_testing.h"
#include "boot/verify_source.h"

namespace hotplane::formats_testing {
namespace {

using Parts = std::map<std::string, Bytes>;  // of one layer, all experts

Bytes ReadSection(const Generation& generation, Encoding encoding, const std::string& role,
                  uint32_t layer = 0) {
  const auto file = generation.OpenLayer(layer, encoding);
  EXPECT_TRUE(file) << file.error().ToString();
  const Section* section = file ? file->layout().Find(role) : nullptr;
  Bytes all;
  for (uint32_t e = 0; section != nullptr && e < file->layout().geometry.experts; ++e) {
    Bytes piece(section->expert_bytes);
    EXPECT_TRUE(ReadFully(file->file(), file->layout().PieceOffset(*section, e), piece));
    all.insert(all.end(), piece.begin(), piece.end());
  }
  return all;
}

Parts PartsOf(const Model& model, uint64_t shard_bytes = 0, bool reverse = false,
              std::string_view isa = "scalar") {
  const Result<Built> built = BuildModel(model, shard_bytes, reverse, isa);
  EXPECT_TRUE(built) << built.error().ToString();
  Parts parts;
  if (!built) return parts;
  EXPECT_EQ(built->report.bytes_read, built->report.bytes_needed);
  for (const char* role : {"planes13", "sc13", "planes2", "sc2"}) {
    parts[role] = ReadSection(*built->generation, Encoding::kBase, role);
  }
  for (const char* role : {"fp13", "fp2"}) {
    parts[role] = ReadSection(*built->generation, Encoding::kDeltaQuintal, role);
  }
  return parts;
}

// From exact weights, or verbatim where the layer has none.
Parts Expected(const Layer& layer) {
  Parts parts;
  for (const auto& expert : layer) {
    for (size_t p = 0; p < 3; ++p) {
      const oracle::Planes planes = oracle::Pack(Quantized(expert[p], ShapeOf(p)));
      const std::string suffix = p == 2 ? "2" : "13";
      const auto append = [&](const std::string& role, const Bytes& bytes) {
        parts[role + suffix].insert(parts[role + suffix].end(), bytes.begin(), bytes.end());
      };
      append("planes", planes.codes);
      append("sc", planes.scales);
      append("fp", planes.quintals);
    }
  }
  return parts;
}

TEST(Formats, Mxfp4IsVerbatimInEveryLayout) {
  const Layer layer = Mxfp4Layer(1);
  const Parts expected = Expected(layer);
  const Model gpt_oss = With([&](Model& m) { AddGptOss(m, layer); });
  for (const Kernels* kernels : AvailableKernels()) {
    SCOPED_TRACE(kernels->name);
    EXPECT_EQ(PartsOf(With([&](Model& m) { AddDeepSeek(m, layer); }), 0, false, kernels->name),
              expected);
    EXPECT_EQ(PartsOf(With([&](Model& m) { AddPackedMxfp4(m, layer); }), 0, false, kernels->name),
              expected);
    EXPECT_EQ(PartsOf(gpt_oss, 0, false, kernels->name), expected);
  }
}

TEST(Formats, Bf16InEveryLayout) {
  const Layer layer = Bf16Layer(2);
  const Parts expected = Expected(layer);
  const auto hf = [&](Model& m) { AddBf16(m, layer, "mlp", kNamed); };
  const auto mixtral = [&](Model& m) { AddBf16(m, layer, "block_sparse_moe", kNumbered); };
  EXPECT_EQ(PartsOf(With(hf)), expected);
  EXPECT_EQ(PartsOf(With(mixtral)), expected);
  for (const char* prefix : {"model.", "model.language_model.", ""}) {
    SCOPED_TRACE(prefix);
    EXPECT_EQ(PartsOf(With([&](Model& m) { AddFused(m, layer, prefix); })), expected);
  }
  EXPECT_EQ(PartsOf(With([&](Model& m) { AddFused(m, layer); }), 50'000, true, "scalar"), expected);
}

TEST(Formats, Nvfp4OfModeloptAndOfCompressedTensors) {
  const Layer layer = Nvfp4Layer(3);
  const Parts expected = Expected(layer);
  for (const Kernels* kernels : AvailableKernels()) {
    SCOPED_TRACE(kernels->name);
    const auto modelopt = [&](Model& m) { AddModelopt(m, layer); };
    EXPECT_EQ(PartsOf(With(modelopt), 0, false, kernels->name), expected);
  }
  // Input scales are NaN above and absent here; scalars are [] and [1].
  EXPECT_EQ(PartsOf(With([&](Model& m) { AddModelopt(m, layer, false, {1}); })), expected);
  EXPECT_EQ(PartsOf(With([&](Model& m) { AddCompressedNvfp4(m, layer); })), expected);
  // Experts scattered over many shards, in the other order.
  EXPECT_EQ(PartsOf(With([&](Model& m) { AddModelopt(m, layer); }), 20'000, true), expected);
}

TEST(Formats, Fp8WithBlocksOfAnyShape) {
  const std::pair<size_t, size_t> shapes[] = {{128, 128}, {64, 64}, {1, 128}, {48, 80}, {500, 500}};
  for (const auto& [rows, columns] : shapes) {
    SCOPED_TRACE(Text("{}x{}", rows, columns));
    const Layer layer = Fp8Layer(rows, rows, columns);
    const Parts expected = Expected(layer);
    for (const Kernels* kernels : AvailableKernels()) {
      for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16}) {
        const auto fp8 = [&, rows = rows, columns = columns](Model& m) {
          AddFp8(m, layer, rows, columns, dtype);
        };
        EXPECT_EQ(PartsOf(With(fp8), 0, false, kernels->name), expected) << kernels->name;
      }
    }
  }
}

TEST(Formats, GptOssKeepsItsBiasesAndItsActivation) {
  Model model;
  AddGptOss(model, Mxfp4Layer(4));
  const Result<Built> built = BuildModel(model);
  ASSERT_TRUE(built) << built.error().ToString();
  const Manifest& manifest = built->generation->manifest();
  EXPECT_EQ(manifest.activation, (Activation{ActivationKind::kSwigluOai, 7.0, 1.702}));
  EXPECT_TRUE(manifest.layers[0].geometry.biases);
  std::vector<float> bias13, bias2;
  for (size_t e = 0; e < kExperts; ++e) {
    for (const size_t odd : {0, 1}) {
      for (size_t r = 0; r < kIntermediate; ++r) bias13.push_back(Bias(e, 2 * r + odd));
    }
    for (size_t r = 0; r < kHidden; ++r) bias2.push_back(Bias(e, r));
  }
  const auto as_bytes = [](const std::vector<float>& values) {
    const auto bytes = std::as_bytes(std::span(values));
    return Bytes(bytes.begin(), bytes.end());
  };
  EXPECT_EQ(ReadSection(*built->generation, Encoding::kBase, "bias13"), as_bytes(bias13));
  EXPECT_EQ(ReadSection(*built->generation, Encoding::kBase, "bias2"), as_bytes(bias2));
}

// The outputs of the ranks are summed: down's bias is rank 0's, whole.
TEST(Formats, GptOssShardsSumToOneBias) {
  MemEnv env;
  WriteModel(env, kTestCheckpoint, With([](Model& m) { AddGptOss(m, Mxfp4Layer(4)); }), 0);
  BuildOptions options = BothTiers();
  options.shard_world = 2;
  ASSERT_TRUE(BuildStore(env, options));
  const Generation generation = Store::Open(env, kTestStore)->OpenGeneration().value();
  constexpr size_t kShare = kIntermediate / 2;
  for (const uint32_t rank : {0u, 1u}) {
    std::vector<float> bias13, bias2;
    for (size_t e = 0; e < kExperts; ++e) {
      for (const size_t odd : {0, 1}) {
        for (size_t r = rank * kShare; r < (rank + 1) * kShare; ++r) {
          bias13.push_back(Bias(e, 2 * r + odd));
        }
      }
      for (size_t r = 0; r < kHidden; ++r) bias2.push_back(rank == 0 ? Bias(e, r) : 0.0F);
    }
    const auto same = [&](const char* role, const std::vector<float>& expected) {
      const Bytes found = ReadSection(generation.ForRank(rank), Encoding::kBase, role);
      return std::ranges::equal(found, std::as_bytes(std::span(expected)));
    };
    EXPECT_TRUE(same("bias13", bias13)) << rank;
    EXPECT_TRUE(same("bias2", bias2)) << rank;
  }
}

// A slice is an entry of the source record, and its digest is checked like a tensor's.
TEST(Formats, SourceRecordsOfSlicesProveThePairing) {
  Model model;
  AddGptOss(model, Mxfp4Layer(5));
  Result<Built> built = BuildModel(model);
  ASSERT_TRUE(built) << built.error().ToString();
  const auto verify = [&]() -> Result<SourceReport> {
    HP_ASSIGN(const Checkpoint checkpoint, Checkpoint::Open(*built->env, kTestCheckpoint));
    HP_ASSIGN(const MoeModel moe, DiscoverMoe(checkpoint));
    WorkerPool pool(1);
    return VerifySource(*built->generation, checkpoint, moe, pool, nullptr, nullptr);
  };
  const auto good = verify();
  ASSERT_TRUE(good) << good.error().ToString();
  EXPECT_EQ(good->tensors_checked, kExperts * 9);
  EXPECT_EQ(good->bytes_checked, built->report.bytes_read);
  // A byte at the end of the last expert, in a folder of its own: the file is sealed by no digest.
  const std::string path = std::string(kTestCheckpoint) + "/model.safetensors";
  std::vector<std::byte> file = built->env->Files().at(path);
  file.back() ^= std::byte{1};
  built->env->SetFile(path, file);
  const auto bad = verify();
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.error().exit_code(), 3);
}

TEST(Traps, TensorsAreBelievedAndTheConfigIsNot) {
  const Layer layer = Mxfp4Layer(6);
  Model model = With([&](Model& m) { AddDeepSeek(m, layer); });
  model.config_text = R"({"num_hidden_layers": 99, "quantization_config":
      {"quant_method": "fp8", "weight_block_size": [128, 128]}, "text_config":
      {"num_hidden_layers": 61, "n_routed_experts": 7}})";
  EXPECT_EQ(PartsOf(model), Expected(layer));
  const auto found = Discover(model);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->layers.size(), 1u);
  EXPECT_EQ(found->layers[0].format, SourceFormat::kMxfp4);
  EXPECT_EQ(found->layers[0].geometry.experts, kExperts);
}

TEST(Traps, ZeroScalesAreZeroBlocks) {
  Layer layer = Nvfp4Layer(7);
  for (auto& expert : layer) {
    for (Matrix& m : expert) {
      std::fill(m.scales.begin(), m.scales.end(), uint8_t{0});
      for (long double& w : m.weights) w = std::signbit(w) ? -0.0L : 0.0L;
    }
  }
  // One element is left alive, just above the smallest scale: nothing divides by it.
  layer[1][0].scales[0] = 1;
  layer[1][0].elements[0] = 0x01;
  layer[1][0].weights[0] = 0.5L * E4m3(1) * layer[1][0].global_scale;
  layer[1][0].weights[1] = 0;
  for (size_t i = 2; i < 16; ++i) {
    layer[1][0].weights[i] = E2m1(NibbleAt(layer[1][0], i)) * E4m3(1) * layer[1][0].global_scale;
  }
  for (const Kernels* kernels : AvailableKernels()) {
    const auto modelopt = [&](Model& m) { AddModelopt(m, layer); };
    const Parts parts = PartsOf(With(modelopt), 0, false, kernels->name);
    EXPECT_EQ(parts, Expected(layer)) << kernels->name;
    // The exponents of blocks of zeros are the lowest there is.
    EXPECT_EQ(std::count(parts.at("sc2").begin(), parts.at("sc2").end(), std::byte{0}),
              static_cast<ptrdiff_t>(parts.at("sc2").size()));
  }
}

TEST(Traps, OneSignedZerosAlternate) {
  Layer layer = Nvfp4Layer(8);
  for (Matrix& m : layer[0]) {
    for (uint8_t& byte : m.elements) byte &= 0x77;  // every zero is positive
    for (size_t i = 0; i < m.weights.size(); ++i) {
      m.weights[i] = E2m1(NibbleAt(m, i)) * E4m3(m.scales[i / 16]) * m.global_scale;
    }
  }
  EXPECT_EQ(PartsOf(With([&](Model& m) { AddModelopt(m, layer); })), Expected(layer));
}

TEST(Traps, LayersHaveFormatsAndExpertCountsOfTheirOwn) {
  const Layer nvfp4 = Nvfp4Layer(9);
  Layer bf16 = Bf16Layer(10);
  bf16.pop_back();  // a pruned layer
  Model model;
  AddBf16(model, bf16, "mlp", kNamed);
  model.ReplaceInNames("layers.0.", "layers.7.");
  AddModelopt(model, nvfp4);
  model.Add("model.layers.7.enorm.weight", Dtype::kBf16, {kHidden});
  const Result<Built> built = BuildModel(model, 30'000);
  ASSERT_TRUE(built) << built.error().ToString();
  const Manifest& manifest = built->generation->manifest();
  ASSERT_EQ(manifest.layers.size(), 2u);
  EXPECT_EQ(manifest.scheme, "modelopt-nvfp4+hf-per-expert");
  EXPECT_EQ(manifest.layers[0].source_format, SourceFormat::kNvfp4);
  EXPECT_EQ(manifest.layers[1].source_format, SourceFormat::kBf16);
  EXPECT_TRUE(manifest.layers[1].mtp);
  EXPECT_EQ(manifest.layers[1].geometry.experts, 2u);
  EXPECT_EQ(ReadSection(*built->generation, Encoding::kBase, "planes13", 0),
            Expected(nvfp4).at("planes13"));
  EXPECT_EQ(ReadSection(*built->generation, Encoding::kBase, "planes13", 1),
            Expected(bf16).at("planes13"));
}

// The generation belongs to the weights and to how they are decoded.
TEST(Traps, BlockShapeIsPartOfTheFingerprint) {
  const Layer layer = Fp8Layer(11, 64, 64);
  MemEnv env;
  Model model = With([&](Model& m) { AddFp8(m, layer, 64, 64, Dtype::kF32); });
  WriteModel(env, "/a", model, 0);
  // 65 to 95 rows would give the same grid.
  model.config_text = R"({"quantization_config": {"weight_block_size": [65, 64]}})";
  WriteModel(env, "/b", model, 0);
  EXPECT_NE(FingerprintOf(env, "/a"), FingerprintOf(env, "/b"));
}

struct BadSource {
  const char* name;
  std::function<void(Model&)> make;
  std::string what;
  std::string expected;
  std::string found;
};

template <typename T>
void Poke(Model& model, const std::string& name, size_t index, T value) {
  std::memcpy(model.tensors.at(name).data.data() + index * sizeof(T), &value, sizeof(T));
}

std::vector<BadSource> BadNvfp4() {
  const auto modelopt = [](Model& m) { AddModelopt(m, Nvfp4Layer(20)); };
  const std::string up = Hf(0, 1, 1);
  const auto global = [=](float value) {
    return [=](Model& m) {
      modelopt(m);
      Poke(m, up + ".weight_scale_2", 0, value);
    };
  };
  const auto scale = [=](uint8_t value) {
    return [=](Model& m) {
      modelopt(m);
      Poke(m, up + ".weight_scale", 12 * 5 + 7, value);
    };
  };
  const std::string scale_at =
      up + ".weight_scale holds a scale that is not usable at row 5, column 7";
  return {
      {"GlobalZero", global(0), up + ".weight_scale_2", "positive", "0"},
      {"GlobalNegative", global(-1), up + ".weight_scale_2", "positive", "-1"},
      {"GlobalInfinite", global(std::numeric_limits<float>::infinity()), up + ".weight_scale_2",
       "finite", "inf"},
      {"GlobalNaN", global(std::numeric_limits<float>::quiet_NaN()), up + ".weight_scale_2",
       "finite", "nan"},
      {"ScaleNaN", scale(0x7F), scale_at, "from 0", "0x7f (NaN)"},
      {"ScaleNegativeNaN", scale(0xFF), scale_at, "from 0", "0xff (NaN)"},
      {"ScaleNegative", scale(0xB8), scale_at, "from 0", "0xb8 (negative)"},
      {"MissingGlobal",
       [=](Model& m) {
         modelopt(m);
         m.tensors.erase(up + ".weight_scale_2");
       },
       "missing in model.layers.0.mlp.", "3 experts of 9 tensors", up + ".weight_scale_2"},
      {"GlobalOfTwo",
       [=](Model& m) {
         modelopt(m);
         m.Add(up + ".weight_scale_2", Dtype::kF32, {2});
       },
       "unequal shape", "[] for " + up, "F32 [2]"},
      {"ScaleBlocksOf32",
       [=](Model& m) {
         modelopt(m);
         m.Add(up + ".weight_scale", Dtype::kF8E4m3, {kIntermediate, kHidden / 32});
       },
       "unequal shape", Text("[{}, {}]", kIntermediate, kHidden / 16), "F8_E4M3"},
      {"OneExpertInBf16",
       [=](Model& m) {
         modelopt(m);
         m.Add(up + ".weight", Dtype::kBf16, {kIntermediate, kHidden});
       },
       "in two formats", "modelopt-nvfp4", up + ".weight BF16"},
  };
}

std::vector<BadSource> BadFp8AndMxfp4() {
  const std::string down = Hf(0, 2, 2);
  const auto fp8 = [](Model& m) { AddFp8(m, Fp8Layer(21, 64, 64), 64, 64, Dtype::kF32); };
  const auto fp8_scale = [=](float value) {
    return [=](Model& m) {
      fp8(m);
      Poke(m, down + ".weight_scale_inv", 3, value);
    };
  };
  const std::string at =
      down + ".weight_scale_inv holds a scale that is not usable at row 1, column 1";
  const auto gpt_oss = [](Model& m) { AddGptOss(m, Mxfp4Layer(22)); };
  const std::string fused = "model.layers.0.mlp.experts.gate_up_proj";
  return {
      {"Fp8ScaleNaN", fp8_scale(std::numeric_limits<float>::quiet_NaN()), at, "finite", "nan"},
      {"Fp8ScaleNegative", fp8_scale(-0.5F), at, "not negative", "-0.5"},
      {"Fp8ScaleInfinite", fp8_scale(std::numeric_limits<float>::infinity()), at, "finite", "inf"},
      {"Fp8ElementNaN",
       [=](Model& m) {
         fp8(m);
         Poke(m, down + ".weight", 2 * kIntermediate + 9, uint8_t{0xFF});
       },
       down + ".weight holds a value that is not finite at row 2, column 9", "finite", "NaN"},
      {"Fp8WithoutBlockShape",
       [=](Model& m) {
         fp8(m);
         m.config_text = "{}";
       },
       "block shape of the FP8 scales", "weight_block_size", "none"},
      {"Fp8BlockShapeOfOne",
       [=](Model& m) {
         fp8(m);
         m.config_text = R"({"quantization_config": {"weight_block_size": [64]}})";
       },
       "weight_block_size", "two whole numbers", "1 numbers"},
      {"Fp8BlockShapeZero",
       [=](Model& m) {
         fp8(m);
         m.config_text = R"({"quantization_config": {"weight_block_size": [64, 0]}})";
       },
       "weight_block_size", "two whole numbers", "0"},
      {"Fp8GridOfOtherBlocks",
       [=](Model& m) {
         fp8(m);
         m.config_text = R"({"quantization_config": {"weight_block_size": [128, 64]}})";
       },
       "unequal shape", "[1, 3]", "F32 [2, 3]"},
      {"GptOssScaleNaN",
       [=](Model& m) {
         gpt_oss(m);
         Poke(m, fused + "_scales", (256 + 200) * 6 + 1, uint8_t{255});
       },
       fused + "_scales[1, 128:256] holds a NaN scale at row 72, block 1", "0 to 254", "255"},
      {"GptOssBiasInfinite",
       [=](Model& m) {
         gpt_oss(m);
         Poke(m, fused + "_bias", 256 + 3, uint16_t{0x7F80});
       },
       fused + "_bias[1, 0:128] holds a bias", "finite biases", "infinity"},
      {"GptOssWithoutBias",
       [=](Model& m) {
         gpt_oss(m);
         m.tensors.erase(fused + "_bias");
       },
       "missing in model.layers.0.mlp.", "6 tensors", fused + "_bias"},
      {"GptOssFewerScales",
       [=](Model& m) {
         gpt_oss(m);
         m.Add(fused + "_scales", Dtype::kU8, {kExperts - 1, 2 * kIntermediate, kHidden / 32});
       },
       "unequal shape", "[3, 256, 6]", "U8 [2, 256, 6]"},
      {"GptOssRouterOfMore",
       [=](Model& m) {
         gpt_oss(m);
         m.Add("model.layers.0.mlp.router.weight", Dtype::kBf16, {kExperts + 1, kHidden});
       },
       "fewer experts in model.layers.0.mlp. than its router", "3 rows", "[4, 192]"},
  };
}

std::vector<BadSource> BadFused() {
  const auto fused = [](Model& m) { AddFused(m, Bf16Layer(23)); };
  const std::string base = "model.layers.0.mlp.experts.";
  return {
      {"Transposed",
       [=](Model& m) {
         m.Add(base + "gate_up_proj", Dtype::kBf16, {kExperts, kHidden, 2 * kIntermediate});
         m.Add(base + "down_proj", Dtype::kBf16, {kExperts, kIntermediate, kHidden});
       },
       "stored transposed", "[E, 2I, H]", "[3, 192, 256]"},
      {"WithBiases",
       [=](Model& m) {
         fused(m);
         m.Add(base + "gate_up_proj_bias", Dtype::kBf16, {kExperts, 2 * kIntermediate});
       },
       "in two formats", "hf-fused", "gate_up_proj_bias"},
      {"WithoutDown",
       [=](Model& m) {
         fused(m);
         m.tensors.erase(base + "down_proj");
       },
       "missing in model.layers.0.mlp.", "2 tensors", base + "down_proj"},
      {"NaN",
       [=](Model& m) {
         fused(m);
         Poke(m, base + "gate_up_proj", (256 + 128 + 4) * kHidden + 11, uint16_t{0x7FC0});
       },
       base + "gate_up_proj[1, 128:256] holds a value that is not finite at row 4, column 11",
       "finite", "NaN"},
      {"UnknownNameBeside",
       [=](Model& m) {
         fused(m);
         m.Add(base + "gate_up_proj_extra", Dtype::kBf16, {1});
       },
       "fit no known naming scheme", "docs/checkpoints.md", "gate_up_proj_extra"},
      {"BesidePerExpertTensors",
       [=](Model& m) {
         fused(m);
         m.Add(base + "0.gate_proj.weight", Dtype::kBf16, {kIntermediate, kHidden});
       },
       "in two formats", "", ""},
      {"TwoDimensional",
       [=](Model& m) {
         fused(m);
         m.Add(base + "gate_up_proj", Dtype::kBf16, {2 * kIntermediate, kHidden});
       },
       "not a stack of matrices", "[experts, 2 * out, in]", "[256, 192]"},
      {"OddRows",
       [=](Model& m) {
         fused(m);
         m.Add(base + "gate_up_proj", Dtype::kBf16, {kExperts, 2 * kIntermediate + 1, kHidden});
       },
       "not supported", "multiples of 64", "257"},
      {"NoExperts",
       [=](Model& m) {
         m.Add(base + "gate_up_proj", Dtype::kBf16, {0, 2 * kIntermediate, kHidden});
         m.Add(base + "down_proj", Dtype::kBf16, {0, kHidden, kIntermediate});
       },
       "number of experts", "1 to", "[0, 256, 192]"},
  };
}

TEST(Traps, AreRefusedByName) {
  std::vector<BadSource> all = BadNvfp4();
  for (auto* more : {&BadFp8AndMxfp4, &BadFused}) {
    for (BadSource& bad : more()) all.push_back(std::move(bad));
  }
  for (const BadSource& bad : all) {
    SCOPED_TRACE(bad.name);
    const Result<Built> built = BuildModel(With(bad.make));
    ASSERT_FALSE(built);
    const Status& status = built.error();
    SCOPED_TRACE(status.ToString());
    EXPECT_EQ(status.exit_code(), 3);
    EXPECT_FALSE(status.file().empty());
    EXPECT_NE(status.ToString().find(bad.what), std::string::npos);
    EXPECT_NE(status.expected().find(bad.expected), std::string::npos);
    EXPECT_NE(status.found().find(bad.found), std::string::npos);
  }
}

}  // namespace
}  // namespace hotplane::formats_testing
