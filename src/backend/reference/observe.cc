// Attention of the observed queries and what it says about positions: Score and Utility (algorithm.md 1, 3).
#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/reference/reference.h"
#include "format/hash.h"

namespace anchorkv::reference {
namespace {

double Dot(const double* a, const float* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

double SquaredNorm(const float* x, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += double{x[i]} * x[i];
  return sum;
}

double SquaredDistance(const float* a, const float* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
  return sum;
}

// Positions that window query w sees: all before the window, and the window up to itself.
int64_t Visible(const LayerInput& input, int64_t w) { return input.keys.tokens - input.queries.tokens + w + 1; }

// Logits of one query over the positions it sees.
std::vector<double> Logits(const std::vector<double>& keys, const float* query, int64_t head_dim, int64_t visible) {
  std::vector<double> logits(static_cast<size_t>(visible));
  for (int64_t t = 0; t < visible; ++t) {
    logits[t] = Dot(keys.data() + t * head_dim, query, head_dim) / std::sqrt(static_cast<double>(head_dim));
  }
  return logits;
}

// novelty_t = (1 - cos(R_t K_t, mean direction)) over its mean; 1 where all keys point the same way.
std::vector<double> Novelty(const std::vector<double>& keys, int64_t tokens, int64_t head_dim) {
  constexpr double kAllAlike = 1e-6;  // below this the mean novelty is rounding noise
  std::vector<double> unit(keys);
  std::vector<double> mean(static_cast<size_t>(head_dim), 0.0);
  for (int64_t t = 0; t < tokens; ++t) {
    double* row = unit.data() + t * head_dim;
    double norm = 0.0;
    for (int64_t d = 0; d < head_dim; ++d) norm += row[d] * row[d];
    norm = std::sqrt(norm);
    for (int64_t d = 0; d < head_dim; ++d) {
      row[d] = norm > 0.0 ? row[d] / norm : 0.0;
      mean[d] += row[d] / static_cast<double>(tokens);
    }
  }
  double mean_norm = 0.0;
  for (const double x : mean) mean_norm += x * x;
  mean_norm = std::sqrt(mean_norm);
  std::vector<double> novelty(static_cast<size_t>(tokens));
  double average = 0.0;
  for (int64_t t = 0; t < tokens; ++t) {
    double dot = 0.0;
    for (int64_t d = 0; d < head_dim; ++d) dot += unit[t * head_dim + d] * mean[d];
    novelty[t] = 1.0 - (mean_norm > 0.0 ? dot / mean_norm : 0.0);
    average += novelty[t] / static_cast<double>(tokens);
  }
  for (double& x : novelty) x = average > kAllAlike ? x / average : 1.0;
  return novelty;
}

// Residuals of one side and head in the projection domain, [tokens, head_dim], and |cos| with the anchor.
struct Residuals {
  std::vector<float> r;
  std::vector<double> squared_norm;
  std::vector<double> abs_cosine;
};

Residuals ResidualsOf(HeadsView<const float> vectors, const RoundedAnchors& anchors,
                      const std::vector<uint16_t>& assignment, int64_t head) {
  const int64_t head_dim = vectors.head_dim;
  Residuals out;
  out.r.resize(static_cast<size_t>(vectors.tokens * head_dim));
  for (int64_t t = 0; t < vectors.tokens; ++t) {
    const float* x = vectors.row(head, t);
    const uint16_t anchor = assignment[head * vectors.tokens + t];
    Project(x, anchors, head, anchor, out.r.data() + t * head_dim);
    out.squared_norm.push_back(SquaredNorm(out.r.data() + t * head_dim, head_dim));
    double cosine = 0.0;
    if (anchor != kNoAnchor) {
      const float* a = anchors.row(head, anchor);
      double dot = 0.0;
      for (int64_t d = 0; d < head_dim; ++d) dot += double{x[d]} * a[d];
      const double norms = std::sqrt(SquaredNorm(x, head_dim) * SquaredNorm(a, head_dim));
      cosine = norms > 0.0 ? std::fabs(dot) / norms : 0.0;
    }
    out.abs_cosine.push_back(cosine);
  }
  return out;
}

// One kv head's utilities: [side][t].
struct HeadUtility {
  std::vector<double> side[2];
};

// The rankings that look at the observed queries.
void AddQueryUtility(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats, int64_t head,
                     const Residuals& keys_residual, const Residuals& values_residual, HeadUtility* out) {
  const int64_t tokens = input.keys.tokens;
  const int64_t window = input.queries.tokens;
  const int64_t head_dim = input.keys.head_dim;
  const int64_t group = input.gqa_ratio();
  const double share = 1.0 / static_cast<double>(group * window);
  const double dims = static_cast<double>(head_dim);
  const std::vector<double> keys = RotatedKeys(input, head);

  std::vector<double> rotated(keys_residual.r.begin(), keys_residual.r.end());
  for (int64_t t = 0; options.pre_rope && options.ranking == Ranking::kUtility && t < tokens; ++t) {
    Rotate(*input.rope, input.first_position + t, rotated.data() + t * head_dim);
  }
  std::vector<double> prior(static_cast<size_t>(tokens), 0.0);
  if (options.ranking == Ranking::kBlend || options.ranking == Ranking::kBlendNovelty) {
    std::fill(prior.begin(), prior.end(), options.prior_phi / static_cast<double>(tokens));
  }
  if (options.ranking == Ranking::kBlendNovelty) {
    const std::vector<double> novelty = Novelty(keys, tokens, head_dim);
    for (int64_t t = 0; t < tokens; ++t) prior[t] *= novelty[t];
  }

  for (int64_t h = head * group; h < (head + 1) * group; ++h) {
    for (int64_t w = 0; w < window; ++w) {
      const int64_t row = h * window + w;
      const float* query = input.queries.row(h, w);
      const float* y = stats.y.data() + row * head_dim;
      const std::vector<double> logits = Logits(keys, query, head_dim, Visible(input, w));
      for (int64_t t = 0; t < tokens; ++t) {
        const bool seen = t < static_cast<int64_t>(logits.size());
        const double alpha = seen ? std::exp(logits[t] - stats.m[row]) / stats.l[row] : 0.0;
        if (options.ranking == Ranking::kAttention) {
          out->side[kKeys][t] += share * alpha;
          out->side[kValues][t] += share * alpha;
          continue;
        }
        const double b = alpha + prior[t];
        const double value_distance = SquaredDistance(input.values.row(head, t), y, head_dim);
        double logit_change = 0.0;  // squared, caused by dropping the key's residual
        if (options.ranking == Ranking::kUtility) {
          const double dot = Dot(rotated.data() + t * head_dim, query, head_dim);
          logit_change = dot * dot / dims;
        } else {
          logit_change = SquaredNorm(query, head_dim) * keys_residual.squared_norm[t] / (dims * dims);
        }
        out->side[kKeys][t] += share * b * b * logit_change * value_distance;
        out->side[kValues][t] += share * b * b * values_residual.squared_norm[t];
      }
    }
  }
}

// The rankings that do not.
void SetPlainUtility(const LayerInput& input, const CodecOptions& options, int64_t head, const Residuals residuals[2],
                     HeadUtility* out) {
  for (int side = 0; side < 2; ++side) {
    const HeadsView<const float>& vectors = side == kKeys ? input.keys : input.values;
    for (int64_t t = 0; t < vectors.tokens; ++t) {
      double& u = out->side[side][t];
      if (options.ranking == Ranking::kNorm) {
        u = std::sqrt(residuals[side].squared_norm[t]);
      } else if (options.ranking == Ranking::kCosine) {
        // A zero vector has nothing left to code.
        u = SquaredNorm(vectors.row(head, t), vectors.head_dim) > 0.0 ? 1.0 - residuals[side].abs_cosine[t] : 0.0;
      } else {
        u = RandomUtility(options.seed, input.layer, side, head, t);
      }
    }
  }
}

}  // namespace

Status Score(const LayerInput& input, AttentionStats* stats, HeadScores* scores) {
  AKV_RETURN_IF_ERROR(CheckInput(input));
  const int64_t tokens = input.keys.tokens;
  const int64_t window = input.queries.tokens;
  const int64_t head_dim = input.keys.head_dim;
  const int64_t q_heads = input.queries.heads;
  const int64_t group = input.gqa_ratio();
  stats->m.resize(static_cast<size_t>(q_heads * window));
  stats->l.resize(static_cast<size_t>(q_heads * window));
  stats->y.resize(static_cast<size_t>(q_heads * window * head_dim));
  scores->tokens = tokens;
  scores->data.resize(static_cast<size_t>(input.keys.heads * tokens));

  for (int64_t head = 0; head < input.keys.heads; ++head) {
    const std::vector<double> keys = RotatedKeys(input, head);
    std::vector<double> score(static_cast<size_t>(tokens), 0.0);
    for (int64_t h = head * group; h < (head + 1) * group; ++h) {
      for (int64_t w = 0; w < window; ++w) {
        const std::vector<double> logits = Logits(keys, input.queries.row(h, w), head_dim, Visible(input, w));
        const int64_t prior_row = w * q_heads + h;
        const bool has_prior = input.prior.l != nullptr && input.prior.l[prior_row] > 0.0f;
        double max_logit = *std::max_element(logits.begin(), logits.end());
        if (has_prior) max_logit = std::max(max_logit, double{input.prior.m[prior_row]});
        // The stored maximum is a float; sums are taken relative to what is stored.
        const float m = static_cast<float>(max_logit);

        double l = 0.0;
        std::vector<double> y(static_cast<size_t>(head_dim), 0.0);
        if (has_prior) {
          const double factor = std::exp(double{input.prior.m[prior_row]} - m);
          l = factor * input.prior.l[prior_row];
          for (int64_t d = 0; d < head_dim; ++d) y[d] = factor * input.prior.o[prior_row * head_dim + d];
        }
        for (size_t t = 0; t < logits.size(); ++t) {
          const double e = std::exp(logits[t] - m);
          const float* value = input.values.row(head, static_cast<int64_t>(t));
          l += e;
          for (int64_t d = 0; d < head_dim; ++d) y[d] += e * value[d];
        }
        const int64_t row = h * window + w;
        stats->m[row] = m;
        stats->l[row] = static_cast<float>(l);
        for (int64_t d = 0; d < head_dim; ++d) stats->y[row * head_dim + d] = static_cast<float>(y[d] / l);
        for (size_t t = 0; t < logits.size(); ++t) {
          score[t] += std::exp(logits[t] - m) / l / static_cast<double>(group * window);
        }
      }
    }
    std::transform(score.begin(), score.end(), scores->head(head), [](double s) { return static_cast<float>(s); });
  }
  return {};
}

Status Utility(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
               std::span<const uint32_t> anchor_positions, const RoundedAnchors anchors[2],
               const std::vector<uint16_t> assignment[2], HeadScores utility[2]) {
  AKV_RETURN_IF_ERROR(CheckInput(input));
  const int64_t tokens = input.keys.tokens;
  const int64_t heads = input.keys.heads;
  for (int side = 0; side < 2; ++side) {
    utility[side].tokens = tokens;
    utility[side].data.resize(static_cast<size_t>(heads * tokens));
  }
  std::vector<float> rotated_storage;
  const HeadsView<const float> vectors[2] = {ProjectionKeys(input, options.pre_rope, &rotated_storage), input.values};

  for (int64_t head = 0; head < heads; ++head) {
    const Residuals residuals[2] = {ResidualsOf(vectors[kKeys], anchors[kKeys], assignment[kKeys], head),
                                    ResidualsOf(vectors[kValues], anchors[kValues], assignment[kValues], head)};
    HeadUtility head_utility;
    for (auto& side : head_utility.side) side.assign(static_cast<size_t>(tokens), 0.0);
    switch (options.ranking) {
      case Ranking::kUtility:
      case Ranking::kBlend:
      case Ranking::kBlendNovelty:
      case Ranking::kAttention:
        AddQueryUtility(input, options, stats, head, residuals[kKeys], residuals[kValues], &head_utility);
        break;
      case Ranking::kNorm:
      case Ranking::kCosine:
      case Ranking::kRandom:
        SetPlainUtility(input, options, head, residuals, &head_utility);
        break;
    }
    const int64_t count = anchors[kKeys].anchors;
    for (int side = 0; side < 2; ++side) {
      float* out = utility[side].head(head);
      for (int64_t t = 0; t < tokens; ++t) out[t] = static_cast<float>(head_utility.side[side][t]);
      for (int64_t a = 0; a < count; ++a) {
        out[anchor_positions[head * count + a]] = -std::numeric_limits<float>::infinity();
      }
    }
  }
  return {};
}

Status Importance(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                  HeadScores importance[2]) {
  AKV_RETURN_IF_ERROR(CheckInput(input));
  const auto tokens = static_cast<size_t>(input.keys.tokens);
  Residuals unit;
  unit.squared_norm.assign(tokens, 1.0);
  for (int side = 0; side < 2; ++side) {
    importance[side].tokens = input.keys.tokens;
    importance[side].data.resize(static_cast<size_t>(input.keys.heads) * tokens);
  }
  for (int64_t head = 0; head < input.keys.heads; ++head) {
    HeadUtility out;
    for (auto& side : out.side) side.assign(tokens, 0.0);
    AddQueryUtility(input, options, stats, head, unit, unit, &out);
    for (int side = 0; side < 2; ++side) {
      std::transform(out.side[side].begin(), out.side[side].end(), importance[side].head(head),
                     [](double x) { return static_cast<float>(x); });
    }
  }
  return {};
}

}  // namespace anchorkv::reference
