#include "capi/internal.h"
#include "codec/rotated_keys.h"

namespace anchorkv::capi {
namespace {

constexpr int64_t kMostFactors = 4096;
constexpr int64_t kDefaultPositions = int64_t{1} << 18;

anchorkv_rope_params Defaults() {
  const RopeSpec spec;
  anchorkv_rope_params p = {};
  p.size = sizeof p;
  p.pairing = ANCHORKV_PAIRING_HALF_SPLIT;
  p.max_position = kDefaultPositions;
  p.freq_base = spec.freq_base;
  p.freq_scale = spec.freq_scale;
  p.ext_factor = spec.ext_factor;
  p.attn_factor = spec.attn_factor;
  p.beta_fast = spec.beta_fast;
  p.beta_slow = spec.beta_slow;
  return p;
}

Result<RopeSpec> SpecOf(const anchorkv_rope_params& p) {
  if (p.pairing != ANCHORKV_PAIRING_INTERLEAVED && p.pairing != ANCHORKV_PAIRING_HALF_SPLIT) {
    return InvalidArgument("pairing is " + std::to_string(p.pairing) + "; it must be 0 or 1");
  }
  if (p.freq_factor_count < 0 || p.freq_factor_count > kMostFactors) {
    return InvalidArgument("freq_factor_count is " + std::to_string(p.freq_factor_count) + "; it must be from 0 to " +
                           std::to_string(kMostFactors));
  }
  if (p.freq_factors == nullptr && p.freq_factor_count > 0) {
    return InvalidArgument("freq_factors is null; freq_factor_count is " + std::to_string(p.freq_factor_count));
  }
  RopeSpec spec;
  spec.pairing = p.pairing == ANCHORKV_PAIRING_INTERLEAVED ? RopePairing::kInterleaved : RopePairing::kHalfSplit;
  spec.rotary_dim = p.rotary_dim == 0 ? p.head_dim : p.rotary_dim;
  spec.freq_base = p.freq_base;
  spec.freq_scale = p.freq_scale;
  spec.ext_factor = p.ext_factor;
  spec.attn_factor = p.attn_factor;
  spec.beta_fast = p.beta_fast;
  spec.beta_slow = p.beta_slow;
  spec.original_context = p.original_context;
  if (p.freq_factor_count > 0) spec.freq_factors.assign(p.freq_factors, p.freq_factors + p.freq_factor_count);
  return spec;
}

anchorkv_status TurnInPlace(const anchorkv_rope* rope, int64_t first, const anchorkv_mutable_view* rows,
                            RopeTurn turn) {
  return Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(CheckGiven("rope", rope));
    AKV_ASSIGN_OR_RETURN(const HeadsView<float> view, Out("rows", rows));
    const RopeTable& table = *rope->table;
    if (view.head_dim != table.head_dim() || first < 0 || first > table.max_position() - view.tokens) {
      return InvalidArgument("rows of head dim " + std::to_string(view.head_dim) + ", " + std::to_string(view.tokens) +
                             " from position " + std::to_string(first) + "; the rope is for head dim " +
                             std::to_string(table.head_dim()) + " and positions below " +
                             std::to_string(table.max_position()));
    }
    TurnRows(table, first, turn, view, view);
    return {};
  });
}

}  // namespace
}  // namespace anchorkv::capi

using namespace anchorkv;

extern "C" {

anchorkv_status anchorkv_rope_params_init(anchorkv_rope_params* params, size_t size) {
  return capi::Call([&] { return capi::Give("params", params, size, capi::Defaults()); });
}

anchorkv_status anchorkv_rope_create(const anchorkv_rope_params* params, anchorkv_rope** rope) {
  return capi::Call([&]() -> Status {
    AKV_RETURN_IF_ERROR(capi::CheckGiven("rope", rope));
    anchorkv_rope_params p = capi::Defaults();
    AKV_RETURN_IF_ERROR(capi::Take("params", params, &p));
    AKV_ASSIGN_OR_RETURN(const RopeSpec spec, capi::SpecOf(p));
    AKV_ASSIGN_OR_RETURN(auto table, RopeTable::Make(spec, p.head_dim, p.max_position));
    *rope = new anchorkv_rope{std::move(table)};
    return {};
  });
}

void anchorkv_rope_free(anchorkv_rope* rope) { delete rope; }

anchorkv_status anchorkv_rope_rotate(const anchorkv_rope* rope, int64_t first_position,
                                     const anchorkv_mutable_view* rows) {
  return capi::TurnInPlace(rope, first_position, rows, RopeTurn::kTo);
}

anchorkv_status anchorkv_rope_unrotate(const anchorkv_rope* rope, int64_t first_position,
                                       const anchorkv_mutable_view* rows) {
  return capi::TurnInPlace(rope, first_position, rows, RopeTurn::kBackFrom);
}

}  // extern "C"
