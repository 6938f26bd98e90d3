// Examples that stand in the documents under docs/format/ and are made by the tests, so that they
// cannot rot.
#pragma once

#include <cstddef>
#include <fstream>
#include <span>
#include <sstream>
#include <string>

#include "base/format_text.h"

namespace hotplane {

// The fenced block that follows the line "<!-- made by NAME -->" in a document of this project; ""
// when there is none. `path` is relative to the source tree.
inline std::string DocumentBlock(const std::string& path, const std::string& name) {
  std::ifstream file(std::string(HOTPLANE_SOURCE_DIR) + "/" + path);
  std::stringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  const size_t marker = text.find("<!-- made by " + name + " -->");
  if (marker == std::string::npos) return "";
  const size_t fence = text.find("```", marker);
  if (fence == std::string::npos) return "";
  const size_t begin = text.find('\n', fence) + 1;
  return text.substr(begin, text.find("```", begin) - begin);
}

// As `hexdump -C` prints it: lines equal to the one before are shown as "*".
inline std::string HexDump(std::span<const std::byte> bytes) {
  constexpr size_t kLineBytes = 16;
  std::string text;
  bool starred = false;
  for (size_t at = 0; at < bytes.size(); at += kLineBytes) {
    const auto line = bytes.subspan(at, std::min(kLineBytes, bytes.size() - at));
    if (at > 0 && line.size() == kLineBytes &&
        std::ranges::equal(line, bytes.subspan(at - kLineBytes, kLineBytes))) {
      if (!starred) text += "*\n";
      starred = true;
      continue;
    }
    starred = false;
    std::string hex;
    std::string letters;
    for (size_t i = 0; i < kLineBytes; ++i) {
      if (i == kLineBytes / 2) hex += ' ';
      if (i >= line.size()) {
        hex += "   ";
        continue;
      }
      const auto value = std::to_integer<unsigned>(line[i]);
      hex += Text(" {:02x}", value);
      letters += value >= 0x20 && value < 0x7f ? static_cast<char>(value) : '.';
    }
    text += Text("{:08x} {}  |{}|\n", at, hex, letters);
  }
  return text + Text("{:08x}\n", bytes.size());
}

}  // namespace hotplane
