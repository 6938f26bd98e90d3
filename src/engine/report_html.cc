#include "engine/report_html.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "base/format_text.h"
#include "base/units.h"
#include "engine/eval_html.h"
#include "engine/fidelity_html.h"
#include "engine/report_page.h"
#include "engine/report_run.h"
#include "engine/report_text.h"

namespace hotplane {
namespace {

// The drawing's own units: 1080 across, of which the labels take the left.
constexpr double kDrawingWidth = 1080;
constexpr double kLabelWidth = 92;
constexpr double kPlotWidth = kDrawingWidth - kLabelWidth - 8;

// A figure of a text that may say anything, as a count of bytes.
std::string Bytes(double bytes) {
  return FormatBytes(static_cast<uint64_t>(std::clamp(bytes, 0.0, 1e18)));
}
std::string Seconds(double seconds) { return FormatSeconds(std::clamp(seconds, 0.0, 1e9)); }

// "0-2, 7"
std::string LayerRanges(std::vector<uint32_t> layers) {
  std::sort(layers.begin(), layers.end());
  std::string out;
  for (size_t i = 0; i < layers.size();) {
    size_t end = i + 1;
    while (end < layers.size() && layers[end] <= layers[end - 1] + 1) ++end;
    if (!out.empty()) out += ", ";
    out += layers[i] == layers[end - 1] ? Text("{}", layers[i])
                                        : Text("{}-{}", layers[i], layers[end - 1]);
    i = end;
  }
  return out;
}

// How a span or a source is coloured, and what the legend calls it.
using Kind = PageKind;
constexpr Kind kKinds[] = {
    {"probe", "plan"},
    {"plan", "plan"},
    {"allocate", "allocate"},
    {"read", "read"},
    {"verify", "verify"},
    {"publish", "publish"},
    {"publish file", "file"},
    {"wait", "wait"},
    {"quantize", "quantize"},
    {"page cache", "read"},
    {"mapped", "verify"},
    {"disk", "quantize"},
    {"disk, buffered", "quantize"},
    {"disk, direct", "quantize"},
    {"both", "wait"},
    {"checkpoint", "allocate"},
};
std::string_view CssOf(std::string_view name) {
  for (const Kind& kind : kKinds)
    if (kind.name == name) return kind.css;
  return "skip";
}

// Seconds to drawing units, with round steps for the axis.
class TimeAxis {
 public:
  explicit TimeAxis(double seconds) : seconds_(std::max(seconds, 1e-6)) {
    const double raw = seconds_ / 8;
    const double decade = std::pow(10, std::floor(std::log10(raw)));
    for (const double factor : {1.0, 2.0, 5.0, 10.0}) {
      step_ = factor * decade;
      if (step_ >= raw) break;
    }
  }

  double X(double seconds) const {
    return kLabelWidth + kPlotWidth * std::clamp(seconds / seconds_, 0.0, 1.0);
  }

  // Lines over [top, bottom] and their labels below.
  std::string Draw(double top, double bottom) const {
    std::string out;
    const int decimals = static_cast<int>(std::clamp(std::ceil(-std::log10(step_)), 0.0, 6.0));
    for (int i = 0; i * step_ <= seconds_ * 1.0001; ++i) {
      const double x = X(i * step_);
      out += Text("<line class=\"grid\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/>", x,
                  top, bottom);
      out += Text("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.{}f}{}</text>", x,
                  bottom + 15, i * step_, decimals, i == 0 ? " s" : "");
    }
    return out;
  }

 private:
  double seconds_;
  double step_ = 1;
};

std::string Rect(double x, double y, double width, double height, std::string_view css) {
  return Text("<rect class=\"{}\" x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\"/>",
              css, x, y, std::max(width, 0.8), height);
}

// Time from first to last of some spans, joined where the gap between two is not visible.
struct Interval {
  double begin;
  double end;
};
std::vector<Interval> Join(std::vector<Interval> spans, double gap) {
  std::sort(spans.begin(), spans.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::vector<Interval> out;
  for (const Interval& span : spans) {
    if (!out.empty() && span.begin <= out.back().end + gap) {
      out.back().end = std::max(out.back().end, span.end);
    } else {
      out.push_back(span);
    }
  }
  return out;
}

class Lane;
struct Amount;

class Page {
 public:
  Page(const ReportRun& run, const std::optional<ReportTrace>& trace) : run_(run), trace_(trace) {}
  std::string Draw();

 private:
  void Head();
  void Tile(const std::string& figure, const std::string& text, double share);
  void RateTile();
  void Tiles();
  void Warnings();
  void Layers();
  double TracedLayers(const TimeAxis& axis);
  double UntracedLayers(const TimeAxis& axis);
  void Workers();
  void WorkerLane(const Lane& lane, double y, double height);
  void AmountSection(const std::string& title, const std::vector<Amount>& amounts,
                     std::string (*format)(double), const std::string& note);
  void Sources();
  void Choices();
  void Phases();
  void LayerTable();
  void Figures();
  void PairTable(const std::vector<std::pair<std::string, std::string>>& rows);

  template <typename... Args>
  void Add(fmt::format_string<Args...> format, Args&&... args) {
    out_ += Text(format, std::forward<Args>(args)...);
  }

  const ReportRun& run_;
  const std::optional<ReportTrace>& trace_;
  std::string out_;
};

void Page::Head() {
  const double seconds = run_.Figure("seconds");
  const double layers = run_.Figure("layers_total");
  const std::string what =
      run_.build ? Text("Build: {:.0f} of {:.0f} layers from {} in {}", run_.Figure("layers_built"),
                        layers, Bytes(run_.Figure("bytes_read")), Seconds(seconds))
                 : Text("Boot: {:.0f} layers, {} in {}", layers, Bytes(run_.Figure("bytes_needed")),
                        Seconds(seconds));
  out_ += PageHead(what);
  const double world = run_.Figure("world", 1);
  const std::string ranks = world <= 1 ? ""
                            : run_.build
                                ? Text(" for {:.0f} ranks", world)
                                : Text(", rank {:.0f} of {:.0f}", run_.Figure("rank"), world);
  const auto generation = run_.texts.find("generation");
  if (generation != run_.texts.end())
    Add("<p class=\"soft\">generation <span class=\"mono\">{}</span>{}</p>\n",
        Escape(generation->second), ranks);
}

void Page::Tile(const std::string& figure, const std::string& text, double share) {
  Add("<div class=\"tile\"><b>{}</b>", figure);
  if (share >= 0) Add("<i><u style=\"width:{:.1f}%\"></u></i>", 100 * std::clamp(share, 0.0, 1.0));
  Add("<span>{}</span></div>\n", text);
}

void Page::RateTile() {
  const double rate = run_.Figure("gigabytes_per_second");
  const double limit = run_.Figure("limit_gigabytes_per_second");
  const std::string figure = Text("{:.2f} GB/s", rate);
  if (run_.build) return Tile(figure, "of source read, quantized and written", -1);
  if (limit <= 0) return Tile(figure, "landing; the machine's limit was not measured", -1);
  Tile(figure,
       Text("{:.0f}% of the {:.2f} GB/s that this machine gives", 100 * rate / limit, limit),
       rate / limit);
}

void Page::Tiles() {
  out_ += "<div class=\"tiles\">\n";
  RateTile();
  const double needed = run_.Figure("bytes_needed");
  const double read = run_.Figure("bytes_read");
  const double verified = run_.Figure("bytes_verified");
  const double built = run_.Figure("bytes_built");
  Tile(Bytes(read), needed > 0 ? Text("read: {:.3f} times what was needed", read / needed) : "read",
       -1);
  if (run_.build) {
    Tile(Bytes(built), "of layer files written", -1);
    Tile(Bytes(run_.Figure("peak_staging_bytes")), "of staging at most", -1);
  } else {
    const double booted = needed + run_.Figure("bytes_kept");
    Tile(booted > 0 ? Text("{:.0f}%", std::floor(100 * verified / booted)) : "-",
         Text("of the bytes verified{}", built > 0 ? Text("; {} built", Bytes(built)) : ""),
         booted > 0 ? verified / booted : 0);
    Tile(Seconds(run_.Figure("seconds_first_layer")), "of landing until the first layer was ready",
         -1);
  }
  out_ += "</div>\n";
}

void Page::Warnings() {
  if (run_.warnings.empty()) return;
  Add("<section class=\"warn\"><h2>Warnings ({})</h2><ul>\n", run_.warnings.size());
  for (const std::string& warning : run_.warnings) Add("<li>{}</li>\n", Escape(warning));
  out_ += "</ul></section>\n";
}

// Rows are as high as lets 44 layers fit a screen, and never lower than a label.
double RowHeight(size_t rows) { return rows <= 24 ? 22 : rows <= 64 ? 16 : 12; }

// Two lanes a layer: getting its bytes above, checking or writing them below; a line where it was
// handed out. Returns the y below the last row.
double Page::TracedLayers(const TimeAxis& axis) {
  struct Lanes {
    std::vector<Interval> above[2], below;  // read, quantize
    double published = -1;
  };
  std::map<int64_t, Lanes> rows;
  for (const ReportLayer& layer : run_.layers) rows[layer.layer];
  for (const ReportSpan& span : trace_->spans) {
    if (span.layer < 0 || (!rows.contains(span.layer) && rows.size() == kReportRowsMax)) continue;
    Lanes& lanes = rows[span.layer];
    const std::string& name = trace_->names[span.name];
    if (name == "read") lanes.above[0].push_back({span.begin, span.end});
    if (name == "quantize") lanes.above[1].push_back({span.begin, span.end});
    if (name == "verify" || name == "publish file") lanes.below.push_back({span.begin, span.end});
    if (name == "publish") lanes.published = std::max(lanes.published, span.end);
  }
  const double height = RowHeight(rows.size());
  const double lane = (height - 4) / 2;
  // A gap of a unit cannot be seen; of many rows none is looked at that closely.
  const double gap =
      trace_->seconds / kPlotWidth * std::max(1.0, static_cast<double>(rows.size()) / 64);
  const std::string_view below = run_.build ? "plan" : "verify";
  double y = 4;
  const double rows_height = height * static_cast<double>(rows.size());
  out_ += axis.Draw(y, y + rows_height);
  for (auto& [layer, lanes] : rows) {
    Add("<text class=\"strong\" x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">layer {}</text>",
        kLabelWidth - 8, y + height / 2 + 4, layer);
    for (size_t kind = 0; kind < 2; ++kind)
      for (const Interval& part : Join(std::move(lanes.above[kind]), gap))
        out_ += Rect(axis.X(part.begin), y + 2, axis.X(part.end) - axis.X(part.begin), lane,
                     kind == 0 ? "read" : "quantize");
    for (const Interval& part : Join(std::move(lanes.below), gap))
      out_ += Rect(axis.X(part.begin), y + 2 + lane, axis.X(part.end) - axis.X(part.begin), lane,
                   below);
    if (lanes.published >= 0)
      out_ += Rect(axis.X(lanes.published) - 1, y + 1, 2, height - 2, "publish");
    out_ += "\n";
    y += height;
  }
  return y;
}

double Page::UntracedLayers(const TimeAxis& axis) {
  const double height = RowHeight(run_.layers.size());
  double y = 4;
  out_ += axis.Draw(y, y + height * static_cast<double>(run_.layers.size()));
  double before = 0;
  for (const ReportLayer& layer : run_.layers) {
    const double ready = std::max(layer.seconds_ready, 0.0);
    const double begin = layer.seconds_begin >= 0 ? layer.seconds_begin : std::min(before, ready);
    Add("<text class=\"strong\" x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">layer {}</text>",
        kLabelWidth - 8, y + height / 2 + 4, layer.layer);
    out_ +=
        Rect(axis.X(begin), y + 3, axis.X(ready) - axis.X(begin), height - 6, CssOf(layer.source));
    out_ += Rect(axis.X(ready) - 1, y + 1, 2, height - 2, "publish");
    out_ += "\n";
    before = ready;
    y += height;
  }
  return y;
}

void Page::Layers() {
  if (!trace_ && run_.layers.empty()) return;
  out_ += "<section class=\"long\"><h2>Layers over time</h2>\n";
  double seconds = trace_ ? trace_->seconds : 0;
  if (trace_ && run_.build) {
    out_ += PageLegend(
        {{"quantize", "quantize"}, {"layer file published", "plan"}, {"done", "publish"}});
  } else if (trace_) {
    std::vector<Kind> kinds = {{"read", "read"}, {"verified", "verify"}, {"handed out", "publish"}};
    if (run_.Figure("bytes_built") > 0)
      kinds.insert(kinds.begin(), {"quantized from the checkpoint", "quantize"});
    out_ += PageLegend(kinds);
  } else {
    std::vector<Kind> kinds;
    for (const ReportLayer& layer : run_.layers) {
      seconds = std::max(seconds, layer.seconds_ready);
      const Kind kind{layer.source, CssOf(layer.source)};
      if (std::none_of(kinds.begin(), kinds.end(),
                       [&](const Kind& other) { return other.name == kind.name; }) &&
          kinds.size() < 8)
        kinds.push_back(kind);
    }
    kinds.push_back({"handed out", "publish"});
    out_ += PageLegend(kinds);
  }
  const size_t at = out_.size();
  const TimeAxis axis(seconds);
  const double bottom = trace_ ? TracedLayers(axis) : UntracedLayers(axis);
  out_.insert(at, Text("<svg viewBox=\"0 0 {} {:.0f}\" role=\"img\" "
                       "aria-label=\"Timeline of the layers\">\n",
                       kDrawingWidth, bottom + 22));
  out_ += "</svg>\n";
  if (!trace_)
    out_ +=
        "<p class=\"soft\">Seconds from the start of landing. Run with --trace FILE and give "
        "it to `hotplane report` to see when each layer was read and verified.</p>\n";
  out_ += "</section>\n";
}

// Of every column of time, the share that a thread spent on each kind of work. A span inside
// another takes its time from it.
class Lane {
 public:
  static constexpr size_t kColumns = 360;

  Lane(size_t names, double seconds)
      : column_seconds_(std::max(seconds, 1e-9) / kColumns),
        shares_(names, std::array<float, kColumns>{}) {}

  void Fill(std::vector<ReportSpan> spans) {
    std::sort(spans.begin(), spans.end(), [](const ReportSpan& a, const ReportSpan& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
    });
    std::vector<ReportSpan> open;
    for (const ReportSpan& span : spans) {
      while (!open.empty() && open.back().end <= span.begin) open.pop_back();
      Spend(span, span.name, 1);
      if (!open.empty()) Spend(span, open.back().name, -1);
      open.push_back(span);
    }
  }

  float Share(size_t name, size_t column) const {
    return std::clamp(shares_[name][column], 0.0f, 1.0f);
  }

 private:
  void Spend(const ReportSpan& span, size_t name, double sign) {
    for (auto c = static_cast<size_t>(span.begin / column_seconds_); c < kColumns; ++c) {
      const double begin = std::max(span.begin, static_cast<double>(c) * column_seconds_);
      const double end = std::min(span.end, static_cast<double>(c + 1) * column_seconds_);
      if (end <= begin) return;
      shares_[name][c] += static_cast<float>(sign * (end - begin) / column_seconds_);
    }
  }

  double column_seconds_;
  std::vector<std::array<float, kColumns>> shares_;
};

// The columns stacked: what fills a lane to its top was busy all the time.
void Page::WorkerLane(const Lane& lane, double y, double height) {
  constexpr double kColumnWidth = kPlotWidth / Lane::kColumns;
  std::array<float, Lane::kColumns> floor{};
  for (size_t name = 0; name < trace_->names.size(); ++name) {
    std::string path;
    for (size_t c = 0; c < Lane::kColumns; ++c) {
      const float share = std::min(lane.Share(name, c), 1.0f - floor[c]);
      if (share < 0.004f) continue;
      const double top = y + height * (1.0 - static_cast<double>(floor[c] + share));
      path += Text("M{:.1f} {:.1f}h{:.2f}v{:.1f}h-{:.2f}z",
                   kLabelWidth + static_cast<double>(c) * kColumnWidth, top, kColumnWidth + 0.15,
                   height * static_cast<double>(share), kColumnWidth + 0.15);
      floor[c] += share;
    }
    if (!path.empty()) Add("<path class=\"{}\" d=\"{}\"/>\n", CssOf(trace_->names[name]), path);
  }
}

void Page::Workers() {
  if (!trace_ || trace_->spans.empty()) return;
  // As many as a page can hold; a machine has at most some hundreds of cores.
  constexpr size_t kThreadsShown = 64;
  std::vector<std::vector<ReportSpan>> spans(trace_->threads.size());
  for (const ReportSpan& span : trace_->spans) spans[span.thread].push_back(span);
  std::vector<size_t> order;
  for (size_t t = 0; t < spans.size(); ++t)
    if (!spans[t].empty()) order.push_back(t);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const std::string& left = trace_->threads[a];
    const std::string& right = trace_->threads[b];
    return left.size() != right.size() ? left.size() < right.size() : left < right;
  });
  const size_t rows = std::min(order.size(), kThreadsShown);
  std::vector<Kind> kinds;
  for (const std::string& name : trace_->names) kinds.push_back({name, CssOf(name)});
  out_ += "<section><h2>What each thread did</h2>\n" + PageLegend(kinds);
  const double height = rows <= 8 ? 34 : 20;
  const double bottom = 4 + height * static_cast<double>(rows);
  Add("<svg viewBox=\"0 0 {} {:.0f}\" role=\"img\" aria-label=\"Timeline of the threads\">\n",
      kDrawingWidth, bottom + 22);
  const TimeAxis axis(trace_->seconds);
  for (size_t row = 0; row < rows; ++row) {
    const double y = 4 + height * static_cast<double>(row);
    Add("<text class=\"strong\" x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
        kLabelWidth - 8, y + height / 2 + 4, Escape(trace_->threads[order[row]], 16));
    out_ += Rect(kLabelWidth, y + 2, kPlotWidth, height - 4, "track");
    Lane lane(trace_->names.size(), trace_->seconds);
    lane.Fill(std::move(spans[order[row]]));
    WorkerLane(lane, y + 2, height - 4);
  }
  out_ += axis.Draw(bottom, bottom + 4) + "</svg>\n";
  if (rows < order.size()) Add("<p class=\"soft\">{} more threads</p>\n", order.size() - rows);
  if (trace_->spans_dropped > 0)
    Add("<p class=\"soft\">{:.0f} spans did not fit in the trace</p>\n", trace_->spans_dropped);
  out_ += "</section>\n";
}

struct Amount {
  std::string name;
  std::string_view css;
  double value;
};

void Page::AmountSection(const std::string& title, const std::vector<Amount>& amounts,
                         std::string (*format)(double), const std::string& note) {
  double total = 0;
  for (const Amount& amount : amounts) total += amount.value;
  Add("<section><h2>{}</h2>\n<div class=\"bar\">", title);
  for (const Amount& amount : amounts)
    if (amount.value > 0)
      Add("<i class=\"{}\" style=\"width:{:.2f}%\"></i>", amount.css, 100 * amount.value / total);
  out_ += "</div>\n<table>\n";
  for (const Amount& amount : amounts)
    Add("<tr><td><p class=\"legend\" style=\"margin:0\"><span><i "
        "class=\"{}\"></i>{}</span></p></td>"
        "<td class=\"n\">{}</td><td class=\"n\">{:.1f}%</td></tr>\n",
        amount.css, Escape(amount.name), format(amount.value),
        total > 0 ? 100 * amount.value / total : 0);
  out_ += "</table>\n";
  if (!note.empty()) Add("<p class=\"soft\" style=\"margin:10px 0 0\">{}</p>\n", note);
  out_ += "</section>\n";
}

void Page::Sources() {
  std::vector<Amount> amounts;
  const auto add = [&amounts](const std::string& name, double value) {
    if (value <= 0) return;
    for (Amount& amount : amounts)
      if (amount.name == name) {
        amount.value += value;
        return;
      }
    if (amounts.size() < 16) amounts.push_back({name, CssOf(name), value});
  };
  for (const ReportLayer& layer : run_.layers) {
    // A half-cached file comes from both.
    const double cached = std::clamp(layer.bytes_cached, 0.0, std::max(layer.bytes, 0.0));
    if (layer.source == "both" && cached > 0) {
      add("page cache", cached);
      add("disk", layer.bytes - cached);
    } else {
      add(layer.source.empty() ? "not told" : layer.source, layer.bytes);
    }
  }
  if (run_.build) add("checkpoint", run_.Figure("bytes_read"));
  add("headers and tables", run_.Figure("bytes_metadata"));
  add("read again", run_.Figure("bytes_reread"));
  if (amounts.empty()) return;
  const double needed = run_.Figure("bytes_needed");
  AmountSection("Where the bytes came from", amounts, &Bytes,
                Text("needed {}, read {}, left where it was {}", Bytes(needed),
                     Bytes(run_.Figure("bytes_read")), Bytes(run_.Figure("bytes_skipped"))));
}

void Page::Phases() {
  constexpr std::string_view kCycle[] = {"plan", "allocate", "verify", "quantize", "read", "wait"};
  std::vector<Amount> amounts;
  double sum = 0;
  for (const auto& [name, seconds] : run_.phases) {
    amounts.push_back({name, kCycle[amounts.size() % std::size(kCycle)], seconds});
    sum += seconds;
  }
  const double rest = run_.Figure("seconds") - sum;
  if (rest > 0.001 * run_.Figure("seconds")) amounts.push_back({"rest", "skip", rest});
  if (amounts.empty()) return;
  AmountSection("Seconds by phase", amounts, &Seconds,
                Text("{} in all", Seconds(run_.Figure("seconds"))));
}

void Page::Choices() {
  const double skipped = run_.Figure("bytes_skipped");
  Add("<section><h2>What was done with each tier, and why</h2>\n"
      "<p>{} of this store were not read.</p>\n",
      Bytes(skipped));
  if (run_.choices.empty()) {
    Add("<p class=\"soft\">{}</p></section>\n",
        run_.build    ? "Layer files that were there already are kept, and not built again."
        : skipped > 0 ? "The delta tier of these layers is present: it stays where it is, unopened."
                      : "There was nothing beside what this boot needed.");
    return;
  }
  const auto cell = [](double bytes) { return bytes > 0 ? Bytes(bytes) : std::string("-"); };
  out_ +=
      "<table>\n<tr><th>tier</th><th>done</th><th>layers</th><th>why</th><th class=\"n\">read"
      "</th><th class=\"n\">built</th><th class=\"n\">not read</th></tr>\n";
  for (const ReportChoice& choice : run_.choices)
    Add("<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}"
        "</td><td class=\"n\">{}</td></tr>\n",
        Escape(choice.tier), Escape(choice.action), LayerRanges(choice.layers),
        Escape(choice.reason), cell(choice.bytes_read), cell(choice.bytes_built),
        cell(choice.bytes_skipped));
  out_ += "</table></section>\n";
}

void Page::LayerTable() {
  if (run_.layers.empty()) return;
  // Side by side where there are many.
  const size_t tables = run_.layers.size() > 12 ? 2 : 1;
  const size_t rows = (run_.layers.size() + tables - 1) / tables;
  Add("<section class=\"long\"><h2>Layers</h2>\n<div{}>\n",
      tables == 2 ? " class=\"two wide\"" : "");
  for (size_t i = 0; i < run_.layers.size(); ++i) {
    if (i % rows == 0)
      Add("{}<table>\n<tr><th>layer</th><th>source</th><th class=\"n\">bytes</th><th class=\"n\">"
          "cached</th><th class=\"n\">ready at</th></tr>\n",
          i > 0 ? "</table>\n" : "");
    const ReportLayer& layer = run_.layers[i];
    const double cached = layer.bytes > 0 ? std::min(1.0, layer.bytes_cached / layer.bytes) : -1;
    Add("<tr><td>{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}"
        "</td></tr>\n",
        layer.layer, Escape(layer.source), layer.bytes >= 0 ? Bytes(layer.bytes) : "-",
        cached >= 0 ? Text("{:.0f}%", std::floor(100 * cached)) : "-",
        layer.seconds_ready >= 0 ? Seconds(layer.seconds_ready) : "-");
  }
  out_ += "</table>\n</div></section>\n";
}

void Page::PairTable(const std::vector<std::pair<std::string, std::string>>& rows) {
  out_ += "<table>\n";
  for (const auto& [key, value] : rows)
    Add("<tr><td class=\"soft\">{}</td><td class=\"n\" style=\"white-space:normal\">{}</td></tr>\n",
        Escape(key), Escape(value));
  out_ += "</table>\n";
}

void Page::Figures() {
  if (!run_.machine.empty()) {
    out_ += "<section><h2>Machine</h2>\n<div class=\"columns\">\n";
    PairTable(run_.machine);
    out_ += "</div></section>\n";
  }
  std::vector<std::pair<std::string, std::string>> rows;
  for (const auto& [key, value] : run_.figures) {
    if (rows.size() == kReportRowsMax) break;
    const bool whole = value == std::floor(value) && value < 1e15;
    rows.emplace_back(key, key.starts_with("bytes_") || key.ends_with("_bytes")
                               ? Text("{:.0f} ({})", value, Bytes(value))
                           : whole ? Text("{:.0f}", value)
                                   : Text("{:.4g}", value));
  }
  for (const auto& [key, value] : run_.texts)
    if (rows.size() < kReportRowsMax) rows.emplace_back(key, value);
  out_ += "<section class=\"long\"><h2>All figures of the run</h2>\n<div class=\"columns\">\n";
  PairTable(rows);
  out_ += "</div></section>\n";
}

std::string Page::Draw() {
  Head();
  Tiles();
  Warnings();
  Layers();
  Workers();
  Choices();
  out_ += "<div class=\"two\">\n";
  Sources();
  Phases();
  out_ += "</div>\n";
  LayerTable();
  Figures();
  out_ += PageFoot("what the run printed");
  return std::move(out_);
}

}  // namespace

Result<std::string> ReportHtml(const ReportSources& sources) {
  const std::string command = ReportCommand(sources.run_json);
  if (command == kFidelityCommand || command == kEvalCommand) {
    if (!sources.trace_path.empty())
      return Fail(Status::Usage("--trace belongs to a run of boot or build")
                      .File(std::string(sources.run_path))
                      .Found(Text("what `{}` printed", command)));
    return command == kFidelityCommand ? FidelityHtml(sources.run_json, sources.run_path)
                                       : EvalHtml(sources.run_json, sources.run_path);
  }
  HP_ASSIGN(const ReportRun run, ParseReportRun(sources.run_json, sources.run_path));
  std::optional<ReportTrace> trace;
  if (!sources.trace_path.empty()) {
    HP_ASSIGN(trace, ParseReportTrace(sources.trace_json, sources.trace_path));
  }
  return Page(run, trace).Draw();
}

}  // namespace hotplane
