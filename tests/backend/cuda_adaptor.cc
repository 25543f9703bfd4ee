#include "backend/cuda_adaptor.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "backend/cuda/attention.h"
#include "backend/cuda/compress.h"
#include "backend/cuda_support.h"
#include "base/half.h"

namespace anchorkv::test {
namespace {

constexpr cuda::Stream kStream = nullptr;
std::atomic<int64_t> g_calls{0};

template <typename T>
Status Fetch(const T* device, int64_t count, T* host) {
  AKV_RETURN_IF_ERROR(cuda::Download(host, device, static_cast<size_t>(count) * sizeof(T), kStream));
  return cuda::Synchronize(kStream);
}

template <typename T>
Status Send(T* device, const T* host, int64_t count) {
  AKV_RETURN_IF_ERROR(cuda::Upload(device, host, static_cast<size_t>(count) * sizeof(T), kStream));
  return cuda::Synchronize(kStream);
}

// Rows (token, query head) against StateRows' strides.
template <typename Visit>
void ForEachRow(int tokens, int heads, const StateRows& rows, Visit visit) {
  for (int token = 0; token < tokens; ++token) {
    for (int head = 0; head < heads; ++head) {
      const int64_t s = token * rows.s_token_stride + head * rows.s_head_stride;
      visit(int64_t{token} * heads + head, rows.o + token * rows.o_token_stride + head * rows.o_head_stride, rows.m + s,
            rows.l + s);
    }
  }
}

class Cuda final : public Backend {
 public:
  explicit Cuda(std::string device) : device_(std::move(device)) {}

  std::string name() const override { return "cuda/" + device_; }

  Status Score(const LayerInput& input, AttentionStats* stats, HeadScores* scores) const override {
    return Counted([&]() -> Status {
      AKV_ASSIGN_OR_RETURN(const LayerOnDevice layer, LayerOnDevice::Make(input));
      AKV_ASSIGN_OR_RETURN(const cuda::LayerCompressor compressor, Compressor(input, 1));
      AKV_RETURN_IF_ERROR(compressor.Score(layer.input(), kStream));
      const cuda::LayerArrays& arrays = compressor.arrays();
      const int64_t q_heads = input.queries.heads, window = input.queries.tokens, head_dim = input.keys.head_dim;
      scores->tokens = input.keys.tokens;
      scores->data.resize(static_cast<size_t>(input.keys.heads * input.keys.tokens));
      std::vector<float> m(static_cast<size_t>(q_heads * window)), l(m), y(m.size() * static_cast<size_t>(head_dim));
      AKV_RETURN_IF_ERROR(Fetch(arrays.scores, static_cast<int64_t>(scores->data.size()), scores->data.data()));
      AKV_RETURN_IF_ERROR(Fetch(arrays.m, q_heads * window, m.data()));
      AKV_RETURN_IF_ERROR(Fetch(arrays.l, q_heads * window, l.data()));
      AKV_RETURN_IF_ERROR(Fetch(arrays.y, q_heads * window * head_dim, y.data()));
      // [window, q_heads] on the device, [q_heads, window] on the host.
      stats->m.resize(m.size());
      stats->l.resize(m.size());
      stats->y.resize(y.size());
      for (int64_t h = 0; h < q_heads; ++h) {
        for (int64_t w = 0; w < window; ++w) {
          stats->m[h * window + w] = m[w * q_heads + h];
          stats->l[h * window + w] = l[w * q_heads + h];
          std::copy_n(y.begin() + (w * q_heads + h) * head_dim, head_dim,
                      stats->y.begin() + (h * window + w) * head_dim);
        }
      }
      return {};
    });
  }

  Status Assign(HeadsView<const float> vectors, const RoundedAnchors& anchors,
                std::span<const uint32_t> anchor_positions, std::vector<uint16_t>* assignment) const override {
    return Counted([&]() -> Status {
      // The vectors stand for both sides, and for a window of one query.
      auto rope = RopeTable::Make(RopeSpec(), static_cast<int>(vectors.head_dim), vectors.tokens);
      AKV_RETURN_IF_ERROR(rope.status());
      LayerInput input;
      input.keys = input.values = vectors;
      input.queries = vectors;
      input.queries.tokens = 1;
      input.rope = rope.value().get();
      AKV_ASSIGN_OR_RETURN(const LayerOnDevice layer, LayerOnDevice::Make(input));
      AKV_ASSIGN_OR_RETURN(const cuda::LayerCompressor compressor, Compressor(input, anchors.anchors));
      AKV_RETURN_IF_ERROR(SendAnchors(compressor, input, anchor_positions, anchors.anchors));
      AKV_RETURN_IF_ERROR(compressor.RoundAnchors(layer.input(), true, anchors.anchors, kStream));
      AKV_RETURN_IF_ERROR(CheckAnchors(compressor, vectors.heads, anchors, kKeys));
      AKV_RETURN_IF_ERROR(compressor.Assign(layer.input(), kKeys, true, anchors.anchors, kStream));
      assignment->resize(static_cast<size_t>(vectors.heads * vectors.tokens));
      return Fetch(compressor.arrays().assignment[kKeys], vectors.heads * vectors.tokens, assignment->data());
    });
  }

  Status Utility(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                 std::span<const uint32_t> anchor_positions, const RoundedAnchors anchors[2],
                 const std::vector<uint16_t> assignment[2], HeadScores utility[2]) const override {
    return Counted([&]() -> Status {
      const int64_t count = anchors[kKeys].anchors;
      const int64_t vectors = input.keys.heads * input.keys.tokens;
      AKV_ASSIGN_OR_RETURN(const LayerOnDevice layer, LayerOnDevice::Make(input));
      AKV_ASSIGN_OR_RETURN(const cuda::LayerCompressor compressor, Compressor(input, count));
      AKV_RETURN_IF_ERROR(SendStats(compressor, input, stats));
      AKV_RETURN_IF_ERROR(SendAnchors(compressor, input, anchor_positions, count));
      AKV_RETURN_IF_ERROR(compressor.RoundAnchors(layer.input(), options.pre_rope, count, kStream));
      for (const Side side : {kKeys, kValues}) {
        AKV_RETURN_IF_ERROR(CheckAnchors(compressor, input.keys.heads, anchors[side], side));
        AKV_RETURN_IF_ERROR(Send(compressor.arrays().assignment[side], assignment[side].data(), vectors));
      }
      AKV_RETURN_IF_ERROR(compressor.Utility(layer.input(), options, count, kStream));
      for (const Side side : {kKeys, kValues}) {
        utility[side].tokens = input.keys.tokens;
        utility[side].data.resize(static_cast<size_t>(vectors));
        AKV_RETURN_IF_ERROR(Fetch(compressor.arrays().utility[side], vectors, utility[side].data.data()));
      }
      return {};
    });
  }

  // The adaptive profile is compressed on the host.
  Status Importance(const LayerInput& input, const CodecOptions& options, const AttentionStats& stats,
                    HeadScores importance[2]) const override {
    return ReferenceBackend().Importance(input, options, stats, importance);
  }

  Status Pack(const LayerInput& input, const SegmentPlan& plan, std::byte* out) const override {
    return Counted([&]() -> Status {
      const int64_t vectors = input.keys.heads * input.keys.tokens;
      AKV_ASSIGN_OR_RETURN(const LayerOnDevice layer, LayerOnDevice::Make(input));
      AKV_ASSIGN_OR_RETURN(const cuda::LayerCompressor compressor, Compressor(input, plan.layout.anchors));
      AKV_RETURN_IF_ERROR(SendAnchors(compressor, input, plan.anchors, plan.layout.anchors));
      for (const Side side : {kKeys, kValues}) {
        AKV_RETURN_IF_ERROR(Send(compressor.arrays().assignment[side], plan.assignment[side].data(), vectors));
        AKV_RETURN_IF_ERROR(Send(compressor.arrays().pool_of[side], plan.pool_of[side].data(), vectors));
      }
      AKV_RETURN_IF_ERROR(
          compressor.RoundAnchors(layer.input(), plan.layout.code.pre_rope, plan.layout.anchors, kStream));
      AKV_ASSIGN_OR_RETURN(const cuda::DeviceBuffer bytes, cuda::DeviceBuffer::Make(plan.layout.total_bytes, "bytes"));
      AKV_RETURN_IF_ERROR(compressor.Pack(layer.input(), plan.layout, plan.scale, bytes.data(), kStream));
      return Fetch(bytes.data(), static_cast<int64_t>(plan.layout.total_bytes), out);
    });
  }

  Status Dequantize(const AnchorView& segment, const RopeTable& rope, HeadsView<float> keys,
                    HeadsView<float> values) const override {
    return Counted([&]() -> Status {
      const AnchorLayout& layout = *segment.layout;
      AKV_ASSIGN_OR_RETURN(const SegmentOnDevice on_device, SegmentOnDevice::Make(segment, rope));
      const int64_t row = layout.head_dim, side = layout.kv_heads * layout.tokens * row;
      AKV_ASSIGN_OR_RETURN(const cuda::DeviceBuffer buffer,
                           cuda::DeviceBuffer::Make(static_cast<size_t>(2 * side) * sizeof(float), "floats"));
      const cuda::DeviceFloats key_rows{buffer.as<float>(), layout.tokens * row, row};
      const cuda::DeviceFloats value_rows{buffer.as<float>() + side, layout.tokens * row, row};
      AKV_RETURN_IF_ERROR(cuda::Dequantize(on_device.segment(), on_device.rope(), key_rows, value_rows, kStream));
      std::vector<float> host(static_cast<size_t>(2 * side));
      AKV_RETURN_IF_ERROR(Fetch(buffer.as<float>(), 2 * side, host.data()));
      const float* from = host.data();
      for (const HeadsView<float>& view : {keys, values}) {
        for (int64_t h = 0; h < view.heads; ++h) {
          for (int64_t t = 0; t < view.tokens; ++t, from += row) std::copy_n(from, row, view.row(h, t));
        }
      }
      return {};
    });
  }

  size_t AttendScratchBytes(int, int, int64_t) const override { return 0; }

  void AttendAnchor(const AnchorView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries,
                    int64_t first, int64_t last, const StateRows& out, void*) const noexcept override {
    const Status status = Counted([&]() -> Status {
      AKV_ASSIGN_OR_RETURN(const SegmentOnDevice on_device, SegmentOnDevice::Make(segment, rope));
      AKV_ASSIGN_OR_RETURN(QueriesOnDevice on_queries, QueriesOnDevice::Make(queries, segment.layout->head_dim));
      on_queries.queries.first_kv_head = kv_head;
      return Attend(segment.layout->head_dim, queries, out, [&](const cuda::PartialStates& states) {
        return cuda::AttendAnchor(on_device.segment(), on_device.rope(), on_queries.queries, first, last, states,
                                  kStream);
      });
    });
    if (!status.ok()) Poison(queries, segment.layout->head_dim, out);
  }

  size_t AttendSpectralScratchBytes(int, int) const override { return 0; }

  void AttendSpectral(const SpectralView& segment, const RopeTable& rope, int kv_head, const QueryRows& queries,
                      int64_t first, int64_t last, const StateRows& out, void*) const noexcept override {
    const int head_dim = segment.layout->head_dim;
    const Status status = Counted([&]() -> Status {
      AKV_ASSIGN_OR_RETURN(const SpectralOnDevice on_device, SpectralOnDevice::Make(segment, rope));
      AKV_ASSIGN_OR_RETURN(QueriesOnDevice on_queries, QueriesOnDevice::Make(queries, head_dim));
      on_queries.queries.first_kv_head = kv_head;
      return AttendMerged(head_dim, queries, out, [&](const cuda::PartialStates& states) {
        return cuda::AttendSpectral(on_device.segment(), on_device.rope(), on_queries.queries, first, last, states,
                                    kStream);
      });
    });
    if (!status.ok()) Poison(queries, head_dim, out);
  }

  void AttendDense(const DenseRows& rows, int head_dim, const QueryRows& queries, int64_t first, int64_t last,
                   int64_t visible, const StateRows& out, void*) const noexcept override {
    const Status status = Counted([&]() -> Status {
      AKV_ASSIGN_OR_RETURN(const QueriesOnDevice on_queries, QueriesOnDevice::Make(queries, head_dim));
      const cuda::Element type = rows.type == DenseType::kF16 ? cuda::Element::kF16 : cuda::Element::kF32;
      const int64_t elements = last > 0 ? (last - 1) * rows.token_stride + head_dim : 0;
      const size_t bytes = static_cast<size_t>(elements * cuda::SizeOf(type));
      AKV_ASSIGN_OR_RETURN(const cuda::DeviceBuffer keys, ToDevice(rows.keys, bytes));
      AKV_ASSIGN_OR_RETURN(const cuda::DeviceBuffer values, ToDevice(rows.values, bytes));
      cuda::DeviceDense dense;
      dense.keys = {keys.data(), type, 1, last, head_dim, 0, rows.token_stride};
      dense.values = {values.data(), type, 1, last, head_dim, 0, rows.token_stride};
      dense.first = first;
      dense.last = last;
      dense.visible = visible;
      return Attend(head_dim, queries, out, [&](const cuda::PartialStates& states) {
        return cuda::AttendDense(dense, on_queries.queries, states, kStream);
      });
    });
    if (!status.ok()) Poison(queries, head_dim, out);
  }

  void MergeStates(std::span<const StateRows> parts, int head_dim, int tokens, int heads, float* result,
                   int64_t token_stride, int64_t head_stride) const noexcept override {
    const int64_t rows = int64_t{tokens} * heads;
    std::vector<float> merged(static_cast<size_t>(rows * head_dim), std::numeric_limits<float>::quiet_NaN());
    const Status status = Counted([&]() -> Status {
      AKV_ASSIGN_OR_RETURN(const cuda::PartialStatesBuffer buffer,
                           cuda::PartialStatesBuffer::Make(rows, head_dim, static_cast<int>(parts.size())));
      const cuda::PartialStates states = buffer.states(rows);
      std::vector<float> o, m, l;
      for (const StateRows& part : parts) {
        ForEachRow(tokens, heads, part, [&](int64_t, const float* o_row, const float* m_row, const float* l_row) {
          o.insert(o.end(), o_row, o_row + head_dim);
          m.push_back(*m_row);
          l.push_back(*l_row);
        });
      }
      AKV_RETURN_IF_ERROR(Send(states.o, o.data(), static_cast<int64_t>(o.size())));
      AKV_RETURN_IF_ERROR(Send(states.m, m.data(), static_cast<int64_t>(m.size())));
      AKV_RETURN_IF_ERROR(Send(states.l, l.data(), static_cast<int64_t>(l.size())));
      AKV_ASSIGN_OR_RETURN(const cuda::DeviceBuffer output,
                           cuda::DeviceBuffer::Make(merged.size() * sizeof(float), "output"));
      cuda::DeviceOutput out;
      out.data = output.data();
      out.token_stride = int64_t{heads} * head_dim;
      out.head_stride = head_dim;
      AKV_RETURN_IF_ERROR(cuda::MergeStates(states, {}, head_dim, heads, out, kStream));
      return Fetch(output.as<float>(), rows * head_dim, merged.data());
    });
    if (!status.ok()) std::fill(merged.begin(), merged.end(), std::numeric_limits<float>::quiet_NaN());
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(merged.begin() + row * head_dim, head_dim,
                  result + row / heads * token_stride + row % heads * head_stride);
    }
  }

 private:
  template <typename Body>
  static Status Counted(const Body& body) {
    const Status status = body();
    if (status.ok()) ++g_calls;
    EXPECT_NE(status.code(), StatusCode::kInternal) << status.message();
    return status;
  }

  static Result<cuda::LayerCompressor> Compressor(const LayerInput& input, int64_t anchors) {
    cuda::CompressorShape shape;
    shape.kv_heads = static_cast<int>(input.keys.heads);
    shape.gqa_ratio = input.gqa_ratio();
    shape.head_dim = static_cast<int>(input.keys.head_dim);
    shape.tokens = input.keys.tokens;
    shape.window = static_cast<int>(input.queries.tokens);
    shape.anchors = anchors;
    return cuda::LayerCompressor::Make(shape);
  }

  static Status SendAnchors(const cuda::LayerCompressor& compressor, const LayerInput& input,
                            std::span<const uint32_t> positions, int64_t anchors) {
    if (positions.size() != static_cast<size_t>(input.keys.heads * anchors)) {
      return InvalidArgument("anchors do not fit the vectors in shape");
    }
    return Send(compressor.arrays().anchors, positions.data(), static_cast<int64_t>(positions.size()));
  }

  // The GPU rounds anchors itself: exactly to what the host has.
  static Status CheckAnchors(const cuda::LayerCompressor& compressor, int64_t heads, const RoundedAnchors& expected,
                             Side side) {
    std::vector<uint16_t> rows(expected.data.size());
    std::vector<float> scales(static_cast<size_t>(heads));
    AKV_RETURN_IF_ERROR(Fetch(compressor.arrays().anchor_rows[side], static_cast<int64_t>(rows.size()), rows.data()));
    AKV_RETURN_IF_ERROR(Fetch(compressor.arrays().anchor_scales[side], heads, scales.data()));
    const int64_t head_elements = expected.anchors * expected.head_dim;
    for (int64_t i = 0; i < heads * head_elements; ++i) {
      const float scale = scales[i / head_elements];
      if (scale != expected.scales[i / head_elements] || HalfToFloat(rows[i]) / scale != expected.data[i]) {
        return Internal("anchor element " + std::to_string(i) + " is not rounded as on the host");
      }
    }
    return {};
  }

  static Status SendStats(const cuda::LayerCompressor& compressor, const LayerInput& input,
                          const AttentionStats& stats) {
    const int64_t q_heads = input.queries.heads, window = input.queries.tokens, head_dim = input.keys.head_dim;
    std::vector<float> m(stats.m.size()), l(m.size()), y(stats.y.size());
    for (int64_t h = 0; h < q_heads; ++h) {
      for (int64_t w = 0; w < window; ++w) {
        m[w * q_heads + h] = stats.m[h * window + w];
        l[w * q_heads + h] = stats.l[h * window + w];
        std::copy_n(stats.y.begin() + (h * window + w) * head_dim, head_dim, y.begin() + (w * q_heads + h) * head_dim);
      }
    }
    AKV_RETURN_IF_ERROR(Send(compressor.arrays().m, m.data(), static_cast<int64_t>(m.size())));
    AKV_RETURN_IF_ERROR(Send(compressor.arrays().l, l.data(), static_cast<int64_t>(l.size())));
    return Send(compressor.arrays().y, y.data(), static_cast<int64_t>(y.size()));
  }

  // One part: its state as it is.
  template <typename Run>
  static Status Attend(int head_dim, const QueryRows& queries, const StateRows& out, const Run& run) {
    const int64_t rows = int64_t{queries.tokens} * queries.heads;
    AKV_ASSIGN_OR_RETURN(const cuda::PartialStatesBuffer buffer, cuda::PartialStatesBuffer::Make(rows, head_dim, 1));
    const cuda::PartialStates states = buffer.states(rows);
    AKV_RETURN_IF_ERROR(run(states));
    std::vector<float> o(static_cast<size_t>(rows * head_dim)), m(static_cast<size_t>(rows)), l(m);
    AKV_RETURN_IF_ERROR(Fetch(states.o, rows * head_dim, o.data()));
    AKV_RETURN_IF_ERROR(Fetch(states.m, rows, m.data()));
    AKV_RETURN_IF_ERROR(Fetch(states.l, rows, l.data()));
    ForEachRow(queries.tokens, queries.heads, out, [&](int64_t row, float* o_row, float* m_row, float* l_row) {
      std::copy_n(o.begin() + row * head_dim, head_dim, o_row);
      *m_row = m[row];
      *l_row = l[row];
    });
    return {};
  }

  // As few parts as a segment of the adaptive profile takes, merged on the GPU.
  template <typename Run>
  static Status AttendMerged(int head_dim, const QueryRows& queries, const StateRows& out, const Run& run) {
    const int64_t rows = int64_t{queries.tokens} * queries.heads;
    AKV_ASSIGN_OR_RETURN(const cuda::PartialStatesBuffer buffer,
                         cuda::PartialStatesBuffer::Make(rows, head_dim, cuda::kMinSpectralParts));
    AKV_ASSIGN_OR_RETURN(const cuda::PartialStatesBuffer whole, cuda::PartialStatesBuffer::Make(rows, head_dim, 1));
    const cuda::PartialStates merged = whole.states(rows);
    AKV_RETURN_IF_ERROR(run(buffer.states(rows)));
    cuda::DeviceOutput output;
    output.data = merged.o;
    output.token_stride = int64_t{queries.heads} * head_dim;
    output.head_stride = head_dim;
    output.m = merged.m;
    output.l = merged.l;
    AKV_RETURN_IF_ERROR(cuda::MergeStates(buffer.states(rows), {}, head_dim, queries.heads, output, kStream));
    std::vector<float> mean(static_cast<size_t>(rows * head_dim)), m(static_cast<size_t>(rows)), l(m);
    AKV_RETURN_IF_ERROR(Fetch(merged.o, rows * head_dim, mean.data()));
    AKV_RETURN_IF_ERROR(Fetch(merged.m, rows, m.data()));
    AKV_RETURN_IF_ERROR(Fetch(merged.l, rows, l.data()));
    ForEachRow(queries.tokens, queries.heads, out, [&](int64_t row, float* o_row, float* m_row, float* l_row) {
      for (int d = 0; d < head_dim; ++d) o_row[d] = mean[row * head_dim + d] * l[row];
      *m_row = m[row];
      *l_row = l[row];
    });
    return {};
  }

  // What a failed call leaves, so that no comparison passes.
  static void Poison(const QueryRows& queries, int head_dim, const StateRows& out) noexcept {
    ForEachRow(queries.tokens, queries.heads, out, [&](int64_t, float* o_row, float* m_row, float* l_row) {
      std::fill_n(o_row, head_dim, std::numeric_limits<float>::quiet_NaN());
      *m_row = *l_row = std::numeric_limits<float>::quiet_NaN();
    });
  }

  std::string device_;
};

}  // namespace

const Backend* CudaBackend() {
  static const std::unique_ptr<const Backend> backend = []() -> std::unique_ptr<const Backend> {
    const Result<cuda::DeviceInfo> device = cuda::CurrentDevice();
    if (!device.ok()) return nullptr;
    return std::make_unique<Cuda>(device->name);
  }();
  return backend.get();
}

int64_t CudaCalls() { return g_calls; }

}  // namespace anchorkv::test
