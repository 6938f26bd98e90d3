#include "base/status.h"

#include <cerrno>
#include <csignal>
#include <cstring>

#include "base/format_text.h"

namespace hotplane {

std::string_view StatusCodeName(StatusCode code) {
  switch (code) {
    case StatusCode::kSystem: return "system";
    case StatusCode::kUsage: return "usage";
    case StatusCode::kData: return "data";
    case StatusCode::kCapacity: return "capacity";
    case StatusCode::kInterrupted: return "interrupted";
    case StatusCode::kTerminated: return "terminated";
    case StatusCode::kInvalid: break;
  }
  return "invalid";
}

Status Status::Interrupted(int signal) {
  return signal == SIGTERM ? Status(StatusCode::kTerminated, "terminated by SIGTERM")
                           : Status(StatusCode::kInterrupted, "interrupted by SIGINT");
}

Status Status::FromErrno(int error, std::string what) {
  const bool no_room = error == ENOSPC || error == EDQUOT || error == ENOMEM;
  Status status(no_room ? StatusCode::kCapacity : StatusCode::kSystem, std::move(what));
  status.error_number_ = error;
  status.found_ = std::strerror(error);
  return status;
}

Status&& Status::File(std::string path) && {
  file_ = std::move(path);
  return std::move(*this);
}
Status&& Status::At(uint64_t offset_bytes) && {
  offset_ = offset_bytes;
  return std::move(*this);
}
Status&& Status::Expected(std::string text) && {
  expected_ = std::move(text);
  return std::move(*this);
}
Status&& Status::Found(std::string text) && {
  found_ = std::move(text);
  return std::move(*this);
}
Status&& Status::Advice(std::string text) && {
  advice_ = std::move(text);
  return std::move(*this);
}
Status&& Status::Choices(std::vector<std::string> choices) && {
  choices_ = std::move(choices);
  return std::move(*this);
}
Status&& Status::Because(std::string_view context) && {
  what_ = Text("{}: {}", context, what_);
  return std::move(*this);
}

std::string Printable(std::string_view text) {
  std::string printable;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool c1 = byte == 0xc2 && i + 1 < text.size() &&
                    static_cast<unsigned char>(text[i + 1]) >= 0x80 &&
                    static_cast<unsigned char>(text[i + 1]) < 0xa0;
    if (byte >= 0x20 && byte != 0x7f && !c1) {
      printable += text[i];
      continue;
    }
    printable += Text("\\x{:02x}", byte);
    if (c1) printable += Text("\\x{:02x}", static_cast<unsigned char>(text[++i]));
  }
  return printable;
}

std::string PrintableLines(std::string_view text) {
  std::string printable;
  for (size_t at = 0;; printable += '\n') {
    const size_t end = text.find('\n', at);
    printable += Printable(text.substr(at, end - at));
    if (end == std::string_view::npos) return printable;
    at = end + 1;
  }
}

std::string Status::ToLine() const {
  std::string text = what_;
  auto add = [&text](std::string_view name, std::string_view value) {
    if (!value.empty()) text += Text("; {} {}", name, value);
  };
  add("file", file_);
  if (offset_) add("offset", Text("{}", *offset_));
  add("expected", expected_);
  add("found", found_);
  add("to fix:", advice_);
  return Printable(text);
}

std::string Status::ToString() const {
  std::string text = Printable(what_);
  auto line = [&text](std::string_view name, std::string_view value) {
    if (!value.empty()) text += Text("\n  {:<9} {}", name, Printable(value));
  };
  line("file", file_);
  if (offset_) line("offset", Text("{}", *offset_));
  line("expected", expected_);
  line("found", found_);
  line("to fix", advice_);
  for (const std::string& choice : choices_) line("", choice);
  return text;
}

}  // namespace hotplane
