// What the names of a store's and a checkpoint's files are made of: for those that write and parse
// them, and for those that only recognise them. docs/format/store-layout.md is the prose of a
// store's.
#pragma once

#include <cstddef>
#include <string_view>

namespace hotplane {

// A generation's folder: lower-case hexadecimal digits.
inline constexpr size_t kGenerationNameDigits = 32;
inline constexpr char kManifestName[] = "manifest";
// "layer-0007.base", "layer-0007.rank1.delta-quintal"
inline constexpr std::string_view kLayerPrefix = "layer-";
inline constexpr std::string_view kBaseSuffix = ".base";
inline constexpr std::string_view kDeltaMark = ".delta-";

inline constexpr std::string_view kSafetensorsSuffix = ".safetensors";
inline constexpr std::string_view kShardIndexSuffix = ".safetensors.index.json";
inline constexpr char kConfigName[] = "config.json";
// Of a folder of the Hugging Face cache.
inline constexpr char kSnapshotsName[] = "snapshots";

}  // namespace hotplane
