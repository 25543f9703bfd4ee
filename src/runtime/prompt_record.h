// A prompt after one dense prefill: every layer's keys and values and what methods asked to observe, kept so that
// many methods and ratios compress the same tensors. A stack of texts: the document, then perhaps a question,
// which can be taken off again. Evaluation only; `run` never holds all layers dense.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "anchorkv/status.h"
#include "anchorkv/tensor_view.h"
#include "segment/observations.h"

namespace anchorkv {

class PromptRecord {
 public:
  ~PromptRecord();

  int layers() const noexcept;
  int64_t tokens() const noexcept;  // of all texts
  const Observations& observed() const noexcept;
  int64_t resident_bytes() const noexcept;

  // Layer input over all texts, as a method is shown it: keys before RoPE, values, the queries of the last
  // `observed().window` positions (fewer when the record is shorter), moments and column sums where observed.
  // Valid until the record changes. `reconstruction` is null until Engine::ObserveReconstruction has run for
  // the present texts.
  LayerInput layer(int layer) const noexcept;
  // Queries after RoPE of the text that was added last, [q_heads, its tokens, head_dim].
  HeadsView<const float> last_text_queries(int layer) const noexcept;

  // Takes the text that was added last off again, and what was observed of it. kInvalidArgument when empty.
  Status Pop();

 private:
  friend class Recorder;
  PromptRecord();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace anchorkv
