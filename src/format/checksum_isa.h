// The table of one instruction set's checksum functions. Each table is filled by a translation unit
// of its own, compiled with that set's flags; those units include nothing with inline functions
// that the linker could pick for the rest of the program.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotplane {

struct ChecksumIsa {
  const char* name;
  uint64_t (*hash64)(const void* bytes, size_t count);
  // `out` is the canonical (big-endian) form.
  void (*hash128)(const void* bytes, size_t count, uint8_t out[16]);
  uint64_t (*copy_hash64)(void* destination, const void* source, size_t count);
  // A stream's state may only be used with the table that made it. Null when memory is refused.
  void* (*stream_create)();
  void (*stream_destroy)(void* state);
  void (*stream_update)(void* state, const void* bytes, size_t count);
  void (*stream_finish)(const void* state, uint8_t out[16]);
};

extern const ChecksumIsa kChecksumSse2;
extern const ChecksumIsa kChecksumAvx2;
extern const ChecksumIsa kChecksumAvx512;

}  // namespace hotplane
