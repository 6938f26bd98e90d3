#include "boot/layer_selection.h"

#include <algorithm>
#include <set>

#include "base/format_text.h"
#include "base/number_text.h"

namespace hotplane {
namespace {

Status Malformed(std::string_view text, const Manifest& manifest) {
  return Status::Usage(Text("'{}' does not select layers", text))
      .Expected(Text("A-B or a list such as 0,4-7 within 0-{}, or main, or mtp",
                     manifest.layers.size() - 1));
}

bool ParseOrdinal(std::string_view text, uint32_t* ordinal) {
  const std::optional<uint32_t> number = ParseDecimal(text);
  *ordinal = number.value_or(0);
  return number.has_value();
}

}  // namespace

Result<std::vector<uint32_t>> SelectLayers(std::string_view text, const Manifest& manifest) {
  std::set<uint32_t> selected;
  if (text.empty() || text == "main" || text == "mtp") {
    for (const ManifestLayer& layer : manifest.layers)
      if (text.empty() || layer.mtp == (text == "mtp")) selected.insert(layer.ordinal);
    if (selected.empty()) return Fail(Status::Usage(Text("the model has no {} layers", text)));
    return std::vector<uint32_t>(selected.begin(), selected.end());
  }
  for (std::string_view rest = text; !rest.empty() || selected.empty();) {
    const size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    if (comma != std::string_view::npos && rest.empty()) return Fail(Malformed(text, manifest));
    const size_t dash = item.find('-');
    uint32_t first = 0;
    uint32_t last = 0;
    if (!ParseOrdinal(item.substr(0, dash), &first)) return Fail(Malformed(text, manifest));
    last = first;
    if (dash != std::string_view::npos && !ParseOrdinal(item.substr(dash + 1), &last))
      return Fail(Malformed(text, manifest));
    if (first > last || last >= manifest.layers.size()) return Fail(Malformed(text, manifest));
    for (uint32_t ordinal = first; ordinal <= last; ++ordinal) selected.insert(ordinal);
  }
  return std::vector<uint32_t>(selected.begin(), selected.end());
}

}  // namespace hotplane
