// A prompt after one dense prefill: every layer's keys and values and what methods asked to observe, kept so that
// many methods and ratios compress the same tensors. A stack of texts: the document, then perhaps a question,
// which can be taken off again. Evaluation only; `run` never holds all layers dense.
#pragma once

#include <cstdint>

#include "anchorkv/status.h"
#include "anchorkv/tensor_view.h"
#include "segment/observations.h"

namespace anchorkv {

class PromptRecord {
 public:
  virtual ~PromptRecord() = default;

  virtual int layers() const noexcept = 0;
  virtual int64_t tokens() const noexcept = 0;  // of all texts
  virtual const Observations& observed() const noexcept = 0;
  virtual int64_t resident_bytes() const noexcept = 0;

  // Brings the rows to where layer() and last_text_queries() show them, for a record that is not in host memory. Needed
  // before those two whenever the record has changed, and when another record of the engine has been read since.
  virtual Status MakeReadable() const { return {}; }
  // Layer input over all texts, as a method is shown it: keys before RoPE, values, the queries of the last
  // `observed().window` positions (fewer when the record is shorter), moments and column sums where observed
  // (no moments before there is a position to take them of). Valid until the record changes. `reconstruction` is
  // null until Engine::ObserveReconstruction has run for the present texts.
  virtual LayerInput layer(int layer) const noexcept = 0;
  // Queries after RoPE of the text that was added last, [q_heads, its tokens, head_dim]; of the first text only
  // those in the window are kept.
  virtual HeadsView<const float> last_text_queries(int layer) const noexcept = 0;

  // Takes the text that was added last off again, and what was observed of it. kInvalidArgument when empty.
  virtual Status Pop() = 0;
};

}  // namespace anchorkv
