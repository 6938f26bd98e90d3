// What the C API's handles hold, and how its calls end. No exception and no C++ type crosses the
// boundary.
#pragma once

#include <hotplane/hotplane.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/cancel.h"
#include "base/format_text.h"
#include "base/status.h"
#include "engine/engine.h"

namespace hotplane::capi {

// Shared by the engine's handle, its boot thread and its records; the last of them frees it.
struct EngineState {
  enum class Phase : uint8_t { kIdle, kBooting, kEnded };

  CancelToken cancel;
  std::unique_ptr<Engine> engine;
  std::string generation_text;
  hotplane_layer_callback on_layer = nullptr;
  void* user = nullptr;

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  Phase phase = Phase::kIdle;
  std::vector<hotplane_layer> layers;  // published, in order
  std::optional<Status> failure;       // of the boot
  std::string plan_json;               // written once, before the boot begins
  std::string stats_json = "{}";       // written once, when the boot has succeeded

  // Once; on the calling thread. The result is `failure` too.
  void RunBoot();
  bool CalledByItsOwnCallback() const;
};

// Keeps the failure for hotplane_last_error and hotplane_get_last_error of this thread.
hotplane_code Failed(const Status& status);

// Nothing of ours throws but allocation; out of memory is an answer too.
template <typename Body>
hotplane_code Guarded(const Body& body) {
  try {
    const Result<void> result = body();
    return result ? HOTPLANE_OK : Failed(result.error());
  } catch (const std::bad_alloc&) {
    return Failed(Status::Capacity("out of memory"));
  } catch (...) {
    return Failed(Status::System("an unexpected exception was stopped at the C API"));
  }
}

inline Result<void> Need(bool given, const char* what) {
  if (given) return {};
  return Fail(Status::Usage(what).Found("NULL"));
}

// Structs larger than this are not ours, whatever version wrote them.
inline constexpr size_t kStructBytesMax = 4096;

// Writes what the caller's struct has room for: it may be older or newer than ours. Its size must
// reach `first_version_bytes`.
template <typename Struct>
Result<void> FillStruct(const Struct& full, size_t first_version_bytes, Struct* out) {
  HP_TRY(Need(out != nullptr, "a struct to fill is needed"));
  const size_t bytes = out->struct_bytes;
  if (bytes < first_version_bytes || bytes > kStructBytesMax)
    return Fail(Status::Usage("a struct has an impossible size")
                    .Expected(Text("{} bytes or more", first_version_bytes))
                    .Found(Text("{} bytes", bytes))
                    .Advice("fill it with its _init function"));
  Struct copy = full;
  copy.struct_bytes = bytes;
  std::memcpy(static_cast<void*>(out), &copy, std::min(bytes, sizeof(copy)));
  return {};
}

template <typename Struct>
void InitStruct(Struct* out) {
  if (out == nullptr) return;
  *out = {};
  out->struct_bytes = sizeof(*out);
}

}  // namespace hotplane::capi

struct hotplane_engine {
  std::shared_ptr<hotplane::capi::EngineState> state;
  std::thread boot;  // guarded by state->mutex
};
