// What a path looks like, by names alone, no file is opened: so that an error can say what was
// given instead of what was expected, and so that a store or a checkpoint is not written between
// the files of another kind.
#pragma once

#include <cstdint>
#include <string>

#include "io/env.h"

namespace hotplane {

enum class PathKind : uint8_t {
  kInvalid = 0,
  kNothing,  // also what cannot be looked at
  kFile,
  kFolder,  // of none of the kinds below
  kStore,
  kGeneration,  // a store's folder of one generation
  kLayerFile,
  kCheckpoint,  // also a folder of the Hugging Face cache
  kSafetensors,
  kPlanesCache,
};

PathKind PathKindOf(Env& env, const std::string& path);
// Whether a checkpoint's files lie right in the folder, or in its snapshots: also in one that is a
// store.
bool HoldsCheckpoint(Env& env, const std::string& folder);
// "a store", "a checkpoint", ...
std::string_view PathKindText(PathKind kind);

// The first store, or checkpoint, right below the folder `path`; empty: there is none among the
// first names.
std::string FirstInside(Env& env, const std::string& path, PathKind kind);

// PathKindText, and of a folder of no kind what is in it, "a folder, with a store in it: PATH", or
// why it cannot be listed.
std::string DescribePath(Env& env, const std::string& path);

}  // namespace hotplane
