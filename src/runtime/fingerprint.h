// Which model a file is, so that what was computed with it is used with it only.
#pragma once

#include <string>

#include "anchorkv/status.h"
#include "store/context.h"

namespace anchorkv {

// Hashes a GGUF model, all parts of a split one. Reads the whole file (the pages that loading the weights needs
// anyhow).
// - `tensors`: every tensor's name, type and shape, sorted by name;
// - `weights`: every tensor's name and bytes, sorted by name;
// - `metadata`: every key that the model or its tokenizer is run by: not general.* (names, links; the architecture does
//   count), split.* and tokenizer.chat_template* (a context keeps the template's texts itself).
// So a model that was split, joined, renamed or given another chat template stays the same model. Errors as of
// ReadModelInfo.
Result<ModelFingerprint> FingerprintModel(const std::string& path);

}  // namespace anchorkv
