#include "cli/environment.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "base/format_text.h"

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

std::string ValueOf(const char* variable) {
  const char* const value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

// Whether a message of wrong usage can be about the setting: it names the option, also in words, or
// the value. One letter or digit stands in any text.
bool CanBeAbout(const std::string& text, const Setting& setting) {
  std::string words = setting.option.substr(2);
  std::replace(words.begin(), words.end(), '-', ' ');
  return text.find(words) != std::string::npos ||
         (setting.value.size() > 1 && text.find(setting.value) != std::string::npos);
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
  const bool usage = status.code() == StatusCode::kUsage;
  const std::string text = status.ToString();
  std::vector<const Setting*> named;
  for (const Setting& setting : settings)
    if (text.find(setting.option) != std::string::npos || (usage && CanBeAbout(text, setting)))
      named.push_back(&setting);
  if (named.empty() && usage)
    for (const Setting& setting : settings) named.push_back(&setting);
  if (named.empty()) return status;
  std::string advice = status.advice();
  for (const Setting* setting : named)
    advice += Text("{}{} is from the environment, {}={}: unset it, or give {}, which wins",
                   advice.empty() ? "" : "; ", setting->option, setting->variable, setting->value,
                   setting->option);
  return Status(status).Advice(std::move(advice));
}

}  // namespace hotplane::cli
