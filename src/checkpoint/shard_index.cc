#include "checkpoint/shard_index.h"

#include <algorithm>
#include <map>
#include <unordered_set>
#include <utility>

#include "base/format_text.h"
#include "checkpoint/json_scan.h"

namespace hotplane {
namespace {

constexpr std::string_view kSuffix = ".safetensors";

// A name that could leave the folder, or that a terminal or shell would read as something else, is
// not a shard.
bool IsPlainShardName(std::string_view name) {
  return name.size() > kSuffix.size() && name.size() <= 255 && name.ends_with(kSuffix) &&
         name.front() != '.' && name.find_first_of("/\\") == std::string_view::npos &&
         IsPrintableName(name);
}

// Only "weight_map" at depth 1 is read; everything else may be anything.
class IndexVisitor : public JsonVisitor {
 public:
  bool weight_map_seen() const { return weight_map_seen_; }

  // Shards numbered by sorted name.
  ShardIndex TakeIndex() {
    ShardIndex index;
    std::vector<uint32_t> number_of(shard_numbers_.size());
    for (const auto& [name, number] : shard_numbers_) {
      number_of[number] = static_cast<uint32_t>(index.shards.size());
      index.shards.push_back(name);
    }
    for (ShardIndexEntry& entry : entries_) entry.shard = number_of[entry.shard];
    index.entries = std::move(entries_);
    return index;
  }

  Result<void> BeginObject() override {
    if (depth_ == 1 && in_weight_map_) weight_map_seen_ = true;
    if (depth_ == 2 && in_weight_map_) return NotAString("an object");
    ++depth_;
    return {};
  }
  Result<void> EndObject() override {
    --depth_;
    return {};
  }
  Result<void> BeginArray() override {
    if (depth_ == 0) return NotAnObject();
    if (depth_ == 2 && in_weight_map_) return NotAString("an array");
    if (depth_ == 1 && in_weight_map_) return NotAMap("an array");
    ++depth_;
    return {};
  }
  Result<void> EndArray() override { return EndObject(); }

  Result<void> Key(std::string_view key) override {
    if (depth_ == 1) {
      in_weight_map_ = key == "weight_map";
      if (fields_.emplace(key).second) return {};
      return Fail(Status::Data("the shard index has a duplicate key").Found(PrintableText(key)));
    }
    if (depth_ == 2 && in_weight_map_) tensor_ = key;
    return {};
  }

  Result<void> Scalar(const JsonScalar& scalar) override {
    if (depth_ == 0) return NotAnObject();
    if (!in_weight_map_ || depth_ > 2) return {};
    if (depth_ == 1) return NotAMap(JsonScalarText(scalar));
    if (scalar.kind != JsonScalar::Kind::kString) return NotAString(JsonScalarText(scalar));
    if (!IsPlainShardName(scalar.text)) {
      return Fail(Status::Data(Text("the shard index names a bad shard for tensor {}", Tensor()))
                      .Expected("the plain name of a .safetensors file in the same folder")
                      .Found(Text("\"{}\"", PrintableText(scalar.text))));
    }
    const auto number = static_cast<uint32_t>(shard_numbers_.size());
    const auto [shard, inserted] = shard_numbers_.emplace(scalar.text, number);
    entries_.push_back({tensor_, shard->second});
    return {};
  }

 private:
  std::string Tensor() const { return PrintableText(tensor_); }
  Result<void> NotAnObject() const {
    return Fail(Status::Data("the shard index is malformed").Expected("a JSON object"));
  }
  Result<void> NotAMap(const std::string& found) const {
    return Fail(Status::Data("the weight_map of the shard index is malformed")
                    .Expected("an object of file names by tensor")
                    .Found(found));
  }
  Result<void> NotAString(const std::string& found) const {
    return Fail(Status::Data(Text("the shard index has no file name for tensor {}", Tensor()))
                    .Expected("a file name")
                    .Found(found));
  }

  uint32_t depth_ = 0;
  bool in_weight_map_ = false;
  bool weight_map_seen_ = false;
  std::unordered_set<std::string> fields_;
  std::string tensor_;
  std::map<std::string, uint32_t, std::less<>> shard_numbers_;
  std::vector<ShardIndexEntry> entries_;
};

}  // namespace

Result<ShardIndex> ParseShardIndex(std::string_view text, const std::string& file) {
  IndexVisitor visitor;
  HP_TRY(ScanJson(text, {.what = "the shard index", .file = file}, visitor));
  if (!visitor.weight_map_seen()) {
    return Fail(Status::Data("the shard index has no weight_map")
                    .File(file)
                    .Expected("\"weight_map\": {tensor: file, ...}"));
  }
  ShardIndex index = visitor.TakeIndex();
  std::sort(index.entries.begin(), index.entries.end(),
            [](const ShardIndexEntry& a, const ShardIndexEntry& b) { return a.tensor < b.tensor; });
  const auto twin = std::adjacent_find(
      index.entries.begin(), index.entries.end(),
      [](const ShardIndexEntry& a, const ShardIndexEntry& b) { return a.tensor == b.tensor; });
  if (twin != index.entries.end()) {
    return Fail(Status::Data("the shard index has a duplicate key")
                    .File(file)
                    .Expected("every tensor name once")
                    .Found(PrintableText(twin->tensor)));
  }
  return index;
}

}  // namespace hotplane
