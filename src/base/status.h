// Status: what went wrong, told so that the person at the terminal can act on it.
//
// A Status never travels as an exception. Functions that can fail return Result<T>; input from
// outside (files, arguments, the system) always ends in a Status, never in an assertion.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tl/expected.hpp>
#include <utility>
#include <vector>

namespace hotplane {

// The value is the exit code of the command line.
enum class StatusCode : uint8_t {
  kInvalid = 0,
  kSystem = 1,         // the system failed us: I/O, permission, device
  kUsage = 2,          // wrong usage, or ambiguous
  kData = 3,           // data is corrupt, malformed or does not match
  kCapacity = 4,       // does not fit: memory, space
  kInterrupted = 130,  // SIGINT
  kTerminated = 143,   // SIGTERM
};

// "system", "usage", "data", "capacity", "interrupted", "terminated".
std::string_view StatusCodeName(StatusCode code);

// Immutable after construction apart from the builder calls below; cheap to move, copyable.
class [[nodiscard]] Status {
 public:
  // `what` is one sentence without a full stop: what was being done and how it failed.
  static Status System(std::string what) { return {StatusCode::kSystem, std::move(what)}; }
  static Status Usage(std::string what) { return {StatusCode::kUsage, std::move(what)}; }
  static Status Data(std::string what) { return {StatusCode::kData, std::move(what)}; }
  static Status Capacity(std::string what) { return {StatusCode::kCapacity, std::move(what)}; }
  // `signal` is SIGINT or SIGTERM.
  static Status Interrupted(int signal);
  // kSystem (ENOSPC, EDQUOT, ENOMEM: kCapacity) with the errno's text as `found`.
  static Status FromErrno(int error, std::string what);

  // Builder calls; each returns *this so that they chain on a temporary.
  Status&& File(std::string path) &&;
  Status&& At(uint64_t offset_bytes) &&;
  Status&& Expected(std::string text) &&;
  Status&& Found(std::string text) &&;
  Status&& Advice(std::string text) &&;
  // What could be meant, each a line of its own.
  Status&& Choices(std::vector<std::string> choices) &&;
  // Prepends context: "booting layer 3: <what>".
  Status&& Because(std::string_view context) &&;

  StatusCode code() const { return code_; }
  int exit_code() const { return static_cast<int>(code_); }
  int error_number() const { return error_number_; }  // errno, or 0
  const std::string& what() const { return what_; }
  const std::string& file() const { return file_; }
  std::optional<uint64_t> offset() const { return offset_; }
  const std::string& expected() const { return expected_; }
  const std::string& found() const { return found_; }
  const std::string& advice() const { return advice_; }
  const std::vector<std::string>& choices() const { return choices_; }

  // One line: the sentence, then the fields that are set, without the choices.
  std::string ToLine() const;
  // Several lines: the sentence, then one indented "name  value" line for each field that is set,
  // and at last the choices.
  std::string ToString() const;

 private:
  Status(StatusCode code, std::string what) : code_(code), what_(std::move(what)) {}

  StatusCode code_;
  int error_number_ = 0;
  std::string what_;
  std::string file_;
  std::optional<uint64_t> offset_;
  std::string expected_;
  std::string found_;
  std::string advice_;
  std::vector<std::string> choices_;
};

template <typename T>
using Result = tl::expected<T, Status>;

inline tl::unexpected<Status> Fail(Status status) {
  return tl::unexpected<Status>(std::move(status));
}

// Names and paths come from outside: control characters in them, C1 in UTF-8 included, would steer
// the terminal that shows them. They become \xNN.
std::string Printable(std::string_view text);
// The same of text of several lines, which stay.
std::string PrintableLines(std::string_view text);

}  // namespace hotplane

#define HP_CONCAT_INNER_(a, b) a##b
#define HP_CONCAT_(a, b) HP_CONCAT_INNER_(a, b)

// HP_TRY(expr): returns the Status of a failed Result from the enclosing function.
#define HP_TRY(expr) HP_TRY_IMPL_(HP_CONCAT_(hp_result_, __COUNTER__), expr)
#define HP_TRY_IMPL_(result, expr)                                   \
  do {                                                               \
    auto result = (expr);                                            \
    if (!result) return ::hotplane::Fail(std::move(result).error()); \
  } while (false)

// HP_ASSIGN(auto x, expr): x takes the value, or the enclosing function returns the Status.
#define HP_ASSIGN(declaration, expr) \
  HP_ASSIGN_IMPL_(HP_CONCAT_(hp_result_, __COUNTER__), declaration, expr)
#define HP_ASSIGN_IMPL_(result, declaration, expr)                 \
  auto result = (expr);                                            \
  if (!result) return ::hotplane::Fail(std::move(result).error()); \
  declaration = *std::move(result)
