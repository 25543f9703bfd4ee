#include "runtime/cuda/decode_graph.h"

#include "backend/cuda/check.h"

namespace anchorkv::cuda {

Result<DecodeGraph> DecodeGraph::Capture(Stream stream, const std::function<Status()>& enqueue) {
  AKV_RETURN_IF_ERROR(ToStatus(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing a step"));
  const Status enqueued = enqueue();
  cudaGraph_t captured = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream, &captured);
  DecodeGraph out;
  Status status = enqueued;
  if (status.ok()) status = ToStatus(ended, "capturing a step");
  if (status.ok()) status = ToStatus(cudaGraphInstantiate(&out.graph_, captured, 0), "making a graph of a step");
  if (captured != nullptr) cudaGraphDestroy(captured);
  AKV_RETURN_IF_ERROR(status);
  return Result<DecodeGraph>(std::move(out));
}

DecodeGraph::~DecodeGraph() {
  if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
}

Status DecodeGraph::Launch(Stream stream) const {
  return ToStatus(cudaGraphLaunch(graph_, stream), "launching a step");
}

}  // namespace anchorkv::cuda
