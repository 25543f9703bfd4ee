// The codec's rotations against ggml's: the keys that ggml rotated are rotated back with our table, so both
// must mean the same angles. ggml multiplies an angle by the same float factor from pair to pair, which
// costs it digits at high positions; our table does not share that error.
#include "anchorkv/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <ostream>

#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "runtime/graph.h"
#include "support/random.h"

namespace anchorkv::test {
namespace {

constexpr int kHeadDim = 64;

struct Scaling {
  const char* name;
  RopeSpec spec;
};

void PrintTo(const Scaling& scaling, std::ostream* out) { *out << scaling.name; }

std::vector<Scaling> Scalings() {
  std::vector<Scaling> list;
  for (const RopePairing pairing : {RopePairing::kInterleaved, RopePairing::kHalfSplit}) {
    const bool interleaved = pairing == RopePairing::kInterleaved;
    RopeSpec plain;
    plain.pairing = pairing;
    plain.rotary_dim = kHeadDim;
    plain.original_context = 4096;
    list.push_back({interleaved ? "interleaved_none" : "half_none", plain});
    RopeSpec linear = plain;
    linear.freq_scale = 0.25;
    list.push_back({interleaved ? "interleaved_linear" : "half_linear", linear});
    RopeSpec yarn = plain;
    yarn.freq_scale = 0.125;
    yarn.ext_factor = 1.0;
    yarn.attn_factor = 1.1;
    list.push_back({interleaved ? "interleaved_yarn" : "half_yarn", yarn});
    RopeSpec factors = plain;
    factors.freq_base = 500000.0;
    for (int i = 0; i < kHeadDim / 2; ++i) factors.freq_factors.push_back(i < 10 ? 1.0f : i < 20 ? 0.5f * i : 32.0f);
    list.push_back({interleaved ? "interleaved_llama3" : "half_llama3", factors});
  }
  RopeSpec partial;
  partial.pairing = RopePairing::kHalfSplit;
  partial.rotary_dim = kHeadDim / 2;
  list.push_back({"half_partial", partial});
  return list;
}

// ggml's rotation of x [head_dim] to `position`.
std::vector<float> GgmlRotated(const std::vector<float>& x, int position, const RopeSpec& spec) {
  const ggml_context_ptr context(ggml_init({size_t{1} << 20, nullptr, /*no_alloc=*/false}));
  ggml_tensor* input = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, kHeadDim, 1, 1);
  std::copy(x.begin(), x.end(), static_cast<float*>(input->data));
  ggml_tensor* positions = ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, 1);
  static_cast<int32_t*>(positions->data)[0] = position;
  ggml_tensor* factors = nullptr;
  if (!spec.freq_factors.empty()) {
    factors = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, static_cast<int64_t>(spec.freq_factors.size()));
    std::copy(spec.freq_factors.begin(), spec.freq_factors.end(), static_cast<float*>(factors->data));
  }
  ggml_tensor* rotated = Rotated(context.get(), input, positions, factors, spec);
  ggml_cgraph* graph = ggml_new_graph(context.get());
  ggml_build_forward_expand(graph, rotated);
  ggml_graph_compute_with_ctx(context.get(), graph, 1);
  const float* out = static_cast<const float*>(rotated->data);
  return std::vector<float>(out, out + kHeadDim);
}

class RopeAgainstGgml : public ::testing::TestWithParam<Scaling> {};

TEST_P(RopeAgainstGgml, SameAngles) {
  const RopeSpec& spec = GetParam().spec;
  const auto table = RopeTable::Make(spec, kHeadDim, 32768);
  ASSERT_TRUE(table.ok()) << table.status().message();
  Random random(5);
  struct Case {
    int position;
    double tolerance;
  };
  for (const Case c : {Case{0, 1e-6}, Case{1, 1e-6}, Case{63, 1e-5}, Case{64, 1e-5}, Case{1000, 2e-4}, Case{4097, 5e-4},
                       Case{30000, 2e-3}}) {
    const std::vector<float> x = random.Gaussians(kHeadDim);
    const std::vector<float> ggml = GgmlRotated(x, c.position, spec);
    std::vector<float> ours = x;
    (*table)->Rotate(c.position, ours.data());
    double norm = 0, difference = 0;
    for (int i = 0; i < kHeadDim; ++i) {
      norm += double{ggml[i]} * ggml[i];
      difference += (double{ggml[i]} - ours[i]) * (double{ggml[i]} - ours[i]);
    }
    EXPECT_LT(std::sqrt(difference / norm), c.tolerance) << "position " << c.position;
    // And back.
    (*table)->Unrotate(c.position, ours.data());
    for (int i = 0; i < kHeadDim; ++i) EXPECT_NEAR(ours[i], x[i], 1e-5) << "element " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Scalings, RopeAgainstGgml, ::testing::ValuesIn(Scalings()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace anchorkv::test
