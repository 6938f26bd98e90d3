#define XXH_INLINE_ALL
#define XXH_VECTOR 2
#define HP_CHECKSUM_TABLE kChecksumAvx2
#define HP_CHECKSUM_NAME "avx2"

#include <immintrin.h>
#include <xxhash.h>

#include <cstring>

#include "format/checksum_isa.h"

static void StreamLine(char* to, const char* from) {
  for (size_t i = 0; i < 64; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_load_si256(reinterpret_cast<const __m256i*>(from + i)));
  }
}

#include "format/checksum_variant.inc"
