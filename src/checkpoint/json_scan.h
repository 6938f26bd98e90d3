// JSON from outside, read as a stream of events: no document is built, depth is bounded, nothing
// throws, and the visitor sees every key, so that it can refuse duplicates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace hotplane {

struct JsonScalar {
  enum class Kind : uint8_t { kInvalid = 0, kNull, kBool, kUnsigned, kNumber, kString };
  Kind kind = Kind::kInvalid;
  uint64_t unsigned_value = 0;  // of kUnsigned; of kBool 0 or 1
  double number = 0;            // of kUnsigned and kNumber (negative or fractional)
  std::string_view text{};      // of kString; valid during the call
};
// For messages: "7", "null", "\"BF16\"".
std::string JsonScalarText(const JsonScalar& scalar);

// A Status that a visitor returns ends the scan; ScanJson adds file and offset to it.
class JsonVisitor {
 public:
  virtual ~JsonVisitor() = default;
  virtual Result<void> BeginObject() = 0;
  virtual Result<void> Key(std::string_view key) = 0;
  virtual Result<void> EndObject() = 0;
  virtual Result<void> BeginArray() = 0;
  virtual Result<void> EndArray() = 0;
  virtual Result<void> Scalar(const JsonScalar& scalar) = 0;
};

struct JsonSource {
  std::string_view what;     // "the safetensors header"
  std::string_view file;     // path
  uint64_t offset = 0;       // of the text in that file
  uint32_t depth_max = 256;  // of nested objects and arrays
};

// kData with file, offset and found when the text is not exactly one JSON value (UTF-8, no
// trailing characters but white space).
Result<void> ScanJson(std::string_view text, const JsonSource& source, JsonVisitor& visitor);

// Text from outside made fit for a message: control characters and non-ASCII bytes become '?', and
// what is longer than `length_max` is cut with "...".
std::string PrintableText(std::string_view text, size_t length_max = 200);

// False when there is a control character in it. Names that pass can be printed and separated by
// white space control characters without ambiguity.
bool IsPrintableName(std::string_view name);

}  // namespace hotplane
