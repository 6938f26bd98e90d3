// records STORE: reads the FP4 records of single experts, directly and through a cache. No boot is
// needed for that; after one, base codes come from its memory.
//
//   c++ -std=c++17 records.cpp $(pkg-config --cflags --libs hotplane) -o records
#include <cstdio>
#include <hotplane/engine.hpp>

namespace api = hotplane::api;

namespace {

int Fail(const api::Error& error) {
  std::fprintf(stderr, "%s\n", error.text.c_str());
  return error.code;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: records STORE\n");
    return HOTPLANE_USAGE;
  }
  api::BootOptions options;
  options.full_cache_bytes = 64 << 20;
  const auto engine = api::Engine::Open(argv[1], options);
  if (!engine) return Fail(engine.error());

  const auto layers = engine->DescribeLayers();
  if (!layers) return Fail(layers.error());
  for (const hotplane_layer_info& layer : *layers) {
    std::printf("layer %u: %u experts, delta tier %s\n", layer.ordinal, layer.experts,
                layer.delta == HOTPLANE_PRESENT ? "present" : "not there");
    if (layer.delta != HOTPLANE_PRESENT) continue;

    // Into memory of our own: what an upload to a device would start from.
    const auto bytes = engine->ReadRecord(HOTPLANE_FULL, layer.ordinal, 0);
    if (!bytes) return Fail(bytes.error());

    // Through the cache: the bytes stay in place as long as `record` lives.
    for (int use = 0; use < 2; ++use) {
      const auto record = engine->GetRecord(HOTPLANE_FULL, layer.ordinal, 0);
      if (!record) return Fail(record.error());
      const hotplane_record_view view = record->View();
      std::printf("  expert 0: %zu + %zu bytes, first 0x%02x\n", view.part_bytes[0],
                  view.part_bytes[1], *static_cast<const unsigned char*>(view.parts[0]));
    }
  }
  const hotplane_cache_stats stats = engine->CacheStats(HOTPLANE_FULL);
  std::printf("cache: %llu hits, %llu misses\n", static_cast<unsigned long long>(stats.hits),
              static_cast<unsigned long long>(stats.misses));
  return 0;
}
