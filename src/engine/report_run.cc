#include "engine/report_run.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/format_text.h"
#include "engine/report_html.h"
#include "engine/report_text.h"

namespace hotplane {
namespace {

using Json = nlohmann::ordered_json;

// Distinct span names and threads of a trace; what comes after is drawn under the last one.
constexpr size_t kNamesMax = 32;
constexpr size_t kThreadsMax = 1024;
constexpr size_t kSpansMax = 8 * 1024 * 1024;
// Ordinals are 32 bits on disk; a text may say anything.
bool LayerAt(const Json& object, uint32_t* layer) {
  const double number = NumberAt(object, "layer");
  if (number < 0 || number > 1e9) return false;
  *layer = static_cast<uint32_t>(number);
  return true;
}

// A value of the machine, or of another flat object, as people read it.
std::string Plain(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_number_integer()) return Text("{}", value.get<int64_t>());
  if (value.is_number()) return Text("{:.6g}", value.get<double>());
  return {};
}

void TakeLayers(const Json& json, ReportRun* run) {
  for (const Json& entry : ArrayAt(json, "source_by_layer")) {
    ReportLayer layer;
    if (!entry.is_object() || !LayerAt(entry, &layer.layer)) continue;
    if (run->layers.size() == kReportRowsMax) break;
    layer.source = TextAt(entry, "source");
    layer.bytes = NumberAt(entry, "bytes");
    layer.bytes_cached = NumberAt(entry, "bytes_cached");
    layer.seconds_begin = NumberAt(entry, "seconds_begin");
    layer.seconds_ready = NumberAt(entry, "seconds_ready");
    run->layers.push_back(std::move(layer));
  }
}

void AddChoice(const ReportChoice& one, uint32_t layer, ReportRun* run) {
  auto found =
      std::find_if(run->choices.begin(), run->choices.end(), [&](const ReportChoice& choice) {
        return choice.tier == one.tier && choice.action == one.action &&
               choice.reason == one.reason;
      });
  if (found == run->choices.end()) {
    if (run->choices.size() == kReportRowsMax) return;
    found = run->choices.insert(found, one);
    found->bytes_read = found->bytes_built = found->bytes_skipped = 0;
  }
  found->layers.push_back(layer);
  found->bytes_read += one.bytes_read;
  found->bytes_built += one.bytes_built;
  found->bytes_skipped += one.bytes_skipped;
}

// The plan's entries, one per layer and tier; else what the layers say of their delta tier.
void TakeChoices(const Json& json, ReportRun* run) {
  uint32_t layer = 0;
  for (const Json& entry : ArrayAt(json, "actions")) {
    if (!entry.is_object() || !LayerAt(entry, &layer)) continue;
    ReportChoice choice;
    choice.tier = TextAt(entry, "encoding");
    choice.action = TextAt(entry, "action");
    choice.reason = TextAt(entry, "reason");
    choice.bytes_read = NumberAt(entry, "bytes_store", 0) + NumberAt(entry, "bytes_checkpoint", 0);
    choice.bytes_built = NumberAt(entry, "bytes_built", 0);
    choice.bytes_skipped = NumberAt(entry, "bytes_skipped", 0);
    AddChoice(choice, layer, run);
  }
  if (!run->choices.empty()) return;
  for (const Json& entry : ArrayAt(json, "source_by_layer")) {
    if (!entry.is_object() || !LayerAt(entry, &layer) || !entry.contains("delta")) continue;
    ReportChoice choice;
    choice.tier = "delta";
    choice.action = TextAt(entry, "delta");
    choice.reason = TextAt(entry, "delta_reason");
    choice.bytes_skipped = NumberAt(entry, "bytes_skipped", 0);
    AddChoice(choice, layer, run);
  }
}

}  // namespace

double ReportRun::Figure(const std::string& key, double otherwise) const {
  const auto found = figures.find(key);
  return found != figures.end() ? found->second : otherwise;
}

Result<ReportRun> ParseReportRun(std::string_view text, std::string_view path) {
  const std::string_view expected =
      "the JSON object that boot, build, fidelity or tinylm eval prints with --json";
  HP_ASSIGN(const Json json, ParseReportJson(text, path, expected, nullptr));
  if (const auto error = json.find("error"); error != json.end() && error->is_object())
    return Fail(NotOurs(path, expected).Found("a run that failed: " + TextAt(*error, "what")));
  ReportRun run;
  for (const auto& [key, value] : json.items()) {
    if (value.is_number()) run.figures[key] = Bounded(value.get<double>());
    if (value.is_string()) run.texts[key] = value.get<std::string>();
  }
  for (const char* key : {"layers_total", "bytes_needed", "bytes_read", "seconds"})
    if (!run.figures.contains(key))
      return Fail(NotOurs(path, expected).Found(Text("no number `{}`", key)));
  run.build = !json.contains("source_by_layer");
  if (const auto phases = json.find("seconds_by_phase");
      phases != json.end() && phases->is_object())
    for (const auto& [key, value] : phases->items())
      if (value.is_number() && run.phases.size() < kNamesMax)
        run.phases.emplace_back(key, Bounded(value.get<double>()));
  if (const auto machine = json.find("machine"); machine != json.end() && machine->is_object())
    for (const auto& [key, value] : machine->items())
      if (run.machine.size() < kNamesMax) run.machine.emplace_back(key, Plain(value));
  for (const Json& warning : ArrayAt(json, "warnings"))
    if (warning.is_string() && run.warnings.size() < kReportRowsMax)
      run.warnings.push_back(warning.get<std::string>());
  TakeLayers(json, &run);
  TakeChoices(json, &run);
  return run;
}

namespace {

// Takes the events of a trace one by one, so that a large trace is never held as a tree.
class TraceTaker {
 public:
  explicit TraceTaker(ReportTrace* trace) : trace_(*trace) {}

  void Take(const Json& event) {
    const double tid = NumberAt(event, "tid");
    const std::string kind = TextAt(event, "ph");
    const auto args = event.find("args");
    const bool has_args = args != event.end() && args->is_object();
    if (kind == "M" && TextAt(event, "name") == "thread_name" && has_args) {
      trace_.threads[Thread(tid)] = TextAt(*args, "name");
      return;
    }
    const double start = NumberAt(event, "ts");
    const double duration = NumberAt(event, "dur");
    if (kind != "X" || start < 0 || duration < 0 || trace_.spans.size() == kSpansMax) return;
    ReportSpan span;
    span.name = Name(TextAt(event, "name"));
    span.thread = Thread(tid);
    uint32_t layer = 0;
    if (has_args && LayerAt(*args, &layer)) span.layer = layer;
    span.begin = start / 1e6;
    span.end = (start + duration) / 1e6;
    trace_.seconds = std::max(trace_.seconds, span.end);
    trace_.spans.push_back(span);
  }

 private:
  uint32_t Thread(double tid) {
    const auto known = threads_.find(tid);
    if (known != threads_.end()) return known->second;
    if (trace_.threads.size() == kThreadsMax) return static_cast<uint32_t>(kThreadsMax - 1);
    trace_.threads.push_back(Text("thread {:.0f}", tid));
    return threads_[tid] = static_cast<uint32_t>(trace_.threads.size() - 1);
  }

  uint32_t Name(const std::string& name) {
    const auto known = std::find(trace_.names.begin(), trace_.names.end(), name);
    if (known != trace_.names.end()) return static_cast<uint32_t>(known - trace_.names.begin());
    if (trace_.names.size() < kNamesMax) trace_.names.push_back(name);
    return static_cast<uint32_t>(trace_.names.size() - 1);
  }

  ReportTrace& trace_;
  std::map<double, uint32_t> threads_;
};

}  // namespace

Result<ReportTrace> ParseReportTrace(std::string_view text, std::string_view path) {
  const std::string_view expected = "the file that --trace of the same run wrote";
  ReportTrace trace;
  TraceTaker taker(&trace);
  bool in_events = false;
  HP_ASSIGN(const Json json,
            ParseReportJson(
                text, path, expected, [&](int depth, Json::parse_event_t event, const Json& value) {
                  if (event == Json::parse_event_t::key && depth == 1)
                    in_events = value.is_string() && value == "traceEvents";
                  if (!in_events || depth != 2 || event != Json::parse_event_t::object_end)
                    return true;
                  taker.Take(value);
                  return false;
                }));
  if (!json.contains("traceEvents"))
    return Fail(NotOurs(path, expected).Found("no array `traceEvents`"));
  if (const auto other = json.find("otherData"); other != json.end() && other->is_object())
    trace.spans_dropped = NumberAt(*other, "spans_dropped", 0);
  return trace;
}

}  // namespace hotplane
