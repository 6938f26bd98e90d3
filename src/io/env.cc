// The functions of env.h that need nothing but an Env, so that every Env shares them.
#include "io/env.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "base/format_text.h"
#include "base/units.h"
#include "io/output_place.h"
#include "io/path_kind.h"
#include "io/reader.h"

namespace hotplane {
namespace {

// Direct reads that stopped inside a page cannot go on from there: the kernel refuses the unaligned
// rest with EINVAL. At the end of the file that is no more than the end of the file.
bool StoppedAtEnd(File& file, uint64_t offset) {
  const Result<FileStat> stat = file.Stat();
  return stat && offset >= stat->bytes;
}

Status Truncated(const File& file, uint64_t offset, size_t expected_bytes, size_t found_bytes) {
  return Status::Data("the file ends early")
      .File(file.path())
      .At(offset)
      .Expected(Text("{} bytes", expected_bytes))
      .Found(Text("{} bytes", found_bytes));
}

// NAME_MAX is 255; the prefix, the process id and the counter take at most 39 of them.
constexpr size_t kTempStemBytesMax = 200;

std::string TempPath(const std::string& path) {
  static std::atomic<uint64_t> counter{0};
  const size_t slash = path.rfind('/');
  const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  return JoinPath(ParentPath(path), Text(".tmp-{}-{}-{}", name.substr(0, kTempStemBytesMax),
                                         getpid(), counter.fetch_add(1)));
}

struct Temp {
  std::string path;
  std::unique_ptr<File> file;
};

// A process of another PID namespace can have left or be using the same name: take the next one.
Result<Temp> CreateTemp(Env& env, const std::string& path) {
  constexpr int kAttemptsMax = 1000;
  for (int attempt = 1;; ++attempt) {
    Temp temp{TempPath(path), nullptr};
    Result<std::unique_ptr<File>> file = env.Open(temp.path, OpenMode::kCreate);
    if (file) {
      temp.file = std::move(*file);
      return temp;
    }
    if (file.error().error_number() != EEXIST || attempt == kAttemptsMax)
      return Fail(std::move(file).error());
  }
}

}  // namespace

Result<std::unique_ptr<AsyncReader>> Env::NewReader(const ReaderOptions& options) {
  return NewPreadReader(options, "these files are not the kernel's");
}

Result<void> ReadFully(File& file, uint64_t offset, std::span<std::byte> destination) {
  size_t done = 0;
  while (done < destination.size()) {
    const IoCount count = file.ReadSome(offset + done, destination.subspan(done));
    if (count.error == EINTR) continue;
    const bool unaligned_rest = count.error == EINVAL && done > 0;
    if ((count.error == 0 && count.bytes == 0) ||
        (unaligned_rest && StoppedAtEnd(file, offset + done)))
      return Fail(Truncated(file, offset, destination.size(), done));
    if (count.error != 0)
      return Fail(
          Status::FromErrno(count.error, "cannot read").File(file.path()).At(offset + done));
    done += count.bytes;
  }
  return {};
}

bool IsCached(File& file, uint64_t offset, uint64_t bytes) {
  return file.CachedBytes(offset, bytes).value_or(0) >= bytes - bytes / 64;
}

Result<void> WriteFully(File& file, uint64_t offset, std::span<const std::byte> source) {
  size_t done = 0;
  while (done < source.size()) {
    const IoCount count = file.WriteSome(offset + done, source.subspan(done));
    if (count.error == EINTR) continue;
    // A file system that takes nothing and gives no reason would keep this loop for ever.
    const int error = count.error == 0 && count.bytes == 0 ? EIO : count.error;
    if (error != 0)
      return Fail(Status::FromErrno(error, "cannot write").File(file.path()).At(offset + done));
    done += count.bytes;
  }
  return {};
}

Result<std::vector<std::byte>> ReadWholeFile(Env& env, const std::string& path,
                                             uint64_t bytes_max) {
  HP_ASSIGN(const std::unique_ptr<File> file, env.Open(path, OpenMode::kRead));
  HP_ASSIGN(const FileStat stat, file->Stat());
  if (stat.bytes > bytes_max)
    return Fail(Status::Data("the file is larger than its kind can be")
                    .File(path)
                    .Expected(Text("at most {} bytes", bytes_max))
                    .Found(Text("{} bytes", stat.bytes)));
  std::vector<std::byte> content(stat.bytes);
  HP_TRY(ReadFully(*file, 0, content));
  return content;
}

Result<void> PublishFileInPieces(Env& env, const std::string& path,
                                 const std::function<Result<void>(const FileSink&)>& produce) {
  Result<Temp> made = CreateTemp(env, path);
  if (!made) return Fail(CannotWrite(std::move(made).error(), env, path));
  Temp temp = std::move(*made);
  // Content before name: a rename that reached the disk first would show an empty file after a
  // power cut.
  uint64_t offset = 0;
  Result<void> sunk;
  Result<void> written = produce([&](std::span<const std::byte> piece) {
    if (sunk) sunk = WriteFully(*temp.file, offset, piece);
    offset += piece.size();
    return sunk;
  });
  // A producer that ignores a failed piece must not get a file with a gap published.
  if (written) written = sunk;
  if (written) written = temp.file->Sync();
  temp.file.reset();
  if (written) written = env.Rename(temp.path, path);
  if (!written) {
    (void)env.Remove(temp.path);
    const bool of_temp = written.error().file() == temp.path || written.error().file() == path;
    if (!of_temp) return written;
    return Fail(CannotWrite(std::move(written).error(), env, path));
  }
  return env.SyncDirectory(ParentPath(path));
}

Result<void> PublishFile(Env& env, const std::string& path, std::span<const std::byte> content) {
  return PublishFileInPieces(env, path, [&](const FileSink& sink) { return sink(content); });
}

Result<void> CreateDirectories(Env& env, const std::string& path) {
  HP_ASSIGN(const FileStat stat, env.Stat(path));
  if (stat.type == FileType::kDirectory) return {};
  if (stat.type != FileType::kInvalid)
    return Fail(Status::FromErrno(ENOTDIR, "cannot create the directory")
                    .File(path)
                    .Expected("a directory")
                    .Found(std::string(PathKindText(PathKindOf(env, path))))
                    .Advice("name another directory, or move the file away"));
  const std::string parent = ParentPath(path);
  if (parent != path) HP_TRY(CreateDirectories(env, parent));
  Result<void> created = env.CreateDirectory(path);
  // Another process may have been faster; what counts is that it is there.
  if (!created && created.error().error_number() == EEXIST) {
    HP_ASSIGN(const FileStat now, env.Stat(path));
    if (now.type == FileType::kDirectory) created = {};
  }
  if (!created) return Fail(CannotWrite(std::move(created).error(), env, path));
  return env.SyncDirectory(parent);
}

std::string JoinPath(const std::string& directory, const std::string& name) {
  if (directory.empty()) return name;
  return directory.back() == '/' ? directory + name : directory + "/" + name;
}

std::string ParentPath(const std::string& path) {
  size_t end = path.size();
  while (end > 1 && path[end - 1] == '/') --end;
  const size_t slash = path.rfind('/', end - 1);
  if (end == 0 || slash == std::string::npos) return ".";
  size_t parent_end = slash;
  while (parent_end > 0 && path[parent_end - 1] == '/') --parent_end;
  return parent_end == 0 ? "/" : path.substr(0, parent_end);
}

}  // namespace hotplane
