/* The C interface of libanchorkv: compression of keys and values, attention on the compressed form, caches, files.
 * Plain C11, also C++. docs/c-api.md has an overview and a program; the method is in docs/algorithm.md.
 *
 * Errors. Every function that can fail returns an anchorkv_status. On anything but ANCHORKV_OK outputs are as they were
 * and anchorkv_last_error() has one line that names the value and what is allowed. Nothing is printed, nothing aborts.
 *
 * Structs. Those that begin with `size` can grow: set them up with their _init function and sizeof, then change fields.
 * A program that was built with an older header runs with a newer library, which takes its own defaults for the fields
 * that the program does not know; a newer program with an older library works as long as the fields that the library
 * does not know are zero (ANCHORKV_UNSUPPORTED otherwise).
 *
 * Memory. Handles that a function returns belong to the caller, who frees each once; freeing NULL does nothing. They
 * may be freed in any order: what refers to another object keeps it. Arrays are borrowed for the duration of the call.
 *
 * Threads. Ropes, segments and files never change and may be used by several threads at once; a cache by one thread at
 * a time. Work inside a call is spread over OpenMP's threads; results do not depend on their number.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* --- Version --------------------------------------------------------------------------------------------------- */

#define ANCHORKV_VERSION_MAJOR 0
#define ANCHORKV_VERSION_MINOR 1
#define ANCHORKV_VERSION_PATCH 0

/* Raised when something that was there changes its meaning or goes away; additions do not raise it. A program runs with
 * a library of the same number. */
#define ANCHORKV_ABI_VERSION 1

/* ANCHORKV_ABI_VERSION of the library in use. */
int32_t anchorkv_abi_version(void);
/* "0.1.0", of the library in use. */
const char* anchorkv_version(void);
/* One line: "commit ..., SIMD AVX2 AVX3 in use AVX3, ...". */
const char* anchorkv_features(void);

/* --- Errors ---------------------------------------------------------------------------------------------------- */

typedef enum anchorkv_status {
  ANCHORKV_OK = 0,
  ANCHORKV_INVALID_ARGUMENT = 1, /* a value is outside what is allowed */
  ANCHORKV_INFEASIBLE = 2,       /* the ratio cannot be reached; the message names the largest that can */
  ANCHORKV_NOT_FOUND = 3,        /* no such file or folder */
  ANCHORKV_UNSUPPORTED = 4,      /* well-formed, but outside what this library handles */
  ANCHORKV_DATA_LOSS = 5,        /* a file is truncated or damaged, or could not be written */
  ANCHORKV_OUT_OF_MEMORY = 6,
  ANCHORKV_INTERNAL = 7, /* a numeric failure such as a NaN in the input, or our own mistake */
  ANCHORKV_CANCELLED = 8
} anchorkv_status;

/* "ok", "invalid argument", ...; "unknown status" for other numbers. */
const char* anchorkv_status_name(int32_t status);
/* What the last call of this thread that failed had to say; "" before the first. Valid until the thread's next failing
 * call. */
const char* anchorkv_last_error(void);

/* --- Arrays ---------------------------------------------------------------------------------------------------- */

/* [heads, tokens, head_dim] floats: element (h, t, d) is data[h * head_stride + t * token_stride + d]. Strides are in
 * elements. The layout of these two never changes. */
typedef struct anchorkv_view {
  const float* data;
  int64_t heads, tokens, head_dim;
  int64_t head_stride, token_stride;
} anchorkv_view;

/* The same for results; rows must not overlap. */
typedef struct anchorkv_mutable_view {
  float* data;
  int64_t heads, tokens, head_dim;
  int64_t head_stride, token_stride;
} anchorkv_mutable_view;

/* data[(head * tokens + token) * head_dim + d], all tokens of a head together. */
static inline anchorkv_view anchorkv_head_major(const float* data, int64_t heads, int64_t tokens, int64_t head_dim) {
  anchorkv_view view = {data, heads, tokens, head_dim, 0, 0};
  view.head_stride = tokens * head_dim;
  view.token_stride = head_dim;
  return view;
}
static inline anchorkv_mutable_view anchorkv_head_major_out(float* data, int64_t heads, int64_t tokens,
                                                            int64_t head_dim) {
  anchorkv_mutable_view view = {data, heads, tokens, head_dim, 0, 0};
  view.head_stride = tokens * head_dim;
  view.token_stride = head_dim;
  return view;
}

/* --- Rotary embedding ------------------------------------------------------------------------------------------ */

typedef enum anchorkv_pairing {
  ANCHORKV_PAIRING_INTERLEAVED = 0, /* coordinates 2i and 2i + 1: GGUF files of Llama */
  ANCHORKV_PAIRING_HALF_SPLIT = 1   /* i and i + rotary_dim / 2: Hugging Face, qwen2 */
} anchorkv_pairing;

/* Parameters with the meaning of ggml_rope_ext. Linear scaling: freq_scale = 1 / factor. YaRN: ext_factor = 1 and
 * freq_scale = 1 / factor. Llama 3: freq_factors. */
typedef struct anchorkv_rope_params {
  size_t size;
  int32_t head_dim;          /* elements of a head; to be set */
  int32_t rotary_dim;        /* coordinates that turn; 0: all (the default) */
  int32_t pairing;           /* anchorkv_pairing; half split */
  int32_t original_context;  /* read when ext_factor is not 0 */
  int64_t max_position;      /* positions are below it; 262144 */
  double freq_base;          /* 10000 */
  double freq_scale;         /* 1 */
  double ext_factor;         /* 0 */
  double attn_factor;        /* 1 */
  double beta_fast;          /* 32 */
  double beta_slow;          /* 1 */
  const float* freq_factors; /* NULL, or freq_factor_count = rotary_dim / 2 divisors; copied */
  int64_t freq_factor_count;
} anchorkv_rope_params;

typedef struct anchorkv_rope anchorkv_rope;

anchorkv_status anchorkv_rope_params_init(anchorkv_rope_params* params, size_t size);
anchorkv_status anchorkv_rope_create(const anchorkv_rope_params* params, anchorkv_rope** rope);
void anchorkv_rope_free(anchorkv_rope* rope);
/* Turns rows in place: token t of the view to position first_position + t; _unrotate turns them back. */
anchorkv_status anchorkv_rope_rotate(const anchorkv_rope* rope, int64_t first_position,
                                     const anchorkv_mutable_view* rows);
anchorkv_status anchorkv_rope_unrotate(const anchorkv_rope* rope, int64_t first_position,
                                       const anchorkv_mutable_view* rows);

/* --- Compression ----------------------------------------------------------------------------------------------- */

typedef enum anchorkv_profile {
  ANCHORKV_PROFILE_PAPER = 0, /* the constants of arXiv 2608.02901 */
  ANCHORKV_PROFILE_BLEND = 1,
  ANCHORKV_PROFILE_ADAPTIVE = 2 /* the default: best at equal bytes */
} anchorkv_profile;

typedef enum anchorkv_ranking {
  ANCHORKV_RANKING_UTILITY = 0,
  ANCHORKV_RANKING_BLEND = 1,
  ANCHORKV_RANKING_BLEND_NOVELTY = 2,
  ANCHORKV_RANKING_NORM = 3,
  ANCHORKV_RANKING_ATTENTION = 4,
  ANCHORKV_RANKING_COSINE = 5,
  ANCHORKV_RANKING_RANDOM = 6
} anchorkv_ranking;

typedef enum anchorkv_surplus {
  ANCHORKV_SURPLUS_NONE = 0,
  ANCHORKV_SURPLUS_BITS = 1,
  ANCHORKV_SURPLUS_ANCHORS = 2
} anchorkv_surplus;

typedef enum anchorkv_residual_scale {
  ANCHORKV_SCALE_LEAST_SQUARES = 0,
  ANCHORKV_SCALE_RMS = 1,
  ANCHORKV_SCALE_ABSMAX = 2,
  ANCHORKV_SCALE_ABSMAX_LITERAL = 3
} anchorkv_residual_scale;

typedef enum anchorkv_codebook { ANCHORKV_CODEBOOK_LLOYD_MAX = 0, ANCHORKV_CODEBOOK_UNIFORM = 1 } anchorkv_codebook;

/* Every ingredient of the method; anchorkv/options.h describes them and which a profile reads. */
typedef struct anchorkv_codec_options {
  size_t size;
  double ratio;    /* how many times smaller than 16-bit keys and values, at least; 4. Allowed: from 0.5 */
  int32_t profile; /* anchorkv_profile */
  int32_t window;  /* last positions, kept exactly, whose queries are observed; 32 */
  int64_t anchors; /* per kv head; 0: the profile's rule */
  uint64_t seed;   /* of random choices */
  double rho;
  double prior_phi;
  double key_share;
  double wide_share;
  int32_t pool;
  int32_t sinks;
  int32_t ranking; /* anchorkv_ranking */
  int32_t residual_bits;
  int32_t wide_bits;
  int32_t surplus;    /* anchorkv_surplus */
  int32_t scale;      /* anchorkv_residual_scale */
  int32_t codebook;   /* anchorkv_codebook */
  int32_t pool_heads; /* this and what follows: 0 or 1 */
  int32_t hadamard;
  int32_t pre_rope;
  int32_t value_basis;
} anchorkv_codec_options;

/* The options of a profile (anchorkv_profile) at ratio 4. Whoever wants another profile calls this again: its other
 * options differ. */
anchorkv_status anchorkv_codec_options_init(anchorkv_codec_options* options, size_t size, int32_t profile);

/* One layer of a prompt. */
typedef struct anchorkv_layer {
  size_t size;
  anchorkv_view keys; /* [kv_heads, tokens, head_dim] before the rotary embedding; head_dim a multiple of 8 up to 512 */
  anchorkv_view values; /* of the same shape */
  anchorkv_view
      queries; /* [q_heads, n, head_dim] after it, of the last n >= window positions; q_heads a multiple of kv_heads */
  int64_t first_position; /* of the first token */
  int32_t layer;          /* which one: part of what seeds random choices */
  int32_t keys_rotated;   /* 1: keys come after the rotary embedding */
  /* The queries' attention to what comes before this layer's first token, or NULL three times: sum of exp(x - m) v
   * [n, q_heads, head_dim], the largest logit m [n, q_heads], sum of exp(x - m) [n, q_heads], of the last n queries. */
  const float* prior_o;
  const float* prior_m;
  const float* prior_l;
} anchorkv_layer;

typedef struct anchorkv_segment anchorkv_segment;

anchorkv_status anchorkv_layer_init(anchorkv_layer* layer, size_t size);
/* options: NULL for the profile adaptive at ratio 4. Infinite and NaN input is ANCHORKV_INTERNAL, naming the place. */
anchorkv_status anchorkv_compress(const anchorkv_layer* layer, const anchorkv_rope* rope,
                                  const anchorkv_codec_options* options, anchorkv_segment** segment);
void anchorkv_segment_free(anchorkv_segment* segment);

typedef struct anchorkv_segment_info {
  size_t size;
  int64_t tokens;
  int64_t first_position;
  int32_t kv_heads;
  int32_t head_dim;
  int64_t bytes;             /* read from the buffer */
  int64_t dense_bytes;       /* of the same keys and values in 16 bits */
  double key_residual_share; /* of the keys that are not exact, those that have a residual or code */
  double value_residual_share;
} anchorkv_segment_info;

/* Fills the first `size` bytes of *info, which include info->size. */
anchorkv_status anchorkv_segment_get_info(const anchorkv_segment* segment, anchorkv_segment_info* info, size_t size);

/* Keys after the rotary embedding and values, [kv_heads, tokens, head_dim] each. For tests and studies. */
anchorkv_status anchorkv_segment_dequantize(const anchorkv_segment* segment, const anchorkv_mutable_view* keys,
                                            const anchorkv_mutable_view* values);

/* Attention of queries [q_heads, n, head_dim], after the rotary embedding, over the whole segment, without mask.
 * out: [q_heads, n, head_dim], normalised. lse: NULL, or [q_heads, n], the natural logarithm of the sum of exponentials
 * of the logits q k / sqrt(head_dim), with which outputs over several stretches are merged. Query head h reads kv head
 * h / (q_heads / kv_heads). */
anchorkv_status anchorkv_segment_attend(const anchorkv_segment* segment, const anchorkv_view* queries,
                                        const anchorkv_mutable_view* out, float* lse);

/* Attention of new tokens over segments and exact keys and values of the caller's own, as a step of decoding does it.
 */
typedef struct anchorkv_attention {
  size_t size;
  const anchorkv_segment* const* segments; /* all before the queries; may be NULL when there are none */
  int64_t segment_count;
  anchorkv_view
      tail_keys; /* [kv_heads, rows, head_dim] after the rotary embedding; data NULL: no tail. The last n rows */
  anchorkv_view tail_values; /* are the queries' own: query i sees rows up to its own. Equal token strides. */
  anchorkv_view queries;     /* [q_heads, n, head_dim] after the rotary embedding */
  double scale;              /* of logits; 0: 1 / sqrt(head_dim) */
  anchorkv_mutable_view out; /* as above */
  float* lse;                /* as above */
} anchorkv_attention;

anchorkv_status anchorkv_attention_init(anchorkv_attention* attention, size_t size);
anchorkv_status anchorkv_attend(const anchorkv_attention* attention);

/* --- Estimates ------------------------------------------------------------------------------------------------- */

typedef struct anchorkv_estimate {
  size_t size;
  int64_t dense_bytes;  /* 16-bit keys and values of all layers */
  int64_t bytes;        /* compressed, at most */
  double ratio;         /* their quotient */
  double largest_ratio; /* that this shape and length can reach */
  int64_t exact_tokens; /* per kv head */
} anchorkv_estimate;

/* What a compressed cache of that shape takes, by the arithmetic that plans segments. options as for anchorkv_compress.
 */
anchorkv_status anchorkv_estimate_bytes(int32_t layers, int32_t kv_heads, int32_t head_dim, int64_t tokens,
                                        const anchorkv_codec_options* options, anchorkv_estimate* estimate,
                                        size_t size);

/* --- Files of segments ----------------------------------------------------------------------------------------- */

/* Segments, say of all layers, that share their rope, with a text of the caller's own (NULL: none), as a file: there
 * whole or not at all. The format is docs/file-format.md's; Python reads and writes the same files. */
anchorkv_status anchorkv_segments_save(const char* path, const anchorkv_segment* const* segments, int64_t count,
                                       const char* note);
/* The contents of that file. *needed is set to how many bytes they are; they are written to `bytes` when `capacity` is
 * enough, else this is ANCHORKV_INVALID_ARGUMENT, or just ANCHORKV_OK when `bytes` is NULL. */
anchorkv_status anchorkv_segments_store(const anchorkv_segment* const* segments, int64_t count, const char* note,
                                        void* bytes, size_t capacity, size_t* needed);

typedef struct anchorkv_file anchorkv_file;

/* Checks every byte. open maps the file, whose pages stay mapped as long as a segment of it is there; read copies. */
anchorkv_status anchorkv_file_open(const char* path, anchorkv_file** file);
anchorkv_status anchorkv_file_read(const void* bytes, size_t size, anchorkv_file** file);
void anchorkv_file_free(anchorkv_file* file);
/* Segments in the file; 0 for NULL. */
int64_t anchorkv_file_count(const anchorkv_file* file);
/* The text that was stored with them; "" for NULL. Lives as long as the file. */
const char* anchorkv_file_note(const anchorkv_file* file);
/* Segment `index`, and the rope that all of them have. */
anchorkv_status anchorkv_file_segment(const anchorkv_file* file, int64_t index, anchorkv_segment** segment);
anchorkv_status anchorkv_file_rope(const anchorkv_file* file, anchorkv_rope** rope);

/* --- Caches ---------------------------------------------------------------------------------------------------- */

typedef enum anchorkv_tail_type { ANCHORKV_TAIL_F32 = 0, ANCHORKV_TAIL_F16 = 1 } anchorkv_tail_type;

typedef struct anchorkv_cache_params {
  size_t size;
  int32_t layers, q_heads, kv_heads; /* to be set; the rope says head_dim */
  int32_t tail_type;                 /* anchorkv_tail_type of new tokens; f16 */
  int64_t tail_limit;                /* longer tails are compressed by anchorkv_cache_compress_tail; 0: never */
  int64_t min_tokens;                /* shorter prompts stay exact; 512 */
} anchorkv_cache_params;

/* A sequence's cache over all layers: a prompt is added layer by layer and compressed, new tokens go to an exact
 * tail. */
typedef struct anchorkv_cache anchorkv_cache;

anchorkv_status anchorkv_cache_params_init(anchorkv_cache_params* params, size_t size);
/* options as for anchorkv_compress. */
anchorkv_status anchorkv_cache_create(const anchorkv_cache_params* params, const anchorkv_rope* rope,
                                      const anchorkv_codec_options* options, anchorkv_cache** cache);
void anchorkv_cache_free(anchorkv_cache* cache);

/* One layer of a prompt: keys before the rotary embedding and values [kv_heads, tokens, head_dim], queries
 * [q_heads, n, head_dim] after it, of the last n positions. Layers come in any order, each once; the cache's tokens
 * grow with the last one. An error gives the whole prompt up. */
anchorkv_status anchorkv_cache_append_prompt(anchorkv_cache* cache, int32_t layer, const anchorkv_view* keys,
                                             const anchorkv_view* values, const anchorkv_view* queries);
/* One layer of a prompt that was compressed before: a segment from position 0, of the cache's shape, to an empty
 * cache. */
anchorkv_status anchorkv_cache_append_segment(anchorkv_cache* cache, int32_t layer, const anchorkv_segment* segment);

/* A step: begin makes room for `tokens` new ones in every layer; attend, once per layer, stores their keys (after the
 * rotary embedding) and values [kv_heads, tokens, head_dim] and gives the attention of their queries [q_heads, tokens,
 * head_dim], after it too, over everything up to themselves; end keeps the tokens. A step that is not ended is
 * forgotten by anchorkv_cache_truncate. */
anchorkv_status anchorkv_cache_begin_step(anchorkv_cache* cache, int32_t tokens);
anchorkv_status anchorkv_cache_attend(anchorkv_cache* cache, int32_t layer, const anchorkv_view* keys,
                                      const anchorkv_view* values, const anchorkv_view* queries,
                                      const anchorkv_mutable_view* out);
anchorkv_status anchorkv_cache_end_step(anchorkv_cache* cache);
/* Compresses the tail into a further segment when it is longer than tail_limit. Between steps. */
anchorkv_status anchorkv_cache_compress_tail(anchorkv_cache* cache);
/* Keeps the first tokens. Exact inside the tail and where a segment ends; inside a segment it is refused. */
anchorkv_status anchorkv_cache_truncate(anchorkv_cache* cache, int64_t tokens);

typedef struct anchorkv_cache_info {
  size_t size;
  int64_t tokens;            /* held; the position of the next one */
  int64_t compressed_tokens; /* of them in segments */
  int32_t layers;
  int32_t layers_compressed;
  int64_t dense_bytes;   /* 16-bit keys and values of all layers and tokens */
  int64_t segment_bytes; /* this and what follows: counted from the buffers */
  int64_t tail_bytes;
  int64_t reserved_bytes;  /* allocated, not used yet */
  int64_t workspace_bytes; /* of a step */
} anchorkv_cache_info;

anchorkv_status anchorkv_cache_get_info(const anchorkv_cache* cache, anchorkv_cache_info* info, size_t size);
/* How many segments a layer has (0 for NULL or no such layer), and one of them. */
int64_t anchorkv_cache_segment_count(const anchorkv_cache* cache, int32_t layer);
anchorkv_status anchorkv_cache_segment(const anchorkv_cache* cache, int32_t layer, int64_t index,
                                       anchorkv_segment** segment);

/* --- Threads --------------------------------------------------------------------------------------------------- */

/* How many threads this thread's later calls use; without it OMP_NUM_THREADS, or one per processor. */
anchorkv_status anchorkv_set_threads(int32_t threads);

#ifdef __cplusplus
}
#endif
