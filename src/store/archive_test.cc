// tests/data/store-v1 is a store that an earlier build wrote. Every later 1.x must read it.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "base/format_text.h"
#include "io/env.h"
#include "quant/quantize.h"
#include "store/paths.h"
#include "store/store.h"
#include "store/store_samples.h"

namespace hotplane {
namespace {

const std::string kArchive = std::string(HOTPLANE_SOURCE_DIR) + "/tests/data/store-v1";
constexpr uint32_t kExperts = 2;
constexpr uint32_t kSize = 64;  // hidden and intermediate

// XXH3-128 of every file. The archive is never written again: a difference means that the reader,
// the checksum or the archive changed, and the first two must not.
const std::map<std::string, std::string> kPinned = {
    {"manifest", "30aea52a3598cef2487fe9cd36bc220b"},
    {"layer-0000.base", "58bb16771337989b1950c09ccb2838a9"},
    {"layer-0000.delta-quintal", "2dfddbc3fb08a22f68376b76e735f674"},
    {"layer-0000.delta-nibble", "52ef628485c564f9535b640b39bc942f"},
    {"layer-0000.source", "63a5e72922a31d4bbf52e00c1c80d9d8"},
};

Manifest ArchiveManifest() {
  Manifest manifest;
  manifest.identity.source_fingerprint = Digest("the archived store");
  manifest.identity.abi = kPlaneAbiName;
  manifest.scheme = "hf-per-expert";
  manifest.activation = {ActivationKind::kSiluGatedClamped, 10};
  manifest.top_k = 1;
  manifest.layers = {
      {0, 3, false, "model.layers.3.mlp.", {kExperts, kSize, kSize}, SourceFormat::kF32},
      {1, 4, true, "model.layers.4.mlp.", {kExperts, kSize, kSize}, SourceFormat::kF32}};
  return manifest;
}

// Weights of an [n, kSize] matrix: integers, so that every compiler makes the same ones.
std::vector<float> ArchiveWeights(size_t n, uint32_t expert, uint32_t matrix) {
  std::vector<float> weights(n * kSize);
  uint64_t state = expert * 2 + matrix;
  for (float& weight : weights) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    weight = static_cast<float>(static_cast<int64_t>(state) >> 48) / 4096.0f;
  }
  return weights;
}

struct Planes {
  std::vector<std::byte> codes, scales, nibbles, quintals;
};

Planes Quantize(size_t n, uint32_t expert, uint32_t matrix) {
  const std::vector<float> weights = ArchiveWeights(n, expert, matrix);
  Planes planes{std::vector<std::byte>(CodePlaneBytes(n, kSize)),
                std::vector<std::byte>(ScalePlaneBytes(n, kSize)),
                std::vector<std::byte>(NibblePlaneBytes(n, kSize)),
                std::vector<std::byte>(QuintalPlaneBytes(n, kSize))};
  SelectKernels("scalar").value()->quantize(
      SourceFormat::kF32, reinterpret_cast<const std::byte*>(weights.data()), n, kSize, false,
      {planes.codes.data(), planes.scales.data(), planes.nibbles.data(), planes.quintals.data()});
  return planes;
}

Result<void> WriteArchive(Env& env, const std::string& directory) {
  HP_ASSIGN(const Generation generation,
            Store::OpenOrCreateGeneration(env, directory, ArchiveManifest()));
  for (const Encoding encoding : kEncodings) {
    HP_ASSIGN(const auto writer, generation.CreateLayer(0, encoding));
    for (uint32_t expert = 0; expert < kExperts; ++expert) {
      const Planes w13 = Quantize(2 * kSize, expert, 0);
      const Planes w2 = Quantize(kSize, expert, 1);
      if (encoding == Encoding::kBase) {
        HP_TRY(writer->WritePiece("planes13", expert, w13.codes));
        HP_TRY(writer->WritePiece("sc13", expert, w13.scales));
        HP_TRY(writer->WritePiece("planes2", expert, w2.codes));
        HP_TRY(writer->WritePiece("sc2", expert, w2.scales));
        continue;
      }
      const bool nibble = encoding == Encoding::kDeltaNibble;
      HP_TRY(writer->WritePiece("fp13", expert, nibble ? w13.nibbles : w13.quintals));
      HP_TRY(writer->WritePiece("fp2", expert, nibble ? w2.nibbles : w2.quintals));
    }
    HP_TRY(writer->Publish());
  }
  return generation.PublishSourceRecord(
      {generation.id(), 0, {{"model.layers.3.mlp.experts.0.down_proj.weight", Digest("down")}}});
}

std::string PathIn(const std::string& store, const std::string& name) {
  return JoinPath(JoinPath(store, ToHex(GenerationOf(ArchiveManifest().identity))), name);
}

std::vector<std::byte> Piece(const LayerFile& file, std::string_view role, uint32_t expert) {
  const Section& section = *file.layout().Find(role);
  std::vector<std::byte> bytes(section.expert_bytes);
  EXPECT_TRUE(
      ReadFully(file.file(), file.layout().PieceOffset(section, expert), bytes).has_value());
  return bytes;
}

class Archive : public testing::Test {
 protected:
  void SetUp() override {
    std::string name =
        (std::filesystem::temp_directory_path() / "hotplane-archive-XXXXXX").string();
    scratch_ = mkdtemp(name.data());
  }
  void TearDown() override { std::filesystem::remove_all(scratch_); }
  std::string scratch_;
};

TEST_F(Archive, OpensVerifiesAndIsWhatItWas) {
  // A copy: opening a store takes its lock file, and a source tree is not written to.
  std::filesystem::copy(kArchive, scratch_, std::filesystem::copy_options::recursive);
  const auto generation = OpenOnly(PosixEnv(), scratch_);
  ASSERT_TRUE(generation.has_value()) << generation.error().ToString();
  EXPECT_EQ(generation->manifest(), ArchiveManifest());
  WorkerPool pool(2);
  const VerifyReport report = generation->Verify(pool, nullptr, {}).value();
  EXPECT_TRUE(report.findings.empty());
  EXPECT_EQ(report.files_checked, kPinned.size());
  EXPECT_TRUE(generation->ReadSourceRecord(0)->has_value());
  for (const auto& [name, digest] : kPinned) {
    const auto bytes = ReadWholeFile(PosixEnv(), PathIn(scratch_, name), 1 << 20);
    ASSERT_TRUE(bytes.has_value()) << name;
    EXPECT_EQ(ToHex(Digest(*bytes)), digest) << name;
  }
}

TEST_F(Archive, BaseAndQuintalsGiveTheNibbles) {
  std::filesystem::copy(kArchive, scratch_, std::filesystem::copy_options::recursive);
  const auto generation = OpenOnly(PosixEnv(), scratch_);
  ASSERT_TRUE(generation.has_value());
  const LayerFile base = generation->OpenLayer(0, Encoding::kBase).value();
  const LayerFile quintal = generation->OpenLayer(0, Encoding::kDeltaQuintal).value();
  const LayerFile nibble = generation->OpenLayer(0, Encoding::kDeltaNibble).value();
  for (uint32_t expert = 0; expert < kExperts; ++expert) {
    const std::vector<std::byte> expected = Piece(nibble, "fp13", expert);
    std::vector<std::byte> merged(expected.size());
    ASSERT_TRUE(SelectKernels("scalar").value()->merge(Piece(base, "planes13", expert).data(),
                                                       Piece(quintal, "fp13", expert).data(),
                                                       2 * kSize, kSize, merged.data()));
    EXPECT_EQ(merged, expected);
  }
}

TEST_F(Archive, ThisBuildStillWritesTheSameBytes) {
  ASSERT_TRUE(WriteArchive(PosixEnv(), scratch_).has_value());
  for (const auto& [name, digest] : kPinned) {
    const auto bytes = ReadWholeFile(PosixEnv(), PathIn(scratch_, name), 1 << 20);
    ASSERT_TRUE(bytes.has_value()) << name;
    EXPECT_EQ(ToHex(Digest(*bytes)), digest) << name;
  }
}

// The parser that was written from the document alone.
struct ParserRun {
  int exit_code;
  std::string output;
};
ParserRun RunParser(const std::string& file) {
  const std::string command =
      Text("python3 '{}/tools/parse_layer.py' '{}' 2>&1", HOTPLANE_SOURCE_DIR, file);
  FILE* const pipe = popen(command.c_str(), "r");
  std::string output;
  std::array<char, 256> line;
  while (fgets(line.data(), line.size(), pipe) != nullptr) output += line.data();
  return {WEXITSTATUS(pclose(pipe)), output};
}

TEST_F(Archive, AParserWrittenFromTheDocumentReadsIt) {
  if (std::system("python3 -c '' 2>/dev/null") != 0) GTEST_SKIP() << "there is no python3";
  const ParserRun base = RunParser(PathIn(kArchive, "layer-0000.base"));
  EXPECT_EQ(base.exit_code, 0) << base.output;
  EXPECT_NE(base.output.find("layer 0 (model index 3)"), std::string::npos) << base.output;
  for (const Section& section :
       PlanLayerLayout(Encoding::kBase, {kExperts, kSize, kSize}).sections) {
    const std::string line = Text("{:<16} required offset {} bytes {} stride {}\n", section.role,
                                  section.offset, section.expert_bytes, section.expert_stride);
    EXPECT_NE(base.output.find(line), std::string::npos) << line << base.output;
  }
  for (const char* name : {"layer-0000.delta-quintal", "layer-0000.delta-nibble"}) {
    const ParserRun delta = RunParser(PathIn(kArchive, name));
    EXPECT_EQ(delta.exit_code, 0) << delta.output;
  }
  const std::string damaged = scratch_ + "/damaged";
  std::filesystem::copy(PathIn(kArchive, "layer-0000.base"), damaged);
  std::filesystem::resize_file(damaged, std::filesystem::file_size(damaged) - 1);
  EXPECT_EQ(RunParser(damaged).exit_code, 3);
  EXPECT_EQ(RunParser(PathIn(kArchive, "manifest")).exit_code, 3);
}

}  // namespace
}  // namespace hotplane
