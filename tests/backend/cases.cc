#include "backend/cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "support/random.h"

namespace anchorkv::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kClusters = 6;

// Vectors around `kClusters` random directions, with both signs and varying length.
void FillClustered(HeadsView<float> view, Random* random) {
  for (int64_t h = 0; h < view.heads; ++h) {
    const std::vector<float> centres = random->Gaussians(kClusters * view.head_dim);
    for (int64_t t = 0; t < view.tokens; ++t) {
      const float* centre = centres.data() + random->Below(kClusters) * view.head_dim;
      const float length = static_cast<float>(0.5 + random->Uniform()) * (random->Below(4) == 0 ? -1.0f : 1.0f);
      float* row = view.row(h, t);
      for (int64_t d = 0; d < view.head_dim; ++d) row[d] = length * centre[d] + 0.4f * random->Gaussian();
    }
  }
}

void ScaleRow(HeadsView<float> view, int64_t h, int64_t t, float factor) {
  for (int64_t d = 0; d < view.head_dim; ++d) view.row(h, t)[d] *= factor;
}

void ScaleAll(HeadsView<float> view, float factor) {
  for (int64_t h = 0; h < view.heads; ++h) {
    for (int64_t t = 0; t < view.tokens; ++t) ScaleRow(view, h, t, factor);
  }
}

RopeSpec MakeRope(const LayerSpec& spec) {
  RopeSpec rope;
  rope.pairing = spec.pairing;
  rope.rotary_dim = spec.rotary_dim < 0 ? spec.head_dim : spec.rotary_dim;
  if (spec.yarn) {
    rope.ext_factor = 1.0;
    rope.freq_scale = 0.25;
    rope.original_context = 4096;
  }
  return rope;
}

}  // namespace

Layer::Layer(const LayerSpec& spec) : spec_(spec) {
  if (spec_.data == Data::kEqualHugeLogits) spec_.rotary_dim = 0;
  auto rope = RopeTable::Make(MakeRope(spec_), spec_.head_dim, spec_.first_position + spec_.tokens + 512);
  EXPECT_TRUE(rope.ok()) << rope.status().message();
  rope_ = rope.value();
  const auto allocate = [&](std::vector<float>* data, int64_t heads, int64_t tokens) {
    data->assign(static_cast<size_t>(heads * (tokens + spec_.tail_rows) * (spec_.head_dim + spec_.row_padding)), kNaN);
  };
  allocate(&keys_, spec_.kv_heads, spec_.tokens);
  allocate(&values_, spec_.kv_heads, spec_.tokens);
  allocate(&queries_, q_heads(), spec_.window);
  Fill();
}

void Layer::Fill() {
  Random random(spec_.seed);
  FillClustered(keys(), &random);
  FillClustered(values(), &random);
  FillClustered(queries(), &random);
  switch (spec_.data) {
    case Data::kClustered:
      break;
    case Data::kConstantKeys:
    case Data::kEqualHugeLogits:
      for (int64_t h = 0; h < spec_.kv_heads; ++h) {
        for (int64_t t = 1; t < spec_.tokens; ++t) std::copy_n(keys().row(h, 0), spec_.head_dim, keys().row(h, t));
      }
      break;
    case Data::kZeros:
      for (int64_t h = 0; h < spec_.kv_heads; ++h) {
        for (int64_t t = 0; t < spec_.tokens; ++t) {
          if (random.Below(4) == 0) ScaleRow(keys(), h, t, 0.0f);
          if (random.Below(4) == 0) ScaleRow(values(), h, t, 0.0f);
        }
      }
      break;
    case Data::kLarge:
      ScaleAll(keys(), 1000.0f / std::sqrt(static_cast<float>(spec_.head_dim)));
      ScaleAll(queries(), 0.01f);
      break;
    case Data::kTiny:
      for (int64_t h = 0; h < spec_.kv_heads; ++h) {
        for (int64_t t = 0; t < spec_.tokens; t += 2) {
          ScaleRow(keys(), h, t, 1e-4f);
          ScaleRow(values(), h, t, 1e-4f);
        }
      }
      break;
    case Data::kHugeLogits:
      ScaleAll(keys(), 100.0f);
      ScaleAll(queries(), 40.0f);
      break;
  }
  if (spec_.data == Data::kEqualHugeLogits) {
    // Every query points along its head's key: logit = |q| |k| / sqrt(D) = 5e4.
    for (int64_t h = 0; h < q_heads(); ++h) {
      const float* key = keys().row(h / spec_.gqa_ratio, 0);
      double norm = 0.0;
      for (int64_t d = 0; d < spec_.head_dim; ++d) norm += double{key[d]} * key[d];
      const float factor = static_cast<float>(5e4 * std::sqrt(static_cast<double>(spec_.head_dim)) / norm);
      for (int64_t w = 0; w < spec_.window; ++w) {
        for (int64_t d = 0; d < spec_.head_dim; ++d) queries().row(h, w)[d] = factor * key[d];
      }
    }
  }
  if (spec_.prior) {
    const int64_t rows = int64_t{spec_.window} * q_heads();
    prior_o_ = random.Gaussians(rows * spec_.head_dim, 10.0f);
    prior_m_ = random.Gaussians(rows);
    prior_l_.assign(static_cast<size_t>(rows), 20.0f);
    // A row that has seen nothing before: the empty state.
    prior_m_[0] = -std::numeric_limits<float>::infinity();
    prior_l_[0] = 0.0f;
    std::fill_n(prior_o_.begin(), spec_.head_dim, 0.0f);
  }
}

LayerInput Layer::input() const {
  LayerInput input;
  input.layer = 3;
  input.keys = View(keys_.data(), spec_.kv_heads, spec_.tokens);
  input.values = View(values_.data(), spec_.kv_heads, spec_.tokens);
  input.queries = View(queries_.data(), q_heads(), spec_.window);
  input.first_position = spec_.first_position;
  input.rope = rope_.get();
  if (spec_.prior) input.prior = {prior_o_.data(), prior_m_.data(), prior_l_.data()};
  return input;
}

std::vector<float> Layer::RotatedKeys() const {
  const HeadsView<const float> keys = input().keys;
  std::vector<float> out;
  for (int64_t h = 0; h < keys.heads; ++h) {
    for (int64_t t = 0; t < keys.tokens; ++t) {
      out.insert(out.end(), keys.row(h, t), keys.row(h, t) + keys.head_dim);
      rope_->Rotate(spec_.first_position + t, out.data() + out.size() - keys.head_dim);
    }
  }
  return out;
}

SegmentPlan MakePlan(const Layer& layer, const PlanSpec& spec) {
  const LayerInput input = layer.input();
  const int64_t heads = input.keys.heads;
  const int64_t tokens = input.keys.tokens;
  Random random(spec.seed);
  SegmentPlan plan;
  plan.scale = spec.scale;
  plan.layout.kv_heads = static_cast<int>(heads);
  plan.layout.head_dim = static_cast<int>(input.keys.head_dim);
  plan.layout.tokens = tokens;
  plan.layout.anchors = std::min(spec.anchors, tokens);
  plan.layout.code = spec.code;

  std::vector<bool> is_anchor(static_cast<size_t>(heads * tokens), false);
  for (int64_t h = 0; h < heads; ++h) {
    int64_t chosen = std::min<int64_t>(input.queries.tokens, plan.layout.anchors);
    for (int64_t i = 0; i < chosen; ++i) is_anchor[h * tokens + tokens - 1 - i] = true;
    while (chosen < plan.layout.anchors) {
      const int64_t t = h * tokens + random.Below(tokens);
      chosen += is_anchor[t] ? 0 : 1;
      is_anchor[t] = true;
    }
    for (int64_t t = 0; t < tokens; ++t) {
      if (is_anchor[h * tokens + t]) plan.anchors.push_back(static_cast<uint32_t>(t));
    }
  }

  std::vector<float> rotated;
  HeadsView<const float> sides[2] = {input.keys, input.values};
  if (!spec.code.pre_rope) {
    rotated = layer.RotatedKeys();
    sides[kKeys] = HeadMajor<const float>(rotated.data(), heads, tokens, input.keys.head_dim);
  }
  for (int side = 0; side < 2; ++side) {
    const RoundedAnchors anchors = RoundAnchors(sides[side], plan.anchors);
    const Status status = ReferenceBackend().Assign(sides[side], anchors, plan.anchors, &plan.assignment[side]);
    EXPECT_TRUE(status.ok()) << status.message();

    plan.pool_of[side].assign(static_cast<size_t>(heads * tokens), 0);
    int64_t slots[kMaxPools] = {};
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t& count : slots) {
        if (side == kValues) count = (count + kValueSlotAlign - 1) / kValueSlotAlign * kValueSlotAlign;
      }
      for (int64_t t = 0; t < tokens; ++t) {
        if (is_anchor[h * tokens + t]) continue;
        double u = random.Uniform();
        for (int p = 0; p < kMaxPools; ++p) {
          if (spec.bits[side][p] == 0) continue;
          if (u < spec.share[side][p]) {
            plan.pool_of[side][h * tokens + t] = static_cast<uint8_t>(p + 1);
            ++slots[p];
            break;
          }
          u -= spec.share[side][p];
        }
      }
    }
    for (int p = 0; p < kMaxPools; ++p) {
      plan.layout.pools[side][p].bits = spec.bits[side][p];
      plan.layout.pools[side][p].slots = slots[p];
    }
  }
  plan.layout.Place();
  return plan;
}

Packed PackWith(const Backend& backend, const Layer& layer, const SegmentPlan& plan) {
  Packed packed;
  packed.layout = plan.layout;
  packed.first_position = layer.spec().first_position;
  packed.bytes = AlignedBuffer::Make(plan.layout.total_bytes, "a test segment").value();
  const Status status = backend.Pack(layer.input(), plan, packed.bytes.data());
  EXPECT_TRUE(status.ok()) << status.message();
  return packed;
}

std::vector<LayerSpec> LayerSpecs() {
  std::vector<LayerSpec> specs = {
      {.name = "plain"},
      {.name = "one_head_d128", .kv_heads = 1, .gqa_ratio = 3, .head_dim = 128, .tokens = 300},
      {.name = "d256", .kv_heads = 1, .gqa_ratio = 4, .head_dim = 256, .tokens = 129, .window = 16},
      {.name = "d80_interleaved", .head_dim = 80, .tokens = 130, .window = 16, .pairing = RopePairing::kInterleaved},
      {.name = "d96_partial_rotation", .gqa_ratio = 1, .head_dim = 96, .tokens = 150, .window = 8, .rotary_dim = 48},
      {.name = "d72_odd_blocks", .kv_heads = 1, .gqa_ratio = 5, .head_dim = 72, .tokens = 100, .window = 7},
      {.name = "d8", .kv_heads = 3, .gqa_ratio = 1, .head_dim = 8, .tokens = 90, .window = 4},
      {.name = "one_more_than_window", .tokens = 33},
      {.name = "tile_minus_one", .tokens = 63},
      {.name = "tile", .tokens = 64},
      {.name = "tile_plus_one", .tokens = 65},
      {.name = "yarn", .yarn = true},
      {.name = "later_segment", .first_position = 1000, .prior = true},
      {.name = "later_segment_odd",
       .tokens = 97,
       .first_position = 77,
       .prior = true,
       .pairing = RopePairing::kInterleaved},
      {.name = "token_major", .token_major = true},
      {.name = "poisoned_rows", .row_padding = 3, .tail_rows = 2},
      {.name = "poisoned_rows_token_major",
       .gqa_ratio = 3,
       .head_dim = 128,
       .tokens = 131,
       .token_major = true,
       .row_padding = 1,
       .tail_rows = 1},
      {.name = "constant_keys", .data = Data::kConstantKeys},
      {.name = "zeros", .data = Data::kZeros},
      {.name = "large", .data = Data::kLarge},
      {.name = "tiny", .data = Data::kTiny},
      {.name = "huge_logits", .data = Data::kHugeLogits},
      {.name = "equal_huge_logits", .data = Data::kEqualHugeLogits},
  };
  for (size_t i = 0; i < specs.size(); ++i) specs[i].seed = 100 + i;
  return specs;
}

std::vector<PlanSpec> PlanSpecs(const LayerSpec& layer) {
  const int64_t anchors = std::min<int64_t>(layer.tokens, layer.window + 8);
  std::vector<PlanSpec> specs(8);
  for (PlanSpec& spec : specs) spec.anchors = anchors;
  const auto set_bits = [](PlanSpec* spec, int first, int second, double share) {
    for (int side = 0; side < 2; ++side) {
      spec->bits[side][0] = first;
      spec->bits[side][1] = second;
      spec->share[side][0] = share;
      spec->share[side][1] = second != 0 ? 1.0 - share : 0.0;
    }
  };
  set_bits(&specs[1], 2, 3, 0.6);
  set_bits(&specs[2], 3, 4, 0.3);
  set_bits(&specs[3], 1, 0, 1.0);
  specs[3].code.pre_rope = false;
  set_bits(&specs[4], 4, 0, 0.9);
  specs[4].code.hadamard = false;
  specs[4].scale = ResidualScale::kRms;
  specs[5].code.uniform = true;
  specs[5].scale = ResidualScale::kAbsMaxLiteral;
  set_bits(&specs[6], 0, 0, 0.0);   // no residuals at all
  specs[7].anchors = layer.tokens;  // every token an anchor: the identity control
  specs[7].scale = ResidualScale::kAbsMax;
  for (size_t i = 0; i < specs.size(); ++i) specs[i].seed = layer.seed + i;
  return specs;
}

Attention::Attention(int head_dim, int tokens, int heads, uint64_t seed, float query_scale)
    : head_dim_(head_dim), tokens_(tokens), heads_(heads) {
  Random random(seed);
  const int64_t rows = int64_t{tokens} * heads;
  queries_.assign(static_cast<size_t>(rows * (head_dim + kGuard)), kNaN);
  for (int64_t row = 0; row < rows; ++row) {
    for (int d = 0; d < head_dim; ++d) queries_[row * (head_dim + kGuard) + d] = query_scale * random.Gaussian();
  }
  o_.resize(static_cast<size_t>(rows * (head_dim + kGuard)));
  m_.resize(static_cast<size_t>(tokens * (heads + kGuard)));
  l_.resize(m_.size());
  Poison();
}

QueryRows Attention::queries() const {
  return {queries_.data(), int64_t{heads_} * (head_dim_ + kGuard), head_dim_ + kGuard, tokens_, heads_};
}

StateRows Attention::states() {
  return {o_.data(),          m_.data(),       l_.data(), int64_t{heads_} * (head_dim_ + kGuard),
          head_dim_ + kGuard, heads_ + kGuard, 1};
}

void Attention::Poison() {
  for (std::vector<float>* data : {&o_, &m_, &l_}) std::fill(data->begin(), data->end(), kNaN);
}

bool Attention::GuardsIntact() const {
  const auto all_nan = [](const std::vector<float>& data, int row, int used) {
    for (size_t i = 0; i < data.size(); ++i) {
      if (static_cast<int>(i % row) >= used && !std::isnan(data[i])) return false;
    }
    return true;
  };
  return all_nan(o_, head_dim_ + kGuard, head_dim_) && all_nan(m_, heads_ + kGuard, heads_) &&
         all_nan(l_, heads_ + kGuard, heads_);
}

void* Attention::Scratch(const Backend& backend, int64_t anchors) {
  return PoisonedScratch(backend.AttendScratchBytes(head_dim_, tokens_ * heads_, anchors));
}

void* Attention::SpectralScratch(const Backend& backend) {
  return PoisonedScratch(backend.AttendSpectralScratchBytes(head_dim_, tokens_ * heads_));
}

void* Attention::PoisonedScratch(size_t bytes) {
  scratch_ = AlignedBuffer::Make(bytes, "test scratch").value();
  if (scratch_.size_bytes() > 0) std::memset(scratch_.data(), 0xff, scratch_.size_bytes());
  return scratch_.data();
}

std::vector<float> Attention::Output() const {
  std::vector<float> out;
  for (int token = 0; token < tokens_; ++token) {
    for (int head = 0; head < heads_; ++head) {
      const float l = l_[token * (heads_ + kGuard) + head];
      const float* o = o_.data() + (int64_t{token} * heads_ + head) * (head_dim_ + kGuard);
      for (int d = 0; d < head_dim_; ++d) out.push_back(l == 0.0f ? 0.0f : o[d] / l);
    }
  }
  return out;
}

std::vector<double> Attention::LogSumExp() const {
  std::vector<double> out;
  for (int token = 0; token < tokens_; ++token) {
    for (int head = 0; head < heads_; ++head) {
      const int64_t s = int64_t{token} * (heads_ + kGuard) + head;
      out.push_back(m_[s] + std::log(double{l_[s]}));
    }
  }
  return out;
}

}  // namespace anchorkv::test
