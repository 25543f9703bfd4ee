#include "eval/study.h"

#include <algorithm>
#include <cmath>

#include "base/aligned_buffer.h"
#include "codec/codec.h"
#include "codec/rotated_keys.h"
#include "format/anchor_rounding.h"

namespace anchorkv {
namespace {

Row StudyRow(const char* suite, const Sample& sample, const RunnerOptions& options) {
  Row row = {{"suite", suite},
             {"task", sample.task},
             {"sample", sample.index},
             {"length", sample.length},
             {"protocol", "agnostic"}};
  row.update(options.columns);
  return row;
}

// Normalised attention outputs of queries [q_heads, n, head_dim] over one source, head by head:
// out [q_heads, n, head_dim]. attend(kv_head, rows, state, scratch) computes the partial state.
template <typename AttendHead>
Status AttendAll(const HeadsView<const float>& queries, int64_t kv_heads, size_t scratch_bytes, const Backend& backend,
                 const AttendHead& attend, std::vector<float>* out) {
  const int ratio = static_cast<int>(queries.heads / kv_heads);
  const int n = static_cast<int>(queries.tokens);
  const int64_t dim = queries.head_dim;
  out->assign(static_cast<size_t>(queries.heads * n * dim), 0);
  AKV_ASSIGN_OR_RETURN(AlignedBuffer scratch, AlignedBuffer::Make(scratch_bytes + 64, "attention scratch"));
  std::vector<float> o(static_cast<size_t>(ratio * n * dim)), m(static_cast<size_t>(ratio * n)), l(m.size());
  for (int64_t kv = 0; kv < kv_heads; ++kv) {
    const QueryRows rows{queries.row(kv * ratio, 0), queries.token_stride, queries.head_stride, n, ratio};
    StateRows state;
    state.o = o.data();
    state.m = m.data();
    state.l = l.data();
    state.o_token_stride = dim;
    state.o_head_stride = n * dim;
    state.s_token_stride = 1;
    state.s_head_stride = n;
    attend(static_cast<int>(kv), rows, state, scratch.data());
    backend.MergeStates({&state, 1}, static_cast<int>(dim), n, ratio, out->data() + kv * ratio * n * dim, dim, n * dim);
  }
  return {};
}

double RelativeError(const std::vector<float>& exact, const std::vector<float>& other) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double d = static_cast<double>(exact[i]) - static_cast<double>(other[i]);
    error += d * d;
    norm += static_cast<double>(exact[i]) * static_cast<double>(exact[i]);
  }
  return norm > 0 ? std::sqrt(error / norm) : 0;
}

double Median(std::vector<float>* values) {
  if (values->empty()) return std::nan("");
  const auto middle = values->begin() + static_cast<std::ptrdiff_t>(values->size() / 2);
  std::nth_element(values->begin(), middle, values->end());
  return *middle;
}

// |cosine| of every position that is not an anchor with its best anchor.
Status BestCosines(const HeadsView<const float>& keys, std::span<const uint32_t> positions, const Backend& backend,
                   std::vector<float>* out) {
  const RoundedAnchors anchors = RoundAnchors(keys, positions);
  std::vector<uint16_t> assignment;
  AKV_RETURN_IF_ERROR(backend.Assign(keys, anchors, positions, &assignment));
  const size_t per_head = positions.size() / static_cast<size_t>(keys.heads);
  for (int64_t h = 0; h < keys.heads; ++h) {
    const auto own = positions.subspan(static_cast<size_t>(h) * per_head, per_head);
    for (int64_t t = 0; t < keys.tokens; ++t) {
      if (std::binary_search(own.begin(), own.end(), static_cast<uint32_t>(t))) continue;
      const uint16_t a = assignment[static_cast<size_t>(h * keys.tokens + t)];
      if (a == kNoAnchor) continue;
      const float* x = keys.row(h, t);
      const float* y = keys.row(h, own[a]);
      double xy = 0, xx = 0, yy = 0;
      for (int64_t d = 0; d < keys.head_dim; ++d) {
        xy += double{x[d]} * double{y[d]};
        xx += double{x[d]} * double{x[d]};
        yy += double{y[d]} * double{y[d]};
      }
      out->push_back(static_cast<float>(std::abs(xy) / std::sqrt(xx * yy)));
    }
  }
  return {};
}

}  // namespace

Status RunDistort(Runner* runner, Engine* engine, const Tokenizer& tokenizer, const Backend& backend,
                  const Sample& sample, const Runner::Hooks& hooks) {
  const RunnerOptions& options = runner->options();
  const auto row_of = [&](const Configuration& c, int layer) {
    Row row = StudyRow("distort", sample, options);
    row.update(c.columns());
    row["layer"] = layer;
    return row;
  };
  const int layer_count = engine->info().layers;
  const bool missing = std::any_of(options.configurations.begin(), options.configurations.end(), [&](const auto& c) {
    for (int i = 0; i < layer_count; ++i) {
      if (!c.is_full() && hooks.wanted(row_of(c, i))) return true;
    }
    return false;
  });
  if (!missing) return {};

  AKV_ASSIGN_OR_RETURN(Runner::Prompt prompt, runner->Prefill(sample, hooks.progress));
  PromptRecord* record = prompt.record.get();
  if (Observed(options.configurations).reconstruction) {
    AKV_RETURN_IF_ERROR(ObserveReconstruction(engine, tokenizer, "", prompt.tokens, record));
  }
  const int64_t context = record->tokens();
  EqualBytes equal_bytes(engine, record, &backend);
  std::vector<StoredSegments> segments(options.configurations.size());
  for (size_t i = 0; i < segments.size(); ++i) {
    const Configuration& c = options.configurations[i];
    if (c.is_full()) continue;
    auto compressed = equal_bytes.Compress(c);
    if (!compressed.ok()) {
      if (!IsGap(compressed.status())) return compressed.status();
      Row row = row_of(c, 0);
      row["error"] = compressed.status().message();
      AKV_RETURN_IF_ERROR(hooks.emit(row));
      continue;
    }
    segments[i] = std::move(*compressed);
  }

  AKV_ASSIGN_OR_RETURN(const TurnTokens asked, runner->QuestionTokens(sample, sample.questions.front()));
  AKV_RETURN_IF_ERROR(engine->Extend(record, asked.tokens, nullptr));
  for (int i = 0; i < layer_count; ++i) {
    const LayerInput layer = record->layer(i);
    const HeadsView<const float> queries = record->last_text_queries(i);
    const int rows = static_cast<int>(queries.tokens) * layer.gqa_ratio();
    LayerInput compressed_part = layer;
    compressed_part.keys.tokens = context;
    AKV_ASSIGN_OR_RETURN(const AlignedBuffer rotated, RotatedKeys(compressed_part));
    const HeadsView<const float> keys = HeadMajor(rotated.as<float>(), layer.keys.heads, context, layer.keys.head_dim);
    if (layer.values.token_stride != keys.token_stride) return Internal("keys and values of a record differ in stride");
    std::vector<float> exact, own;
    AKV_RETURN_IF_ERROR(AttendAll(
        queries, keys.heads, backend.AttendScratchBytes(static_cast<int>(keys.head_dim), rows, 0), backend,
        [&](int kv, const QueryRows& q, const StateRows& state, void* scratch) {
          const DenseRows dense{DenseType::kF32, keys.row(kv, 0), layer.values.row(kv, 0), keys.token_stride};
          backend.AttendDense(dense, static_cast<int>(keys.head_dim), q, 0, context, context, state, scratch);
        },
        &exact));
    for (size_t c = 0; c < segments.size(); ++c) {
      if (segments[c].empty()) continue;
      const auto* own_segment = dynamic_cast<const Segment*>(segments[c][static_cast<size_t>(i)].get());
      if (own_segment == nullptr) return Unsupported("the suite distort runs on the CPU only");
      const Segment& segment = *own_segment;
      Row row = row_of(options.configurations[c], i);
      if (!hooks.wanted(row)) continue;
      AKV_RETURN_IF_ERROR(AttendAll(
          queries, keys.heads, segment.scratch_bytes(rows), backend,
          [&](int kv, const QueryRows& q, const StateRows& state, void* scratch) {
            segment.Attend(kv, q, 0, context, state, scratch);
          },
          &own));
      row["resident_bytes"] = segment.resident_bytes();
      row["achieved_ratio"] =
          static_cast<double>(4 * keys.heads * context * keys.head_dim) / static_cast<double>(segment.resident_bytes());
      row["error_output"] = RelativeError(exact, own);
      AKV_RETURN_IF_ERROR(hooks.emit(row));
    }
  }
  return {};
}

Status RunCosine(Runner* runner, Engine* engine, const Backend& backend, const Sample& sample,
                 const Runner::Hooks& hooks) {
  const auto row_of = [&](int band) {
    Row row = StudyRow("cosine", sample, runner->options());
    row["band"] = band;
    return row;
  };
  const int layers = engine->info().layers;
  const int bands = std::min(kDepthBands, layers);
  bool missing = false;
  for (int band = 0; band < bands; ++band) missing |= hooks.wanted(row_of(band));
  if (!missing) return {};

  AKV_ASSIGN_OR_RETURN(Runner::Prompt prompt, runner->Prefill(sample, hooks.progress));
  const CodecOptions options = CodecOptions::ForProfile(Profile::kPaper);
  for (int band = 0; band < bands; ++band) {
    std::vector<float> before, after;
    for (int i = layers * band / bands; i < layers * (band + 1) / bands; ++i) {
      const LayerInput layer = prompt.record->layer(i);
      AttentionStats stats;
      HeadScores scores;
      AKV_RETURN_IF_ERROR(backend.Score(layer, &stats, &scores));
      const int heads = static_cast<int>(layer.keys.heads);
      const std::vector<uint32_t> anchors =
          ChooseAnchors(scores, heads, options, AnchorCount(options, layer.keys.tokens), i);
      AKV_RETURN_IF_ERROR(BestCosines(layer.keys, anchors, backend, &before));
      AKV_ASSIGN_OR_RETURN(const AlignedBuffer rotated, RotatedKeys(layer));
      AKV_RETURN_IF_ERROR(
          BestCosines(HeadMajor(rotated.as<float>(), layer.keys.heads, layer.keys.tokens, layer.keys.head_dim), anchors,
                      backend, &after));
    }
    Row row = row_of(band);
    row["pre_rope"] = Median(&before);
    row["post_rope"] = Median(&after);
    AKV_RETURN_IF_ERROR(hooks.emit(row));
  }
  return {};
}

}  // namespace anchorkv
