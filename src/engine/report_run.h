// What a report page shows, taken from the JSON of a run and from its trace. Both are texts that
// anybody may have edited: whatever is missing or of another type is left out, never trusted.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace hotplane {

// Times in seconds, sizes in bytes; both as doubles, because that is what JSON carries. A figure
// that the run does not tell is negative.
struct ReportLayer {
  uint32_t layer = 0;
  std::string source;
  double bytes = -1;
  double bytes_cached = -1;
  double seconds_begin = -1;
  double seconds_ready = -1;
};

// Layers that were treated alike: what was skipped, attached or built, and why.
struct ReportChoice {
  std::string tier;
  std::string action;
  std::string reason;
  std::vector<uint32_t> layers;
  double bytes_read = 0;
  double bytes_built = 0;
  double bytes_skipped = 0;  // there, and not read
};

struct ReportSpan {
  uint32_t name = 0;    // index into ReportTrace::names
  uint32_t thread = 0;  // index into ReportTrace::threads
  int64_t layer = -1;   // -1: of no layer
  double begin = 0;
  double end = 0;
};

struct ReportTrace {
  std::vector<std::string> names;
  std::vector<std::string> threads;
  std::vector<ReportSpan> spans;
  double seconds = 0;  // end of the last span
  double spans_dropped = 0;
};

struct ReportRun {
  bool build = false;                     // of a build; else of a boot
  std::map<std::string, double> figures;  // every number at the top level
  std::map<std::string, std::string> texts;
  std::vector<std::pair<std::string, double>> phases;
  std::vector<ReportLayer> layers;
  std::vector<ReportChoice> choices;
  std::vector<std::pair<std::string, std::string>> machine;
  std::vector<std::string> warnings;

  // `otherwise` where the run does not tell it.
  double Figure(const std::string& key, double otherwise = 0) const;
};

// kData with the file and the offset for anything else than the JSON of a boot or build that ended
// well.
Result<ReportRun> ParseReportRun(std::string_view json, std::string_view path);
Result<ReportTrace> ParseReportTrace(std::string_view json, std::string_view path);

}  // namespace hotplane
