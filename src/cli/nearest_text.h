// What was probably meant by a word that there is not.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace hotplane::cli {

// The one of `known` that is nearest to the word, where it is near enough to be meant; else empty.
std::string Nearest(std::string_view word, const std::vector<std::string>& known);

// ": is --store meant?", where one of `known` is near enough to be; else empty.
std::string NearestText(std::string_view word, const std::vector<std::string>& known);

}  // namespace hotplane::cli
