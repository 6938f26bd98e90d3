#include "cli/console.h"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <system_error>

#include "base/format_text.h"
#include "base/json_text.h"
#include "base/log.h"
#include "base/units.h"
#include "engine/report_json.h"
#include "io/env.h"
#include "io/output_place.h"
#include "io/path_kind.h"
#include "store/paths.h"

namespace hotplane::cli {
namespace {

using Clock = std::chrono::steady_clock;

CancelToken* signal_token = nullptr;

std::string surroundings_warning;

bool output_failed = false;
bool output_printed = false;

void HandleSignal(int signal) {
  if (signal_token->cancelled()) _exit(128 + signal);
  signal_token->Cancel(signal == SIGHUP ? SIGTERM : signal);
}

void PrintError(const std::string& text) {
  std::fputs((text + "\n").c_str(), stderr);
  std::fflush(stderr);
}

void WriteResult(const std::string& text) {
  const std::string line = text + "\n";
  output_printed = true;
  if (std::fwrite(line.data(), 1, line.size(), stdout) != line.size() || std::fflush(stdout) != 0)
    output_failed = true;
}

}  // namespace

void InstallLog(const CommonOptions& common) {
  const LogLevel least = common.quiet     ? LogLevel::kWarning
                         : common.verbose ? LogLevel::kDebug
                                          : LogLevel::kInfo;
  SetLogSink([least](LogLevel level, std::string_view line) {
    if (level < least) return;
    const char* const label = level == LogLevel::kError     ? "error: "
                              : level == LogLevel::kWarning ? "warning: "
                                                            : "";
    PrintError(std::string(label) + std::string(line));
  });
}

void InstallSignals(CancelToken* token) {
  signal_token = token;
  struct sigaction action = {};
  action.sa_handler = HandleSignal;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  struct sigaction hangup = {};
  sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

ProgressDisplay::ProgressDisplay(const Progress& progress, const CommonOptions& common,
                                 double stall_seconds)
    : progress_(progress),
      quiet_(common.quiet),
      terminal_(isatty(STDERR_FILENO) == 1),
      stall_seconds_(stall_seconds),
      thread_([this] { Loop(); }) {}

ProgressDisplay::~ProgressDisplay() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
  if (bar_shown_) std::fputs("\r\033[K", stderr);
}

void ProgressDisplay::Loop() {
  const char* phase = nullptr;
  uint64_t done = 0;
  auto phase_start = Clock::now();
  auto last_change = phase_start;
  auto last_look = phase_start;
  std::unique_lock lock(mutex_);
  // A terminal is redrawn often enough to look alive; a pipe gets one line per second.
  const auto period = std::chrono::milliseconds(terminal_ ? 100 : 1000);
  while (!wake_.wait_for(lock, period, [this] { return stopping_; })) {
    const auto now = Clock::now();
    // A gap this long is a process that was stopped, not one that stalls.
    if (now - last_look > 2 * period + std::chrono::seconds(1)) last_change = now;
    last_look = now;
    if (progress_.waiting.load() > 0) last_change = now;
    const char* const current = progress_.phase.load();
    const uint64_t current_done = progress_.bytes_done.load();
    if (current != phase) phase_start = now;
    if (current != phase || current_done != done) last_change = now;
    phase = current;
    done = current_done;
    if (!quiet_) Show(std::chrono::duration<double>(now - phase_start).count());
    const double idle = std::chrono::duration<double>(now - last_change).count();
    if (stall_seconds_ > 0 && progress_.bytes_total > 0 && idle > stall_seconds_) {
      PrintError(
          Text("\nerror: no progress for {:.0f} s while {}, at {} of {}\n"
               "  to fix    look at the disk and at /proc/{}/task/*/stack; what was published "
               "is whole, run the command again to go on",
               idle, phase, FormatBytes(done), FormatBytes(progress_.bytes_total), getpid()));
      std::_Exit(static_cast<int>(StatusCode::kSystem));
    }
  }
}

void ProgressDisplay::Show(double seconds_in_phase) {
  const uint64_t total = progress_.bytes_total;
  const uint64_t done = progress_.bytes_done;
  std::string line = progress_.phase.load();
  if (total > 0) {
    const double share = static_cast<double>(done) / static_cast<double>(total);
    line += Text("  {} of {}  {:3.0f}%  {}", FormatBytes(done), FormatBytes(total), share * 100,
                 FormatRate(done, seconds_in_phase));
    if (done > 0 && seconds_in_phase > 0.5)
      line += Text("  {} left", FormatSeconds(seconds_in_phase * (1 - share) / share));
    if (terminal_) {
      constexpr size_t kBarCells = 24;
      const auto filled = static_cast<size_t>(share * kBarCells);
      line = "[" + std::string(std::min(filled, kBarCells), '#') +
             std::string(kBarCells - std::min(filled, kBarCells), '.') + "] " + line;
    }
  }
  if (terminal_) {
    std::fputs(("\r\033[K" + line).c_str(), stderr);
    std::fflush(stderr);
    bar_shown_ = true;
  } else {
    PrintError(line);
  }
}

Status WithResumeAdvice(const Status& status) {
  const bool ended =
      status.code() == StatusCode::kInterrupted || status.code() == StatusCode::kTerminated;
  if (!ended) return status;
  return Status(status).Advice(
      "what was published is whole: the same command goes on where this one stopped");
}

int ReportFailure(const Status& status, const CommonOptions& common) {
  // One object on stdout: a command that printed its report already has said there what is wrong.
  if (common.json && !output_printed) PrintJson(StatusJson(status));
  PrintError("error: " + status.ToString());
  return status.exit_code();
}

void PrintLine(std::string_view text) { WriteResult(Printable(text)); }

void PrintText(std::string_view text) { WriteResult(PrintableLines(text)); }

void PrintJson(const std::string& json) {
  if (!surroundings_warning.empty()) {
    nlohmann::ordered_json report = nlohmann::ordered_json::parse(json, nullptr, false);
    const auto warnings = report.is_object() ? report.find("warnings") : report.end();
    if (warnings != report.end() && warnings->is_array()) {
      warnings->insert(warnings->begin(), surroundings_warning);
      return WriteResult(JsonText(report));
    }
  }
  WriteResult(json);
}

void SurroundingsWarning(const std::string& warning) { surroundings_warning = warning; }

Result<void> FinishOutput() {
  if (!output_failed) return {};
  return Fail(Status::System("the result could not be written to stdout")
                  .Advice("what the command did stands; only its report is lost"));
}

void ReserveStandardDescriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(descriptor, F_GETFD) != -1) continue;
    // The lowest free number is the closed one. A stdout that cannot be written keeps failing.
    const int flags = descriptor == STDERR_FILENO ? O_WRONLY : O_RDONLY;
    if (open("/dev/null", flags) != descriptor) _exit(static_cast<int>(StatusCode::kSystem));
  }
}

namespace {

// A lock file that is replaced locks nothing any more, a file named as a layer's is taken for it.
Result<void> CheckOutsideGenerations(const std::string& path) {
  std::error_code error;
  const std::string whole = std::filesystem::weakly_canonical(path, error).string();
  if (error) return {};
  std::string folder = ParentPath(whole);
  if (folder.ends_with(Text("/{}", kLocksName))) folder = ParentPath(folder);
  if (PathKindOf(PosixEnv(), folder) != PathKind::kGeneration) return {};
  return Fail(Status::Usage("the file to write lies among the files of a store")
                  .File(path)
                  .Expected(Text("a place outside {}", folder))
                  .Advice("name another place"));
}

}  // namespace

Result<void> CheckOutput(const std::string& path, std::string_view begin) {
  HP_TRY(CheckOutsideGenerations(path));
  HP_TRY(CheckOutputFile(PosixEnv(), path));
  HP_ASSIGN(const FileStat stat, PosixEnv().Stat(path));
  if (stat.type == FileType::kInvalid || (stat.type == FileType::kRegular && stat.bytes == 0))
    return {};
  Status refusal = Status::Usage("the file to write is there, and this command did not write it")
                       .File(path)
                       .Expected(Text("no file, or one that begins with {}", begin.substr(0, 18)))
                       .Advice("name another file, or remove this one");
  if (stat.bytes < begin.size()) return Fail(std::move(refusal));
  HP_ASSIGN(const std::unique_ptr<File> file, PosixEnv().Open(path, OpenMode::kRead));
  std::string found(begin.size(), ' ');
  HP_TRY(ReadFully(*file, 0, std::as_writable_bytes(std::span(found))));
  if (found == begin) return {};
  return Fail(std::move(refusal));
}

}  // namespace hotplane::cli
