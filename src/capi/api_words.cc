#include "capi/api_words.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <vector>

#include "base/format_text.h"

namespace hotplane::capi {
namespace {

struct Word {
  std::string_view option;  // with what follows it, where that is told otherwise
  std::string_view api;     // as C and Python both have it; prose where their names differ
};
// Of options with one beginning the longest first.
constexpr Word kWords[] = {
    {"--base auto", "the residency auto"},
    {"--base device", "the residency device"},
    {"--base", "the residency"},
    {"--checkpoint CHECKPOINT", "`checkpoint`"},
    {"--checkpoint", "`checkpoint`"},
    {"--config", "`config`"},
    {"--delta", "`delta_encoding`"},
    {"--device cpu", "the device \"cpu\""},
    {"--device", "`device`"},
    {"--experts", "experts"},
    {"--generation PREFIX", "`generation`"},
    {"--generation", "`generation`"},
    {"--key PREFIX", "`key`"},
    {"--layers-geometry", "`layers_geometry`"},
    {"--layers", "`layers`"},
    {"--map", "`map`"},
    {"--move", "`move`"},
    {"--no-build", "`no_build`"},
    {"--no-lock", "`hotplane build --no-lock`"},
    {"--pin-delta", "`pin_delta_bytes`"},
    {"--rank R", "`rank`"},
    {"--rank", "`rank`"},
    {"--reserve", "`reserve_bytes`"},
    {"--staging-limit", "`staging_limit_bytes`"},
    {"--store", "store"},
    {"--tiers base", "the base tier alone"},
    {"--tiers", "tiers"},
    {"--tp W", "`world`"},
    {"--tp", "`world`"},
    {"--world", "`world`"},
    {"--zero-mode", "`zero_mode`"},
};

bool IsOfAWord(char letter) {
  return letter == '-' || std::isalnum(static_cast<unsigned char>(letter)) != 0;
}

bool StartsWord(std::string_view text, std::string_view word) {
  return text.starts_with(word) && (text.size() == word.size() || !IsOfAWord(text[word.size()]));
}

// The call that a command line stands for; empty: there is none.
std::string CallOf(std::string_view command) {
  constexpr std::string_view kBuild = "hotplane build";
  constexpr std::string_view kStore = " --store ";
  constexpr std::string_view kRanks = " --tp ";
  constexpr std::string_view kImport = "hotplane import --planes-cache ";
  constexpr std::string_view kGeometry = " --layers-geometry GEOMETRY STORE";
  if (command.starts_with("hotplane boot --checkpoint")) return "boot(..., checkpoint)";
  if (command.starts_with(kImport) && command.ends_with(kGeometry)) {
    command.remove_prefix(kImport.size());
    command.remove_suffix(kGeometry.size());
    return Text("import_planes_cache({}, STORE, GEOMETRY)", command);
  }
  if (!StartsWord(command, kBuild)) return "";
  command.remove_prefix(kBuild.size());
  if (command.starts_with(kRanks))
    return Text("build(..., world={})", command.substr(kRanks.size()));
  if (command.starts_with(' ')) command.remove_prefix(1);
  const size_t store = command.find(kStore);
  if (store != std::string_view::npos)
    return Text("build({}, {})", command.substr(0, store), command.substr(store + kStore.size()));
  return command.empty() ? "build" : Text("build({}, ...)", command);
}

}  // namespace

std::string InApiWords(std::string_view text) {
  constexpr std::string_view kProgram = "hotplane ";
  constexpr std::string_view kBefore = " `(";  // of an option or a command: no name of a file
  std::string words;
  while (!text.empty()) {
    const bool starts = words.empty() || kBefore.find(words.back()) != std::string_view::npos;
    if (starts && text.starts_with(kProgram)) {
      // A command line is quoted, or ends with its sentence.
      const bool quoted = words.ends_with('`');
      const size_t end = std::min(text.find_first_of(quoted ? "`" : "`;,"), text.size());
      const std::string call = CallOf(text.substr(0, end));
      words += call.empty() ? std::string(text.substr(0, end)) : call;
      text.remove_prefix(end);
      continue;
    }
    const auto word = std::ranges::find_if(
        kWords, [&](const Word& each) { return starts && StartsWord(text, each.option); });
    if (word == std::end(kWords)) {
      words += text.front();
      text.remove_prefix(1);
    } else {
      words += word->api;
      text.remove_prefix(word->option.size());
    }
  }
  return words;
}

Status InApiWords(const Status& status) {
  std::vector<std::string> choices;
  for (const std::string& choice : status.choices()) choices.push_back(InApiWords(choice));
  return Status(status)
      .Expected(InApiWords(status.expected()))
      .Found(InApiWords(status.found()))
      .Advice(InApiWords(status.advice()))
      .Choices(std::move(choices));
}

}  // namespace hotplane::capi
