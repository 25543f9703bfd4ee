/* Compresses one layer of random keys and values to a fifth and attends to it.
 *   cc compress.c $(pkg-config --cflags --libs anchorkv) -o compress && ./compress */
#include <anchorkv/anchorkv.h>
#include <stdio.h>
#include <stdlib.h>

enum { KV_HEADS = 2, Q_HEADS = 4, TOKENS = 2048, HEAD_DIM = 64, WINDOW = 32 };

static float keys[KV_HEADS * TOKENS * HEAD_DIM], values[KV_HEADS * TOKENS * HEAD_DIM];
static float queries[Q_HEADS * WINDOW * HEAD_DIM], out[Q_HEADS * WINDOW * HEAD_DIM];

static void Fill(float* to, int count) {
  for (int i = 0; i < count; ++i) to[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}
static void Check(anchorkv_status status) {
  if (status == ANCHORKV_OK) return;
  fprintf(stderr, "%s: %s\n", anchorkv_status_name(status), anchorkv_last_error());
  exit(1);
}

int main(void) {
  Fill(keys, KV_HEADS * TOKENS * HEAD_DIM);
  Fill(values, KV_HEADS * TOKENS * HEAD_DIM);
  Fill(queries, Q_HEADS * WINDOW * HEAD_DIM);

  anchorkv_rope_params params; /* the model's rotary embedding */
  Check(anchorkv_rope_params_init(&params, sizeof params));
  params.head_dim = HEAD_DIM;
  anchorkv_rope* rope = NULL;
  Check(anchorkv_rope_create(&params, &rope));

  anchorkv_codec_options options;
  Check(anchorkv_codec_options_init(&options, sizeof options, ANCHORKV_PROFILE_ADAPTIVE));
  options.ratio = 5;
  anchorkv_layer layer;
  Check(anchorkv_layer_init(&layer, sizeof layer));
  layer.keys = anchorkv_head_major(keys, KV_HEADS, TOKENS, HEAD_DIM);
  layer.values = anchorkv_head_major(values, KV_HEADS, TOKENS, HEAD_DIM);
  layer.queries = anchorkv_head_major(queries, Q_HEADS, WINDOW, HEAD_DIM);
  anchorkv_segment* segment = NULL;
  Check(anchorkv_compress(&layer, rope, &options, &segment));

  const anchorkv_mutable_view result = anchorkv_head_major_out(out, Q_HEADS, WINDOW, HEAD_DIM);
  Check(anchorkv_segment_attend(segment, &layer.queries, &result, NULL));
  anchorkv_segment_info info;
  Check(anchorkv_segment_get_info(segment, &info, sizeof info));
  printf("anchorkv %s: %lld bytes instead of %lld; out[0] = %f\n", anchorkv_version(), (long long)info.bytes,
         (long long)info.dense_bytes, (double)out[0]);
  anchorkv_segment_free(segment);
  anchorkv_rope_free(rope);
  return 0;
}
