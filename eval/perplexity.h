// Perplexity and KL over text: the first half of every chunk is compressed, the second half is scored, as
// llama-perplexity does it with an exact cache. docs/evaluation.md, "ppl".
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "anchorkv/status.h"
#include "eval/runner.h"

namespace anchorkv {

struct PerplexityInput {
  std::string name;             // of the text, for the rows
  std::vector<int32_t> tokens;  // chunks x chunk of them
  int64_t chunk = 0;
  int64_t chunks = 0;
  std::string base_path;    // a file of llama-perplexity --kl-divergence-base: reference instead of the full cache
  int64_t base_offset = 0;  // where its log-probabilities begin
};

// The text cut into chunks; max_chunks 0: all whole chunks. kInvalidArgument when it is shorter than one.
Result<PerplexityInput> CutText(const Tokenizer& tokenizer, const std::string& name, const std::string& text,
                                int64_t chunk, int64_t max_chunks);
// Tokens and chunk size of a base file. kDataLoss when it is not one or is cut short; kInvalidArgument when its
// vocabulary is not the model's.
Result<PerplexityInput> ReadBase(const std::string& path, int vocab, int64_t max_chunks);

// One row per chunk and configuration; a table in llama-perplexity's order on standard error at the end.
Status RunPerplexity(Engine* engine, const Tokenizer& tokenizer, const Backend& backend, const RunnerOptions& options,
                     PerplexityInput input, const Runner::Hooks& hooks);

}  // namespace anchorkv
