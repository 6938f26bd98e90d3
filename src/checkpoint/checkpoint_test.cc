#include "checkpoint/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "base/format_text.h"
#include "base/topology.h"
#include "base/units.h"
#include "checkpoint/checkpoint_testing.h"
#include "checkpoint/json_scan.h"

namespace hotplane {
namespace {

// What a refusal must say.
struct Refusal {
  StatusCode code = StatusCode::kData;
  std::string file{};
  std::optional<uint64_t> offset{};
  std::string what{};  // these are parts of the texts
  std::string expected{};
  std::string found{};
};

template <typename T>
void ExpectRefusal(const Result<T>& result, const Refusal& refusal) {
  ASSERT_FALSE(result) << "accepted";
  const Status& status = result.error();
  SCOPED_TRACE(status.ToString());
  EXPECT_EQ(status.code(), refusal.code);
  EXPECT_EQ(status.file(), refusal.file);
  if (refusal.offset) {
    EXPECT_EQ(status.offset(), refusal.offset);
  }
  EXPECT_NE(status.what().find(refusal.what), std::string::npos);
  EXPECT_NE(status.expected().find(refusal.expected), std::string::npos);
  EXPECT_NE(status.found().find(refusal.found), std::string::npos);
}

TEST(Dtype, NamesAndSizesRoundTrip) {
  for (unsigned i = 1; i <= static_cast<unsigned>(Dtype::kU64); ++i) {
    const auto dtype = static_cast<Dtype>(i);
    EXPECT_EQ(ParseDtype(DtypeName(dtype)), dtype);
    EXPECT_GE(DtypeBytes(dtype), 1u);
  }
  EXPECT_EQ(ParseDtype("Q4"), std::nullopt);
  EXPECT_EQ(DtypeName(Dtype::kF8E8m0), "F8_E8M0");
  EXPECT_EQ(DtypeBytes(Dtype::kBf16), 2u);
}

TEST(SafetensorsHeader, GoodOne) {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[4,28]},)"
      R"("a":{"shape":[4],"data_offsets":[0,4],"dtype":"I8"},)"
      R"("s":{"dtype":"BF16","shape":[],"data_offsets":[28,30]},)"
      R"("z":{"dtype":"U8","shape":[0,9],"data_offsets":[4,4]}}   )";
  const uint64_t start = 8 + header.size();
  const auto tensors = ParseSafetensorsHeader(header, start + 30, "f");
  ASSERT_TRUE(tensors) << tensors.error().ToString();
  ASSERT_EQ(tensors->size(), 4u);
  for (const Tensor& tensor : *tensors) {
    if (tensor.name == "b") {
      EXPECT_EQ(tensor.dtype, Dtype::kF32);
      EXPECT_EQ(tensor.shape, (std::vector<uint64_t>{2, 3}));
      EXPECT_EQ(tensor.offset, start + 4);
      EXPECT_EQ(tensor.bytes, 24u);
    }
    if (tensor.name == "s") {
      EXPECT_EQ(tensor.bytes, 2u);
    }
    if (tensor.name == "z") {
      EXPECT_EQ(tensor.bytes, 0u);
    }
  }
  EXPECT_TRUE(ParseSafetensorsHeader("{}", 10, "f"));
}

struct BadHeader {
  const char* name;
  std::string header;
  uint64_t data_bytes;
  Refusal refusal;  // file is set by the test; offset counts from the start of the file
};

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return Text(R"("{}":{{"dtype":"{}","shape":{},"data_offsets":{}}})", name, dtype, shape, offsets);
}

std::vector<BadHeader> BadHeaders() {
  const std::string a = Entry("a", "U8", "[4]", "[0,4]");
  const std::string one = "{" + a + "}";
  const auto with = [](const std::string& entry) { return "{" + entry + "}"; };
  using Code = StatusCode;
  return {
      {"Empty", "", 0, {Code::kData, "", 8, "malformed", "begins with {", "\"\""}},
      {"NotAnObject", "[]", 0, {Code::kData, "", 8, "malformed", "begins with {", "[]"}},
      {"Spaces", "  {}", 0, {Code::kData, "", 8, "malformed", "begins with {", "  {}"}},
      {"CutShort", one.substr(0, one.size() - 1), 4, {Code::kData, "", {}, "JSON", "", "end"}},
      {"Trailing", one + "x", 4, {Code::kData, "", 8 + one.size(), "JSON", "", "invalid literal"}},
      {"NotUtf8", "{\"\xff\":1}", 0, {Code::kData, "", 10, "JSON", "", "UTF-8"}},
      {"ControlInName",
       with(Entry("a\\u001b[2J", "U8", "[4]", "[0,4]")),
       4,
       {Code::kData, "", {}, "malformed tensor name", "without control", "a?[2J"}},
      {"EmptyName", with(Entry("", "U8", "[4]", "[0,4]")), 4, {.what = "malformed tensor name"}},
      {"LongName",
       with(Entry(std::string(1025, 'n'), "U8", "[4]", "[0,4]")),
       4,
       {.what = "malformed tensor name", .expected = "1024", .found = "1025 bytes"}},
      {"DuplicateTensor",
       "{" + a + "," + a + "}",
       4,
       {Code::kData, "", 8 + 1 + a.size() + 1, "duplicate key", "once", "a"}},
      {"DuplicateField",
       R"({"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
       4,
       {.what = "tensor a has a duplicate field", .expected = "each once", .found = "dtype"}},
      {"DuplicateMetadata",
       R"({"__metadata__":{},"__metadata__":{}})",
       0,
       {.what = "duplicate key", .found = "__metadata__"}},
      {"DuplicateMetadataKey",
       R"({"__metadata__":{"k":"1","k":"2"}})",
       0,
       {.what = "duplicate key", .found = "k"}},
      {"MetadataNotStrings",
       R"({"__metadata__":{"k":1}})",
       0,
       {.what = "__metadata__", .expected = "object of strings", .found = "1"}},
      {"MetadataNotAnObject",
       R"({"__metadata__":"x"})",
       0,
       {.what = "__metadata__", .expected = "object of strings", .found = "x"}},
      {"MetadataNested",
       R"({"__metadata__":{"k":{}}})",
       0,
       {.what = "__metadata__", .expected = "object of strings", .found = "object"}},
      {"UnknownField",
       R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1}})",
       4,
       {.what = "an unknown field", .found = "x"}},
      {"MissingField",
       R"({"a":{"dtype":"U8","shape":[4]}})",
       4,
       {.what = "tensor a is incomplete", .found = "no data_offsets"}},
      {"EntryNotAnObject", R"({"a":7})", 0, {.what = "entry a is malformed", .found = "7"}},
      {"UnknownDtype",
       with(Entry("a", "Q4", "[4]", "[0,4]")),
       4,
       {.what = "tensor a has an unknown dtype", .expected = "BF16", .found = "Q4"}},
      {"SubByteDtype",
       with(Entry("a", "F4", "[4]", "[0,2]")),
       2,
       {.what = "tensor a has a sub-byte dtype", .expected = "BF16", .found = "F4"}},
      {"DtypeNotAString",
       R"({"a":{"dtype":3,"shape":[4],"data_offsets":[0,4]}})",
       4,
       {.what = "tensor a is malformed", .found = "3"}},
      {"NegativeShape",
       with(Entry("a", "U8", "[-4]", "[0,4]")),
       4,
       {.what = "tensor a is malformed", .expected = "unsigned", .found = "-4"}},
      {"FractionalShape",
       with(Entry("a", "U8", "[4.0]", "[0,4]")),
       4,
       {.what = "tensor a is malformed", .expected = "unsigned"}},
      {"HugeNumber",
       with(Entry("a", "U8", "[99999999999999999999]", "[0,4]")),
       4,
       {.what = "tensor a is malformed"}},
      {"InfiniteNumber", with(Entry("a", "U8", "[1e999]", "[0,4]")), 4, {.what = "JSON"}},
      {"NestedShape",
       with(Entry("a", "U8", "[[4]]", "[0,4]")),
       4,
       {.what = "nested too deeply", .expected = "3 levels"}},
      {"TooManyDimensions",
       with(Entry("a", "U8", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,4]", "[0,4]")),
       4,
       {.what = "too many dimensions", .expected = "16"}},
      {"ShapeOverflow",
       with(Entry("a", "F64", "[4294967296,4294967296]", "[0,0]")),
       0,
       {.what = "tensor a do not match its shape", .expected = "represented", .found = "[0, 0]"}},
      {"OverflowTimesZero",
       with(Entry("a", "U8", "[4294967296,4294967296,0]", "[0,0]")),
       0,
       {.what = "tensor a do not match its shape", .expected = "represented"}},
      {"SizeMismatch",
       with(Entry("a", "BF16", "[4]", "[0,4]")),
       4,
       {.what = "tensor a do not match its shape",
        .expected = "8 bytes for BF16 [4]",
        .found = "[0, 4]"}},
      {"BackwardOffsets",
       with(Entry("a", "U8", "[4]", "[4,0]")),
       4,
       {.what = "tensor a do not match its shape", .expected = "4 bytes", .found = "[4, 0]"}},
      {"OffsetsBeyondAnyFile",
       with(Entry("a", "U8", "[4]", "[18446744073709551611,18446744073709551615]")),
       4,
       {.what = "tensor a do not match its shape", .found = "18446744073709551611"}},
      {"OneOffset",
       with(Entry("a", "U8", "[4]", "[4]")),
       4,
       {.what = "data_offsets of tensor a are malformed", .expected = "two numbers"}},
      {"ThreeOffsets",
       with(Entry("a", "U8", "[4]", "[0,4,8]")),
       4,
       {.what = "data_offsets of tensor a are malformed", .expected = "two numbers"}},
      {"TooDeep",
       R"({"a":{"shape":[[[[[[1]]]]]]}})",
       4,
       {.what = "nested too deeply", .expected = "3 levels"}},
  };
}

TEST(SafetensorsHeader, RefusesBadOnes) {
  for (BadHeader& bad : BadHeaders()) {
    SCOPED_TRACE(bad.name);
    bad.refusal.file = "/dir/x.safetensors";
    ExpectRefusal(ParseSafetensorsHeader(bad.header, 8 + bad.header.size() + bad.data_bytes,
                                         "/dir/x.safetensors"),
                  bad.refusal);
  }
}

// The data region must be tiled exactly.
TEST(SafetensorsHeader, RefusesHolesOverlapsAndWrongLengths) {
  const std::string a = Entry("a", "U8", "[4]", "[0,4]");
  const auto parse = [](const std::string& header, uint64_t data_bytes) {
    return ParseSafetensorsHeader(header, 8 + header.size() + data_bytes, "f");
  };
  const auto data_start = [](const std::string& header) { return 8 + header.size(); };

  std::string header = "{" + a + "," + Entry("b", "U8", "[4]", "[6,10]") + "}";
  ExpectRefusal(parse(header, 10), {StatusCode::kData, "f", data_start(header) + 6,
                                    "hole before tensor b", "begin at 4", "6"});
  header = "{" + Entry("b", "U8", "[4]", "[2,6]") + "}";
  ExpectRefusal(parse(header, 6),
                {StatusCode::kData, "f", data_start(header) + 2, "hole before tensor b", "0", "2"});
  header = "{" + a + "," + Entry("b", "U8", "[4]", "[3,7]") + "}";
  ExpectRefusal(parse(header, 7), {StatusCode::kData, "f", data_start(header) + 3,
                                   "tensors a and b overlap", "begin at 4", "3"});
  header = "{" + a + "}";
  ExpectRefusal(parse(header, 3), {StatusCode::kData, "f", data_start(header) + 3, "cut short",
                                   Text("{} bytes", data_start(header) + 4),
                                   Text("{} bytes", data_start(header) + 3)});
  ExpectRefusal(parse(header, 5), {StatusCode::kData, "f", data_start(header) + 4,
                                   "no tensor claims", Text("{} bytes", data_start(header) + 4),
                                   Text("{} bytes", data_start(header) + 5)});
  ExpectRefusal(ParseSafetensorsHeader(header, 5, "f"),
                {StatusCode::kData, "f", 0, "longer than it can be", "file of 5", ""});
}

// A model of DeepSeek's tensor count, with experts of full names.
TEST(SafetensorsHeader, ParsesAHundredAndFiftyThousandTensors) {
  constexpr uint64_t kTensorCount = 150'000;
  std::string header = "{";
  for (uint64_t i = 0; i < kTensorCount; ++i) {
    if (i > 0) header += ",";
    header +=
        Entry(Text("model.layers.{}.mlp.experts.{}.gate_proj.weight_scale", i / 2500, i % 2500),
              "F8_E8M0", "[2048, 128]", Text("[{},{}]", i * 262144, (i + 1) * 262144));
  }
  header += "}";
  const uint64_t anonymous_before = ReadResidentAnonymousBytes();
  const auto start = std::chrono::steady_clock::now();
  const auto tensors =
      ParseSafetensorsHeader(header, 8 + header.size() + kTensorCount * 262144, "f");
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  const uint64_t anonymous_after = ReadResidentAnonymousBytes();
  ASSERT_TRUE(tensors) << tensors.error().ToString();
  EXPECT_EQ(tensors->size(), kTensorCount);
  RecordProperty("milliseconds", static_cast<int>(seconds.count() * 1000));
  RecordProperty("anonymous_kib", static_cast<int>((anonymous_after - anonymous_before) / kKiB));
  // Sanitizers and busy machines cost up to ten times the half second that this takes.
  EXPECT_LT(seconds.count(), 20.0);
}

class CheckpointOpen : public ::testing::Test {
 protected:
  void SetUp() override {
    model_.Add("a", Dtype::kU8, {100});
    model_.Add("b", Dtype::kBf16, {10, 20});
    model_.Add("c", Dtype::kF32, {});
    model_.Add("d", Dtype::kI64, {7});
    uint8_t next = 0;
    for (auto& [name, entry] : model_.tensors) {
      for (std::byte& byte : entry.data) byte = std::byte(next++);
    }
    model_.config_text = "{\"x\": 1}";
  }

  void SetText(const std::string& path, std::string_view text) { env_.SetFile(path, Bytes(text)); }
  std::string TextOf(const std::string& path) {
    const auto bytes = ReadWholeFile(env_, path, kMiB);
    EXPECT_TRUE(bytes) << path;
    return std::string(reinterpret_cast<const char*>(bytes->data()), bytes->size());
  }
  void ReplaceInIndex(const std::string& from, const std::string& to) {
    const std::string path = "/m/model.safetensors.index.json";
    std::string text = TextOf(path);
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos) << text;
    SetText(path, text.replace(at, from.size(), to));
  }
  Result<Checkpoint> Open(const std::string& path = "/m") { return Checkpoint::Open(env_, path); }

  MemEnv env_;
  Model model_;
};

TEST_F(CheckpointOpen, ReadsWhatWasWrittenWhateverTheSharding) {
  for (const uint64_t shard_bytes_max : {uint64_t{0}, uint64_t{1}, uint64_t{470}, kGiB}) {
    const std::string directory = Text("/m{}", shard_bytes_max);
    WriteModel(env_, directory, model_, shard_bytes_max, shard_bytes_max == 470);
    const auto checkpoint = Open(directory);
    ASSERT_TRUE(checkpoint) << checkpoint.error().ToString();
    EXPECT_EQ(checkpoint->files().size(), shard_bytes_max == 1     ? 4u
                                          : shard_bytes_max == 470 ? 2u
                                                                   : 1u);
    EXPECT_EQ(checkpoint->config_text(), model_.config_text);
    const Model again = ReadModel(*checkpoint);
    ASSERT_EQ(again.tensors.size(), model_.tensors.size());
    for (const auto& [name, entry] : model_.tensors) {
      EXPECT_EQ(again.tensors.at(name).data, entry.data) << name;
      EXPECT_EQ(again.tensors.at(name).shape, entry.shape) << name;
    }
    std::vector<std::byte> part(5);
    const Tensor* tensor = checkpoint->Find("b");
    ASSERT_NE(tensor, nullptr);
    ASSERT_TRUE(checkpoint->Read(*tensor, 395, part));
    EXPECT_TRUE(std::equal(part.begin(), part.end(), model_.tensors["b"].data.begin() + 395));
    EXPECT_EQ(checkpoint->Find("bb"), nullptr);
    EXPECT_EQ(checkpoint->Find(""), nullptr);
    checkpoint->DropCache(*tensor);
  }
}

TEST_F(CheckpointOpen, OneFileByItsPath) {
  WriteModel(env_, "/m", model_, 0);
  const auto checkpoint = Open("/m/model.safetensors");
  ASSERT_TRUE(checkpoint) << checkpoint.error().ToString();
  EXPECT_EQ(checkpoint->tensors().size(), 4u);
  EXPECT_EQ(checkpoint->config_text(), model_.config_text);
}

TEST_F(CheckpointOpen, ConfigMayBeAbsent) {
  model_.config_text.clear();
  WriteModel(env_, "/m", model_, 0);
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint);
  EXPECT_EQ(checkpoint->config_text(), "");
}

TEST_F(CheckpointOpen, ShardsAreOpenedOnFirstReadAndOnce) {
  WriteModel(env_, "/m", model_, 1);
  env_.ResetCounts();
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint);
  const std::string b = checkpoint->files()[checkpoint->Find("b")->file];
  const std::string c = checkpoint->files()[checkpoint->Find("c")->file];
  EXPECT_EQ(env_.open_count(b), 1u);  // its header
  EXPECT_LT(env_.read_bytes(b), 300u);
  env_.ResetCounts();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      std::vector<std::byte> data(400);
      for (int n = 0; n < 50; ++n) EXPECT_TRUE(checkpoint->Read(*checkpoint->Find("b"), 0, data));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(env_.open_count(b), 1u);
  EXPECT_EQ(env_.open_count(c), 0u);
}

TEST_F(CheckpointOpen, RefusesAFileThatChangedInBetween) {
  WriteModel(env_, "/m", model_, 0);
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint);
  env_.Truncate("/m/model.safetensors", 600);
  std::vector<std::byte> data(100);
  ExpectRefusal(checkpoint->Read(*checkpoint->Find("a"), 0, data),
                {.file = "/m/model.safetensors", .what = "changed", .found = "600 bytes"});
}

TEST_F(CheckpointOpen, RefusesPathsWithoutACheckpoint) {
  ExpectRefusal(Open("/none"), {.code = StatusCode::kUsage, .file = "/none", .found = "nothing"});
  ASSERT_TRUE(env_.CreateDirectory("/empty"));
  ExpectRefusal(Open("/empty"), {.code = StatusCode::kUsage,
                                 .file = "/empty",
                                 .expected = "model.safetensors.index.json",
                                 .found = "an empty folder"});
  SetText("/two/a.safetensors", RawSafetensors("{}", 0));
  SetText("/two/b.safetensors", RawSafetensors("{}", 0));
  const auto two = Open("/two");
  ExpectRefusal(two, {.code = StatusCode::kUsage, .file = "/two", .found = "a.safetensors and b"});
  EXPECT_NE(two.error().advice().find("name one file"), std::string::npos);
  EXPECT_TRUE(Open("/two/a.safetensors"));
}

TEST_F(CheckpointOpen, RefusesDamagedFiles) {
  const std::string f = "/f/x.safetensors";
  SetText(f, "");
  ExpectRefusal(
      Open("/f"),
      {.file = f, .offset = 0, .what = "empty", .expected = "8 bytes", .found = "0 bytes"});
  SetText(f, "1234567");
  ExpectRefusal(Open("/f"), {.file = f, .offset = 7, .what = "cut short", .found = "7 bytes"});
  SetText(f, RawSafetensors("{}", 0).substr(0, 9));
  ExpectRefusal(
      Open("/f"),
      {.file = f, .offset = 0, .what = "header length", .expected = "1 bytes", .found = "2 bytes"});
  std::string oversized = RawSafetensors("{}", 0);
  oversized.replace(0, 8, std::string("\x01\xe1\xf5\x05\0\0\0\0", 8));  // 100'000'001
  SetText(f, oversized);
  ExpectRefusal(Open("/f"),
                {.file = f, .offset = 0, .what = "header length", .found = "100000001 bytes"});
  oversized.replace(0, 8, 8, '\xff');
  SetText(f, oversized);
  ExpectRefusal(Open("/f"),
                {.file = f, .offset = 0, .what = "header length", .found = "18446744073709551615"});
  SetText(f, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n");
  const auto pointer = Open("/f");
  ExpectRefusal(pointer, {.file = f, .offset = 0, .what = "header length"});
  EXPECT_NE(pointer.error().advice().find("Git LFS"), std::string::npos);

  WriteModel(env_, "/m", model_, 0);
  const auto whole = env_.Stat("/m/model.safetensors")->bytes;
  env_.Truncate("/m/model.safetensors", whole - 1);
  ExpectRefusal(Open(), {.file = "/m/model.safetensors",
                         .offset = whole - 1,
                         .what = "cut short",
                         .expected = Text("{} bytes", whole),
                         .found = Text("{} bytes", whole - 1)});
}

TEST_F(CheckpointOpen, RefusesWhatIsNoFile) {
  WriteModel(env_, "/m", model_, 1);
  ASSERT_TRUE(env_.Remove("/m/model-00002-of-00004.safetensors"));
  ExpectRefusal(Open(), {.file = "/m/model-00002-of-00004.safetensors",
                         .what = "missing",
                         .expected = "a file",
                         .found = "nothing"});
  ASSERT_TRUE(env_.CreateDirectory("/m/model-00002-of-00004.safetensors"));
  ExpectRefusal(Open(), {.file = "/m/model-00002-of-00004.safetensors", .what = "not a regular"});
}

TEST_F(CheckpointOpen, RefusesAnIndexThatDoesNotFitTheShards) {
  const std::string index = "/m/model.safetensors.index.json";
  const std::string first = "/m/model-00001-of-00004.safetensors";
  const std::string second = "/m/model-00002-of-00004.safetensors";
  const auto fresh = [&] {
    for (const auto& [path, content] : env_.Files()) ASSERT_TRUE(env_.Remove(path));
    WriteModel(env_, "/m", model_, 1);
  };
  fresh();
  ReplaceInIndex(R"("a": "model-00001)", R"("a": "model-00002)");
  ReplaceInIndex(R"("b": "model-00002)", R"("b": "model-00001)");
  ExpectRefusal(
      Open(),
      {.file = first, .what = "tensor a is in another shard", .expected = second, .found = first});
  fresh();
  ReplaceInIndex(R"("a": "model-00001)", R"("aa": "model-00001)");
  ExpectRefusal(Open(), {.file = first,
                         .what = "tensor a is in a shard but not in the index",
                         .expected = index,
                         .found = "none"});
  fresh();
  ReplaceInIndex(R"("a": )", R"("Z": "model-00001-of-00004.safetensors", "a": )");
  ExpectRefusal(
      Open(),
      {.file = first, .what = "tensor Z is in the shard index but in no shard", .expected = index});
  fresh();
  ReplaceInIndex(R"("a": )", R"("d": "model-00001-of-00004.safetensors", "a": )");
  ExpectRefusal(Open(), {.file = index, .what = "duplicate key", .expected = "once", .found = "d"});
  fresh();
  SetText(second, RawSafetensors("{" + Entry("a", "U8", "[4]", "[0,4]") + "}", 4));
  ExpectRefusal(
      Open(),
      {.file = second, .what = "tensor a is in two shards", .expected = "once", .found = first});
}

TEST_F(CheckpointOpen, RefusesAMalformedIndex) {
  const std::string index = "/m/model.safetensors.index.json";
  struct Case {
    std::string text;
    std::string what;
    std::string found;
  };
  const std::vector<Case> cases = {
      {"", "not valid JSON", "end"},
      {"{", "not valid JSON", "end"},
      {"[]", "malformed", ""},
      {"7", "malformed", ""},
      {"{}", "no weight_map", ""},
      {R"({"weight_map": 3})", "weight_map of the shard index is malformed", "3"},
      {R"({"weight_map": []})", "weight_map of the shard index is malformed", "array"},
      {R"({"weight_map": {"a": 3}})", "no file name for tensor a", "3"},
      {R"({"weight_map": {"a": {}}})", "no file name for tensor a", "object"},
      {R"({"weight_map": {"a": ["x.safetensors"]}})", "no file name for tensor a", "array"},
      {R"({"weight_map": {}, "weight_map": {}})", "duplicate key", "weight_map"},
      {R"({"weight_map": {"a": "../x.safetensors"}})", "bad shard", "../x"},
      {R"({"weight_map": {"a": "/etc/x.safetensors"}})", "bad shard", "/etc/x"},
      {R"({"weight_map": {"a": "d/x.safetensors"}})", "bad shard", "d/x"},
      {R"({"weight_map": {"a": "d\\x.safetensors"}})", "bad shard", "d"},
      {R"({"weight_map": {"a": "..\u002fx.safetensors"}})", "bad shard", "../x"},
      {R"({"weight_map": {"a": ".safetensors"}})", "bad shard", ".safetensors"},
      {R"({"weight_map": {"a": "x.bin"}})", "bad shard", "x.bin"},
      {R"({"weight_map": {"a": "x\n.safetensors"}})", "bad shard", "x?"},
      {R"({"weight_map": {"a": ""}})", "bad shard", ""},
      {R"({"metadata": )" + std::string(300, '[') + std::string(300, ']') + "}", "too deeply", ""},
  };
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.text);
    SetText(index, bad.text);
    ExpectRefusal(Open(), {.file = index, .what = bad.what, .found = bad.found});
  }
}

TEST_F(CheckpointOpen, IndexMetadataMayBeAnything) {
  WriteModel(env_, "/m", model_, 1);
  ReplaceInIndex(R"("metadata": {)",
                 R"("extra": [1, {"weight_map": {"x": 5}}], "metadata": {"n": [[]], )");
  const auto checkpoint = Open();
  EXPECT_TRUE(checkpoint) << checkpoint.error().ToString();
}

// models--org--name holds blobs, snapshots of links into them, and the name of one snapshot.
TEST(CheckpointPosix, HubCacheFolders) {
  std::string directory = ::testing::TempDir() + "hotplane-hub-XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  Env& env = PosixEnv();
  const Model model = SynthModel({.geometry = {2, 64, 64}, .shard_bytes_max = 0});
  const std::string hub = directory + "/models--org--name";
  std::filesystem::create_directories(hub);
  WriteModel(env, directory + "/plain", model, 10'000);
  WriteModel(env, hub + "/blobs", model, 10'000);
  const auto link_snapshot = [&](const std::string& revision) {
    const std::string snapshot = hub + "/snapshots/" + revision;
    std::filesystem::create_directories(snapshot);
    for (const auto& entry : std::filesystem::directory_iterator(hub + "/blobs")) {
      const auto name = entry.path().filename().string();
      std::filesystem::create_symlink("../../blobs/" + name, snapshot + "/" + name);
    }
  };
  link_snapshot("0a1b");
  std::filesystem::create_directories(directory + "/plain/snapshots/monday");  // somebody's own
  const Digest128 plain = FingerprintOf(env, directory + "/plain");
  EXPECT_EQ(FingerprintOf(env, hub + "/snapshots/0a1b"), plain);
  EXPECT_EQ(FingerprintOf(env, hub), plain);
  link_snapshot("2c3d");
  ExpectRefusal(
      Checkpoint::Open(env, hub),
      {.code = StatusCode::kUsage, .file = hub, .what = "which snapshot", .found = "2 snapshots"});
  std::filesystem::create_directories(hub + "/refs");
  const std::string text = "2c3d\n";
  const auto write_ref = [&](const std::string& content) {
    std::filesystem::remove(hub + "/refs/main");
    const auto file = env.Open(hub + "/refs/main", OpenMode::kCreate);
    ASSERT_TRUE(file);
    ASSERT_TRUE(WriteFully(**file, 0, Bytes(content)));
  };
  write_ref(text);
  EXPECT_EQ(FingerprintOf(env, hub), plain);
  write_ref("../../elsewhere");
  ExpectRefusal(Checkpoint::Open(env, hub), {.file = hub + "/refs/main", .what = "refs/main"});
  // A loop of links, and a link that leads to itself through the index.
  std::filesystem::create_symlink("loop.safetensors", directory + "/loop.safetensors");
  EXPECT_FALSE(Checkpoint::Open(env, directory + "/loop.safetensors"));
  std::filesystem::remove_all(directory);
}

TEST(CheckpointPosix, GgufIsRefusedByName) {
  MemEnv env;
  env.SetFile("/a/model.gguf", Bytes("GGUF and more bytes"));
  ExpectRefusal(Checkpoint::Open(env, "/a"), {.file = "/a/model.gguf", .what = "GGUF"});
  ExpectRefusal(Checkpoint::Open(env, "/a/model.gguf"), {.file = "/a/model.gguf", .what = "GGUF"});
}

TEST(CheckpointPosix, AShardReplacedAfterItWasReadIsNoticed) {
  MemEnv env;
  Model model;
  model.Add("a", Dtype::kU8, {100});
  WriteModel(env, "/m", model, 0);
  const auto checkpoint = Checkpoint::Open(env, "/m");
  ASSERT_TRUE(checkpoint);
  ASSERT_TRUE(checkpoint->CheckUnchanged());
  std::vector<std::byte> data(100);
  ASSERT_TRUE(checkpoint->Read(*checkpoint->Find("a"), 0, data));
  const auto content = env.Files().at("/m/model.safetensors");
  ASSERT_TRUE(env.Remove("/m/model.safetensors"));
  env.SetFile("/m/model.safetensors", content);
  ExpectRefusal(checkpoint->CheckUnchanged(), {.file = "/m/model.safetensors", .what = "changed"});
}

// Files of a hub snapshot are symbolic links into a folder of blobs.
TEST(CheckpointPosix, SymbolicLinksAndPipes) {
  std::string directory = ::testing::TempDir() + "hotplane-checkpoint-XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  Env& env = PosixEnv();
  Model model;
  model.Add("a", Dtype::kU8, {100});
  model.Add("b", Dtype::kU8, {200});
  WriteModel(env, directory + "/blobs", model, 1);
  std::filesystem::create_directory(directory + "/snapshot");
  for (const auto& entry : std::filesystem::directory_iterator(directory + "/blobs")) {
    const auto name = entry.path().filename();
    std::filesystem::create_symlink("../blobs/" + name.string(),
                                    directory + "/snapshot/" + name.string());
  }
  {
    const auto checkpoint = Checkpoint::Open(env, directory + "/snapshot");
    ASSERT_TRUE(checkpoint) << checkpoint.error().ToString();
    EXPECT_EQ(ReadModel(*checkpoint).tensors.size(), 2u);
  }
  const std::string shard = directory + "/blobs/model-00002-of-00002.safetensors";
  std::filesystem::remove(shard);
  const std::string link = directory + "/snapshot/model-00002-of-00002.safetensors";
  ExpectRefusal(Checkpoint::Open(env, directory + "/snapshot"),
                {.file = link, .what = "missing", .found = "leads nowhere"});
  ASSERT_EQ(mkfifo(shard.c_str(), 0600), 0);
  ExpectRefusal(Checkpoint::Open(env, directory + "/snapshot"),
                {.file = link, .what = "not a regular file"});
  std::filesystem::remove_all(directory);
}

TEST(PrintableText, HidesControlCharactersAndCuts) {
  EXPECT_EQ(PrintableText("a\x1b[2J\n\xff"), "a?[2J??");
  EXPECT_EQ(PrintableText("abcdef", 3), "abc...");
  EXPECT_FALSE(IsPrintableName("a\tb"));
  EXPECT_TRUE(IsPrintableName("layers.0.\xc3\xa9"));
}

}  // namespace
}  // namespace hotplane
