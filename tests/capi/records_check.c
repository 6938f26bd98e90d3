/* records_check STORE DIR: every byte that the C API hands out of the store is the one that
 * `hotplane export` wrote to DIR/<layer>.<part>, and the operator computes what those bytes say. */
#include <hotplane/hotplane.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char* exported_directory;

static void die(const char* what) {
  fprintf(stderr, "records_check: %s\n%s\n", what, hotplane_last_error());
  exit(1);
}

static void must(hotplane_code code, const char* what) {
  if (code != HOTPLANE_OK) die(what);
}

/* The whole of DIR/<layer>.<part>; of the caller. */
static unsigned char* exported(uint32_t layer, const char* part, size_t* bytes) {
  char path[4096];
  FILE* file;
  unsigned char* content;
  long size;
  snprintf(path, sizeof(path), "%s/%u.%s", exported_directory, (unsigned)layer, part);
  file = fopen(path, "rb");
  if (file == NULL || fseek(file, 0, SEEK_END) != 0 || (size = ftell(file)) < 0) die(path);
  rewind(file);
  content = malloc((size_t)size);
  if (content == NULL || fread(content, 1, (size_t)size, file) != (size_t)size) die(path);
  fclose(file);
  *bytes = (size_t)size;
  return content;
}

/* One expert's record as the exported parts say it must be; of the caller. */
static unsigned char* truth(const hotplane_layer_info* info, uint32_t expert,
                            const char* const* parts, size_t part_count, size_t* bytes) {
  unsigned char* record = NULL;
  size_t i;
  *bytes = 0;
  for (i = 0; i < part_count; ++i) {
    size_t all;
    unsigned char* content = exported(info->ordinal, parts[i], &all);
    const size_t one = all / info->experts;
    record = realloc(record, *bytes + one);
    if (record == NULL) die("out of memory");
    memcpy(record + *bytes, content + one * expert, one);
    *bytes += one;
    free(content);
  }
  return record;
}

static void check_record(hotplane_engine* engine, const hotplane_layer_info* info,
                         hotplane_kind kind, uint32_t expert, const unsigned char* expected,
                         size_t bytes) {
  unsigned char* read = malloc(bytes);
  unsigned char* batched = malloc(bytes);
  void* destinations[1];
  hotplane_record* record;
  hotplane_record_view view;
  size_t told = 0;
  size_t offset = 0;
  uint32_t i;

  must(hotplane_record_bytes(engine, kind, info->ordinal, &told), "record_bytes");
  if (told != bytes) die("a record has another size than what was exported");
  must(hotplane_read_record(engine, kind, info->ordinal, expert, read, bytes), "read_record");
  if (memcmp(read, expected, bytes) != 0) die("a record differs from what was exported");
  destinations[0] = batched;
  must(hotplane_read_records(engine, kind, info->ordinal, &expert, destinations, 1, bytes),
       "read_records");
  if (memcmp(batched, expected, bytes) != 0) die("a batched record differs");
  must(hotplane_record_get(engine, kind, info->ordinal, expert, expert % 2, &record), "record_get");
  hotplane_record_view_init(&view);
  must(hotplane_record_look(record, &view), "record_look");
  if (view.part_count != (kind == HOTPLANE_BASE ? 4u : 2u)) die("another number of parts");
  for (i = 0; i < view.part_count; ++i) {
    if (memcmp(view.parts[i], expected + offset, view.part_bytes[i]) != 0)
      die("a pinned record differs");
    offset += view.part_bytes[i];
  }
  if (offset != bytes) die("the parts of a pinned record are not the record");
  hotplane_record_release(record);
  free(read);
  free(batched);
}

static void check_records(hotplane_engine* engine, const hotplane_layer_info* info) {
  static const char* const kBase[] = {"planes13", "sc13", "planes2", "sc2"};
  static const char* const kFull[] = {"fp13", "fp2"};
  static const char* const kDelta[] = {"fp13.encoded", "fp2.encoded"};
  uint32_t expert;
  for (expert = 0; expert < info->experts; expert += 5) {
    size_t bytes;
    unsigned char* expected = truth(info, expert, kBase, 4, &bytes);
    check_record(engine, info, HOTPLANE_BASE, expert, expected, bytes);
    free(expected);
    expected = truth(info, expert, kFull, 2, &bytes);
    check_record(engine, info, HOTPLANE_FULL, expert, expected, bytes);
    free(expected);
    expected = truth(info, expert, kDelta, 2, &bytes);
    check_record(engine, info, HOTPLANE_DELTA, expert, expected, bytes);
    free(expected);
  }
}

static void check_part(uint32_t layer, const char* name, const void* part, size_t bytes,
                       size_t stride, uint32_t experts) {
  size_t exported_bytes;
  unsigned char* expected = exported(layer, name, &exported_bytes);
  if (exported_bytes != bytes || stride * experts != bytes || memcmp(part, expected, bytes) != 0)
    die("a booted part differs from what was exported");
  free(expected);
}

static void check_layer(const hotplane_layer* layer) {
  const unsigned char* base = layer->planes13;
  check_part(layer->ordinal, "planes13", base, layer->planes13_bytes, layer->planes13_stride,
             layer->experts);
  check_part(layer->ordinal, "sc13", base + layer->sc13_offset, layer->sc13_bytes,
             layer->sc13_stride, layer->experts);
  check_part(layer->ordinal, "planes2", base + layer->planes2_offset, layer->planes2_bytes,
             layer->planes2_stride, layer->experts);
  check_part(layer->ordinal, "sc2", base + layer->sc2_offset, layer->sc2_bytes, layer->sc2_stride,
             layer->experts);
  if (layer->sc2 != base + layer->sc2_offset) die("an offset is not that of its pointer");
}

/* One expert's matrix [rows, columns] in exported planes (docs/format/planes.md). */
typedef struct matrix {
  const unsigned char* plane;
  const unsigned char* scales;
  int nibbles; /* of the plane; else codes */
  size_t rows, columns;
} matrix;

static double weight(const matrix* m, size_t n, size_t k) {
  static const double codes[4] = {-4, -1, 1, 4};
  static const double magnitudes[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  const size_t tile = n / 16 * (m->columns / 64) + k / 64;
  const size_t unit = (tile * 32 + n % 8 * 4 + k % 16 / 4) * 8 + n % 16 / 8 * 4 + k % 64 / 16;
  const size_t scale = (n / 16 * (m->columns / 32) + k / 32) * 16 + n % 16;
  double value;
  if (m->nibbles) {
    const int nibble = m->plane[unit * 2 + k % 4 / 2] >> (k % 2 * 4) & 15;
    value = (nibble & 8) != 0 ? -magnitudes[nibble & 7] : magnitudes[nibble & 7];
  } else {
    value = codes[m->plane[unit] >> (k % 4 * 2) & 3];
  }
  return ldexp(value, m->scales[scale] - 127);
}

static void multiply(const matrix* m, const double* x, double* out) {
  size_t n, k;
  for (n = 0; n < m->rows; ++n) {
    out[n] = 0;
    for (k = 0; k < m->columns; ++k) out[n] += weight(m, n, k) * x[k];
  }
}

/* y += share * expert(x), SiLU-gated, from the exported parts. */
static void add_expert(const hotplane_layer* layer, uint32_t expert, int fp4, double share,
                       const double* x, double* y) {
  const size_t width = layer->intermediate;
  size_t plane13, sc13, plane2, sc2, i;
  unsigned char* parts[4];
  double* gate_up = malloc(2 * width * sizeof(double));
  double* result = malloc(layer->hidden * sizeof(double));
  matrix w13, w2;
  parts[0] = exported(layer->ordinal, fp4 ? "fp13" : "planes13", &plane13);
  parts[1] = exported(layer->ordinal, "sc13", &sc13);
  parts[2] = exported(layer->ordinal, fp4 ? "fp2" : "planes2", &plane2);
  parts[3] = exported(layer->ordinal, "sc2", &sc2);
  if (gate_up == NULL || result == NULL) die("out of memory");
  w13.plane = parts[0] + plane13 / layer->experts * expert;
  w13.scales = parts[1] + sc13 / layer->experts * expert;
  w13.rows = 2 * width;
  w13.columns = layer->hidden;
  w2.plane = parts[2] + plane2 / layer->experts * expert;
  w2.scales = parts[3] + sc2 / layer->experts * expert;
  w2.rows = layer->hidden;
  w2.columns = width;
  w13.nibbles = w2.nibbles = fp4;
  multiply(&w13, x, gate_up);
  for (i = 0; i < width; ++i) gate_up[i] *= gate_up[width + i] / (1 + exp(-gate_up[i]));
  multiply(&w2, gate_up, result);
  for (i = 0; i < layer->hidden; ++i) y[i] += share * result[i];
  for (i = 0; i < 4; ++i) free(parts[i]);
  free(gate_up);
  free(result);
}

/* One token, one expert at base and one at FP4. */
static void check_operator(hotplane_engine* engine, const hotplane_layer* layer) {
  const int32_t ids[2] = {5, 17};
  const float weights[2] = {0.75f, 0.25f};
  unsigned char* precisions = malloc(layer->experts);
  float* x = malloc(layer->hidden * sizeof(float));
  float* y = malloc(layer->hidden * sizeof(float));
  double* wide = malloc(layer->hidden * sizeof(double));
  double* expected = calloc(layer->hidden, sizeof(double));
  double error = 0, size = 0;
  hotplane_moe call;
  size_t i;
  if (precisions == NULL || x == NULL || y == NULL || wide == NULL || expected == NULL)
    die("out of memory");
  memset(precisions, HOTPLANE_PRECISION_BASE, layer->experts);
  precisions[17] = HOTPLANE_PRECISION_FP4;
  for (i = 0; i < layer->hidden; ++i) wide[i] = x[i] = (float)(i * 37 % 101) / 50 - 1;
  hotplane_moe_init(&call);
  call.layer = layer->ordinal;
  call.arithmetic = HOTPLANE_EXACT;
  call.token_count = 1;
  call.top_k = 2;
  call.precisions = precisions;
  call.x = x;
  call.ids = ids;
  call.weights = weights;
  call.y = y;
  must(hotplane_moe_forward(engine, &call), "moe_forward");
  add_expert(layer, 5, 0, 0.75, wide, expected);
  add_expert(layer, 17, 1, 0.25, wide, expected);
  for (i = 0; i < layer->hidden; ++i) {
    error += (y[i] - expected[i]) * (y[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  /* float32 sums of some hundred terms: 2^-24 times their number. */
  if (!(size > 0) || !(sqrt(error / size) < 1e-5)) die("moe_forward: another result");
  free(precisions);
  free(x);
  free(y);
  free(wide);
  free(expected);
}

int main(int argc, char** argv) {
  hotplane_boot_options options;
  hotplane_engine* engine;
  hotplane_store store;
  hotplane_cache_stats stats;
  hotplane_record* kept;
  hotplane_record_view view;
  uint32_t layer;
  const char* plan;
  int booted;

  if (argc != 3) return 2;
  exported_directory = argv[2];
  hotplane_boot_options_init(&options);
  options.want_delta = 1;
  options.pin_delta_bytes = 4 << 20;
  options.cache = HOTPLANE_CACHE_KEEP;
  options.base_residency = HOTPLANE_RESIDENCY_DEVICE;
  must(hotplane_open(argv[1], &options, &engine), "open");
  hotplane_store_init(&store);
  must(hotplane_describe(engine, &store), "describe");
  if (strlen(store.generation) != 32 || store.layer_count != 4) die("describe: another model");
  if (hotplane_layer_count(engine) != 0) die("a store that was only opened has layers");

  must(hotplane_plan_json(engine, &plan), "plan_json");
  if (strstr(plan, "\"bytes_pinned\": 0,") != NULL || strstr(plan, "\"build\"") != NULL)
    die("plan_json: nothing to pin, or something to build");

  /* Records are the same before, while and after a boot. */
  for (booted = 0; booted < 2; ++booted) {
    for (layer = 0; layer < store.layer_count; ++layer) {
      hotplane_layer_info info;
      hotplane_layer_info_init(&info);
      must(hotplane_describe_layer(engine, layer, &info), "describe_layer");
      if (info.base != HOTPLANE_PRESENT || info.delta_encoding != HOTPLANE_QUINTALS)
        die("describe_layer: a tier is missing");
      check_records(engine, &info);
    }
    if (booted) break;
    must(hotplane_start(engine), "start");
    for (layer = 0; layer < store.layer_count; ++layer) {
      hotplane_layer out;
      hotplane_layer_init(&out);
      must(hotplane_wait_layer(engine, layer, &out), "wait_layer");
      check_layer(&out);
      check_operator(engine, &out);
    }
    must(hotplane_wait(engine), "wait");
  }
  hotplane_cache_stats_init(&stats);
  must(hotplane_get_cache_stats(engine, HOTPLANE_DELTA, &stats), "cache stats");
  if (stats.hits == 0 || stats.misses == 0) die("the cache has not been used");
  if (strstr(hotplane_stats_json(engine), "\"bytes_read\"") == NULL) die("no report");

  /* A pinned record outlives the engine. */
  must(hotplane_record_get(engine, HOTPLANE_DELTA, 1, 2, 0, &kept), "record_get");
  hotplane_close(engine);
  hotplane_record_view_init(&view);
  must(hotplane_record_look(kept, &view), "record_look");
  {
    size_t bytes;
    unsigned char* expected = exported(1, "fp13.encoded", &bytes);
    if (memcmp(view.parts[0], expected + 2 * view.part_bytes[0], view.part_bytes[0]) != 0)
      die("a record changed when its engine was closed");
    free(expected);
  }
  hotplane_record_release(kept);
  printf("%u layers, as exported\n", (unsigned)store.layer_count);
  return 0;
}
