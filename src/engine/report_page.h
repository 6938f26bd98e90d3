// What every report page has: head with the style, foot, and texts of others made safe. A page
// refers to nothing outside itself.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "engine/report_html.h"

namespace hotplane {

// Up to and with the heading. `title` is text of ours.
std::string PageHead(const std::string& title);
// "Made by hotplane from <what>."
std::string PageFoot(const std::string& what);

// Text of others, safe in content and in quoted attributes, cut between characters.
std::string Escape(std::string_view text, size_t bytes_max = kReportTextBytesMax);

// How something is coloured (a class of the style) and what the legend calls it.
struct PageKind {
  std::string_view name;
  std::string_view css;
};
std::string PageLegend(const std::vector<PageKind>& kinds);

}  // namespace hotplane
