#include "baseline/evictors.h"

#include <numeric>
#include <string>

#include "base/alloc_guard.h"
#include "baseline/each_layer.h"
#include "baseline/gathered_segment.h"
#include "baseline/prompt_check.h"

namespace anchorkv {
namespace {

using Segments = std::vector<std::shared_ptr<const Segment>>;

class Evictor : public Method {
 public:
  explicit Evictor(const Observations& observations) : observations_(observations) {}

  Observations observations() const override { return observations_; }
  bool has_budget() const override { return true; }

  Result<Segments> Compress(std::span<const LayerInput> layers, std::span<const int64_t> layer_bytes,
                            const Backend& backend) const override {
    return GuardAllocation("the kept rows", [&]() -> Result<Segments> {
      AKV_RETURN_IF_ERROR(CheckPrompt(layers, observations_));
      if (layer_bytes.size() != layers.size()) {
        return InvalidArgument(std::to_string(layer_bytes.size()) + " byte budgets for " +
                               std::to_string(layers.size()) + " layers");
      }
      AKV_ASSIGN_OR_RETURN(const std::vector<HeadPositions> kept, Choose(layers, layer_bytes, backend));
      Segments segments(layers.size());
      AKV_RETURN_IF_ERROR(ForEachLayer(layers.size(), [&](size_t l) -> Status {
        AKV_ASSIGN_OR_RETURN(segments[l], GatheredSegment::Make(layers[l], kept[l], backend));
        return {};
      }));
      return segments;
    });
  }

 protected:
  // Rows of all heads together that `bytes` buy for `layers` layers like `input`; kInfeasible below one per head.
  static Result<int64_t> RowsWithin(int64_t bytes, const LayerInput& input, int64_t layers, const std::string& whose) {
    const int64_t overhead = layers * GatheredSegment::OverheadBytes(input.keys.heads);
    const int64_t row = GatheredSegment::RowBytes(input.keys.head_dim);
    const int64_t least = overhead + layers * input.keys.heads * row;
    if (bytes < least) {
      return Infeasible(std::to_string(bytes) + " bytes for " + whose + "; one row in every kv head takes " +
                        std::to_string(least));
    }
    return (bytes - overhead) / row;
  }

 private:
  virtual Result<std::vector<HeadPositions>> Choose(std::span<const LayerInput> layers,
                                                    std::span<const int64_t> layer_bytes,
                                                    const Backend& backend) const = 0;

  Observations observations_;
};

class LayerEvictor final : public Evictor {
 public:
  LayerEvictor(const Observations& observations, Select select) : Evictor(observations), select_(select) {}

 private:
  Result<std::vector<HeadPositions>> Choose(std::span<const LayerInput> layers, std::span<const int64_t> layer_bytes,
                                            const Backend& backend) const override {
    std::vector<HeadPositions> kept(layers.size());
    AKV_RETURN_IF_ERROR(ForEachLayer(layers.size(), [&](size_t l) -> Status {
      const LayerInput& input = layers[l];
      AKV_ASSIGN_OR_RETURN(const int64_t rows,
                           RowsWithin(layer_bytes[l], input, 1, "layer " + std::to_string(input.layer)));
      AKV_ASSIGN_OR_RETURN(kept[l], select_(input, rows / input.keys.heads, backend));
      return {};
    }));
    return kept;
  }

  Select select_;
};

// The bytes of all layers together, in rows.
class PooledEvictor : public Evictor {
 public:
  using Evictor::Evictor;

 private:
  Result<std::vector<HeadPositions>> Choose(std::span<const LayerInput> layers, std::span<const int64_t> layer_bytes,
                                            const Backend& backend) const override {
    const int64_t bytes = std::accumulate(layer_bytes.begin(), layer_bytes.end(), int64_t{0});
    AKV_ASSIGN_OR_RETURN(const int64_t rows,
                         RowsWithin(bytes, layers[0], static_cast<int64_t>(layers.size()), "all layers"));
    return ChooseRows(layers, rows, backend);
  }

  virtual Result<std::vector<HeadPositions>> ChooseRows(std::span<const LayerInput> layers, int64_t rows,
                                                        const Backend& backend) const = 0;
};

class PyramidKv final : public PooledEvictor {
 public:
  PyramidKv() : PooledEvictor({.window = kSnapKvWindow}) {}

 private:
  Result<std::vector<HeadPositions>> ChooseRows(std::span<const LayerInput> layers, int64_t rows,
                                                const Backend& backend) const override {
    const int64_t per_head = rows / (static_cast<int64_t>(layers.size()) * layers[0].keys.heads);
    std::vector<HeadPositions> kept(layers.size());
    AKV_RETURN_IF_ERROR(ForEachLayer(layers.size(), [&](size_t l) -> Status {
      const int64_t of_layer = PyramidRows(static_cast<int>(l), static_cast<int>(layers.size()), layers[l].keys.tokens,
                                           static_cast<double>(per_head));
      AKV_ASSIGN_OR_RETURN(kept[l], SelectSnapKv(layers[l], of_layer, backend));
      return {};
    }));
    return kept;
  }
};

class KvZip final : public PooledEvictor {
 public:
  KvZip() : PooledEvictor({.reconstruction = true}) {}

 private:
  Result<std::vector<HeadPositions>> ChooseRows(std::span<const LayerInput> layers, int64_t rows,
                                                const Backend&) const override {
    return SelectKvZip(layers, rows);
  }
};

}  // namespace

std::unique_ptr<Method> MakeEvictor(const Observations& observations, Select select) {
  return std::make_unique<LayerEvictor>(observations, select);
}

std::unique_ptr<Method> MakePyramidKv() { return std::make_unique<PyramidKv>(); }

std::unique_ptr<Method> MakeKvZip() { return std::make_unique<KvZip>(); }

}  // namespace anchorkv
