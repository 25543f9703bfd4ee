// Documents of one's own with questions beside them: DIR/x.txt and DIR/x.json, a list of objects with
// "question", "answer" (or "answers", all of which count) and optionally "answer_prefix" and "depth", as
// tools/make-document writes them.
#pragma once

#include <string>

#include "anchorkv/status.h"
#include "eval/suites/sample.h"

namespace anchorkv {

// kNotFound, kDataLoss (what is wrong with the questions file).
Result<Sample> ReadDocumentSample(const std::string& path, int index, int max_new_tokens);

}  // namespace anchorkv
