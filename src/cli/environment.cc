#include "cli/environment.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string_view>

#include "base/format_text.h"
#include "cli/nearest_text.h"

namespace hotplane::cli {
namespace {

struct EnvironmentTwin {
  std::string_view ours;
  const char* reference;
};
constexpr EnvironmentTwin kTwins[] = {
    {"HOTPLANE_WORKERS", "VLLM_MOE_W2_BUILD_WORKERS"},
    {"HOTPLANE_BATCH", "VLLM_MOE_W2_BUILD_BATCH_SIZE"},
    {"HOTPLANE_ZERO_MODE", "VLLM_MOE_W2_ZERO_MODE"},
    {"HOTPLANE_CHECKPOINT_ID", "VLLM_MOE_W2_CKPT_ID"},
};

constexpr std::string_view kPrefix = "HOTPLANE_";
// What follows the prefix in those that no option stands for: ours, of the Python package, and of
// the tests.
constexpr const char* kOthers[] = {"NO_IO_URING", "LIBRARY",  "PACKAGE", "BUILD_DIR", "GPU",
                                   "KILLS",       "KILL_MIB", "MODELS",  "SHARED"};

std::string ValueOf(const char* variable) {
  const char* const value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

bool IsOfAnOption(char letter) {
  return letter == '-' || std::isalnum(static_cast<unsigned char>(letter)) != 0;
}

// As a whole word: --tp is not named by --tps.
bool Names(std::string_view text, std::string_view option) {
  for (size_t at = text.find(option); at != std::string_view::npos;
       at = text.find(option, at + 1)) {
    const size_t end = at + option.size();
    const bool begins = at == 0 || !IsOfAnOption(text[at - 1]);
    if (begins && (end == text.size() || !IsOfAnOption(text[end]))) return true;
  }
  return false;
}

// The options of a command line in an advice are those of another run.
std::string WithoutCommandLines(const std::string& advice) {
  constexpr std::string_view kBegin = "hotplane ";
  std::string rest;
  for (size_t at = 0; at < advice.size();) {
    const size_t begin = std::min(advice.find(kBegin, at), advice.size());
    rest += advice.substr(at, begin - at);
    at = std::min(advice.find_first_of("`;", begin), advice.size());
  }
  return rest;
}

bool IsAbout(const Status& status, const Setting& setting) {
  if (status.file() == setting.value) return true;
  const std::string quoted = Text("\"{}\"", setting.value);
  for (const std::string& text : {status.what(), status.expected(), status.found()})
    if (Names(text, setting.option) || text.find(quoted) != std::string::npos) return true;
  // What would have helped: of wrong usage too often another option than the wrong one.
  return status.code() != StatusCode::kUsage &&
         Names(WithoutCommandLines(status.advice()), setting.option);
}

}  // namespace

std::vector<Setting> SettingOf(const std::string& option, const std::string& ours,
                               std::vector<std::string>* notes) {
  const std::string value = ValueOf(ours.c_str());
  const EnvironmentTwin* const twin = std::find_if(
      std::begin(kTwins), std::end(kTwins), [&](const auto& each) { return each.ours == ours; });
  const std::string reference = twin == std::end(kTwins) ? "" : ValueOf(twin->reference);
  if (value.empty() && reference.empty()) return {};
  if (value.empty()) return {{twin->reference, reference, option}};
  if (!reference.empty())
    notes->push_back(Text("{} is set: {} is not used", ours, twin->reference));
  return {{ours, value, option}};
}

std::string UnknownVariables(const std::vector<std::string>& of_options) {
  std::vector<std::string> known;  // what comes after the prefix: that all have it makes none near
  for (const std::string& name : of_options) known.push_back(name.substr(kPrefix.size()));
  known.insert(known.end(), std::begin(kOthers), std::end(kOthers));
  std::vector<std::string> unknown;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    std::string_view text = *variable;
    if (!text.starts_with(kPrefix)) continue;
    text.remove_prefix(kPrefix.size());
    const std::string_view name = text.substr(0, text.find('='));
    const bool empty = text.size() <= name.size() + 1;
    // Kubernetes sets these in every container beside a service named "hotplane".
    const bool of_a_service = name.starts_with("SERVICE_") || name.starts_with("PORT");
    if (empty || of_a_service || std::find(known.begin(), known.end(), name) != known.end())
      continue;
    const std::string nearest = Nearest(name, known);
    unknown.push_back(Text("{}{}{}", kPrefix, name,
                           nearest.empty() ? "" : Text(": is {}{} meant?", kPrefix, nearest)));
  }
  std::sort(unknown.begin(), unknown.end());
  std::string list;
  for (const std::string& each : unknown) list += (list.empty() ? "" : "; ") + each;
  return list.empty() ? "" : "in the environment, and read by nothing: " + list;
}

std::string Describe(const Setting& setting) {
  return Text("{}={} from the environment stands for {}", setting.variable, setting.value,
              setting.option);
}

Status RefusedSetting(const Setting& setting, const std::string& expected) {
  return Status::Usage(Text("{}={} in the environment is not what {} takes", setting.variable,
                            setting.value, setting.option))
      .Expected(expected)
      .Found(Text("\"{}\"", setting.value))
      .Advice(Text("correct {0} or unset it; or give {1}, which wins", setting.variable,
                   setting.option));
}

Status WithSettings(const Status& status, const std::vector<Setting>& settings) {
  std::string advice = status.advice();
  for (const Setting& setting : settings)
    if (IsAbout(status, setting))
      advice += Text("{}{} is from the environment, {}={}: unset it, or give {}, which wins",
                     advice.empty() ? "" : "; ", setting.option, setting.variable, setting.value,
                     setting.option);
  return Status(status).Advice(std::move(advice));
}

}  // namespace hotplane::cli
