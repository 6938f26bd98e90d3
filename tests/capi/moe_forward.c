/* moe_forward STORE LAYER TOKENS PRECISION ARITHMETIC: boots the store and writes the operator's
 * result for a fixed pattern of inputs to stdout, TOKENS x H float32. tests/python makes the same
 * inputs: all of them are exact in float32. */
#include <hotplane/hotplane.h>
#include <stdio.h>
#include <stdlib.h>

static const float kWeights[2] = {0.625f, 0.375f};

static int fail(void) {
  fprintf(stderr, "%s\n", hotplane_last_error());
  return 1;
}

static int forward(hotplane_engine* engine, hotplane_moe* call, const hotplane_layer_info* info) {
  const size_t tokens = call->token_count;
  const size_t hidden = info->hidden;
  float* x = malloc(tokens * hidden * sizeof(*x));
  float* y = malloc(tokens * hidden * sizeof(*y));
  float* weights = malloc(tokens * 2 * sizeof(*weights));
  int32_t* ids = malloc(tokens * 2 * sizeof(*ids));
  size_t i;
  int code = 1;
  if (x != NULL && y != NULL && weights != NULL && ids != NULL) {
    for (i = 0; i < tokens * hidden; ++i) x[i] = (float)((int)(i * 37 % 201) - 100) / 128.0f;
    for (i = 0; i < tokens * 2; ++i) {
      ids[i] = (int32_t)(i * 5 % info->experts);
      weights[i] = kWeights[i % 2];
    }
    call->top_k = 2;
    call->x = x;
    call->ids = ids;
    call->weights = weights;
    call->y = y;
    if (hotplane_moe_forward(engine, call) != HOTPLANE_OK) {
      code = fail();
    } else {
      code = fwrite(y, sizeof(*y), tokens * hidden, stdout) != tokens * hidden;
    }
  }
  free(x);
  free(y);
  free(weights);
  free(ids);
  return code;
}

int main(int argc, char** argv) {
  hotplane_boot_options options;
  hotplane_layer_info info;
  hotplane_engine* engine;
  hotplane_moe call;
  int code;

  if (argc != 6) {
    fprintf(stderr, "usage: moe_forward STORE LAYER TOKENS PRECISION ARITHMETIC\n");
    return HOTPLANE_USAGE;
  }
  hotplane_boot_options_init(&options);
  options.workers = 1;
  if (hotplane_boot(argv[1], &options, &engine) != HOTPLANE_OK) return fail();
  hotplane_moe_init(&call);
  call.layer = (uint32_t)atoi(argv[2]);
  call.token_count = (uint32_t)atoi(argv[3]);
  call.precision = atoi(argv[4]);
  call.arithmetic = atoi(argv[5]);
  hotplane_layer_info_init(&info);
  code = hotplane_describe_layer(engine, call.layer, &info) == HOTPLANE_OK
             ? forward(engine, &call, &info)
             : fail();
  hotplane_close(engine);
  return code;
}
