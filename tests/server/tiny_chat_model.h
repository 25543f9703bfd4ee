// A tiny random model with a tokenizer of single bytes and the chatml template: everything that a server does, in
// milliseconds. What it answers means nothing, but it depends on every token of the prompt.
#pragma once

#include <string>

#include "runtime/tiny_model.h"

namespace anchorkv::test {

inline constexpr int kTinyChatVocab = 260;

// Writes the model and returns its path. poisoned: a token whose embedding is not a number, or -1.
std::string WriteTinyChatModel(const ScratchDirectory& directory, const std::string& stem, int context = 4096,
                               int poisoned = -1);

}  // namespace anchorkv::test
