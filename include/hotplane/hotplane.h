/* hotplane's C API: the only stable ABI.
 *
 * Open a store, boot it, use the planes, close. Every call that can fail returns a hotplane_code;
 * the text of the last failure on this thread is hotplane_last_error(). The library never prints,
 * never aborts on bad input and never throws across this boundary. Structs that may grow start with
 * their own size: fill them with their _init function.
 *
 * Threads: different engines may be used from different threads; one engine's const calls may run
 * at the same time.
 */
#ifndef HOTPLANE_HOTPLANE_H_
#define HOTPLANE_HOTPLANE_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define HOTPLANE_API __attribute__((visibility("default")))
#else
#define HOTPLANE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The exit codes of the command line. */
typedef enum hotplane_code {
  HOTPLANE_OK = 0,
  HOTPLANE_SYSTEM = 1,   /* the system failed us: I/O, permission, device */
  HOTPLANE_USAGE = 2,    /* wrong usage, or ambiguous */
  HOTPLANE_DATA = 3,     /* data is corrupt, malformed or does not match */
  HOTPLANE_CAPACITY = 4, /* does not fit: memory, space */
  HOTPLANE_INTERRUPTED = 130,
  HOTPLANE_TERMINATED = 143
} hotplane_code;

typedef struct hotplane_engine hotplane_engine;

/* "0.1.0"; static storage. */
HOTPLANE_API const char* hotplane_version(void);

/* Several lines: what failed, file, offset, expected, found, to fix. "" when nothing failed yet on
 * this thread. Valid until the next failing call on this thread. */
HOTPLANE_API const char* hotplane_last_error(void);

typedef enum hotplane_log_level {
  HOTPLANE_LOG_DEBUG = 1,
  HOTPLANE_LOG_INFO = 2,
  HOTPLANE_LOG_WARNING = 3,
  HOTPLANE_LOG_ERROR = 4
} hotplane_log_level;
typedef void (*hotplane_log_callback)(void* user, hotplane_log_level level, const char* line);
/* Process-wide; NULL drops all lines, which is the default. Calls come from any thread, one at a
 * time. */
HOTPLANE_API void hotplane_set_log(hotplane_log_callback callback, void* user);

/* The base tier of one booted layer. Pointers are read-only, 64-byte aligned or better, and valid
 * until hotplane_close. All E experts of a part are contiguous: planes13 [E, 2I*H/4]   2-bit codes
 * of gate (rows 0..I-1) and up (rows I..2I-1) sc13     [E, 2I*H/32]  their e8m0 block scales
 *   planes2  [E, H*I/4]    2-bit codes of down
 *   sc2      [E, H*I/32]   their scales
 * in the plane order of docs/format/planes.md. Sizes are in bytes and cover all experts. */
typedef struct hotplane_layer {
  size_t struct_bytes;
  uint32_t ordinal;     /* over MoE layers, MTP layers last */
  uint32_t model_index; /* the model's own number */
  uint32_t experts;
  uint32_t hidden;
  uint32_t intermediate;
  const void* planes13;
  size_t planes13_bytes;
  const void* sc13;
  size_t sc13_bytes;
  const void* planes2;
  size_t planes2_bytes;
  const void* sc2;
  size_t sc2_bytes;
} hotplane_layer;
HOTPLANE_API void hotplane_layer_init(hotplane_layer* layer);

/* Called for each layer in order, the moment its bytes are verified, from a worker thread. */
typedef void (*hotplane_layer_callback)(void* user, const hotplane_layer* layer);

typedef struct hotplane_boot_options {
  size_t struct_bytes;
  const char* generation; /* prefix of the generation; NULL: the only one there is */
  const char* layers;     /* "3-9", "main", "mtp"; NULL: all */
  int map;                /* 1: serve from the page cache; 0: land in own memory (default) */
  int verify;             /* 1: every byte (default); 0: none */
  uint32_t workers;       /* threads; 0: the CPUs this process may use */
  hotplane_layer_callback on_layer; /* may be NULL */
  void* user;
} hotplane_boot_options;
HOTPLANE_API void hotplane_boot_options_init(hotplane_boot_options* options);

/* Boots the base tier of the store in directory `store` on the CPU device. `options` may be NULL.
 * On failure *engine is NULL, and what was taken is freed. */
HOTPLANE_API hotplane_code hotplane_boot(const char* store, const hotplane_boot_options* options,
                                         hotplane_engine** engine);

/* Number of booted layers. */
HOTPLANE_API uint32_t hotplane_layer_count(const hotplane_engine* engine);
/* The index-th booted layer; HOTPLANE_USAGE when there is none. `layer` was filled by
 * hotplane_layer_init. */
HOTPLANE_API hotplane_code hotplane_get_layer(const hotplane_engine* engine, uint32_t index,
                                              hotplane_layer* layer);
/* The report of the boot as one JSON object, with the keys of `hotplane boot --json`. Valid until
 * hotplane_close. */
HOTPLANE_API const char* hotplane_stats_json(const hotplane_engine* engine);

/* Ends the use of all pointers and frees everything. NULL is allowed. */
HOTPLANE_API void hotplane_close(hotplane_engine* engine);

#ifdef __cplusplus
}
#endif

#endif /* HOTPLANE_HOTPLANE_H_ */
