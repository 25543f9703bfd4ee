// Why models with GELU (gemma3) agree with libllama only to the steps of a table where those with SiLU agree to the
// last digits, both computing every operator with ggml: ggml rounds GELU's input to f16 to look it up. A change in the
// last digit of a float, which another order of summation brings, then changes the output by up to 2^-11 of it or not
// at all.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "ggml-cpp.h"
#include "ggml-cpu.h"

namespace anchorkv::test {
namespace {

using Op = ggml_tensor* (*)(ggml_context*, ggml_tensor*, ggml_tensor*);

// op(gate, 1) by ggml.
std::vector<float> Gate(Op op, const std::vector<float>& gate) {
  const ggml_context_ptr context(ggml_init({/*mem_size=*/64 << 20, /*mem_buffer=*/nullptr, /*no_alloc=*/false}));
  const auto n = static_cast<int64_t>(gate.size());
  ggml_tensor* const a = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, n);
  ggml_tensor* const b = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, n);
  std::copy(gate.begin(), gate.end(), static_cast<float*>(a->data));
  std::fill_n(static_cast<float*>(b->data), n, 1.0f);
  ggml_tensor* const out = op(context.get(), a, b);
  ggml_cgraph* const graph = ggml_new_graph(context.get());
  ggml_build_forward_expand(graph, out);
  EXPECT_EQ(ggml_graph_compute_with_ctx(context.get(), graph, 1), GGML_STATUS_SUCCESS);
  const auto* data = static_cast<const float*>(out->data);
  return {data, data + n};
}

// The largest relative change of the output when every input grows by 2^-22 of itself.
double LargestStep(Op op) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(0.5f, 4.0f);
  std::vector<float> gate(20000);
  for (float& x : gate) x = uniform(random);
  const std::vector<float> before = Gate(op, gate);
  for (float& x : gate) x += std::ldexp(x, -22);
  const std::vector<float> after = Gate(op, gate);
  double largest = 0;
  for (size_t i = 0; i < gate.size(); ++i) {
    largest = std::max(largest, std::fabs(double{after[i]} - before[i]) / std::fabs(before[i]));
  }
  return largest;
}

TEST(GeluTable, TurnsTheLastDigitIntoAStep) {
  const double gelu = LargestStep(ggml_geglu_split);
  const double silu = LargestStep(ggml_swiglu_split);
  std::printf("relative steps: GELU %.3g, SiLU %.3g\n", gelu, silu);
  EXPECT_GT(gelu, std::ldexp(1.0, -13));
  EXPECT_LT(gelu, std::ldexp(1.0, -8));
  EXPECT_LT(silu, 4e-6);
}

}  // namespace
}  // namespace anchorkv::test
