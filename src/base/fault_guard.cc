#include "base/fault_guard.h"

#include <atomic>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <mutex>

#include "base/check.h"

namespace hotplane {
namespace {

struct Guard {
  sigjmp_buf environment;
  uintptr_t begin;
  uintptr_t end;
};

// constinit thread_local without a dynamic initializer: safe to read in a signal handler.
constinit thread_local Guard* tls_guard = nullptr;

std::atomic<bool> installed{false};
struct sigaction previous_action;

void HandleBusError(int signal, siginfo_t* info, void* context) {
  Guard* const guard = tls_guard;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (guard != nullptr && address >= guard->begin && address < guard->end) {
    tls_guard = nullptr;
    siglongjmp(guard->environment, 1);
  }
  if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
    previous_action.sa_sigaction(signal, info, context);
  } else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
    previous_action.sa_handler(signal);
  } else {
    // A fault is raised again by the access itself when we return, a sent signal only by sending it
    // again.
    std::signal(SIGBUS, SIG_DFL);
    if (info->si_code <= 0) raise(signal);
  }
}

}  // namespace

void InstallFaultGuard() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action = {};
    action.sa_sigaction = HandleBusError;
    // SA_NODEFER: the handler is left by a jump, so the signal must not stay blocked.
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    installed = sigaction(SIGBUS, &action, &previous_action) == 0;
  });
}

bool FaultGuardInstalled() { return installed.load(std::memory_order_relaxed); }

bool CallGuarded(std::span<const std::byte> range, void (*body)(void* context), void* context) {
  HP_CHECK(tls_guard == nullptr);
  Guard guard;
  guard.begin = reinterpret_cast<uintptr_t>(range.data());
  guard.end = guard.begin + range.size();
  if (sigsetjmp(guard.environment, 0) != 0) return false;
  tls_guard = &guard;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  body(context);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  tls_guard = nullptr;
  return true;
}

}  // namespace hotplane
