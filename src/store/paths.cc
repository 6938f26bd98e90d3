#include "store/paths.h"

#include <unistd.h>

#include <charconv>
#include <random>

#include "base/format_text.h"

namespace hotplane {
namespace {

constexpr std::string_view kStemPrefix = "layer-";
constexpr std::string_view kSourceSuffix = "source";

// The number of "layer-0007" at the start of `name`, which is cut off.
std::optional<uint32_t> TakeStem(std::string_view& name) {
  if (!name.starts_with(kStemPrefix)) return std::nullopt;
  uint32_t layer = 0;
  const char* const first = name.data() + kStemPrefix.size();
  const auto [end, error] = std::from_chars(first, name.data() + name.size(), layer);
  if (error != std::errc{}) return std::nullopt;
  const std::string_view stem = name.substr(0, static_cast<size_t>(end - name.data()));
  if (stem != LayerStem(layer)) return std::nullopt;
  name.remove_prefix(stem.size());
  return layer;
}

}  // namespace

std::string LayerStem(uint32_t layer) { return Text("{}{:04}", kStemPrefix, layer); }

std::string LayerFileName(uint32_t layer, Encoding encoding) {
  return Text("{}.{}", LayerStem(layer), EncodingName(encoding));
}

std::string SourceRecordName(uint32_t layer) {
  return Text("{}.{}", LayerStem(layer), kSourceSuffix);
}

std::optional<LayerName> ParseLayerName(std::string_view name) {
  const std::optional<uint32_t> layer = TakeStem(name);
  if (!layer || !name.starts_with('.')) return std::nullopt;
  name.remove_prefix(1);
  if (name == kSourceSuffix) return LayerName{*layer, Encoding::kInvalid};
  for (const Encoding encoding : kEncodings) {
    if (name == EncodingName(encoding)) return LayerName{*layer, encoding};
  }
  return std::nullopt;
}

std::string TemporaryName(std::string_view final_name) {
  std::random_device entropy;
  return Text("{}{}-{}-{:08x}", kTemporaryPrefix, final_name, getpid(), entropy());
}

std::optional<uint32_t> LayerOfTemporary(std::string_view name) {
  if (!name.starts_with(kTemporaryPrefix)) return std::nullopt;
  name.remove_prefix(kTemporaryPrefix.size());
  const std::optional<uint32_t> layer = TakeStem(name);
  if (!layer || !name.starts_with('.')) return std::nullopt;
  return layer;
}

bool IsGenerationTemporary(std::string_view name) {
  if (!name.starts_with(kTemporaryPrefix)) return false;
  const std::string_view final_name = name.substr(kTemporaryPrefix.size());
  return final_name.starts_with(Text("{}-", kManifestName)) ||
         final_name.starts_with(Text("{}-", kSourceStampName));
}

std::optional<Digest128> ParseGenerationName(std::string_view name) {
  const Result<Digest128> digest = ParseDigest(name);
  if (!digest || ToHex(*digest) != name) return std::nullopt;
  return *digest;
}

}  // namespace hotplane
