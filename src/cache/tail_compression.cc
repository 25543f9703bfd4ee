#include "cache/tail_compression.h"

#include <algorithm>
#include <utility>

#include "base/aligned_buffer.h"
#include "cache/prior_state.h"
#include "codec/codec.h"

namespace anchorkv {
namespace {

int64_t DenseBytes(const CacheConfig& config, int64_t tokens) {
  return LayerShape{config.kv_heads, config.head_dim, tokens}.dense_bytes();
}

// The share of its dense bytes that a segment of `tokens` tokens gets behind all but the last `replaced` segments:
// theta; or where one this short cannot reach theta, the least it can, as long as theta holds over all segments
// together: those before it may have left bytes over. kInfeasible when it does not.
Result<double> SegmentTheta(const CacheConfig& config, const TailState& state, int64_t tokens, int replaced) {
  const LayerShape shape{config.kv_heads, config.head_dim, tokens};
  const CodecOptions codec = TailCodec(config);
  Status status = PlanBudget(shape, codec).status();
  if (status.code() != StatusCode::kInfeasible)
    return status.ok() ? Result<double>(config.codec.theta) : std::move(status);
  const double least = 1.0 / MaxRatio(shape, codec);
  if (!(least < 1.0)) return status;
  for (const SegmentList* const segments : state.layers) {
    double bytes = least * static_cast<double>(shape.dense_bytes());
    int64_t held = tokens;
    for (size_t s = 0; s + static_cast<size_t>(replaced) < segments->size(); ++s) {
      bytes += static_cast<double>((*segments)[s]->resident_bytes());
      held += (*segments)[s]->tokens();
    }
    if (bytes > config.codec.theta * static_cast<double>(DenseBytes(config, held))) return status;
  }
  return least;
}

}  // namespace

CodecOptions TailCodec(const CacheConfig& config) {
  constexpr int kWindow = 8;
  CodecOptions codec = config.codec;
  codec.window = std::min(codec.window, kWindow);
  return codec;
}

Result<TailPlan> PlanTail(const CacheConfig& config, const TailState& state) {
  TailPlan plan;
  plan.first = plan.last = state.compressed;
  const int64_t rows = state.tokens - state.compressed;
  if (rows <= config.tail_limit || rows <= TailCodec(config).window || state.layers.empty()) return plan;

  // The last segment goes along while it is short; then the one before it, which was left by an earlier limit.
  int64_t first = state.compressed;
  int replaced = 0;
  const SegmentList& segments = *state.layers[0];
  for (; replaced < state.from_tail; ++replaced) {
    const Segment& last = *segments[segments.size() - 1 - static_cast<size_t>(replaced)];
    if (last.tokens() >= config.tail_merge) break;
    first = last.first_position();
  }
  // As many of the newest stay exact as leave a segment that can reach theta: half of them, or none.
  Status why;
  for (const int64_t kept : {std::min(config.tail_exact, config.tail_limit), int64_t{0}}) {
    const int64_t last = state.tokens - kept;
    if (last - state.compressed < 1 || last - first <= TailCodec(config).window) continue;
    Result<double> theta = SegmentTheta(config, state, last - first, replaced);
    if (theta.ok()) return TailPlan{first, last, replaced, *theta, ""};
    if (theta.status().code() != StatusCode::kInfeasible) return std::move(theta).status();
    why = theta.status();
  }
  plan.reason = "the last " + std::to_string(rows) + " tokens stay exact: " + why.message();
  return plan;
}

Result<std::shared_ptr<const Segment>> CompressTailOfLayer(const CacheConfig& config, const TailState& state,
                                                           const TailPlan& plan, int layer, const SegmentList& segments,
                                                           const DenseTail& tail, HeadsView<const float> queries,
                                                           const RopeTable& rope, const Backend& backend) {
  const int64_t rows = plan.last - plan.first;
  const int64_t side = int64_t{config.kv_heads} * rows * config.head_dim;
  AKV_ASSIGN_OR_RETURN(AlignedBuffer dense, AlignedBuffer::Make(static_cast<size_t>(2 * side) * sizeof(float),
                                                                "the keys and values of a tail"));
  const HeadsView<float> keys = HeadMajor(dense.as<float>(), config.kv_heads, rows, config.head_dim);
  const HeadsView<float> values = HeadMajor(dense.as<float>() + side, config.kv_heads, rows, config.head_dim);
  const auto part = [](HeadsView<float> view, int64_t first, int64_t tokens) {
    view.data += first * view.token_stride;
    view.tokens = tokens;
    return view;
  };
  const size_t before = segments.size() - static_cast<size_t>(plan.replaced);
  for (size_t s = before; s < segments.size(); ++s) {
    const int64_t first = segments[s]->first_position() - plan.first;
    const int64_t tokens = segments[s]->tokens();
    AKV_RETURN_IF_ERROR(segments[s]->Dequantize(part(keys, first, tokens), part(values, first, tokens)));
  }
#pragma omp parallel for collapse(2) schedule(static)
  for (int h = 0; h < config.kv_heads; ++h) {
    for (int64_t t = 0; t < rows; ++t) {
      const int64_t position = plan.first + t;
      if (position >= state.compressed) {
        tail.LoadRow(kKeys, h, position - state.compressed, keys.row(h, t));
        tail.LoadRow(kValues, h, position - state.compressed, values.row(h, t));
      }
      rope.Unrotate(position, keys.row(h, t));
    }
  }
  PriorBuffer prior;
  const SegmentList earlier(segments.begin(), segments.begin() + static_cast<ptrdiff_t>(before));
  AKV_RETURN_IF_ERROR(prior.Compute(earlier, queries, config.kv_heads));
  const LayerInput input{layer, keys, values, queries, plan.first, &rope, prior.state()};
  CodecOptions options = TailCodec(config);
  options.theta = plan.theta;
  return CompressLayer(input, options, backend);
}

}  // namespace anchorkv
