#include "checkpoint/json_scan.h"

#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/format_text.h"

namespace hotplane {
namespace {

// Walks the text and tells, through `seen`, how far the parser has come; the parser itself reports
// positions only for its own errors.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** seen) : at_(at), seen_(seen) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    *seen_ = ++at_;
    return *this;
  }
  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** seen_;
};

// "[json.exception.parse_error.101] parse error at line 1, column 5: syntax error ..." -> "syntax
// error ...".
std::string ParserMessage(std::string_view message) {
  const size_t start = message.find(": ");
  if (start != std::string_view::npos) message.remove_prefix(start + 2);
  return PrintableText(message);
}

// The event interface of the parser, handed on to a JsonVisitor. Member names are the parser's.
class Adapter {
 public:
  Adapter(JsonVisitor& visitor, const JsonSource& source) : visitor_(visitor), source_(source) {}

  bool null() { return Emit({.kind = JsonScalar::Kind::kNull}); }
  bool boolean(bool value) {
    return Emit({.kind = JsonScalar::Kind::kBool, .unsigned_value = value ? 1u : 0u});
  }
  bool number_integer(int64_t value) {
    return Emit({.kind = JsonScalar::Kind::kNumber, .number = static_cast<double>(value)});
  }
  bool number_unsigned(uint64_t value) {
    return Emit({.kind = JsonScalar::Kind::kUnsigned,
                 .unsigned_value = value,
                 .number = static_cast<double>(value)});
  }
  bool number_float(double value, const std::string&) {
    return Emit({.kind = JsonScalar::Kind::kNumber, .number = value});
  }
  bool string(const std::string& value) {
    return Emit({.kind = JsonScalar::Kind::kString, .text = value});
  }
  bool binary(const nlohmann::json::binary_t&) { return false; }
  bool start_object(size_t) { return Enter() && Keep(visitor_.BeginObject()); }
  bool key(const std::string& name) { return Keep(visitor_.Key(name)); }
  bool end_object() { return Leave() && Keep(visitor_.EndObject()); }
  bool start_array(size_t) { return Enter() && Keep(visitor_.BeginArray()); }
  bool end_array() { return Leave() && Keep(visitor_.EndArray()); }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception& error) {
    const uint64_t at = position > 0 ? position - 1 : 0;
    error_ = Status::Data(Text("{} is not valid JSON", source_.what))
                 .At(source_.offset + at)
                 .Found(ParserMessage(error.what()));
    return false;
  }

  std::optional<Status> TakeError() { return std::move(error_); }

 private:
  bool Emit(const JsonScalar& scalar) { return Keep(visitor_.Scalar(scalar)); }
  bool Keep(Result<void> result) {
    if (result) return true;
    error_ = std::move(result).error();
    return false;
  }
  bool Enter() {
    if (++depth_ <= source_.depth_max) return true;
    error_ = Status::Data(Text("{} is nested too deeply", source_.what))
                 .Expected(Text("at most {} levels", source_.depth_max));
    return false;
  }
  bool Leave() {
    --depth_;
    return true;
  }

  JsonVisitor& visitor_;
  const JsonSource& source_;
  uint32_t depth_ = 0;
  std::optional<Status> error_;
};

}  // namespace

std::string JsonScalarText(const JsonScalar& scalar) {
  switch (scalar.kind) {
    case JsonScalar::Kind::kNull: return "null";
    case JsonScalar::Kind::kBool: return scalar.unsigned_value != 0 ? "true" : "false";
    case JsonScalar::Kind::kUnsigned: return Text("{}", scalar.unsigned_value);
    case JsonScalar::Kind::kNumber: return Text("{}", scalar.number);
    case JsonScalar::Kind::kString: return Text("\"{}\"", PrintableText(scalar.text, 100));
    case JsonScalar::Kind::kInvalid: break;
  }
  return "nothing";
}

Result<void> ScanJson(std::string_view text, const JsonSource& source, JsonVisitor& visitor) {
  const char* seen = text.data();
  Adapter adapter(visitor, source);
  const bool done =
      nlohmann::json::sax_parse(CountingIterator(text.data(), &seen),
                                CountingIterator(text.data() + text.size(), &seen), &adapter);
  if (done) return {};
  Status error =
      adapter.TakeError().value_or(Status::Data(Text("{} is not valid JSON", source.what)));
  const uint64_t at =
      error.offset().value_or(source.offset + static_cast<uint64_t>(seen - text.data()));
  return Fail(std::move(error).File(std::string(source.file)).At(at));
}

std::string PrintableText(std::string_view text, size_t length_max) {
  const bool cut = text.size() > length_max;
  std::string printable(cut ? text.substr(0, length_max) : text);
  for (char& c : printable) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return cut ? printable + "..." : printable;
}

bool IsPrintableName(std::string_view name) {
  for (const char c : name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return false;
  }
  return true;
}

}  // namespace hotplane
