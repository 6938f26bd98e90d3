// The command line that was probably meant, where a path stands in the place of another.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace hotplane::cli {

// One word of the command line after the command's name, or an option with its value.
struct Word {
  std::string option;  // as it was given, "--store"; empty: an argument
  std::string value;   // of the argument, or of the option
  bool known = true;   // false: the command has no such option
  bool valued = false;
};

struct CommandLine {
  std::string command;
  std::vector<Word> words;

  const std::string* ValueOf(const std::string& option) const;  // null: not given
};

// The command line as one would type it, quoted for a shell where that is needed.
std::string TextOf(const CommandLine& line);

// Whether an option of this name, which some command may not have, would come with a value.
bool NamesAPath(const std::string& option);

// Of a command line that was refused: the store, or the checkpoint, given by an option where the
// command takes it as its argument, the other way round, or by another command's option. With
// HOTPLANE_STORE in the place of an argument that is missing. None where it is none of these.
std::optional<Status> MisplacedPath(const CommandLine& line);

// Of a command that failed by wrong usage over a path that it was given: when that is a checkpoint
// in the place of a store, or the other way round, the command line that was probably meant is in
// the advice. A folder that is both is right in both places.
Status WithPathsMeant(const Status& status, const CommandLine& line);

}  // namespace hotplane::cli
