// The GPU operations of the runtime against literal loops in double; weights against ggml's own decoding.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "anchorkv/rope.h"
#include "base/half.h"
#include "format/anchor_layout.h"
#include "runtime/cuda/ops.h"
#include "support/random.h"

namespace anchorkv {
namespace {

using cuda::DeviceBuffer;
using cuda::DeviceMatrix;
using cuda::Element;
using test::Random;

class CudaOps : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::CurrentDevice().ok()) GTEST_SKIP() << "no NVIDIA GPU here: the operations were compiled and not run";
  }
};

void ExpectOk(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

template <typename T>
DeviceBuffer Send(const std::vector<T>& host) {
  DeviceBuffer buffer = DeviceBuffer::Make(host.size() * sizeof(T), "a test tensor").value();
  ExpectOk(cuda::Upload(buffer.data(), host.data(), host.size() * sizeof(T), nullptr));
  ExpectOk(cuda::Synchronize(nullptr));
  return buffer;
}

template <typename T>
std::vector<T> Fetch(const DeviceBuffer& buffer) {
  std::vector<T> host(buffer.size_bytes() / sizeof(T));
  ExpectOk(cuda::Download(host.data(), buffer.data(), buffer.size_bytes(), nullptr));
  ExpectOk(cuda::Synchronize(nullptr));
  return host;
}

// f32 or f16 output of an operation, as floats.
template <typename Run>
std::vector<float> Output(int64_t count, Element type, const Run& run) {
  const DeviceBuffer out =
      Send(std::vector<std::byte>(static_cast<size_t>(count * cuda::SizeOf(type)), std::byte{0xff}));
  ExpectOk(run(static_cast<void*>(out.data())));
  if (type == Element::kF32) return Fetch<float>(out);
  std::vector<float> floats;
  for (const uint16_t bits : Fetch<uint16_t>(out)) floats.push_back(HalfToFloat(bits));
  return floats;
}

double HalfTolerance(double x) { return std::abs(x) * 0x1p-11 + 0x1p-25; }

// `slack(i)`: tolerated difference. Stops at a few mistakes.
template <typename Expected, typename Slack>
void ExpectNear(const std::vector<float>& got, const Expected& expected, const Slack& slack, const std::string& what) {
  int wrong = 0;
  for (size_t i = 0; i < got.size() && wrong < 4; ++i) {
    const double want = expected(i);
    if (std::abs(got[i] - want) <= slack(i)) continue;
    ++wrong;
    ADD_FAILURE() << what << ": element " << i << " of " << got.size() << " is " << got[i] << ", expected " << want
                  << " +- " << slack(i);
  }
}

// ---- Weights ----

constexpr ggml_type kTypes[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q4_0,   GGML_TYPE_Q4_1,
                                GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_Q2_K,   GGML_TYPE_Q3_K,
                                GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS};

// A random matrix as ggml stores it, and what it stands for. Magnitude and mean differ between groups of 16 columns, so
// that scales and minima of blocks take many values.
struct Matrix {
  Matrix(ggml_type type, int64_t inputs, int64_t outputs, uint64_t seed)
      : weights(static_cast<size_t>(inputs * outputs)) {
    Random random(seed);
    float magnitude = 0.0f, mean = 0.0f;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (i % 16 == 0) {
        magnitude = static_cast<float>(std::exp2(-4.0 * random.Uniform()));
        mean = static_cast<float>(random.Uniform() - 0.5);
      }
      weights[i] = magnitude * random.Gaussian() + mean;
    }
    std::vector<std::byte> bytes(ggml_row_size(type, inputs) * static_cast<size_t>(outputs));
    if (type == GGML_TYPE_F32) {
      std::memcpy(bytes.data(), weights.data(), bytes.size());
    } else {
      ggml_quantize_chunk(type, weights.data(), bytes.data(), 0, outputs, inputs, nullptr);
      ggml_get_type_traits(type)->to_float(bytes.data(), weights.data(), inputs * outputs);
    }
    buffer = Send(bytes);
    device = {buffer.data(), type, inputs, outputs};
  }
  std::vector<float> weights;
  DeviceBuffer buffer;
  DeviceMatrix device;
};

struct Shape {
  int64_t inputs, outputs;
};

std::vector<Shape> ShapesOf(ggml_type type) {
  const int64_t block = ggml_blck_size(type);
  // The numbers of rows take a group of 4, some of them, all ways to split rows between threads, none left over.
  std::vector<Shape> shapes = {{block, 1},  {block, 3},         {3 * block, 5},     {block * 7, 131}, {8960, 9},
                               {1536, 530}, {1536 + block, 64}, {11 * block, 1031}, {block, 33003}};
  if (block == 1) shapes.insert(shapes.end(), {{33, 5}, {1000, 7}, {1001, 70}, {8, 2}, {64, 300}});
  if (block == 32) shapes.insert(shapes.end(), {{896, 128}, {576, 1536}});
  return shapes;
}

class CudaWeights : public CudaOps, public ::testing::WithParamInterface<ggml_type> {};

TEST_P(CudaWeights, AreDecodedAsGgmlDoes) {
  for (const auto& [inputs, outputs] : ShapesOf(GetParam())) {
    const Matrix matrix(GetParam(), inputs, outputs, 1);
    const std::string what = std::to_string(outputs) + " rows of " + std::to_string(inputs);
    const int64_t first = outputs / 3;
    // The rows in between: with 16-bit blocks in odd numbers they start in the middle of words.
    const int64_t rows = outputs - first - (outputs > 2 ? 1 : 0);
    const float* start = matrix.weights.data() + first * inputs;
    float most = 0.0f;
    for (const float w : matrix.weights) most = std::max(most, std::abs(w));
    const auto as = [&](Element type) {
      return Output(rows * inputs, type,
                    [&](void* out) { return cuda::Dequantize(matrix.device, first, rows, type, out, nullptr); });
    };
    ExpectNear(
        as(Element::kF32), [&](size_t i) { return start[i]; }, [&](size_t) { return 1e-6 * most; }, what);
    ExpectNear(
        as(Element::kF16), [&](size_t i) { return start[i]; },
        [&](size_t i) { return HalfTolerance(start[i]) + 1e-6 * most; }, what + " as f16");
    const std::vector<int32_t> ids = {static_cast<int32_t>(outputs - 1), 0, static_cast<int32_t>(outputs / 2), 0};
    const DeviceBuffer device_ids = Send(ids);
    const std::vector<float> looked_up = Output(4 * inputs, Element::kF32, [&](void* out) {
      return cuda::LookUpRows(matrix.device, device_ids.as<int32_t>(), 4, static_cast<float*>(out), nullptr);
    });
    const auto width = static_cast<size_t>(inputs);
    ExpectNear(
        looked_up, [&](size_t i) { return matrix.weights[static_cast<size_t>(ids[i / width]) * width + i % width]; },
        [&](size_t) { return 1e-6 * most; }, what + " looked up");
  }
}

TEST_P(CudaWeights, TimesAFewVectors) {
  Random random(3);
  for (const auto& [inputs, outputs] : ShapesOf(GetParam())) {
    const Matrix matrix(GetParam(), inputs, outputs, 2);
    const std::vector<float> x = random.Gaussians(cuda::kFewTokens * inputs);
    const std::vector<float> bias = random.Gaussians(outputs), before = random.Gaussians(cuda::kFewTokens * outputs);
    std::vector<double> sums, magnitudes;
    for (int64_t t = 0; t < cuda::kFewTokens; ++t) {
      for (int64_t o = 0; o < outputs; ++o) {
        double sum = 0.0, magnitude = 0.0;
        for (int64_t i = 0; i < inputs; ++i) {
          const double product = static_cast<double>(matrix.weights[static_cast<size_t>(o * inputs + i)]) *
                                 x[static_cast<size_t>(t * inputs + i)];
          sum += product;
          magnitude += std::abs(product);
        }
        sums.push_back(sum);
        magnitudes.push_back(magnitude);
      }
    }
    const DeviceBuffer device_x = Send(x), device_bias = Send(bias);
    for (int64_t tokens = 1; tokens <= cuda::kFewTokens; ++tokens) {
      const bool add = tokens % 2 == 0, with_bias = tokens % 3 != 0;
      const DeviceBuffer y = Send(before);
      ExpectOk(cuda::MultiplyFew(matrix.device, device_x.as<float>(), tokens,
                                 with_bias ? device_bias.as<float>() : nullptr, add, y.as<float>(), nullptr));
      const auto count = static_cast<size_t>(tokens * outputs);
      ExpectNear(
          Fetch<float>(y),
          [&](size_t i) {
            if (i >= count) return static_cast<double>(before[i]);  // rows of further tokens stay as they are
            return sums[i] + (with_bias ? bias[i % static_cast<size_t>(outputs)] : 0.0f) + (add ? before[i] : 0.0f);
          },
          [&](size_t i) { return i < count ? 3e-6 * (magnitudes[i] + 1.0) : 0.0; },
          std::to_string(outputs) + " rows of " + std::to_string(inputs) + ", " + std::to_string(tokens) + " tokens");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, CudaWeights, ::testing::ValuesIn(kTypes),
                         [](const auto& param) { return std::string(ggml_type_name(param.param)); });

TEST_F(CudaOps, OtherMatricesAreRefused) {
  EXPECT_TRUE(cuda::IsDeviceType(GGML_TYPE_Q4_K));
  EXPECT_FALSE(cuda::IsDeviceType(GGML_TYPE_IQ1_S));
  EXPECT_NE(cuda::DeviceTypeNames().find("Q6_K"), std::string::npos);
  const Matrix matrix(GGML_TYPE_Q8_0, 64, 3, 1);
  const DeviceBuffer x = Send(std::vector<float>(64)), y = Send(std::vector<float>(64));
  const auto multiply = [&](const DeviceMatrix& m, int64_t tokens) {
    return cuda::MultiplyFew(m, x.as<float>(), tokens, nullptr, false, y.as<float>(), nullptr).code();
  };
  EXPECT_EQ(multiply({matrix.buffer.data(), GGML_TYPE_IQ1_S, 256, 1}, 1), StatusCode::kUnsupported);
  EXPECT_EQ(multiply({matrix.buffer.data(), GGML_TYPE_Q8_0, 48, 1}, 1), StatusCode::kInvalidArgument);
  EXPECT_EQ(multiply(matrix.device, 0), StatusCode::kInvalidArgument);
  EXPECT_EQ(multiply(matrix.device, 9), StatusCode::kInvalidArgument);
  EXPECT_EQ(cuda::Dequantize(matrix.device, 1, 3, Element::kF32, y.data(), nullptr).code(),
            StatusCode::kInvalidArgument);
}

TEST_F(CudaOps, DequantizingSaturates) {
  const std::vector<float> weights = {1e6f, -1e6f, 65504.0f, 1.0f, -65519.0f, 65520.0f, 0.0f, -3e38f, 70000.0f};
  const DeviceBuffer buffer = Send(weights);
  for (const int64_t width : {int64_t{8}, int64_t{9}}) {  // whole units, and not
    const std::vector<float> got = Output(width, Element::kF16, [&](void* out) {
      return cuda::Dequantize({buffer.data(), GGML_TYPE_F32, width, 1}, 0, 1, Element::kF16, out, nullptr);
    });
    ExpectNear(
        got, [&](size_t i) { return std::clamp(weights[i], -65504.0f, 65504.0f); }, [](size_t) { return 0.0; }, "f16");
  }
}

// ---- Rows ----

TEST_F(CudaOps, RmsNorm) {
  Random random(5);
  for (const int64_t width : {1, 7, 64, 896, 1536, 4099}) {
    for (const int64_t tokens : {1, 3}) {
      const std::vector<float> x = random.Gaussians(tokens * width, 30.0f), weight = random.Gaussians(width);
      const DeviceBuffer device_x = Send(x), device_weight = Send(weight);
      const auto n = static_cast<size_t>(width);
      const auto expected = [&](size_t i) {
        double sum = 0.0;
        for (size_t j = 0; j < n; ++j) sum += std::pow(static_cast<double>(x[i / n * n + j]), 2);
        return x[i] / std::sqrt(sum / static_cast<double>(width) + 1e-6) * weight[i % n];
      };
      for (const Element type : {Element::kF32, Element::kF16}) {
        ExpectNear(
            Output(tokens * width, type,
                   [&](void* out) {
                     return cuda::RmsNorm(device_x.as<float>(), device_weight.as<float>(), tokens, width, 1e-6f, type,
                                          out, nullptr);
                   }),
            expected,
            [&](size_t i) {
              const double want = expected(i);
              return 2e-6 * std::abs(want) + (type == Element::kF16 ? HalfTolerance(want) : 0.0);
            },
            "width " + std::to_string(width));
      }
    }
  }
}

TEST_F(CudaOps, SwiGluAndBias) {
  Random random(6);
  std::vector<float> gate = random.Gaussians(1001, 5.0f), up = random.Gaussians(1001, 5.0f);
  gate[0] = 100.0f, up[0] = 1e4f;    // beyond f16
  gate[1] = -200.0f, up[1] = 1e30f;  // exp overflows
  gate[2] = 300.0f, up[2] = -1e5f;
  const auto expected = [&](size_t i) { return gate[i] / (1.0 + std::exp(-static_cast<double>(gate[i]))) * up[i]; };
  const DeviceBuffer device_gate = Send(gate), device_up = Send(up);
  for (const Element type : {Element::kF32, Element::kF16}) {
    const auto wanted = [&](size_t i) {
      return type == Element::kF32 ? expected(i) : std::clamp(expected(i), -65504.0, 65504.0);
    };
    ExpectNear(
        Output(1001, type,
               [&](void* out) {
                 return cuda::SwiGlu(device_gate.as<float>(), device_up.as<float>(), 1001, type, out, nullptr);
               }),
        wanted,
        [&](size_t i) {
          return 3e-6 * std::abs(wanted(i)) + 1e-6 + (type == Element::kF16 ? HalfTolerance(wanted(i)) : 0.0);
        },
        "SwiGLU");
  }
  const DeviceBuffer y = Send(gate);
  ExpectOk(cuda::AddBias(y.as<float>(), device_up.as<float>(), 7, 143, nullptr));
  ExpectNear(
      Fetch<float>(y), [&](size_t i) { return gate[i] + up[i % 143]; }, [](size_t) { return 0.0; }, "bias");
}

struct RopeCase {
  int head_dim, rotary_dim;
  RopePairing pairing;
};

TEST_F(CudaOps, StoreHeadRows) {
  constexpr int64_t kTokens = 5, kRowsOfOut = 16;
  constexpr int kHeads = 3;
  for (const RopeCase& c : {RopeCase{64, 64, RopePairing::kHalfSplit}, RopeCase{128, 128, RopePairing::kInterleaved},
                            RopeCase{80, 32, RopePairing::kHalfSplit}, RopeCase{256, 256, RopePairing::kInterleaved}}) {
    RopeSpec spec;
    spec.pairing = c.pairing;
    spec.rotary_dim = c.rotary_dim;
    const auto table = RopeTable::Make(spec, c.head_dim, 300).value();
    const cuda::DeviceRopeTable device_table = cuda::DeviceRopeTable::Make(*table).value();
    Random random(7);
    std::vector<float> x = random.Gaussians(kTokens * kHeads * c.head_dim);
    const std::vector<float> bias = random.Gaussians(kHeads * c.head_dim);
    x[static_cast<size_t>(c.head_dim) - 1] = 1e6f;
    const std::vector<int32_t> counters = {100, 4};
    const DeviceBuffer device_x = Send(x), device_bias = Send(bias), device_counters = Send(counters);
    for (const bool rotate : {false, true}) {
      for (const bool counted : {false, true}) {
        for (const Element type : {Element::kF32, Element::kF16}) {
          const DeviceBuffer plain = Send(x);
          cuda::HeadRowsArgs args;
          args.x = counted ? plain.as<float>() : device_x.as<float>();
          args.plain = plain.as<float>();
          args.bias = device_bias.as<float>();
          args.tokens = kTokens;
          args.heads = kHeads;
          args.head_dim = c.head_dim;
          if (rotate) args.rope = &device_table.rope();
          args.position = counted ? device_counters.as<int32_t>() : nullptr;
          args.position_offset = 60;
          args.type = type;
          args.head_stride = kRowsOfOut * c.head_dim;
          args.token_stride = c.head_dim;
          args.out_row = counted ? device_counters.as<int32_t>() + 1 : nullptr;
          args.out_row_offset = 2;
          const std::vector<float> got = Output(kHeads * kRowsOfOut * c.head_dim, type, [&](void* out) {
            args.out = out;
            return cuda::StoreHeadRows(args, nullptr);
          });
          const std::string what = "head_dim " + std::to_string(c.head_dim) + (rotate ? " rotated" : "") +
                                   (counted ? " counted" : "") + (type == Element::kF16 ? " f16" : "");
          const auto biased = [&](int64_t i) {
            return x[static_cast<size_t>(i)] + bias[static_cast<size_t>(i % (kHeads * c.head_dim))];
          };
          ExpectNear(
              Fetch<float>(plain), [&](size_t i) { return biased(static_cast<int64_t>(i)); },
              [](size_t) { return 0.0; }, what + " plain");
          std::vector<float> expected(got.size(), std::numeric_limits<float>::quiet_NaN());
          for (int64_t t = 0; t < kTokens; ++t) {
            for (int64_t h = 0; h < kHeads; ++h) {
              const int64_t row = (counted ? 4 : 0) + 2 + t;
              float* to = expected.data() + (h * kRowsOfOut + row) * c.head_dim;
              for (int d = 0; d < c.head_dim; ++d) to[d] = biased((t * kHeads + h) * c.head_dim + d);
              if (rotate) table->Rotate((counted ? 100 : 0) + 60 + t, to);
            }
          }
          const auto n = static_cast<size_t>(c.head_dim);
          int wrong = 0;
          for (size_t i = 0; i < got.size() && wrong < 4; ++i) {
            double want = expected[i];
            if (type == Element::kF16) want = std::clamp(want, -65504.0, 65504.0);
            // A rotation mixes coordinates: its error is relative to the largest of the row.
            const float* row = expected.data() + i / n * n;
            const double most =
                std::abs(*std::max_element(row, row + n, [](float p, float q) { return std::abs(p) < std::abs(q); }));
            const double slack = (type == Element::kF16 ? HalfTolerance(want) : 0.0) + (rotate ? 1e-6 * most : 0.0);
            const bool same = std::isnan(want) ? std::isnan(got[i]) : std::abs(got[i] - want) <= slack;
            if (same) continue;
            ++wrong;
            ADD_FAILURE() << what << ": element " << i << " is " << got[i] << ", expected " << want;
          }
        }
      }
    }
  }
}

// As StoreHeadRows of each sequence alone; the tails differ in length and type.
TEST_F(CudaOps, StoreSequenceRows) {
  constexpr int kLayers = 2, kLayer = 1, kQHeads = 4, kKvHeads = 2;
  struct Tail {
    int64_t capacity;
    int row, position;
    Element type;
  };
  const std::vector<Tail> kinds = {
      {3, 0, 299, Element::kF32}, {9, 8, 8, Element::kF16}, {5, 2, 70, Element::kF32}, {1, 0, 0, Element::kF16}};
  const auto sequences = static_cast<int64_t>(kinds.size());
  for (const int head_dim : {80, 128, 256}) {
    for (const Element type : {Element::kF32, Element::kF16}) {
      RopeSpec spec;
      spec.rotary_dim = head_dim;
      const auto table = RopeTable::Make(spec, head_dim, 300).value();
      const cuda::DeviceRopeTable device_table = cuda::DeviceRopeTable::Make(*table).value();
      Random random(13);
      const auto floats = [&](int64_t rows) { return Send(random.Gaussians(static_cast<size_t>(rows * head_dim))); };
      const DeviceBuffer q = floats(sequences * kQHeads), k = floats(sequences * kKvHeads),
                         v = floats(sequences * kKvHeads), q_bias = floats(kQHeads), v_bias = floats(kKvHeads);
      const auto empty = [](int64_t elements, Element of) {
        return Send(std::vector<std::byte>(static_cast<size_t>(elements * cuda::SizeOf(of)), std::byte{0xff}));
      };
      const auto values = [](const DeviceBuffer& buffer, Element of) {
        if (of == Element::kF32) return Fetch<float>(buffer);
        std::vector<float> out;
        for (const uint16_t bits : Fetch<uint16_t>(buffer)) out.push_back(HalfToFloat(bits));
        return out;
      };
      const int64_t query_width = int64_t{kQHeads} * head_dim, kv_width = int64_t{kKvHeads} * head_dim;
      const DeviceBuffer rotated = empty(sequences * query_width, type),
                         rotated_alone = empty(sequences * query_width, type);
      std::vector<DeviceBuffer> tails, tails_alone;
      std::vector<cuda::SequencePlace> places;
      for (int64_t i = 0; i < sequences; ++i) {
        const Tail& tail = kinds[static_cast<size_t>(i)];
        const int64_t elements = 2 * kLayers * kv_width * tail.capacity;
        tails.push_back(empty(elements, tail.type));
        tails_alone.push_back(empty(elements, tail.type));
        places.push_back({tails.back().data(), tail.type, tail.capacity, tail.position, tail.row, tail.row + 1, 0});
        cuda::HeadRowsArgs one;
        one.tokens = 1;
        one.head_dim = head_dim;
        one.position_offset = tail.position;
        one.rope = &device_table.rope();
        one.x = q.as<float>() + i * query_width;
        one.bias = q_bias.as<float>();
        one.heads = kQHeads;
        one.out = rotated_alone.data() + i * query_width * cuda::SizeOf(type);
        one.type = type;
        one.head_stride = head_dim;
        ExpectOk(cuda::StoreHeadRows(one, nullptr));
        one.heads = kKvHeads;
        one.type = tail.type;
        one.head_stride = tail.capacity * head_dim;
        one.token_stride = head_dim;
        one.out_row_offset = tail.row;
        for (const Side side : {kKeys, kValues}) {
          one.x = (side == kKeys ? k : v).as<float>() + i * kv_width;
          one.bias = side == kKeys ? nullptr : v_bias.as<float>();
          one.rope = side == kKeys ? &device_table.rope() : nullptr;
          one.out =
              tails_alone.back().data() + (2 * kLayer + side) * kv_width * tail.capacity * cuda::SizeOf(tail.type);
          ExpectOk(cuda::StoreHeadRows(one, nullptr));
        }
      }
      const DeviceBuffer device_places = Send(places);
      cuda::SequenceRowsArgs args;
      args.places = device_places.as<cuda::SequencePlace>();
      args.sequences = sequences;
      args.layer = kLayer;
      args.q_heads = kQHeads;
      args.kv_heads = kKvHeads;
      args.head_dim = head_dim;
      args.q = q.as<float>();
      args.k = k.as<float>();
      args.v = v.as<float>();
      args.q_bias = q_bias.as<float>();
      args.v_bias = v_bias.as<float>();
      args.rope = &device_table.rope();
      args.rotated = rotated.data();
      args.type = type;
      ExpectOk(cuda::StoreSequenceRows(args, nullptr));
      const auto expect_same = [&](const DeviceBuffer& a, const DeviceBuffer& b, Element of, const std::string& what) {
        const std::vector<float> together = values(a, of), alone = values(b, of);
        ASSERT_EQ(together.size(), alone.size());
        for (size_t i = 0; i < alone.size(); ++i) {
          if (std::isnan(alone[i]) ? std::isnan(together[i]) : std::abs(together[i] - alone[i]) < 1e-2f) continue;
          ADD_FAILURE() << what << ", head_dim " << head_dim << ": element " << i << " is " << together[i] << " and "
                        << alone[i] << " alone";
          return;
        }
      };
      expect_same(rotated, rotated_alone, type, "queries");
      for (size_t i = 0; i < tails.size(); ++i) {
        expect_same(tails[i], tails_alone[i], kinds[i].type, "tail " + std::to_string(i));
      }
    }
  }
}

TEST_F(CudaOps, SequencesThatAreNotFiniteAreFlagged) {
  constexpr int64_t kWidth = 1030;
  std::vector<float> x(4 * kWidth, 1.0f);
  x[2 * kWidth - 1] = std::numeric_limits<float>::infinity();
  x[3 * kWidth] = std::numeric_limits<float>::quiet_NaN();
  const DeviceBuffer device_x = Send(x), places = Send(std::vector<cuda::SequencePlace>(4));
  ExpectOk(cuda::FlagNonFiniteRows(device_x.as<float>(), 4, kWidth, places.as<cuda::SequencePlace>(), nullptr));
  const auto flagged = Fetch<cuda::SequencePlace>(places);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(flagged[i].not_finite, i == 1 || i == 3 ? 1 : 0) << "sequence " << i;
}

TEST_F(CudaOps, NumbersThatAreNotFiniteAreFlagged) {
  std::vector<float> x(1001, 3e38f);
  DeviceBuffer flag = Send(std::vector<int32_t>{0});
  const auto look = [&] {
    const DeviceBuffer device_x = Send(x);
    ExpectOk(cuda::FlagNonFinite(device_x.as<float>(), 1001, flag.as<int32_t>(), nullptr));
    return Fetch<int32_t>(flag)[0];
  };
  EXPECT_EQ(look(), 0);
  x[1000] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(look(), 1);
  x[1000] = 0.0f;
  EXPECT_EQ(look(), 1);  // never cleared
  flag = Send(std::vector<int32_t>{0});
  x[0] = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(look(), 1);
}

}  // namespace
}  // namespace anchorkv
