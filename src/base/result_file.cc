#include "base/result_file.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>

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

Result<void> CheckResultFile(const std::string& path) {
  std::error_code ignored;
  const bool there = std::filesystem::exists(path, ignored);
  HP_TRY(Put(path, "", std::ios::app));
  // Behind a link that led nowhere the file is elsewhere, and the link is not ours.
  if (!there && !path.empty())
    std::filesystem::remove(std::filesystem::canonical(path, ignored), ignored);
  return {};
}

Result<void> WriteResultFile(const std::string& path, const std::string& text) {
  return Put(path, text, std::ios::trunc);
}

}  // namespace hotplane
