#include "engine/fidelity_html.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "base/format_text.h"
#include "engine/report_chart.h"
#include "engine/report_page.h"
#include "engine/report_text.h"

namespace hotplane {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kExpected = "the JSON object that `fidelity --json` prints";
constexpr const char* kTiers[] = {"base", "fp4"};
constexpr const char* kParts[] = {"total", "gate", "up", "down"};

const Json& ObjectAt(const Json& object, const char* key) {
  static const Json kNone = Json::object();
  const auto found = object.find(key);
  return found != object.end() && found->is_object() ? *found : kNone;
}

std::string TierName(std::string_view tier) { return tier == "fp4" ? "FP4" : "base"; }

std::string Plain(const std::optional<double>& figure) {
  return figure ? Text("{:.5f}", *figure) : std::string("-");
}
std::string Signed(const std::optional<double>& figure) {
  return figure ? Text("{:+.6f}", *figure) : std::string("-");
}
std::string Percent(const std::optional<double>& share) {
  return share ? Text("{:.2f}%", 100 * *share) : std::string("-");
}

class Page {
 public:
  Page(const Json& json, std::vector<const Json*> layers)
      : json_(json), layers_(std::move(layers)) {}

  std::string Draw() {
    out_ = PageHead(Text("Fidelity: {} MoE layers against their source", layers_.size()));
    Add("<p class=\"soft\">{}, generation <span class=\"mono\">{}</span></p>\n",
        Escape(TextAt(json_, "model")), Escape(TextAt(json_, "generation")));
    Tiles();
    Missing();
    CurveSection("Relative RMS error by layer", "relative_rms",
                 "sqrt(sum (q-w)&#178; / sum w&#178;), w the source's weight, q the tier's.");
    CurveSection("Signed bias by layer", "signed_bias",
                 "mean (q-w) / sqrt(mean w&#178;): what does not cancel in sums of many weights. A "
                 "codebook without symmetry, or zeros of one sign, show here. Chance alone gives "
                 "about the relative RMS by the root of the number of weights.");
    CurveSection("Bias of magnitudes by layer", "magnitude_bias",
                 "sum sign(w)(q-w) / sum |w|: below 0, weights come out too small.");
    Table();
    return out_ + PageFoot("what `fidelity` printed");
  }

 private:
  template <typename... Args>
  void Add(fmt::format_string<Args...> format, Args&&... args) {
    out_ += Text(format, std::forward<Args>(args)...);
  }

  void Tiles() {
    out_ += "<div class=\"tiles\">\n";
    for (const char* tier : kTiers) {
      const Json& figures = ObjectAt(json_, tier);
      Add("<div class=\"tile\"><b>{}</b><span>relative RMS error, {}</span></div>\n",
          Plain(FigureAt(figures, "relative_rms")), TierName(tier));
      Add("<div class=\"tile\"><b>{}</b><span>signed bias, {}</span></div>\n",
          Signed(FigureAt(figures, "signed_bias")), TierName(tier));
    }
    out_ += "</div>\n";
  }

  void Missing() {
    std::string list;
    for (const Json* layer : layers_)
      for (const char* tier : kTiers)
        if (const std::string missing = TextAt(ObjectAt(*layer, tier), "missing"); !missing.empty())
          list += Text("<li>layer {:.0f}, {}: {}</li>\n", NumberAt(*layer, "layer"), TierName(tier),
                       Escape(missing));
    if (!list.empty())
      Add("<section class=\"warn\"><h2>Not measured</h2><ul>\n{}</ul></section>\n", list);
  }

  void CurveSection(const char* title, const char* figure, const char* note) {
    Chart chart;
    chart.what = title;
    chart.x_name = "MoE layer";
    chart.zero = true;
    for (const char* tier : kTiers) {
      ChartCurve curve;
      curve.css = std::string_view(tier) == "fp4" ? "read" : "quantize";
      for (const Json* layer : layers_)
        curve.points.push_back({NumberAt(*layer, "layer"),
                                FigureAt(ObjectAt(ObjectAt(*layer, tier), "total"), figure)});
      std::stable_sort(curve.points.begin(), curve.points.end(),
                       [](const ChartPoint& a, const ChartPoint& b) { return a.x < b.x; });
      chart.curves.push_back(std::move(curve));
    }
    const std::string picture = DrawChart(chart);
    if (picture.empty()) return;
    Add("<section><h2>{}</h2>\n{}{}<p class=\"soft\" style=\"margin:10px 0 0\">{}</p></section>\n",
        title, PageLegend({{"base, 2 bits", "quantize"}, {"FP4", "read"}}), picture, note);
  }

  void Table() {
    out_ +=
        "<section class=\"long\"><h2>By layer and projection</h2>\n<table>\n<tr><th>layer</th>"
        "<th>source</th><th>tier</th><th class=\"n\">relative RMS</th><th class=\"n\">gate</th>"
        "<th class=\"n\">up</th><th class=\"n\">down</th><th class=\"n\">signed bias</th>"
        "<th class=\"n\">of magnitudes</th><th class=\"n\">largest</th><th class=\"n\">clipped</th>"
        "<th class=\"n\">zeros</th><th class=\"n\">exponents</th></tr>\n";
    for (const Json* layer : layers_)
      for (const char* tier : kTiers) Row(*layer, tier);
    out_ += "</table></section>\n";
  }

  void Row(const Json& layer, const char* tier) {
    const Json& figures = ObjectAt(layer, tier);
    if (figures.empty() || figures.contains("missing")) return;
    const Json& total = ObjectAt(figures, "total");
    const Json& source = ObjectAt(ObjectAt(layer, "source"), "total");
    Add("<tr><td>{:.0f}</td><td>{}</td><td>{}</td>", NumberAt(layer, "layer"),
        Escape(TextAt(layer, "source_format"), 32), TierName(tier));
    for (const char* part : kParts)
      Add("<td class=\"n\">{}</td>", Plain(FigureAt(ObjectAt(figures, part), "relative_rms")));
    const std::optional<double> low = FigureAt(source, "exponent_min");
    const std::optional<double> high = FigureAt(source, "exponent_max");
    Add("<td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}"
        "</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>\n",
        Signed(FigureAt(total, "signed_bias")), Signed(FigureAt(total, "magnitude_bias")),
        Percent(FigureAt(total, "largest_share")), Percent(FigureAt(total, "clipped_share")),
        Percent(std::string_view(tier) == "fp4" ? FigureAt(total, "zero_share")
                                                : FigureAt(source, "zero_share")),
        low && high ? Text("{:.0f} to {:.0f}", *low, *high) : std::string("-"));
  }

  const Json& json_;
  const std::vector<const Json*> layers_;
  std::string out_;
};

}  // namespace

Result<std::string> FidelityHtml(std::string_view text, std::string_view path) {
  HP_ASSIGN(const Json json, ParseReportJson(text, path, kExpected, nullptr));
  std::vector<const Json*> layers;
  for (const Json& layer : ArrayAt(json, "layers"))
    if (layer.is_object() && NumberAt(layer, "layer") >= 0 && layers.size() < kReportRowsMax)
      layers.push_back(&layer);
  if (layers.empty()) return Fail(NotOurs(path, kExpected).Found("no `layers`"));
  return Page(json, std::move(layers)).Draw();
}

}  // namespace hotplane
