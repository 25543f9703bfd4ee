// Functions of weight matrices: arguments are checked and passed on to the kernels of the matrix's type.
#include <optional>
#include <string>
#include <utility>

#include "backend/cuda/check.h"
#include "backend/cuda/vector.cuh"
#include "runtime/cuda/matrix.h"
#include "runtime/cuda/saturate.cuh"

namespace anchorkv::cuda {
namespace {

// Calls visit(name, std::integral_constant<ggml_type, T>) for every type; false ends the list.
template <typename Visit>
void ForEachType(const Visit& visit) {
#define AKV_VISIT(name) visit(#name, std::integral_constant<ggml_type, GGML_TYPE_##name>())
  (void)(AKV_VISIT(F32) && AKV_VISIT(F16) && AKV_VISIT(BF16) && AKV_VISIT(Q4_0) && AKV_VISIT(Q4_1) && AKV_VISIT(Q5_0) &&
         AKV_VISIT(Q5_1) && AKV_VISIT(Q8_0) && AKV_VISIT(Q2_K) && AKV_VISIT(Q3_K) && AKV_VISIT(Q4_K) &&
         AKV_VISIT(Q5_K) && AKV_VISIT(Q6_K) && AKV_VISIT(IQ4_NL) && AKV_VISIT(IQ4_XS));
#undef AKV_VISIT
}

// run(MatrixOps<type>()).
template <typename Run>
Status ForType(ggml_type type, const Run& run) {
  std::optional<Status> status;
  ForEachType([&](const char*, auto constant) {
    if (constant() == type) status.emplace(run(MatrixOps<constant()>()));
    return !status.has_value();
  });
  if (status.has_value()) return *std::move(status);
  return Unsupported("weights of type " + std::to_string(type) + " on the GPU; it takes " + DeviceTypeNames());
}

bool IsAligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

Status CheckMatrix(const DeviceMatrix& matrix) {
  if (matrix.inputs < 1 || matrix.outputs < 1 || !IsAligned(matrix.data)) {
    return InvalidArgument("a matrix of " + std::to_string(matrix.outputs) + " rows of " +
                           std::to_string(matrix.inputs) +
                           " weights; both must be at least 1 and its address a multiple of 16");
  }
  return {};
}

// Blocks are never split between rows; plain numbers come in any count.
Status CheckWidth(const DeviceMatrix& matrix, bool whole_units) {
  if (whole_units || matrix.type == GGML_TYPE_F32 || matrix.type == GGML_TYPE_F16 || matrix.type == GGML_TYPE_BF16) {
    return {};
  }
  return InvalidArgument("rows of " + std::to_string(matrix.inputs) + " weights; they must be whole blocks");
}

// ---- Plain numbers in rows that are not whole units: one weight at a time ----

Element ElementOf(ggml_type type) {
  return type == GGML_TYPE_F32 ? Element::kF32 : type == GGML_TYPE_F16 ? Element::kF16 : Element::kBF16;
}

constexpr int kThreads = 256;

__global__ void CopyRowsKernel(const void* rows, Element from, int64_t width, const int32_t* ids, int64_t count,
                               Element to, void* out) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count * width) return;
  const int64_t row = ids != nullptr ? ids[i / width] : i / width;
  const float x = LoadElement(rows, from, row * width + i % width);
  if (to == Element::kF32) {
    static_cast<float*>(out)[i] = x;
  } else {
    static_cast<__half*>(out)[i] = SaturatedHalf(x);
  }
}

Status CopyRows(const DeviceMatrix& matrix, int64_t first, const int32_t* ids, int64_t count, Element to, void* out,
                Stream stream) {
  const Element from = ElementOf(matrix.type);
  const auto blocks = static_cast<unsigned>(CeilDiv(count * matrix.inputs, kThreads));
  CopyRowsKernel<<<blocks, kThreads, 0, stream>>>(matrix.data + first * matrix.inputs * SizeOf(from), from,
                                                  matrix.inputs, ids, count, to, out);
  return LaunchStatus("copying rows of a matrix");
}

// One warp per output and token.
__global__ void MultiplyPlainKernel(const __grid_constant__ MultiplyArgs args, Element type) {
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kWarpSize) + WarpId();
  const int64_t t = blockIdx.y;
  if (row >= args.outputs) return;
  float sum = 0.0f;
  for (int64_t i = LaneId(); i < args.inputs; i += kWarpSize) {
    sum = fmaf(LoadElement(args.data, type, row * args.inputs + i), args.x[t * args.inputs + i], sum);
  }
  sum = WarpSum(sum);
  if (LaneId() != 0) return;
  if (args.bias != nullptr) sum += args.bias[row];
  float* y = args.y + t * args.outputs + row;
  *y = args.add ? *y + sum : sum;
}

Status MultiplyPlain(const MultiplyArgs& args, Element type, Stream stream) {
  const dim3 blocks(static_cast<unsigned>(CeilDiv(args.outputs, kThreads / kWarpSize)),
                    static_cast<unsigned>(args.tokens));
  MultiplyPlainKernel<<<blocks, kThreads, 0, stream>>>(args, type);
  return LaunchStatus("a matrix times a few vectors");
}

}  // namespace

bool IsDeviceType(ggml_type type) {
  return ForType(type, [](auto) { return Status(); }).ok();
}

std::string DeviceTypeNames() {
  std::string names;
  ForEachType([&](const char* name, auto) {
    names += (names.empty() ? "" : ", ") + std::string(name);
    return true;
  });
  return names;
}

Status Dequantize(const DeviceMatrix& matrix, int64_t first, int64_t rows, Element type, void* out, Stream stream) {
  AKV_RETURN_IF_ERROR(CheckMatrix(matrix));
  if (first < 0 || rows < 0 || first + rows > matrix.outputs || type == Element::kBF16 || !IsAligned(out)) {
    return InvalidArgument("rows " + std::to_string(first) + " to " + std::to_string(first + rows) + " of " +
                           std::to_string(matrix.outputs) + " as f32 or f16, to an address that is a multiple of 16");
  }
  if (rows == 0) return {};
  return ForType(matrix.type, [&]<typename Ops>(Ops) -> Status {
    const bool whole_units = Ops::HasWholeUnits(matrix.inputs);
    AKV_RETURN_IF_ERROR(CheckWidth(matrix, whole_units));
    if (!whole_units) return CopyRows(matrix, first, nullptr, rows, type, out, stream);
    return Ops::Dequantize(matrix.data + first * Ops::RowBytes(matrix.inputs), rows * matrix.inputs, type, out, stream);
  });
}

Status LookUpRows(const DeviceMatrix& matrix, const int32_t* ids, int64_t count, float* out, Stream stream) {
  AKV_RETURN_IF_ERROR(CheckMatrix(matrix));
  if (count < 0 || !IsAligned(out)) {
    return InvalidArgument(std::to_string(count) +
                           " rows to look up; at least 0, to an address that is a multiple of 16");
  }
  if (count == 0) return {};
  return ForType(matrix.type, [&]<typename Ops>(Ops) -> Status {
    const bool whole_units = Ops::HasWholeUnits(matrix.inputs);
    AKV_RETURN_IF_ERROR(CheckWidth(matrix, whole_units));
    if (!whole_units) return CopyRows(matrix, 0, ids, count, Element::kF32, out, stream);
    return Ops::LookUp(matrix, ids, count, out, stream);
  });
}

Status MultiplyFew(const DeviceMatrix& matrix, const float* x, int64_t tokens, const float* bias, bool add, float* y,
                   Stream stream) {
  AKV_RETURN_IF_ERROR(CheckMatrix(matrix));
  if (tokens < 1 || tokens > kFewTokens || !IsAligned(x)) {
    return InvalidArgument(std::to_string(tokens) + " tokens at once; from 1 to " + std::to_string(kFewTokens) +
                           ", at an address that is a multiple of 16");
  }
  return ForType(matrix.type, [&]<typename Ops>(Ops) -> Status {
    const bool whole_units = Ops::HasWholeUnits(matrix.inputs);
    AKV_RETURN_IF_ERROR(CheckWidth(matrix, whole_units));
    const MultiplyArgs args{
        matrix.data, Ops::RowBytes(matrix.inputs), matrix.inputs, matrix.outputs, x, tokens, bias, add, y};
    return whole_units ? Ops::Multiply(args, stream) : MultiplyPlain(args, ElementOf(matrix.type), stream);
  });
}

}  // namespace anchorkv::cuda
