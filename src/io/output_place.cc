#include "io/output_place.h"

#include <unistd.h>

#include <cerrno>
#include <memory>
#include <utility>

#include "base/format_text.h"
#include "io/path_kind.h"

namespace hotplane {
namespace {

struct Remedy {
  std::string expected;
  std::string advice;
};

Remedy MissingFolder(Env& env, const std::string& folder) {
  const Result<FileStat> stat = env.Stat(folder);
  if (stat && stat->type == FileType::kDirectory)
    return {"a folder that takes new files", "name another place"};
  return {Text("the folder {}", folder),
          Text("make it first (mkdir -p), or name another place than {}", folder)};
}

Remedy RemedyOf(int error, Env& env, const std::string& path) {
  const std::string parent = ParentPath(path);
  switch (error) {
    case ENOENT: return MissingFolder(env, parent);
    case ENOTDIR: return {Text("{} to be a folder", parent), "name another place"};
    case EACCES:
    case EPERM:
      return {"a folder in which this user may make files",
              Text("let user {} write in {}, or name another place", geteuid(), parent)};
    case EROFS:
      return {"a file system that is mounted for writing",
              Text("name another place, or mount the file system of {} for writing", parent)};
    case ENOSPC: return {"room on the file system", "free space, or name another place"};
    case EDQUOT: return {"room within the quota", "free space, or name another place"};
    case ENAMETOOLONG: return {"a shorter name", "name another place"};
    default: return {};
  }
}

}  // namespace

std::string PermissionAdvice(int error) {
  if (error == EROFS) return "mount this file system for writing, or take a place on another one";
  if (error != EACCES && error != EPERM) return "";
  return Text(
      "let user {} do that: look at the permissions of this path and of the folders above "
      "it (chmod, chown); or run as a user who may",
      geteuid());
}

Status CannotWrite(Status status, Env& env, const std::string& path) {
  const auto [expected, advice] = RemedyOf(status.error_number(), env, path);
  if (status.expected().empty()) (void)std::move(status).Expected(expected);
  if (status.advice().empty() || status.advice() == PermissionAdvice(status.error_number()))
    (void)std::move(status).Advice(advice);
  return std::move(status).File(path);
}

Result<void> CheckOutputFile(Env& env, const std::string& path) {
  const Result<FileStat> looked = env.Stat(path);
  if (!looked) return Fail(CannotWrite(looked.error(), env, path));
  const FileStat stat = *looked;
  if (stat.type != FileType::kInvalid && stat.type != FileType::kRegular) {
    const bool folder = stat.type == FileType::kDirectory;
    return Fail(Status::Usage("the output is to be a file")
                    .File(path)
                    .Expected("a new name, or a file to replace")
                    .Found(folder ? DescribePath(env, path) : "a special file")
                    .Advice(folder ? Text("name a file in it: {}", JoinPath(path, "NAME"))
                                   : "name another place"));
  }
  const std::string name = path.substr(path.rfind('/') + 1);
  if (name.empty())
    return Fail(Status::Usage("the output is to be a file")
                    .File(path)
                    .Expected("the name of a file")
                    .Found("the name of a folder, which ends with /")
                    .Advice("leave the / out, or name a file in the folder"));
  const std::string probe = JoinPath(ParentPath(path), Text(".tmp-{}-{}", name, getpid()));
  const Result<std::unique_ptr<File>> made = env.Open(probe, OpenMode::kCreate);
  if (made) return env.Remove(probe);
  if (made.error().error_number() == EEXIST) return {};  // left by another process of this number
  return Fail(CannotWrite(made.error(), env, path));
}

}  // namespace hotplane
