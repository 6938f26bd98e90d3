// What a person sees: progress, log lines, errors, tables. Logs and progress go to stderr, results
// to stdout.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "base/cancel.h"
#include "base/progress.h"
#include "base/status.h"
#include "cli/options.h"

namespace hotplane::cli {

// Routes the library's log lines to stderr: errors and warnings always, information unless quiet,
// debug when verbose.
void InstallLog(const CommonOptions& common);

// Sets the token on SIGINT, SIGTERM and SIGHUP (unless ignored, as under nohup); a second signal
// ends the process at once. SIGPIPE and SIGXFSZ are ignored: the failing write reports them.
void InstallSignals(CancelToken* token);

// Shows a Progress from its own thread while it lives: a bar on a terminal, a line per second
// otherwise, nothing when quiet. After `stall_seconds` without a byte of progress in a phase with a
// total it prints what it waits for and ends the process with exit code 1; the store tolerates that
// like any crash. 0: waits for ever.
class ProgressDisplay {
 public:
  ProgressDisplay(const Progress& progress, const CommonOptions& common, double stall_seconds);
  ~ProgressDisplay();

 private:
  void Loop();
  void Show(double seconds_in_phase);

  const Progress& progress_;
  bool quiet_;
  bool terminal_;
  double stall_seconds_;
  bool bar_shown_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

// What a build that a signal ended says beside that: running it again is all there is to do.
Status WithResumeAdvice(const Status& status);

// Prints the error as a person or, with --json, a program wants it, and returns its exit code.
int ReportFailure(const Status& status, const CommonOptions& common);

// To stdout. What could not be written is remembered: see FinishOutput. Names from outside stand in
// what people read: no control character of theirs, a line break included, reaches the terminal.
void PrintLine(std::string_view text);
// Text of several lines, whose names are printable already.
void PrintText(std::string_view text);
// As it is: JSON escapes what it holds. A report that has `warnings` gets SurroundingsWarning's
// first among them.
void PrintJson(const std::string& json);

// What was wrong before the command began, one line, for the reports that it prints. Called once,
// before any of them.
void SurroundingsWarning(const std::string& warning);

// Called once, last: kSystem when any result could not be written to stdout.
Result<void> FinishOutput();

// Opens /dev/null for each of the three standard descriptors that is closed, before any file of a
// store could get its number and be written to by a log line. Writing results to a closed stdout
// stays an error.
void ReserveStandardDescriptors();

// kUsage when `path` is a file that does not begin with `begin`: what a command writes may replace
// what it wrote before, and nothing else. A folder that is not there is found out too.
Result<void> CheckOutput(const std::string& path, std::string_view begin);

}  // namespace hotplane::cli
