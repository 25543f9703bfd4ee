// A compression method for a whole prompt, behind one interface: what evaluations compare at equal bytes.
// Every one stores what it bills and follows its published definition (docs/baselines.md).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "anchorkv/status.h"
#include "backend/backend.h"
#include "segment/observations.h"
#include "segment/segment.h"

namespace anchorkv {

class Method {
 public:
  virtual ~Method() = default;
  virtual Observations observations() const = 0;
  // False for quantisers, whose rate is part of their definition: `layer_bytes` is ignored.
  virtual bool has_budget() const = 0;
  // One segment per layer. layers: all layers of one prompt, with what observations() asks for. layer_bytes: the
  // bytes that each layer may hold; a method with its own division among layers (PyramidKV, KVzip) keeps to their
  // sum instead. The segments refer to `backend` and to the layers' RoPE table, which must outlive them.
  // kInvalidArgument when an observation is missing, kInfeasible when the bytes buy less than the method needs.
  virtual Result<std::vector<std::shared_ptr<const Segment>>> Compress(std::span<const LayerInput> layers,
                                                                       std::span<const int64_t> layer_bytes,
                                                                       const Backend& backend) const = 0;
};

// Names as used on the command line, in the order of docs/baselines.md.
std::span<const std::string_view> BaselineNames();
// The method with its published constants. kInvalidArgument lists the known names.
Result<std::unique_ptr<Method>> MakeBaseline(std::string_view name);

}  // namespace anchorkv
