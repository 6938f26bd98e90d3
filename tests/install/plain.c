/* A stranger's C program: boots the store mapped and reads a byte of every layer. */
#include <hotplane/hotplane.h>
#include <stdio.h>

int main(int argc, char** argv) {
  hotplane_boot_options options;
  hotplane_engine* engine = NULL;
  hotplane_code code;
  uint32_t i;

  if (argc != 2) return 2;
  hotplane_boot_options_init(&options);
  options.map = 1;
  code = hotplane_boot(argv[1], &options, &engine);
  if (code != HOTPLANE_OK) {
    fprintf(stderr, "%s\n", hotplane_last_error());
    return code;
  }
  for (i = 0; i < hotplane_layer_count(engine); ++i) {
    hotplane_layer layer;
    hotplane_layer_init(&layer);
    code = hotplane_get_layer(engine, i, &layer);
    if (code != HOTPLANE_OK) return code;
    printf("layer %u (model %u): first byte 0x%02x\n", (unsigned)layer.ordinal,
           (unsigned)layer.model_index, *(const unsigned char*)layer.planes13);
  }
  printf("hotplane %s booted %u layers\n", hotplane_version(),
         (unsigned)hotplane_layer_count(engine));
  i = hotplane_layer_count(engine);
  hotplane_close(engine);
  return i == 4 ? 0 : 1;
}
