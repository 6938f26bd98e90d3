// What this process may use of the machine: CPUs and memory, cgroup limits included.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace hotplane {

// CPUs in this process's affinity mask, at most the cgroup's quota rounded up; at least 1.
size_t UsableCpuCount();

struct MemoryLimit {
  uint64_t total_bytes;  // the host's RAM, or the cgroup's limit where that is lower
  uint64_t
      available_bytes;  // of it, what can be had without swapping (page cache counts as available)
  bool from_cgroup;     // total_bytes is a cgroup's limit
};
MemoryLimit ReadMemoryLimit();

// Anonymous resident memory of this process (RssAnon of /proc/self/status); 0 where that is not
// readable.
uint64_t ReadResidentAnonymousBytes();

// What figures are told beside. Texts are empty where the system does not tell.
struct MachineDescription {
  std::string cpu;     // "Intel(R) Xeon(R) ..."
  std::string kernel;  // "Linux 6.1.0"
  size_t cores;        // UsableCpuCount
  MemoryLimit memory;
};
MachineDescription DescribeMachine();

}  // namespace hotplane
