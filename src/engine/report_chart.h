// A chart of curves as inline SVG, in the style of the report pages.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hotplane {

struct ChartPoint {
  double x = 0;
  std::optional<double> y;  // nothing: the curve has a gap here
};

struct ChartCurve {
  std::string_view css;  // a colour of the page's style: "read", "quantize", "verify", "publish"
  std::vector<ChartPoint> points;  // by x, ascending
};

// A horizontal line with a name at its right end.
struct ChartReference {
  std::string_view css;
  std::string name;  // text of ours
  double y = 0;
};

struct Chart {
  std::string what;  // text of ours, for those who cannot see it
  std::string x_name;
  std::vector<ChartCurve> curves;
  std::vector<ChartReference> references;
  double x_step = 0;       // of the labels below; 0: as fits, whole numbers
  bool zero = false;       // the vertical axis reaches 0
  bool x_percent = false;  // x is a share
};

// Nothing to draw gives an empty text.
std::string DrawChart(const Chart& chart);

}  // namespace hotplane
