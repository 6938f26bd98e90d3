// One function per command. Each prints its result to stdout and returns, or fails with the Status
// to report.
#pragma once

#include "base/cancel.h"
#include "base/status.h"
#include "cli/options.h"
#include "quant/quantize.h"

namespace hotplane::cli {

struct Context {
  const Options& options;
  const Kernels& kernels;  // --isa, HOTPLANE_ISA, or the best
  CancelToken& cancel;
};

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

}  // namespace hotplane::cli
