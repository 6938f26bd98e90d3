#include "base/result_file.h"

#include <cerrno>
#include <fstream>

namespace hotplane {
namespace {

Result<void> Put(const std::string& path, const std::string& text, std::ios::openmode mode) {
  if (path.empty()) return {};
  errno = 0;
  std::ofstream file(path, mode);
  file << text << std::flush;
  if (file) return {};
  return Fail(Status::FromErrno(errno != 0 ? errno : EIO, "the result file cannot be written")
                  .File(path)
                  .Expected("a file that can be made or replaced, in a folder that is there")
                  .Advice("name another file, or make its folder first"));
}

}  // namespace

Result<void> CheckResultFile(const std::string& path) { return Put(path, "", std::ios::app); }

Result<void> WriteResultFile(const std::string& path, const std::string& text) {
  return Put(path, text, std::ios::trunc);
}

}  // namespace hotplane
