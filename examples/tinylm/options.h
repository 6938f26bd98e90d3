// What the command line asks for.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "result.h"

namespace tinylm {

enum class Precision { kSource, kFp4, kBase, kMixed };
const char* Name(Precision precision);
const char* Name(hotplane_arithmetic arithmetic);

struct Options {
  bool help = false;
  std::string command;  // "eval" or "generate"
  std::string model;    // folder of the checkpoint
  std::string store;    // "" only with Precision::kSource
  std::string text;     // file
  std::optional<Precision> precision;
  double share = 0.75;  // of the routed weight at FP4, for Precision::kMixed; 0 to 1
  hotplane_arithmetic arithmetic = HOTPLANE_FAST;
  std::string device = "cpu";  // where the store is booted to, and its experts are computed
  bool json = false;
  bool quiet = false;    // of hotplane's log, warnings and errors only
  uint32_t threads = 0;  // 1 or more after ParseOptions

  std::string prompt = "def main(";
  uint32_t tokens = 200;
  double temperature = 0;  // 0: the most likely byte
  uint64_t seed = 1;
  bool no_cache = false;  // compute the whole text again for every byte
};

// HOTPLANE_USAGE, in a sentence, for anything that is not understood.
Result<Options> ParseOptions(int argc, char** argv);

extern const char* const kHelp;

}  // namespace tinylm
