// Options that the environment gave.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace hotplane::cli {

// One option's value that came from a variable.
struct Setting {
  std::string variable;  // the one that was set: ours, or the reference system's
  std::string value;
  std::string option;  // "--workers"
};

// What the variable `ours` of `option`, or else the reference system's of the same meaning, is set
// to. An empty variable counts as none. Of a variable that another wins over, a line for the log is
// appended to `notes`.
std::vector<Setting> SettingOf(const std::string& option, const std::string& ours,
                               std::vector<std::string>* notes);

// What is wrong with the environment as a whole: variables HOTPLANE_... that are set and that
// nothing reads, each with the nearest that is, in one line; empty when there are none.
// `of_options` are those that options stand for.
std::string UnknownVariables(const std::vector<std::string>& of_options);

// For the log: which variable stands for which option.
std::string Describe(const Setting& setting);

// "HOTPLANE_WORKERS=abc in the environment is not what --workers takes".
Status RefusedSetting(const Setting& setting, const std::string& expected);

// A failed command's status, with the variables that set what it is about. Those are the settings
// whose option it names, as a whole word, or whose value is its file or is quoted in it. What its
// advice names counts unless it is wrong usage, and never in a command line.
Status WithSettings(const Status& status, const std::vector<Setting>& settings);

}  // namespace hotplane::cli
