#include "format/manifest.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cstdlib>

#include "format/document_samples.h"
#include "format/tsym4.h"

namespace hotplane {
namespace {

// The same cases in every run.
[[maybe_unused]] const bool kSeeded = setenv("RC_PARAMS", "seed=20 max_success=300", 0) == 0;

const std::string kFile = "/s/g/manifest";

Manifest SampleManifest() {
  Manifest manifest;
  manifest.identity.source_fingerprint = Digest("a source");
  manifest.identity.abi = kPlaneAbiName;
  manifest.scheme = "deepseek-mxfp4";
  manifest.activation = {ActivationKind::kSiluGatedClamped, 10};
  manifest.top_k = 6;
  manifest.layers = {{0, 3, false, "layers.3.ffn.", {256, 4096, 2048}, SourceFormat::kMxfp4},
                     {1, 4, true, "mtp.0.ffn.", {256, 4096, 2048}, SourceFormat::kMxfp4}};
  return manifest;
}

SourceRecord SampleRecord() {
  return {Digest("a generation"),
          5,
          {{"layers.5.ffn.experts.0.w1.weight", Digest("w1")},
           {"layers.5.ffn.experts.0.w2.weight", Digest("w2")}}};
}

std::string Body(const std::string& sealed) { return sealed.substr(sealed.find('\n') + 1); }

std::string Reseal(const std::string& kind, const std::string& body) {
  return Text("{} 1 xxh3-128={} bytes={}\n{}", kind, ToHex(Digest(body)), body.size(), body);
}

// How the sample is refused when `from` in its body becomes `to` and the seal is right.
std::string Refusal(const std::string& from, const std::string& to) {
  std::string body = Body(EncodeManifest(SampleManifest()));
  const size_t at = body.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  body.replace(at, from.size(), to);
  const auto decoded = DecodeManifest(Reseal("hotplane-manifest", body), kFile);
  if (decoded) return "accepted";
  EXPECT_EQ(decoded.error().exit_code(), 3);
  EXPECT_EQ(decoded.error().file(), kFile);
  return decoded.error().what();
}

void ExpectRefusal(const std::string& from, const std::string& to, const std::string& text) {
  const std::string refusal = Refusal(from, to);
  EXPECT_NE(refusal.find(text), std::string::npos) << from << " -> " << to << ": " << refusal;
}

TEST(Manifest, RoundTrips) {
  const Manifest manifest = SampleManifest();
  const std::string text = EncodeManifest(manifest);
  const auto decoded = DecodeManifest(text, kFile);
  ASSERT_TRUE(decoded.has_value()) << decoded.error().ToString();
  EXPECT_EQ(*decoded, manifest);
  Manifest plain = manifest;
  plain.activation = {};
  plain.top_k.reset();
  EXPECT_EQ(DecodeManifest(EncodeManifest(plain), kFile).value(), plain);
  Manifest imported = manifest;
  imported.checkpoint_id = "a model";
  for (ManifestLayer& layer : imported.layers) layer.source_format = SourceFormat::kPlanes;
  EXPECT_EQ(DecodeManifest(EncodeManifest(imported), kFile).value(), imported);
}

RC_GTEST_PROP(ManifestProperty, RoundTrips, ()) {
  Manifest manifest = SampleManifest();
  manifest.identity.zero_mode =
      *rc::gen::element(ZeroMode::kAuto, ZeroMode::kSign, ZeroMode::kAlternate);
  manifest.identity.shard_world = *rc::gen::inRange<uint32_t>(1, 9);
  manifest.identity.shard_axis = manifest.identity.shard_world == 1 ? "none" : "intermediate";
  manifest.activation.limit = *rc::gen::map<uint32_t>([](uint32_t x) { return 1e-3 * (x + 1); });
  manifest.scheme = *rc::gen::string<std::string>();
  manifest.layers.clear();
  const auto layer_count = *rc::gen::inRange<uint32_t>(1, 6);
  for (uint32_t i = 0; i < layer_count; ++i) {
    manifest.layers.push_back(
        {i,
         *rc::gen::arbitrary<uint32_t>(),
         i == layer_count - 1,
         *rc::gen::container<std::string>(rc::gen::inRange<char>(1, 127)),
         {*rc::gen::inRange<uint32_t>(1, 500), 64 * *rc::gen::inRange<uint32_t>(1, 50),
          64 * manifest.identity.shard_world * *rc::gen::inRange<uint32_t>(1, 20)},
         *rc::gen::element(SourceFormat::kMxfp4, SourceFormat::kBf16, SourceFormat::kF32)});
  }
  for (char& c : manifest.scheme) c = static_cast<char>(c & 0x7f);
  const std::string text = EncodeManifest(manifest);
  const auto decoded = DecodeManifest(text, kFile);
  RC_ASSERT(decoded.has_value());
  RC_ASSERT(*decoded == manifest);
}

TEST(Manifest, TheGenerationIsTheDigestOfTheIdentityAlone) {
  Manifest a = SampleManifest();
  Identity b = a.identity;
  EXPECT_EQ(GenerationOf(a.identity), Digest(IdentityPreimage(b)));
  b.zero_mode = ZeroMode::kSign;
  EXPECT_NE(GenerationOf(a.identity), GenerationOf(b));
  b = a.identity;
  b.source_fingerprint[15] ^= 1;
  EXPECT_NE(GenerationOf(a.identity), GenerationOf(b));
  // On disk for ever: a change here orphans every store.
  EXPECT_EQ(IdentityPreimage(a.identity),
            "hotplane-identity 1 {\"source_fingerprint\":\"" + ToHex(Digest("a source")) +
                "\",\"abi\":\"tsym4-e8m0-fragmajor-a32-v2\",\"zero_mode\":\"auto\","
                "\"shard_world\":1,\"shard_axis\":\"none\"}\n");
}

TEST(Manifest, EveryFlippedBitAndEveryLengthIsRefused) {
  for (const bool source : {false, true}) {
    std::string text =
        source ? EncodeSourceRecord(SampleRecord()) : EncodeManifest(SampleManifest());
    const auto refused = [&](std::string_view bytes) -> bool {
      const auto check = [](const auto& decoded) {
        return !decoded && decoded.error().exit_code() == 3 && decoded.error().file() == kFile;
      };
      return source ? check(DecodeSourceRecord(bytes, kFile)) : check(DecodeManifest(bytes, kFile));
    };
    ASSERT_FALSE(refused(text));
    for (size_t bit = 0; bit < text.size() * 8; ++bit) {
      text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << (bit % 8)));
      ASSERT_TRUE(refused(text)) << "bit " << bit;
      text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << (bit % 8)));
    }
    for (size_t bytes = 0; bytes < text.size(); ++bytes) {
      ASSERT_TRUE(refused(std::string_view(text).substr(0, bytes))) << bytes;
    }
    EXPECT_TRUE(refused(text + "\n"));
  }
}

TEST(Manifest, BehindARightSealEveryFieldIsChecked) {
  ExpectRefusal("\"scheme\"", "\"schema\"", "unknown field \"schema\"");
  ExpectRefusal("\"mtp\":true", "\"mtp\":true,\"quirks\":1", "unknown field \"quirks\"");
  ExpectRefusal("\"scheme\": \"deepseek-mxfp4\",\n", "", "no field \"scheme\"");
  ExpectRefusal("\"deepseek-mxfp4\"", "7", "\"scheme\" is not a string");
  ExpectRefusal("\"top_k\": 6", "\"top_k\": 6,\n  \"top_k\": 6", "canonical");
  ExpectRefusal("\"top_k\": 6", "\"top_k\":  6", "canonical");
  ExpectRefusal("\"top_k\": 6", "\"top_k\": -6", "\"top_k\" is not a count");
  ExpectRefusal("\"top_k\": 6", "\"top_k\": 4294967296", "\"top_k\" is not a count");
  ExpectRefusal("\"top_k\": 6", "\"top_k\": 0", "top_k of 0");
  ExpectRefusal("\"limit\":10.0", "\"limit\":-1.0", "limit that is not positive");
  ExpectRefusal("\"limit\":10.0", "\"limit\":1e999", "not well-formed");
  ExpectRefusal("silu-gated-clamped", "gelu", "unknown kind");
  ExpectRefusal("silu-gated-clamped", "silu-gated", "takes none");
  ExpectRefusal("a32-v2", "a32-v3", "plane order");
  ExpectRefusal("\"zero_mode\":\"auto\"", "\"zero_mode\":\"some\"", "zero_mode");
  ExpectRefusal("\"zero_mode\":\"auto\"", "\"zero_mode\":\"alt\"", "its generation is");
  ExpectRefusal("\"shard_world\":1", "\"shard_world\":0", "shard_world of 0");
  ExpectRefusal("\"shard_axis\":\"none\"", "\"shard_axis\":\"hidden\"", "shard_axis");
  ExpectRefusal("\"ordinal\":1", "\"ordinal\":2", "layers[1] has the ordinal 2");
  ExpectRefusal("\"mtp\":false", "\"mtp\":0", "not true or false");
  ExpectRefusal("\"hidden\":4096", "\"hidden\":4097", "layers[0] has a geometry");
  ExpectRefusal("\"experts\":256", "\"experts\":0", "layers[0] has a geometry");
  ExpectRefusal("\"source_format\":\"mxfp4\"", "\"source_format\":\"fp3\"", "source_format");
  ExpectRefusal("\"layers\": [", "\"layers\": [[],", "layers[0] is not an object");
  ExpectRefusal("  \"layers\"", "  \"layers\": 3 \"", "not well-formed");
}

TEST(Manifest, MtpLayersComeLast) {
  Manifest manifest = SampleManifest();
  std::swap(manifest.layers[0].mtp, manifest.layers[1].mtp);
  const auto decoded = DecodeManifest(EncodeManifest(manifest), kFile);
  ASSERT_FALSE(decoded.has_value());
  EXPECT_NE(decoded.error().what().find("main layer after"), std::string::npos);
}

TEST(Manifest, DeeplyNestedJsonIsRefused) {
  const std::string body(200'000, '[');
  const auto decoded = DecodeManifest(Reseal("hotplane-manifest", body), kFile);
  ASSERT_FALSE(decoded.has_value());
  const std::string nested = body + std::string(200'000, ']');
  EXPECT_FALSE(DecodeManifest(Reseal("hotplane-manifest", nested), kFile).has_value());
}

TEST(Manifest, ALaterFormatIsNamed) {
  std::string text = EncodeManifest(SampleManifest());
  text.replace(0, 19, "hotplane-manifest 2");
  EXPECT_EQ(DecodeManifest(text, kFile).error().what(),
            "hotplane-manifest refused: it has format version 2, this build reads version 1");
  EXPECT_FALSE(DecodeManifest(EncodeSourceRecord(SampleRecord()), kFile).has_value());
}

TEST(Manifest, NamesThatAreNotUtf8DoNotThrow) {
  Manifest manifest = SampleManifest();
  manifest.scheme = "\xff\xfe";
  EXPECT_NE(EncodeManifest(manifest).find("\xEF\xBF\xBD"), std::string::npos);
}

TEST(SourceRecord, RoundTripsAndMustBeSorted) {
  SourceRecord record = SampleRecord();
  EXPECT_EQ(DecodeSourceRecord(EncodeSourceRecord(record), kFile).value(), record);
  std::swap(record.tensors[0], record.tensors[1]);
  EXPECT_FALSE(DecodeSourceRecord(EncodeSourceRecord(record), kFile).has_value());
  record.tensors[0] = record.tensors[1];
  EXPECT_FALSE(DecodeSourceRecord(EncodeSourceRecord(record), kFile).has_value());
}

TEST(Manifest, TheDocumentShowsTheseBytes) {
  const std::string manifest = EncodeManifest(SampleManifest());
  EXPECT_EQ(DocumentBlock("docs/format/manifest.md", "manifest_test"), manifest)
      << "put this into the document:\n"
      << manifest;
  const std::string record = EncodeSourceRecord(SampleRecord());
  EXPECT_EQ(DocumentBlock("docs/format/manifest.md", "manifest_test source"), record)
      << "put this into the document:\n"
      << record;
}

}  // namespace
}  // namespace hotplane
