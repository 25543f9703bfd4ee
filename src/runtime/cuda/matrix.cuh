// The kernels of MatrixOps.
#pragma once

#include <algorithm>

#include "backend/cuda/check.h"
#include "runtime/cuda/block_code.cuh"
#include "runtime/cuda/matrix.h"
#include "runtime/cuda/saturate.cuh"

namespace anchorkv::cuda {

inline constexpr unsigned kEveryLane = 0xffffffffu;

template <typename Code>
inline constexpr int kUnit = 4 * Code::kQuads;  // weights

// The four values that thread-local index i of a unit stands for.
template <typename Code>
__device__ inline float4 Weights(const typename Code::Raw& raw, int i) {
  float v[4];
  Code::Values(raw, i, v);
  const Scale scale = Code::GroupScale(raw, i / Code::kGroupQuads);
#pragma unroll
  for (float& value : v) value = value * scale.scale + scale.offset;
  return {v[0], v[1], v[2], v[3]};
}

// ---- Dequantising ----

template <typename T>
__device__ inline void StoreFour(T* out, float4 v) {
  if constexpr (sizeof(T) == sizeof(float)) {
    *reinterpret_cast<float4*>(out) = v;
  } else {
    const __half2 low = __halves2half2(Narrowed<T>(v.x), Narrowed<T>(v.y));
    const __half2 high = __halves2half2(Narrowed<T>(v.z), Narrowed<T>(v.w));
    uint2 both;
    both.x = *reinterpret_cast<const uint32_t*>(&low);
    both.y = *reinterpret_cast<const uint32_t*>(&high);
    *reinterpret_cast<uint2*>(out) = both;
  }
}

inline constexpr int kDequantizeWarps = 4;

// A warp decodes 32 neighbouring units into shared memory and writes them out in order.
template <typename Code, typename T>
__global__ void __launch_bounds__(32 * kDequantizeWarps)
    DequantizeKernel(const std::byte* data, int64_t units, T* out) {
  constexpr int kColumns = 32 * kUnit<Code>;
  constexpr int kPieceElements = 16 / sizeof(T);
  static_assert(kColumns % Code::kBlock == 0);
  __shared__ uint4 memory[kDequantizeWarps][kColumns / kPieceElements];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t stretch = int64_t{blockIdx.x} * kDequantizeWarps + warp;
  const int64_t left = units - stretch * 32;
  T* columns = reinterpret_cast<T*>(memory[warp]);
  if (lane < left) {
    const auto raw = Code::Load(data + stretch * (kColumns / Code::kBlock * Code::kBytes), lane);
#pragma unroll
    for (int i = 0; i < Code::kQuads; ++i) StoreFour(columns + Code::Column(lane, i), Weights<Code>(raw, i));
  }
  __syncwarp();
  const int64_t elements = min(left, int64_t{32}) * kUnit<Code>;
  uint4* target = reinterpret_cast<uint4*>(out + stretch * kColumns);
  for (unsigned i = lane; i * kPieceElements < elements; i += 32) target[i] = memory[warp][i];
}

// One block per row.
template <typename Code>
__global__ void LookUpKernel(const std::byte* data, int64_t row_bytes, int64_t inputs, const int32_t* ids, float* out) {
  const std::byte* row = data + ids[blockIdx.x] * row_bytes;
  float* target = out + blockIdx.x * inputs;
  for (unsigned unit = threadIdx.x; unit < inputs / kUnit<Code>; unit += blockDim.x) {
    const auto raw = Code::Load(row, unit);
#pragma unroll
    for (int i = 0; i < Code::kQuads; ++i) StoreFour(target + Code::Column(unit, i), Weights<Code>(raw, i));
  }
}

// ---- Multiplying ----

// Threads work in teams of half a warp. Some teams share kRows rows of the matrix, taking units in turn; a block has
// several such groups of teams.
inline constexpr int kTeam = 16;
inline constexpr int kRows = 4;
inline constexpr int kMaxMultiplyThreads = 256;
inline constexpr int kMaxTeams = kMaxMultiplyThreads / kTeam;
// Threads that a matrix gets if it has units for them, several waves of a large GPU. A constant, so that sums do not
// depend on the GPU at hand.
inline constexpr int64_t kWantedThreads = 1 << 19;

struct MultiplyShape {
  int teams = 1;   // of a group
  int groups = 1;  // of a block
};

inline MultiplyShape ChooseShape(int64_t units, int64_t outputs) {
  const int64_t row_groups = CeilDiv(outputs, kRows);
  const int64_t wanted = std::clamp<int64_t>(kWantedThreads / row_groups, kTeam, kMaxMultiplyThreads);
  const int64_t turns = CeilDiv(units, wanted);
  MultiplyShape shape;
  shape.teams = static_cast<int>(std::min<int64_t>(CeilDiv(CeilDiv(units, turns), kTeam), kMaxTeams));
  // Blocks are whole warps of about half the largest size.
  if (shape.teams % 2 != 0) {
    if (shape.teams > kMaxTeams / 2) return {shape.teams + 1, 1};
    shape.groups = 2 * std::max(1, kMaxTeams / 4 / shape.teams);
  } else {
    shape.groups = std::max(1, kMaxTeams / 2 / shape.teams);
  }
  return shape;
}

// sums[r][t] += unit of row r times the same columns of token t.
template <typename Code, int kTokens>
__device__ inline void MultiplyUnit(const typename Code::Raw (&raw)[kRows], unsigned unit, const float* x,
                                    const unsigned (&tokens)[kTokens], float (&sums)[kRows][kTokens]) {
#pragma unroll
  for (int i = 0; i < Code::kQuads; ++i) {
    float4 weights[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) weights[r] = Weights<Code>(raw[r], i);
    const float* columns = x + Code::Column(unit, i);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(columns + tokens[t]));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 w = weights[r];
        sums[r][t] = fmaf(w.x, four.x, fmaf(w.y, four.y, fmaf(w.z, four.z, fmaf(w.w, four.w, sums[r][t]))));
      }
    }
  }
}

// The same for one token, with the scale taken out of the sum of each group of columns: fewer operations, as long as
// there is only one sum per row.
template <typename Code>
__device__ inline void MultiplyUnitByOne(const typename Code::Raw (&raw)[kRows], unsigned unit, const float* x,
                                         float (&sums)[kRows][1]) {
#pragma unroll
  for (int group = 0; group < Code::kQuads / Code::kGroupQuads; ++group) {
    float dots[kRows] = {};
    float total = 0.0f;
#pragma unroll
    for (int j = 0; j < Code::kGroupQuads; ++j) {
      const int i = group * Code::kGroupQuads + j;
      const float4 four = __ldg(reinterpret_cast<const float4*>(x + Code::Column(unit, i)));
      if constexpr (Code::kHasOffset) total += (four.x + four.y) + (four.z + four.w);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float v[4];
        Code::Values(raw[r], i, v);
        dots[r] = fmaf(v[0], four.x, fmaf(v[1], four.y, fmaf(v[2], four.z, fmaf(v[3], four.w, dots[r]))));
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Scale scale = Code::GroupScale(raw[r], group);
      sums[r][0] = fmaf(scale.scale, dots[r], sums[r][0]);
      if constexpr (Code::kHasOffset) sums[r][0] = fmaf(scale.offset, total, sums[r][0]);
    }
  }
}

template <typename Code, int kTokens>
__global__ void __launch_bounds__(kMaxMultiplyThreads, 2)
    MultiplyKernel(const __grid_constant__ MultiplyArgs args, const MultiplyShape shape) {
  __shared__ float partial[kMaxTeams][kRows][kTokens];
  const int team = static_cast<int>(threadIdx.x) / kTeam;
  const int64_t first_group = int64_t{blockIdx.x} * shape.groups;
  const int64_t first_row = (first_group + team / shape.teams) * kRows;
  const std::byte* rows[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = args.data + min(first_row + r, args.outputs - 1) * args.row_bytes;
  unsigned tokens[kTokens];  // where the rows of x start
#pragma unroll
  for (int t = 0; t < kTokens; ++t) tokens[t] = static_cast<unsigned>(min(int64_t{t}, args.tokens - 1) * args.inputs);

  float sums[kRows][kTokens] = {};
  const auto units = static_cast<unsigned>(args.inputs / kUnit<Code>);
  const unsigned stride = shape.teams * kTeam;
  for (unsigned unit = threadIdx.x % stride; unit < units; unit += stride) {
    typename Code::Raw raw[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) raw[r] = Code::Load(rows[r], unit);
    if constexpr (kTokens == 1) {
      MultiplyUnitByOne<Code>(raw, unit, args.x, sums);
    } else {
      MultiplyUnit<Code>(raw, unit, args.x, tokens, sums);
    }
  }

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float sum = sums[r][t];
      for (int width = kTeam / 2; width > 0; width /= 2) sum += __shfl_xor_sync(kEveryLane, sum, width);
      if (threadIdx.x % kTeam == 0) partial[team][r][t] = sum;
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < shape.groups * kRows * kTokens; i += static_cast<int>(blockDim.x)) {
    const int group = i / (kRows * kTokens), t = i / kRows % kTokens, r = i % kRows;
    const int64_t row = (first_group + group) * kRows + r;
    if (row >= args.outputs || t >= args.tokens) continue;
    float sum = args.bias != nullptr ? args.bias[row] : 0.0f;
    for (int k = 0; k < shape.teams; ++k) sum += partial[group * shape.teams + k][r][t];
    float* y = args.y + t * args.outputs + row;
    *y = args.add ? *y + sum : sum;
  }
}

template <typename Code, int kTokens>
Status LaunchMultiply(const MultiplyArgs& args, Stream stream) {
  const MultiplyShape shape = ChooseShape(args.inputs / kUnit<Code>, args.outputs);
  const auto blocks = static_cast<unsigned>(CeilDiv(args.outputs, int64_t{kRows} * shape.groups));
  MultiplyKernel<Code, kTokens><<<blocks, shape.groups * shape.teams * kTeam, 0, stream>>>(args, shape);
  return LaunchStatus("a matrix times a few vectors");
}

// ---- The operations of a type ----

template <ggml_type kType>
int64_t MatrixOps<kType>::RowBytes(int64_t inputs) {
  return inputs / BlockCode<kType>::kBlock * BlockCode<kType>::kBytes;
}

template <ggml_type kType>
bool MatrixOps<kType>::HasWholeUnits(int64_t inputs) {
  return inputs % kUnit<BlockCode<kType>> == 0 && inputs % BlockCode<kType>::kBlock == 0;
}

template <ggml_type kType>
Status MatrixOps<kType>::Dequantize(const std::byte* data, int64_t count, Element type, void* out, Stream stream) {
  using Code = BlockCode<kType>;
  const int64_t units = count / kUnit<Code>;
  const auto blocks = static_cast<unsigned>(CeilDiv(units, 32 * kDequantizeWarps));
  if (type == Element::kF32) {
    DequantizeKernel<Code><<<blocks, 32 * kDequantizeWarps, 0, stream>>>(data, units, static_cast<float*>(out));
  } else {
    DequantizeKernel<Code><<<blocks, 32 * kDequantizeWarps, 0, stream>>>(data, units, static_cast<__half*>(out));
  }
  return LaunchStatus("dequantising a matrix");
}

template <ggml_type kType>
Status MatrixOps<kType>::LookUp(const DeviceMatrix& matrix, const int32_t* ids, int64_t count, float* out,
                                Stream stream) {
  LookUpKernel<BlockCode<kType>>
      <<<static_cast<unsigned>(count), 64, 0, stream>>>(matrix.data, RowBytes(matrix.inputs), matrix.inputs, ids, out);
  return LaunchStatus("looking up rows of a matrix");
}

template <ggml_type kType>
Status MatrixOps<kType>::Multiply(const MultiplyArgs& args, Stream stream) {
  using Code = BlockCode<kType>;
  if (args.tokens == 1) return LaunchMultiply<Code, 1>(args, stream);
  if (args.tokens == 2) return LaunchMultiply<Code, 2>(args, stream);
  if (args.tokens <= 4) return LaunchMultiply<Code, 4>(args, stream);
  return LaunchMultiply<Code, 8>(args, stream);
}

}  // namespace anchorkv::cuda
