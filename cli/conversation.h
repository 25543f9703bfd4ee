// Questions and answers over one document: what `run`, `ask` and `compress` share.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cli/generate.h"
#include "cli/run_options.h"
#include "runtime/chat_frame.h"
#include "runtime/engine.h"
#include "store/context.h"

namespace anchorkv::cli {

// Prints "anchorkv: TEXT" on stderr.
void Note(const std::string& text);

// The conversation of one run. Three ways to use a cache:
// - a document, no --chat: the document is prefilled once or read from a file, each question starts from its end again;
// - --chat: everything stays in the cache, turn after turn;
// - no document, or --question-aware: each question gets a cache of its own.
class Conversation {
 public:
  // `document` is the text, empty for none; `info` describes options.model, options.context fits it.
  static Result<std::unique_ptr<Conversation>> Open(const RunOptions& options, const std::string& document,
                                                    const ModelInfo& info);
  // Goes on behind a stored document: its frame, its options (but options.tail_limit) and its cache; no prefill. The
  // fingerprints have been compared.
  static Result<std::unique_ptr<Conversation>> Resume(const RunOptions& options, const StoredContext& context,
                                                      const ModelInfo& info);

  // Prefills the document where it is shared by the questions and not there yet.
  Status Start();
  // The prefilled document, before any question: everything but who wrote it, of which file and for which model. Refers
  // to this conversation's cache.
  Result<StoredContext> Snapshot() const;
  // Answers on stdout and reports on stderr.
  Status Ask(const std::string& question);

  const ByteBill& bill() const { return bill_; }
  const Engine::PrefillTiming& timing() const { return timing_; }

 private:
  explicit Conversation(const RunOptions& options) : options_(options) {}

  Status LoadEngine(const ModelInfo& info);

  bool OwnCachePerQuestion() const { return !options_.chat && (document_.empty() || options_.question_aware); }
  Result<std::vector<float>> PrefillNewCache(std::span<const int32_t> tokens);
  Result<std::vector<float>> ReadQuestion(const std::string& question);
  Result<std::vector<float>> ReadAlone(const std::string& question);
  Status CheckRoom(int64_t prompt_tokens) const;
  void PrintAnswer(const std::string& question, const Generation& generation);

  const RunOptions& options_;
  uint32_t seed_ = 0;
  int64_t context_ = 0;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<KvCache> cache_;
  CacheConfig config_;
  ChatFrame frame_;
  std::vector<int32_t> document_;    // tokens up to the document's last one; empty without a document
  std::vector<int32_t> history_;     // tokens of the cache, for the repeat penalty
  std::optional<int32_t> unstored_;  // last generated token, not in the cache yet (--chat)
  ByteBill bill_;                    // after the latest prefill
  Engine::PrefillTiming timing_;     // of the latest prefill
  double question_s_ = 0;            // the question's own tokens
  int64_t prompt_tokens_ = 0;
};

}  // namespace anchorkv::cli
