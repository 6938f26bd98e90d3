#include "boot/source_stamp.h"

#include <span>
#include <vector>

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

}  // namespace

Result<std::string> MakeSourceStamp(Env& env, const std::string& checkpoint_path) {
  HP_ASSIGN(const std::vector<std::string> files, ListCheckpointFiles(env, checkpoint_path));
  std::string stamp = "hotplane source stamp 1\n";
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

bool MatchesSourceStamp(const Generation& generation, const std::string& stamp) {
  const auto stored = ReadWholeFile(generation.env(), StampPath(generation), kStampBytesMax);
  return stored &&
         std::string_view(reinterpret_cast<const char*>(stored->data()), stored->size()) == stamp;
}

}  // namespace hotplane
