#include "cli/several_generations.h"

#include <algorithm>

#include "base/format_text.h"
#include "base/log.h"
#include "io/env.h"
#include "store/store.h"

namespace hotplane::cli {

void WarnOfSeveralGenerations(const std::string& store, const Digest128& written,
                              std::vector<std::string>* warnings) {
  const Result<Store> opened = Store::Open(PosixEnv(), store);
  if (!opened) return;
  const Result<std::vector<Store::Entry>> all = opened->FindGenerations("");
  if (!all) return;
  const auto count = std::count_if(all->begin(), all->end(), [](const Store::Entry& entry) {
    return !entry.never_held_layers();
  });
  if (count < 2) return;
  warnings->push_back(Text(
      "{} now holds {} generations: boot, warm, verify and others need --generation PREFIX "
      "({} is this one's) or, where they take it, --checkpoint; `hotplane inspect {}` lists them",
      store, count, ToHex(written).substr(0, 8), store));
  Log(LogLevel::kWarning, "{}", warnings->back());
}

}  // namespace hotplane::cli
