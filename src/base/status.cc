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
Status&& Status::Because(std::string_view context) && {
  what_ = Text("{}: {}", context, what_);
  return std::move(*this);
}

std::string Status::ToString() const {
  std::string text = what_;
  auto line = [&text](std::string_view name, std::string_view value) {
    if (!value.empty()) text += Text("\n  {:<9} {}", name, value);
  };
  line("file", file_);
  if (offset_) line("offset", Text("{}", *offset_));
  line("expected", expected_);
  line("found", found_);
  line("to fix", advice_);
  return text;
}

}  // namespace hotplane
