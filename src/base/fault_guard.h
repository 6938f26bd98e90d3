// Reading a mapped file whose disk fails or which is truncated raises SIGBUS. A guarded call turns
// the signal into a return value, so that one bad file never ends the process.
#pragma once

#include <cstddef>
#include <span>

namespace hotplane {

// Installs the process-wide SIGBUS handler, once; later calls do nothing. Signals that do not
// belong to a guarded call go to the handler that was there before. Programs that own their signals
// do not call it: guarded calls then report not installed and the callers read with pread instead.
void InstallFaultGuard();
bool FaultGuardInstalled();

// Runs body(context); false when it was cut short by a SIGBUS at an address inside `range`. The
// body must own nothing that needs destruction: it is left by a jump. REQUIRES
// FaultGuardInstalled(). Not nested.
bool CallGuarded(std::span<const std::byte> range, void (*body)(void* context), void* context);

}  // namespace hotplane
