/* every_function FILE: calls every function of the C interface through the shared library, with right and with wrong
 * arguments. FILE is written. Prints what is wrong; exit code 1 when anything is. */
#include <anchorkv/anchorkv.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KV_HEADS = 2, Q_HEADS = 4, DIM = 32, TOKENS = 700, WINDOW = 32, NEW = 3, LAYERS = 2 };

static int failures = 0;

#define EXPECT(condition)                                                  \
  do {                                                                     \
    if (!(condition)) {                                                    \
      printf("line %d: %s; last error: %s\n", __LINE__, #condition, anchorkv_last_error()); \
      ++failures;                                                          \
    }                                                                      \
  } while (0)
#define EXPECT_OK(call) EXPECT((call) == ANCHORKV_OK)
/* The status, and a message that contains the text. */
#define EXPECT_ERROR(call, status, text) EXPECT((call) == (status) && strstr(anchorkv_last_error(), (text)) != NULL)

static uint64_t state = 1;
static float Uniform(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (float)(state >> 40) / (float)(1 << 23) - 1.0f;
}
static float* Random(int64_t count) {
  float* values = malloc((size_t)count * sizeof(float));
  for (int64_t i = 0; i < count; ++i) values[i] = Uniform() + Uniform() + Uniform();
  return values;
}
static float* Zeros(int64_t count) { return calloc((size_t)count, sizeof(float)); }

/* softmax(q K^T / sqrt(DIM)) V over rows of one head, and its log of the sum. */
static double DenseAttention(const float* q, const float* keys, const float* values, int64_t rows, double* out) {
  double largest = -INFINITY, sum = 0;
  double* weights = malloc((size_t)rows * sizeof(double));
  for (int64_t t = 0; t < rows; ++t) {
    double dot = 0;
    for (int d = 0; d < DIM; ++d) dot += (double)q[d] * (double)keys[t * DIM + d];
    weights[t] = dot / sqrt((double)DIM);
    largest = fmax(largest, weights[t]);
  }
  for (int d = 0; d < DIM; ++d) out[d] = 0;
  for (int64_t t = 0; t < rows; ++t) sum += exp(weights[t] - largest);
  for (int64_t t = 0; t < rows; ++t) {
    for (int d = 0; d < DIM; ++d) out[d] += exp(weights[t] - largest) / sum * (double)values[t * DIM + d];
  }
  free(weights);
  return largest + log(sum);
}

static void TestVersion(void) {
  char expected[32];
  snprintf(expected, sizeof expected, "%d.%d.%d", ANCHORKV_VERSION_MAJOR, ANCHORKV_VERSION_MINOR,
           ANCHORKV_VERSION_PATCH);
  EXPECT(anchorkv_abi_version() == ANCHORKV_ABI_VERSION);
  EXPECT(strcmp(anchorkv_version(), expected) == 0);
  EXPECT(strstr(anchorkv_features(), "SIMD") != NULL);
  EXPECT(strcmp(anchorkv_status_name(ANCHORKV_OK), "ok") == 0);
  EXPECT(strcmp(anchorkv_status_name(ANCHORKV_CANCELLED), "cancelled") == 0);
  EXPECT(strcmp(anchorkv_status_name(99), "unknown status") == 0);
  EXPECT(strcmp(anchorkv_status_name(-1), "unknown status") == 0);
  EXPECT(strcmp(anchorkv_last_error(), "") == 0);
  EXPECT_ERROR(anchorkv_set_threads(0), ANCHORKV_INVALID_ARGUMENT, "threads is 0");
  EXPECT_OK(anchorkv_set_threads(2));
}

/* A struct as a later header might have it: longer. */
struct LongerLayer {
  anchorkv_layer layer;
  int64_t more;
};

static void TestStructSizes(const anchorkv_rope* rope, const anchorkv_layer* layer) {
  anchorkv_codec_options options;
  EXPECT_ERROR(anchorkv_codec_options_init(NULL, sizeof options, ANCHORKV_PROFILE_PAPER), ANCHORKV_INVALID_ARGUMENT,
               "null");
  EXPECT_ERROR(anchorkv_codec_options_init(&options, 8, ANCHORKV_PROFILE_PAPER), ANCHORKV_INVALID_ARGUMENT,
               "the size of options is 8");
  EXPECT_ERROR(anchorkv_codec_options_init(&options, sizeof options, 9), ANCHORKV_INVALID_ARGUMENT,
               "profile is 9");
  EXPECT_OK(anchorkv_codec_options_init(&options, sizeof options, ANCHORKV_PROFILE_PAPER));
  EXPECT(options.size == sizeof options && options.profile == ANCHORKV_PROFILE_PAPER && options.window == 32);

  anchorkv_segment* segment = NULL;
  struct LongerLayer longer;
  EXPECT_OK(anchorkv_layer_init(&longer.layer, sizeof longer));
  EXPECT(longer.layer.size == sizeof longer && longer.more == 0);
  longer.layer = *layer;
  longer.layer.size = sizeof longer;
  longer.more = 0;
  EXPECT_OK(anchorkv_compress(&longer.layer, rope, NULL, &segment));
  anchorkv_segment_free(segment);
  segment = NULL;
  longer.more = 7;
  EXPECT_ERROR(anchorkv_compress(&longer.layer, rope, NULL, &segment), ANCHORKV_UNSUPPORTED, "does not know");
  longer.layer.size = 5;
  EXPECT_ERROR(anchorkv_compress(&longer.layer, rope, NULL, &segment), ANCHORKV_INVALID_ARGUMENT, "is 5");
  longer.layer.size = SIZE_MAX;
  EXPECT_ERROR(anchorkv_compress(&longer.layer, rope, NULL, &segment), ANCHORKV_INVALID_ARGUMENT, "the size of layer");
  EXPECT(segment == NULL);
}

static void TestRope(void) {
  anchorkv_rope_params params;
  anchorkv_rope* rope = NULL;
  EXPECT_OK(anchorkv_rope_params_init(&params, sizeof params));
  EXPECT_ERROR(anchorkv_rope_create(&params, &rope), ANCHORKV_INVALID_ARGUMENT, "head_dim is 0");
  params.head_dim = DIM;
  EXPECT_ERROR(anchorkv_rope_create(&params, NULL), ANCHORKV_INVALID_ARGUMENT, "rope is null");
  EXPECT_ERROR(anchorkv_rope_create(NULL, &rope), ANCHORKV_INVALID_ARGUMENT, "params is null");
  params.pairing = 2;
  EXPECT_ERROR(anchorkv_rope_create(&params, &rope), ANCHORKV_INVALID_ARGUMENT, "pairing is 2");
  params.pairing = ANCHORKV_PAIRING_INTERLEAVED;
  params.freq_factor_count = DIM / 2;
  EXPECT_ERROR(anchorkv_rope_create(&params, &rope), ANCHORKV_INVALID_ARGUMENT, "freq_factors is null");
  float factors[DIM / 2];
  for (int i = 0; i < DIM / 2; ++i) factors[i] = 2.0f;
  params.freq_factors = factors;
  params.max_position = INT64_MAX;
  EXPECT_ERROR(anchorkv_rope_create(&params, &rope), ANCHORKV_INVALID_ARGUMENT, "max_position");
  params.max_position = 100;
  EXPECT_OK(anchorkv_rope_create(&params, &rope));

  float* rows = Random(2 * 5 * DIM);
  float* copy = Zeros(2 * 5 * DIM);
  memcpy(copy, rows, 2 * 5 * DIM * sizeof(float));
  const anchorkv_mutable_view view = anchorkv_head_major_out(rows, 2, 5, DIM);
  EXPECT_OK(anchorkv_rope_rotate(rope, 95, &view));
  EXPECT(fabsf(rows[DIM] - copy[DIM]) > 1e-3f);
  EXPECT_OK(anchorkv_rope_unrotate(rope, 95, &view));
  for (int i = 0; i < 2 * 5 * DIM; ++i) EXPECT(fabsf(rows[i] - copy[i]) < 1e-5f);
  EXPECT_ERROR(anchorkv_rope_rotate(rope, 96, &view), ANCHORKV_INVALID_ARGUMENT, "below 100");
  EXPECT_ERROR(anchorkv_rope_rotate(rope, -1, &view), ANCHORKV_INVALID_ARGUMENT, "position -1");
  EXPECT_ERROR(anchorkv_rope_rotate(rope, 0, NULL), ANCHORKV_INVALID_ARGUMENT, "rows is null");
  EXPECT_ERROR(anchorkv_rope_unrotate(NULL, 0, &view), ANCHORKV_INVALID_ARGUMENT, "rope is null");
  anchorkv_mutable_view overlapping = view;
  overlapping.token_stride = DIM - 1;
  EXPECT_ERROR(anchorkv_rope_rotate(rope, 0, &overlapping), ANCHORKV_INVALID_ARGUMENT, "overlap");
  free(rows);
  free(copy);
  anchorkv_rope_free(rope);
  anchorkv_rope_free(NULL);
}

static void TestWrongLayers(const anchorkv_rope* rope, const anchorkv_layer* right) {
  anchorkv_segment* segment = NULL;
  anchorkv_codec_options options;
  EXPECT_OK(anchorkv_codec_options_init(&options, sizeof options, ANCHORKV_PROFILE_ADAPTIVE));
  EXPECT_ERROR(anchorkv_compress(NULL, rope, NULL, &segment), ANCHORKV_INVALID_ARGUMENT, "layer is null");
  EXPECT_ERROR(anchorkv_compress(right, NULL, NULL, &segment), ANCHORKV_INVALID_ARGUMENT, "rope is null");
  EXPECT_ERROR(anchorkv_compress(right, rope, NULL, NULL), ANCHORKV_INVALID_ARGUMENT, "segment is null");
  anchorkv_layer wrong = *right;
  wrong.keys.data = NULL;
  EXPECT_ERROR(anchorkv_compress(&wrong, rope, NULL, &segment), ANCHORKV_INVALID_ARGUMENT, "the data of keys is null");
  wrong = *right;
  wrong.values.tokens = 0;
  EXPECT_ERROR(anchorkv_compress(&wrong, rope, NULL, &segment), ANCHORKV_INVALID_ARGUMENT, "values has the shape");
  wrong = *right;
  wrong.keys.token_stride = INT64_MAX;
  EXPECT_ERROR(anchorkv_compress(&wrong, rope, NULL, &segment), ANCHORKV_INVALID_ARGUMENT, "too large");
  wrong = *right;
  wrong.keys.head_stride = -1;
  EXPECT_ERROR(anchorkv_compress(&wrong, rope, NULL, &segment), ANCHORKV_INVALID_ARGUMENT, "negative stride");
  wrong = *right;
  wrong.values.heads = 1;
  EXPECT_ERROR(anchorkv_compress(&wrong, rope, NULL, &segment), ANCHORKV_INVALID_ARGUMENT, "same shape");
  wrong = *right;
  wrong.queries.tokens = WINDOW - 1;
  EXPECT_ERROR(anchorkv_compress(&wrong, rope, NULL, &segment), ANCHORKV_INVALID_ARGUMENT, "31 window queries");
  wrong = *right;
  wrong.first_position = INT64_MAX;
  EXPECT_ERROR(anchorkv_compress(&wrong, rope, NULL, &segment), ANCHORKV_INVALID_ARGUMENT, "from position");
  wrong = *right;
  wrong.keys_rotated = 2;
  EXPECT_ERROR(anchorkv_compress(&wrong, rope, NULL, &segment), ANCHORKV_INVALID_ARGUMENT, "keys_rotated is 2");
  wrong = *right;
  wrong.prior_m = right->keys.data;
  EXPECT_ERROR(anchorkv_compress(&wrong, rope, NULL, &segment), ANCHORKV_INVALID_ARGUMENT, "prior_o");
  options.ratio = NAN;
  EXPECT_ERROR(anchorkv_compress(right, rope, &options, &segment), ANCHORKV_INVALID_ARGUMENT, "ratio is");
  options.ratio = 1e6;
  EXPECT_ERROR(anchorkv_compress(right, rope, &options, &segment), ANCHORKV_INFEASIBLE, "");
  options.ratio = 4;
  options.hadamard = 3;
  EXPECT_ERROR(anchorkv_compress(right, rope, &options, &segment), ANCHORKV_INVALID_ARGUMENT, "hadamard is 3");
  options.hadamard = 1;
  options.ranking = -1;
  EXPECT_ERROR(anchorkv_compress(right, rope, &options, &segment), ANCHORKV_INVALID_ARGUMENT, "ranking is -1");
  options.ranking = ANCHORKV_RANKING_BLEND;
  options.window = 0;
  EXPECT_ERROR(anchorkv_compress(right, rope, &options, &segment), ANCHORKV_INVALID_ARGUMENT, "window");
  float* poisoned = Random(KV_HEADS * TOKENS * DIM);
  poisoned[5 * DIM] = NAN;
  wrong = *right;
  wrong.keys.data = poisoned;
  EXPECT_ERROR(anchorkv_compress(&wrong, rope, NULL, &segment), ANCHORKV_INTERNAL, "not finite");
  free(poisoned);
  EXPECT(segment == NULL);
}

static void TestSegment(const anchorkv_segment* segment, const float* queries) {
  anchorkv_segment_info info;
  EXPECT_ERROR(anchorkv_segment_get_info(NULL, &info, sizeof info), ANCHORKV_INVALID_ARGUMENT, "segment is null");
  EXPECT_ERROR(anchorkv_segment_get_info(segment, NULL, sizeof info), ANCHORKV_INVALID_ARGUMENT, "info is null");
  EXPECT_OK(anchorkv_segment_get_info(segment, &info, sizeof info));
  EXPECT(info.tokens == TOKENS && info.first_position == 0 && info.kv_heads == KV_HEADS && info.head_dim == DIM);
  EXPECT(info.dense_bytes == 4 * KV_HEADS * TOKENS * DIM && info.bytes * 4 <= info.dense_bytes);
  EXPECT(info.key_residual_share >= 0 && info.key_residual_share <= 1 && info.value_residual_share <= 1);

  float* keys = Zeros(KV_HEADS * TOKENS * DIM);
  float* values = Zeros(KV_HEADS * TOKENS * DIM);
  const anchorkv_mutable_view k = anchorkv_head_major_out(keys, KV_HEADS, TOKENS, DIM);
  const anchorkv_mutable_view v = anchorkv_head_major_out(values, KV_HEADS, TOKENS, DIM);
  EXPECT_OK(anchorkv_segment_dequantize(segment, &k, &v));
  anchorkv_mutable_view shorter = k;
  shorter.tokens = TOKENS - 1;
  EXPECT_ERROR(anchorkv_segment_dequantize(segment, &shorter, &v), ANCHORKV_INVALID_ARGUMENT, "keys has the shape");
  EXPECT_ERROR(anchorkv_segment_dequantize(segment, &k, NULL), ANCHORKV_INVALID_ARGUMENT, "values is null");
  EXPECT_ERROR(anchorkv_segment_dequantize(NULL, &k, &v), ANCHORKV_INVALID_ARGUMENT, "segment is null");

  float* out = Zeros(Q_HEADS * WINDOW * DIM);
  float lse[Q_HEADS * WINDOW];
  const anchorkv_view q = anchorkv_head_major(queries, Q_HEADS, WINDOW, DIM);
  const anchorkv_mutable_view o = anchorkv_head_major_out(out, Q_HEADS, WINDOW, DIM);
  EXPECT_OK(anchorkv_segment_attend(segment, &q, &o, lse));
  for (int h = 0; h < Q_HEADS; ++h) {
    for (int t = 0; t < WINDOW; ++t) {
      const int64_t kv = h / (Q_HEADS / KV_HEADS);
      double expected[DIM];
      const double sum = DenseAttention(queries + (h * WINDOW + t) * DIM, keys + kv * TOKENS * DIM,
                                        values + kv * TOKENS * DIM, TOKENS, expected);
      EXPECT(fabs(sum - (double)lse[h * WINDOW + t]) < 1e-3);
      for (int d = 0; d < DIM; ++d) EXPECT(fabs(expected[d] - (double)out[(h * WINDOW + t) * DIM + d]) < 1e-3);
    }
  }
  EXPECT_ERROR(anchorkv_segment_attend(NULL, &q, &o, NULL), ANCHORKV_INVALID_ARGUMENT, "segment is null");
  EXPECT_ERROR(anchorkv_segment_attend(segment, NULL, &o, NULL), ANCHORKV_INVALID_ARGUMENT, "queries is null");
  EXPECT_ERROR(anchorkv_segment_attend(segment, &q, NULL, NULL), ANCHORKV_INVALID_ARGUMENT, "out is null");
  const anchorkv_view odd = anchorkv_head_major(queries, 3, WINDOW, DIM);
  const anchorkv_mutable_view odd_out = anchorkv_head_major_out(out, 3, WINDOW, DIM);
  EXPECT_ERROR(anchorkv_segment_attend(segment, &odd, &odd_out, NULL), ANCHORKV_INVALID_ARGUMENT, "do not fit");
  EXPECT_ERROR(anchorkv_segment_attend(segment, &odd, &o, NULL), ANCHORKV_INVALID_ARGUMENT, "out has the shape");

  /* A segment and a tail together: the tail alone first. */
  float* tail_keys = Random(KV_HEADS * NEW * DIM);
  float* tail_values = Random(KV_HEADS * NEW * DIM);
  anchorkv_attention attention;
  EXPECT_OK(anchorkv_attention_init(&attention, sizeof attention));
  attention.queries = anchorkv_head_major(queries, Q_HEADS, NEW, DIM);
  attention.out = anchorkv_head_major_out(out, Q_HEADS, NEW, DIM);
  EXPECT_ERROR(anchorkv_attend(&attention), ANCHORKV_INVALID_ARGUMENT, "nothing to attend to");
  EXPECT_ERROR(anchorkv_attend(NULL), ANCHORKV_INVALID_ARGUMENT, "attention is null");
  attention.tail_keys = anchorkv_head_major(tail_keys, KV_HEADS, NEW, DIM);
  EXPECT_ERROR(anchorkv_attend(&attention), ANCHORKV_INVALID_ARGUMENT, "both be given");
  attention.tail_values = anchorkv_head_major(tail_values, KV_HEADS, NEW, DIM);
  EXPECT_OK(anchorkv_attend(&attention));
  for (int h = 0; h < Q_HEADS; ++h) {
    const int64_t kv = h / (Q_HEADS / KV_HEADS);
    for (int t = 0; t < NEW; ++t) {
      double expected[DIM];
      DenseAttention(queries + (h * NEW + t) * DIM, tail_keys + kv * NEW * DIM, tail_values + kv * NEW * DIM, t + 1,
                     expected);
      for (int d = 0; d < DIM; ++d) EXPECT(fabs(expected[d] - (double)out[(h * NEW + t) * DIM + d]) < 1e-4);
    }
  }
  attention.segment_count = 1;
  EXPECT_ERROR(anchorkv_attend(&attention), ANCHORKV_INVALID_ARGUMENT, "segments is null");
  attention.segments = &segment;
  attention.lse = lse;
  attention.scale = 1.0 / sqrt((double)DIM);
  EXPECT_OK(anchorkv_attend(&attention));
  attention.scale = INFINITY;
  EXPECT_ERROR(anchorkv_attend(&attention), ANCHORKV_INVALID_ARGUMENT, "scale is inf");
  attention.scale = 0;
  attention.tail_keys.tokens = NEW - 1;
  attention.tail_values.tokens = NEW - 1;
  EXPECT_ERROR(anchorkv_attend(&attention), ANCHORKV_INVALID_ARGUMENT, "a tail of 2 rows");
  attention.segment_count = -1;
  EXPECT_ERROR(anchorkv_attend(&attention), ANCHORKV_INVALID_ARGUMENT, "segment_count is -1");
  const anchorkv_segment* none = NULL;
  attention.segment_count = 1;
  attention.segments = &none;
  EXPECT_ERROR(anchorkv_attend(&attention), ANCHORKV_INVALID_ARGUMENT, "segment 0 is null");
  free(tail_keys);
  free(tail_values);
  free(keys);
  free(values);
  free(out);
}

static void ExpectSameDecoding(const anchorkv_segment* a, const anchorkv_segment* b) {
  const size_t count = KV_HEADS * TOKENS * DIM;
  float* rows[4];
  anchorkv_mutable_view views[4];
  for (int i = 0; i < 4; ++i) {
    rows[i] = Zeros((int64_t)count);
    views[i] = anchorkv_head_major_out(rows[i], KV_HEADS, TOKENS, DIM);
  }
  EXPECT_OK(anchorkv_segment_dequantize(a, &views[0], &views[1]));
  EXPECT_OK(anchorkv_segment_dequantize(b, &views[2], &views[3]));
  EXPECT(memcmp(rows[0], rows[2], count * sizeof(float)) == 0);
  EXPECT(memcmp(rows[1], rows[3], count * sizeof(float)) == 0);
  for (int i = 0; i < 4; ++i) free(rows[i]);
}

static void TestFiles(const char* path, const anchorkv_segment* segment, anchorkv_rope** rope_of_file) {
  const anchorkv_segment* segments[2] = {segment, segment};
  EXPECT_ERROR(anchorkv_segments_save(NULL, segments, 2, NULL), ANCHORKV_INVALID_ARGUMENT, "path is null");
  EXPECT_ERROR(anchorkv_segments_save(path, segments, 0, NULL), ANCHORKV_INVALID_ARGUMENT, "count is 0");
  EXPECT_ERROR(anchorkv_segments_save(path, NULL, 1, NULL), ANCHORKV_INVALID_ARGUMENT, "segments is null");
  EXPECT_ERROR(anchorkv_segments_save("/nonexistent/folder/x.akv", segments, 2, NULL), ANCHORKV_NOT_FOUND, "/nonex");
  EXPECT_OK(anchorkv_segments_save(path, segments, 2, "a note"));

  size_t needed = 0;
  EXPECT_ERROR(anchorkv_segments_store(segments, 1, NULL, NULL, 0, NULL), ANCHORKV_INVALID_ARGUMENT, "needed is null");
  EXPECT_OK(anchorkv_segments_store(segments, 1, NULL, NULL, 0, &needed));
  unsigned char* bytes = malloc(needed);
  EXPECT_ERROR(anchorkv_segments_store(segments, 1, NULL, bytes, needed - 1, &needed), ANCHORKV_INVALID_ARGUMENT,
               "capacity is");
  EXPECT_OK(anchorkv_segments_store(segments, 1, NULL, bytes, needed, &needed));

  anchorkv_file* file = NULL;
  anchorkv_segment* read = NULL;
  EXPECT_ERROR(anchorkv_file_open(NULL, &file), ANCHORKV_INVALID_ARGUMENT, "path is null");
  EXPECT_ERROR(anchorkv_file_open("/nonexistent.akv", &file), ANCHORKV_NOT_FOUND, "/nonexistent.akv");
  EXPECT_OK(anchorkv_file_open(path, &file));
  EXPECT(anchorkv_file_count(file) == 2 && strcmp(anchorkv_file_note(file), "a note") == 0);
  EXPECT(anchorkv_file_count(NULL) == 0 && strcmp(anchorkv_file_note(NULL), "") == 0);
  EXPECT_ERROR(anchorkv_file_segment(file, 2, &read), ANCHORKV_INVALID_ARGUMENT, "segment 2; the file holds 2");
  EXPECT_ERROR(anchorkv_file_segment(NULL, 0, &read), ANCHORKV_INVALID_ARGUMENT, "file is null");
  EXPECT_OK(anchorkv_file_segment(file, 1, &read));
  EXPECT_ERROR(anchorkv_file_rope(file, NULL), ANCHORKV_INVALID_ARGUMENT, "rope is null");
  EXPECT_OK(anchorkv_file_rope(file, rope_of_file));
  anchorkv_file_free(file); /* what was taken out of it stays */
  ExpectSameDecoding(segment, read);
  anchorkv_segment_free(read);

  file = NULL;
  EXPECT_ERROR(anchorkv_file_read(NULL, 10, &file), ANCHORKV_INVALID_ARGUMENT, "bytes is null");
  EXPECT(anchorkv_file_read(bytes, needed / 2, &file) == ANCHORKV_DATA_LOSS);
  EXPECT(anchorkv_file_read(bytes, 0, &file) == ANCHORKV_DATA_LOSS);
  EXPECT_OK(anchorkv_file_read(bytes, needed, &file));
  EXPECT_OK(anchorkv_file_segment(file, 0, &read));
  bytes[needed / 2] ^= 1;
  ExpectSameDecoding(segment, read); /* the file has its own copy */
  anchorkv_segment_free(read);
  anchorkv_file_free(file);
  anchorkv_file_free(NULL);
  EXPECT(anchorkv_file_read(bytes, needed, &file) == ANCHORKV_DATA_LOSS);
  free(bytes);
}

static void TestEstimate(void) {
  anchorkv_estimate estimate;
  anchorkv_codec_options options;
  EXPECT_OK(anchorkv_estimate_bytes(32, 8, 128, 16384, NULL, &estimate, sizeof estimate));
  EXPECT(estimate.dense_bytes == (int64_t)4 * 32 * 8 * 128 * 16384 && estimate.bytes * 4 <= estimate.dense_bytes);
  EXPECT(estimate.ratio >= 4 && estimate.largest_ratio >= estimate.ratio && estimate.exact_tokens > 0);
  EXPECT_OK(anchorkv_codec_options_init(&options, sizeof options, ANCHORKV_PROFILE_BLEND));
  options.ratio = 1e5;
  EXPECT_ERROR(anchorkv_estimate_bytes(32, 8, 128, 16384, &options, &estimate, sizeof estimate), ANCHORKV_INFEASIBLE,
               "");
  EXPECT_ERROR(anchorkv_estimate_bytes(0, 8, 128, 1, NULL, &estimate, sizeof estimate), ANCHORKV_INVALID_ARGUMENT,
               "0 layers");
  EXPECT_ERROR(anchorkv_estimate_bytes(1, 8, 100, 1000, NULL, &estimate, sizeof estimate), ANCHORKV_INVALID_ARGUMENT,
               "head dim 100");
  EXPECT_ERROR(anchorkv_estimate_bytes(1, 8, 128, 16384, NULL, NULL, sizeof estimate), ANCHORKV_INVALID_ARGUMENT,
               "estimate is null");
}

static void TestCache(const anchorkv_rope* rope, const anchorkv_layer* layer) {
  anchorkv_cache_params params;
  anchorkv_cache* cache = NULL;
  anchorkv_cache_info info;
  EXPECT_OK(anchorkv_cache_params_init(&params, sizeof params));
  EXPECT_ERROR(anchorkv_cache_create(&params, rope, NULL, &cache), ANCHORKV_INVALID_ARGUMENT, "0 layers");
  params.layers = LAYERS;
  params.q_heads = Q_HEADS;
  params.kv_heads = KV_HEADS;
  params.tail_limit = 64;
  EXPECT_ERROR(anchorkv_cache_create(&params, NULL, NULL, &cache), ANCHORKV_INVALID_ARGUMENT, "rope is null");
  EXPECT_ERROR(anchorkv_cache_create(&params, rope, NULL, NULL), ANCHORKV_INVALID_ARGUMENT, "cache is null");
  params.tail_type = 5;
  EXPECT_ERROR(anchorkv_cache_create(&params, rope, NULL, &cache), ANCHORKV_INVALID_ARGUMENT, "tail_type is 5");
  params.tail_type = ANCHORKV_TAIL_F32;
  EXPECT_OK(anchorkv_cache_create(&params, rope, NULL, &cache));

  EXPECT_ERROR(anchorkv_cache_append_prompt(NULL, 0, &layer->keys, &layer->values, &layer->queries),
               ANCHORKV_INVALID_ARGUMENT, "cache is null");
  EXPECT_ERROR(anchorkv_cache_append_prompt(cache, LAYERS, &layer->keys, &layer->values, &layer->queries),
               ANCHORKV_INVALID_ARGUMENT, "layer 2");
  for (int l = 0; l < LAYERS; ++l) {
    EXPECT_OK(anchorkv_cache_append_prompt(cache, l, &layer->keys, &layer->values, &layer->queries));
  }
  EXPECT_OK(anchorkv_cache_get_info(cache, &info, sizeof info));
  EXPECT(info.tokens == TOKENS && info.compressed_tokens == TOKENS && info.layers_compressed == LAYERS);
  EXPECT(info.segment_bytes * 4 <= info.dense_bytes);
  EXPECT_ERROR(anchorkv_cache_get_info(NULL, &info, sizeof info), ANCHORKV_INVALID_ARGUMENT, "cache is null");

  /* The cache's step is the attention of anchorkv_attend. */
  float* keys = Random(KV_HEADS * NEW * DIM);
  float* values = Random(KV_HEADS * NEW * DIM);
  float* queries = Random(Q_HEADS * NEW * DIM);
  float* out = Zeros(Q_HEADS * NEW * DIM);
  float* same = Zeros(Q_HEADS * NEW * DIM);
  const anchorkv_view k = anchorkv_head_major(keys, KV_HEADS, NEW, DIM);
  const anchorkv_view v = anchorkv_head_major(values, KV_HEADS, NEW, DIM);
  const anchorkv_view q = anchorkv_head_major(queries, Q_HEADS, NEW, DIM);
  const anchorkv_mutable_view o = anchorkv_head_major_out(out, Q_HEADS, NEW, DIM);
  EXPECT_ERROR(anchorkv_cache_attend(cache, 0, &k, &v, &q, &o), ANCHORKV_INVALID_ARGUMENT, "begin_step");
  EXPECT_ERROR(anchorkv_cache_end_step(cache), ANCHORKV_INVALID_ARGUMENT, "begin_step");
  EXPECT_ERROR(anchorkv_cache_begin_step(cache, 0), ANCHORKV_INVALID_ARGUMENT, "a step of 0");
  EXPECT_OK(anchorkv_cache_begin_step(cache, NEW));
  EXPECT_ERROR(anchorkv_cache_begin_step(cache, NEW), ANCHORKV_INVALID_ARGUMENT, "has been begun");
  EXPECT_ERROR(anchorkv_cache_compress_tail(cache), ANCHORKV_INVALID_ARGUMENT, "has been begun");
  EXPECT_ERROR(anchorkv_cache_attend(cache, -1, &k, &v, &q, &o), ANCHORKV_INVALID_ARGUMENT, "layer -1");
  EXPECT_ERROR(anchorkv_cache_attend(cache, 0, &q, &v, &q, &o), ANCHORKV_INVALID_ARGUMENT, "this step takes");
  for (int l = 0; l < LAYERS; ++l) {
    EXPECT_ERROR(anchorkv_cache_end_step(cache), ANCHORKV_INVALID_ARGUMENT, "has not been attended");
    EXPECT_OK(anchorkv_cache_attend(cache, l, &k, &v, &q, &o));
  }
  EXPECT_OK(anchorkv_cache_end_step(cache));
  EXPECT(anchorkv_cache_segment_count(cache, 1) == 1 && anchorkv_cache_segment_count(cache, 2) == 0);
  EXPECT(anchorkv_cache_segment_count(NULL, 0) == 0);
  anchorkv_segment* segment = NULL;
  EXPECT_ERROR(anchorkv_cache_segment(cache, 0, 1, &segment), ANCHORKV_INVALID_ARGUMENT, "there are 1");
  EXPECT_OK(anchorkv_cache_segment(cache, LAYERS - 1, 0, &segment));
  anchorkv_attention attention;
  EXPECT_OK(anchorkv_attention_init(&attention, sizeof attention));
  const anchorkv_segment* borrowed = segment;
  attention.segments = &borrowed;
  attention.segment_count = 1;
  attention.tail_keys = k;
  attention.tail_values = v;
  attention.queries = q;
  attention.out = anchorkv_head_major_out(same, Q_HEADS, NEW, DIM);
  EXPECT_OK(anchorkv_attend(&attention));
  for (int i = 0; i < Q_HEADS * NEW * DIM; ++i) EXPECT(fabsf(out[i] - same[i]) < 1e-5f);

  /* Long tails are compressed; the cache can be cut where segments end. */
  for (int step = 0; step < 40; ++step) {
    EXPECT_OK(anchorkv_cache_begin_step(cache, NEW));
    for (int l = 0; l < LAYERS; ++l) EXPECT_OK(anchorkv_cache_attend(cache, l, &k, &v, &q, &o));
    EXPECT_OK(anchorkv_cache_end_step(cache));
    EXPECT_OK(anchorkv_cache_compress_tail(cache));
  }
  EXPECT_OK(anchorkv_cache_get_info(cache, &info, sizeof info));
  EXPECT(info.tokens == TOKENS + 41 * NEW);
  EXPECT_ERROR(anchorkv_cache_truncate(cache, TOKENS - 1), ANCHORKV_INVALID_ARGUMENT, "cannot keep");
  EXPECT_OK(anchorkv_cache_begin_step(cache, 1));
  EXPECT_OK(anchorkv_cache_truncate(cache, TOKENS));
  EXPECT_OK(anchorkv_cache_get_info(cache, &info, sizeof info));
  EXPECT(info.tokens == TOKENS && info.tail_bytes == 0);

  /* Another cache goes on from the segment, which stays when the first is gone. */
  anchorkv_cache_free(cache);
  params.layers = 1;
  EXPECT_OK(anchorkv_cache_create(&params, rope, NULL, &cache));
  EXPECT_ERROR(anchorkv_cache_append_segment(cache, 0, NULL), ANCHORKV_INVALID_ARGUMENT, "segment is null");
  EXPECT_OK(anchorkv_cache_append_segment(cache, 0, segment));
  anchorkv_segment_free(segment);
  EXPECT_OK(anchorkv_cache_begin_step(cache, NEW));
  EXPECT_OK(anchorkv_cache_attend(cache, 0, &k, &v, &q, &o));
  EXPECT_OK(anchorkv_cache_end_step(cache));
  for (int i = 0; i < Q_HEADS * NEW * DIM; ++i) EXPECT(fabsf(out[i] - same[i]) < 1e-5f);
  anchorkv_cache_free(cache);
  anchorkv_cache_free(NULL);
  free(keys);
  free(values);
  free(queries);
  free(out);
  free(same);
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: every_function FILE\n");
    return 2;
  }
  TestVersion();
  TestRope();
  TestEstimate();

  anchorkv_rope_params params;
  anchorkv_rope* rope = NULL;
  EXPECT_OK(anchorkv_rope_params_init(&params, sizeof params));
  params.head_dim = DIM;
  params.max_position = 4096;
  EXPECT_OK(anchorkv_rope_create(&params, &rope));
  float* keys = Random(KV_HEADS * TOKENS * DIM);
  float* values = Random(KV_HEADS * TOKENS * DIM);
  float* queries = Random(Q_HEADS * WINDOW * DIM);
  anchorkv_layer layer;
  EXPECT_OK(anchorkv_layer_init(&layer, sizeof layer));
  layer.keys = anchorkv_head_major(keys, KV_HEADS, TOKENS, DIM);
  layer.values = anchorkv_head_major(values, KV_HEADS, TOKENS, DIM);
  layer.queries = anchorkv_head_major(queries, Q_HEADS, WINDOW, DIM);
  TestStructSizes(rope, &layer);
  TestWrongLayers(rope, &layer);

  anchorkv_segment* segment = NULL;
  EXPECT_OK(anchorkv_compress(&layer, rope, NULL, &segment));
  if (segment != NULL) {
    anchorkv_rope* rope_of_file = NULL;
    TestSegment(segment, queries);
    TestFiles(argv[1], segment, &rope_of_file);
    TestCache(rope_of_file, &layer);
    anchorkv_rope_free(rope_of_file);
  }
  /* Keys after the rotary embedding give nearly the same segment. */
  const anchorkv_mutable_view turned = anchorkv_head_major_out(keys, KV_HEADS, TOKENS, DIM);
  EXPECT_OK(anchorkv_rope_rotate(rope, 0, &turned));
  layer.keys_rotated = 1;
  anchorkv_segment* again = NULL;
  EXPECT_OK(anchorkv_compress(&layer, rope, NULL, &again));
  anchorkv_rope_free(rope); /* segments keep it */
  TestSegment(again, queries);
  anchorkv_segment_free(again);
  anchorkv_segment_free(segment);
  anchorkv_segment_free(NULL);
  free(keys);
  free(values);
  free(queries);
  remove(argv[1]);
  printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
