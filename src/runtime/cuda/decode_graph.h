// A captured step: what was enqueued on a stream, to be launched again as one.
#pragma once

#include <functional>
#include <utility>

#include "anchorkv/status.h"
#include "backend/cuda/device.h"

struct CUgraphExec_st;

namespace anchorkv::cuda {

class DecodeGraph {
 public:
  DecodeGraph() noexcept = default;
  // Captures what `enqueue` puts on `stream`, which must not be the default stream.
  static Result<DecodeGraph> Capture(Stream stream, const std::function<Status()>& enqueue);
  DecodeGraph(DecodeGraph&& other) noexcept { *this = std::move(other); }
  DecodeGraph& operator=(DecodeGraph&& other) noexcept {
    std::swap(graph_, other.graph_);
    return *this;
  }
  DecodeGraph(const DecodeGraph&) = delete;
  DecodeGraph& operator=(const DecodeGraph&) = delete;
  ~DecodeGraph();

  bool empty() const noexcept { return graph_ == nullptr; }
  Status Launch(Stream stream) const;

 private:
  CUgraphExec_st* graph_ = nullptr;
};

}  // namespace anchorkv::cuda
