#include "engine/report_chart.h"

#include <algorithm>
#include <cmath>

#include "base/format_text.h"
#include "engine/report_page.h"

namespace hotplane {
namespace {

// The drawing's own units, as of the other pictures.
constexpr double kWidth = 1080;
constexpr double kHeight = 300;
constexpr double kLeft = 76;
constexpr double kTop = 12;
constexpr double kBottom = 250;
// Room for the names of reference lines.
constexpr double kRightPlain = 1064;
constexpr double kRightNamed = 930;

// What differs by less is drawn as one: steps of an axis stay normal numbers.
constexpr double kSmallest = 1e-290;

// The first of 1, 2, 5, 10 times a power of ten that is not below `least`.
double RoundStep(double least) {
  const double decade = std::pow(10, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (factor * decade >= least * (1 - 1e-9)) return factor * decade;
  return 10 * decade;
}

class Drawing {
 public:
  explicit Drawing(const Chart& chart)
      : chart_(chart), right_(chart.references.empty() ? kRightPlain : kRightNamed) {}

  std::string Draw() {
    if (!FindRange()) return "";
    out_ = Text("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n", kWidth, kHeight,
                Escape(chart_.what));
    DrawY();
    DrawX();
    for (const ChartReference& reference : chart_.references) DrawReference(reference);
    for (const ChartCurve& curve : chart_.curves) DrawCurve(curve);
    return out_ + "</svg>\n";
  }

 private:
  bool FindRange() {
    bool any = false;
    const auto take_y = [&](double y) {
      y_low_ = any ? std::min(y_low_, y) : y;
      y_high_ = any ? std::max(y_high_, y) : y;
      any = true;
    };
    bool any_x = false;
    for (const ChartCurve& curve : chart_.curves) {
      for (const ChartPoint& point : curve.points) {
        x_low_ = any_x ? std::min(x_low_, point.x) : point.x;
        x_high_ = any_x ? std::max(x_high_, point.x) : point.x;
        any_x = true;
        if (point.y) take_y(*point.y);
      }
    }
    for (const ChartReference& reference : chart_.references) take_y(reference.y);
    if (!any || !any_x) return false;
    if (chart_.zero) {
      y_low_ = std::min(y_low_, 0.0);
      y_high_ = std::max(y_high_, 0.0);
    }
    // A flat curve still gets an axis with room on both sides.
    const double largest = std::max(std::fabs(y_high_), std::fabs(y_low_));
    if (y_high_ - y_low_ <= std::max(1e-12 * largest, kSmallest)) {
      const double room = largest <= kSmallest ? 1 : 0.1 * largest;
      y_low_ -= chart_.zero ? 0 : room;
      y_high_ += room;
    }
    y_step_ = RoundStep((y_high_ - y_low_) / 5);
    y_low_ = std::floor(y_low_ / y_step_ + 1e-9) * y_step_;
    y_high_ = std::ceil(y_high_ / y_step_ - 1e-9) * y_step_;
    // Around one place, or places too close for their magnitude, there is room on both sides.
    const double far = std::max(std::fabs(x_low_), std::fabs(x_high_));
    if (x_high_ - x_low_ <= 1e-9 * far || x_high_ <= x_low_) {
      const double room = std::max(0.5, 1e-3 * far);
      x_low_ -= room;
      x_high_ += room;
    }
    return true;
  }

  double X(double x) const { return kLeft + (right_ - kLeft) * (x - x_low_) / (x_high_ - x_low_); }
  double Y(double y) const {
    return kBottom - (kBottom - kTop) * (y - y_low_) / (y_high_ - y_low_);
  }

  void DrawY() {
    const int decimals =
        static_cast<int>(std::clamp(std::ceil(-std::log10(y_step_) - 1e-9), 0.0, 12.0));
    const auto lines = static_cast<int>(std::lround((y_high_ - y_low_) / y_step_));
    for (int i = 0; i <= lines; ++i) {
      double value = y_low_ + i * y_step_;
      if (std::fabs(value) < y_step_ / 2) value = 0;
      const double y = Y(value);
      out_ += Text("<line class=\"{}\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/>",
                   value == 0 ? "axis" : "grid", kLeft, right_, y, y);
      out_ += y_step_ < 1e-6 || y_step_ >= 1e6
                  ? Text("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:.1e}</text>\n",
                         kLeft - 8, y + 4, value)
                  : Text("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:.{}f}</text>\n",
                         kLeft - 8, y + 4, value, decimals);
    }
  }

  // More do not fit beside each other.
  static constexpr int kLabelsMax = 64;

  void DrawX() {
    double step = chart_.x_step;
    if (step <= 0) step = std::max(1.0, RoundStep((x_high_ - x_low_) / 22));
    const double first = std::ceil(x_low_ / step - 1e-9) * step;
    for (int i = 0; i < kLabelsMax; ++i) {
      const double value = first + i * step;
      if (value > x_high_ + 1e-6 * step) break;
      out_ += chart_.x_percent
                  ? Text("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.0f}%</text>\n",
                         X(value), kBottom + 18, 100 * value)
                  : Text("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.0f}</text>\n",
                         X(value), kBottom + 18, value);
    }
    out_ += Text("<text class=\"strong\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
                 (kLeft + right_) / 2, kBottom + 38, Escape(chart_.x_name));
  }

  void DrawReference(const ChartReference& reference) {
    const double y = Y(reference.y);
    out_ += Text(
        "<line class=\"dashed stroke-{}\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" "
        "y2=\"{:.1f}\"/>",
        reference.css, kLeft, right_, y, y);
    // Names of lines that lie close move apart, down from the upper one.
    double label_y = y + 4;
    for (const double taken : labels_)
      if (std::fabs(label_y - taken) < 13) label_y = taken + 13;
    labels_.push_back(label_y);
    out_ += Text("<text class=\"strong\" x=\"{}\" y=\"{:.1f}\">{}</text>\n", right_ + 8, label_y,
                 Escape(reference.name));
  }

  void DrawCurve(const ChartCurve& curve) {
    std::string path;
    std::string marks;
    bool pen_down = false;
    for (const ChartPoint& point : curve.points) {
      if (!point.y) {
        pen_down = false;
        continue;
      }
      const double x = X(point.x);
      const double y = Y(*point.y);
      path += Text("{}{:.1f} {:.1f}", pen_down ? "L" : "M", x, y);
      marks +=
          Text("<circle class=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.2\"/>", curve.css, x, y);
      pen_down = true;
    }
    if (path.empty()) return;
    out_ += Text("<path class=\"curve stroke-{}\" d=\"{}\"/>{}\n", curve.css, path, marks);
  }

  const Chart& chart_;
  const double right_;
  double x_low_ = 0, x_high_ = 0, y_low_ = 0, y_high_ = 0, y_step_ = 1;
  std::vector<double> labels_;
  std::string out_;
};

}  // namespace

std::string DrawChart(const Chart& chart) { return Drawing(chart).Draw(); }

}  // namespace hotplane
