// Time of one layer's decode attention over a segment of the adaptive profile and a tail of 64 rows on the GPU, over
// the segment alone, and over the segment by the kernel that rebuilds tiles; nothing of it in the cache: a CUDA graph
// of many layers with bytes of their own. Prints JSON lines (docs: bench/README.md); bench/dense_attention.py runs it
// beside dense kernels.
//
//   cuda_attention_bench [tokens kv_heads gqa_ratio head_dim]...
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "backend/cuda/attention.h"
#include "support/random.h"
#include "support/spectral_segments.h"

namespace anchorkv::cuda {
namespace {

constexpr int kReplays = 9;
constexpr int64_t kTailRows = 64;
constexpr size_t kColdBytes = size_t{300} << 20;  // several times the cache of an H200

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "cuda_attention_bench: %s\n", status.message().c_str());
  std::exit(1);
}
void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "cuda_attention_bench: %s\n", cudaGetErrorString(error));
  std::exit(1);
}
DeviceBuffer Send(const void* data, size_t bytes) {
  auto buffer = DeviceBuffer::Make(bytes, "a benchmark");
  Check(buffer.status());
  Check(Upload(buffer->data(), data, bytes, nullptr));
  Check(Synchronize(nullptr));
  return std::move(buffer).value();
}

// Median microseconds of one of `count` works that are enqueued by enqueue(i).
template <typename Enqueue>
double Time(int count, const Enqueue& enqueue) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaEvent_t begin, end;
  Check(cudaStreamCreate(&stream));
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < count; ++i) enqueue(i, stream);
  Check(cudaStreamEndCapture(stream, &graph));
  Check(cudaGraphInstantiate(&executable, graph, 0));
  std::vector<float> times(kReplays);
  for (int warm = 0; warm < 2; ++warm) Check(cudaGraphLaunch(executable, stream));
  for (float& ms : times) {
    Check(cudaEventRecord(begin, stream));
    Check(cudaGraphLaunch(executable, stream));
    Check(cudaEventRecord(end, stream));
    Check(cudaEventSynchronize(end));
    Check(cudaEventElapsedTime(&ms, begin, end));
  }
  Check(cudaGraphExecDestroy(executable));
  Check(cudaGraphDestroy(graph));
  Check(cudaEventDestroy(begin));
  Check(cudaEventDestroy(end));
  Check(cudaStreamDestroy(stream));
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return 1000.0 * static_cast<double>(times[kReplays / 2]) / count;
}

void Run(int64_t tokens, int kv_heads, int gqa_ratio, int head_dim) {
  test::SpectralSpec spec;
  spec.kv_heads = kv_heads;
  spec.head_dim = head_dim;
  spec.tokens = tokens;
  spec.exact = std::max<int64_t>(44, tokens / 400);
  spec.value_basis = true;
  spec.runs = test::SpectralRuns::kRising;
  const test::SpectralSegmentData data = test::MakeSpectralSegment(spec);
  auto rope_table = DeviceRopeTable::Make(*data.rope);
  Check(rope_table.status());
  const size_t bytes = data.layout.total_bytes;
  const int layers = static_cast<int>(std::clamp<size_t>(kColdBytes / bytes, 4, 64));
  std::vector<DeviceBuffer> segments;
  for (int i = 0; i < layers; ++i) segments.push_back(Send(data.bytes.data(), bytes));
  const int64_t rows = int64_t{kv_heads} * gqa_ratio;
  const std::vector<float> random = test::Random(1).Gaussians(rows * head_dim);
  const DeviceBuffer query_rows = Send(random.data(), random.size() * sizeof(float));
  DeviceQueries queries;
  queries.data = query_rows.data();
  queries.tokens = 1;
  queries.kv_heads = kv_heads;
  queries.gqa_ratio = gqa_ratio;
  queries.token_stride = rows * head_dim;
  queries.head_stride = head_dim;
  const auto device = CurrentDevice();
  Check(device.status());
  const int parts = std::max(SplitCount(*device, queries, tokens), kMinSpectralParts);
  const auto states = PartialStatesBuffer::Make(rows, head_dim, parts);
  Check(states.status());
  const auto output = DeviceBuffer::Make(static_cast<size_t>(rows * head_dim) * sizeof(float), "output");
  Check(output.status());
  DeviceOutput out;
  out.data = output->data();
  out.token_stride = queries.token_stride;
  out.head_stride = head_dim;
  const std::vector<uint16_t> zeros(static_cast<size_t>(2 * kv_heads * kTailRows * head_dim));
  const DeviceBuffer tail_rows = Send(zeros.data(), zeros.size() * sizeof(uint16_t));
  DeviceDense tail;
  tail.keys = {tail_rows.data(), Element::kF16, kv_heads, kTailRows, head_dim, kTailRows * head_dim, head_dim};
  tail.values = tail.keys;
  tail.last = tail.visible = kTailRows;
  const auto time = [&](const auto& attend) {
    return Time(layers, [&](int i, Stream stream) {
      const DeviceSpectralSegment segment{data.layout, segments[static_cast<size_t>(i)].data(), 0};
      Check(attend(segment, states->states(rows), stream));
    });
  };
  const double dense = 2.0 * 2.0 * static_cast<double>(tokens) * kv_heads * head_dim;
  const double step = time([&](const auto& segment, const PartialStates& all, Stream stream) {
    return DecodeSpectralStep(segment, rope_table->rope(), queries, tail, all, out, stream);
  });
  const double alone = time([&](const auto& segment, const PartialStates& all, Stream stream) {
    return DecodeSpectral(segment, rope_table->rope(), queries, all, stream);
  });
  const double tiles = time([&](const auto& segment, const PartialStates& all, Stream stream) -> Status {
    AKV_RETURN_IF_ERROR(AttendSpectral(segment, rope_table->rope(), queries, 0, tokens, all, stream));
    return MergeStates(all, {}, head_dim, static_cast<int>(rows), out, stream);
  });
  std::printf(
      "{\"tokens\": %lld, \"kv_heads\": %d, \"gqa_ratio\": %d, \"head_dim\": %d, \"ratio\": %.2f, "
      "\"parts\": %d, \"us\": %.2f, \"us_without_tail\": %.2f, \"us_tiles\": %.2f}\n",
      static_cast<long long>(tokens), kv_heads, gqa_ratio, head_dim, dense / static_cast<double>(bytes), parts, step,
      alone, tiles);
  std::fflush(stdout);
}

}  // namespace
}  // namespace anchorkv::cuda

int main(int argc, char** argv) {
  if (argc % 4 != 1) {
    std::fprintf(stderr, "usage: cuda_attention_bench [TOKENS KV_HEADS GQA_RATIO HEAD_DIM]...\n");
    return 2;
  }
  for (int i = 1; i + 3 < argc; i += 4) {
    anchorkv::cuda::Run(std::atoll(argv[i]), std::atoi(argv[i + 1]), std::atoi(argv[i + 2]), std::atoi(argv[i + 3]));
  }
  return 0;
}
