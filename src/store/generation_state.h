// What a Generation holds; shared by the files that implement it.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/bytes_text.h"
#include "store/layer_reader.h"
#include "store/store.h"

namespace hotplane {

// A manifest is a few hundred bytes per layer, a source record a hundred per tensor.
inline constexpr uint64_t kSealedTextBytesMax = 64u << 20;

// What all ranks of a generation share.
struct Generation::State {
  Env* env = nullptr;
  std::string directory;
  Digest128 id{};
  Manifest manifest;
  Digest128 manifest_digest{};
  std::unique_ptr<FileLock> users_lock;  // null: the file system refused

  std::string LayerPath(uint32_t layer, uint32_t rank, Encoding encoding) const;
  // kUsage when the model has no such layer.
  Result<LayerExpectation> Expect(uint32_t layer, uint32_t rank, Encoding encoding) const;
  // Takes the lock of this name under locks/ and removes the temporaries that are its holder's.
  Result<std::unique_ptr<FileLock>> Lock(const std::string& name, LockWait wait,
                                         const std::string& what, const LockWaiting& waiting) const;
};

// The writer behind Generation::CreateLayer.
Result<std::unique_ptr<LayerFileWriter>> CreateLayerFile(Env& env, const LayerExpectation& target);

}  // namespace hotplane
