#include <exception>
#include <new>
#include <span>
#include <string_view>

#include "base/fault_guard.h"
#include "base/log.h"
#include "base/trace.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "format/checksum.h"
#include "io/env.h"

namespace hotplane::cli {
namespace {

Result<void> Dispatch(const Context& context) {
  switch (context.options.command) {
    case Command::kBuild: return RunBuild(context);
    case Command::kBoot: return RunBoot(context);
    case Command::kWarm: return RunWarm(context);
    case Command::kInspect: return RunInspect(context);
    case Command::kVerify: return RunVerify(context);
    case Command::kExport: return RunExport(context);
    case Command::kGc: return RunGc(context);
    case Command::kSynth: return RunSynth(context);
    case Command::kDoctor: return RunDoctor(context);
    case Command::kReport: return RunReport(context);
    case Command::kFidelity: return RunFidelity(context);
    case Command::kImport: return RunImport(context);
    case Command::kInvalid: break;
  }
  return Fail(Status::Usage("no command was given"));
}

// With --trace, `build` and `boot` are recorded. The file is written after a failure too: that is
// when it is wanted most.
Result<void> DispatchTraced(const Context& context) {
  const Options& options = context.options;
  const bool traced = options.command == Command::kBuild || options.command == Command::kBoot;
  if (!traced || options.trace.empty()) return Dispatch(context);
  // A folder that is not there is found out now rather than after the work.
  HP_TRY(CheckOutput(options.trace, kTraceBegin));
  StartTrace();
  const Result<void> result = Dispatch(context);
  StopTrace();
  const std::string text =
      TraceJson({{"version", std::string("hotplane ") + HOTPLANE_VERSION_TEXT},
                 {"command", options.command == Command::kBuild ? "build" : "boot"},
                 {"path", options.path}});
  const Result<void> written =
      PublishFile(PosixEnv(), options.trace, std::as_bytes(std::span(text)));
  if (!result) return result;
  return written;
}

Result<void> Run(const Options& options) {
  static CancelToken cancel;  // outlives the signal handlers that set it
  InstallSignals(&cancel);
  InstallFaultGuard();
  std::optional<std::string_view> isa;
  if (!options.common.isa.empty()) isa = options.common.isa;
  HP_ASSIGN(const Kernels* const kernels, SelectKernels(isa));
  if (isa) {
    HP_TRY(ForceChecksumIsa(*isa));
    Log(LogLevel::kInfo, "instruction set: {}, as asked", *isa);
  }
  return DispatchTraced({options, *kernels, cancel});
}

// Help and version, or what was wrong with the command line; the latter as JSON too where that was
// asked for.
int Answer(const ParseOutcome& outcome, int argc, char** argv) {
  if (!outcome.error) {
    PrintText(outcome.text);
    return 0;
  }
  CommonOptions common;
  for (int i = 1; i < argc; ++i) common.json |= std::string_view(argv[i]) == "--json";
  return ReportFailure(*outcome.error, common);
}

int Run(int argc, char** argv) {
  const ParseOutcome outcome = ParseCommandLine(argc, argv);
  InstallLog(outcome.options ? outcome.options->common : CommonOptions());
  if (!outcome.warning.empty() && outcome.text.empty()) {
    Log(LogLevel::kWarning, "{}", outcome.warning);
    SurroundingsWarning(outcome.warning);
  }
  if (!outcome.options) return Answer(outcome, argc, argv);
  for (const std::string& note : outcome.notes) Log(LogLevel::kInfo, "{}", note);
  const Result<void> result = Run(*outcome.options);
  int exit_code = 0;
  if (!result) {
    const Options& options = *outcome.options;
    const Status told = WithSettings(result.error(), options.settings);
    exit_code = ReportFailure(WithPathsMeant(told, options.line), options.common);
  }
  SetLogSink({});
  return exit_code;
}

// The one place where an exception may arrive: from the standard library, when memory or threads
// are refused.
int RunCatching(int argc, char** argv) {
  try {
    return Run(argc, argv);
  } catch (const std::bad_alloc&) {
    return ReportFailure(Status::Capacity("out of memory")
                             .Advice("raise the limit (ulimit -v, cgroup), or use fewer --workers"),
                         {});
  } catch (const std::exception& error) {
    return ReportFailure(Status::System("the system refused a resource").Found(error.what()), {});
  }
}

int Main(int argc, char** argv) {
  ReserveStandardDescriptors();
  const int exit_code = RunCatching(argc, argv);
  const Result<void> output = FinishOutput();
  if (output) return exit_code;
  return exit_code != 0 ? exit_code : ReportFailure(output.error(), {});
}

}  // namespace
}  // namespace hotplane::cli

int main(int argc, char** argv) { return hotplane::cli::Main(argc, argv); }
