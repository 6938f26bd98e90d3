#include "base/topology.h"

#include <sched.h>
#include <sys/sysinfo.h>
#include <sys/utsname.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace hotplane {
namespace {

// The value in bytes of "Name:   123 kB" in a /proc file; 0 when there is none.
uint64_t ReadProcKilobytes(const char* path, const std::string& name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind(name + ":", 0) != 0) continue;
    std::istringstream fields(line.substr(name.size() + 1));
    uint64_t kilobytes = 0;
    fields >> kilobytes;
    return kilobytes * 1024;
  }
  return 0;
}

std::string ReadFirstWord(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

// Directories of this process's cgroup (v2), from its own up to the root.
template <typename Visit>
void ForEachCgroup(Visit visit) {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("0::", 0) != 0) continue;
    std::string path = line.substr(3);
    while (true) {
      visit("/sys/fs/cgroup" + (path == "/" ? "" : path));
      if (path.empty() || path == "/") return;
      path = path.substr(0, path.find_last_of('/'));
    }
  }
}

uint64_t ParseLimit(const std::string& word) {
  if (word.empty() || word == "max") return UINT64_MAX;
  return std::strtoull(word.c_str(), nullptr, 10);
}

// A cgroup's limit and what of it is in use, page cache left out.
void ApplyCgroup(uint64_t max, uint64_t used, uint64_t cached, MemoryLimit* limit) {
  if (max == UINT64_MAX) return;
  // A parent with a higher limit can still be the one that is full.
  const uint64_t held = used == UINT64_MAX ? 0 : used - std::min(used, cached);
  limit->available_bytes = std::min(limit->available_bytes, max - std::min(max, held));
  if (max >= limit->total_bytes) return;
  limit->total_bytes = max;
  limit->from_cgroup = true;
}

// Sum of the named counters of a memory.stat file.
uint64_t SumStat(const std::string& path, const std::vector<std::string>& names) {
  std::ifstream stat(path);
  std::string name;
  uint64_t value = 0;
  uint64_t sum = 0;
  while (stat >> name >> value)
    if (std::find(names.begin(), names.end(), name) != names.end()) sum += value;
  return sum;
}

// Version 1: the memory controller has a hierarchy of its own, and memory.stat sums it up.
void ApplyCgroupV1(MemoryLimit* limit) {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const size_t controllers = line.find(':');
    const size_t path = line.find(':', controllers + 1);
    if (path == std::string::npos) continue;
    if (line.substr(controllers + 1, path - controllers - 1) != "memory") continue;
    const std::string directory = "/sys/fs/cgroup/memory" + line.substr(path + 1);
    const std::string stat = directory + "/memory.stat";
    const uint64_t max = SumStat(stat, {"hierarchical_memory_limit"});
    if (max == 0) return;
    ApplyCgroup(max, ParseLimit(ReadFirstWord(directory + "/memory.usage_in_bytes")),
                SumStat(stat, {"total_inactive_file", "total_active_file"}), limit);
    return;
  }
}

}  // namespace

size_t UsableCpuCount() {
  cpu_set_t set;
  size_t count = 1;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) count = static_cast<size_t>(CPU_COUNT(&set));
  ForEachCgroup([&](const std::string& directory) {
    std::ifstream file(directory + "/cpu.max");
    std::string quota;
    uint64_t period = 0;
    if (!(file >> quota >> period) || quota == "max" || period == 0) return;
    const uint64_t cpus = (ParseLimit(quota) + period - 1) / period;
    count = std::min<size_t>(count, std::max<uint64_t>(cpus, 1));
  });
  return std::max<size_t>(count, 1);
}

MemoryLimit ReadMemoryLimit() {
  MemoryLimit limit{ReadProcKilobytes("/proc/meminfo", "MemTotal"),
                    ReadProcKilobytes("/proc/meminfo", "MemAvailable"), false};
  struct sysinfo info;
  if (limit.total_bytes == 0 && sysinfo(&info) == 0) {
    // No descriptor left to open /proc with; this call needs none, and knows no page cache.
    limit.total_bytes = uint64_t{info.totalram} * info.mem_unit;
    limit.available_bytes = (uint64_t{info.freeram} + info.bufferram) * info.mem_unit;
  }
  ForEachCgroup([&](const std::string& directory) {
    ApplyCgroup(ParseLimit(ReadFirstWord(directory + "/memory.max")),
                ParseLimit(ReadFirstWord(directory + "/memory.current")),
                SumStat(directory + "/memory.stat", {"inactive_file", "active_file"}), &limit);
  });
  ApplyCgroupV1(&limit);
  return limit;
}

uint64_t ReadResidentAnonymousBytes() { return ReadProcKilobytes("/proc/self/status", "RssAnon"); }

MachineDescription DescribeMachine() {
  MachineDescription machine{{}, {}, UsableCpuCount(), ReadMemoryLimit()};
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (machine.cpu.empty() && std::getline(file, line))
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos)
      machine.cpu = line.substr(line.find(": ") + 2);
  utsname name;
  if (uname(&name) == 0) machine.kernel = std::string(name.sysname) + " " + name.release;
  return machine;
}

}  // namespace hotplane
