// Generating an answer token by token.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "anchorkv/status.h"
#include "runtime/engine.h"
#include "runtime/text.h"

namespace anchorkv::cli {

struct Generation {
  std::string text;
  int64_t tokens = 0;               // generated, the end-of-generation token not counted
  int64_t steps = 0;                // tokens that went through the model
  double seconds = 0;               // time of those steps
  std::optional<int32_t> unstored;  // the last token when the limit came before it was put into the cache
  double tokens_per_s() const { return seconds > 0 ? static_cast<double>(steps) / seconds : 0; }
};

// Draws tokens from `logits` [vocab] and runs them through the cache until the model ends its turn, `limit`
// tokens are there or the user interrupts. `on_text` gets whole UTF-8 characters as they come. The tail of
// the cache is compressed on the way if the cache is configured so.
Result<Generation> Generate(Engine* engine, KvCache* cache, const Tokenizer& tokenizer, Sampler* sampler,
                            std::vector<float> logits, int64_t limit,
                            const std::function<void(std::string_view)>& on_text);

}  // namespace anchorkv::cli
