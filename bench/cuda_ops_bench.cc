// Times of the GPU runtime's operations: medians over launches of a CUDA graph that goes through as many copies of the
// weights as exceed the second-level cache.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <utility>
#include <vector>

#include "runtime/cuda/ops.h"

namespace {

using namespace anchorkv;
using cuda::DeviceBuffer;

constexpr size_t kCold = size_t{400} << 20;  // bytes of weights that no cache holds

// Microseconds of one of `count` operations.
double Time(cudaStream_t stream, int count, const std::function<Status(int)>& enqueue) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t run = nullptr;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  Status status;
  for (int i = 0; i < count && status.ok(); ++i) status = enqueue(i);
  cudaStreamEndCapture(stream, &graph);
  if (!status.ok() || cudaGraphInstantiate(&run, graph, 0) != cudaSuccess) {
    std::printf("not run: %s\n", status.message().c_str());
    return 0.0;
  }
  cudaEvent_t from = nullptr, to = nullptr;
  cudaEventCreate(&from);
  cudaEventCreate(&to);
  std::vector<float> times;
  for (int i = 0; i < 12; ++i) {
    cudaEventRecord(from, stream);
    cudaGraphLaunch(run, stream);
    cudaEventRecord(to, stream);
    cudaEventSynchronize(to);
    float milliseconds = 0.0f;
    cudaEventElapsedTime(&milliseconds, from, to);
    if (i >= 2) times.push_back(milliseconds);
  }
  cudaEventDestroy(from);
  cudaEventDestroy(to);
  cudaGraphExecDestroy(run);
  cudaGraphDestroy(graph);
  std::nth_element(times.begin(), times.begin() + 5, times.end());
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    std::printf("%s\n", cudaGetErrorString(error));
  return 1000.0 * times[5] / count;
}

void TimeMatrix(cudaStream_t stream, ggml_type type, const char* name, int64_t block, int64_t block_bytes,
                int64_t outputs, int64_t inputs) {
  const size_t bytes = static_cast<size_t>(outputs * (inputs / block) * block_bytes);
  const size_t padded = (bytes + 255) / 256 * 256;
  const int copies = static_cast<int>(std::clamp<size_t>(kCold / padded, 2, 64));
  const DeviceBuffer weights = DeviceBuffer::Make(copies * padded, "weights").value();
  const DeviceBuffer x = DeviceBuffer::Make(static_cast<size_t>(8 * inputs * 4), "x").value();
  const DeviceBuffer y = DeviceBuffer::Make(static_cast<size_t>(8 * outputs * 4), "y").value();
  cudaMemset(weights.data(), 0x31, weights.size_bytes());
  cudaMemset(x.data(), 0, x.size_bytes());
  std::printf("%-7s %6ld x %-5ld %7.2f MB ", name, static_cast<long>(outputs), static_cast<long>(inputs),
              static_cast<double>(bytes) * 1e-6);
  const auto matrix = [&](int i) {
    return cuda::DeviceMatrix{weights.data() + static_cast<size_t>(i) * padded, type, inputs, outputs};
  };
  for (const int64_t tokens : {1, 2, 4, 8}) {
    const double us = Time(stream, copies, [&](int i) {
      return cuda::MultiplyFew(matrix(i), x.as<float>(), tokens, nullptr, false, y.as<float>(), stream);
    });
    std::printf(" | %ld: %6.2f us %4.0f GB/s", static_cast<long>(tokens), us, static_cast<double>(bytes) / us * 1e-3);
  }
  const int64_t rows = std::min<int64_t>(outputs, 8960);
  const DeviceBuffer out = DeviceBuffer::Make(static_cast<size_t>(rows * inputs * 2), "out").value();
  const double us = Time(stream, copies, [&](int i) {
    return cuda::Dequantize(matrix(i), 0, rows, cuda::Element::kF16, out.data(), stream);
  });
  std::printf(" | f16 %6.2f us %4.0f GB/s\n", us,
              static_cast<double>(rows) *
                  (static_cast<double>(bytes) / static_cast<double>(outputs) + 2.0 * static_cast<double>(inputs)) / us *
                  1e-3);
}

void TimeRows(cudaStream_t stream) {
  const DeviceBuffer a = DeviceBuffer::Make(size_t{1} << 28, "a").value(),
                     b = DeviceBuffer::Make(size_t{1} << 28, "b").value();
  const DeviceBuffer out = DeviceBuffer::Make(size_t{1} << 28, "out").value();
  cudaMemset(a.data(), 0, a.size_bytes());
  cudaMemset(b.data(), 0, b.size_bytes());
  const auto print = [&](const char* name, const std::function<Status()>& enqueue) {
    std::printf("%-28s %8.2f us\n", name, Time(stream, 20, [&](int) { return enqueue(); }));
  };
  const auto f16 = cuda::Element::kF16;
  for (const int64_t tokens : {1, 2048}) {
    std::printf("%ld tokens\n", static_cast<long>(tokens));
    print("RmsNorm 1536",
          [&] { return cuda::RmsNorm(a.as<float>(), b.as<float>(), tokens, 1536, 1e-6f, f16, out.data(), stream); });
    print("SwiGlu 8960",
          [&] { return cuda::SwiGlu(a.as<float>(), b.as<float>(), tokens * 8960, f16, out.data(), stream); });
    cuda::HeadRowsArgs args;
    args.x = a.as<float>();
    args.tokens = tokens;
    args.heads = 12;
    args.head_dim = 128;
    args.out = out.data();
    args.token_stride = 128;
    args.head_stride = tokens * 128;
    print("StoreHeadRows 12 x 128", [&] { return cuda::StoreHeadRows(args, stream); });
  }
  print("ArgMax 151936", [&] { return cuda::ArgMax(a.as<float>(), 1, 151936, out.as<int32_t>(), stream); });
  print("CompareRows 256 x 151936", [&] {
    return cuda::CompareRows(a.as<float>(), b.as<float>(), 256, 151936, nullptr, out.as<double>(), nullptr, nullptr,
                             stream);
  });
}

}  // namespace

int main() {
  if (!cuda::CurrentDevice().ok()) {
    std::printf("no NVIDIA GPU here\n");
    return 0;
  }
  cudaStream_t stream = nullptr;
  cudaStreamCreate(&stream);
  TimeMatrix(stream, GGML_TYPE_Q4_K, "Q4_K", 256, 144, 8960, 1536);
  TimeMatrix(stream, GGML_TYPE_Q4_K, "Q4_K", 256, 144, 1536, 8960);
  TimeMatrix(stream, GGML_TYPE_Q4_K, "Q4_K", 256, 144, 1536, 1536);
  TimeMatrix(stream, GGML_TYPE_Q4_K, "Q4_K", 256, 144, 256, 1536);
  TimeMatrix(stream, GGML_TYPE_Q6_K, "Q6_K", 256, 210, 151936, 1536);
  TimeMatrix(stream, GGML_TYPE_Q6_K, "Q6_K", 256, 210, 1536, 8960);
  struct {
    ggml_type type;
    const char* name;
    int64_t block, bytes;
  } const types[] = {
      {GGML_TYPE_F32, "F32", 1, 4},       {GGML_TYPE_F16, "F16", 1, 2},         {GGML_TYPE_BF16, "BF16", 1, 2},
      {GGML_TYPE_Q4_0, "Q4_0", 32, 18},   {GGML_TYPE_Q4_1, "Q4_1", 32, 20},     {GGML_TYPE_Q5_0, "Q5_0", 32, 22},
      {GGML_TYPE_Q5_1, "Q5_1", 32, 24},   {GGML_TYPE_Q8_0, "Q8_0", 32, 34},     {GGML_TYPE_Q2_K, "Q2_K", 256, 84},
      {GGML_TYPE_Q3_K, "Q3_K", 256, 110}, {GGML_TYPE_Q4_K, "Q4_K", 256, 144},   {GGML_TYPE_Q5_K, "Q5_K", 256, 176},
      {GGML_TYPE_Q6_K, "Q6_K", 256, 210}, {GGML_TYPE_IQ4_NL, "IQ4_NL", 32, 18}, {GGML_TYPE_IQ4_XS, "IQ4_XS", 256, 136}};
  for (const auto& t : types) TimeMatrix(stream, t.type, t.name, t.block, t.bytes, 8960, 4096);
  TimeMatrix(stream, GGML_TYPE_Q5_0, "Q5_0", 32, 22, 4864, 896);
  TimeMatrix(stream, GGML_TYPE_Q8_0, "Q8_0", 32, 34, 151936, 896);
  TimeRows(stream);
  return 0;
}
