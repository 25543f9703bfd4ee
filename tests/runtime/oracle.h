// libllama on the same file in the same process: what our logits are compared with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace anchorkv::test {

// Keeps libllama and ggml from printing; call once per process.
void SilenceLlama();

// Path of a model in the model directory, or "" when it is not there.
std::string ModelPath(const std::string& file);

// The first `tokens` tokens of an English text that every Debian carries (a file of /usr/share/common-licenses), as
// `path` tokenises it. Empty when the text is missing.
std::vector<int32_t> TextTokens(const std::string& path, int tokens, const std::string& text = "GPL-3");

// A copy of `path` with every weight as F32, made from the dequantised weights and kept beside the models.
std::string F32Copy(const std::string& path);

struct OracleOptions {
  bool flash_attention = false;  // libllama's flash attention rounds keys to f16
  bool f16_cache = false;
  int threads = 2;
  int ubatch = 512;  // tokens of a graph; another number brings other orders of summation
};

// Logits of every token, [tokens, vocab]; empty when libllama refuses the file.
std::vector<float> OracleLogits(const std::string& path, const std::vector<int32_t>& tokens,
                                const OracleOptions& options);

// How far logits are from a reference over `rows` rows of `vocab`.
struct Distance {
  double mean_kl = 0.0;  // KL(reference || ours), nats
  double max_difference = 0.0;
  int same_top = 0;  // rows whose largest logit is the same
};
Distance Compare(const std::vector<float>& reference, const std::vector<float>& ours, int vocab);

}  // namespace anchorkv::test
