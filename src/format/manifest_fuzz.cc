// The sealed texts on hostile bytes: as they are, and sealed anew, so that the JSON behind the seal
// is reached too.
#include <cstdint>

#include "base/check.h"
#include "base/format_text.h"
#include "format/manifest.h"

namespace hotplane {
namespace {

void Decode(std::string_view bytes) {
  // Canonical: what is accepted encodes to the same bytes.
  if (const auto manifest = DecodeManifest(bytes, "fuzz")) {
    HP_CHECK(EncodeManifest(*manifest) == bytes);
  } else {
    HP_CHECK(manifest.error().code() == StatusCode::kData);
  }
  if (const auto record = DecodeSourceRecord(bytes, "fuzz")) {
    HP_CHECK(EncodeSourceRecord(*record) == bytes);
  } else {
    HP_CHECK(record.error().code() == StatusCode::kData);
  }
}

}  // namespace
}  // namespace hotplane

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hotplane;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  Decode(input);
  const size_t seal_bytes = input.find('\n');
  const std::string_view body =
      seal_bytes == std::string_view::npos ? input : input.substr(seal_bytes + 1);
  for (const char* kind : {"hotplane-manifest", "hotplane-source"}) {
    Decode(Text("{} 1 xxh3-128={} bytes={}\n{}", kind, ToHex(Digest(body)), body.size(), body));
  }
  return 0;
}
