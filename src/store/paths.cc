#include "store/paths.h"

#include <unistd.h>

#include <charconv>
#include <chrono>

#include "base/format_text.h"
#include "base/number_text.h"

namespace hotplane {
namespace {

constexpr std::string_view kRankPrefix = ".rank";
constexpr std::string_view kSourceSuffix = "source";
static_assert(kGenerationNameDigits == 2 * sizeof(Digest128));

// Not std::random_device: a static libstdc++ takes arc4random for it, which came with glibc 2.36.
uint32_t RandomNumber() {
  uint32_t number = 0;
  if (getentropy(&number, sizeof(number)) == 0) return number;
  return static_cast<uint32_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

// The number that `name` begins with, spelled as `spell` does; it is cut off.
template <typename Spell>
std::optional<uint32_t> TakeNumber(std::string_view& name, std::string_view prefix, Spell spell) {
  if (!name.starts_with(prefix)) return std::nullopt;
  uint32_t number = 0;
  const char* const first = name.data() + prefix.size();
  const auto [end, error] = std::from_chars(first, name.data() + name.size(), number);
  if (error != std::errc{}) return std::nullopt;
  const std::string_view taken = name.substr(0, static_cast<size_t>(end - name.data()));
  if (taken != spell(number)) return std::nullopt;
  name.remove_prefix(taken.size());
  return number;
}

// "layer-0007" or "layer-0007.rank1" at the start of `name`, which is cut off. A rank that is
// spelled otherwise is left in `name`.
std::optional<LayerName> TakeStem(std::string_view& name) {
  const std::optional<uint32_t> layer = TakeNumber(name, kLayerPrefix, LayerStem);
  if (!layer) return std::nullopt;
  LayerName taken;
  taken.layer = *layer;
  taken.rank =
      TakeNumber(name, kRankPrefix, [](uint32_t rank) { return Text("{}{}", kRankPrefix, rank); });
  return taken;
}

}  // namespace

std::string LayerStem(uint32_t layer) { return Text("{}{:04}", kLayerPrefix, layer); }

std::string ShardStem(uint32_t layer, std::optional<uint32_t> rank) {
  return rank ? Text("{}{}{}", LayerStem(layer), kRankPrefix, *rank) : LayerStem(layer);
}

std::string LayerFileName(uint32_t layer, std::optional<uint32_t> rank, Encoding encoding) {
  return Text("{}.{}", ShardStem(layer, rank), EncodingName(encoding));
}

std::string SourceRecordName(uint32_t layer) {
  return Text("{}.{}", LayerStem(layer), kSourceSuffix);
}

std::optional<LayerName> ParseLayerName(std::string_view name) {
  std::optional<LayerName> taken = TakeStem(name);
  if (!taken || !name.starts_with('.')) return std::nullopt;
  name.remove_prefix(1);
  if (name == kSourceSuffix && !taken->rank) return taken;
  for (const Encoding encoding : kEncodings) {
    if (name != EncodingName(encoding)) continue;
    taken->encoding = encoding;
    return taken;
  }
  return std::nullopt;
}

std::optional<LayerName> ParseLayerLock(std::string_view name) {
  const std::optional<LayerName> taken = TakeStem(name);
  return name.empty() ? taken : std::nullopt;
}

std::string TemporaryName(std::string_view final_name) {
  return Text("{}{}-{}-{:08x}", kTemporaryPrefix, final_name, getpid(), RandomNumber());
}

std::optional<TemporaryParts> ParseTemporaryName(std::string_view name) {
  if (!name.starts_with(kTemporaryPrefix)) return std::nullopt;
  name.remove_prefix(kTemporaryPrefix.size());
  const size_t random = name.rfind('-');
  if (random == std::string_view::npos || random == 0) return std::nullopt;
  const size_t process = name.rfind('-', random - 1);
  if (process == std::string_view::npos) return std::nullopt;
  const auto number = ParseDecimal(name.substr(process + 1, random - process - 1));
  if (!number) return std::nullopt;
  return TemporaryParts{std::string(name.substr(0, process)), *number};
}

std::optional<std::string> LockOfTemporary(std::string_view name) {
  if (!name.starts_with(kTemporaryPrefix)) return std::nullopt;
  name.remove_prefix(kTemporaryPrefix.size());
  const std::optional<LayerName> taken = TakeStem(name);
  if (!taken || !name.starts_with('.')) return std::nullopt;
  return ShardStem(taken->layer, taken->rank);
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
