#include <algorithm>
#include <array>
#include <limits>
#include <unordered_set>
#include <utility>

#include "base/format_text.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/json_scan.h"

namespace hotplane {
namespace {

// Bounds that no real file comes near; what lies beyond them is malformed or hostile.
constexpr size_t kNameBytesMax = 1024;
constexpr size_t kRankMax = 16;
constexpr uint64_t kDataBytesMax = uint64_t{1} << 60;

constexpr std::array<std::string_view, 4> kSubByteDtypes = {"F4", "F4_E2M1", "F6_E2M3", "F6_E3M2"};

Status DtypeStatus(const std::string& tensor, std::string_view dtype) {
  const bool sub_byte =
      std::find(kSubByteDtypes.begin(), kSubByteDtypes.end(), dtype) != kSubByteDtypes.end();
  return Status::Data(
             Text("tensor {} has {} dtype", tensor,
                  sub_byte ? "a sub-byte dtype, which is not supported as a" : "an unknown"))
      .Expected("BOOL, an integer, F16, BF16, F32, F64, F8_E4M3, F8_E5M2 or F8_E8M0")
      .Found(PrintableText(dtype, 40));
}

// {"name": {"dtype": "...", "shape": [...], "data_offsets": [begin, end]}, ...} with an optional
// "__metadata__": {"key": "text"}. Offsets stay relative to the data region.
class HeaderVisitor : public JsonVisitor {
 public:
  std::vector<Tensor> TakeTensors() { return std::move(tensors_); }

  Result<void> BeginObject() override {
    if (place_ == Place::kStart) return Enter(Place::kTop);
    if (place_ == Place::kTop && key_ == kMetadataKey) return Enter(Place::kMetadata);
    if (place_ != Place::kTop) return Unexpected("an object");
    tensor_ = Tensor{};
    tensor_.name = key_;
    seen_fields_ = 0;
    return Enter(Place::kEntry);
  }

  Result<void> Key(std::string_view key) override {
    switch (place_) {
      case Place::kTop: return TopKey(key);
      case Place::kEntry: return EntryKey(key);
      default:
        if (metadata_keys_.emplace(key).second) return {};
        return Fail(Status::Data("the __metadata__ of the safetensors header has a duplicate key")
                        .Found(PrintableText(key)));
    }
  }

  Result<void> EndObject() override {
    if (place_ == Place::kEntry) HP_TRY(FinishEntry());
    return Enter(place_ == Place::kTop ? Place::kEnd : Place::kTop);
  }

  Result<void> BeginArray() override {
    if (place_ == Place::kEntry && field_ == kShape) return Enter(Place::kShapeArray);
    if (place_ == Place::kEntry && field_ == kOffsets) return Enter(Place::kOffsetArray);
    return Unexpected("an array");
  }

  Result<void> EndArray() override {
    if (place_ == Place::kOffsetArray && offset_count_ != 2) return OffsetCount();
    return Enter(Place::kEntry);
  }

  Result<void> Scalar(const JsonScalar& scalar) override {
    const bool is_unsigned = scalar.kind == JsonScalar::Kind::kUnsigned;
    const bool is_string = scalar.kind == JsonScalar::Kind::kString;
    if (place_ == Place::kMetadata && is_string) return {};
    if (place_ == Place::kEntry && field_ == kDtype && is_string) {
      const std::optional<Dtype> dtype = ParseDtype(scalar.text);
      if (!dtype) return Fail(DtypeStatus(tensor_.name, scalar.text));
      tensor_.dtype = *dtype;
      return {};
    }
    if (place_ == Place::kShapeArray && is_unsigned) {
      if (tensor_.shape.size() == kRankMax) {
        return Fail(Status::Data(Text("tensor {} has too many dimensions", tensor_.name))
                        .Expected(Text("at most {}", kRankMax)));
      }
      tensor_.shape.push_back(scalar.unsigned_value);
      return {};
    }
    if (place_ == Place::kOffsetArray && is_unsigned) {
      if (offset_count_ == 2) return OffsetCount();
      offsets_[offset_count_++] = scalar.unsigned_value;
      return {};
    }
    return Unexpected(JsonScalarText(scalar));
  }

 private:
  enum class Place : uint8_t {
    kStart,
    kTop,
    kEntry,
    kShapeArray,
    kOffsetArray,
    kMetadata,
    kEnd,
  };
  static constexpr std::string_view kMetadataKey = "__metadata__";
  static constexpr unsigned kDtype = 1, kShape = 2, kOffsets = 4;
  static constexpr std::array kFieldNames = {
      std::pair<unsigned, std::string_view>{kDtype, "dtype"},
      std::pair<unsigned, std::string_view>{kShape, "shape"},
      std::pair<unsigned, std::string_view>{kOffsets, "data_offsets"},
  };

  Result<void> Enter(Place place) {
    place_ = place;
    return {};
  }

  Result<void> TopKey(std::string_view key) {
    if (key.empty() || key.size() > kNameBytesMax || !IsPrintableName(key)) {
      return Fail(Status::Data("the safetensors header has a malformed tensor name")
                      .Expected(Text("1 to {} bytes without control characters", kNameBytesMax))
                      .Found(Text("\"{}\" ({} bytes)", PrintableText(key, 100), key.size())));
    }
    if (key == kMetadataKey) {
      if (metadata_seen_) {
        return Fail(Status::Data("the safetensors header has a duplicate key")
                        .Expected("every key once")
                        .Found(std::string(key)));
      }
      metadata_seen_ = true;
    }
    key_ = key;
    return {};
  }

  Result<void> EntryKey(std::string_view key) {
    unsigned field = 0;
    for (const auto& [known, name] : kFieldNames) {
      if (key == name) field = known;
    }
    if (field == 0 || (seen_fields_ & field) != 0) {
      return Fail(Status::Data(Text("the header entry of tensor {} has {} field", tensor_.name,
                                    field == 0 ? "an unknown" : "a duplicate"))
                      .Expected("dtype, shape and data_offsets, each once")
                      .Found(PrintableText(key)));
    }
    seen_fields_ |= field;
    field_ = field;
    offset_count_ = field == kOffsets ? 0 : offset_count_;
    return {};
  }

  Result<void> FinishEntry() {
    for (const auto& [field, name] : kFieldNames) {
      if ((seen_fields_ & field) != 0) continue;
      return Fail(Status::Data(Text("the header entry of tensor {} is incomplete", tensor_.name))
                      .Expected("dtype, shape and data_offsets")
                      .Found(Text("no {}", name)));
    }
    uint64_t bytes = DtypeBytes(tensor_.dtype);
    bool overflow = false;
    for (const uint64_t dimension : tensor_.shape) {
      overflow |= __builtin_mul_overflow(bytes, dimension, &bytes);
    }
    const auto [begin, end] = offsets_;
    if (overflow || begin > end || end > kDataBytesMax || end - begin != bytes) {
      return Fail(
          Status::Data(Text("data_offsets of tensor {} do not match its shape", tensor_.name))
              .Expected(overflow ? Text("a size of {} {} that can be represented",
                                        DtypeName(tensor_.dtype), ShapeText(tensor_.shape))
                                 : Text("{} bytes for {} {}", bytes, DtypeName(tensor_.dtype),
                                        ShapeText(tensor_.shape)))
              .Found(Text("[{}, {}]", begin, end)));
    }
    tensor_.offset = begin;
    tensor_.bytes = bytes;
    tensors_.push_back(std::move(tensor_));
    return {};
  }

  Result<void> OffsetCount() const {
    return Fail(Status::Data(Text("data_offsets of tensor {} are malformed", tensor_.name))
                    .Expected("two numbers, [begin, end]"));
  }

  Result<void> Unexpected(const std::string& found) const {
    switch (place_) {
      case Place::kStart:
        return Fail(Status::Data("the safetensors header is malformed")
                        .Expected("one JSON object")
                        .Found(found));
      case Place::kMetadata:
        return Fail(Status::Data("the __metadata__ of the safetensors header is malformed")
                        .Expected("an object of strings")
                        .Found(found));
      case Place::kTop:
        return Fail(Status::Data(Text("the header entry {} is malformed", key_))
                        .Expected(key_ == kMetadataKey
                                      ? "an object of strings"
                                      : "an object with dtype, shape and data_offsets")
                        .Found(found));
      default:
        return Fail(
            Status::Data(Text("the header entry of tensor {} is malformed", tensor_.name))
                .Expected("a dtype string, a shape of unsigned integers and two data_offsets")
                .Found(found));
    }
  }

  Place place_ = Place::kStart;
  std::string key_;
  unsigned field_ = 0;
  unsigned seen_fields_ = 0;
  Tensor tensor_;
  std::array<uint64_t, 2> offsets_{};
  size_t offset_count_ = 0;
  bool metadata_seen_ = false;
  std::unordered_set<std::string> metadata_keys_;
  std::vector<Tensor> tensors_;
};

// Where a name stands in the header, for messages.
Status&& AtName(Status&& status, std::string_view header, const std::string& name) {
  const size_t position = header.rfind('"' + name + '"');
  if (position == std::string_view::npos) return std::move(status);
  return std::move(status).At(8 + position);
}

Result<void> CheckUniqueNames(std::span<const Tensor> tensors, std::string_view header,
                              const std::string& file) {
  std::vector<const Tensor*> by_name;
  by_name.reserve(tensors.size());
  for (const Tensor& tensor : tensors) by_name.push_back(&tensor);
  std::sort(by_name.begin(), by_name.end(),
            [](const Tensor* a, const Tensor* b) { return a->name < b->name; });
  const auto twin =
      std::adjacent_find(by_name.begin(), by_name.end(),
                         [](const Tensor* a, const Tensor* b) { return a->name == b->name; });
  if (twin == by_name.end()) return {};
  Status status = Status::Data("the safetensors header has a duplicate key")
                      .File(file)
                      .Expected("every tensor name once")
                      .Found((*twin)->name);
  return Fail(AtName(std::move(status), header, (*twin)->name));
}

// The data region must be tiled by the tensors: no hole, no overlap, nothing left over. `tensors`
// are in data order; offsets are relative to the data region.
Result<void> CheckTiling(std::span<const Tensor> tensors, uint64_t data_start, uint64_t file_bytes,
                         const std::string& file) {
  uint64_t end = 0;
  const Tensor* before = nullptr;
  for (const Tensor& tensor : tensors) {
    if (tensor.offset != end) {
      const bool overlap = tensor.offset < end;
      return Fail(Status::Data(overlap
                                   ? Text("tensors {} and {} overlap", before->name, tensor.name)
                                   : Text("there is a hole before tensor {}", tensor.name))
                      .File(file)
                      .At(data_start + tensor.offset)
                      .Expected(Text("data of {} to begin at {}", tensor.name, end))
                      .Found(Text("{}", tensor.offset)));
    }
    end = tensor.offset + tensor.bytes;
    before = &tensor;
  }
  if (data_start + end == file_bytes) return {};
  const bool cut_short = data_start + end > file_bytes;
  return Fail(Status::Data(cut_short ? "the safetensors file is cut short"
                                     : "the safetensors file has bytes that no tensor claims")
                  .File(file)
                  .At(std::min(file_bytes, data_start + end))
                  .Expected(Text("{} bytes", data_start + end))
                  .Found(Text("{} bytes", file_bytes))
                  .Advice("copy or download this file again"));
}

}  // namespace

std::string ShapeText(std::span<const uint64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    text += Text("{}", shape[i]);
  }
  return text + "]";
}

Result<std::vector<Tensor>> ParseSafetensorsHeader(std::string_view header, uint64_t file_bytes,
                                                   const std::string& file) {
  if (header.size() > kSafetensorsHeaderBytesMax || file_bytes < 8 + header.size()) {
    return Fail(Status::Data("the safetensors header is longer than it can be")
                    .File(file)
                    .At(0)
                    .Expected(Text("at most {} bytes, inside the file of {}",
                                   kSafetensorsHeaderBytesMax, file_bytes))
                    .Found(Text("{} bytes", header.size())));
  }
  if (header.empty() || header.front() != '{') {
    return Fail(Status::Data("the safetensors header is malformed")
                    .File(file)
                    .At(8)
                    .Expected("a JSON object that begins with {")
                    .Found(Text("\"{}\"", PrintableText(header, 16))));
  }
  // The deepest real nesting: an array in a tensor's entry in the header.
  const JsonSource source = {
      .what = "the safetensors header", .file = file, .offset = 8, .depth_max = 3};
  HeaderVisitor visitor;
  HP_TRY(ScanJson(header, source, visitor));
  std::vector<Tensor> tensors = visitor.TakeTensors();
  HP_TRY(CheckUniqueNames(tensors, header, file));

  std::sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  const uint64_t data_start = 8 + header.size();
  HP_TRY(CheckTiling(tensors, data_start, file_bytes, file));
  for (Tensor& tensor : tensors) tensor.offset += data_start;
  return tensors;
}

}  // namespace hotplane
