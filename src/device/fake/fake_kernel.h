// Kernels of the fake CUDA driver: functions of the host. Folders above this one add theirs.
#pragma once

#include <functional>

namespace hotplane {

struct FakeLaunch {
  unsigned blocks = 0;
  unsigned threads = 0;       // of a block
  unsigned shared_bytes = 0;  // dynamic, of a block
  void** arguments = nullptr;
};

struct FakeKernel {
  const char* name;
  // The arguments are read now; the work is done when the result is called.
  std::function<void()> (*work)(const FakeLaunch& launch);
};

// `kernel` lives on. At static initialization.
struct FakeKernelAdded {
  explicit FakeKernelAdded(const FakeKernel& kernel);
};

}  // namespace hotplane
