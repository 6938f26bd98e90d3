// One function per command. Each prints its result to stdout and returns, or fails with the Status
// to report.
#pragma once

#include "base/cancel.h"
#include "base/status.h"
#include "cli/options.h"
#include "quant/quantize.h"
#include "store/store.h"

namespace hotplane::cli {

struct Context {
  const Options& options;
  const Kernels& kernels;  // --isa, HOTPLANE_ISA, or the best
  CancelToken& cancel;
};

// How a command opens a generation: the wait for a running gc ends by a signal or as a stall.
inline Store::OpenOptions OpenOptionsOf(const Context& context, bool read_only = false) {
  return {.cancel = &context.cancel,
          .read_only = read_only,
          .stall_seconds = context.options.stall_seconds};
}

Result<void> RunBuild(const Context& context);
Result<void> RunBoot(const Context& context);
Result<void> RunWarm(const Context& context);
Result<void> RunInspect(const Context& context);
Result<void> RunVerify(const Context& context);
Result<void> RunExport(const Context& context);
Result<void> RunGc(const Context& context);
Result<void> RunSynth(const Context& context);
Result<void> RunDoctor(const Context& context);
Result<void> RunReport(const Context& context);
Result<void> RunFidelity(const Context& context);
Result<void> RunImport(const Context& context);

}  // namespace hotplane::cli
