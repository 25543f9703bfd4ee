#include "cli/generate.h"

#include <chrono>

#include "cli/interrupt.h"

namespace anchorkv::cli {

Result<Generation> Generate(Engine* engine, KvCache* cache, const Tokenizer& tokenizer, Sampler* sampler,
                            std::vector<float> logits, int64_t limit,
                            const std::function<void(std::string_view)>& on_text) {
  using Clock = std::chrono::steady_clock;
  Generation out;
  Utf8Stream stream;
  const auto emit = [&](const std::string& text) {
    if (text.empty()) return;
    out.text += text;
    on_text(text);
  };
  const Clock::time_point start = Clock::now();
  while (out.tokens < limit && !Interrupted()) {
    const int32_t token = sampler->Sample(logits);
    if (token < 0) return Internal("the model's logits are not finite numbers");
    if (tokenizer.IsEndOfGeneration(token)) break;
    sampler->Accept(token);
    ++out.tokens;
    emit(stream.Push(tokenizer.Piece(token)));
    if (out.tokens == limit) {
      out.unstored = token;
      break;
    }
    AKV_RETURN_IF_ERROR(cache->MaybeCompressTail());
    AKV_RETURN_IF_ERROR(engine->Append(cache, {&token, 1}, &logits));
    ++out.steps;
  }
  out.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  emit(stream.Flush());
  return out;
}

}  // namespace anchorkv::cli
