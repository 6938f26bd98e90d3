/* boot STORE: boots the store in the background and uses each layer as it comes.
 *
 *   cc boot.c $(pkg-config --cflags --libs hotplane) -o boot
 */
#include <hotplane/hotplane.h>
#include <stdio.h>

static int fail(void) {
  hotplane_error error;
  hotplane_error_init(&error);
  hotplane_get_last_error(&error);
  fprintf(stderr, "%s\n", error.what);
  if (error.file[0] != '\0') fprintf(stderr, "  in %s\n", error.file);
  if (error.advice[0] != '\0') fprintf(stderr, "  to fix: %s\n", error.advice);
  return error.code;
}

/* A server would copy the planes to its device here. */
static unsigned long use(const hotplane_layer* layer) {
  const unsigned char* codes = layer->planes13;
  unsigned long sum = 0;
  size_t i;
  for (i = 0; i < layer->planes13_bytes; ++i) sum += codes[i];
  return sum;
}

int main(int argc, char** argv) {
  hotplane_boot_options options;
  hotplane_engine* engine;
  uint32_t i;
  int code = 0;

  if (argc != 2) {
    fprintf(stderr, "usage: boot STORE\n");
    return HOTPLANE_USAGE;
  }
  hotplane_boot_options_init(&options);
  if (hotplane_open(argv[1], &options, &engine) != HOTPLANE_OK) return fail();
  if (hotplane_start(engine) != HOTPLANE_OK) code = fail();

  /* Layer i can be used while layer i+1 is still on its way. */
  for (i = 0; code == 0; ++i) {
    hotplane_layer layer;
    hotplane_code waited;
    hotplane_layer_init(&layer);
    waited = hotplane_wait_layer(engine, i, &layer);
    if (waited == HOTPLANE_USAGE) break; /* there are no more */
    if (waited != HOTPLANE_OK) {
      code = fail();
      break;
    }
    printf("layer %u (model layer %u): %u experts of %u x %u, sum of code bytes %lu\n",
           (unsigned)layer.ordinal, (unsigned)layer.model_index, (unsigned)layer.experts,
           (unsigned)layer.hidden, (unsigned)layer.intermediate, use(&layer));
  }
  if (code == 0 && hotplane_wait(engine) != HOTPLANE_OK) code = fail();
  if (code == 0) printf("%s\n", hotplane_stats_json(engine));
  hotplane_close(engine);
  return code;
}
