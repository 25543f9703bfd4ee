// Shapes and options of every kind: a budget is either refused with a message or within theta, with as many
// anchors and residuals as there are vectors.

#include "anchorkv/options.h"
#include "check.h"
#include "codec/codec.h"
#include "input.h"

namespace {

anchorkv::CodecOptions MakeOptions(anchorkv::fuzz::Input& in) {
  auto options = anchorkv::CodecOptions::ForProfile(in.Bool() ? anchorkv::Profile::kPaper : anchorkv::Profile::kBlend);
  options.theta = in.Bool() ? in.Real(0.0, 2.0) : in.AnyDouble();
  options.window = in.InRange<int>(-1, 1 << 17);
  options.anchors = in.InRange<int64_t>(-1, 1 << 17);
  options.sinks = in.InRange<int>(-1, 64);
  options.rho = in.AnyDouble();
  options.residual_bits = in.InRange<int>(-1, 5);
  options.surplus = static_cast<anchorkv::Surplus>(in.InRange<int>(0, 2));
  options.pool_heads = in.Bool();
  return options;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  anchorkv::fuzz::Input in(data, size);
  anchorkv::LayerShape shape;
  shape.kv_heads = in.InRange<int>(-1, 128);
  shape.head_dim = in.InRange<int>(-8, 1024);
  shape.tokens = in.InRange<int64_t>(-1, int64_t{1} << 21);
  const anchorkv::CodecOptions options = MakeOptions(in);

  const auto budget = anchorkv::PlanBudget(shape, options);
  if (!budget.ok()) {
    FUZZ_CHECK(!budget.status().message().empty());
    return 0;
  }
  FUZZ_CHECK(anchorkv::Validate(options).ok());
  FUZZ_CHECK(static_cast<double>(budget->total_bytes) <= options.theta * static_cast<double>(shape.dense_bytes()));
  FUZZ_CHECK(budget->base_bytes <= budget->total_bytes);
  FUZZ_CHECK(budget->anchors >= options.window && budget->anchors <= shape.tokens);
  FUZZ_CHECK(budget->anchors <= anchorkv::kMaxAnchors);
  const int64_t vectors = shape.kv_heads * (shape.tokens - budget->anchors);
  for (const anchorkv::Side side : {anchorkv::kKeys, anchorkv::kValues}) {
    int64_t slots = 0;
    for (int pool = 0; pool < anchorkv::kMaxPools; ++pool) {
      FUZZ_CHECK(budget->slots[side][pool] >= 0);
      FUZZ_CHECK(budget->slots[side][pool] == 0 || (budget->bits[side][pool] >= 1 && budget->bits[side][pool] <= 4));
      slots += budget->slots[side][pool];
    }
    FUZZ_CHECK(slots <= vectors);
    const double share = budget->residual_share(side, shape);
    FUZZ_CHECK(share >= 0.0 && share <= 1.0);
  }
  FUZZ_CHECK(anchorkv::MaxRatio(shape, options) * options.theta >= 1.0 - 1e-9);
  return 0;
}
