#include "base/topology.h"

#include <sched.h>
#include <sys/utsname.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

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
  ForEachCgroup([&](const std::string& directory) {
    const uint64_t max = ParseLimit(ReadFirstWord(directory + "/memory.max"));
    if (max >= limit.total_bytes) return;
    const uint64_t used = ParseLimit(ReadFirstWord(directory + "/memory.current"));
    uint64_t cached = 0;
    std::ifstream stat(directory + "/memory.stat");
    std::string name;
    uint64_t value = 0;
    while (stat >> name >> value)
      if (name == "inactive_file" || name == "active_file") cached += value;
    const uint64_t held = used == UINT64_MAX ? 0 : used - std::min(used, cached);
    limit.total_bytes = max;
    limit.from_cgroup = true;
    limit.available_bytes = std::min(limit.available_bytes, max - std::min(max, held));
  });
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
