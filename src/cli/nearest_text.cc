#include "cli/nearest_text.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/format_text.h"

namespace hotplane::cli {
namespace {

// Insertions, deletions and replacements that make `a` of `b`.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string Nearest(std::string_view word, const std::vector<std::string>& known) {
  size_t nearest = std::max<size_t>(word.size() / 3 + 1, 3);  // two letters changed places count 2
  std::string found;
  for (const std::string& candidate : known) {
    const size_t distance = EditDistance(word, candidate);
    if (distance >= nearest || distance >= candidate.size()) continue;
    nearest = distance;
    found = candidate;
  }
  return found;
}

std::string NearestText(std::string_view word, const std::vector<std::string>& known) {
  const std::string nearest = Nearest(word, known);
  return nearest.empty() ? "" : Text(": is {} meant?", nearest);
}

}  // namespace hotplane::cli
