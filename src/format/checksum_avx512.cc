#define XXH_INLINE_ALL
#define XXH_VECTOR 3
#define HP_CHECKSUM_TABLE kChecksumAvx512
#define HP_CHECKSUM_NAME "avx512"

#include <immintrin.h>
#include <xxhash.h>

#include <cstring>

#include "format/checksum_isa.h"

static void StreamLine(char* to, const char* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_load_si512(from));
}

#include "format/checksum_variant.inc"
