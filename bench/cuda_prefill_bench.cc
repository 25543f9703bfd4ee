// Times of a prompt's attention and statistics on the GPU, one layer (docs: bench/README.md).
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "base/half.h"
#include "runtime/cuda/prefill_attention.h"
#include "runtime/cuda/prompt_statistics.h"

namespace anchorkv::cuda {
namespace {

constexpr int kRuns = 7;

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "cuda_prefill_bench: %s\n", status.message().c_str());
  std::exit(1);
}

DeviceBuffer Allocate(size_t bytes) {
  auto buffer = DeviceBuffer::Make(bytes, "a benchmark");
  Check(buffer.status());
  return std::move(buffer).value();
}

uint32_t NextBits() {
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}
// Roughly normal, with variance 1.
float NextNumber() {
  float sum = 0.0f;
  for (int i = 0; i < 3; ++i) sum += static_cast<float>(NextBits()) * 0x1p-23f - 1.0f;
  return sum;
}

template <typename T, typename Convert>
DeviceBuffer Random(int64_t count, const Convert& convert) {
  constexpr int64_t kPeriod = 99991;
  std::vector<T> some(kPeriod);
  for (T& x : some) x = convert(NextNumber());
  std::vector<T> host(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) host[static_cast<size_t>(i)] = some[static_cast<size_t>(i % kPeriod)];
  DeviceBuffer buffer = Allocate(host.size() * sizeof(T));
  Check(Upload(buffer.data(), host.data(), host.size() * sizeof(T), nullptr));
  Check(Synchronize(nullptr));
  return buffer;
}
DeviceBuffer RandomHalves(int64_t count) { return Random<uint16_t>(count, FloatToHalf); }
DeviceBuffer RandomFloats(int64_t count) {
  return Random<float>(count, [](float x) { return x; });
}

// The median in milliseconds.
double Time(const std::function<Status()>& enqueue) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times(kRuns);
  Check(enqueue());
  for (float& ms : times) {
    cudaEventRecord(begin);
    Check(enqueue());
    cudaEventRecord(end);
    Check(Synchronize(nullptr));
    cudaEventElapsedTime(&ms, begin, end);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return static_cast<double>(times[kRuns / 2]);
}

void Report(const char* what, int64_t tokens, int head_dim, double ms, double flops) {
  std::printf("%-23s tokens %6lld  dim %3d  %8.3f ms  %6.1f TFLOP/s\n", what, static_cast<long long>(tokens), head_dim,
              ms, flops / ms * 1e-9);
  std::fflush(stdout);
}

void RunShape(int64_t tokens, int q_heads, int kv_heads, int dim) {
  const DeviceBuffer queries = RandomHalves(tokens * q_heads * dim);
  const DeviceBuffer keys = RandomHalves(tokens * kv_heads * dim), values = RandomHalves(tokens * kv_heads * dim);
  const DeviceBuffer out = Allocate(static_cast<size_t>(tokens * q_heads * dim) * sizeof(float));
  const DeviceBuffer lse = Allocate(static_cast<size_t>(tokens * q_heads) * sizeof(float));
  auto rows = [&](const DeviceBuffer& data) {
    return DeviceHeads{data.data(), Element::kF16, kv_heads, tokens, dim, tokens * dim, dim};
  };
  const double product = static_cast<double>(tokens) * static_cast<double>(tokens) * dim * q_heads;  // causal, of one

  PrefillAttention attention;
  attention.queries = queries.data();
  attention.keys = rows(keys);
  attention.values = rows(values);
  attention.tokens = tokens;
  attention.q_heads = q_heads;
  attention.out = out.data();
  attention.lse = lse.as<float>();
  Report("attention", tokens, dim, Time([&] { return AttendPrompt(attention, nullptr); }), 2.0 * product);

  // The last tokens alone, as a prompt in chunks and a question behind a document have them.
  for (const int64_t chunk : {2048, 64}) {
    PrefillAttention last = attention;
    last.tokens = chunk;
    last.past = tokens - chunk;
    const double flops = 4.0 * dim * q_heads * static_cast<double>(chunk) *
                         (static_cast<double>(tokens) - 0.5 * static_cast<double>(chunk));
    Report(chunk == 64 ? "attention, last 64" : "attention, last 2048", tokens, dim,
           Time([&] { return AttendPrompt(last, nullptr); }), flops);
  }

  const DeviceBuffer weights = RandomFloats(tokens * kv_heads);
  ColumnWeights columns;
  columns.queries = queries.data();
  columns.keys = rows(keys);
  columns.ranges[0] = {0, tokens};
  columns.range_count = 1;
  columns.tokens = tokens;
  columns.visible = 1;
  columns.q_heads = q_heads;
  columns.weights = weights.as<float>();
  const DeviceBuffer workspace = Allocate(ColumnWeightsWorkspaceBytes(columns));
  auto reduce = [&] { return ReduceColumns(columns, workspace.data(), nullptr); };
  Report("columns, sum", tokens, dim, Time(reduce), 2.0 * product);
  columns.reduce = ColumnReduce::kMax;
  Report("columns, max", tokens, dim, Time(reduce), 2.0 * product);
  columns.lse = lse.as<float>();
  Report("columns, max, lse known", tokens, dim, Time(reduce), product);

  const DeviceBuffer x = RandomFloats(tokens * q_heads * dim);
  const DeviceBuffer mean = RandomFloats(q_heads * dim), covariance = RandomFloats(q_heads * dim * dim);
  const DeviceBuffer moments = Allocate(MomentsWorkspaceBytes(tokens, q_heads, dim));
  const double ms = Time([&] {
    return AddMoments(x.as<float>(), tokens, q_heads, dim, 100, mean.as<float>(), covariance.as<float>(),
                      moments.data(), nullptr);
  });
  Report("moments", tokens, dim, ms, 2.0 * static_cast<double>(tokens * q_heads) * dim * dim);
}

}  // namespace
}  // namespace anchorkv::cuda

int main() {
  const auto device = anchorkv::cuda::CurrentDevice();
  if (!device.ok()) {
    std::fprintf(stderr, "cuda_prefill_bench: %s\n", device.status().message().c_str());
    return 1;
  }
  std::printf("%s, 12 query heads, 2 kv heads\n", device->name.c_str());
  for (const int dim : {128, 64}) {
    for (const int64_t tokens : {4096, 16384, 32768}) anchorkv::cuda::RunShape(tokens, 12, 2, dim);
  }
  return 0;
}
