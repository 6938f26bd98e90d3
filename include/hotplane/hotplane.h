/* hotplane's C API: the only stable ABI.
 *
 *   hotplane_build      quantizes a checkpoint into a store
 *   hotplane_import_planes_cache   takes planes that vLLM-MoET cached into one
 *   hotplane_open       opens a store; nothing of its planes is read
 *   hotplane_start      boots it in the background, layer by layer
 *   hotplane_wait_layer the layers as they come; hotplane_stream_wait_layer for CUDA streams
 *   hotplane_read_*, hotplane_record_*   one expert's record, from the moment the store is open
 *   hotplane_close
 *
 * hotplane_boot is open, boot and wait in one call.
 *
 * Errors: every call that can fail returns a hotplane_code; the text of the last failure on this
 * thread is hotplane_last_error(), its fields are hotplane_get_last_error(). The library never
 * prints, never aborts on bad input and never throws across this boundary. NULL where a pointer is
 * needed is HOTPLANE_USAGE.
 *
 * Signals: opening or building a store installs a SIGBUS handler, so that a file cut short while it
 * is read is an error and not the end of the process. It passes every signal that is not its own to
 * the handler that was there before.
 *
 * Structs start with their own size in bytes, so that they may grow: fill them with their _init
 * function before every use. The library writes no byte beyond the size it is given, and refuses
 * one that cannot be.
 *
 * Ownership: strings and pointers that the library hands out are its own and read-only.
 *
 * Threads: every function may be called from any thread, also on one engine at the same time;
 * hotplane_close is the last call on an engine.
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

/* The same by field. Strings are "" where there is nothing to say, and valid until the next failing
 * call on this thread. */
typedef struct hotplane_error {
  size_t struct_bytes;
  hotplane_code code; /* HOTPLANE_OK when nothing failed yet on this thread */
  int error_number;   /* errno, or 0 */
  int has_offset;     /* 1: `offset` means something */
  uint64_t offset;    /* bytes, in `file` */
  const char* what;   /* one sentence */
  const char* file;   /* path */
  const char* expected;
  const char* found;
  const char* advice; /* what to do about it */
} hotplane_error;
HOTPLANE_API void hotplane_error_init(hotplane_error* error);
HOTPLANE_API hotplane_code hotplane_get_last_error(hotplane_error* error);

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

/* The base tier of one booted layer; of a sharded store one rank's slice of it, and I below is the
 * rank's share of the model's intermediate size. Pointers are read-only, 64-byte aligned or better,
 * and valid until hotplane_close, after a failed boot too. All E experts of a part are contiguous:
 *   planes13 [E, 2I*H/4]   2-bit codes of gate (rows 0..I-1) and up (rows I..2I-1)
 *   sc13     [E, 2I*H/32]  their e8m0 block scales
 *   planes2  [E, H*I/4]    2-bit codes of down
 *   sc2      [E, H*I/32]   their scales
 * in the plane order of docs/format/planes.md. X_bytes covers all experts; expert e of part X
 * begins at X + e * X_stride; part X begins X_offset bytes after `planes13`. Layers with biases
 * (gpt-oss) have them as float32: bias13 [E, 2I], gate first, and bias2 [E, H]; else NULL. */
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
  size_t planes13_stride;
  size_t sc13_stride;
  size_t planes2_stride;
  size_t sc2_stride;
  size_t sc13_offset;
  size_t planes2_offset;
  size_t sc2_offset;
  /* -1: the pointers are host memory. N: they are device memory of CUDA device N (CUdeviceptr), for
   * kernels and copies only; the host must not read through them. All bytes are there when the
   * layer is published: no stream needs to wait. */
  int device;
  const void* bias13;
  size_t bias13_bytes;
  const void* bias2;
  size_t bias2_bytes;
} hotplane_layer;
HOTPLANE_API void hotplane_layer_init(hotplane_layer* layer);

/* Called for each layer in order, the moment its bytes are verified, from a worker thread. Must not
 * throw. It may read records. It cannot wait for the boot that calls it (HOTPLANE_USAGE); when it
 * closes the engine, the boot ends soon after. */
typedef void (*hotplane_layer_callback)(void* user, const hotplane_layer* layer);

/* Where the base tier of a layer lives after the boot. */
typedef enum hotplane_residency {
  HOTPLANE_RESIDENCY_AUTO = 0, /* on the device what fits there, the rest on the host */
  HOTPLANE_RESIDENCY_DEVICE = 1,
  HOTPLANE_RESIDENCY_HOST = 2
} hotplane_residency;

/* What reading layers from the disk leaves in the page cache. */
typedef enum hotplane_cache_mode {
  HOTPLANE_CACHE_AUTO = 0, /* keep where the files fit in memory beside the boot, else bypass */
  HOTPLANE_CACHE_KEEP = 1, /* the next boot is warm */
  HOTPLANE_CACHE_BYPASS = 2
} hotplane_cache_mode;

/* The strings are copied; `user` must be valid as long as the boot runs. */
typedef struct hotplane_boot_options {
  size_t struct_bytes;
  const char* generation; /* prefix of the generation; NULL: the only one there is */
  const char* layers;     /* "3-9", "main", "mtp"; NULL: all */
  int map;                /* 1: serve from the page cache; 0: land in own memory (default) */
  int verify;             /* 1: every byte (default); 0: none */
  uint32_t workers;       /* threads; 0: the CPUs this process may use */
  hotplane_layer_callback on_layer; /* may be NULL */
  void* user;
  /* Memory for records that are kept, by their kind; reserved at the first hotplane_record_get or
   * hotplane_prefetch of that kind. 0 (default): a record lives as long as it is used. */
  uint64_t delta_cache_bytes;
  uint64_t full_cache_bytes;
  uint64_t base_cache_bytes;
  /* What the boot may build from, and of what. With a checkpoint, hotplane_open makes the
   * generation where the store has none yet. */
  const char* checkpoint; /* directory or file; NULL: none, layers that are missing end the boot */
  int no_build;           /* 1: refuse instead of building */
  int want_delta;         /* 1: the delta tier is wanted: built where it is absent; 0 (default) */
  const char* delta_layers;    /* of which layers, as `layers`; NULL: of all that are booted */
  const char* no_delta_layers; /* of them, those that go without; NULL: none */
  int delta_encoding; /* HOTPLANE_QUINTALS or HOTPLANE_NIBBLES, built and accepted; 0: quintals
                         are built, both accepted */
  uint32_t batch;     /* layers that begin to be built together; 0: 12 */
  uint64_t pin_delta_bytes; /* of delta records that the boot reads into their cache, in layer and
                               expert order; 0: none */
  uint64_t staging_limit_bytes; /* of tensors in flight; 0: a quarter of the available memory */
  /* What is booted, and to where. */
  uint32_t first_expert;  /* of each layer */
  uint32_t expert_count;  /* 0: all */
  int base_residency;     /* a hotplane_residency */
  uint64_t memory_bytes;  /* of the device, to use; 0: what is available */
  uint64_t reserve_bytes; /* of it, how much stays free */
  int cache;              /* a hotplane_cache_mode */
  /* Of a sharded store: this process's rank; -1 (default): what torchrun, Open MPI, PMI or Slurm
   * left in the environment, where their world is the store's. An unsharded store has rank 0. */
  int32_t rank;
  uint32_t world; /* number of ranks that the store must have been built for; 0 (default): any */
  const char* device; /* "cpu", "cuda" or "cuda:N": where the base lands; NULL: "cpu" */
} hotplane_boot_options;
HOTPLANE_API void hotplane_boot_options_init(hotplane_boot_options* options);

/* How far a long call is. */
typedef struct hotplane_progress {
  size_t struct_bytes;
  const char* phase; /* "quantizing"; static storage */
  uint64_t bytes_done;
  uint64_t bytes_total; /* 0 while unknown */
} hotplane_progress;
/* Must not throw. Not 0: the call is to end, with HOTPLANE_INTERRUPTED. */
typedef int (*hotplane_progress_callback)(void* user, const hotplane_progress* progress);

typedef enum hotplane_zero_mode {
  HOTPLANE_ZERO_AUTO = 0, /* alternating where nearly all of the source's zeros have one sign */
  HOTPLANE_ZERO_SIGN = 1,
  HOTPLANE_ZERO_ALTERNATE = 2
} hotplane_zero_mode;

typedef struct hotplane_build_options {
  size_t struct_bytes;
  const char* layers;           /* "3-9", "main", "mtp"; NULL: all */
  int base_only;                /* 1: no delta tier; 0 (default): both */
  int delta_encoding;           /* HOTPLANE_QUINTALS or HOTPLANE_NIBBLES; 0: quintals */
  int zero_mode;                /* a hotplane_zero_mode: the sign of exact zeros in the base */
  uint32_t world;               /* ranks to cut the experts for; 0: 1, unsharded */
  uint32_t workers;             /* threads; 0: the CPUs this process may use */
  uint32_t batch;               /* layers that begin to be built together; 0: 12 */
  uint64_t staging_limit_bytes; /* of tensors in flight; 0: a quarter of the available memory */
  /* Called once before anything is read, by the calling thread, then about every 100 ms by another;
   * may be NULL. */
  hotplane_progress_callback on_progress;
  void* user;
  const char* device; /* "cpu", "cuda" or "cuda:N": what quantizes, with the CPU for what does not
                         fit; NULL: "cpu". The store is the same */
} hotplane_build_options;
HOTPLANE_API void hotplane_build_options_init(hotplane_build_options* options);

/* Quantizes the routed experts of `checkpoint` (directory or file) into the store, as `hotplane
 * build` does: what is there stays, and nothing half-done is left whatever happens. `options` may
 * be NULL. *report_json (may be NULL): one JSON object with the keys of `hotplane build --json`,
 * valid until the next hotplane_build or import on this thread; "{}" after a failure. */
HOTPLANE_API hotplane_code hotplane_build(const char* checkpoint, const char* store,
                                          const hotplane_build_options* options,
                                          const char** report_json);

typedef struct hotplane_import_options {
  size_t struct_bytes;
  const char* layers_geometry; /* "E,H,I", "ds4-flash", "0-2:E,H,I;3-43:E,H,I"; needed */
  const char* mtp_layers;      /* "43", "43-44": numbers in the file names; NULL: none */
  const char* config; /* the model's config.json, or its folder: activation, top-k, and a shape to
                         compare with; NULL: silu(gate) * up */
  const char* key;    /* prefix of a KEY, where the cache has several models; NULL */
  int32_t rank;       /* this rank's folder alone; -1 (default): all, which must be there */
  int base_only;      /* 1: the FP4 files stay where they are; 0 (default): both tiers */
  int move;           /* 1: remove from the cache what the store was proved to have */
  uint32_t workers;   /* threads; 0: the CPUs this process may use */
  hotplane_progress_callback on_progress; /* as of hotplane_build_options */
  void* user;
} hotplane_import_options;
HOTPLANE_API void hotplane_import_options_init(hotplane_import_options* options);

/* Makes layer files in `store` of the planes that vLLM-MoET cached in the directory
 * `planes_cache`, as `hotplane import` does. *report_json (may be NULL): one JSON object with the
 * keys of `hotplane import --json`, as of hotplane_build. */
HOTPLANE_API hotplane_code hotplane_import_planes_cache(const char* planes_cache, const char* store,
                                                        const hotplane_import_options* options,
                                                        const char** report_json);

/* Opens the store in directory `store`: its manifest is read, nothing else. `options` may be NULL;
 * they are those of the boot that may follow. On failure *engine is NULL. */
HOTPLANE_API hotplane_code hotplane_open(const char* store, const hotplane_boot_options* options,
                                         hotplane_engine** engine);

/* What a boot would do, and why: headers of the store are read, with a checkpoint also its headers
 * and sampled pages where something has to be built, and nothing is built. One JSON object with the
 * keys of `hotplane boot --dry-run --json`, valid until hotplane_close. Before hotplane_start;
 * other calls on this engine wait meanwhile. HOTPLANE_DATA where layers are missing that nothing
 * can be built from, HOTPLANE_CAPACITY where the planes do not fit, HOTPLANE_USAGE for experts that
 * there are not. */
HOTPLANE_API hotplane_code hotplane_plan_json(hotplane_engine* engine, const char** json);

/* Begins to boot in the background: builds what is missing where there is a checkpoint, lands the
 * base tier on the device, pins delta records as asked for. Once per engine. Failures of the boot
 * are told by hotplane_wait and hotplane_wait_layer. */
HOTPLANE_API hotplane_code hotplane_start(hotplane_engine* engine);
/* Until the boot has ended: its result, the same at every call. The layers that were published
 * before a failure, and records, stay usable. HOTPLANE_USAGE when none was started. */
HOTPLANE_API hotplane_code hotplane_wait(hotplane_engine* engine);
/* Until the index-th layer is published; fills `layer`. The boot's failure when it fails first;
 * HOTPLANE_USAGE when the boot has no such layer or none was started. */
HOTPLANE_API hotplane_code hotplane_wait_layer(hotplane_engine* engine, uint32_t index,
                                               hotplane_layer* layer);

/* Asks a boot that runs, or is yet to be started, to end: hotplane_wait then is
 * HOTPLANE_INTERRUPTED, soon, unless the boot has ended before. Everything else stays usable. NULL
 * is allowed. */
HOTPLANE_API void hotplane_cancel(hotplane_engine* engine);

/* hotplane_open, boot, wait. On failure *engine is NULL, and what was taken is freed. */
HOTPLANE_API hotplane_code hotplane_boot(const char* store, const hotplane_boot_options* options,
                                         hotplane_engine** engine);

/* Number of layers published so far. */
HOTPLANE_API uint32_t hotplane_layer_count(const hotplane_engine* engine);
/* The index-th published layer; HOTPLANE_USAGE when there is none yet. */
HOTPLANE_API hotplane_code hotplane_get_layer(const hotplane_engine* engine, uint32_t index,
                                              hotplane_layer* layer);
typedef enum hotplane_part {
  HOTPLANE_PLANES13 = 1,
  HOTPLANE_SC13 = 2,
  HOTPLANE_PLANES2 = 3,
  HOTPLANE_SC2 = 4,
  HOTPLANE_BIAS13 = 5,
  HOTPLANE_BIAS2 = 6
} hotplane_part;
/* One part of the index-th published layer as a DLPack tensor: uint8 [E, bytes of one expert], or
 * float32 for the biases, contiguous, where the layer lies. `versioned` 0: *tensor is a
 * DLManagedTensor; 1: a DLManagedTensorVersioned of DLPack 1.0, with the read-only flag. Either way
 * nobody may write to it. The memory stays until the tensor's deleter is called, once, from any
 * thread, after hotplane_close too. HOTPLANE_USAGE for a layer that is not published and biases
 * that the layer does not have. */
HOTPLANE_API hotplane_code hotplane_layer_dlpack(const hotplane_engine* engine, uint32_t index,
                                                 hotplane_part part, int versioned, void** tensor);

/* The destructor of a Python capsule around such a tensor: deletes it when no consumer took it. In
 * C, because an exception may be pending when a capsule is destroyed. Without Python in the process
 * it does nothing. */
HOTPLANE_API void hotplane_drop_capsule(void* capsule);

/* The report of the boot as one JSON object, with the keys of `hotplane boot --json`; "{}" before a
 * boot has succeeded. Valid until hotplane_close. */
HOTPLANE_API const char* hotplane_stats_json(const hotplane_engine* engine);

/* What an expert does between its matrices, with g of gate and u of up. */
typedef enum hotplane_activation {
  HOTPLANE_SILU = 1,         /* silu(g) * u */
  HOTPLANE_SILU_CLAMPED = 2, /* silu(min(g, limit)) * clamp(u, -limit, limit) */
  HOTPLANE_SWIGLU_OAI = 3    /* with h = min(g, limit): (clamp(u, -limit, limit) + 1) * h *
                                sigmoid(alpha * h) */
} hotplane_activation;

/* What the store holds, booted or not. */
typedef struct hotplane_store {
  size_t struct_bytes;
  const char* generation;  /* 32 hexadecimal digits; valid until hotplane_close */
  const char* directory;   /* of the generation; valid until hotplane_close */
  uint32_t layer_count;    /* MoE layers of the model, MTP layers included */
  uint32_t top_k;          /* experts per token; 0 where the checkpoint's config does not tell */
  uint32_t rank;           /* of this engine; 0 where the store is not sharded */
  uint32_t world;          /* number of ranks; 1 where the store is not sharded */
  int activation;          /* a hotplane_activation */
  double activation_limit; /* of SILU_CLAMPED and SWIGLU_OAI; else 0 */
  double activation_alpha; /* of SWIGLU_OAI; else 0 */
} hotplane_store;
HOTPLANE_API void hotplane_store_init(hotplane_store* store);
HOTPLANE_API hotplane_code hotplane_describe(const hotplane_engine* engine, hotplane_store* store);

typedef enum hotplane_presence {
  HOTPLANE_ABSENT = 1,
  HOTPLANE_PRESENT = 2,   /* header, generation, geometry and exact length are right */
  HOTPLANE_DAMAGED = 3,   /* a file is there and must not be used */
  HOTPLANE_UNREADABLE = 4 /* a file is there and the system does not let us look at it */
} hotplane_presence;

typedef enum hotplane_encoding {
  HOTPLANE_BASE_PLANES = 1,
  HOTPLANE_QUINTALS = 2, /* what makes nibbles of base codes, 5 bits for 2 elements */
  HOTPLANE_NIBBLES = 3   /* e2m1, 4 bits an element */
} hotplane_encoding;

/* One layer of the model and its files, by their headers alone. */
typedef struct hotplane_layer_info {
  size_t struct_bytes;
  uint32_t ordinal;
  uint32_t model_index;
  int mtp; /* 1: a layer of multi-token prediction */
  uint32_t experts;
  uint32_t hidden;
  uint32_t intermediate;  /* of a sharded store the rank's share, as everywhere */
  hotplane_presence base; /* of this rank */
  hotplane_presence delta;
  hotplane_encoding delta_encoding; /* of a delta tier that is present; else 0 */
} hotplane_layer_info;
HOTPLANE_API void hotplane_layer_info_init(hotplane_layer_info* info);
/* `layer` is an ordinal, below hotplane_store.layer_count. */
HOTPLANE_API hotplane_code hotplane_describe_layer(const hotplane_engine* engine, uint32_t layer,
                                                   hotplane_layer_info* info);

/* The record of one expert, of a sharded store this rank's slice of it: its parts one after the
 * other, without gaps, in the plane order of docs/format/planes.md.
 *   DELTA  fp13, fp2 as the store has them: quintals (2I*H*5/16 and H*I*5/16 bytes), or nibbles
 *   FULL   fp13 [2I*H/2], fp2 [H*I/2]: FP4 as nibbles, whatever the store has
 *   BASE   planes13 [2I*H/4], sc13 [2I*H/32], planes2 [H*I/4], sc2 [H*I/32]
 * `layer` is an ordinal, below hotplane_store.layer_count, `expert` below the layer's E. Every
 * record is verified when it is read, each time it is read; a bad chunk is read once more past the
 * page cache, then the call is HOTPLANE_DATA and names it. The engine stays usable. */
typedef enum hotplane_kind {
  HOTPLANE_DELTA = 1,
  HOTPLANE_FULL = 2,
  HOTPLANE_BASE = 3
} hotplane_kind;

/* Bytes of each record of this layer. DELTA: HOTPLANE_DATA when the layer has no delta tier. */
HOTPLANE_API hotplane_code hotplane_record_bytes(const hotplane_engine* engine, hotplane_kind kind,
                                                 uint32_t layer, size_t* bytes);
/* Reads one record into memory of the caller, of exactly hotplane_record_bytes; the caches have no
 * part in it. What is there after a failure is unspecified. */
HOTPLANE_API hotplane_code hotplane_read_record(hotplane_engine* engine, hotplane_kind kind,
                                                uint32_t layer, uint32_t expert, void* destination,
                                                size_t destination_bytes);
/* The same for `count` experts of one layer, in parallel; each destination has
 * `destination_bytes`. */
HOTPLANE_API hotplane_code hotplane_read_records(hotplane_engine* engine, hotplane_kind kind,
                                                 uint32_t layer, const uint32_t* experts,
                                                 void* const* destinations, size_t count,
                                                 size_t destination_bytes);

/* A record through its kind's cache, pinned: its bytes stay where and what they are until it is
 * released, after hotplane_close too. A hit takes no lock. With every slot pinned, or without a
 * cache, the record has memory of its own. BASE records of a layer that was landed in memory are
 * that memory. `bulk` 1: a pass over many records, which replaces nothing in the cache. */
typedef struct hotplane_record hotplane_record;
HOTPLANE_API hotplane_code hotplane_record_get(hotplane_engine* engine, hotplane_kind kind,
                                               uint32_t layer, uint32_t expert, int bulk,
                                               hotplane_record** record);
typedef struct hotplane_record_view {
  size_t struct_bytes;
  hotplane_kind kind;
  hotplane_encoding encoding;
  uint32_t layer;
  uint32_t expert;
  uint32_t part_count;  /* 2, or 4 for BASE */
  const void* parts[4]; /* in the order above; 64-byte aligned or better */
  size_t part_bytes[4];
} hotplane_record_view;
HOTPLANE_API void hotplane_record_view_init(hotplane_record_view* view);
HOTPLANE_API hotplane_code hotplane_record_look(const hotplane_record* record,
                                                hotplane_record_view* view);
/* Once per record. NULL is allowed. */
HOTPLANE_API void hotplane_record_release(hotplane_record* record);

/* For Python, whose signal handlers run between any two of its instructions, and what they raise in
 * a finalizer is lost: an owner that is there before what it owns and frees it in C. Both functions
 * are called with the GIL held. */
typedef enum hotplane_owned {
  HOTPLANE_OWNED_TENSOR = 1,
  HOTPLANE_OWNED_TENSOR_VERSIONED = 2,
  HOTPLANE_OWNED_RECORD = 3
} hotplane_owned;
/* A new Python capsule named "hotplane_owner" (a new reference), whose pointer is that of a place
 * with NULL in it, for hotplane_layer_dlpack or hotplane_record_get to fill. What is there when the
 * capsule is destroyed is freed, but in a child of the process that made it, which has no right to
 * it. NULL without Python in the process, or with an exception set. */
HOTPLANE_API void* hotplane_owner_new(hotplane_owned what);
/* Makes of such a capsule, filled with a tensor, the one that consumers of DLPack take. 0; -1 for
 * another capsule and for an empty place. */
HOTPLANE_API int hotplane_owner_to_dlpack(void* capsule);

/* Reads the records of these experts that are not cached yet into free places of the cache, in
 * parallel, and returns when that is done; replaces nothing. *cached (may be NULL): how many of
 * them are in the cache then. */
HOTPLANE_API hotplane_code hotplane_prefetch(hotplane_engine* engine, hotplane_kind kind,
                                             uint32_t layer, const uint32_t* experts, size_t count,
                                             size_t* cached);

/* Counts since the engine was opened. */
typedef struct hotplane_cache_stats {
  size_t struct_bytes;
  uint64_t hits;
  uint64_t misses;
  uint64_t evictions;
  uint64_t uncached; /* misses that found no place: the record had memory of its own */
  uint64_t prefetched;
  uint64_t failures;
  uint64_t slot_count;
  uint64_t slots_used;
  uint64_t bytes_used;
  uint64_t bytes_max;
} hotplane_cache_stats;
HOTPLANE_API void hotplane_cache_stats_init(hotplane_cache_stats* stats);
HOTPLANE_API hotplane_code hotplane_get_cache_stats(const hotplane_engine* engine,
                                                    hotplane_kind kind,
                                                    hotplane_cache_stats* stats);

/* At which precision an expert is computed. FP4 takes the expert's delta record through the cache
 * of DELTA records (hotplane_boot_options.delta_cache_bytes, pin_delta_bytes); without one it is
 * read at every call. */
typedef enum hotplane_precision {
  HOTPLANE_PRECISION_BASE = 1,
  HOTPLANE_PRECISION_FP4 = 2,
  HOTPLANE_PRECISION_FP4_OR_BASE = 3 /* of calls on a device: FP4 where it is there already */
} hotplane_precision;

/* How activations enter both products of a layer. On a device FAST and EXACT are both bfloat16. */
typedef enum hotplane_arithmetic {
  HOTPLANE_FAST = 1,  /* as int8 with one float32 scale per token and 32 of them */
  HOTPLANE_EXACT = 2, /* as float32 */
  HOTPLANE_FP8 = 3    /* rounded to e4m3 with one power of two per token and 128 of them, and then
                         as EXACT: what a model gives that is served with FP8 activations and
                         UE8M0 scales */
} hotplane_arithmetic;

/* One call of the operator on arrays of the host, straight from the planes; with e = ids[t,s]
 *   y[t] = sum over s of weights[t,s] * (w2[e] act(w13[e] x[t] + bias13[e]) + bias2[e])
 * Arrays are contiguous, row-major and the caller's own; y may not overlap x. */
typedef struct hotplane_moe {
  size_t struct_bytes;
  uint32_t layer;       /* ordinal; published by the boot */
  uint32_t token_count; /* T; 0: nothing is done */
  uint32_t top_k;       /* k; an expert may come twice for a token */
  int arithmetic;       /* a hotplane_arithmetic; FAST by default */
  int precision; /* a hotplane_precision, of every expert where there are no `precisions`; BASE
                    by default */
  const uint8_t* precisions; /* [E of the model's layer], a hotplane_precision each; NULL */
  const float* x;            /* [T, H], finite */
  const int32_t* ids;        /* [T, k], each in [0, E) */
  const float* weights;      /* [T, k], finite */
  float* y;                  /* [T, H] */
} hotplane_moe;
HOTPLANE_API void hotplane_moe_init(hotplane_moe* call);
/* A layer on the host is computed there, one on a CUDA device on that, in bfloat16: x is rounded,
 * and copied there and back; its FP4 is copied for the call, but for what hotplane_moe_load_fp4
 * left there. On the host results are the same to the bit for every number of threads, run, CPU,
 * and whatever other tokens are in the call; FP4 also from either encoding. Calls of several
 * threads take turns. Of a sharded store this rank's part of the sum. HOTPLANE_ISA in the
 * environment forces an instruction set
 * ("scalar", "avx2", "avx512") when the engine is opened.
 * HOTPLANE_USAGE for NULL, ids out of range, activations or weights that are not finite, a layer
 * that is not published; HOTPLANE_DATA for an expert that was not booted, or whose delta record is
 * absent or damaged; HOTPLANE_CAPACITY when memory is short, the host's or the device's;
 * HOTPLANE_SYSTEM when the device fails. What is in y after a failure is unspecified. */
HOTPLANE_API hotplane_code hotplane_moe_forward(hotplane_engine* engine, const hotplane_moe* call);

/* The same on arrays in the memory of the CUDA device that the layer lives on, enqueued on the
 * caller's stream: nothing waits, and it can be captured in a CUDA graph. Arrays are contiguous,
 * row-major, 16-byte aligned (ids and weights 4-byte); none overlaps y. Products are of bfloat16
 * activations and exact weights, summed in float32; the same call gives the same bits every time
 * (docs/operator.md). */
typedef struct hotplane_device_moe {
  size_t struct_bytes;
  uint32_t layer;         /* ordinal; published by the boot, on a CUDA device */
  uint32_t token_count;   /* T; 0: nothing is done */
  uint32_t top_k;         /* k; an expert may come twice for a token */
  int arithmetic;         /* HOTPLANE_FP8, or another one: bfloat16; FAST by default */
  int precision;          /* a hotplane_precision, of every expert where there are no `precisions`;
                             BASE by default */
  const void* precisions; /* uint8_t [E of the model's layer], a hotplane_precision each; NULL */
  const void* x;          /* bfloat16 [T, H] */
  const void* ids;        /* int32_t [T, k] */
  const void* weights;    /* float [T, k] */
  void* y;                /* bfloat16 [T, H] */
  /* Device memory of hotplane_moe_workspace_bytes, one call at a time. Its first
   * HOTPLANE_WORKSPACE_ZEROS bytes are zeros before the first call, and the operator's afterwards.
   */
  void* workspace;
  size_t workspace_bytes;
  void* stream; /* a CUstream or cudaStream_t of the device; NULL: its default stream */
} hotplane_device_moe;
#define HOTPLANE_WORKSPACE_ZEROS 256
HOTPLANE_API void hotplane_device_moe_init(hotplane_device_moe* call);
/* What is enqueued on `stream` (a CUstream or cudaStream_t of the engine's device; NULL: its
 * default stream) after this call runs on the device once the boot has published the layer: copied,
 * verified, in order. The host does not wait. From any thread, before hotplane_start and while the
 * boot runs; after the publication there is nothing to wait for. At most four streams wait at a
 * time: more would hold up the queues that CUDA gives a process.
 *
 * So hotplane_moe_forward_on_device can be enqueued for layers that are still on their way. When
 * the boot fails, or hotplane_close is called, the streams go on: what they compute of a layer that
 * is not published is NaN, and hotplane_moe_refusal tells the boot's failure.
 *
 * Until then do not wait for the whole device where the boot needs you to return: in its callback,
 * neither synchronize nor free device memory while a stream waits. CUDA does not know what such a
 * stream waits for. Nor copy to or from pageable memory behind it: the driver would keep its lock,
 * and the boot could not go on. `layer` is an ordinal. HOTPLANE_USAGE for an engine without a
 * device, a layer that this boot does not publish, a stream that is being captured, a fifth stream;
 * the boot's failure once it has failed. */
HOTPLANE_API hotplane_code hotplane_stream_wait_layer(hotplane_engine* engine, uint32_t layer,
                                                      void* stream);

/* What a call of so many tokens needs, at least; fewer need no more. The first one of a layer also
 * makes it ready, allocates and waits: before any capture, and better before any stream waits for a
 * layer. Of a boot that runs also for layers that it has not published yet. HOTPLANE_USAGE for a
 * layer that the boot does not publish, or on the host. */
HOTPLANE_API hotplane_code hotplane_moe_workspace_bytes(hotplane_engine* engine, uint32_t layer,
                                                        uint32_t token_count, uint32_t top_k,
                                                        size_t* bytes);
/* HOTPLANE_USAGE for what the host can see: NULL, misaligned, too small a workspace, a layer that
 * is not ready; HOTPLANE_SYSTEM when the launch fails. What only the device sees - an id that is no
 * expert, an expert without what was asked for - makes the rows of y concerned NaN and is told by
 * hotplane_moe_refusal. */
HOTPLANE_API hotplane_code hotplane_moe_forward_on_device(hotplane_engine* engine,
                                                          const hotplane_device_moe* call);
/* The first of the things that calls on the device of this layer could not compute since this was
 * last asked: HOTPLANE_DATA naming the expert, HOTPLANE_USAGE for an id; HOTPLANE_OK: nothing.
 * Waits for no stream: of calls that have ended. */
HOTPLANE_API hotplane_code hotplane_moe_refusal(hotplane_engine* engine, uint32_t layer);
/* Copies the FP4 of `count` experts to the layer's device, where it stays until hotplane_close;
 * NULL and 0: of all that were booted. No hotplane_moe_forward_on_device of this layer may be on
 * its way or be made meanwhile. Errors as of hotplane_moe_forward; HOTPLANE_CAPACITY where the
 * device's memory ends: the experts before are there. */
HOTPLANE_API hotplane_code hotplane_moe_load_fp4(hotplane_engine* engine, uint32_t layer,
                                                 const uint32_t* experts, size_t count);

/* Ends a boot that still runs, waits for calls on devices that are on their way, and ends the use
 * of all pointers but those of records that are not released and of DLPack tensors that are not
 * deleted yet; frees everything that is not theirs. NULL is allowed. */
HOTPLANE_API void hotplane_close(hotplane_engine* engine);
/* Takes what is in *engine, leaves NULL there and closes what was: of several calls one does it,
 * and no signal handler of an interpreter can come between the two. */
HOTPLANE_API void hotplane_close_at(hotplane_engine** engine);

#ifdef __cplusplus
}
#endif

#endif /* HOTPLANE_HOTPLANE_H_ */
