// Small layers of random shapes, options and awkward values through the whole codec. Whatever the input, compression
// gives a segment within its bytes or says why not; the segment stored and read again is the same. For values that
// numbers of 16 bits can hold, the reference and every instruction set of this machine agree as the conformance tests
// demand: equal decisions give equal bytes, equal bytes equal floats, attention within a small error.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "anchorkv/rope.h"
#include "check.h"
#include "codec/codec.h"
#include "format/anchor_rounding.h"
#include "input.h"
#include "store/segment_file.h"
#include "support/random.h"

namespace {

using namespace anchorkv;
using anchorkv::fuzz::Input;

// What is done to the vectors of one tensor.
enum class Values { kGaussian, kZeroRows, kZero, kConstant, kFewRows, kTinyRows, kOneLarge, kHuge, kNotFinite, kCount };

struct Layer {
  int q_heads = 1, kv_heads = 1, head_dim = 8, window = 1;
  int64_t tokens = 1, first_position = 0;
  bool ordinary = true;  // finite, and what is made of it has 16 bits or a logit that floats can hold
  std::vector<float> keys, values, queries;
  std::shared_ptr<const RopeTable> rope;

  LayerInput input() const {
    LayerInput in;
    in.layer = 1;
    in.keys = HeadMajor(keys.data(), kv_heads, tokens, head_dim);
    in.values = HeadMajor(values.data(), kv_heads, tokens, head_dim);
    in.queries = HeadMajor(queries.data(), q_heads, window, head_dim);
    in.first_position = first_position;
    in.rope = rope.get();
    return in;
  }
};

std::vector<float> MakeRows(Input* in, test::Random* random, int64_t rows, int head_dim, bool* ordinary) {
  std::vector<float> x = random->Gaussians(rows * head_dim);
  const auto row = [&](int64_t r) { return x.data() + r * head_dim; };
  const auto each = [&](int64_t share, const auto& change) {
    for (int64_t r = 0; r < rows; ++r) {
      if (random->Below(share) == 0) change(row(r));
    }
  };
  const auto scale = [&](float factor) {
    return [=](float* v) {
      for (int d = 0; d < head_dim; ++d) v[d] *= factor;
    };
  };
  switch (static_cast<Values>(in->InRange(0, static_cast<int>(Values::kCount) - 1))) {
    case Values::kZeroRows:
      each(3, scale(0));
      break;
    case Values::kZero:
      std::fill(x.begin(), x.end(), 0.0f);
      break;
    case Values::kConstant:
      for (int64_t r = 1; r < rows; ++r) std::copy_n(row(0), head_dim, row(r));
      break;
    case Values::kFewRows:
      for (int64_t r = 3; r < rows; ++r) std::copy_n(row(random->Below(3)), head_dim, row(r));
      break;
    case Values::kTinyRows:
      each(2, scale(in->Bool() ? 1e-4f : 1e-39f));
      break;
    case Values::kOneLarge:
      each(1, [&](float* v) { v[0] += 40.0f; });
      break;
    case Values::kHuge:
      *ordinary = false;
      each(2, scale(in->Bool() ? 1e6f : 1e37f));
      break;
    case Values::kNotFinite: {
      *ordinary = false;
      const float bad[] = {NAN, INFINITY, -INFINITY};
      x[static_cast<size_t>(random->Below(static_cast<int64_t>(x.size())))] = in->Pick(bad);
      break;
    }
    default:
      break;
  }
  return x;
}

Layer MakeLayer(Input* in) {
  Layer layer;
  layer.kv_heads = in->InRange(1, 2);
  layer.q_heads = layer.kv_heads * in->InRange(1, 3);
  layer.head_dim = 8 * in->InRange(1, 9);
  layer.window = in->InRange(1, 9);
  layer.tokens = in->InRange(1, 150);
  layer.first_position = in->Bool() ? in->InRange(0, 2000) : 0;
  RopeSpec rope;
  rope.rotary_dim = in->Bool() ? layer.head_dim : in->InRange(0, layer.head_dim / 2) * 2;
  rope.pairing = in->Bool() ? RopePairing::kInterleaved : RopePairing::kHalfSplit;
  layer.rope = RopeTable::Make(rope, layer.head_dim, layer.first_position + layer.tokens + 64).value();
  test::Random random(in->Any<uint32_t>());
  layer.keys = MakeRows(in, &random, layer.kv_heads * layer.tokens, layer.head_dim, &layer.ordinary);
  layer.values = MakeRows(in, &random, layer.kv_heads * layer.tokens, layer.head_dim, &layer.ordinary);
  layer.queries = MakeRows(in, &random, int64_t{layer.q_heads} * layer.window, layer.head_dim, &layer.ordinary);
  return layer;
}

CodecOptions MakeOptions(Input* in, const Layer& layer) {
  const Profile profiles[] = {Profile::kPaper, Profile::kBlend, Profile::kAdaptive};
  CodecOptions options = CodecOptions::ForProfile(in->Pick(profiles));
  options.theta = in->Bool() ? in->Real(0.05, 2) : 2;
  options.window = in->InRange(1, layer.window + 1);
  options.anchors = in->Bool() ? in->InRange<int64_t>(options.window, layer.tokens + 1) : 0;
  options.rho = in->Real(0, 1);
  options.pool = in->InRange(0, 4) * 2 + 1;
  options.sinks = in->InRange(0, 4);
  if (in->Bool()) options.ranking = static_cast<Ranking>(in->InRange(0, 6));
  options.prior_phi = in->Real(0, 16);
  options.pool_heads = in->Bool();
  options.key_share = in->Real(0, 1);
  options.residual_bits = in->InRange(0, 4);
  options.wide_bits = in->InRange(1, 4);
  options.wide_share = in->Real(0, 1);
  options.surplus = static_cast<Surplus>(in->InRange(0, 2));
  options.scale = static_cast<ResidualScale>(in->InRange(0, 3));
  options.codebook = static_cast<Codebook>(in->InRange(0, 1));
  options.hadamard = in->Bool();
  options.pre_rope = in->Bool();
  options.value_basis = in->Bool();
  options.seed = in->InRange(0, 9);
  return options;
}

const std::vector<const Backend*>& Backends() {
  static const std::vector<const Backend*> all = [] {
    std::vector<const Backend*> backends = {&ReferenceBackend()};
    for (const std::string& target : CpuTargets()) backends.push_back(CpuBackend(target));
    return backends;
  }();
  return all;
}

// A segment as a file in memory.
std::shared_ptr<AlignedBuffer> Stored(const StoredSegmentFile& file) {
  const auto image = SegmentFileImage::Make(file);
  FUZZ_CHECK(image.ok());
  auto bytes = std::make_shared<AlignedBuffer>(AlignedBuffer::Make(image->total_bytes(), "a file").value());
  std::byte* to = bytes->data();
  for (const auto piece : image->pieces()) to = std::copy(piece.begin(), piece.end(), to);
  return bytes;
}

struct Rows {
  std::vector<float> o, m, l;
};

Rows AttendTo(const Segment& segment, const Layer& layer, int head, int64_t first, int64_t last) {
  const int gqa = layer.q_heads / layer.kv_heads, dim = layer.head_dim;
  Rows rows;
  rows.o.resize(static_cast<size_t>(gqa * dim));
  rows.m.resize(static_cast<size_t>(gqa));
  rows.l.resize(static_cast<size_t>(gqa));
  AlignedBuffer scratch = AlignedBuffer::Make(segment.scratch_bytes(gqa), "scratch").value();
  const float* queries = layer.queries.data() + static_cast<ptrdiff_t>(head) * gqa * layer.window * dim;
  segment.Attend(head, QueryRows{queries, dim, int64_t{layer.window} * dim, 1, gqa}, first, last,
                 StateRows{rows.o.data(), rows.m.data(), rows.l.data(), int64_t{gqa} * dim, dim, gqa, 1},
                 scratch.data());
  return rows;
}

void CheckAttention(const Segment& got, const Segment& reference, const Layer& layer) {
  const int gqa = layer.q_heads / layer.kv_heads, dim = layer.head_dim;
  for (int head = 0; head < layer.kv_heads; ++head) {
    for (const int64_t first : {int64_t{0}, reference.split_granularity()}) {
      if (first >= layer.tokens) continue;
      const Rows a = AttendTo(got, layer, head, first, layer.tokens);
      const Rows b = AttendTo(reference, layer, head, first, layer.tokens);
      for (int q = 0; q < gqa; ++q) {
        const auto row = static_cast<size_t>(q);
        FUZZ_CHECK(std::isfinite(a.m[row]) && a.l[row] > 0);
        const double lse = b.m[row] + std::log(double{b.l[row]});
        // A logit has the rounding of a float sum of its size.
        const double slack = 2e-4 + 4e-6 * std::fabs(lse);
        FUZZ_CHECK(std::fabs(a.m[row] + std::log(double{a.l[row]}) - lse) < slack);
        double error = 0, norm = 0;
        for (int d = 0; d < dim; ++d) {
          const size_t i = row * static_cast<size_t>(dim) + static_cast<size_t>(d);
          const double want = double{b.o[i]} / b.l[row];
          error += std::pow(double{a.o[i]} / a.l[row] - want, 2);
          norm += want * want;
        }
        // Values may cancel: against the largest value that there is.
        const double largest = std::fabs(*std::max_element(
            layer.values.begin(), layer.values.end(), [](float x, float y) { return std::fabs(x) < std::fabs(y); }));
        FUZZ_CHECK(std::sqrt(error) <= 3 * slack * (std::sqrt(norm) + 0.1 * largest));
      }
    }
  }
}

std::vector<float> Decoded(const Segment& segment, const Layer& layer) {
  const size_t side = static_cast<size_t>(layer.kv_heads * layer.tokens * layer.head_dim);
  std::vector<float> rows(2 * side);
  const auto view = [&](float* data) { return HeadMajor(data, layer.kv_heads, layer.tokens, layer.head_dim); };
  FUZZ_CHECK(segment.Dequantize(view(rows.data()), view(rows.data() + side)).ok());
  return rows;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// What every compression keeps, whatever the values: bytes, a file that reads back, attention that does not crash.
// Gives the segment as the reference and every other backend read it.
void CheckSegment(const Layer& layer, const CodecOptions& options, std::shared_ptr<const Segment> segment) {
  const LayerShape shape{layer.kv_heads, layer.head_dim, layer.tokens};
  FUZZ_CHECK(segment->tokens() == layer.tokens && segment->first_position() == layer.first_position);
  FUZZ_CHECK(static_cast<double>(segment->resident_bytes()) <=
             options.theta * static_cast<double>(shape.dense_bytes()) + 1e-9);
  StoredSegmentFile file;
  file.head_dim = layer.head_dim;
  file.max_position = layer.rope->max_position();
  file.rope.rotary_dim = 0;  // the segments are read with the layer's own table
  file.segments.push_back(ImageOf(segment).value());
  const Status image = CheckImage(file.segments[0], layer.kv_heads, layer.head_dim);
  FUZZ_CHECK(image.ok());
  const auto bytes = Stored(file);
  const auto read = ReadSegmentFile({bytes->data(), bytes->size_bytes()}, bytes);
  FUZZ_CHECK(read.ok());
  const SegmentImage& again = read->segments[0];
  FUZZ_CHECK(again.numbers == file.segments[0].numbers && again.first_position == layer.first_position);
  FUZZ_CHECK(
      std::equal(again.bytes.begin(), again.bytes.end(), file.segments[0].bytes.begin(), file.segments[0].bytes.end()));

  const auto reference = SegmentOf(again, ReferenceBackend(), *layer.rope).value();
  const std::vector<float> decoded = Decoded(*reference, layer);
  for (const Backend* backend : Backends()) {
    const auto other = SegmentOf(again, *backend, *layer.rope).value();
    const std::vector<float> rows = Decoded(*other, layer);
    if (layer.ordinary) {
      for (const float x : rows) FUZZ_CHECK(std::isfinite(x));
      FUZZ_CHECK(SameBits(rows, decoded));
      CheckAttention(*other, *reference, layer);
    } else {
      for (int head = 0; head < layer.kv_heads; ++head) AttendTo(*other, layer, head, 0, layer.tokens);
    }
  }
}

// The same decisions give the same bytes on every backend.
void CheckBytes(const Layer& layer, const CodecOptions& options) {
  const LayerInput input = layer.input();
  const auto plan = PlanLayer(input, options, ReferenceBackend());
  FUZZ_CHECK(plan.ok());
  std::vector<std::byte> expected;
  for (const Backend* backend : Backends()) {
    const auto segment = PackPlan(NarrowWindow(input, options.window), *plan, *backend);
    FUZZ_CHECK(segment.ok());
    const SegmentImage image = ImageOf(*segment).value();
    if (expected.empty()) expected.assign(image.bytes.begin(), image.bytes.end());
    FUZZ_CHECK(std::equal(expected.begin(), expected.end(), image.bytes.begin(), image.bytes.end()));
  }
}

bool Finite(const std::vector<float>& x) {
  return std::all_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const Layer layer = MakeLayer(&in);
  const CodecOptions options = MakeOptions(&in, layer);
  const LayerInput input = layer.input();
  const bool finite = Finite(layer.keys) && Finite(layer.values) && Finite(layer.queries);

  const auto reference = CompressLayer(input, options, ReferenceBackend());
  if (!finite) FUZZ_CHECK(!reference.ok());
  for (const Backend* backend : Backends()) {
    const auto segment = CompressLayer(input, options, *backend);
    FUZZ_CHECK(segment.ok() || !segment.status().message().empty());
    if (layer.ordinary) {
      FUZZ_CHECK(segment.status().code() == reference.status().code());
      FUZZ_CHECK(segment.status().code() != StatusCode::kInternal);
    }
    if (segment.ok()) CheckSegment(layer, options, *segment);
  }
  if (layer.ordinary && reference.ok() && options.profile != Profile::kAdaptive) CheckBytes(layer, options);
  return 0;
}
