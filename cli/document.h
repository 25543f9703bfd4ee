// Reading the document and other user text.
#pragma once

#include <string>
#include <string_view>

#include "anchorkv/status.h"

namespace anchorkv::cli {

// Checks that a text is UTF-8 without NUL bytes and not blank; `what` names it in the message ("document x.txt").
Status CheckText(std::string_view text, const std::string& what);

// The text of a file, or of standard input for "-", without a byte-order mark and without white space at its
// end (the question follows after an empty line). kNotFound, kInvalidArgument (a directory, empty, binary,
// not UTF-8, larger than kMaxDocumentBytes).
Result<std::string> ReadDocument(const std::string& path);
inline constexpr size_t kMaxDocumentBytes = size_t{1} << 30;

// Drops white space at both ends.
std::string Trim(std::string_view text);

}  // namespace anchorkv::cli
