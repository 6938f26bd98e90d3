#include "engine/eval_html.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "base/format_text.h"
#include "engine/report_chart.h"
#include "engine/report_page.h"
#include "engine/report_text.h"

namespace hotplane {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kExpected = "the JSON object that `tinylm eval --json` prints";

struct Row {
  std::string precision;
  std::optional<double> share, loss, bytes_scored, top1_agreement;
};

struct FixedRow {
  std::string_view name;
  std::string_view shown;
  std::string_view css;
};
constexpr FixedRow kFixed[] = {
    {"base", "base", "quantize"}, {"fp4", "FP4", "read"}, {"source", "source", "verify"}};

class Page {
 public:
  Page(std::string model, std::vector<Row> rows)
      : model_(std::move(model)), rows_(std::move(rows)) {}

  std::string Draw() {
    out_ = PageHead("Loss by precision of the routed experts");
    if (!model_.empty())
      Add("<p class=\"soft\">model <span class=\"mono\">{}</span></p>\n", Escape(model_));
    Tiles();
    CurveSection("Loss against the share of routed weight at FP4", &Row::loss, 4,
                 "Nats per byte; lower is better. The experts that carry most of a layer's routed "
                 "weight are taken at FP4, the others at base.");
    CurveSection("Top-1 agreement with the source", &Row::top1_agreement, 4,
                 "Share of bytes where the likeliest next byte is that of the source weights.");
    Table();
    return out_ + PageFoot("what `tinylm eval` printed");
  }

 private:
  template <typename... Args>
  void Add(fmt::format_string<Args...> format, Args&&... args) {
    out_ += Text(format, std::forward<Args>(args)...);
  }

  const Row* Find(std::string_view precision) const {
    const auto found = std::find_if(rows_.begin(), rows_.end(), [precision](const Row& row) {
      return row.precision == precision;
    });
    return found == rows_.end() ? nullptr : &*found;
  }

  void Tiles() {
    out_ += "<div class=\"tiles\">\n";
    for (const FixedRow& fixed : kFixed) {
      const Row* const row = Find(fixed.name);
      if (row != nullptr && row->loss)
        Add("<div class=\"tile\"><b>{:.5f}</b><span>loss, {}</span></div>\n", *row->loss,
            fixed.shown);
    }
    out_ += "</div>\n";
  }

  // From all at base to all at FP4, through the mixed ones.
  void CurveSection(const char* title, std::optional<double> Row::*figure, int decimals,
                    const char* note) {
    ChartCurve curve;
    curve.css = "publish";
    for (const Row& row : rows_) {
      std::optional<double> share;
      if (row.precision == "mixed") share = row.share;
      if (row.precision == "base") share = 0.0;
      if (row.precision == "fp4") share = 1.0;
      if (share && *share >= 0 && *share <= 1 && row.*figure)
        curve.points.push_back({*share, row.*figure});
    }
    std::stable_sort(curve.points.begin(), curve.points.end(),
                     [](const ChartPoint& a, const ChartPoint& b) { return a.x < b.x; });
    if (curve.points.empty()) return;
    Chart chart;
    chart.what = title;
    chart.x_name = "share of routed weight at FP4";
    chart.x_step = 0.1;
    chart.x_percent = true;
    for (const FixedRow& fixed : kFixed) {
      const Row* const row = Find(fixed.name);
      if (row != nullptr && row->*figure)
        chart.references.push_back({fixed.css,
                                    Text("{} {:.{}f}", fixed.shown, *(row->*figure), decimals),
                                    *(row->*figure)});
    }
    std::stable_sort(chart.references.begin(), chart.references.end(),
                     [](const ChartReference& a, const ChartReference& b) { return a.y > b.y; });
    chart.curves.push_back(std::move(curve));
    Add("<section><h2>{}</h2>\n{}<p class=\"soft\" style=\"margin:10px 0 0\">{}</p></section>\n",
        title, DrawChart(chart), note);
  }

  void Table() {
    const auto cell = [](const std::optional<double>& figure, int decimals) {
      return figure ? Text("{:.{}f}", *figure, decimals) : std::string("-");
    };
    out_ +=
        "<section class=\"long\"><h2>All rows</h2>\n<table>\n<tr><th>precision</th>"
        "<th class=\"n\">share at FP4</th><th class=\"n\">loss</th>"
        "<th class=\"n\">top-1 agreement</th><th class=\"n\">bytes scored</th></tr>\n";
    for (const Row& row : rows_)
      Add("<tr><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>"
          "<td class=\"n\">{}</td></tr>\n",
          Escape(row.precision, 64), cell(row.share, 3), cell(row.loss, 5),
          cell(row.top1_agreement, 4), cell(row.bytes_scored, 0));
    out_ += "</table></section>\n";
  }

  const std::string model_;
  const std::vector<Row> rows_;
  std::string out_;
};

}  // namespace

Result<std::string> EvalHtml(std::string_view text, std::string_view path) {
  HP_ASSIGN(const Json json, ParseReportJson(text, path, kExpected, nullptr));
  std::vector<Row> rows;
  for (const Json& entry : ArrayAt(json, "rows")) {
    if (!entry.is_object() || rows.size() == kReportRowsMax) continue;
    rows.push_back({TextAt(entry, "precision"), FigureAt(entry, "share"), FigureAt(entry, "loss"),
                    FigureAt(entry, "bytes_scored"), FigureAt(entry, "top1_agreement")});
  }
  if (rows.empty()) return Fail(NotOurs(path, kExpected).Found("no `rows`"));
  return Page(TextAt(json, "model"), std::move(rows)).Draw();
}

}  // namespace hotplane
