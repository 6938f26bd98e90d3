// Hardware variants are values: choosing one of the tables that this CPU can run, by name.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/format_text.h"
#include "base/status.h"

namespace hotplane {

// The first of `available` (best first, never empty), or the one whose `name` is `forced_name`;
// kUsage with the names when it is not among them.
template <typename Table>
Result<const Table*> SelectVariant(std::span<const Table* const> available,
                                   std::optional<std::string_view> forced_name) {
  if (!forced_name) return available.front();
  std::string names;
  for (const Table* table : available) {
    if (table->name == *forced_name) return table;
    names += names.empty() ? "" : ", ";
    names += table->name;
  }
  return Fail(Status::Usage("the instruction set asked for is unknown or cannot run on this CPU")
                  .Expected(Text("one of {}", names))
                  .Found(Text("\"{}\"", *forced_name))
                  .Advice("leave it out to get the best one"));
}

}  // namespace hotplane
