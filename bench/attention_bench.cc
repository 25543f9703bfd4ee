// Attention of one thread: prefill and decode over dense rows, decode and a follow-up question over
// compressed segments. Every case is compared with the reference backend before it is timed.
#include <benchmark/benchmark.h>

#include <map>
#include <string>
#include <utility>

#include "layer.h"
#include "support/spectral_segments.h"

namespace anchorkv::bench {
namespace {

constexpr double kTolerance = 1e-3;
constexpr int kPrefillTokens = 64;  // one work item of a prefill
constexpr int kQuestionTokens = 24;

struct Case {
  const Backend* backend;
  const Shape* shape;
  int64_t tokens;
  int query_tokens;
};

// Runs `attend(backend, call, head)` for every kv head; checks it, times it, reports per token and head.
template <typename Attend>
void Run(benchmark::State& state, const Case& c, size_t scratch_bytes, size_t reference_scratch_bytes,
         double bytes_per_token_head, const Attend& attend) {
  Call call(*c.shape, c.query_tokens, scratch_bytes);
  Call expected(*c.shape, c.query_tokens, reference_scratch_bytes);
  attend(*c.backend, &call, 0);
  attend(ReferenceBackend(), &expected, 0);
  const double difference = RelativeDifference(call.Output(), expected.Output());
  if (!(difference < kTolerance)) {
    state.SkipWithError(("differs from the reference by " + std::to_string(difference)).c_str());
    return;
  }
  for (auto _ : state) {
    for (int head = 0; head < c.shape->kv_heads; ++head) attend(*c.backend, &call, head);
  }
  using benchmark::Counter;
  const double token_heads = static_cast<double>(state.iterations() * c.tokens * c.shape->kv_heads);
  const double flops = 4.0 * c.shape->head_dim * c.shape->gqa_ratio * c.query_tokens;
  state.counters["per_token_head"] = Counter(token_heads, Counter::kIsRate | Counter::kInvert);
  state.counters["FLOP/s"] = Counter(flops * token_heads, Counter::kIsRate);
  state.counters["bytes"] = bytes_per_token_head;
  state.counters["B/s"] = Counter(bytes_per_token_head * token_heads, Counter::kIsRate);
}

void Dense(benchmark::State& state, const Case& c, DenseType type) {
  const Layer& layer = GetLayer(*c.shape, c.tokens);
  const int rows = c.query_tokens * c.shape->gqa_ratio;
  const double bytes = (type == DenseType::kF16 ? 4.0 : 8.0) * c.shape->head_dim;
  Run(state, c, c.backend->AttendScratchBytes(c.shape->head_dim, rows, 0),
      ReferenceBackend().AttendScratchBytes(c.shape->head_dim, rows, 0), bytes,
      [&](const Backend& backend, Call* call, int head) {
        backend.AttendDense(layer.dense(type, head), c.shape->head_dim, layer.queries(c.query_tokens), 0, c.tokens,
                            c.tokens - c.query_tokens + 1, call->states(), call->scratch());
      });
}

void Compressed(benchmark::State& state, const Case& c, int ratio) {
  const Layer& layer = GetLayer(*c.shape, c.tokens);
  const AnchorSegment& segment = GetSegment(*c.shape, c.tokens, ratio, *c.backend);
  const int rows = c.query_tokens * c.shape->gqa_ratio;
  const double bytes =
      static_cast<double>(segment.resident_bytes()) / static_cast<double>(c.tokens * c.shape->kv_heads);
  const int64_t anchors = segment.layout().anchors;
  Run(state, c, c.backend->AttendScratchBytes(c.shape->head_dim, rows, anchors),
      ReferenceBackend().AttendScratchBytes(c.shape->head_dim, rows, anchors), bytes,
      [&](const Backend& backend, Call* call, int head) {
        backend.AttendAnchor(segment.view(), layer.rope(), head, layer.queries(c.query_tokens), 0, c.tokens,
                             call->states(), call->scratch());
      });
  state.counters["share_k"] = segment.residual_share(kKeys);
  state.counters["share_v"] = segment.residual_share(kValues);
}

// Random codes of about 90 bits per vector, one position in 400 exact, values in their own basis.
const test::SpectralSegmentData& GetSpectralSegment(const Shape& shape, int64_t tokens) {
  static std::map<std::pair<std::string, int64_t>, test::SpectralSegmentData> segments;
  const auto [at, made] = segments.try_emplace({shape.name, tokens});
  if (made) {
    test::SpectralSpec spec;
    spec.kv_heads = shape.kv_heads;
    spec.head_dim = shape.head_dim;
    spec.tokens = tokens;
    spec.exact = tokens / 400;
    spec.value_basis = true;
    spec.runs = test::SpectralRuns::kRising;
    spec.pairing = shape.pairing;
    at->second = test::MakeSpectralSegment(spec);
  }
  return at->second;
}

void Spectral(benchmark::State& state, const Case& c) {
  const Layer& layer = GetLayer(*c.shape, c.tokens);
  const test::SpectralSegmentData& segment = GetSpectralSegment(*c.shape, c.tokens);
  const int rows = c.query_tokens * c.shape->gqa_ratio;
  const double bytes =
      static_cast<double>(segment.layout.total_bytes) / static_cast<double>(c.tokens * c.shape->kv_heads);
  Run(state, c, c.backend->AttendSpectralScratchBytes(c.shape->head_dim, rows),
      ReferenceBackend().AttendSpectralScratchBytes(c.shape->head_dim, rows), bytes,
      [&](const Backend& backend, Call* call, int head) {
        backend.AttendSpectral(segment.view(), *segment.rope, head, layer.queries(c.query_tokens), 0, c.tokens,
                               call->states(), call->scratch());
      });
}

}  // namespace

void RegisterAttention() {
  for (const std::string& target : CpuTargets()) {
    const Backend* backend = CpuBackend(target);
    for (const Shape& shape : kShapes) {
      const auto add = [&](const std::string& name, int64_t tokens, auto run) {
        const std::string full = name + "/" + target + "/" + shape.name + "/S" + std::to_string(tokens);
        benchmark::RegisterBenchmark(full.c_str(), run)->Unit(benchmark::kMicrosecond);
      };
      const Shape* s = &shape;
      add("PrefillF32", 4096, [=](benchmark::State& state) {
        Dense(state, {backend, s, 4096, kPrefillTokens}, DenseType::kF32);
      });
      for (const int64_t tokens : {int64_t{8192}, int64_t{16384}}) {
        add("DecodeF16", tokens, [=](benchmark::State& state) {
          Dense(state, {backend, s, tokens, 1}, DenseType::kF16);
        });
        add("DecodeSpectral", tokens, [=](benchmark::State& state) { Spectral(state, {backend, s, tokens, 1}); });
        for (const int ratio : {4, 8, 16}) {
          add("DecodeAnchor" + std::to_string(ratio) + "x", tokens, [=](benchmark::State& state) {
            Compressed(state, {backend, s, tokens, 1}, ratio);
          });
        }
      }
      add("QuestionF16", 8192, [=](benchmark::State& state) {
        Dense(state, {backend, s, 8192, kQuestionTokens}, DenseType::kF16);
      });
      add("QuestionSpectral", 8192, [=](benchmark::State& state) {
        Spectral(state, {backend, s, 8192, kQuestionTokens});
      });
      add("QuestionAnchor4x", 8192, [=](benchmark::State& state) {
        Compressed(state, {backend, s, 8192, kQuestionTokens}, 4);
      });
    }
  }
}

}  // namespace anchorkv::bench
