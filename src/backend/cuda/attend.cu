// Attention: arguments are checked and passed on to the kernel of the right width; merging.
#include <algorithm>
#include <cmath>
#include <string>

#include "backend/cuda/attend.cuh"
#include "backend/cuda/decode_spectral.cuh"

namespace anchorkv::cuda {
namespace {

// Blocks that run on one multiprocessor at a time, by their registers: splitting aims at one wave of them.
constexpr int64_t kBlocksPerMultiprocessor = 2;
constexpr int64_t kMaxGridYZ = 65535;

Status CheckQueries(const DeviceQueries& q, const PartialStates& out) {
  if (q.tokens < 1 || q.kv_heads < 1 || q.gqa_ratio < 1 || q.kv_heads > kMaxGridYZ ||
      int64_t{q.tokens} * q.gqa_ratio > kMaxGridYZ * kFewRows) {
    return InvalidArgument("attention of " + std::to_string(q.tokens) + " query tokens, " + std::to_string(q.kv_heads) +
                           " kv heads and " + std::to_string(q.gqa_ratio) +
                           " query heads each; all must be at least 1 and within the size of a grid");
  }
  if (out.rows != q.rows() || out.parts < 1) {
    return InvalidArgument("states for " + std::to_string(out.rows) + " rows in " + std::to_string(out.parts) +
                           " parts; there are " + std::to_string(q.rows()) + " query rows and at least 1 part");
  }
  return {};
}

// What a query of a segment of either layout must keep to.
template <class DeviceSegmentT>
Status CheckSegment(const DeviceSegmentT& segment, const DeviceRope& rope, const DeviceQueries& queries, int64_t first,
                    int64_t last) {
  const auto& layout = segment.layout;
  if (first < 0 || first > last || last > layout.tokens || first % kTileTokens != 0) {
    return InvalidArgument("positions " + std::to_string(first) + " to " + std::to_string(last) +
                           "; they must start at a multiple of " + std::to_string(kTileTokens) + " and end by " +
                           std::to_string(layout.tokens));
  }
  if (queries.first_kv_head < 0 || queries.first_kv_head + queries.kv_heads > layout.kv_heads) {
    return InvalidArgument("kv heads " + std::to_string(queries.first_kv_head) + " to " +
                           std::to_string(queries.first_kv_head + queries.kv_heads) + "; the segment has " +
                           std::to_string(layout.kv_heads));
  }
  if (rope.head_dim != layout.head_dim || segment.first_position + layout.tokens > rope.max_position) {
    return InvalidArgument("the RoPE table does not cover positions up to " +
                           std::to_string(segment.first_position + layout.tokens));
  }
  return {};
}

AttendArgs MakeArgs(const DeviceQueries& queries, const PartialStates& out, int head_dim) {
  AttendArgs args;
  args.queries = queries;
  args.out = out;
  args.head_dim = head_dim;
  args.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  return args;
}

// One block per query row, one thread per coordinate. The parts' weights come first, one thread each, so that the sums
// wait for nothing.
constexpr int kMergeParts = 256;  // weights that are held at a time
__global__ void MergeKernel(PartialStates parts, PartialStates prior, int head_dim, int heads, DeviceOutput out) {
  __shared__ float weights[kMergeParts];
  __shared__ float warp_max[32];
  const int64_t row = blockIdx.x;
  const auto thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const bool has_prior = prior.l != nullptr && prior.l[row] > 0.0f;
  // -inf for a part without positions.
  const auto part_max = [&](int part) {
    const int64_t at = part * parts.rows + row;
    return parts.l[at] > 0.0f ? parts.m[at] : -INFINITY;
  };
  float m = has_prior ? prior.m[row] : -INFINITY;
  for (int part = thread; part < parts.parts; part += threads) m = fmaxf(m, part_max(part));
  m = WarpMax(m);
  if (LaneId() == 0) warp_max[WarpId()] = m;
  __syncthreads();
  for (int w = 0; w < threads / kWarpSize; ++w) m = fmaxf(m, warp_max[w]);

  float l = 0.0f;
  float o[kMaxDeviceHeadDim / 64] = {};  // of coordinates thread, thread + threads, ...
  const auto add = [&](const PartialStates& states, int64_t at, float weight) {
    l += weight * states.l[at];
#pragma unroll
    for (int j = 0; j < kMaxDeviceHeadDim / 64; ++j) {
      const int d = thread + j * threads;
      if (d < head_dim) o[j] += weight * states.o[at * head_dim + d];
    }
  };
  if (has_prior) add(prior, row, expf(prior.m[row] - m));
  for (int first = 0; first < parts.parts; first += kMergeParts) {
    const int count = min(kMergeParts, parts.parts - first);
    __syncthreads();  // the weights before have been used
    for (int i = thread; i < count; i += threads) {
      const float part_m = part_max(first + i);
      weights[i] = part_m == -INFINITY ? 0.0f : expf(part_m - m);
    }
    __syncthreads();
    // Sums of empty parts may be anything: their rows are not read.
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      if (weights[i] > 0.0f) add(parts, (first + i) * parts.rows + row, weights[i]);
    }
  }
#pragma unroll
  for (int j = 0; j < kMaxDeviceHeadDim / 64; ++j) {
    const int d = thread + j * threads;
    if (d >= head_dim) continue;
    StoreElement(out.data, out.type, row / heads * out.token_stride + row % heads * out.head_stride + d,
                 l > 0.0f ? o[j] / l : 0.0f);
  }
  if (thread == 0 && out.m != nullptr) {
    out.m[row] = m;
    out.l[row] = l;
  }
}

// Turns the sums of values of coded positions, in place, from code coordinates into the model's:
// o := l mean + sum_i o_i direction_i. One block per row and part, one thread per coordinate.
__global__ void ToModelCoordinatesKernel(const __grid_constant__ DeviceSpectralSegment segment, PartialStates states,
                                         int heads, int gqa_ratio, int first_kv_head) {
  __shared__ float code[kMaxDeviceHeadDim];
  const SpectralView view = {&segment.layout, segment.base, segment.first_position};
  const int head_dim = segment.layout.head_dim;
  const int64_t at = blockIdx.y * states.rows + blockIdx.x;
  const int head = first_kv_head + static_cast<int>(blockIdx.x) % heads / gqa_ratio;
  float* o = states.o + at * head_dim;
  for (int d = static_cast<int>(threadIdx.x); d < head_dim; d += static_cast<int>(blockDim.x)) code[d] = o[d];
  __syncthreads();
  const float l = states.l[at];
  const float* mean = view.mean(kValues, head);
  const uint8_t* order = view.order(kValues, head);
  for (int d = static_cast<int>(threadIdx.x); d < head_dim; d += static_cast<int>(blockDim.x)) {
    float sum = l * mean[d];
    if (!segment.layout.value_basis) {
      // Two code coordinates may stand for one of the model's.
      for (int i = 0; i < head_dim; ++i) sum += order[i] == d ? code[i] : 0.0f;
      o[d] = sum;
      continue;
    }
    const int8_t* directions = view.basis(head) + d;
#pragma unroll 8
    for (int i = 0; i < head_dim; ++i) sum = fmaf(code[i], static_cast<float>(directions[i * head_dim]), sum);
    o[d] = sum;
  }
}

// Of `parts` parts those for `exact` rows; the others are for the tiles of coded positions. A tile of exact rows takes
// as long as `weight` coded ones.
int ExactParts(const SpectralLayout& layout, int parts, int64_t exact, int64_t weight) {
  const int64_t work = weight * CeilDiv(exact, kTileTokens), all = layout.tiles() + work;
  const int64_t share = (parts * work + all / 2) / std::max<int64_t>(1, all);
  return static_cast<int>(std::clamp<int64_t>(share, 1, parts - 1));
}

}  // namespace

PartialStates Slice(const PartialStates& all, int head_dim, int first, int count) {
  const int64_t skip = first * all.rows;
  return {all.o + skip * head_dim, all.m + skip, all.l + skip, all.tickets, all.rows, count};
}

Result<PartialStatesBuffer> PartialStatesBuffer::Make(int64_t rows, int head_dim, int parts) {
  AKV_RETURN_IF_ERROR(CheckHeadDim(head_dim));
  PartialStatesBuffer out;
  const size_t states = static_cast<size_t>(rows * parts * (head_dim + 2)) * sizeof(float);
  const size_t tickets = static_cast<size_t>(rows) * sizeof(int32_t);
  AKV_ASSIGN_OR_RETURN(out.buffer_, DeviceBuffer::Make(states + tickets, "partial attention states"));
  AKV_RETURN_IF_ERROR(Clear(out.buffer_.as<std::byte>() + states, tickets, nullptr));
  AKV_RETURN_IF_ERROR(Synchronize(nullptr));  // streams that do not wait for the default one may use it from here on
  out.rows_ = rows;
  out.head_dim_ = head_dim;
  out.parts_ = parts;
  return Result<PartialStatesBuffer>(std::move(out));
}

PartialStates PartialStatesBuffer::states(int64_t rows) const noexcept {
  float* o = buffer_.as<float>();
  float* m = o + rows_ * parts_ * head_dim_;
  float* l = m + rows_ * parts_;
  return {o, m, l, reinterpret_cast<int32_t*>(l + rows_ * parts_), std::min(rows, rows_), parts_};
}

int SplitCount(const DeviceInfo& device, const DeviceQueries& queries, int64_t tokens) {
  const int64_t group_rows = int64_t{queries.tokens} * queries.gqa_ratio;
  const int64_t blocks = queries.kv_heads * CeilDiv(group_rows, group_rows <= kFewRows ? kFewRows : kManyRows);
  const int64_t wanted = CeilDiv(kBlocksPerMultiprocessor * device.multiprocessors, std::max<int64_t>(1, blocks));
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, CeilDiv(tokens, kTileTokens))));
}

Status AttendAnchor(const DeviceSegment& segment, const DeviceRope& rope, const DeviceQueries& queries, int64_t first,
                    int64_t last, const PartialStates& out, Stream stream) {
  const AnchorLayout& layout = segment.layout;
  AKV_RETURN_IF_ERROR(CheckHeadDim(layout.head_dim));
  AKV_RETURN_IF_ERROR(CheckQueries(queries, out));
  AKV_RETURN_IF_ERROR(CheckSegment(segment, rope, queries, first, last));
  AttendArgs args = MakeArgs(queries, out, layout.head_dim);
  args.first = first;
  args.last = last;
  args.visible = kNoMask;
  const AnchorSource source{segment, rope, MakeCodeTables(layout.head_dim, layout.code.uniform)};
  return ForWidth(layout.head_dim, [&](auto width) { return AttendWidth<width()>(args, source, stream); });
}

Status AttendSpectral(const DeviceSpectralSegment& segment, const DeviceRope& rope, const DeviceQueries& queries,
                      int64_t first, int64_t last, const PartialStates& out, Stream stream) {
  const SpectralLayout& layout = segment.layout;
  const int head_dim = layout.head_dim;
  AKV_RETURN_IF_ERROR(CheckHeadDim(head_dim));
  AKV_RETURN_IF_ERROR(CheckQueries(queries, out));
  AKV_RETURN_IF_ERROR(CheckSegment(segment, rope, queries, first, last));
  if (out.parts < kMinSpectralParts) {
    return InvalidArgument("states in " + std::to_string(out.parts) +
                           " parts; coded and exact positions need at least " + std::to_string(kMinSpectralParts));
  }
  const int exact_parts = ExactParts(layout, out.parts, layout.exact, 1);
  const PartialStates coded = Slice(out, head_dim, 0, out.parts - exact_parts);
  AttendArgs args = MakeArgs(queries, coded, head_dim);
  args.first = first;
  args.last = last;
  args.visible = kNoMask;
  const SpectralSource source = MakeSpectralSource(segment, rope);
  AKV_RETURN_IF_ERROR(ForWidth(head_dim, [&](auto width) { return AttendWidth<width()>(args, source, stream); }));

  const dim3 rows(static_cast<unsigned>(coded.rows), static_cast<unsigned>(coded.parts));
  const int threads = static_cast<int>(CeilDiv(head_dim, kWarpSize)) * kWarpSize;
  ToModelCoordinatesKernel<<<rows, threads, 0, stream>>>(segment, coded, queries.kv_heads * queries.gqa_ratio,
                                                         queries.gqa_ratio, queries.first_kv_head);
  AKV_RETURN_IF_ERROR(LaunchStatus("values of coded positions"));

  const auto exact_rows = [&](size_t section) {
    return DeviceHeads{segment.base + section,  Element::kF16, layout.kv_heads, layout.exact, head_dim,
                       layout.exact * head_dim, head_dim};
  };
  args.out = Slice(out, head_dim, coded.parts, exact_parts);
  args.positions = reinterpret_cast<const uint32_t*>(segment.base + layout.exact_positions);
  args.positions_per_head = layout.exact;
  const DenseSource exact{exact_rows(layout.exact_keys), exact_rows(layout.exact_values), DeviceRope(), 0};
  return ForWidth(head_dim, [&](auto width) { return AttendWidth<width()>(args, exact, stream); });
}

bool DecodesSpectral(const DeviceQueries& queries, int head_dim) {
  return int64_t{queries.tokens} * queries.gqa_ratio <= kDecodeMaxRows && decode::DecodeChunks(head_dim) > 0;
}

bool AttendsWithTail(const DeviceDense& tail) {
  return tail.first == 0 && tail.last <= kMaxStepTail && tail.head_rows == nullptr && tail.rope == nullptr;
}

namespace {

Status LaunchDecode(const DeviceSpectralSegment& segment, const DeviceRope& rope, const DeviceQueries& queries,
                    const DeviceDense& tail, const PartialStates& states, const DeviceOutput& output, Stream stream) {
  const SpectralLayout& layout = segment.layout;
  AKV_RETURN_IF_ERROR(CheckHeadDim(layout.head_dim));
  AKV_RETURN_IF_ERROR(CheckQueries(queries, states));
  AKV_RETURN_IF_ERROR(CheckSegment(segment, rope, queries, 0, layout.tokens));
  if (!DecodesSpectral(queries, layout.head_dim) || states.parts < kMinSpectralParts || states.tickets == nullptr) {
    return InvalidArgument("fused attention of " + std::to_string(queries.tokens * queries.gqa_ratio) +
                           " query rows per kv head and head dimension " + std::to_string(layout.head_dim) + " in " +
                           std::to_string(states.parts) + " parts; at most " + std::to_string(kDecodeMaxRows) +
                           " rows, 128 and at least " + std::to_string(kMinSpectralParts) + " parts with tickets");
  }
  DecodeSpectralArgs args;
  args.segment = segment;
  args.rope = rope;
  args.queries = queries;
  args.tail = tail;
  args.out = states;
  args.output = output;
  constexpr int64_t kExactWeight = 3;  // measured
  args.coded_parts = states.parts - ExactParts(layout, states.parts, layout.exact + tail.last, kExactWeight);
  args.scale = kLog2E / std::sqrt(static_cast<float>(layout.head_dim));
  const bool four = queries.tokens * queries.gqa_ratio <= 4;
  if (decode::DecodeChunks(layout.head_dim) == 2) {
    return four ? LaunchDecodeSpectral<2, 4>(args, stream) : LaunchDecodeSpectral<2, 8>(args, stream);
  }
  return four ? LaunchDecodeSpectral<4, 4>(args, stream) : LaunchDecodeSpectral<4, 8>(args, stream);
}

}  // namespace

Status DecodeSpectral(const DeviceSpectralSegment& segment, const DeviceRope& rope, const DeviceQueries& queries,
                      const PartialStates& out, Stream stream) {
  return LaunchDecode(segment, rope, queries, {}, out, {}, stream);
}

Status DecodeSpectralStep(const DeviceSpectralSegment& segment, const DeviceRope& rope, const DeviceQueries& queries,
                          const DeviceDense& tail, const PartialStates& states, const DeviceOutput& out,
                          Stream stream) {
  if (!AttendsWithTail(tail) || out.data == nullptr) {
    return InvalidArgument("a tail of rows " + std::to_string(tail.first) + " to " + std::to_string(tail.last) +
                           " in one kernel with a segment; rows after RoPE from 0 to at most " +
                           std::to_string(kMaxStepTail) + " are allowed");
  }
  if (tail.last > 0 &&
      (tail.keys.head_dim != segment.layout.head_dim || tail.values.head_dim != tail.keys.head_dim ||
       queries.first_kv_head + queries.kv_heads > tail.keys.heads || tail.values.heads != tail.keys.heads)) {
    return InvalidArgument("dense keys, values and queries differ in shape");
  }
  return LaunchDecode(segment, rope, queries, tail, states, out, stream);
}

Status AttendDense(const DeviceDense& rows, const DeviceQueries& queries, const PartialStates& out, Stream stream) {
  const int head_dim = rows.keys.head_dim;
  AKV_RETURN_IF_ERROR(CheckHeadDim(head_dim));
  AKV_RETURN_IF_ERROR(CheckQueries(queries, out));
  if (rows.values.head_dim != head_dim || queries.first_kv_head < 0 ||
      queries.first_kv_head + queries.kv_heads > rows.keys.heads || rows.values.heads != rows.keys.heads) {
    return InvalidArgument("dense keys, values and queries differ in shape");
  }
  if (rows.first < 0 || rows.first > rows.last) {
    return InvalidArgument("dense rows " + std::to_string(rows.first) + " to " + std::to_string(rows.last) +
                           "; they must be in order");
  }
  AttendArgs args = MakeArgs(queries, out, head_dim);
  args.first = rows.first;
  args.last = rows.last;
  args.visible = rows.visible;
  args.length = rows.length;
  args.head_rows = rows.head_rows;
  const DenseSource source{rows.keys, rows.values, rows.rope != nullptr ? *rows.rope : DeviceRope(),
                           rows.first_position};
  return ForWidth(head_dim, [&](auto width) { return AttendWidth<width()>(args, source, stream); });
}

Status MergeStates(const PartialStates& parts, const PartialStates& prior, int head_dim, int heads,
                   const DeviceOutput& out, Stream stream) {
  AKV_RETURN_IF_ERROR(CheckHeadDim(head_dim));
  if (parts.rows < 1 || heads < 1 || parts.rows % heads != 0) {
    return InvalidArgument(std::to_string(parts.rows) + " rows of states; must be a multiple of the " +
                           std::to_string(heads) + " heads");
  }
  const int threads = head_dim <= 64 ? 64 : 128;
  MergeKernel<<<static_cast<unsigned>(parts.rows), threads, 0, stream>>>(parts, prior, head_dim, heads, out);
  return LaunchStatus("merging attention states");
}

}  // namespace anchorkv::cuda
