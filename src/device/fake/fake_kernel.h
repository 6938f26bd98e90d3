// Kernels of the fake CUDA driver: functions of the host. Folders above this one add theirs.
#pragma once

#include <functional>

namespace hotplane {

struct FakeKernel {
  const char* name;
  // Of a launch of so many blocks. The arguments are read now; the work is done when the result is
  // called.
  std::function<void()> (*work)(unsigned blocks, void** arguments);
};

// `kernel` lives on. At static initialization.
struct FakeKernelAdded {
  explicit FakeKernelAdded(const FakeKernel& kernel);
};

}  // namespace hotplane
