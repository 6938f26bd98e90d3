// A stranger's program over engine.hpp: boots the store and tells what it got.
#include <cstdio>
#include <hotplane/engine.hpp>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const auto missing = hotplane::api::Engine::Boot(std::string(argv[1]) + "/no-such-store");
  if (missing || missing.error().text.find("no-such-store") == std::string::npos) {
    std::fprintf(stderr, "expected an error that names no-such-store\n");
    return 1;
  }

  uint32_t published = 0;
  hotplane::api::BootOptions options;
  options.on_layer = [&](const hotplane_layer& layer) { published += layer.ordinal + 1; };
  const auto engine = hotplane::api::Engine::Boot(argv[1], options);
  if (!engine) {
    std::fprintf(stderr, "%s\n", engine.error().text.c_str());
    return engine.error().code;
  }
  for (const hotplane_layer& layer : engine->Layers()) {
    std::printf("layer %u: E=%u H=%u I=%u, %zu bytes of codes\n", layer.ordinal, layer.experts,
                layer.hidden, layer.intermediate, layer.planes13_bytes + layer.planes2_bytes);
  }
  // Ordinals 0..3, each once.
  return published == 1 + 2 + 3 + 4 ? 0 : 1;
}
