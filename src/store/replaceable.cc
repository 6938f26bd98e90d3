#include "store/replaceable.h"

#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "base/format_text.h"
#include "format/layer_file.h"

namespace hotplane {

Result<void> CheckReplaceable(Env& env, const std::string& path, uint32_t layer) {
  HP_ASSIGN(const FileStat stat, env.Stat(path));
  if (stat.type == FileType::kDirectory)
    return Fail(Status::Data(Text("a directory is in the place of layer {}'s file", layer))
                    .File(path)
                    .Expected("a layer file, or nothing")
                    .Found("a directory")
                    .Advice("move it away: nothing that hotplane makes is a directory there"));
  if (stat.type != FileType::kRegular || stat.bytes < kHeaderBytes) return {};
  const Result<std::unique_ptr<File>> file = env.Open(path, OpenMode::kRead);
  std::vector<std::byte> page(kHeaderBytes);
  if (!file || !ReadFully(**file, 0, page) || !IsOtherVersion(page)) return {};
  uint32_t version = 0;
  std::memcpy(&version, page.data() + offsetof(DiskLayerHeader, version), sizeof(version));
  return Fail(Status::Data(Text("layer {} was built by a release with another store format", layer))
                  .File(path)
                  .At(offsetof(DiskLayerHeader, version))
                  .Expected(Text("format version {}", kLayerFormatVersion))
                  .Found(Text("format version {}", version))
                  .Advice(kOtherVersionAdvice));
}

}  // namespace hotplane
