#include "boot/source_stamp.h"

#include <charconv>
#include <span>
#include <utility>
#include <vector>

#include "base/bytes_text.h"
#include "base/format_text.h"
#include "base/log.h"
#include "checkpoint/checkpoint.h"
#include "store/generation_files.h"
#include "store/paths.h"

namespace hotplane {
namespace {

// A hundred bytes per shard, and no checkpoint has ten thousand shards.
constexpr uint64_t kStampBytesMax = 1u << 20;

// Writing one takes milliseconds. Without it the next boot reads headers of the checkpoint: that is
// not worth a longer wait.
constexpr double kStampPatienceSeconds = 2;

std::string StampPath(const Generation& generation) {
  return JoinPath(generation.directory(), kSourceStampName);
}

// The number behind the last tab, which is cut off with it.
template <typename Number>
bool TakeLast(std::string_view& line, Number* number) {
  const size_t tab = line.rfind('\t');
  if (tab == std::string_view::npos) return false;
  const char* const end = line.data() + line.size();
  const auto [stopped, error] = std::from_chars(line.data() + tab + 1, end, *number);
  line = line.substr(0, tab);
  return error == std::errc() && stopped == end;
}

}  // namespace

Result<std::string> MakeSourceStamp(Env& env, const std::string& checkpoint_path) {
  HP_ASSIGN(const std::vector<std::string> files, ListCheckpointFiles(env, checkpoint_path));
  std::string stamp(kSourceStampBegin);
  for (const std::string& file : files) {
    HP_ASSIGN(const FileStat stat, env.Stat(file));
    if (stat.type != FileType::kRegular)
      return Fail(Status::Usage("a shard of the checkpoint is not there")
                      .File(file)
                      .Expected("a regular file"));
    stamp += Text("{}\t{}\t{}\t{}\n", file.substr(ParentPath(file).size()), stat.bytes,
                  stat.modified_ns, stat.inode);
  }
  return stamp;
}

void KeepSourceStamp(const Generation& generation, const std::string& stamp) {
  if (MatchesSourceStamp(generation, stamp)) return;
  const Result<void> published = PublishGenerationFile(
      generation.env(), generation.directory(), kSourceStampName, std::as_bytes(std::span(stamp)),
      ExistingFile::kReplace, {.stall_seconds = kStampPatienceSeconds});
  if (!published) Log(LogLevel::kInfo, "no source stamp was kept: {}", published.error().what());
}

Result<std::vector<StampedShard>> ParseSourceStamp(std::string_view stamp,
                                                   const std::string& file) {
  const auto bad = [&file](size_t line) {
    return Fail(Status::Data(Text("source stamp refused: its line {} is none of a stamp", line))
                    .File(file)
                    .Expected(line == 1 ? std::string(kSourceStampBegin.substr(
                                              0, kSourceStampBegin.size() - 1))
                                        : "name, bytes, modification time, inode by tabs")
                    .Found("something else")
                    .Advice("remove it: the next boot with the checkpoint reads its headers, and "
                            "the next build writes a stamp again"));
  };
  if (!stamp.starts_with(kSourceStampBegin)) return bad(1);
  stamp.remove_prefix(kSourceStampBegin.size());
  std::vector<StampedShard> shards;
  for (size_t line = 2; !stamp.empty(); ++line) {
    const size_t end = stamp.find('\n');
    const std::string_view text = stamp.substr(0, end);
    StampedShard shard;
    std::string_view rest = text;
    if (end == std::string_view::npos || !TakeLast(rest, &shard.inode) ||
        !TakeLast(rest, &shard.modified_ns) || !TakeLast(rest, &shard.bytes) ||
        !rest.starts_with('/'))
      return bad(line);
    shard.name = rest.substr(1);
    shards.push_back(std::move(shard));
    stamp.remove_prefix(end + 1);
  }
  return shards;
}

bool MatchesSourceStamp(const Generation& generation, const std::string& stamp) {
  const auto stored = ReadWholeFile(generation.env(), StampPath(generation), kStampBytesMax);
  return stored && AsText(*stored) == stamp;
}

}  // namespace hotplane
