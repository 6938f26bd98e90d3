#define XXH_INLINE_ALL
#define XXH_VECTOR 1
#define HP_CHECKSUM_TABLE kChecksumSse2
#define HP_CHECKSUM_NAME "sse2"

#include <immintrin.h>
#include <xxhash.h>

#include <cstring>

#include "format/checksum_isa.h"

static void StreamLine(char* to, const char* from) {
  for (size_t i = 0; i < 64; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
}

#include "format/checksum_variant.inc"
